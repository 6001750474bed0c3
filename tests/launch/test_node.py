from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import Host
from lockstep.errors import ConfigError
from lockstep.launch import (
    FaultPolicy,
    LaunchPlan,
    Node,
    Transport,
    as_line,
    first_host,
    from_line,
    local_plan,
    node_of,
    parse,
    plan_as_data,
    plan_from_data,
)
from tests.patching import module_of
from tests.refusals import expect_refusal

# anything that an argument vector or an environment can hold, bytes that are not UTF-8 included
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30) | st.binary(
    max_size=30
).map(lambda raw: raw.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
FUZZ = settings(deadline=None)
PLAN = LaunchPlan(command=("python", "t.py"), nproc=2, num_machines=2, min_machines=2, port=29500)


@FUZZ
@given(st.lists(WORDS, max_size=5), st.dictionaries(st.text(max_size=5), WORDS, max_size=3), WORDS)
def test_what_a_machine_is_told_is_one_line_from_which_everything_comes_back(
    words: list[str], environment: dict[str, str], directory: str
) -> None:
    node = Node(replace(PLAN, command=("python", *words)), "ab" * 32, environment, directory, "slurm")
    line = node.line()
    assert line.isascii() and "\n" not in line and "\r" not in line
    assert parse(line.encode()) == node


def test_a_plan_comes_back_with_all_its_parts() -> None:
    transport = Transport("mpi", (Host("a", 2, "me"), Host("b")), {"x": "y"}, None, None, ("A", "B"))
    plan = replace(
        PLAN,
        fault_policy=FaultPolicy(3, 1.5, 2.5, False),
        transport=transport,
        environment={"A": "b"},
        tee=True,
    )
    assert plan_from_data(from_line(as_line(plan_as_data(plan)))) == plan


@FUZZ
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    ["plan", "secret", "environment", "directory", "numbered_by", "command", "transport"]
                ),
                inner,
            )
        ),
        max_leaves=8,
    )
)
def test_documents_that_are_none_are_refused_in_one_sentence(data: object) -> None:
    with pytest.raises(ConfigError):
        parse(json.dumps(data))


@pytest.mark.parametrize("line", [b"", b"\n", b"{", b"[" * 100_000, b"null", b"\xff\xfe", b"{}"])
def test_lines_that_are_no_document_end_the_node_with_exit_code_2(line: bytes) -> None:
    with pytest.raises(ConfigError):
        parse(line)


def test_the_node_says_what_it_cannot_start() -> None:
    text = Node(PLAN, "ab" * 32, {}, "/nonexistent/folder").line()
    for line, sentence in ((b"no plan\n", b"is not a plan"), (text.encode() + b"\n", b"/nonexistent/folder")):
        done = subprocess.run(
            [sys.executable, "-m", module_of(Node).__name__],
            input=line,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert sentence in done.stderr and b"Traceback" not in done.stderr


def test_the_number_of_a_machine_under_slurm_is_that_of_its_node() -> None:
    node = Node(PLAN, "ab" * 32, {}, "/", "slurm")
    environ = {"SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]"}
    plan = local_plan(node, environ, cores=8)
    assert (plan.machine_rank, plan.address, plan.port) == (1, "gpu07", 29500)
    assert plan.environment["OMP_NUM_THREADS"] == "4"
    said = replace(node, plan=replace(PLAN, address="10.0.0.1", environment={"OMP_NUM_THREADS": "3"}))
    plan = local_plan(said, environ, cores=8)
    assert (plan.address, plan.environment["OMP_NUM_THREADS"]) == ("10.0.0.1", "3")
    expect_refusal(ConfigError, "srun", local_plan, node, {}, cores=8)
    expect_refusal(ConfigError, "SLURM_NODEID=2", local_plan, node, environ | {"SLURM_NODEID": "2"}, cores=8)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[01-04,07],x", "n01"),
        ("r[1-2]n[3,5-6]", "r1n3"),
        ("n[7]", "n7"),
        ("c-1.x", "c-1.x"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_shown_document_has_no_secret_and_a_real_one_only_those_that_were_asked_for() -> None:
    environ = {"HF_TOKEN": "canary", "WANDB_API_KEY": "canary", "NCCL_DEBUG": "INFO"}
    plan = replace(PLAN, transport=Transport("hosts", forward_env=("HF_TOKEN",)))
    assert "canary" not in node_of(plan, "<secret>", environ, "/").line()
    assert node_of(plan, "ab" * 32, environ, "/").environment == {"HF_TOKEN": "canary", "NCCL_DEBUG": "INFO"}
