"""``mixed_precision="fp8"``: torchao's layers, converted and trained as by hand. Emulated, as CPUs do not have fp8."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.config import Parallel
from lockstep.errors import ConfigError, MissingExtraError, UsageError
from lockstep.parallel import check_float8, filter_linear_layers, find_first_last_linear_layers
from lockstep.utils import AORecipeKwargs, TERecipeKwargs
from tests.patching import module_of
from tests.refusals import expect_refusal

BATCH, STEPS = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(torch.relu(self.up(rows)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.odd = nn.Linear(32, 8)
        self.back = nn.Linear(8, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(32, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        rows = rows + self.back(self.odd(rows))
        for block in self.blocks:
            rows = block(rows)
        return self.last(rows)


CONVERTED = {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    count = BATCH * STEPS
    return torch.randn(count, 16, generator=source), torch.randint(0, 16, (count,), generator=source)


def config(recipe: str = "tensorwise") -> Any:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)


def train(
    parallel: str, accumulation: int = 1, recipe: str = "tensorwise", **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The script as a user writes it: mean losses of the micro-batches, and whole weights."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        parallel=parallel,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[AORecipeKwargs(config=config(recipe))],
        **options,
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for rows, labels in loader:
        with accelerator.accumulate(model):
            outputs = model(rows)
            assert outputs.dtype == torch.float32
            loss = nn.functional.cross_entropy(outputs, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    kinds = {type(p).__name__ for p in accelerator.unwrap_model(model).parameters()}
    assert kinds <= {"Parameter", "DTensor"}
    return losses, accelerator.get_state_dict(model)


def by_hand(
    ranks: int, gathers_bf16: bool, accumulation: int, recipe: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process, plain torch and torchao: the rows of each rank in turn, since each cast tensor has its own scale."""
    from torchao.float8 import convert_to_float8_training

    master = make_model()
    optimizer = torch.optim.SGD(master.parameters(), lr=0.1)
    losses = []
    inputs, labels = data()
    for step in range(STEPS):
        mean = 0.0
        for rank in range(ranks):
            model = copy.deepcopy(master)
            for parameter in model.parameters():
                parameter.grad = None
            if gathers_bf16:
                model.bfloat16()
            convert_to_float8_training(
                model, config=config(recipe), module_filter_fn=lambda _, name: name in CONVERTED
            )
            start = step * BATCH + rank * BATCH // ranks
            rows = slice(start, start + BATCH // ranks)
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(inputs[rows])
            loss = nn.functional.cross_entropy(outputs.float(), labels[rows])
            (loss / accumulation).backward()
            mean += loss.item() / ranks
            for parameter, computed in zip(master.parameters(), model.parameters(), strict=True):
                assert computed.grad is not None
                part = computed.grad.float() / ranks
                parameter.grad = part if parameter.grad is None else parameter.grad + part
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean)
    return losses, master.state_dict()


# Ranks, parallel, micro-batches of a step, recipe. Gradients of shards are averaged in float32, as by hand.
CELLS = [
    (1, "auto", 1, "tensorwise"),
    (1, "auto", 2, "rowwise"),
    (1, "offload=all", 1, "tensorwise"),
    (2, "ddp", 1, "tensorwise"),
    (2, "ddp", 2, "rowwise_with_gw_hp"),
    (2, "zero=1 reduce=fp32", 1, "tensorwise"),
    (2, "zero=2 reduce=fp32", 2, "tensorwise"),
    (2, "zero=3 reduce=fp32", 1, "rowwise"),
    (2, "zero=3 reduce=fp32 activation=full", 2, "tensorwise"),
    (2, "zero=3 reduce=fp32 offload=all", 1, "tensorwise"),
]


