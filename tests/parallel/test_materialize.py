"""Models built on the meta device: their values, and how much of them a rank ever holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel import zero_problem as problem
from parallel.live_bytes import LiveBytes
from parallel.plain import full
from parallel.small_groups import groups_in_stage_3

FORMS = ("zero=1", "zero=3", "ddp")


class Wide(nn.Module):
    """Norms with buffers, ties, a frozen layer, attention with rules for what is inside it, a scalar, blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8)) for _ in range(3)
        )
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.temperature = Scalar()
        self.head = nn.Linear(8, 11, bias=False)
        self.embed.weight = self.head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        x = x[:, None] + self.attention(x[:, None], x[:, None], x[:, None])[0]
        return self.temperature(self.head(self.frozen(x[:, 0])))


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.value, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers."""
    return {n: full(t) for n, t in (*model.named_parameters(), *model.named_buffers())}


# -- values -----------------------------------------------------------------------------------------------


def inside_out(module: nn.Module) -> list[nn.Module]:
    return [m for child in module.children() for m in inside_out(child)] + [module]


def plain_values(seed: int) -> dict[str, torch.Tensor]:
    """What plain torch gives: to_empty, then reset_parameters of each module after those inside it."""
    with torch.device("meta"):
        model = Wide()
    model.to_empty(device="cpu")
    model.embed.weight = model.head.weight
    torch.manual_seed(seed)
    tied = False
    for module in inside_out(model):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None and not (tied and module is model.head):
            reset()
        tied = tied or module is model.embed
    return tensors_of(model)


def prepared_values(parallel: str, seed: int) -> tuple[dict[str, torch.Tensor], list[float], bool, bool]:
    """Values after prepare; losses of steps; whether the tie and the frozen layer are as they were."""
    accelerator = Accelerator(cpu=True, parallel=parallel)
    with torch.device("meta"):
        model = Wide()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    torch.manual_seed(seed + accelerator.process_index)
    with groups_in_stage_3(parallel, 2**10):  # some blocks are gathered together
        model, optimizer = accelerator.prepare(model, optimizer)
    plain = accelerator.unwrap_model(model)
    values, losses = tensors_of(plain), []
    tied = plain.embed.weight is plain.head.weight
    frozen = not plain.frozen.weight.requires_grad
    tokens = torch.arange(12) % 11
    for _ in range(5):
        loss = F.cross_entropy(model(tokens), (tokens + 1) % 11)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return values, losses, tied, frozen


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_on_meta_gets_the_values_of_plain_torch_and_rank_0(run_distributed, world_size: int) -> None:
    expected = plain_values(seed=3)
    for parallel in FORMS:
        for values, losses, tied, frozen in run_distributed(prepared_values, world_size, parallel, 3):
            assert values.keys() == expected.keys()
            assert all(torch.equal(values[name], expected[name]) for name in expected), parallel
            assert tied and frozen
            assert all(map(math.isfinite, losses)) and losses[-1] < 0.8 * losses[0]


def values_of_net(parallel: str, on_meta: bool) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    torch.manual_seed(5)
    with torch.device("meta" if on_meta else "cpu"):
        model = nn.Sequential(problem.Block(8), problem.Block(8), nn.Linear(8, 3))
    return tensors_of(accelerator.unwrap_model(accelerator.prepare(model)))


@pytest.mark.parametrize("parallel", FORMS)
def test_the_same_seed_gives_the_same_values_with_and_without_meta(run_distributed, parallel: str) -> None:
    results = [*run_distributed(values_of_net, 2, parallel, True)]
    results += run_distributed(values_of_net, 2, parallel, False)
    for values in results[1:]:
        assert all(torch.equal(values[name], results[0][name]) for name in values)


def partly_on_meta() -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True, parallel="zero=3")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    nn.init.constant_(model[0].weight, 7.0)
    model = accelerator.prepare(model)
    return [full(p) for p in model.parameters()]


def test_what_is_not_on_meta_keeps_its_values(run_distributed) -> None:
    first, second = run_distributed(partly_on_meta, 2)
    assert (first[0] == 7).all()
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))


class Bare(nn.Module):
    """Nothing says how to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.gain)


