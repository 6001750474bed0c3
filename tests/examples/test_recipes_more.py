"""What recipes promise beside their losses: bytes, memory, going on from a checkpoint or after a kill, answers."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import Accelerator
from lockstep.testing import DistributedTestError, WorkerPool
from tests.examples.oracles import batch_inference, larger_than_memory, slow_links
from tests.examples.printed import assert_as_recorded
from tests.examples.scripts import EXAMPLES, Run, beside, numbers, run_here
from tests.marks import again

FOLDER = EXAMPLES / "recipes"


def with_recipe(name: str, function: Callable[..., Any], *arguments: object) -> Any:
    """What the function returns that is given the module of a recipe."""
    with beside(FOLDER / name):
        return function(importlib.import_module(name), *arguments)


# Bytes and memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [2, again(4)])
@pytest.mark.parametrize("accumulation", [again(1), 2])
def test_a_gan_sends_the_gradients_of_both_models_once_a_step(
    run: Run, processes: int, accumulation: int
) -> None:
    text = run(processes, "recipes/gan.py", "--epochs", 2, "--batch-size", 32, "--accumulation", accumulation)
    (parameters,) = re.findall(r"both models: (\d+) parameters", text)
    sent = [int(found) for found in re.findall(r"(\d+) bytes sent in a step", text)]
    all_reduce = 2 * (processes - 1) / processes * 4 * int(parameters)
    assert sent == pytest.approx([all_reduce] * 2, rel=0.01)  # and now and then sums of the ranks' copies


@pytest.mark.parametrize(("teacher", "share"), [("zero=3", 2), ("ddp", 1)])
def test_a_teacher_has_a_strategy_and_a_precision_of_its_own(run: Run, teacher: str, share: int) -> None:
    text = run(
        2, "recipes/distillation.py", "--epochs", 1, "--teacher", teacher, "--teacher-precision", "bf16"
    )
    exact = run(1, "recipes/distillation.py", "--epochs", 1)
    held, whole = map(int, re.findall(r"holds (\d+) bytes of it, of (\d+)", text)[0])
    assert held * share == whole
    found, expected = numbers("loss NUMBER", text), numbers("loss NUMBER", exact)
    assert found != expected  # the teacher's logits are rounded
    assert found == pytest.approx(expected, rel=0.01)


def test_an_average_of_weights_is_sharded_better_and_costs_no_communication(run: Run) -> None:
    text = run(2, "recipes/ema.py", "--epochs", 4)
    held, whole = map(int, re.findall(r"holds (\d+) bytes of the two models' weights, of (\d+)", text)[0])
    assert held == whole / 2
    assert "updates of the average sent 0 bytes" in text
    loss, averaged = numbers("test loss NUMBER", text)[-1], numbers("weights NUMBER", text)[-1]
    assert averaged < 0.9 * loss


def kept(run: Run, processes: int, layers: int, *options: object) -> int:
    text = run(
        processes, "recipes/long_context.py", "--steps", 2, "--length", 256, "--layers", layers, *options
    )
    return int(re.findall(r"kept (\d+) bytes", text)[0])


@pytest.mark.parametrize("processes", [2, again(4)])
def test_each_rank_keeps_its_part_of_a_blocks_activations(run: Run, processes: int) -> None:
    whole, part = (kept(run, n, layers=3) - kept(run, n, layers=1) for n in (1, processes))
    # With each head's sums of exponentials, and a state of random numbers.
    assert whole / processes <= part < 1.05 * whole / processes


def sent_over_links(text: str) -> list[float]:
    """Counted, and by the formula for averaging at each step: megabytes."""
    return numbers("NUMBER MB sent by", text) + numbers("all steps are NUMBER MB", text)


@pytest.mark.parametrize("processes", [2, again(4)])
def test_diloco_sends_one_model_a_round_and_has_the_losses_of_copies_in_one_process(
    run: Run, worker_pool: WorkerPool, processes: int
) -> None:
    steps, every = 6, 3
    text = run(processes, "recipes/slow_links.py", "--steps", steps, "--every", every)
    (expected,) = worker_pool.run(
        with_recipe, 1, "slow_links", slow_links.validation_losses, processes, steps, every
    )
    assert numbers("validation loss NUMBER", text) == pytest.approx(expected, abs=2e-5)
    if processes == 2:
        assert_as_recorded("recipes/slow_links.py", ["--steps", "6", "--every", "3"], text)
    counted, of_ddp = sent_over_links(text)
    assert counted == pytest.approx(of_ddp / every, rel=0.01)
    synchronous = run(
        processes, "recipes/slow_links.py", "--mode", "sync", "--steps", steps, "--every", every
    )
    counted, formula = sent_over_links(synchronous)
    assert counted == pytest.approx(formula, rel=0.01) and formula == of_ddp


def test_ranks_that_do_not_wait_learn(run: Run) -> None:
    text = run(2, "recipes/slow_links.py", "--mode", "stale", "--steps", 20, "--every", 10)
    losses = numbers("validation loss NUMBER nats", text)
    # Of bytes one knows log(256) = 5.55 at first. Which is the lower depends on how stale gradients were.
    assert len(losses) == 2 and max(losses) < 4.5


def test_each_process_has_its_part_of_the_experts_and_the_loads_of_one(run: Run) -> None:
    texts = [run(processes, "recipes/mixture_of_experts.py", "--epochs", 1) for processes in (1, 2)]
    first, second = (re.findall(r"experts of the first layer (.*), dropped +(\d+\.\d%)", t) for t in texts)
    assert first == second and len(first) == 1
    assert "8 on each process" in texts[0] and "4 on each process" in texts[1]


def test_a_model_that_is_read_from_disk_generates_what_it_does_in_memory(
    run: Run, worker_pool: WorkerPool
) -> None:
    words = ["--layers", "4", "--budget", "16MB"]
    text = run(2, "recipes/larger_than_memory.py", *words)
    assert_as_recorded("recipes/larger_than_memory.py", words, text)
    (expected,) = worker_pool.run(with_recipe, 1, "larger_than_memory", larger_than_memory.answers, 4, 4)
    assert re.findall(r"^prompt \d: \[(.*)\]$", text, re.M) == [", ".join(map(str, one)) for one in expected]


# Going on --------------------------------------------------------------------------------------------


def tensors_in(folder: Path) -> dict[str, bytes]:
    """The bytes of the files with tensors."""
    found = {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}
    assert found
    return found


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("gan.py", ()),
        again("gan.py", ("--batch-size", 32, "--accumulation", 2, "--parallel", "zero=2")),
        again("gan.py", ("--batch-size", 32, "--accumulation", 2, "--parallel", "zero=3")),
        again("distillation.py", ()),
        again("distillation.py", ("--teacher", "zero=2", "--student", "zero=3")),
        ("ema.py", ()),
        again("ema.py", ("--batch-size", 32, "--accumulation", 2, "--parallel", "ddp")),
        again("lora.py", ("--windows", 325, "--resume")),
        again("lora.py", ("--windows", 325, "--resume", "--parallel", "ddp")),
    ],
)
def test_a_recipe_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(
    run: Run, tmp_path: Path, script: str, options: tuple[object, ...]
) -> None:
    once = run(2, f"recipes/{script}", "--epochs", 2, "--out", tmp_path / "once", *options)
    run(2, f"recipes/{script}", "--epochs", 1, "--out", tmp_path / "twice", *options)
    rest = run(2, f"recipes/{script}", "--epochs", 2, "--out", tmp_path / "twice", *options)
    assert "epoch 1: " in once and "epoch 1: " not in rest and "epoch 2: " in rest
    found = numbers("(?:loss|weights) NUMBER", rest)
    assert found == numbers("(?:loss|weights) NUMBER", once)[-len(found) :]
    newest = [tmp_path / name / "checkpoints" / "checkpoint_1" for name in ("once", "twice")]
    assert tensors_in(newest[0]) == tensors_in(newest[1])


class InterruptedHere(Exception):
    """A run ends after its first checkpoint."""


def interrupted(script: str, words: list[str]) -> None:
    """Runs a script until it has saved a checkpoint."""

    def save_and_end(accelerator: Accelerator, **how: object) -> None:
        saved(accelerator, **{**how, "blocking": True})
        raise InterruptedHere

    saved, Accelerator.save_state = Accelerator.save_state, save_and_end
    try:
        with pytest.raises(InterruptedHere):
            run_here(script, words, True)
    finally:
        Accelerator.save_state = saved


@pytest.mark.parametrize("processes", [2, again(1), again(4)])
def test_a_gpt_goes_on_in_the_middle_of_an_epoch_as_if_it_had_not_stopped(
    run: Run, worker_pool: WorkerPool, tmp_path: Path, processes: int
) -> None:
    words = ("--steps", 4, "--save-every", 2, "--validation-windows", 150, "--batch-size", 8)
    once, twice = (["gpt/train.py", *words, "--out", tmp_path / name] for name in ("once", "twice"))
    straight = run(processes, *once)
    worker_pool.run(interrupted, processes, twice[0], list(map(str, twice[1:])), timeout_s=150)
    rest = run(processes, *twice, "--resume")
    assert "at step 2" in rest
    pattern = "validation loss NUMBER nats ="
    assert numbers(pattern, rest) == numbers(pattern, straight) and numbers(pattern, rest)
    assert (tmp_path / "once/model.safetensors").read_bytes() == (
        tmp_path / "twice/model.safetensors"
    ).read_bytes()


# Answers ---------------------------------------------------------------------------------------------


def prompts() -> list[str]:
    """Ragged ones: lines of this file, and one with the characters that `splitlines` splits at."""
    lines = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [*lines[:13], "Grüße,\u2028世界\x0b🙂"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n\n".join(prompts()), encoding="utf-8")
    return path


def arguments_of(given: Path, out: Path, tokens: int = 12) -> list[str]:
    return list(map(str, ("--prompts", given, "--out", out, "--batch-size", 3, "--tokens", tokens)))


def texts_in(folder: Path) -> str:
    return (folder / "answers.jsonl").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def answered(run: Run, given: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The answers of one process."""
    folder = tmp_path_factory.mktemp("answers")
    run(1, "recipes/batch_inference.py", *arguments_of(given, folder))
    return texts_in(folder)


