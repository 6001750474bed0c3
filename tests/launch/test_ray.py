"""``--ray`` against a stand-in for the package: what is asked of it, and real processes as the ranks.

``tests/cluster/test_ray.py`` has the real one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.fake_ray import Asked, install
from lockstep.config import SettingValue
from lockstep.errors import ConfigError, MissingExtraError
from lockstep.launch import LaunchPlan, Program, make_plan, merge
from lockstep.launch.ray_cluster import (
    RayPlacement,
    address,
    commands,
    launch,
    shortage,
    uses_gpus,
    variables_of_ranks,
)
from tests.patching import module_of
from tests.refusals import expect_refusal

WORD = """
import json, os, pathlib, sys, time
rank = int(os.environ["RANK"])
out = pathlib.Path(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def _same_environment_after() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(module_of(launch), "OUTPUT_S", 0.0)
    return install(monkeypatch, {"CPU": 8.0})


def plan(tmp_path: Path, body: str = "", **flags: object) -> LaunchPlan:
    script = tmp_path / "script.py"
    script.write_text(WORD + body)
    said = {"ray": True, "nproc": 2, "use_cpu": True, **flags}
    settings = merge({name: SettingValue(value, "flag") for name, value in said.items()}, {}, {})
    program = Program(str(script), (str(tmp_path), "--lr", "1e-3"))
    return make_plan(program, settings, device_count=0, cores=4)


def test_the_script_runs_as_main_in_every_worker_with_its_place(tmp_path: Path, asked: Asked) -> None:
    body = """
print("hello from", rank)
(out / f"{rank}.json").write_text(json.dumps([__name__, sys.argv[2:], os.getcwd(), dict(os.environ)]))
"""
    assert launch(plan(tmp_path, body, mixed_precision="bf16")) == 0
    for rank in (0, 1):
        name, arguments, directory, environ = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (name, arguments, directory) == ("__main__", ["--lr", "1e-3"], os.getcwd())
        place = {key: environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        assert place == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
        }
        assert (environ["MASTER_ADDR"], environ["LOCKSTEP_MIXED_PRECISION"]) == ("127.0.0.1", "bf16")
        assert not any(name.startswith("RAY_AUTH_TOKEN") for name in environ)


def test_a_cluster_of_our_own_is_for_this_machine_and_this_user_alone(tmp_path: Path, asked: Asked) -> None:
    assert launch(plan(tmp_path, max_restarts=0)) == 0
    assert asked.init["address"] == "local"
    assert asked.init["include_dashboard"] is False
    assert asked.init["_node_ip_address"] == "127.0.0.1"
    assert asked.environment["RAY_AUTH_MODE"] == "token"
    assert re.fullmatch("[0-9a-f]{64}", asked.environment["RAY_AUTH_TOKEN"])
    assert asked.environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert asked.shut_down


def test_ray_is_asked_for_the_processes_of_the_plan(tmp_path: Path, asked: Asked) -> None:
    assert launch(plan(tmp_path, nproc=3, max_restarts=2, num_cpu_threads_per_process=2)) == 0
    assert asked.bundles == [{"CPU": 2}] * 3
    assert asked.actors == [{"max_concurrency": 2, "num_cpus": 2, "num_gpus": 0}] * 3


def test_the_first_failure_ends_the_others_and_is_named_once(
    tmp_path: Path, asked: Asked, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
if rank == 1:
    raise ValueError("on purpose")
(out / "pid").write_text(str(os.getpid()))
time.sleep(60)
"""
    started = time.monotonic()
    assert launch(plan(tmp_path, body)) == 1
    assert time.monotonic() - started < 20
    err = capfd.readouterr().err
    # The traceback; the script has no Accelerator to report it.
    assert err.count("ValueError: on purpose") == 1
    assert err.count("lockstep: rank 1 failed first (exit code 1)") == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(("code", "expected"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_that_of_the_rank(tmp_path: Path, asked: Asked, code: str, expected: int) -> None:
    assert launch(plan(tmp_path, f"if rank == 1:\n    {code}")) == expected


def test_after_a_failure_all_ranks_start_again(tmp_path: Path, asked: Asked) -> None:
    body = """
number = os.environ["LOCKSTEP_RESTART"]
(out / f"{rank}-{number}").write_text("")
if number == "0":
    sys.exit(3 if rank == 0 else time.sleep(60))
"""
    assert launch(plan(tmp_path, body, max_restarts=1)) == 0
    assert {path.name for path in tmp_path.glob("?-?")} >= {"0-0", "0-1", "1-1"}


def test_a_stop_signal_reaches_one_rank_and_saved_state_is_no_failure(tmp_path: Path, asked: Asked) -> None:
    body = """
import signal
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: (out / "stop").write_text(""))
(out / f"ready-{rank}").write_text("")
while not (out / "stop").exists():
    time.sleep(0.05)
time.sleep(0.5 * rank)  # the last one is left to finish
os._exit(75)
"""

    def stop_when_ready() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.05)
        # Else the launcher is gone, and the signal would end the tests.
        if signal.getsignal(signal.SIGTERM) is not before:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=stop_when_ready, daemon=True).start()
    assert launch(plan(tmp_path, body, max_restarts=3)) == 75
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    expect_refusal(MissingExtraError, "[ray]", launch, plan(tmp_path))


def test_what_ray_cannot_do_is_refused_before_it_starts(tmp_path: Path, asked: Asked) -> None:
    elastic = dataclasses.replace(plan(tmp_path), num_machines=4, min_machines=1)
    expect_refusal(ConfigError, "1:4", launch, elastic)
    chosen = dataclasses.replace(plan(tmp_path, num_machines=2), environment={"CUDA_VISIBLE_DEVICES": "0,1"})
    expect_refusal(ConfigError, "gpu_ids", launch, chosen)
    said = {
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "interface": "eth0",
        "hang_timeout": 60.0,
    }
    for name, value in {**said, "secret_file": "/home/me/secret"}.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        expect_refusal(ConfigError, f"{name} is {shown}", launch, plan(tmp_path, **{name: value}))
    logged = dataclasses.replace(plan(tmp_path), log_dir="logs")
    expect_refusal(ConfigError, "log_dir is logs", launch, logged)
    assert asked.init == {}


def test_a_cluster_that_cannot_be_joined_is_an_error_for_people(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_arguments: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    monkeypatch.setattr(sys.modules["ray"], "init", refuse)
    two = plan(tmp_path, num_machines=2)
    expect_refusal(ConfigError, "at auto", launch, two)


def test_a_dry_run_shows_what_would_run_without_the_token(tmp_path: Path) -> None:
    (command,) = commands(plan(tmp_path, mixed_precision="bf16"))
    assert command.arguments[1:] == (str(tmp_path / "script.py"), str(tmp_path), "--lr", "1e-3")
    assert command.environment["RAY_AUTH_TOKEN"] == "<secret>"
    assert command.environment["LOCKSTEP_MIXED_PRECISION"] == "bf16"
    assert command.title.startswith("2 actors of Ray on a cluster on this machine")


def test_which_cluster_and_what_it_lacks(tmp_path: Path) -> None:
    one, two = plan(tmp_path), plan(tmp_path, num_machines=2)
    assert (address(one, {}), address(two, {})) == ("local", "auto")
    assert address(one, {"RAY_ADDRESS": "10.0.0.1:6379"}) == "10.0.0.1:6379"
    assert shortage(two, {"CPU": 4.0}, use_gpu=False) is None
    assert (
        shortage(two, {"CPU": 4.0, "GPU": 1.0}, use_gpu=True)
        == "the Ray cluster has 1 GPUs and the run needs 4"
    )
    unsaid = plan(tmp_path, use_cpu=None)
    assert (uses_gpus(one, {"GPU": 2}), uses_gpus(unsaid, {"GPU": 2}), uses_gpus(unsaid, {})) == (
        False,
        True,
        False,
    )


def test_ranks_of_one_machine_are_in_a_row_and_see_its_gpus() -> None:
    places = [RayPlacement(node, node, (gpu,)) for node, gpu in (("a", "1"), ("b", "0"), ("a", "0"))]
    order, variables = variables_of_ranks(places, restart=2)
    assert order == [0, 2, 1]
    assert [
        [one[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")] for one in variables
    ] == [
        ["0", "0", "2", "0"],
        ["1", "1", "2", "0"],
        ["2", "0", "1", "1"],
    ]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in variables] == ["1,0", "1,0", "0"]
    assert {one["LOCKSTEP_RESTART"] for one in variables} == {"2"}
    (alone,) = variables_of_ranks([RayPlacement("a", "a", ())], restart=0)[1]
    assert "CUDA_VISIBLE_DEVICES" not in alone
