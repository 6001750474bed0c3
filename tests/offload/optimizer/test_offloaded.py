"""The step in the background: the same numbers to the last bit as the same optimizer left alone."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import OffloadError, UsageError
from lockstep.offload import Copies
from lockstep.offload.files import ALIGNMENT, OffloadFile, region_of
from lockstep.offload.optimizer import GradientFile, OffloadedStep, offload_step
from lockstep.offload.weights import WeightGroup
from tests.refusals import expect_refusal

Make = Callable[[list[Any]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "adamw-foreach-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True, amsgrad=True),
    "adam-maximize-tensor-lr": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.02), maximize=True, weight_decay=0.1
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Model(nn.Module):
    """Three blocks between an embedding and a head that share their weight."""

    def __init__(self, width: int = 35, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks: Any = nn.ModuleList(Block(width) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((width,), 0.5), requires_grad=False)
        self.head = nn.Linear(width, 11)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.frozen
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def groups_of(model: Model) -> list[WeightGroup]:
    """The shared weight, the blocks, and the head's bias."""
    parts: list[tuple[str, list[nn.Module], dict[str, torch.Tensor]]] = [
        ("embedding", [model.embedding, model.head], {"weight": model.embedding.weight}),
        *[(f"blocks.{i}", [block], dict(block.named_parameters())) for i, block in enumerate(model.blocks)],
        ("head", [model.head], {"bias": model.head.bias}),
    ]
    return [
        WeightGroup(name, modules, tensors, sum(t.numel() * t.element_size() for t in tensors.values()))
        for name, modules, tensors in parts
    ]


def announce(groups: list[WeightGroup], step: OffloadedStep) -> None:
    """Forward hooks by torch alone."""
    for group in groups:
        for module in group.modules:
            module.register_forward_pre_hook(lambda *_, group=group: step.forward_begins(group))


def parameter_groups(model: Model) -> list[dict[str, Any]]:
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": biases, "lr": 0.005}]


