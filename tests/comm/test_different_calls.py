"""A call that all ranks must make, made by some: every rank raises one sentence with the call and the line of each."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from lockstep import Accelerator
from lockstep.errors import DifferentCallsError
from lockstep.user_call import UserCall, in_different_calls
from tests.launch import helpers as launch

SCRIPT = """
import sys, torch
from lockstep import Accelerator
accelerator = Accelerator(cpu=True, parallel=sys.argv[2])
is_first = accelerator.process_index == 0
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(3):
    loss = model(torch.ones(2, 4)).sum()
    accelerator.backward(loss)
    optimizer.step()
    if step == 1 and is_first:
        accelerator.save_state(sys.argv[1])
"""


def test_a_script_that_calls_it_on_one_rank_ends_with_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*launch.COMMAND, "--nproc-per-node=2", str(script), str(tmp_path / "out"), "zero=2"],
        env=launch.environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=launch.START_LIMIT_S,
        check=False,
    )
    line = len(SCRIPT.splitlines())
    assert done.returncode == 1
    assert f"Rank 0 called Accelerator.save_state (train.py:{line}), rank 1" in done.stderr
    assert f"Call Accelerator.save_state on every rank (train.py:{line}), or on none." in done.stderr
    assert "lockstep/" not in done.stderr  # no traceback of ours
    assert len(done.stderr.splitlines()) <= 2, done.stderr


def two_methods() -> list[str]:
    accelerator = Accelerator(cpu=True)
    is_first = accelerator.process_index == 0
    with pytest.raises(DifferentCallsError) as caught:
        if is_first:
            accelerator.save_state("nowhere")
        else:
            accelerator.gather(torch.ones(2))
    accelerator.wait_for_everyone()  # the group is still in step
    return [str(caught.value)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_methods_of_an_accelerator_are_named_with_their_lines(run_distributed, ranks: int) -> None:
    others = "rank 1" if ranks == 2 else "ranks 1, 2, 3"
    here = r"\(test_different_calls\.py:\d+\)"
    for [message] in run_distributed(two_methods, ranks):
        assert re.search(
            rf"Rank 0 called Accelerator\.save_state {here}, {others} called Accelerator\.gather {here}",
            message,
        )
        assert re.search(rf"Call Accelerator\.save_state on every rank {here}, or on none\.$", message)


def test_the_same_call_of_one_line_is_no_difference_and_only_a_call_for_all_is_advised() -> None:
    here, there = UserCall("Accelerator.gather", "a.py:1"), UserCall("forward", "a.py:2")
    assert in_different_calls({0: here, 1: here}) == ""
    assert in_different_calls({}) == ""
    assert "Call Accelerator.gather on every rank (a.py:1)" in in_different_calls({0: there, 1: here})
    assert "same calls, in the same order" in in_different_calls({0: here, 1: here._replace(line="a.py:9")})
    assert "Rank 0 called a collective, rank 1 called forward (a.py:2)" in in_different_calls(
        {0: UserCall(), 1: there}
    )
