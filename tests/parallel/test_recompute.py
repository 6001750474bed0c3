"""Activation checkpointing: the same numbers as plain torch, bytes and operators as the formulas say."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
from collections import Counter, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from lockstep.config import Activation
from lockstep.errors import UsageError
from lockstep.model import find_blocks
from lockstep.offload import HostActivations
from lockstep.parallel import apply_activation_checkpointing
from parallel.live_bytes import LiveBytes
from tests.patching import module_of
from tests.refusals import expect_refusal

NONE, FULL, SELECTIVE, OFFLOAD = Activation.NONE, Activation.FULL, Activation.SELECTIVE, Activation.OFFLOAD
MODES = [FULL, SELECTIVE, OFFLOAD]
WIDTH, HEADS, BATCH, LENGTH = 16, 2, 3, 8
INPUT_BYTES = BATCH * LENGTH * WIDTH * 4


class Block(nn.Module):
    """Attention and MLP; four matrix products and one attention."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.first(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module], calls: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.layers, self.calls = nn.ModuleList(blocks), calls

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.embed(rows)
        for layer in self.layers:
            for _ in range(self.calls):
                x = layer(x)
        return self.head(x)


def net(kind: Callable[[], nn.Module] = Block, calls: int = 1, count: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Net([kind() for _ in range(count)], calls)


def rows(step: int = 0, rank: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(BATCH, LENGTH, 4, generator=generator)


def train(model: nn.Module, steps: int = 2, bf16: bool = False, rank: int = 0) -> dict[str, torch.Tensor]:
    """Losses, gradients of all steps together, and buffers."""
    torch.manual_seed(7)
    seen = {}
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(rows(step, rank)).float().square().mean()
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
    seen["next random number"] = torch.rand(())
    seen.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    seen.update({name: buffer.clone() for name, buffer in model.named_buffers()})
    return seen


def assert_same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == plain.keys()
    different = [name for name in plain if not torch.equal(ours[name], plain[name])]
    assert different == []


def recomputed(model: nn.Module, mode: Activation) -> nn.Module:
    return apply_activation_checkpointing(model, mode, find_blocks(model))


# -- the same numbers ------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Changes running statistics, which batch norm uses in eval mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(LENGTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.instance = nn.InstanceNorm1d(LENGTH, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.instance(self.norm(self.linear(x)))))


class Counting(nn.Module):
    """Its output depends on a buffer that it changes; another buffer it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return self.mask @ torch.tanh(self.linear(x) * self.calls.item() - self.mean)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv1d(LENGTH, LENGTH, 3, padding=1),
            nn.Conv1d(LENGTH, LENGTH, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.second(F.gelu(self.first(x))), 0.2, self.training)


class InPlace(nn.Module):
    """Writes into the results of its products: as a whole, and into parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.activation(self.first(x))).add_(1.0)
        left, right = self.third(hidden).unsafe_chunk(2, -1)
        return x + torch.cat([left.sigmoid_(), right.tanh_()], -1) * hidden


KINDS = [Block, Normed, Counting, InPlace]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_losses_gradients_and_buffers_equal_plain_training_bit_for_bit(
    mode: Activation, kind: Callable[[], nn.Module]
) -> None:
    plain = train(net(kind, calls=2), steps=3)
    assert_same(train(recomputed(net(kind, calls=2), mode), steps=3), plain)


def test_two_forwards_in_one_autocast_region_share_its_cast_weights() -> None:
    def loss_and_gradients(mode: Activation) -> dict[str, torch.Tensor]:
        model = recomputed(net(), mode)
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(rows(0)) + model(rows(1))).float().square().mean()
        loss.backward()
        return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}

    plain = loss_and_gradients(NONE)
    assert_same(loss_and_gradients(FULL), plain)
    # Here selective casts a weight for each use, and sums the gradients of both in fp32 instead of bf16.
    selective = loss_and_gradients(SELECTIVE)
    assert torch.equal(selective["loss"], plain["loss"])
    for name, gradient in plain.items():
        assert (selective[name] - gradient).norm() <= 2**-8 * gradient.norm() + 1e-7


@pytest.mark.parametrize(("mode", "kind"), [(FULL, Normed), (SELECTIVE, Block), (OFFLOAD, Block)])
def test_compiled_blocks_compute_the_same(mode: Activation, kind: Callable[[], nn.Module]) -> None:
    def compiled(mode: Activation) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        model = recomputed(net(kind, count=2), mode)
        for block in model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
        return train(model)

    assert_same(compiled(mode), compiled(NONE))


