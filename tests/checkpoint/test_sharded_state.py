"""States of sharded runs: whole in the file, so that any other way of spreading the run continues from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, load_model
from torch import nn

from checkpoint import saved_files
from lockstep import Accelerator, GradScalerKwargs
from lockstep.errors import CheckpointError, LockstepError

FEATURES, CLASSES, ROWS, BEFORE, AFTER = 6, 5, 8, 3, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)  # 7 rows are not the same number on every rank, nor 3
        self.few = nn.Parameter(torch.randn(3, 7) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x)) + x @ self.few.T @ self.few


class Net(nn.Module):
    """Tied weights, a frozen layer, a scalar, buffers, and rows that don't divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 7)
        self.norm = nn.BatchNorm1d(7, track_running_stats=True).requires_grad_(False).eval()
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.back = nn.Linear(7, CLASSES, bias=False)
        self.again = nn.Linear(7, CLASSES, bias=False)
        self.again.weight = self.back.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.norm(self.first(rows)))
        for layer in self.layers:
            x = layer(x)
        return (self.back(x) + self.again(x)) * self.scale


def make(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Net()
        model.norm.running_mean.normal_()
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return model, torch.optim.AdamW([{"params": decayed, "lr": 2e-3}, {"params": others, "lr": 1e-3}])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(ROWS, FEATURES, generator=generator)
    return rows, torch.randint(0, CLASSES, (ROWS,), generator=generator)


def plain_run() -> dict[str, Any]:
    """Without interruption, in one process, by torch alone."""
    torch.set_num_threads(1)
    model, optimizer = make()
    losses = []
    for step in range(BEFORE + AFTER):
        rows, labels = batch(step)
        loss = F.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: p.detach() for name, p in model.state_dict().items()}}


class Run:
    def __init__(self, text: str, seed: int = 0, precision: str = "no") -> None:
        torch.set_num_threads(1)
        handlers = [GradScalerKwargs(init_scale=256.0, growth_interval=2)]
        self.accelerator = Accelerator(
            cpu=True, parallel=text, mixed_precision=precision, kwargs_handlers=handlers
        )
        plain, optimizer = make(seed)
        self.model, self.optimizer = self.accelerator.prepare(plain, optimizer)

    def train(self, first: int, steps: int) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            rows, labels = (t.chunk(self.accelerator.num_processes) for t in batch(step))
            rank = self.accelerator.process_index
            loss = F.cross_entropy(self.model(rows[rank]).float(), labels[rank])
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and moments, gathered by torch."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        found = {name: full(value) for name, value in self.model.state_dict().items()}
        for parameter, values in self.optimizer.state.items():
            found |= {f"{names[id(parameter)]}:{key}": full(value) for key, value in values.items()}
        return {name.removeprefix("module."): value for name, value in found.items()}


def full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def saved(text: str, directory: str, precision: str = "no") -> dict[str, Any]:
    run = Run(text, precision=precision)
    losses = run.train(0, BEFORE)
    run.model.eval()
    run.model(batch(0)[0])  # stages 1 and 2 now have whole weights
    run.accelerator.save_state(directory)
    run.model.train()
    scale = run.accelerator.scaler.get_scale() if run.accelerator.scaler else None
    return {"losses": losses, "state": run.state(), "scale": scale}


def loaded(text: str, directory: str, precision: str = "no") -> dict[str, Any]:
    run = Run(text, seed=1, precision=precision)
    run.train(7, 1)  # moments of its own, which loading replaces
    run.model(batch(0)[0])
    run.accelerator.load_state(directory)
    scale = run.accelerator.scaler.get_scale() if run.accelerator.scaler else None
    state = run.state()
    losses = run.train(BEFORE, AFTER)
    weights = {name: value for name, value in run.state().items() if ":" not in name}
    return {"losses": losses, "state": state, "weights": weights, "scale": scale}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, "ddp"), [(2, "zero=1"), (4, "zero=3")]),
        ((2, "zero=3"), [(1, "ddp"), (4, "zero=2 replicate=2")]),
        ((4, "zero=2 replicate=2"), [(4, "zero=2 replicate=2"), (1, "zero=3")]),
    ],
)
def test_a_state_continues_under_other_stages_and_numbers_of_ranks(
    run_distributed: Any, tmp_path: Path, before: tuple[int, str], after: list[tuple[int, str]]
) -> None:
    directory = str(tmp_path / "state")
    expected = plain_run()
    first = run_distributed(saved, *before, directory)[0]
    assert first["losses"] == pytest.approx(expected["losses"][:BEFORE], rel=2e-6)
    for ranks, text in after:
        for found in run_distributed(loaded, ranks, text, directory):
            assert_equal(found["state"], first["state"])
            assert found["losses"] == pytest.approx(expected["losses"][BEFORE:], rel=2e-6)
            for name, value in expected["weights"].items():
                assert torch.allclose(found["weights"][name], value, rtol=1e-4, atol=1e-5), name


