"""Manifests against the APIs as written down in ``kubernetes_api``, Go's YAML (kubectl) and Kubeflow's models."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from launch.kubernetes_api import JOBSET, problems
from lockstep.cli import cli
from lockstep.config import SettingValue
from lockstep.errors import ConfigError
from lockstep.launch import LaunchPlan, Program, end_process, make_plan, merge
from lockstep.launch.kubernetes import MAKE_SECRET, as_yaml, launch, manifests
from tests.marks import examples
from tests.patching import module_of
from tests.refusals import expect_refusal

IMAGE = "ghcr.io/me/train:1"
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def plan(
    *arguments: str, options: dict[str, str] | None = None, script: str = "true", **flags: object
) -> LaunchPlan:
    said = {"k8s": "jobset", "k8s_options": {"image": IMAGE, "name": "train", **(options or {})}, "nproc": 2}
    settings = merge({name: SettingValue(value, "flag") for name, value in {**said, **flags}.items()}, {}, {})
    made = make_plan(Program("true", no_python=True), settings, device_count=0, cores=8)
    return dataclasses.replace(made, command=(sys.executable, script, *arguments))


def document(plan: LaunchPlan) -> dict[str, Any]:
    return yaml.safe_load(manifests(plan))


def job_of(jobset: dict[str, Any]) -> dict[str, Any]:
    (job,) = jobset["spec"]["replicatedJobs"]
    return job["template"]["spec"]


def container_of(jobset: dict[str, Any]) -> dict[str, Any]:
    (container,) = job_of(jobset)["template"]["spec"]["containers"]
    return container


FULL = {
    "namespace": "ml",
    "cpu": "8",
    "memory": "32Gi",
    "claim": "checkpoints:/checkpoints",
    "service_account": "trainer",
}
CASES = {
    "two machines": {"num_machines": 2, "mixed_precision": "bf16"},
    "elastic": {"num_machines": 4, "min_machines": 1},
    "one machine": {"use_cpu": True},
}


@pytest.mark.parametrize("case", CASES)
def test_manifests_are_what_the_apis_accept(case: str) -> None:
    for options in ({}, FULL):
        assert problems(document(plan(options=options, **CASES[case])), JOBSET) == []


def test_each_machine_runs_the_ordinary_launch_as_one_of_several() -> None:
    flags = {"num_machines": 2, "max_restarts": 3, "grace": 60.0, "watch": False}
    jobset = document(plan("--lr", "1e-3", script="my/train.py", **flags))
    container = container_of(jobset)
    assert container["command"] == ["lockstep", "launch"]
    words = "--nproc 2 --nnodes 2 --rdzv train-node-0-0.train:29500 --node-rank $(JOB_COMPLETION_INDEX)"
    words += " --max-restarts 3 --grace 60 --hang-timeout 300 --no-watch my/train.py --lr 1e-3"
    assert container["args"] == words.split()


@pytest.mark.parametrize("case", CASES)
def test_the_containers_command_is_one_that_launch_understands(case: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    arguments = [
        word.replace("$(JOB_COMPLETION_INDEX)", "1")
        for word in container_of(document(plan("--epochs", "3", script=str(script), **CASES[case])))["args"]
    ]
    done = CliRunner().invoke(cli, ["launch", "--dry-run", *arguments])
    assert done.exit_code == 0, done.output
    if case == "elastic":
        assert "--node-rank" not in arguments  # machines are numbered as they arrive


def test_ranks_of_an_elastic_job_may_leave_and_join() -> None:
    job = job_of(document(plan(num_machines=4, min_machines=1)))
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_a_stop_with_saved_state_is_retried_and_does_not_count() -> None:
    job = job_of(document(plan(num_machines=2, max_restarts=3, grace=45.5)))
    exit_codes, disruption = job["podFailurePolicy"]["rules"]
    assert (exit_codes["action"], exit_codes["onExitCodes"]["values"]) == ("Ignore", [75])
    pod = job["template"]["spec"]
    assert exit_codes["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert (disruption["action"], disruption["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    assert job["backoffLimit"] == 3 * 2
    assert pod["terminationGracePeriodSeconds"] > 45.5  # longer than the launcher


def test_the_secret_is_a_reference_and_nothing_secret_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SECRET", "5ec2e7" * 11)
    monkeypatch.setenv("WANDB_API_KEY", "do-not-tell")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    text = manifests(plan(num_machines=2, mixed_precision="bf16", forward_env=("NCCL_DEBUG",)))
    environment = container_of(yaml.safe_load(text))["env"]
    assert "5ec2e7" not in text
    assert "do-not-tell" not in text
    assert environment == [
        {"name": "LOCKSTEP_MIXED_PRECISION", "value": "bf16"},
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {
            "name": "LOCKSTEP_SECRET",
            "valueFrom": {"secretKeyRef": {"name": "train-secret", "key": "secret"}},
        },
    ]
    expect_refusal(ConfigError, "WANDB_API_KEY", manifests, plan(forward_env=("WANDB_API_KEY",)))
    expect_refusal(ConfigError, "NOT_SET", manifests, plan(forward_env=("NOT_SET",)))


@needs_kubectl
def test_the_command_in_the_comment_makes_the_secret() -> None:
    text = manifests(plan(num_machines=2, options={"namespace": "ml"}))
    (line,) = re.findall(r"^#   (.*kubectl create secret.*)$", text, flags=re.MULTILINE)
    maker, _, kubectl = line.partition(" | ")
    assert maker == MAKE_SECRET
    made = subprocess.run(shlex.split(maker), capture_output=True, check=True)
    done = subprocess.run(
        [*shlex.split(kubectl), "--dry-run=client", "-o", "json"],
        input=made.stdout,
        capture_output=True,
        check=True,
        timeout=30,
    )
    secret = json.loads(done.stdout)
    assert (secret["metadata"]["name"], secret["metadata"]["namespace"]) == ("train-secret", "ml")
    assert re.fullmatch(rb"[0-9a-f]{64}\n", base64.b64decode(secret["data"]["secret"]))


def go_reads(text: str) -> dict[str, Any]:
    """A document as kubectl reads it; it answers from the text, without a cluster."""
    done = subprocess.run(
        ["kubectl", "label", "--local", "-f", "-", "-o", "json", "a=b"],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return json.loads(done.stdout)


@needs_kubectl
def test_kubernetes_reads_every_word_as_the_text_that_it_was() -> None:
    words = "1e-3 0o7 y n on No 08 0b1 -.5 +3 .inf ~ null 12e03 1_000 2001-01-01 1:30 0x = << - -- --- e3 a:b"
    words += " #x x#y %a @b `c` !d &e *f ? | > {} [] $(HOME) $$ 'q' \"d\" back\\slash ünïcode"
    arguments = [*words.split(" "), "", " ", "a b ", "a: b", "a #b", "two\nlines", "tab\t"]
    python = document(plan(*arguments))
    go = go_reads(manifests(plan(*arguments)))
    assert container_of(go) == container_of(python)
    assert container_of(go)["args"][-len(arguments) :] == [word.replace("$", "$$") for word in arguments]


@examples(200)
@given(st.lists(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)))
def test_any_text_survives_the_way_through_yaml(words: list[str]) -> None:
    assert yaml.safe_load(as_yaml({"args": words})) == {"args": words}


def test_gpus_are_one_for_each_process_unless_said() -> None:
    def limits(options: dict[str, str], **flags: object) -> dict[str, str]:
        jobset = document(plan(options=options, **flags))
        return container_of(jobset).get("resources", {}).get("limits", {})

    assert limits({}) == {"nvidia.com/gpu": "2"}
    assert limits({}, use_cpu=True) == {}
    assert limits({"gpus": "0"}) == {}
    assert limits({"gpus": "4", "gpu_resource": "amd.com/gpu", "cpu": "2"}) == {
        "amd.com/gpu": "4",
        "cpu": "2",
    }


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("image", "has space"),
        ("image", "UPPER/path:tag!"),
        ("image", ""),
        ("name", "Train"),
        ("name", "1train"),
        ("name", "train_it"),
        ("name", "a" * 64),
        ("name", "train\n"),
        ("namespace", "-ml"),
        ("cpu", "0"),
        ("cpu", "four"),
        ("cpu", "-1"),
        ("memory", "16GB"),
        ("memory", "0Gi"),
        ("gpus", "-1"),
        ("gpus", "1.5"),
        ("gpu_resource", "gpu"),
        ("secret", "a..b"),
        ("claim", "checkpoints"),
        ("claim", "checkpoints:relative"),
        ("claim", "checkpoints:/a/../b"),
        ("nmae", "x"),
    ],
)
def test_what_breaks_a_rule_of_kubernetes_is_refused_by_name(key: str, bad: str) -> None:
    with pytest.raises(ConfigError, match=f"--k8s-option {key}"):
        manifests(plan(options={key: bad}))


def test_a_name_must_leave_room_for_those_of_the_pods() -> None:
    longest = "a" * (63 - len("-node-0-1-xxxxx"))
    jobset = document(plan(options={"name": longest}, num_machines=2))
    assert jobset["metadata"]["name"] == longest
    expect_refusal(
        ConfigError, "at most 48", manifests, plan(options={"name": longest + "a"}, num_machines=2)
    )


@pytest.mark.parametrize(
    ("name", "value"), [("main_process_ip", "10.0.0.1"), ("secret_file", "/home/me/secret")]
)
def test_what_only_this_machine_has_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        manifests(plan(num_machines=2, **{name: value}))


def test_the_image_is_required_and_nothing_is_started(tmp_path: Path) -> None:
    without = plan()
    expect_refusal(
        ConfigError,
        "image=",
        manifests,
        dataclasses.replace(without, transport=dataclasses.replace(without.transport, options={})),
    )
    expect_refusal(ConfigError, "--dry-run", launch, without)
    unwritable = dataclasses.replace(without.transport, output=str(tmp_path / "no" / "job.yaml"))
    expect_refusal(ConfigError, "No such file", launch, dataclasses.replace(without, transport=unwritable))


def commands_of_the_page() -> list[list[str]]:
    page = (Path(__file__).parents[2] / "docs/launching-kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("lockstep ")]


@pytest.mark.parametrize("words", commands_of_the_page(), ids=" ".join)
def test_the_commands_of_the_page_do_what_it_says(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    codes: list[int] = []
    monkeypatch.setattr(module_of(end_process), "end_process", codes.append)
    Path("train.py").write_text("")
    done = CliRunner().invoke(cli, words)
    assert (done.exit_code, codes) == (0, [] if "--dry-run" in words else [0]), done.output
    if "-o" in words:
        assert problems(yaml.safe_load(Path("job.yaml").read_text()), JOBSET) == []
        assert "kubectl create -f job.yaml" in done.stderr
