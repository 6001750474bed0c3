"""Kinds of models, calls and modes with a split sequence, each against the same model in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lockstep.model import find_blocks
from lockstep.parallel.context import context_parallel, regions_of
from lockstep.runtime import start_runtime
from tests.parallel.split_problem import LENGTH, VOCABULARY, make_batches, make_llama

WIDTH = 16


def splits(model: nn.Module, method: str) -> nn.Module:
    """A copy of ``model`` that is context parallel over all ranks."""
    torch.set_num_threads(1)
    start_runtime(cpu=True)
    model = copy.deepcopy(model)
    context_parallel(model, find_blocks(model), init_device_mesh("cpu", (dist.get_world_size(),)), method)
    return model


def gradients_of(loss: Tensor, model: nn.Module, average: bool) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for gradient in found.values() if average else ():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return found


def assert_same(
    plain: nn.Module, split: nn.Module, call: Callable[[nn.Module], Tensor], tolerance: float = 1e-5
) -> None:
    """Outputs, and gradients of a loss that weights every output differently."""
    outputs = [call(plain), call(split)]
    assert outputs[0].shape == outputs[1].shape
    assert (outputs[1] - outputs[0]).norm() < tolerance * outputs[0].norm()
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(3))
    expected = gradients_of((outputs[0] * weights).mean(), plain, average=False)
    found = gradients_of((outputs[1] * weights).mean(), split, average=True)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm().clamp_min(1e-9), name


# -- torch's own layers ----------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` behind an embedding, and a head that looks at the first position alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, **masks: Any) -> Tensor:
        x = self.encoder(self.embed(tokens), **masks)
        return self.head(torch.cat([x[:, :1], x[:, 1:] * 0.5], 1))


def encoders_agree(method: str) -> None:
    torch.manual_seed(0)
    plain = Encoder()
    split = splits(plain, method)
    tokens = make_batches(1, rows=3)[0]
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    padding = torch.arange(LENGTH)[None] >= torch.tensor([[LENGTH], [12], [7]])
    masks: list[dict[str, Any]] = [{}, {"mask": causal, "is_causal": True}]
    if method == "ulysses":
        heads = torch.randn(3 * 4, LENGTH, LENGTH)
        masks += [{"mask": causal, "src_key_padding_mask": padding}, {"mask": heads}]
        masks += [{"src_key_padding_mask": padding}, {"mask": causal < 0}]
    for given in masks:
        assert_same(plain, split, lambda model, given=given: model(tokens, **given))
    plain.eval(), split.eval()
    with torch.no_grad():  # where torch has a fast path without attention in Python
        assert torch.allclose(plain(tokens), split(tokens), atol=1e-5)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_torchs_encoder(run_distributed: Callable[..., list[Any]], method: str) -> None:
    run_distributed(encoders_agree, 2, method)


# -- arguments, precision, checkpointing of the user's own ------------------------------------------------------


# -- several chains of blocks ------------------------------------------------------------------------------------


def attended(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2)


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + attended(q, k, v, is_causal=True)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.q, self.kv = Attend(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.own(x)
        k, v = self.kv(memory).chunk(2, -1)
        return x + attended(self.q(x), k, v)


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class TakingTurns(nn.Module):
    """Two lists of blocks; ``feedforward_first``: the one that was defined last is called first."""

    def __init__(self, feedforward_first: bool, checkpointed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attentions = nn.ModuleList(Attend() for _ in range(3))
        self.feedforwards = nn.ModuleList(Feedforward() for _ in range(3))
        self.feedforward_first, self.checkpointed = feedforward_first, checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for pair in zip(self.attentions, self.feedforwards, strict=True):
            for block in reversed(pair) if self.feedforward_first else pair:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class EncoderDecoder(nn.Module):
    """``target`` positions of the second sequence."""

    def __init__(self, target: int) -> None:
        super().__init__()
        self.embed, self.target = nn.Embedding(VOCABULARY, WIDTH), target
        self.encoder = nn.ModuleList(Attend() for _ in range(2))
        self.decoder = nn.ModuleList(Cross() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.embed(tokens)
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(tokens[:, : self.target]) + memory.mean(1, keepdim=True)
        for block in self.decoder:
            x = block(x, memory)
        return x


def chains_agree(method: str) -> None:
    models: list[nn.Module] = [
        TakingTurns(first, checkpointed) for first in (False, True) for checkpointed in (False, True)
    ]
    models += [EncoderDecoder(target) for target in (LENGTH, LENGTH // 2, 12, 10)]
    tokens = make_batches(1, rows=2)[0]
    for plain in models:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        start_runtime(cpu=True)
        for parameter in plain.parameters():
            dist.broadcast(parameter.data, 0)
        split = splits(plain, method)
        for _ in range(2):  # again, once the first forward and backward have been
            assert_same(plain, split, lambda model: model(tokens), tolerance=2e-5)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_blocks_that_take_turns_and_encoders_with_decoders(
    run_distributed: Callable[..., list[Any]], method: str
) -> None:
    run_distributed(chains_agree, 2, method)


# -- without gradients; copies ----------------------------------------------------------------------------------


def calls_without_gradients(method: str) -> None:
    plain = make_llama(2).eval()
    split: Any = splits(plain, method).eval()
    tokens = make_batches(1, rows=2)[0]
    with torch.no_grad():
        for length in (LENGTH, LENGTH - 1, 1):  # those that cannot be split run whole
            actual, expected = split(tokens[:, :length]).logits, plain(tokens[:, :length]).logits
            assert torch.allclose(actual, expected, atol=1e-5), length
        for use_cache in (True, False):
            made = [
                m.generate(tokens[:, :8], max_new_tokens=4, do_sample=False, use_cache=use_cache)
                for m in (split, plain)
            ]
            assert torch.equal(*made)
    copied = copy.deepcopy(split)  # an average of weights, say
    assert_same(plain, copied, lambda model: model(tokens).logits)
    loaded = pickle.loads(pickle.dumps(split.model.layers[0]))
    assert not regions_of(loaded) and type(loaded).__name__ == "LlamaDecoderLayer"
    assert list(split.state_dict()) == list(plain.state_dict())


def test_evaluation_generation_and_copies(run_distributed: Callable[..., list[Any]]) -> None:
    run_distributed(calls_without_gradients, 2, "ring")


# -- memory -----------------------------------------------------------------------------------------------------


def saved_bytes(method: str) -> tuple[int, int]:
    """Bytes of tensors with activations that autograd keeps in the blocks: of the whole model, and of the split one."""
    sizes = []
    plain = make_llama(2)
    split = splits(plain, method)
    for model in (plain, split):
        storages: dict[int, int] = {}
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(
            tensor: Tensor, storages: dict[int, int] = storages, parameters: set[int] = parameters
        ) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        outputs = model.model(make_batches(1)[0])  # type: ignore[operator]
        del outputs
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = model.model(make_batches(1)[0])  # type: ignore[operator]
        sizes.append(sum(storages.values()))
        del outputs
    return sizes[0], sizes[1]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_each_rank_keeps_its_part_of_the_activations(
    run_distributed: Callable[..., list[Any]], method: str
) -> None:
    for whole, part in run_distributed(saved_bytes, 2, method):
        assert whole / 2 * 0.9 < part < whole / 2 * 1.15