@pytest.mark.parametrize("mode", MODES)
def test_backward_twice_through_a_kept_graph(mode: Activation) -> None:
    model, plain = recomputed(net(Counting), mode), net(Counting)
    for each in (model, plain):
        loss = each(rows()).square().mean()
        loss.backward(retain_graph=mode is not SELECTIVE)
        if mode is not SELECTIVE:  # torch's selective contexts serve one backward
            loss.backward()
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", MODES)
def test_in_eval_mode_and_without_gradients_a_block_runs_once_and_as_before(mode: Activation) -> None:
    model, plain = recomputed(net(Normed), mode), net(Normed)
    with torch.no_grad():
        assert torch.equal(model(rows()), plain(rows()))
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    model.eval(), plain.eval()
    with OperatorCounter() as counter:
        model(rows()).sum().backward()
    assert counter.counts["addmm"] == 2 + 3 * 2
    plain(rows()).sum().backward()
    assert torch.equal(model.embed.weight.grad, plain.embed.weight.grad)


# -- what blocks take and return -------------------------------------------------------------------------

Pair = namedtuple("Pair", "hidden other")


class Nested(nn.Module):
    """Takes keywords and containers; returns a dict with a tuple, None and a number; appends to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, pair: Pair, options: dict[str, Any], losses: list[torch.Tensor]) -> dict[str, Any]:
        x = F.dropout(torch.tanh(self.linear(pair.hidden)), 0.3) * options["scale"][0] + pair.other
        losses.append(x.square().mean())
        options["count"] += 1
        return {"pair": (self.last(torch.tanh(x)), None), "name": options["name"], "count": options["count"]}


def nested_run(mode: Activation) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = recomputed(nn.ModuleList([Nested(), Nested()]), mode)
    hidden, other = torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    scale = torch.full((1,), 1.5, requires_grad=True)
    losses: list[torch.Tensor] = []
    options = {"scale": [scale], "name": "x", "count": 0}
    for block in model:
        result = block(pair=Pair(hidden, other), options=options, losses=losses)
        hidden = result["pair"][0]
        assert result["pair"][1] is None and result["name"] == "x"
    assert (len(losses), options["count"], result["count"]) == (2, 2, 2)
    (hidden.sum() + sum(losses)).backward()
    assert (len(losses), options["count"]) == (2, 2)  # the recomputation appends and counts elsewhere
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"hidden": hidden.detach(), "other": other.grad, "scale": scale.grad, **gradients}


@pytest.mark.parametrize("mode", MODES)
def test_keywords_containers_and_results_that_are_no_tensors_pass_through(mode: Activation) -> None:
    assert_same(nested_run(mode), nested_run(NONE))


# -- the model stays itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_names_keys_and_classes_stay(mode: Activation) -> None:
    model, plain = net(), net()
    block = model.layers[0]
    assert recomputed(model, mode) is model and model.layers[0] is block
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert isinstance(block, Block) and type(block).__name__ == "Block" and repr(model) == repr(plain)
    assert list(find_blocks(model)) == list(find_blocks(plain))
    model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy])
def test_a_copy_recomputes_with_its_own_modules(mode: Activation, duplicate: Callable[[Any], Any]) -> None:
    block = recomputed(nn.ModuleList([Block(), Block()]), mode)[0]
    copied = duplicate(block)
    copied._modules = copy.deepcopy(block._modules)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2.0)
    x = torch.randn(2, LENGTH, WIDTH)
    with OperatorCounter() as counter:
        copied(x).sum().backward()
    assert counter.counts["addmm"] == (4 if mode is SELECTIVE else 8)
    assert all(p.grad is None for p in block.parameters())
    expected = Block()
    expected.load_state_dict(copied.state_dict())
    torch.manual_seed(3)
    copied.zero_grad()
    copied(x).sum().backward()
    torch.manual_seed(3)
    expected(x).sum().backward()
    for ours, theirs in zip(copied.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("write", ["pickle", "torch.save"])
def test_a_pickled_model_loads_as_the_plain_class(write: str) -> None:
    model = recomputed(net(Normed), FULL)
    train(model)
    if write == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert type(loaded.layers[0]) is Normed and type(model.layers[0]) is not Normed
    assert vars(loaded.layers[0]).keys() == vars(Normed()).keys()
    assert torch.equal(loaded.eval()(rows()), model.eval()(rows()))


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_second_recompute_is_refused(mode: Activation) -> None:
    model = recomputed(net(), mode)
    expect_refusal(UsageError, "already", recomputed, model, FULL)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_without_blocks_is_refused_and_told_to_name_them(mode: Activation) -> None:
    expect_refusal(UsageError, "blocks=", apply_activation_checkpointing, nn.Linear(2, 2), mode, {})


def test_a_block_whose_forward_was_replaced_on_the_object_is_refused_before_anything_changes() -> None:
    model = net()
    model.layers[1].forward = lambda x: x
    expect_refusal(UsageError, "'layers.1'", recomputed, model, FULL)
    assert type(model.layers[0]) is Block


def test_mode_none_changes_nothing() -> None:
    model = net()
    assert (
        apply_activation_checkpointing(model, NONE, find_blocks(model)) is model
        and type(model.layers[0]) is Block
    )
    assert type(apply_activation_checkpointing(nn.Linear(2, 2), NONE, {})) is nn.Linear


# -- counted bytes and operators -------------------------------------------------------------------------


class OperatorCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@functools.cache
def measure(mode: Activation, count: int) -> tuple[int, int]:
    """Bytes kept between forward and backward, and at most, by ``count`` blocks without anything around."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(count)))
    if mode is not NONE:
        recomputed(model, mode)
    outside = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    model(outside * 1.0).sum().backward()  # so that gradients are there and only added to
    gc.collect()
    gc.freeze()  # all that is there by now would be visited again
    try:
        with LiveBytes() as counter:
            for tensor in (outside, *model.parameters(), *(p.grad for p in model.parameters())):
                tensor.detach()  # so that it is seen from the beginning
            del tensor
            always = counter.now()
            loss = model(outside * 1.0).sum()
            gc.collect()
            kept = counter.now() - loss.nbytes
            loss.backward()
    finally:
        gc.unfreeze()
    return kept - always, counter.peak - always


