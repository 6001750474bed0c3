"""What a run with a split model does beside training: metrics, checkpoints, bytes, schedules, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.errors import ConfigError, UsageError
from lockstep.inference import prepare_pippy
from lockstep.parallel.context import gather_sequence
from lockstep.plan import by_rank, simulate
from parallel import split_problem as problem
from parallel.pipeline.problem import schedules

LARGE = {"vocabulary": 32, "context": 8, "width": 96, "layers": 8, "heads": 4}
TEACHER = {"vocabulary": problem.VOCABULARY, "context": problem.LENGTH, "width": 64, "layers": 2, "heads": 2}
STEPS = 3  # before a checkpoint, and after it


def prepare(parallel: str, model: str = "gpt", **options: Any) -> tuple[Any, ...]:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=parallel, split_batches=True, **options)
    built = problem.MODELS[model](4)
    return accelerator, *accelerator.prepare(built, problem.make_optimizer(built))


def go_on(accelerator: Accelerator, model: Any, optimizer: Any, batches: torch.Tensor) -> list[float]:
    rank, ranks = accelerator.meshes.data_rank, accelerator.meshes.data_size
    losses = []
    for tokens in batches:
        loss = problem.loss_of("gpt", model, tokens.chunk(ranks)[rank])
        accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save(parallel: str, folder: str) -> list[float]:
    """Train, save in the middle, and go on."""
    accelerator, model, optimizer = prepare(parallel)
    batches = problem.make_batches(2 * STEPS)
    go_on(accelerator, model, optimizer, batches[:STEPS])
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/weights")
    return go_on(accelerator, model, optimizer, batches[STEPS:])


def resume(parallel: str, folder: str) -> list[float]:
    accelerator, model, optimizer = prepare(parallel)
    accelerator.load_state(f"{folder}/state")
    return go_on(accelerator, model, optimizer, problem.make_batches(2 * STEPS)[STEPS:])


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        (
            (2, "pp=2"),
            [
                (1, ""),
                (2, "tp=2"),
                *((2, f"pp=2 schedule={name}") for name in schedules("interleaved", "zbv")[-1:]),
            ],
        ),
        ((4, "zero=3 tp=2"), [(2, "cp=2"), (4, "pp=2 tp=2")]),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_a_checkpoint_goes_on_in_any_other_layout(
    run_distributed, tmp_path: Path, saved_as: tuple[int, str], loaded_as: list[tuple[int, str]]
) -> None:
    expected = problem.train("gpt", 2 * STEPS, clip=1e9)
    world, parallel = saved_as
    for losses in run_distributed(save, world, parallel, str(tmp_path), timeout_s=120):
        assert losses == pytest.approx(expected.losses[STEPS:], rel=5e-6)
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    reached = problem.train("gpt", STEPS, clip=1e9).parameters
    assert problem.difference(weights, reached) < 1e-5
    assert weights.keys() == reached.keys()
    for world, parallel in loaded_as:
        for losses in run_distributed(resume, world, parallel, str(tmp_path), timeout_s=120):
            assert losses == pytest.approx(expected.losses[STEPS:], rel=5e-6)


def evaluate(parallel: str) -> tuple[torch.Tensor, int]:
    """Predictions for 11 samples in batches of 4, the last of which is short."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=parallel)
    rows = problem.make_batches(11, 1).flatten(0, 1)
    loader = DataLoader(TensorDataset(rows, torch.arange(11)), batch_size=4 // accelerator.meshes.data_size)
    model, loader = accelerator.prepare(problem.make_gpt(), loader)
    model.eval()
    logits, seen = [], []
    with torch.no_grad():
        for tokens, number in loader:
            gathered, numbers = accelerator.gather_for_metrics((model(tokens), number))
            logits.append(gathered)
            seen.append(numbers)
    order = torch.cat(seen)
    assert order.tolist() == list(range(11))
    return torch.cat(logits), len(loader)


@pytest.mark.parametrize(("world", "parallel"), [(2, "tp=2"), (2, "cp=2"), (4, "pp=2")])
def test_metrics_see_each_sample_once(run_distributed, world: int, parallel: str) -> None:
    with torch.no_grad():
        expected = problem.make_gpt().eval()(problem.make_batches(11, 1).flatten(0, 1))
    for logits, _ in run_distributed(evaluate, world, parallel, timeout_s=120):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def held(parallel: str) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state of a model whose blocks outweigh all else."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel=parallel)
    built = problem.gpt(**LARGE)
    prepared, optimizer = accelerator.prepare(built, torch.optim.AdamW(built.parameters()))
    loss = prepared(torch.zeros(8, 8, dtype=torch.long)).float().pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    found = accelerator.state_bytes()
    return found.weights, found.gradients, found.optimizer


@pytest.mark.parametrize(("world", "parallel", "parts"), [(4, "tp=4", 4), (4, "pp=2 tp=2", 4)])
def test_each_rank_holds_its_share_of_all_state(
    run_distributed, world: int, parallel: str, parts: int
) -> None:
    whole = 4 * sum(parameter.numel() for parameter in problem.gpt(**LARGE).parameters())
    for weights, gradients, optimizer in run_distributed(held, world, parallel, timeout_s=120):
        assert weights == pytest.approx(whole / parts, rel=0.05)
        assert gradients == pytest.approx(whole / parts, rel=0.05)
        assert optimizer == pytest.approx(2 * whole / parts, rel=0.05)


def executed(schedule: str) -> list[tuple[int, int, str, int]]:
    accelerator, model, _ = prepare(f"pp=2 micro_batches=8 schedule={schedule}", "llama")
    tokens = problem.make_batches(1)[0]
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    return model.executed()


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        (name, 2 if name in ("interleaved", "zbv") else 1)
        for name in schedules("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
    ],
)
def test_the_bubble_of_what_ran_is_that_of_the_formula(run_distributed, schedule: str, stages: int) -> None:
    records = [each for rank in run_distributed(executed, 2, schedule, timeout_s=120) for each in rank]
    timeline = simulate(by_rank(records))
    p, m, v = 2, 8, stages
    expected = {
        "gpipe": (p - 1) / (m + p - 1),
        "1f1b": (p - 1) / (m + p - 1),
        "interleaved": (p - 1) / (v * m + p - 1),
        "zero_bubble": (p - 1) / (3 * v * m + p - 1),  # idle: a third of 1F1B's
        "zbv": (p - 1) / (6 * m + p - 1),
    }[schedule]
    assert timeline.bubble == pytest.approx(expected)