def test_answers_are_those_to_each_prompt_alone(worker_pool: WorkerPool, answered: str) -> None:
    (expected,) = worker_pool.run(with_recipe, 1, "batch_inference", batch_inference.answers, prompts(), 12)
    records = [json.loads(line) for line in answered.splitlines()]
    assert [record["answer"] for record in records] == expected
    assert [record["prompt"] for record in records] == prompts()
    assert [record["number"] for record in records] == list(range(14))
    assert len({len(answer) for answer in expected}) > 2  # they end at different places


@pytest.mark.parametrize("processes", [2, again(3), again(4)])
def test_any_number_of_processes_gives_the_same_answers(
    run: Run, given: Path, answered: str, tmp_path: Path, processes: int
) -> None:
    text = run(processes, "recipes/batch_inference.py", *arguments_of(given, tmp_path))
    assert texts_in(tmp_path) == answered
    assert text.count("14 prompts in 5 batches, 5 of them to do") == 1
    assert_as_recorded("recipes/batch_inference.py", arguments_of(given, tmp_path), text)
    again_text = run(1, "recipes/batch_inference.py", *arguments_of(given, tmp_path))
    assert "14 prompts in 5 batches, 0 of them to do" in again_text
    assert texts_in(tmp_path) == answered


def killed(arguments: list[str], rank: int, files: int) -> None:
    """Ends this rank by SIGKILL while it writes its file of that number."""
    replace, written = os.replace, []

    def replace_or_die(source: Path, target: Path) -> None:
        if str(target).endswith(".jsonl"):
            written.append(target)
            if int(os.environ["RANK"]) == rank and len(written) == files:
                os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die
    run_here("recipes/batch_inference.py", arguments, True, {}, "float32")


@pytest.mark.parametrize(
    ("processes", "rank", "files"), [(2, 1, 2), again(2, 0, 1), again(1, 0, 6), again(4, 2, 1)]
)
def test_answers_go_on_after_a_kill(
    run: Run,
    worker_pool: WorkerPool,
    given: Path,
    answered: str,
    tmp_path: Path,
    processes: int,
    rank: int,
    files: int,
) -> None:
    arguments = arguments_of(given, tmp_path)
    with pytest.raises(DistributedTestError, match=f"first on rank {rank}"):
        worker_pool.run(killed, processes, arguments, rank, files)
    done = len([path for path in tmp_path.glob("parts-*/*.jsonl") if not path.name.startswith(".")])
    assert not (tmp_path / "answers.jsonl").exists()
    text = run(1, "recipes/batch_inference.py", *arguments)
    assert f"{5 - done} of them to do" in text
    assert texts_in(tmp_path) == answered