def test_full_keeps_the_inputs_of_the_blocks_and_nothing_else() -> None:
    for count in (2, 5):
        assert measure(FULL, count)[0] == count * INPUT_BYTES
    assert measure(OFFLOAD, 5) == measure(FULL, 5)  # the host is where a CPU's tensors are


def test_selective_keeps_the_inputs_and_the_products() -> None:
    tokens = BATCH * LENGTH
    products = 4 * tokens * (3 * WIDTH + WIDTH + 4 * WIDTH + WIDTH)  # qkv, out, up, down
    attention = 4 * tokens * WIDTH + 4 * tokens * HEADS  # its result, and the log-sum-exp
    for count in (2, 5):
        expected = count * (INPUT_BYTES + products + attention)
        assert measure(SELECTIVE, count)[0] == expected
    assert measure(FULL, 5)[0] < measure(SELECTIVE, 5)[0] < measure(NONE, 5)[0]


def test_the_peak_of_full_grows_by_one_input_a_block_and_that_of_plain_torch_by_a_block() -> None:
    few, many = 3, 9
    growth = {mode: (measure(mode, many)[1] - measure(mode, few)[1]) / (many - few) for mode in (NONE, FULL)}
    kept_by_plain_torch = (measure(NONE, many)[0] - measure(NONE, few)[0]) / (many - few)
    assert growth[FULL] == INPUT_BYTES
    assert growth[NONE] == kept_by_plain_torch > 10 * INPUT_BYTES


def test_full_multiplies_matrices_twice_and_selective_once() -> None:
    counts = {}
    for mode in (NONE, *MODES):
        model = net() if mode is NONE else recomputed(net(), mode)
        with OperatorCounter() as counter:
            model(rows()).sum().backward()
        counts[mode] = counter.counts
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    outside, inside = 2, 3 * 4  # embed and head; four in each of three blocks
    assert counts[NONE]["addmm"] == counts[SELECTIVE]["addmm"] == outside + inside
    assert counts[FULL]["addmm"] == counts[OFFLOAD]["addmm"] == outside + 2 * inside
    assert (counts[NONE][attention], counts[SELECTIVE][attention], counts[FULL][attention]) == (3, 3, 6)
    assert counts[SELECTIVE]["gelu"] == counts[FULL]["gelu"] == 2 * counts[NONE]["gelu"] == 6
    for name in ("mm", "gelu_backward", attention + "_backward"):  # backward itself stays
        assert counts[NONE][name] == counts[FULL][name] == counts[SELECTIVE][name]


def test_convolutions_are_kept_and_not_repeated() -> None:
    for mode, expected in ((NONE, 6), (SELECTIVE, 6), (FULL, 12)):
        with OperatorCounter() as counter:
            recomputed(net(Convolved), mode)(rows()).sum().backward()
        assert counter.counts["convolution"] == expected