def test_the_loss_scale_of_fp16_continues(run_distributed: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "state")
    before = run_distributed(saved, 2, "zero=3", directory, "fp16")[0]
    assert before["scale"] not in (None, 256.0)
    for after in run_distributed(loaded, 4, "zero=2", directory, "fp16"):
        assert after["scale"] == before["scale"]
        assert_equal(after["state"], before["state"])


def implementations(text: str, directory: str, load: bool) -> list[Any]:
    run = Run(text)
    run.train(0, 1)
    before = [(group["foreach"], group["fused"]) for group in run.optimizer.param_groups]
    if load:
        run.accelerator.load_state(directory)
        assert [(group["foreach"], group["fused"]) for group in run.optimizer.param_groups] == before
        run.train(1, 1)
    else:
        run.accelerator.save_state(directory)
    return before


def test_how_an_optimizer_computes_is_not_taken_from_a_run_that_was_spread_otherwise(
    run_distributed: Any, tmp_path: Path
) -> None:
    directory = str(tmp_path / "state")
    saved_with = run_distributed(implementations, 2, "zero=2", directory, False)
    assert saved_with != run_distributed(implementations, 2, "ddp", directory, True)


# -- weights alone --------------------------------------------------------------------------------------


def exported(text: str, directory: str) -> dict[str, Any]:
    run = Run(text)
    run.train(0, 1)
    run.model(batch(0)[0])
    seen: list[dict[str, tuple[Any, ...]]] = []

    def look(models: list[nn.Module], weights: list[dict[str, Any]], output: str) -> None:
        seen.extend({name: (type(t), tuple(t.shape)) for name, t in one.items()} for one in weights)

    run.accelerator.register_save_state_pre_hook(look)
    run.accelerator.save_state(f"{directory}/state")
    run.accelerator.save_model(run.model, f"{directory}/model")
    whole = run.accelerator.get_state_dict(run.model)
    tied = whole["back.weight"].data_ptr() == whole["again.weight"].data_ptr()
    return {"hook": seen, "whole": whole, "tied": tied, "state": run.state()}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [(2, "zero=3"), (4, "zero=2 replicate=2")],
)
def test_saved_models_and_hooks_have_the_whole_weights_with_ties_once(
    run_distributed: Any, tmp_path: Path, ranks: int, text: str
) -> None:
    plain = make(seed=3)[0]
    shapes = {name: (torch.Tensor, tuple(t.shape)) for name, t in plain.state_dict().items()}
    for found in run_distributed(exported, ranks, text, str(tmp_path)):
        assert found["hook"] == [shapes]
        assert found["tied"]
        assert_equal(found["whole"], {n: t for n, t in found["state"].items() if ":" not in n})
    file = tmp_path / "model" / "model.safetensors"
    assert len({"back.weight", "again.weight"} & load_file(file).keys()) == 1
    fresh = make(seed=3)[0]
    load_model(fresh, file)
    assert_equal(dict(fresh.state_dict()), found["whole"])


def saved_as_it_is(text: str, directory: str, with_hook: bool) -> dict[str, torch.Tensor]:
    run = Run(text)
    run.train(0, 1)
    run.model(batch(0)[0])
    if with_hook:
        run.accelerator.register_save_state_pre_hook(lambda models, weights, output: None)
    run.accelerator.save_state(directory)
    return run.state()