def train_cells(cells: list[tuple[int, str, int, str]]) -> list[Any]:
    return [train(parallel, accumulation, recipe) for _, parallel, accumulation, recipe in cells]


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_equals_torchao_by_hand(run_distributed, ranks: int) -> None:
    pytest.importorskip("torchao")
    cells = [cell for cell in CELLS if cell[0] == ranks]
    for found in run_distributed(train_cells, ranks, cells, timeout_s=120):
        for cell, (losses, weights) in zip(cells, found, strict=True):
            _, parallel, accumulation, recipe = cell
            shards = "zero" in parallel
            expected, by_name = by_hand(ranks, shards, accumulation, recipe)
            assert losses == pytest.approx(expected, rel=1e-6), cell
            if weights:
                worst = max((weights[name] - value).abs().max().item() for name, value in by_name.items())
                assert worst <= 1e-7, (cell, worst)


def prepare(model: nn.Module, **recipe: Any) -> nn.Module:
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=config(), **recipe)]
    )
    assert accelerator.fp8_enabled and accelerator.has_fp8_handler and accelerator.fp8_backend == "AO"
    return accelerator.prepare(model)


def layers(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


def what_is_converted() -> None:
    assert layers(prepare(make_model())) == CONVERTED
    chosen = prepare(make_model(), module_filter_func=lambda module, name: name == "first")
    assert layers(chosen) == {"first"}
    # what is converted already stays as it is
    again = make_model()
    converted = prepare(copy.deepcopy(again), module_filter_func=lambda module, name: name == "first")
    again.first = converted.first
    again = prepare(again)
    assert again.first is converted.first
    assert layers(again) == {"first"} | CONVERTED
    expect_refusal(
        UsageError, "module_filter_func", prepare, nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    )
    expect_refusal(
        UsageError, "torch.nn.Sequential", prepare, nn.Linear(16, 16), module_filter_func=lambda *_: True
    )


def test_linear_layers_but_the_first_and_the_last_are_converted(run_distributed) -> None:
    pytest.importorskip("torchao")
    run_distributed(what_is_converted, 1)


def test_what_other_libraries_ask_of_a_recipe() -> None:
    pytest.importorskip("torchao")
    expect_refusal(
        ConfigError,
        "'bf16'",
        Accelerator,
        cpu=True,
        mixed_precision="bf16",
        kwargs_handlers=[AORecipeKwargs()],
    )
    expect_refusal(ConfigError, "cpu", Accelerator, cpu=True, mixed_precision="fp8")


# Without torchao ------------------------------------------------------------------------------------------


def test_a_gather_in_8_bits_that_is_asked_for_is_said_to_be_none() -> None:
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig

    asked = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    for options in ({"enable_fsdp_float8_all_gather": True}, {"config": asked}):
        with pytest.warns(UserWarning, match="enable_fsdp_float8_all_gather"):
            AORecipeKwargs(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = AORecipeKwargs()
        recipe.config = config()
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of(AORecipeKwargs), "find_spec", lambda name: None)
    expect_refusal(MissingExtraError, "[torchao]", Accelerator, cpu=True, mixed_precision="fp8")


def test_other_packages_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of(AORecipeKwargs), "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="TERecipeKwargs"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    expect_refusal(ConfigError, "MSAMP", Accelerator, cpu=True, mixed_precision="fp8")


@pytest.mark.parametrize(
    ("words", "emulate", "message"),
    [
        ("tp=2", True, "Drop these options"),
        ("zero=1 pp=2", True, "pp=2"),
        ("cp=2", True, "cp=2"),
        ("ep=2", True, "ep=2"),
        ("zero=3 quantized_weights", True, "quantized_weights"),
        ("dataparallel", True, "dataparallel"),
        ("zero=3", False, "compute capability 8.9"),
    ],
)
def test_what_cannot_be_right_is_refused(words: str, emulate: bool, message: str) -> None:
    recipe: Any = SimpleNamespace(config=SimpleNamespace(emulate=emulate))
    expect_refusal(ConfigError, message, check_float8, recipe, Parallel.parse(words), torch.device("cpu"))
    check_float8(None, Parallel.parse(words), torch.device("cpu"))


def test_layers_of_sizes_that_16_does_not_divide_are_left_out() -> None:
    model = make_model()
    assert find_first_last_linear_layers(model) == ("first", "last")
    chosen = {n for n, m in model.named_modules() if filter_linear_layers(m, n, ["first", "last"])}
    assert chosen == CONVERTED
