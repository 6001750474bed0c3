from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config import process_environment, user_config_file, worker_settings
from lockstep.errors import ConfigError
from lockstep.utils import PrecisionType
from tests.refusals import expect_refusal

DOCS = Path(__file__).parents[2] / "docs"
LAUNCHERS = yaml.safe_load((DOCS / "data" / "launchers.yaml").read_text())
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}


def test_a_plain_process_is_a_world_of_one() -> None:
    here = process_environment({})
    assert (here.rank, here.world_size, here.local_rank, here.distributed) == (0, 1, 0, False)


def test_torchruns_variables_are_read() -> None:
    here = process_environment(TORCHRUN)
    assert (here.rank, here.world_size, here.local_rank, here.local_world_size) == (3, 4, 1, 2)
    assert (here.node_rank, here.master_addr, here.master_port, here.distributed) == (
        1,
        "10.0.0.1",
        1234,
        True,
    )


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        ({"RANK": "0"}, "WORLD_SIZE is missing"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 with WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is not an integer"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not an integer"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE=four is not an integer"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is missing"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "MASTER_ADDR and MASTER_PORT are missing"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "MASTER_ADDR and MASTER_PORT are missing",
        ),
    ],
)
def test_contradictions_are_refused_with_the_variables_named(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        process_environment(environ)


@pytest.mark.parametrize("seen", LAUNCHERS, ids=lambda seen: f"{seen['launcher']} {seen['started by']}")
def test_the_variables_of_launchers_tell_the_place(seen: dict[str, Any]) -> None:
    here = process_environment({**seen["variables"], "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    place = [here.rank, here.world_size, here.local_rank, here.local_world_size, here.node_rank]
    assert (place, here.launcher) == (seen["place"], seen["launcher"])


def test_the_docs_list_what_was_seen_of_launchers() -> None:
    rows = {f"| {seen['launcher']} | {seen['version']} | `{seen['started by']}` |" for seen in LAUNCHERS}
    text = (DOCS / "launching.md").read_text()
    assert [row for row in sorted(rows) if row not in text] == []
    assert [name for seen in LAUNCHERS for name in seen["variables"] if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "text", ["4(x2", "x", "4(x999999999),", "4,,4", "(x2)", "4(x2)3", "-1,2", "\u0664,2"]
)
def test_a_list_of_tasks_that_is_none_is_refused(text: str) -> None:
    environ = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "999999999",
        "SLURM_STEP_TASKS_PER_NODE": text,
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
    expect_refusal(ConfigError, "SLURM_STEP_TASKS_PER_NODE", process_environment, environ)


def test_a_rank_without_a_number_of_ranks_or_a_place_on_its_machine_is_refused() -> None:
    expect_refusal(ConfigError, "PMIX_RANK=0", process_environment, {"PMIX_RANK": "0"})
    prterun = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-1217@1"}  # of PRRTE 4 in Slurm 22.05
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    expect_refusal(ConfigError, "PMIX_RANK=1", process_environment, prterun | step)
    meeting = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    elsewhere = {"PMI_RANK": "1", "PMI_SIZE": "2", **meeting}
    expect_refusal(ConfigError, "LOCAL_RANK", process_environment, elsewhere)
    here = process_environment({**elsewhere, "MASTER_ADDR": "127.0.0.1"})
    assert (here.local_rank, here.local_world_size) == (1, 2)


def test_a_slurm_batch_script_itself_is_one_process() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    assert process_environment(batch).world_size == 1


def test_without_local_ranks_all_processes_on_the_loopback_are_on_one_machine() -> None:
    spawned = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    here = process_environment(spawned)
    assert (here.local_rank, here.local_world_size) == (1, 2)
    elsewhere = process_environment({**spawned, "MASTER_ADDR": "10.0.0.1"})
    assert (elsewhere.local_rank, elsewhere.local_world_size) == (0, 1)


def test_code_wins_over_the_environment_and_that_over_defaults() -> None:
    environ = {"LOCKSTEP_MIXED_PRECISION": "bf16", "LOCKSTEP_USE_CPU": "yes"}
    settings = worker_settings({"mixed_precision": "fp16", "cpu": None}, environ)
    assert settings["mixed_precision"] == (PrecisionType.FP16, "code", {})
    assert settings["cpu"] == (True, "environment variable LOCKSTEP_USE_CPU", {})
    assert settings["dynamo_backend"] == ("no", "default", {})


def test_accelerates_variables_count_where_ours_are_not_set() -> None:
    theirs = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}
    assert worker_settings({}, theirs)["mixed_precision"].value == PrecisionType.FP16
    assert worker_settings({}, theirs)["gradient_accumulation_steps"].value == 3
    both = theirs | {"LOCKSTEP_MIXED_PRECISION": "bf16"}
    assert worker_settings({}, both)["mixed_precision"].value == PrecisionType.BF16


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"LOCKSTEP_MIXED_PRECISION": "bf61"}, "LOCKSTEP_MIXED_PRECISION=bf61 .* Did you mean 'bf16'"),
        ({"ACCELERATE_MIXED_PRECISION": "fp4"}, "fp4"),
        ({"LOCKSTEP_USE_CPU": "perhaps"}, "LOCKSTEP_USE_CPU=perhaps is not a truth value"),
        ({"LOCKSTEP_GRADIENT_ACCUMULATION_STEPS": "0"}, "integer from 1 to 1000000000"),
        ({"LOCKSTEP_GRADIENT_ACCUMULATION_STEPS": "9" * 5000}, "integer from 1 to 1000000000"),
    ],
)
def test_bad_values_name_the_variable(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        worker_settings({}, environ)


def test_an_unknown_setting_in_code_names_the_nearest() -> None:
    expect_refusal(ConfigError, "'mixed_precision'", worker_settings, {"mixed_precison": "bf16"}, {})


def test_the_users_file_follows_the_environment() -> None:
    assert str(user_config_file({"LOCKSTEP_CONFIG_FILE": "/a/b.yaml"})) == "/a/b.yaml"
    assert str(user_config_file({"XDG_CONFIG_HOME": "/x"})) == "/x/lockstep/config.yaml"


def test_reading_the_environment_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, lockstep.config as s; s.process_environment(); s.worker_settings();"
        "sys.exit(bool({'torch', 'pydantic', 'yaml'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
