"""Each example runs, and what it prints and writes is checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.examples.printed import assert_as_recorded
from tests.examples.scripts import EXAMPLES, NUMBER, Run, numbers


def test_gpt_learns_on_two_processes_and_leaves_a_model_that_another_program_loads(
    run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    text = run(2, "gpt/train.py", "--steps", 20, "--validation-windows", 150, "--out", out)

    (unigram,) = numbers("unigram entropy NUMBER nats", text)
    (final,) = numbers("validation loss NUMBER nats =", text)
    assert final < unigram  # 20 of 800 steps
    records = [json.loads(line) for line in next(out.rglob("*.jsonl")).read_text().splitlines()]
    values = [record["values"] for record in records if "values" in record]
    checks = [value["validation/loss"] for value in values if "validation/loss" in value]
    assert len(checks) == 5
    assert checks[-1] == pytest.approx(final, abs=1e-3)
    assert checks[-1] < checks[0]
    losses = [value["train/loss"] for value in values if "train/loss" in value]
    assert losses[0] > 4  # near the start, log(256) = 5.5
    assert losses[-1] < 3.2
    assert all(value["train/tokens_per_s"] > 0 for value in values if "train/loss" in value)
    assert list(out.rglob("events.out.tfevents.*"))
    assert {"model.safetensors", "config.json"} <= {path.name for path in out.iterdir()}
    assert text.count("a sample, from the prompt") == 1  # one process prints

    (printed,) = re.findall(r"from the prompt 'def '\n(.*)\n---\nsaved to", text, flags=re.DOTALL)
    sample = run(1, "gpt/sample.py", out, "--prompt", "def ", "--length", 300)
    assert sample == f"{printed}\n"  # by another program, from the file, with the same seed
    assert sample.startswith("def ")
    assert len(sample) > 200


@pytest.mark.exhaustive  # as parallel/zero/test_parity.py and test_communication.py
def test_the_gpt_has_one_loss_under_every_stage(run: Run) -> None:
    text = run(2, "gpt/zero.py", "--steps", 2)
    assert_as_recorded("gpt/zero.py", ["--steps", "2"], text)
    rows = re.findall(r"^ +([a-z]+(?:=\d)?(?: \w+=\w+)*) {2,}(\d\S*)", text, flags=re.MULTILINE)
    assert [name for name, _ in rows] == ["ddp", "zero=1", "zero=2", "zero=3", "zero=3 activation=full"]
    assert [float(loss) for _, loss in rows] == pytest.approx([float(rows[0][1])] * 5, abs=2e-4)


# accelerated.py on one process and under torchrun, with the same result: tests/test_readme.py.
DIGITS = {
    "plain": (1, "digits/plain.py"),
    "ddp on 1": (1, "digits/ddp.py"),
    "accelerated on 2": (2, "digits/accelerated.py"),
}


@pytest.fixture(scope="module")
def plain_result(run: Run) -> list[float]:
    text = run(*DIGITS["plain"], "--epochs", 4)
    assert_as_recorded("digits/plain.py", ["--epochs", "4"], text)
    return digits_result(text)


def digits_result(text: str) -> list[float]:
    (result,) = re.findall(rf"test loss {NUMBER}, accuracy {NUMBER} on (\d+) images", text)
    return [float(value) for value in result]


def test_plain_digits_are_learnt(plain_result: list[float]) -> None:
    loss, accuracy, images = plain_result
    assert loss < 0.35
    assert accuracy > 0.9
    assert images == 360


@pytest.mark.parametrize("name", [name for name in DIGITS if name != "plain"])
def test_digits_give_the_numbers_of_the_plain_loop(run: Run, name: str, plain_result: list[float]) -> None:
    text = run(*DIGITS[name], "--epochs", 4, is_launched=True)
    if name == "accelerated on 2":
        assert_as_recorded("digits/accelerated.py", ["--epochs", "4"], text)
    assert digits_result(text) == pytest.approx(plain_result, abs=2e-6)


def test_the_text_classifier_learns_and_counts_each_validation_passage_once(run: Run) -> None:
    text = run(2, "text_classifier.py", "--epochs", 2, "--limit", 1515)
    assert_as_recorded("text_classifier.py", ["--epochs", "2", "--limit", "1515"], text)
    losses, accuracies = numbers("train loss NUMBER", text), numbers("accuracy NUMBER", text)
    assert losses[1] < losses[0]
    assert accuracies[-1] > 0.85
    assert numbers("F1 NUMBER", text)[-1] > 0.85
    # 303 passages: four batches of 64 and a ragged one of 47, odd on two processes.
    assert text.count("on 303 of 303 passages") == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_weighted_accumulation_is_the_big_batch_and_the_mean_of_means_is_not(
    run: Run, processes: int
) -> None:
    text = run(processes, "accumulation.py")
    if processes == 2:
        assert_as_recorded("accumulation.py", [], text)
    distance = dict(re.findall(rf"^ +(\w+) +{NUMBER}$", text, flags=re.MULTILINE))
    assert float(distance["mean_of_means"]) > 0.05
    assert float(distance["weighted_by_count"]) < 1e-6
    assert float(distance["weighted_by_token"]) < 1e-6


@pytest.mark.parametrize(("mode", "inside"), [("no", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_mixed_precision_computes_in_the_lower_type_and_keeps_the_rest_in_float32(
    run: Run, mode: str, inside: str
) -> None:
    text = run(2 if mode == "fp16" else 1, "mixed_precision.py", "--mixed-precision", mode)
    if mode == "fp16":
        assert_as_recorded("mixed_precision.py", ["--mixed-precision", mode], text)
    assert (
        f"mixed precision {mode}: parameters float32, inside the model {inside}, outputs float32, "
        "gradients float32"
    ) in text
    first, second = numbers("loss NUMBER", text)
    assert second < first < 2.4  # log(10) = 2.30
    ((steps, skipped),) = re.findall(r"(\d+) steps, (\d+) skipped", text)
    assert int(steps) == 56
    assert 0 < int(skipped) < 20 if mode == "fp16" else int(skipped) == 0


def test_tracking_writes_to_every_tracker(run: Run, tmp_path: Path) -> None:
    text = run(1, "tracking.py", "--epochs", 3, "--out", tmp_path)
    assert_as_recorded("tracking.py", ["--epochs", "3", "--out", str(tmp_path)], text)
    assert list(tmp_path.rglob("events.out.tfevents.*"))
    records = [json.loads(line) for line in next(tmp_path.rglob("*.jsonl")).read_text().splitlines()]
    assert records[0]["config"] == {"epochs": 3, "learning_rate": 0.02}
    losses = [record["values"]["loss"] for record in records[1:]]
    assert len(losses) == 39
    assert sum(losses[-13:]) < sum(losses[:13])
    rows = (tmp_path / "values.csv").read_text().splitlines()
    assert rows[0] == "step,name,value"
    assert rows[-1] == "39,note,done"
    assert len(rows) == 1 + 2 * 39 + 1


def test_the_split_gpt_has_the_losses_of_one_process_and_half_of_its_state(run: Run) -> None:
    results = []
    for processes, options in ((1, ()), (2, ("--parallel", "pp=2"))):
        text = run(processes, "gpt/split.py", "--steps", 5, *options)
        held = [
            int(number.replace(",", "")) for number in re.findall(r"^ +\d +([\d,]+) ", text, re.MULTILINE)
        ]
        results.append((numbers("loss NUMBER", text), held))
    assert_as_recorded("gpt/split.py", ["--steps", "5", "--parallel", "pp=2"], text)
    (loss, [whole]), (split_loss, held) = results
    assert split_loss == loss and len(loss) == 1
    assert held == pytest.approx([whole / 2, whole / 2], rel=0.1)


def test_the_gpt_with_its_state_on_disk_has_the_losses_of_training_in_memory(
    run: Run, tmp_path: Path
) -> None:
    in_memory = run(1, "gpt/offload.py", "--steps", 5, "--parallel", "auto")
    on_disk = run(1, "gpt/offload.py", "--steps", 5, "--parallel", f"offload=all offload_to={tmp_path}")
    shown = on_disk.replace(str(tmp_path), "runs/state")
    words = ["--steps", "5", "--parallel", "offload=all offload_to=runs/state"]
    assert_as_recorded("gpt/offload.py", words, shown)
    assert numbers("loss NUMBER", on_disk) == numbers("loss NUMBER", in_memory)
    assert numbers("in files NUMBER", in_memory) == [0.0]
    held = [numbers(f"{what} NUMBER MB", on_disk)[0] for what in ("weights", "gradients", "optimizer")]
    assert numbers("in files NUMBER", on_disk)[0] == pytest.approx(sum(held), rel=0.01)


def test_the_readmes_list_every_script() -> None:
    listed: set[str] = set()
    for readme in EXAMPLES.rglob("README.md"):
        links = re.findall(r"\]\(([\w/.]+\.py)\)", readme.read_text())
        listed |= {(readme.parent / link).resolve().relative_to(EXAMPLES).as_posix() for link in links}
    scripts = {
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*.py")
        if "__main__" in path.read_text()
    }
    assert {script for script in listed if "__main__" in (EXAMPLES / script).read_text()} == scripts
