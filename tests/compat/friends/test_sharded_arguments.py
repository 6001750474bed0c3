"""``fsdp=`` and ``deepspeed=`` of ``TrainingArguments``, by alias on two processes, against the installed Accelerate.

There the same arguments but for these train by DDP. ``test_friends`` runs some of them beside its own cells.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.friends.packages import deepspeed_package
from tests.compat.friends.runs import (
    RESUMED,
    SOME_SHARDED,
    WHOLE,
    close_to_whole,
    end,
    on_one,
    resumed_like_whole,
    sharded_cells,
    start,
)

ALL = f"""
    {SOME_SHARDED} fsdp_shard_grad_op fsdp_reshard fsdp_offload fsdp_by_size fsdp_no_wrap fsdp_recompute fsdp_version_1
    fsdp_version_1_grad fsdp_sharded_states deepspeed_none deepspeed_1 deepspeed_2_offload deepspeed_3_offload
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_sharding_among_the_arguments_trains_as_whole_models_do_and_resumes_on_one(tmp_path: Path) -> None:
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name)
    here, there, alone = tmp_path / "here", tmp_path / "there", tmp_path / "alone"
    package = deepspeed_package(tmp_path)
    end(start(sharded_cells(ALL), here, True, 2, packages=package), start(WHOLE, there, False, 2))
    close_to_whole(ALL, here, there)
    end(start(RESUMED, alone, True, 1, packages=package, **on_one(here)))
    resumed_like_whole(alone, there)
