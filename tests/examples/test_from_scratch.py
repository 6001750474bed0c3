"""Each lesson computes what one process does and sends what its formula says, and so does the engine.

The lessons run in workers that are there already. What the engine sends is counted by its ledger.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep import Accelerator
from lockstep.comm.ledger import CommunicationLedger
from lockstep.testing.pool import WorkerPool

ROOT = Path(__file__).parents[2]
LESSONS = ROOT / "examples" / "from_scratch"
PAGES = ROOT / "docs" / "from_scratch"
NAMES = sorted(path.stem for path in LESSONS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


def lesson(name: str) -> ModuleType:
    """The module of a lesson, which imports others of its folder."""
    if str(LESSONS) not in sys.path:
        sys.path.insert(0, str(LESSONS))
    return importlib.import_module(name)


def processes_of(name: str) -> int:
    """On how many processes the lesson runs when it is started."""
    (number,) = re.findall(r"^    run\(demo, processes=(\d)\)$", (LESSONS / f"{name}.py").read_text(), re.M)
    return int(number)


def run_lesson(name: str) -> tuple[list[str], str]:
    """On one process: what did not hold, and the table."""
    dist.init_process_group("gloo")
    world = lesson("world")
    checks = lesson(name).demo()
    return [str(check) for check in checks if not check.holds], world.table(checks)


@pytest.fixture(scope="module")
def tables(worker_pool: WorkerPool) -> dict[str, str]:
    """The table of each lesson on process 0. All lines of all processes hold."""
    found = {}
    for name in NAMES:
        results = worker_pool.run(run_lesson, processes_of(name), name)
        assert [wrong for wrong, _ in results if wrong] == [], name
        found[name] = results[0][1]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_line_of_a_lesson_holds_and_its_page_shows_them(name: str, tables: dict[str, str]) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert tables[name] in page, f"put this into docs/from_scratch/{name}.md:\n{tables[name]}"


def test_a_lesson_starts_its_processes_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, LESSONS / "ring_all_reduce.py"], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert "bytes sent in reduce-scatter: (N - 1) / N" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_is_short_and_of_plain_torch(name: str) -> None:
    source = (LESSONS / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 150
    assert "lockstep" not in source
    assert f"python examples/from_scratch/{name}.py" in source
    assert re.search(r"^Papers?: ", ast.get_docstring(ast.parse(source)) or "", re.M)


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_page_is_that_of_the_lesson(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    source = (LESSONS / f"{name}.py").read_text(encoding="utf-8")
    excerpts = re.findall(r"^<!-- lesson -->\n```python\n(.*?)^```$", page, re.M | re.S)
    assert excerpts
    # A method stands on the page without its indentation.
    assert [text for text in excerpts if text not in source and indent(text, "    ") not in source] == []
    assert f"python examples/from_scratch/{name}.py" in page
    assert (ROOT / "docs" / "images" / "from_scratch" / f"{name}.svg").is_file()


def test_every_lesson_has_a_page_and_every_page_a_lesson() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} - {"index"} == set(NAMES)


def train_with_engine(parallel: str, micro_batches: int, optimizer: str) -> tuple[list[torch.Tensor], float]:
    """The parameters after three steps of the lessons' training, and the bytes that this rank sent in the last."""
    world = lesson("world")
    accelerator = Accelerator(cpu=True, parallel=parallel, gradient_accumulation_steps=micro_batches)
    rank, size = accelerator.process_index, accelerator.num_processes
    plain = world.small_model()
    names = [name for name, _ in plain.named_parameters()]
    model, stepping = accelerator.prepare(plain, getattr(world, optimizer)(plain.parameters()))
    for step in range(3):
        inputs, targets = (world.share(tensor, rank, size) for tensor in world.batch(step))
        with CommunicationLedger() as ledger:
            pairs = zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
            for micro_inputs, micro_targets in pairs:
                with accelerator.accumulate(model):
                    accelerator.backward(world.mean_loss(model, micro_inputs, micro_targets))
                    stepping.step()
                    stepping.zero_grad()
    weights = accelerator.get_state_dict(model)
    return [weights[name] for name in names], ledger.wire_bytes()


def train_from_scratch(name: str, *arguments: Any) -> tuple[list[torch.Tensor], float]:
    """The same from a lesson, with the bytes of a step as the engine's ledger counts them."""
    dist.init_process_group("gloo")
    module = lesson(name)
    with CommunicationLedger() as ledger:
        trained = module.train(3, *arguments)
    sent = sum(record.wire_bytes for record in ledger.records if record.operation != "broadcast")
    if name == "zero3":
        return module.whole_parameters(trained[0]), float(sent) / 3
    return trained[0] if isinstance(trained, tuple) else trained, float(sent) / 3


# lesson -> the engine's words for it, micro-batches, optimizer, and the bytes of a step in units of the model's,
# times (N - 1) / N, on 4 processes.
SAME_TRAINING = {
    "ddp_hooks": ("ddp", 1, "sgd", 2),
    "ddp_buckets": ("ddp", 1, "sgd", 2),
    "zero1": ("zero=1", 2, "adam", 2),
    "zero2": ("zero=2", 2, "adam", 3),
    "zero3": ("zero=3", 2, "adam", 6),
}


@pytest.mark.parametrize("name", SAME_TRAINING)
def test_the_engine_has_the_numbers_and_the_bytes_of_the_lesson(worker_pool: WorkerPool, name: str) -> None:
    parallel, micro_batches, optimizer, times = SAME_TRAINING[name]
    engine = worker_pool.run(train_with_engine, 4, parallel, micro_batches, optimizer)
    scratch = worker_pool.run(train_from_scratch, 4, name)
    for (weights, sent), (expected, sent_from_scratch) in zip(engine, scratch, strict=True):
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        formula = times * 3 / 4 * 4 * 484
        assert sent_from_scratch == formula
        # Beside the gradients, ranks of the engine compare a few numbers, as many for any model.
        assert formula <= sent <= formula + 300
