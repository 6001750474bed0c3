"""How much is imported before a script's first line of work: modules, which can be counted, not time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.compat.processes import ALONE

ALIAS = "from lockstep.compat.accelerate import install; install(); "
MODULES = "; import json, sys; print(json.dumps(sorted(sys.modules)))"
TRAINER = "from transformers import Trainer"
# Of what a run needs later, whole layers that no import of a name needs.
LATE = (
    "lockstep.control",
    "lockstep.offload.weights.streamer",
    "lockstep.parallel.ddp.replica",
    "lockstep.parallel.parallelize",
    "lockstep.parallel.zero",
    "lockstep.preparation.prepare",
    "lockstep.train.whole",
)
# Two small modules of torch, of functions that scripts import by name.
ALSO = {"torch.distributed.checkpoint.format_utils", "torch.distributed.checkpoint.state_dict"}


def imported(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code + MODULES],
        env=ALONE,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def ours(modules: set[str]) -> list[str]:
    return sorted(name for name in modules if name.partition(".")[0] == "lockstep")


def late(modules: set[str]) -> list[str]:
    return [name for name in ours(modules) if name in LATE or name.startswith(tuple(f"{at}." for at in LATE))]


def test_the_front_imports_only_what_its_methods_are_made_of() -> None:
    modules = imported("from lockstep import Accelerator")
    assert "lockstep.accelerator" in modules
    assert late(modules) == []
    assert not {"torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "pydantic"} & modules
    assert len(ours(modules)) <= 95, ours(modules)


def test_a_name_of_utils_imports_only_what_it_needs() -> None:
    assert ours(imported("import lockstep.utils")) == ["lockstep", "lockstep.lazy", "lockstep.utils"]
    modules = imported("from lockstep.utils import str_to_bool")
    assert "lockstep.config.sources" in modules
    assert "torch" not in modules


def test_trainer_by_alias_imports_little_of_ours_and_nothing_that_accelerate_does_without() -> None:
    for package in ("accelerate", "transformers"):
        pytest.importorskip(package)
    modules = imported(ALIAS + TRAINER)
    on_accelerate = imported(TRAINER)
    assert "accelerate.accelerator" in on_accelerate
    assert "lockstep.accelerator" in modules
    assert late(modules) == []
    assert len(ours(modules)) <= 131, ours(modules)
    further = {
        name for name in modules - on_accelerate if name.partition(".")[0] not in ("lockstep", "accelerate")
    }
    assert further <= ALSO, sorted(further)
