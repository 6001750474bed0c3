"""``fsdp=`` and ``deepspeed=`` of ``TrainingArguments``, by alias on two processes, against the installed Accelerate.

There the same arguments but for these train by DDP.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.friends.compare import difference
from tests.compat.friends.packages import deepspeed_package
from tests.compat.friends.test_friends import MOST, end, start

SOME = "fsdp_full_shard last_fsdp deepspeed_2 deepspeed_3"
ALL = f"""
    {SOME} fsdp_shard_grad_op fsdp_reshard fsdp_offload fsdp_by_size fsdp_no_wrap fsdp_recompute fsdp_version_1
    fsdp_version_1_grad fsdp_sharded_states deepspeed_none deepspeed_1 deepspeed_2_offload deepspeed_3_offload
"""


@pytest.fixture(autouse=True)
def libraries() -> None:
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "words", [SOME, pytest.param(ALL, marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_sharding_among_the_arguments_trains_as_whole_models_do_and_resumes_on_one(
    words: str, tmp_path: Path
) -> None:
    here, there, alone = tmp_path / "here", tmp_path / "there", tmp_path / "alone"
    package = deepspeed_package(tmp_path)
    cells = " ".join(f"sharded/{word}" for word in words.split())
    end(
        start(cells, here, True, 2, packages=package),
        start("sharded/whole sharded/whole_last", there, False, 2),
    )
    found = {
        word: difference(here / word, there / ("whole_last" if word.startswith("last") else "whole"))
        for word in words.split()
    }
    assert {word: far for word, far in found.items() if max(far) > MOST["zero"]} == {}
    # One process, with as many samples in a step: twice the windows. Means over other evaluation batches differ.
    on_one = {"CELLS_FROM": str(here), "CELLS_WINDOW": "4"}
    resumed = "sharded/last_taken_up_deepspeed sharded/last_taken_up_fsdp/zero=3"
    end(start(resumed, alone, True, 1, packages=package, **on_one))
    for word in resumed.split():
        assert difference(alone / "-".join(word.split("/")[1:]), there / "whole_last")[1] <= MOST["zero"]
