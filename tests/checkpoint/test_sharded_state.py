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


SPREADS = [(1, "ddp"), (2, "zero=3"), (4, "zero=2 replicate=2")]
OTHERS = [(1, "zero=3"), (2, "zero=1"), (4, "zero=3")]


@pytest.mark.parametrize(("ranks", "text"), SPREADS)
def test_a_state_continues_under_every_other_stage_and_number_of_ranks(
    run_distributed: Any, tmp_path: Path, ranks: int, text: str
) -> None:
    directory = str(tmp_path / "state")
    expected = plain_run()
    before = run_distributed(saved, ranks, text, directory)[0]
    assert before["losses"] == pytest.approx(expected["losses"][:BEFORE], rel=2e-6)
    for other_ranks, other in [(ranks, text), *OTHERS]:
        for after in run_distributed(loaded, other_ranks, other, directory):
            assert_equal(after["state"], before["state"])
            assert after["losses"] == pytest.approx(expected["losses"][BEFORE:], rel=2e-6)
            for name, value in expected["weights"].items():
                assert torch.allclose(after["weights"][name], value, rtol=1e-4, atol=1e-5), name


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


def tiny() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def export_transformers(directory: str) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel="zero=3")
    model = tiny()
    config = model.config
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    tokens = torch.arange(12).view(2, 6)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    accelerator.save_model(model, directory)
    if accelerator.is_main_process:
        config.save_pretrained(directory)
    return accelerator.get_state_dict(model)


def test_transformers_reads_what_save_model_wrote(run_distributed: Any, tmp_path: Path) -> None:
    plain = tiny()
    whole = run_distributed(export_transformers, 2, str(tmp_path))[0]
    found = type(plain).from_pretrained(tmp_path)
    assert_equal(dict(found.state_dict()), whole)
    assert not torch.equal(found.state_dict()["lm_head.weight"], plain.state_dict()["lm_head.weight"])
    tokens = torch.arange(12).view(2, 6)
    plain.eval().load_state_dict(whole)
    assert torch.equal(found(input_ids=tokens).logits, plain(input_ids=tokens).logits)


# -- what does not fit ----------------------------------------------------------------------------------


class Fragile:
    """An object of the user's whose state cannot be had on one rank."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise ValueError("the state is gone")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def fails_to_save(text: str, directory: str) -> tuple[str, bool, list[float]]:
    run = Run(text)
    run.accelerator.register_for_checkpointing(Fragile(run.accelerator.process_index == 1))
    message = ""
    try:
        run.accelerator.save_state(directory)
    except (ValueError, LockstepError) as error:
        message = str(error)
    run.accelerator.wait_for_everyone()
    return message, Path(directory).exists(), run.train(0, 1)


@pytest.mark.parametrize(("ranks", "text"), [(4, "zero=2 replicate=2")])
def test_an_object_that_fails_on_one_rank_fails_the_save_on_all(
    run_distributed: Any, tmp_path: Path, ranks: int, text: str
) -> None:
    for message, published, losses in run_distributed(fails_to_save, ranks, text, str(tmp_path / "state")):
        assert "the state is gone" in message
        assert not published
        assert losses == pytest.approx(plain_run()["losses"][:1], rel=2e-6)


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


def save_with_two(text: str, directory: str, kind: str) -> None:
    with_two_models(text, kind).accelerator.save_state(directory)


def everything(run: Run) -> dict[str, torch.Tensor]:
    found = run.state() | {f"second.{n}": full(t) for n, t in run.second.state_dict().items()}
    for i, values in enumerate(run.other.state.values()):
        found |= {f"second.{i}:{key}": full(value) for key, value in values.items()}
    return found | {"generator": torch.get_rng_state(), "number": torch.tensor(len(run.other.param_groups))}


def refused(text: str, directory: str) -> tuple[str, bool, bool]:
    """Load what was saved otherwise: (message, is a CheckpointError, nothing was changed)."""
    run = with_two_models(text, "")
    run.train(1, 1)
    before = everything(run)
    try:
        run.accelerator.load_state(directory)
    except LockstepError as error:
        after = everything(run)
        unchanged = all(torch.equal(after[name], value) for name, value in before.items())
        return str(error), isinstance(error, CheckpointError), unchanged
    return "", False, False


UNFIT = [
    ("shape", "model.1.second.weight is (5, 4) in the checkpoint, but (4, 4) here"),
    ("missing", "tensors ['second.bias'] are missing from it, and [] are not in the model"),
    ("unknown", "[] are missing from it, and ['third.bias', 'third.weight'] are not in the model"),
    ("groups", "groups of [1, 3] parameters, but has groups of [4] here"),
    ("moment", "first.weight.exp_avg of shape (7, 6), whose parameter has shape (4,) here"),
    ("no file", "lacks model_1-0000"),
    ("generators", "rank-00001.json has 1 bytes instead of"),
    ("whole", ""),
]


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [(("zero=1", "zero=3")[number % 2], *one) for number, one in enumerate(UNFIT)],
)
def test_what_does_not_fit_is_an_error_on_all_ranks_and_changes_nothing(
    run_distributed: Any, tmp_path: Path, text: str, kind: str, words: str
) -> None:
    directory = tmp_path / "state"
    run_distributed(save_with_two, 2, text, str(directory), kind)
    if kind == "no file":
        next(directory.glob("model_1-*.safetensors")).unlink()
    elif kind == "generators":
        (directory / "rank-00001.json").write_text("{")
    found = run_distributed(refused, 2, text, str(directory))
    if kind == "whole":  # which the others differ from in one way each
        assert found == [("", False, False)] * 2
        return
    for message, is_checkpoint_error, unchanged in found:
        assert words in message
        assert is_checkpoint_error
        assert unchanged
