"""Weights copied into slots while they are used: the plain model's numbers, within the budget's bytes."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from lockstep.config import Activation
from lockstep.errors import OffloadError, UsageError
from lockstep.model import find_blocks
from lockstep.offload import Staging
from lockstep.offload.files import OffloadFile
from lockstep.offload.weights import DeviceMover, Streamer, WeightGroup, find_weight_groups, listen
from lockstep.parallel import apply_activation_checkpointing
from tests.offload.weights.device.late import LateCopies
from tests.patching import module_of
from tests.refusals import expect_refusal

CPU = torch.device("cpu")
WIDTH, LENGTH = 16, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.bias


class Net(nn.Module):
    """Token embedding tied to the output; a parameter of its own; blocks."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Normed(nn.Module):
    """Has running statistics, a recurrent and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)
        self.conv = nn.Conv1d(LENGTH, LENGTH, 3, padding=1)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("calls", torch.zeros(3, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[1] += 1
        assert self.lstm._flat_weights[0] is self.lstm.weight_ih_l0
        return x + self.lstm(self.conv(self.norm(x)))[0]


class Eager:
    """Loads a group when it is used and lets all others go before: the least that works."""

    def __init__(self, mover: DeviceMover) -> None:
        self.mover = mover
        self.loads = 0
        mover.request = self.use

    def use(self, group: WeightGroup) -> None:
        for other in self.mover._copies:
            if other is not group:
                self.mover.release(other)
        self.loads += 1
        self.mover.load(group)
        self.mover.bind(group)

    forward_begins = backward_begins = use

    def forward_ended(self, group: WeightGroup) -> None:
        self.mover.release(group)


@contextmanager
def streamed(
    model: nn.Module, way: str = "streamer", budget: int | None = None, **options: Any
) -> Iterator[DeviceMover]:
    groups = find_weight_groups(model, find_blocks(model))
    mover = DeviceMover(groups, CPU, **options)
    sizes = [mover.nbytes(group) for group in groups]
    mover.slots.budget = budget or 3 * max(sizes)
    assert mover.slots.budget < sum(sizes)
    if way == "eager":
        listener: Any = Eager(mover)
    else:
        listener = Streamer(groups, mover, mover.slots.budget, ahead=1)
        mover.request = functools.partial(listener.use, in_backward=True)
    handles = listen(model, groups, [mover, listener])
    host_tensors = {name: id(value) for name, value in model.named_parameters()}
    try:
        yield mover
        assert {name: id(value) for name, value in model.named_parameters()} == host_tensors
        assert 0 < mover.slots.peak_bytes <= mover.slots.budget
    finally:
        handles.remove()
        listener.close() if way == "streamer" else mover.close()
    assert mover.slots.allocated_bytes == 0


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    return F.cross_entropy(model(tokens(seed)).flatten(0, 1), tokens(seed + 1).flatten())


def build(block: Callable[[], nn.Module] = Block) -> Net:
    torch.manual_seed(0)
    return Net(block)


def train(model: nn.Module, steps: int = 2, fused: bool = False, autocast: bool = False) -> dict[str, Any]:
    """Two micro-batches a step, an evaluation between steps."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=0.01,
        fused=fused,
        foreach=False if not fused else None,
    )
    seen: dict[str, Any] = {}
    for step in range(steps):
        for micro in range(2):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = loss_of(model, 10 * step + micro)
            seen[f"loss {step} {micro}"] = loss.detach()
            loss.backward()
        for name, parameter in model.named_parameters():
            seen[f"grad {step} {name}"] = None if parameter.grad is None else parameter.grad.clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen[f"eval {step}"] = model(tokens(99))
        model.train()
    return {**seen, **copy.deepcopy(model.state_dict())}