def test_attention_with_dropout_is_repeated_so_that_later_random_numbers_stay_the_same() -> None:
    aten = torch.ops.aten
    q = torch.randn(1, 2, 4, 8)
    operators = [
        (aten._scaled_dot_product_flash_attention.default, (q, q, q)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q)),
        (aten._scaled_dot_product_efficient_attention.default, (q, q, q, None, True)),
        (aten._scaled_dot_product_cudnn_attention.default, (q, q, q, None, True)),
    ]
    policy: Any = module_of(apply_activation_checkpointing)._policy
    for operator, args in operators:
        assert policy(None, operator, *args) is CheckpointPolicy.MUST_SAVE
        assert policy(None, operator, *args, 0.0) is CheckpointPolicy.MUST_SAVE
        assert policy(None, operator, *args, 0.1) is CheckpointPolicy.PREFER_RECOMPUTE
        assert policy(None, operator, *args, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE


def test_offload_moves_all_inputs_that_need_a_gradient_and_brings_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With arrays of numpy in the place of pinned memory, since nothing here is on an accelerator."""
    plain, away = nested_run(NONE), []

    def pack(tensor: torch.Tensor) -> Any:
        if not tensor.requires_grad:
            return tensor
        away.append(tensor.shape)
        return tensor.detach().numpy().copy()

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed)

    hooks = torch.autograd.graph.saved_tensors_hooks
    monkeypatch.setattr(
        module_of(apply_activation_checkpointing), "HostActivations", lambda: hooks(pack, unpack)
    )
    assert_same(nested_run(OFFLOAD), plain)
    # Of the first block: pair.other and the scale (its hidden needs no gradient); of the second also the hidden
    # state and the loss in the list.
    hidden, scale, loss = torch.Size([2, LENGTH, WIDTH]), torch.Size([1]), torch.Size([])
    assert Counter(away) == {hidden: 3, scale: 2, loss: 1}


def test_offload_leaves_tensors_of_the_cpu_and_those_without_gradient_where_they_are() -> None:
    hooks = HostActivations()
    mask = torch.ones(2, device="meta")  # as on an accelerator
    for tensor in (torch.ones(2, requires_grad=True), mask):
        assert hooks.pack_hook(tensor) is tensor and hooks.unpack_hook(tensor) is tensor


# -- spread over processes -------------------------------------------------------------------------------


def sharded(mode: Activation, compiled_bf16: bool = False) -> tuple[dict[str, Any], int, int]:
    """Results, all-gathers and reduce-scatters of two steps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if compiled_bf16 else MixedPrecisionPolicy()
    model = recomputed(net(), mode)
    for block in model.layers:
        if compiled_bf16:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    with OperatorCounter() if not compiled_bf16 else nullcontext() as counter:
        seen = train(model, rank=dist.get_rank())
    counts = counter.counts if counter is not None else Counter()
    seen = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in seen.items()}
    return seen, counts["_allgather_base_"], counts["_reduce_scatter_base_"]


def sharded_modes(compiled_bf16: bool) -> list[tuple[dict[str, Any], int, int]]:
    return [sharded(mode, compiled_bf16) for mode in ((NONE, FULL) if compiled_bf16 else (NONE, *MODES))]


def test_sharded_blocks_compute_the_same_and_gather_no_more_than_without(
    run_distributed: Callable[..., Any],
) -> None:
    for plain, *others in run_distributed(sharded_modes, 2, False):
        # Per step: the root once, each block in forward and again in backward.
        assert plain[1] == 2 * (1 + 2 * 3) and plain[2] == 2 * (1 + 3)
        for other in others:
            assert_same(other[0], plain[0])
            assert other[1:] == plain[1:]


def test_sharded_compiled_blocks_in_bf16_compute_the_same(run_distributed: Callable[..., Any]) -> None:
    for plain, *others in run_distributed(sharded_modes, 2, True, timeout_s=120):
        for other in others:
            assert_same(other[0], plain[0])


# -- transformers ----------------------------------------------------------------------------------------


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=20,
        attention_dropout=0.1, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2, vocab_size=20, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def language_step(model: Any, mode: Activation) -> dict[str, torch.Tensor]:
    recomputed(model, mode).train()
    torch.manual_seed(7)
    tokens = torch.arange(12).view(2, 6)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize(("mode", "build"), [(FULL, llama), (SELECTIVE, t5), (OFFLOAD, llama)])
def test_transformers_models_train_the_same_with_their_cache_off(
    mode: Activation, build: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = build(), build()
    caplog.set_level("INFO")
    assert_same(language_step(model, mode), language_step(plain, NONE))
    assert plain.config.use_cache is True and model.config.use_cache is False
    assert "use_cache" in caplog.text
    assert model.is_gradient_checkpointing is (mode is FULL)
    model.eval()
    assert model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=3).numel() > 2


def test_blocks_other_than_the_models_own_layers_are_recomputed_as_asked() -> None:
    model = llama()
    apply_activation_checkpointing(model, FULL, find_blocks(model, ("model.layers.0",)))
    assert model.is_gradient_checkpointing is False
    with OperatorCounter() as counter:
        ours = language_step(model, NONE)
    assert_same(ours, language_step(llama(), NONE))
    assert counter.counts["silu"] == 3


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_was_told_to_checkpoint_itself_is_not_told_again(mode: Activation) -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    expect_refusal(UsageError, "gradient_checkpointing_enable", recomputed, model, mode)