def fill_with_three(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.fill_(3)


def initialised_by_function(parallel: str) -> bool:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    with torch.device("meta"):
        model = Bare()
    prepared = accelerator.prepare_model(model, init_weights=fill_with_three)
    accelerator.backward(prepared(torch.ones(2, 6)).sum())
    return all(bool((full(p) == 3).all()) and p.grad is not None for p in prepared.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_init_weights_fills_every_module(run_distributed, world_size: int) -> None:
    for parallel in FORMS:
        assert all(run_distributed(initialised_by_function, world_size, parallel))


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def refused(parallel: str, kind: type[nn.Module], *args: int) -> str:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), kind(*args))
    with pytest.raises(UsageError) as error:
        accelerator.prepare(model)
    return str(error.value)


@pytest.mark.parametrize(("parallel", "world_size"), [(FORMS[0], 1), *((form, 2) for form in FORMS)])
def test_what_nothing_initialises_is_named_on_all_ranks(
    run_distributed, parallel: str, world_size: int
) -> None:
    for message in run_distributed(refused, world_size, parallel, Bare):
        assert "Bare '1' (gain)" in message and "init_weights=function" in message
    for message in run_distributed(refused, world_size, parallel, Forgetful, 6, 6):
        assert (
            "Forgetful.bias of shape (6,)" in message
            and "Let the initialiser fill every parameter" in message
        )


# -- models of transformers -------------------------------------------------------------------------------


def make_transformer(kind: str) -> nn.Module:
    import transformers

    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=False,
            )
        )
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=3, n_head=4)
    )


def prepared_transformer(kind: str, parallel: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = make_transformer(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    values, losses = tensors_of(accelerator.unwrap_model(model)), []
    tokens = (torch.arange(32) % 16).view(2, 16)
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return values, losses


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_models_are_initialised_as_transformers_does(run_distributed, kind: str) -> None:
    plain = make_transformer(kind)
    expected = tensors_of(plain)
    for world_size, parallel in ((1, "zero=3"), (2, "zero=3"), (2, "ddp")):
        for values, losses in run_distributed(prepared_transformer, world_size, kind, parallel):
            assert values.keys() == expected.keys()
            for name, value in values.items():
                if name in dict(plain.named_buffers()) or expected[name].std() == 0:
                    assert torch.equal(value, expected[name]), name  # norms, biases, rotary frequencies
                else:
                    assert value.std().item() == pytest.approx(expected[name].std().item(), rel=0.15), name
                    assert abs(value.mean().item()) < 0.005
            assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]


# -- memory -----------------------------------------------------------------------------------------------


LAYERS, WIDTH = 16, 128
BLOCK_BYTES, ROOT_BYTES = 4 * (WIDTH * WIDTH + WIDTH), 4 * (32 * WIDTH + WIDTH)


def peak_of_prepare() -> int:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    blocks = ",".join(str(i + 1) for i in range(LAYERS))
    accelerator = Accelerator(cpu=True, parallel=f"zero=3 blocks={blocks}")
    with LiveBytes() as live:
        accelerator.prepare(model)
    return live.peak


@pytest.mark.parametrize("world_size", [2])
def test_no_rank_ever_holds_the_whole_model(run_distributed, world_size: int) -> None:
    """At most its shard, the root group and one block; gloo's two threads let go of earlier ones a moment later."""
    shard = (LAYERS * BLOCK_BYTES + ROOT_BYTES) / world_size
    bound = shard + ROOT_BYTES + (1 + 2) * BLOCK_BYTES
    assert bound < 0.75 * (LAYERS * BLOCK_BYTES + ROOT_BYTES)
    for peak in run_distributed(peak_of_prepare, world_size):
        assert shard <= peak <= bound


# -- checkpoints ------------------------------------------------------------------------------------------


def save(directory: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, parallel="zero=3")
    torch.manual_seed(1)
    model = accelerator.prepare(Wide())
    accelerator.save_state(directory)
    return tensors_of(model)


def load_into_meta(directory: str, parallel: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    torch.manual_seed(2)
    with torch.device("meta"):
        model = Wide()
    model = accelerator.prepare(model)
    accelerator.load_state(directory)
    return tensors_of(accelerator.unwrap_model(model))


def test_a_checkpoint_fills_a_model_built_on_meta(run_distributed, tmp_path: Any) -> None:
    saved = run_distributed(save, 2, str(tmp_path / "state"))[0]
    for loaded in run_distributed(load_into_meta, 2, str(tmp_path / "state"), "zero=3"):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