def batches(count: int = 5) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randint(0, 11, (4, 6), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    make: Make,
    offload: Callable[[Optimizer, list[WeightGroup]], OffloadedStep] | None,
    set_to_none: bool = True,
    dtype: torch.dtype = torch.float32,
    load_at: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Everything after five steps: parameters, the optimizer's state_dict, losses."""
    torch.manual_seed(0)
    model = Model(dtype=dtype)
    optimizer = make(parameter_groups(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    step = None
    if offload is not None:
        groups = groups_of(model)
        step = offload(optimizer, groups)
        announce(groups, step)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a scheduler's that the optimizer did not step
        for index, tokens in enumerate(batches()):
            if index == load_at:
                kept = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(kept)
            loss = loss_of(model, tokens)
            loss.backward()
            model.blocks[1].linear.weight.grad.mul_(0.5)
            if index == 1:
                model.blocks[2].norm.bias.grad = None
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none)
            losses.append(loss.item())
    result = copy.deepcopy((model.state_dict(), optimizer.state_dict(), losses))
    if step is not None:
        step.close()
    return result


def assert_same(one: Any, other: Any) -> None:
    """To the last bit, with the same keys in the same order."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("name", "place"), [(name, ("ram", "disk")[i % 2]) for i, name in enumerate(OPTIMIZERS)]
)
def test_training_is_the_same_to_the_last_bit(name: str, place: str, tmp_path: Path) -> None:
    folder = tmp_path if place == "disk" else None
    set_to_none = list(OPTIMIZERS).index(name) % 4 < 2
    plain = train(OPTIMIZERS[name], None, set_to_none, load_at=3)
    ours = train(OPTIMIZERS[name], lambda o, groups: offload_step(o, groups, folder), set_to_none, load_at=3)
    assert_same(plain, ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    def make(p: list[Any]) -> Optimizer:
        return torch.optim.AdamW(p, lr=0.02, eps=1e-3)

    plain = train(make, None, dtype=dtype)
    assert_same(plain, train(make, lambda o, groups: offload_step(o, groups, tmp_path), dtype=dtype))


def test_complex_parameters_and_other_memory_orders(tmp_path: Path) -> None:
    def run(offloaded: bool) -> Any:
        torch.manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(40, dtype=torch.complex64)),
            nn.Parameter(torch.randn(30, 50).t()),
            nn.Parameter(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(())),
            nn.Parameter(torch.empty(0, 4)),
        ]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        group = WeightGroup("all", [], {str(i): p for i, p in enumerate(parameters)}, 0)
        step = offload_step(optimizer, [group], tmp_path) if offloaded else None
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
        if step is not None:
            step.finish()
        return copy.deepcopy(([p.detach() for p in parameters], optimizer.state_dict()))

    assert_same(run(False), run(True))


def test_step_returns_before_it_is_made_and_the_forward_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    groups = groups_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = offload_step(optimizer, groups)
    loss_of(model, next(batches())).backward()
    before = copy.deepcopy(model.blocks[2].state_dict())
    gate = threading.Event()
    compute = step._threads._compute

    def held_up(run: Any, item: Any, buffer: torch.Tensor) -> None:
        if item.name == "blocks.2":
            assert gate.wait(20)
        compute(run, item, buffer)

    monkeypatch.setattr(step._threads, "_compute", held_up)
    optimizer.step()
    step.forward_begins(groups[2])  # blocks.1, which comes before
    assert torch.equal(model.blocks[2].linear.weight, before["linear.weight"])
    threading.Timer(0.2, gate.set).start()
    step.forward_begins(groups[3])
    assert gate.is_set()
    expected = before["linear.weight"] - model.blocks[2].linear.weight.grad
    assert torch.equal(model.blocks[2].linear.weight, expected)
    optimizer.zero_grad()
    del before
    step.close()
    assert type(optimizer) is torch.optim.SGD


def moved_bytes(
    model: Model, optimizer: torch.optim.Optimizer, step: OffloadedStep
) -> tuple[list[nn.Parameter], int, list[tuple[int, int]]]:
    """The parameters that are stepped, the bytes in a file of one value of each, and (read, written) after a step."""
    stepped = [p for p in model.parameters() if p.requires_grad and p is not model.unused]
    padded = sum(-(-p.numel() * 4 // ALIGNMENT) * ALIGNMENT for p in stepped)
    moved = []
    for tokens in batches(3):
        loss_of(model, tokens).backward()
        optimizer.step()
        step.finish()
        moved.append((step.bytes_read, step.bytes_written))
    return stepped, padded, moved


def test_state_on_disk_moves_the_bytes_of_the_formula(tmp_path: Path) -> None:
    model = Model(width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = offload_step(optimizer, groups_of(model), tmp_path)
    stepped, padded, moved = moved_bytes(model, optimizer, step)
    assert moved == [(0, 2 * padded), (2 * padded, 4 * padded), (4 * padded, 6 * padded)]
    for p in stepped:
        state = optimizer.state[p]
        assert region_of(state["exp_avg"]) and region_of(state["exp_avg_sq"]) and not region_of(state["step"])


@pytest.mark.parametrize("pages", ["there", "gone"])
def test_parameters_in_a_file_are_read_and_written_with_their_state(pages: str, tmp_path: Path) -> None:
    """If their pages are in memory, they are stepped there and not read."""

    def run(offloaded: bool) -> Any:
        torch.manual_seed(0)
        model = Model(width=64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        files = []
        if offloaded:
            groups = groups_of(model)
            file = OffloadFile(tmp_path, 100 * ALIGNMENT)
            for parameter in model.parameters():
                mapped = file.tensor(file.place(parameter.numel() * 4), parameter.shape, torch.float32)
                parameter.data = mapped.copy_(parameter.data)
            step = offload_step(optimizer, groups, tmp_path)
            announce(groups, step)
            files = [file]
        for tokens in batches(3):
            loss_of(model, tokens).backward()
            for file in files:
                if pages == "gone":
                    file.drop(0, file.nbytes)
            optimizer.step()
            if offloaded:
                step.finish()  # a forward would bring pages of others, too
            optimizer.zero_grad()
        result = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        stepped = [p for p in model.parameters() if p.requires_grad and p is not model.unused]
        padded = sum(-(-p.numel() * 4 // ALIGNMENT) * ALIGNMENT for p in stepped)
        for file in files:
            assert (file.bytes_read, file.bytes_written) == (3 * padded * (pages == "gone"), 3 * padded)
        return result

    assert_same(run(False), run(True))


def assert_same_with_offload(
    script: Callable[[Model, Any], Any],
    folder: Path | None = None,
    make: Callable[[Any], Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.1),
    width: int = 35,
    copies: Copies | None = None,
    announced: bool = True,
) -> None:
    """``script(model, optimizer)`` returns the same with its step in the background as without, and so do states."""
    results = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = Model(width)
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        if offloaded:
            groups = groups_of(model)
            step = offload_step(optimizer, groups, folder, copies=copies)
            announce(groups if announced else [], step)
        result = script(model, optimizer)
        results.append(copy.deepcopy((result, model.state_dict(), optimizer.state_dict())))
    assert_same(*results)


@pytest.mark.parametrize(("fused", "clips"), [(False, True), (True, False)])
def test_a_loss_scaler_skips_and_unscales_as_before(fused: bool, clips: bool, tmp_path: Path) -> None:
    def script(model: Model, optimizer: Any) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1)
        for index, tokens in enumerate(batches()):
            scaler.scale(loss_of(model, tokens)).backward()
            if index == 2:
                model.blocks[0].linear.bias.grad.fill_(float("inf"))
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale()

    assert_same_with_offload(script, tmp_path, lambda p: torch.optim.AdamW(p, lr=0.1, fused=fused))


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.Adam(p, lr=0.1), lambda p: torch.optim.LBFGS(p, max_iter=3)]
)
def test_a_closure_is_called_before_the_step_or_by_it(make: Callable[[Any], Optimizer]) -> None:
    def script(model: Model, optimizer: Any) -> float:
        for tokens in batches(3):

            def closure(tokens: torch.Tensor = tokens) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, tokens)
                loss.backward()
                return loss

            last = optimizer.step(closure)
        return last.item()

    assert_same_with_offload(script, make=make)


def test_an_optimizer_that_looks_at_all_parameters_has_no_state_on_disk(tmp_path: Path) -> None:
    optimizer = torch.optim.LBFGS(Model().parameters())
    expect_refusal(UsageError, "LBFGS", offload_step, optimizer, [], tmp_path)
    assert type(optimizer) is torch.optim.LBFGS
    assert not offload_step(optimizer, []).is_blockwise


def test_hooks_run_once_and_see_the_finished_step() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = offload_step(optimizer, groups_of(model))
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append(model.blocks[2].linear.weight.detach().clone()))
    loss_of(model, next(batches())).backward()
    expected = model.blocks[2].linear.weight.detach() - model.blocks[2].linear.weight.grad
    optimizer.step()
    assert seen[0] == "before" and torch.equal(seen[1], expected) and len(seen) == 2
    step.close()


def test_what_reads_or_copies_the_model_waits_for_the_step(tmp_path: Path) -> None:
    def script(model: Model, optimizer: Any) -> Any:
        loss_of(model, next(batches())).backward()
        optimizer.step()
        first = copy.deepcopy(model.state_dict())
        loss_of(model, next(batches())).backward()
        optimizer.step()
        second = copy.deepcopy(optimizer.state[model.blocks[2].linear.weight])
        model.load_state_dict(first)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        return first, second, copied.state_dict()

    assert_same_with_offload(script, tmp_path, width=256, announced=False)


def test_a_group_that_is_added_later_is_stepped(tmp_path: Path) -> None:
    def script(model: Model, optimizer: Any) -> Any:
        other = nn.Linear(35, 35)
        optimizer.add_param_group({"params": list(other.parameters()), "lr": 0.5})
        for tokens in batches(3):
            loss = loss_of(model, tokens) + other(torch.ones(2, 35)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return copy.deepcopy(other.state_dict())

    assert_same_with_offload(script, tmp_path)


def test_state_dicts_fit_in_both_directions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, ours = Model(), Model()
    ours.load_state_dict(plain.state_dict())
    one, other = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(ours.parameters())
    step = offload_step(other, groups := groups_of(ours), tmp_path)
    announce(groups, step)
    for index, tokens in enumerate(batches(4)):
        for model, optimizer in ((plain, one), (ours, other)):
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        if index == 1:
            mine = one.state_dict()
            torch.save(other.state_dict(), tmp_path / "theirs.pt")
            other.load_state_dict(mine)
            one.load_state_dict(torch.load(tmp_path / "theirs.pt"))
            assert region_of(other.state[ours.head.bias]["exp_avg"])
    assert_same(copy.deepcopy(plain.state_dict()), copy.deepcopy(ours.state_dict()))
    step.close()
    assert type(other) is torch.optim.AdamW
    loss_of(ours, next(batches())).backward()
    other.step()  # with its state where it was


def test_states_may_change_places(tmp_path: Path) -> None:
    first, second = (nn.Parameter(torch.full((2000,), value)) for value in (1.0, 2.0))
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
    offload_step(optimizer, [], tmp_path)
    first.grad, second.grad = torch.full((2000,), 3.0), torch.full((2000,), 4.0)
    optimizer.step()
    states = optimizer.state_dict()
    optimizer.load_state_dict({**states, "state": {0: states["state"][1], 1: states["state"][0]}})
    assert [optimizer.state[p]["momentum_buffer"].mean() for p in (first, second)] == [4.0, 3.0]
    assert region_of(optimizer.state[first]["momentum_buffer"])


def test_nothing_stays_behind_when_all_is_dropped(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    gradients = GradientFile(model.parameters(), tmp_path)
    step = offload_step(optimizer, groups_of(model), tmp_path, copies=Copies(torch.device("cpu")))
    loss_of(model, next(batches())).backward()
    optimizer.step()
    step.finish()
    step._threads._steps.submit(bool).result()  # the thread has left the step
    left = [weakref.ref(thing) for thing in (model, optimizer, step, gradients, model.head.bias)]
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("lockstep-step")}
    assert threads
    del model, optimizer, step, gradients
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_sparse_gradients_and_copies_are_refused() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    offload_step(optimizer, [])
    table(torch.tensor([1])).sum().backward()
    expect_refusal(UsageError, "sparse gradient", optimizer.step)
    expect_refusal(UsageError, "copied or pickled", copy.deepcopy, optimizer)
    expect_refusal(UsageError, "copied or pickled", pickle.dumps, optimizer)
    expect_refusal(UsageError, "offloaded already", offload_step, optimizer, [])
    replaced = torch.optim.SGD(table.parameters(), lr=1.0)
    replaced.step = lambda: None  # type: ignore[method-assign,assignment,misc]
    expect_refusal(UsageError, "was replaced by", offload_step, replaced, [])


def test_a_step_between_forward_and_backward_is_noticed_as_without_offload() -> None:
    model = Model()
    offload_step(optimizer := torch.optim.SGD(model.parameters(), lr=1.0), groups_of(model))
    loss_of(model, next(batches())).backward()
    late = loss_of(model, next(batches()))
    optimizer.step()
    expect_refusal(RuntimeError, "inplace operation", late.backward)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_in_the_middle_is_told_of_once_and_then_nothing_is_stepped(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    groups = groups_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = offload_step(optimizer, groups, tmp_path)
    loss_of(model, next(batches())).backward()
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    last = [p.detach().clone() for p in model.blocks[2].parameters()]
    calls = []

    def third_fails(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) >= 3:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    real = getattr(os, call)
    monkeypatch.setattr(os, call, third_fails)
    optimizer.step()
    step.forward_begins(groups[0])  # was stepped
    with pytest.raises(OffloadError, match="half done.* of 5 .*Input/output error"):
        for group in groups:
            step.forward_begins(group)
        step.finish()  # state is written after new parameters are shown
    monkeypatch.undo()
    for group in groups:
        step.forward_begins(group)
    if call == "preadv":  # which comes before what follows is computed
        assert_same(last, [p.detach() for p in model.blocks[2].parameters()])
    for use in (optimizer.step, optimizer.state_dict):
        expect_refusal(OffloadError, "half done", use)
    model.load_state_dict(saved[0])
    expect_refusal(
        ValueError, "parameter groups", optimizer.load_state_dict, {**saved[1], "param_groups": []}
    )
    expect_refusal(OffloadError, "half done", optimizer.step)
    optimizer.load_state_dict(saved[1])
    assert_same(saved, copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    optimizer.step()
    step.close()


def test_gradients_that_change_under_the_step_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = offload_step(optimizer, groups_of(model))
    loss_of(model, next(batches())).backward()
    gate = threading.Event()
    compute = step._threads._compute
    monkeypatch.setattr(step._threads, "_compute", lambda *args: (gate.wait(20), compute(*args)))
    optimizer.step()
    model.zero_grad(set_to_none=False)
    gate.set()
    expect_refusal(OffloadError, "was written to", step.finish)


def sharded_groups(model: Model) -> list[WeightGroup]:
    """What fully_shard gathers together: all that is outside of blocks when the root's forward begins."""
    rest: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if not n.startswith("blocks")}
    blocks = [
        WeightGroup(f"blocks.{i}", [block], {**dict(block.named_parameters())}, 0)
        for i, block in enumerate(model.blocks)
    ]
    return [WeightGroup("", [model], rest, 0), *blocks]


def train_sharded(offloaded: bool, name: str, folder: str | None, in_file: bool = False) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    if offloaded:
        groups = sharded_groups(model)
        if in_file:
            GradientFile(model.parameters(), Path(str(folder)))
        step = offload_step(optimizer, groups, Path(folder) if folder is not None else None)
        for group in groups:
            for module in group.modules:
                module.register_forward_pre_hook(
                    lambda *_, group=group: step.forward_begins(group), prepend=True
                )
    kept: Any = None
    for index, tokens in enumerate(batches()):
        for _ in range(2):
            loss_of(model, tokens).backward()
        for gradient in (p.grad.to_local() for p in model.parameters() if p.grad is not None):
            assert not (offloaded and in_file and gradient.numel()) or region_of(gradient)
        optimizer.step()
        optimizer.zero_grad()
        if index == 2:
            kept = optimizer.state_dict()
            optimizer.load_state_dict(kept)
    state = optimizer.state[model.blocks[0].linear.weight]
    return (
        [p.detach().to_local().clone() for p in model.parameters()],  # type: ignore[attr-defined]
        {
            key: (type(v).__name__, v.to_local().clone() if hasattr(v, "to_local") else v)
            for key, v in state.items()
        },
    )


def compare_sharded(folder: str) -> None:
    for name, place in {"adamw": folder, "sgd-nesterov": None, "adamw-fused": folder}.items():
        plain = train_sharded(False, name, None)
        assert_same(plain, train_sharded(True, name, place, in_file=name == "adamw"))
    with pytest.raises(UsageError, match="Adafactor needs whole parameters"):
        train_sharded(True, "adafactor", folder)


def test_shards_are_stepped_where_they_are_with_gradients_in_memory_or_in_a_file(
    run_distributed: Any, tmp_path: Path
) -> None:
    run_distributed(compare_sharded, 2, str(tmp_path))


def state_files_read(step: OffloadedStep) -> int:
    step._threads._reads.submit(bool).result()  # the thread has read what it was to read
    return step.bytes_read


CHANGES_OF_STATE: dict[str, Callable[[Any, Any], object]] = {
    "nothing": lambda optimizer, kept: None,
    "in place": lambda optimizer, kept: kept.mul_(0.5),
    "without a version": lambda optimizer, kept: kept.data.mul_(0.5),
    "another tensor": lambda optimizer, kept: optimizer.state[optimizer.param_groups[0]["params"][0]].update(
        exp_avg=kept.clone() * 0.5
    ),
    "loaded": lambda optimizer, kept: optimizer.load_state_dict(halved(optimizer.state_dict())),
}


def halved(state: Any) -> Any:
    for own in state["state"].values():
        own["exp_avg"] = own["exp_avg"] * 0.5
    return state


@pytest.mark.parametrize("change", CHANGES_OF_STATE)
def test_state_of_the_first_groups_is_read_during_backward_and_again_if_it_was_changed(
    change: str, tmp_path: Path
) -> None:
    def run(offloaded: bool) -> Any:
        torch.manual_seed(0)
        model = Model(width=64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        groups = groups_of(model)
        step = offload_step(optimizer, groups, tmp_path) if offloaded else None
        first = model.embedding.weight
        room = [sum(-(-tensor.numel() // 1024) * 2 * 4096 for tensor in u.tensors.values()) for u in groups]
        for index, tokens in enumerate(batches(6)):
            loss_of(model, tokens).backward()
            before = 0
            if step is not None and index:
                before = state_files_read(step)
                for group in reversed(groups):
                    step.backward_begins(group)
                assert state_files_read(step) - before == sum(room[:3])
            if index == 1:
                kept = optimizer.state[first]["exp_avg"]
            if index == 3:
                CHANGES_OF_STATE[change](optimizer, kept)
            optimizer.step()
            if step is not None:
                step.finish()
                again = step.bytes_read - before - sum(room) * bool(index)
                assert (again == 0) == (change == "nothing" or index != 3)
            optimizer.zero_grad()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    if not OffloadFile(tmp_path, 1).is_direct:
        pytest.skip("this file system does not read past the page cache")
    assert_same(run(False), run(True))