def assert_same(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert (ours[name] is None) == (value is None), name
        assert value is None or torch.equal(ours[name], value), name


@pytest.mark.parametrize(("pinned", "way"), [(True, "eager"), (False, "streamer"), (True, "streamer")])
def test_training_is_the_plain_one_bit_for_bit_and_whatever_uses_memory_waits_for_the_copies_of_it(
    monkeypatch: pytest.MonkeyPatch, way: str, pinned: bool
) -> None:
    """With copies that are done as late as allowed, from host tensors or from buffers of a few bytes."""
    monkeypatch.setattr(module_of(DeviceMover), "Staging", functools.partial(Staging, nbytes=768))
    made: list[LateCopies] = []

    def copies(device: torch.device) -> LateCopies:
        made.append(LateCopies(pinned))
        return made[-1]

    for block in (Block, Normed, Attending):
        model = build(block)
        model.layers[1].requires_grad_(False)
        plain = train(copy.deepcopy(model))
        with streamed(model, way, copies=copies):
            assert_same(train(model), plain)
    assert all(copies.queue for copies in made)
    other = copy.deepcopy(model)
    assert_same(train(model), train(other))  # plain again


def test_fused_steps_which_leave_no_trace_are_seen() -> None:
    model = build()
    plain = train(copy.deepcopy(model), fused=True)
    with streamed(model):
        assert_same(train(model, fused=True), plain)


@pytest.mark.parametrize(("mode", "way"), [("selective", "eager"), ("full", "streamer")])
def test_recomputed_blocks_train_the_same(way: str, mode: str) -> None:
    for block in (Block, Normed):
        model = build(block)
        plain = train(copy.deepcopy(model))
        apply_activation_checkpointing(model, Activation(mode), find_blocks(model))
        with streamed(model, way):
            assert_same(train(model), plain)


@pytest.mark.parametrize("way", ["eager", "streamer"])
def test_autocast_trains_the_same_and_keeps_no_casts_of_weights(way: str) -> None:
    model = build()
    plain = train(copy.deepcopy(model), autocast=True)
    with streamed(model, way) as mover:
        assert_same(train(model, autocast=True), plain)
        with torch.autocast("cpu", torch.bfloat16):
            first = model(tokens())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)  # a cached cast would hide this
            again = model(tokens())
        doubled = build()
        doubled.load_state_dict(model.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(again, doubled(tokens())) and not torch.equal(first, again)
        del again
        weights = {p.shape for p in model.layers.parameters() if p.dim() == 2}
        weights |= {torch.Size(reversed(shape)) for shape in weights}
        del first, parameter
        gc.collect()
        with torch.autocast("cpu", torch.bfloat16):
            kept = model(tokens())
        casts = [
            t
            for t in gc.get_objects()
            if type(t) is torch.Tensor and t.dtype is torch.bfloat16 and t.shape in weights
        ]
        assert kept.requires_grad and not casts
        del mover


def llama(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, vocab_size=20,
        use_cache=False, **kwargs,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def language_steps(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {}
    for step in range(2):
        output = model(input_ids=tokens(step), labels=tokens(step))
        output.loss.backward()
        seen[f"loss {step}"] = output.loss.detach()
        seen |= {f"grad {step} {name}": p.grad for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    generated = model.generate(tokens(5), max_new_tokens=3, do_sample=False)
    return {**seen, "generated": generated, **model.state_dict()}


@pytest.mark.parametrize(("checkpointing", "tied"), [(False, True), (True, False)])
def test_a_transformers_llama_trains_and_generates_the_same(checkpointing: bool, tied: bool) -> None:
    model, plain = llama(tie_word_embeddings=tied), llama(tie_word_embeddings=tied)
    if checkpointing:
        model.gradient_checkpointing_enable()  # its hooks are within the recomputed part
    with streamed(model.train(), "eager" if tied else "streamer"):
        assert_same(language_steps(model), language_steps(plain.train()))


def test_two_forwards_before_backward_two_backwards_and_hooks_of_parameters() -> None:
    model = build()
    other = copy.deepcopy(model)
    counts = []
    with streamed(model, "eager"):
        for net in (model, other):
            calls: list[Any] = []
            weight = net.layers[2].up.weight
            weight.register_hook(lambda grad: grad * 3)
            weight.register_post_accumulate_grad_hook(
                lambda p, calls=calls, weight=weight: calls.append((p is weight, p.grad.clone()))
            )
            (loss_of(net, 0) + loss_of(net, 1)).backward()
            loss = loss_of(net, 2)
            loss.backward(retain_graph=True)
            loss.backward()
            counts.append(calls)
        assert_same(*({n: p.grad for n, p in net.named_parameters()} for net in (model, other)))
    assert len(counts[0]) == len(counts[1]) == 3
    for ours, plain in zip(*counts, strict=True):
        assert ours[0] and torch.equal(ours[1], plain[1])


def test_weights_may_be_mapped_from_a_file(tmp_path: Any) -> None:
    model = build()
    plain = train(copy.deepcopy(model))
    file = OffloadFile(tmp_path, sum(-(-p.nbytes // 4096) * 4096 for p in model.parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            mapped = file.tensor(file.place(parameter.nbytes), parameter.shape, parameter.dtype)
            parameter.data = mapped.copy_(parameter)
    with streamed(model):
        assert_same(train(model), plain)


def test_inference_reads_what_was_written_between_forwards() -> None:
    model = build().eval()
    other = copy.deepcopy(model)
    with streamed(model) as mover, torch.inference_mode():
        for step in range(3):
            assert torch.equal(model(tokens(step)), other(tokens(step)))
            with torch.inference_mode(False), torch.no_grad():
                for net in (model, other):
                    net.layers[step].up.weight.add_(1)
                    net.layers[3].norm.weight.data = torch.full((WIDTH,), step + 2.0)
                    net.layers[0].norm.weight.data.mul_(2)
                mover.edited([model.layers[0].norm.weight])
    with streamed(model):
        loss_of(model.train(), 0).backward()  # no inference tensors are left


# -- what users hold -------------------------------------------------------------------------------------


def test_a_weight_kept_from_inside_a_forward_never_shows_numbers_of_another_block() -> None:
    model = build()
    kept: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []
    model.layers[0].register_forward_hook(lambda module, *_: kept.append(module.up.weight))
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(kept[0].clone()))
    with streamed(model, "eager"), torch.no_grad():
        own = model.layers[0].up.weight.clone()
        model(tokens())
        weight = kept[0]
        assert weight is not model.layers[0].up.weight and weight.isnan().all()  # let go
        seen.clear()
        model(tokens())
        assert torch.equal(seen[0], own) and all(s.isnan().all() for s in seen[1:])


def test_the_memory_of_a_view_that_somebody_holds_is_not_used_for_another_block() -> None:
    model = build()
    plain = copy.deepcopy(model)
    views: list[torch.Tensor] = []
    handle = model.layers[0].register_forward_hook(
        lambda module, *_: views.append(module.up.weight.detach().t())
    )
    with streamed(model, "eager") as mover, torch.no_grad():
        model(tokens())
        group = next(u for u in mover._copies if u.name == "layers.0")
        assert mover.release(group) is False
        assert torch.equal(model(tokens(1)), plain(tokens(1)))
        assert torch.equal(views[0], plain.layers[0].up.weight.t())
        handle.remove()
        views.clear()
        assert mover.release(group) is True


def test_what_a_forward_replaces_or_writes_is_written_back() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
                self.mean = self.mean * 0.5 + x.mean((0, 1))
                self.count += 1
            return x @ self.weight - self.mean

    model = build(Writing)
    other = copy.deepcopy(model)
    means = [layer.mean for layer in model.layers]
    with streamed(model):
        assert_same(train(model), train(other))
        assert all(layer.mean is mean for layer, mean in zip(model.layers, means, strict=True))
        assert model.layers[0].count == 6 and model.layers[0].mean.abs().sum() > 0


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["eager", "streamer"])
def test_a_weight_that_is_changed_between_forward_and_backward_is_refused_as_torch_does(way: str) -> None:
    for net, context in ((build(), nullcontext()), (build(), None)):
        with streamed(net, way) if context is None else context:
            loss = loss_of(net, 0)
            with torch.no_grad():
                net.layers[1].up.weight.add_(1)
            expect_refusal(RuntimeError, "modified by an inplace operation", loss.backward)


def test_an_activation_that_is_changed_before_backward_is_refused_as_torch_does() -> None:
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            z = super().forward(y)
            y.add_(1)
            return z

    for net, context in ((build(InPlace), nullcontext()), (build(InPlace), None)):
        with streamed(net) if context is None else context:
            expect_refusal(RuntimeError, "modified by an inplace operation", loss_of(net, 0).backward)


def test_a_model_that_is_dropped_is_freed_with_all_that_streamed_it() -> None:
    model = build()
    groups = find_weight_groups(model, find_blocks(model))
    mover = DeviceMover(groups, CPU)
    handles = listen(model, groups, [mover, Eager(mover)])
    train(model, 1)
    references = [weakref.ref(mover), weakref.ref(model)]
    del model, groups, mover, handles
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_failed_forward_or_backward_leaves_a_model_that_works() -> None:
    class Failing(Block):
        where = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.where == "forward":
                raise ValueError("forward")
            y = super().forward(x)
            if self.where == "backward":
                y.register_hook(lambda grad: 1 / 0)
            return y

    model = build(Failing)
    weights = dict(model.named_parameters())
    with streamed(model):
        for where, error in (("forward", ValueError), ("backward", ZeroDivisionError)):
            model.layers[1].where = where
            with pytest.raises(error):
                loss_of(model, 0).backward()
            model.layers[1].where = ""
            assert model.layers[2].up.weight is weights["layers.2.up.weight"]
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            assert torch.is_autocast_cache_enabled()
            model.zero_grad()
            plain = build(Failing)
            assert_same(train(model, 1), train(plain, 1))
            model.load_state_dict(build(Failing).state_dict())


def test_what_cannot_be_streamed_is_refused_and_named() -> None:
    model = build()
    with streamed(model), pytest.raises(UsageError, match=r"'layers\.3"):
        loss_of(model, 0).backward(create_graph=True)
    model.zero_grad()
    with streamed(model):
        weight = model.layers[2].up.weight
        model.layers[2].up.weight = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))
        expect_refusal(UsageError, "'layers.2.up.weight'", model, tokens())
        model.layers[2].up.weight = weight
        loss = loss_of(model, 0)
    expect_refusal(OffloadError, "ended", loss.backward)
    expect_refusal(
        UsageError, "meta", DeviceMover, find_weight_groups(nn.Linear(2, 2, device="meta"), {}), CPU
    )
    sparse = nn.Module()
    sparse.register_buffer("table", torch.eye(2).to_sparse())
    with pytest.raises(UsageError, match="'table'"):
        DeviceMover([WeightGroup("", [sparse], dict(sparse.named_buffers()), 0)], CPU)


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_compute_the_same() -> None:
    model = build()
    plain = train(copy.deepcopy(model), 1)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    with streamed(model, "eager"):
        seen = train(model, 1)
    for name, value in plain.items():
        torch.testing.assert_close(seen[name], value, msg=name)