@pytest.mark.parametrize(
    ("ranks", "text", "with_hook"),
    [(2, "ddp", True), (2, "zero=1", False), (4, "zero=2 replicate=2", True)],
)
def test_the_files_hold_every_element_once_and_ties_once(
    run_distributed: Any, tmp_path: Path, ranks: int, text: str, with_hook: bool
) -> None:
    directory = tmp_path / "state"
    state = run_distributed(saved_as_it_is, ranks, text, str(directory), with_hook)[0]
    saved_files.assert_manifest_tells_the_truth(directory)
    tensors = saved_files.tensors(directory)
    weights = {n.removeprefix("model.0."): t for n, t in tensors.items() if n.startswith("model.0.")}
    tie = {"again.weight", "back.weight"} - weights.keys()
    assert len(tie) == 1
    assert_equal(weights, {name: t for name, t in state.items() if ":" not in name and name not in tie})
    moments = {
        name.removeprefix("optimizer.0.state.0."): t
        for name, t in tensors.items()
        if name.startswith("optimizer.0.state.")
    }
    expected = {name.replace(":", "."): t for name, t in state.items() if ":" in name}
    assert_equal(moments, expected)


# -- what does not fit ----------------------------------------------------------------------------------


class Second(nn.Module):
    """A second model. Some kinds differ from the plain one in one way."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 5 if kind == "shape" else 4, bias=kind != "missing")
        if kind == "unknown":
            self.third = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def optimizer_of(model: nn.Module, other: nn.Module, kind: str) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if kind == "moment":  # as many as the model has, all of other shapes
        parameters = [p for p in other.parameters() if p.requires_grad][: len(parameters)]
    if kind == "groups":
        return torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])
    return torch.optim.AdamW(parameters)


def with_two_models(text: str, kind: str) -> Run:
    run = Run(text)
    second = Second(kind)
    run.second, run.other = run.accelerator.prepare(second, optimizer_of(second, run.model, kind))
    rows, labels = batch(9)
    loss = F.cross_entropy(run.model(rows), labels) + run.second(torch.ones(2, 4)).sum()
    run.accelerator.backward(loss)
    run.optimizer.step()
    run.other.step()
    run.optimizer.zero_grad()
    run.other.zero_grad()
    return run


def save_with_two(text: str, directory: str) -> None:
    for kind, _ in UNFIT:
        with_two_models(text, kind).accelerator.save_state(f"{directory}/{kind}")


def everything(run: Run) -> dict[str, torch.Tensor]:
    found = run.state() | {f"second.{n}": full(t) for n, t in run.second.state_dict().items()}
    for i, values in enumerate(run.other.state.values()):
        found |= {f"second.{i}:{key}": full(value) for key, value in values.items()}
    return found | {"generator": torch.get_rng_state(), "number": torch.tensor(len(run.other.param_groups))}


def refused(text: str, directory: str) -> list[tuple[str, bool, bool]]:
    """Load what was saved otherwise: (message, is a CheckpointError, nothing was changed)."""
    run, found = with_two_models(text, ""), []
    run.train(1, 1)
    for kind, _ in UNFIT:
        before = everything(run)
        try:
            run.accelerator.load_state(f"{directory}/{kind}")
            found.append(("", False, False))
        except LockstepError as error:
            after = everything(run)
            unchanged = all(torch.equal(after[name], value) for name, value in before.items())
            found.append((str(error), isinstance(error, CheckpointError), unchanged))
    return found


UNFIT = [
    ("shape", "model.1.second.weight is (5, 4) in the checkpoint, but (4, 4) here"),
    ("missing", "tensors ['second.bias'] are missing from it, and [] are not in the model"),
    ("unknown", "[] are missing from it, and ['third.bias', 'third.weight'] are not in the model"),
    ("groups", "groups of [1, 3] parameters, but has groups of [4] here"),
    ("moment", "first.weight.exp_avg of shape (7, 6), whose parameter has shape (4,) here"),
    ("whole", ""),
]
"""The last one fits; the others differ from it in one way each."""


@pytest.mark.parametrize("text", ["zero=1", "zero=3"])
def test_what_does_not_fit_is_an_error_on_all_ranks_and_changes_nothing(
    run_distributed: Any, tmp_path: Path, text: str
) -> None:
    run_distributed(save_with_two, 2, text, str(tmp_path))
    for found in run_distributed(refused, 2, text, str(tmp_path)):
        assert found.pop() == ("", False, False)
        for (_, words), (message, is_checkpoint_error, unchanged) in zip(UNFIT, found, strict=False):
            assert words in message
            assert is_checkpoint_error
            assert unchanged