def with_train_step(parallel: str) -> list[float]:
    accelerator, model, optimizer = prepare(parallel)
    losses = []
    for tokens in problem.make_batches(STEPS):
        part = tokens.chunk(accelerator.meshes.data_size)[accelerator.meshes.data_rank]
        loss = accelerator.train_step(model, mean_loss, part[:, :-1], part[:, 1:])
        losses.append(accelerator.reduce(loss, "mean").item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(("world", "parallel"), [(4, "pp=2"), (1, "")])
def test_a_train_step_is_forward_loss_and_backward(run_distributed, world: int, parallel: str) -> None:
    expected = problem.train("gpt", STEPS, clip=1e9).losses
    for losses in run_distributed(with_train_step, world, parallel, timeout_s=120):
        assert losses == pytest.approx(expected, rel=5e-6)


def refused(parallel: str, rows: int, kind: str) -> str:
    torch.set_num_threads(1)
    try:
        accelerator = Accelerator(cpu=True, parallel=parallel)
        built = problem.make_gpt(2) if kind != "heads" else problem.make_llama(2)
        model = accelerator.prepare(built)
        model(torch.zeros(rows, problem.LENGTH if kind != "length" else 7, dtype=torch.long))
    except (ConfigError, UsageError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("world", "parallel", "rows", "kind", "sentences"),
    [
        (2, "tp=3", 4, "", ["2 / 3 is not whole"]),
        (2, "pp=2 tp=2", 4, "", ["pp=2", "tp=2", "4 processes", "2 / 4 is not whole"]),
        (2, "pp=2 micro_batches=3", 4, "", ["4", "3"]),
        (2, "pp=2 micro_batches=1", 4, "", ["1", "2"]),
        (2, "pp=2 schedule=interleaved", 4, "", ["2 blocks", "4 stages"]),
        (2, "cp=2", 4, "length", ["7 positions"]),
        (2, "tp=2 sequence_parallel pp=1 cp=2", 4, "", ["sequence_parallel"]),
    ],
)
def test_what_cannot_be_split_is_refused_on_all_ranks(
    run_distributed, world: int, parallel: str, rows: int, kind: str, sentences: list[str]
) -> None:
    messages = run_distributed(refused, world, parallel, rows, kind)
    assert all(message and "\n" not in message for message in messages)
    assert all(sentence in messages[0] for sentence in sentences), messages[0]


def infer(gather: bool) -> torch.Tensor | None:
    torch.set_num_threads(1)
    model = prepare_pippy(problem.make_gpt(), num_chunks=2, gather_output=gather)
    with torch.no_grad():
        return model(problem.make_batches(1)[0])


def test_inference_is_pipelined_and_the_last_process_has_the_output(run_distributed) -> None:
    with torch.no_grad():
        expected = problem.make_gpt()(problem.make_batches(1)[0])
    first, last = run_distributed(infer, 2, False)
    assert first is None
    torch.testing.assert_close(last, expected)
    for output in run_distributed(infer, 2, True):
        torch.testing.assert_close(output, expected)


def on_chunks(method: str) -> list[float]:
    """Not even logits are whole: the script gives each rank its chunk of everything that has positions."""
    accelerator, model, optimizer = prepare(f"cp=2 cp_method={method}", "llama")
    losses = []
    for tokens in problem.make_batches(STEPS):
        positions = torch.arange(problem.LENGTH).repeat(len(tokens), 1)
        labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)
        whole = labels.clone()
        with accelerator.maybe_context_parallel(
            buffers=[tokens, positions, labels],
            buffer_seq_dims=[1, 1, 1],
            no_restore_buffers={tokens, positions, labels},
        ):
            assert tokens.shape[1] == problem.LENGTH // 2
            count = problem.ROWS * (problem.LENGTH - 1) / 2  # of the labels that count, a rank's share
            output = model(
                input_ids=tokens,
                position_ids=positions,
                labels=labels,
                shift_labels=labels,
                num_items_in_batch=torch.tensor(count),
            )
            logits = gather_sequence(accelerator.unwrap_model(model), output.logits.detach())
            accelerator.backward(output.loss)
        losses.append(accelerator.reduce(output.loss.detach(), "mean").item())
        assert mean_loss(logits, whole).item() == pytest.approx(losses[-1], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_script_may_work_on_chunks_of_the_sequence_throughout(run_distributed, method: str) -> None:
    expected = problem.train("llama", STEPS, clip=1e9).losses
    for losses in run_distributed(on_chunks, 2, method, timeout_s=120):
        assert losses == pytest.approx(expected, rel=5e-6)


def in_half(parallel: str, precision: str) -> tuple[list[float], bool]:
    accelerator, model, optimizer = prepare(parallel, mixed_precision=precision)
    losses = []
    for tokens in problem.make_batches(1).repeat(8, 1, 1):
        part = tokens.chunk(accelerator.meshes.data_size)[accelerator.meshes.data_rank]
        loss = problem.loss_of("gpt", model, part)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, accelerator.optimizer_step_was_skipped


@pytest.mark.parametrize("precision", ["fp16"])
def test_half_precision_learns_as_one_process_does(run_distributed, precision: str) -> None:
    expected, _ = run_distributed(in_half, 1, "", precision, timeout_s=120)[0]
    assert expected[-1] < expected[0] - 0.05
    for world, parallel in ((2, "cp=2"), (4, "zero=3 tp=2")):
        for losses, skipped in run_distributed(in_half, world, parallel, precision, timeout_s=120):
            assert losses == pytest.approx(expected, rel=2e-3), parallel
            assert not skipped


def two_models(parallel: str) -> list[float]:
    """A student that follows a teacher, which is split too but does not learn."""
    accelerator, student, optimizer = prepare(parallel)
    teacher = accelerator.prepare_model(problem.gpt(**TEACHER), evaluation_mode=True)
    losses = []
    for tokens in problem.make_batches(STEPS):
        with torch.no_grad():
            wanted = teacher(tokens)
        loss = (student(tokens) - wanted).pow(2).mean()
        accelerator.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("parallel", ["tp=2", "pp=2", "cp=2"])
def test_several_models_are_split_side_by_side(run_distributed, parallel: str) -> None:
    expected = run_distributed(two_models, 1, "")[0]
    for losses in run_distributed(two_models, 2, parallel, timeout_s=120):
        assert losses == pytest.approx(expected, rel=5e-6)
