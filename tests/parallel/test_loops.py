"""Training loops that people write, on 2 ranks: equal to plain torch on one process, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import Accelerator, DistributedDataParallelKwargs
from lockstep.errors import UsageError
from parallel.loops import IN_WINDOWS, LOOPS, Block, Plain, Prepared
from parallel.small_groups import groups_in_stage_3
from tests.frozen.verdicts import hold

PAIR_BYTES = 2 * sum(parameter.nbytes for parameter in Block().parameters())
"""With groups of this size two blocks of three are gathered together."""
EQUAL = "equal"
DIFFERS = "is off by"
TOLERANCE = 1e-5

REPLACED = "was set to another parameter or module after the model was prepared"
HOOK = "has a hook by register_"
CHANGED = "changed this rank's own gradient"
LEFT_OUT = "without a gradient, which parallel='ddp' averages"
DIVIDE = "loss.backward(), which does not divide"
PARTED = "is no longer equal on all ranks"
APART = "is not equal on all ranks, so this step"
OWN = "this rank only, because each backward since the last step ran inside no_sync"
BY_SCRIPT = "was changed by the script in this step while it was gathered"
OF_A_PART = "was changed in place, as by w[0].zero_() or w[0] *= 2. The part is a copy"
OWN_IN_WINDOW = "was changed inside an accumulation window, where it is the gradient of this rank only"
NOT_AVERAGED = "has a gradient that was not averaged over the ranks"

BY_HAND = [
    "weights_clamped_in_forward",
    "prototypes_normalised_in_forward",
    "weights_changed_before_backward",
    "weights_decayed_in_windows",
]
OWN_GRADIENTS = {
    "gradients_clipped_in_windows": OWN_IN_WINDOW,
    "gradients_limited_in_windows": OWN_IN_WINDOW,
}
OF_DDP = {
    **OWN_GRADIENTS,
    "weights_that_follow_the_ranks_rows": PARTED,
    "curvature_by_autograd_grad": APART,
    "stepped_without_a_last_backward": OWN,
    "features_of_the_root_alone": LEFT_OUT,
    "heads_in_turn": LEFT_OUT,
    "a_head_for_each_rank": LEFT_OUT,
    "a_head_for_each_rank_from_step_3": LEFT_OUT,
    "heads_in_windows": LEFT_OUT,
    "nothing_trained_at_prepare": "had no trainable parameters when it was prepared",
    "gradients_set_by_hand": APART,
    "weights_tied_after_prepare": "of no prepared model",
    "a_hook_that_clips": CHANGED,
    "a_hook_that_clips_in_windows": CHANGED,
    "a_post_accumulate_hook": CHANGED,
    "plain_backward_in_windows": DIVIDE,
}
OF_ZERO_3 = {
    # In stage 3 weights are shards again after each backward.
    "weights_decayed_in_windows": EQUAL,
    "a_critic_with_a_penalty": "were freed after an earlier backward through the same graph",
}
OF_ZERO = {
    **dict.fromkeys(BY_HAND, BY_SCRIPT),
    "weights_that_follow_the_ranks_rows": BY_SCRIPT,
    "averaged_by_hand": "that was not averaged over the ranks",
    "stepped_without_a_last_backward": NOT_AVERAGED,
    "features_of_the_root_alone": NOT_AVERAGED,
    "weights_tied_by_data_after_prepare": "got the memory of another one",
    "parts_assigned": OF_A_PART,
    "parts_changed_in_place": OF_A_PART,
    "curvature_by_autograd_grad": "appears to not have been used in the graph",
    "a_head_replaced_after_prepare": REPLACED,
    "weights_tied_after_prepare": REPLACED,
    "a_hook_that_clips": HOOK,
    "a_hook_that_clips_in_windows": HOOK,
    "hooks_that_look": HOOK,
    "a_post_accumulate_hook": HOOK,
    "parameters_captured_and_clamped": "The script used a parameter that a model had before",
    "plain_backward_in_windows": DIVIDE,
    "gradients_set_by_hand": "appears to not have been used in the graph",
}
ONE_RANK_WAITS = (
    "blocks_skipped_on_one_rank",
    "blocks_skipped_in_windows",
)
"""Under DDP the rank that has all gradients waits for the one that is refused, until that has left."""


def run_loops(parallel: str, names: list[str]) -> dict[str, str]:
    """What became of each."""
    torch.set_num_threads(1)
    return {name: outcome(parallel, name) for name in names}


def outcome(parallel: str, name: str, **options: Any) -> str:
    steps = 2 if name in IN_WINDOWS else 1
    wanted = LOOPS[name](Plain(steps))
    accelerator = Accelerator(cpu=True, parallel=parallel, gradient_accumulation_steps=steps, **options)
    try:
        with groups_in_stage_3(parallel, PAIR_BYTES):
            found = LOOPS[name](Prepared(accelerator))
    except (UsageError, RuntimeError) as error:
        return str(error)
    finally:
        accelerator.free_memory()
    off = {key: (found[key] - value).abs().max().item() for key, value in wanted.items()}
    key = max(off, key=lambda one: off[one])
    return EQUAL if off[key] < TOLERANCE else f"{key} {DIFFERS} {off[key]:.1e}"


def hold_all(strategy: str, ranks: list[dict[str, str]]) -> None:
    """Compare with the frozen verdicts."""
    hold(
        f"loops, {strategy}",
        (
            {
                name: (EQUAL if said == EQUAL else "differs" if DIFFERS in said else "refused", said)
                for name, said in found.items()
            }
            for found in ranks
        ),
    )


def check(run_distributed: Any, parallel: str, names: list[str]) -> None:
    further = {"zero=1": OWN_GRADIENTS, "zero=3": OF_ZERO_3}
    refused = OF_DDP if parallel == "ddp" else OF_ZERO | further.get(parallel, {})
    names = [name for name in names if parallel != "ddp" or name not in ONE_RANK_WAITS]
    # Refused ones last: a reduction that a refused step has begun would be met by the next loop's.
    names.sort(key=lambda name: name in refused)
    ranks = run_distributed(run_loops, 2, parallel, names, timeout_s=300)
    hold_all(parallel, ranks)
    for found in ranks:
        wrong = {name: said for name, said in found.items() if refused.get(name, EQUAL) not in said}
        assert not wrong


@pytest.mark.parametrize(
    "parallel",
    ["ddp", "zero=3", *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in ("zero=1", "zero=2"))],
)
def test_a_loop_gives_plain_torchs_numbers_or_is_refused(run_distributed, parallel: str) -> None:
    check(run_distributed, parallel, list(LOOPS))


def test_changes_of_weights_while_they_are_gathered_are_refused(run_distributed) -> None:
    check(run_distributed, "zero=2", BY_HAND)


def find_unused(names: list[str]) -> dict[str, str]:
    torch.set_num_threads(1)
    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    return {name: outcome("ddp", name, kwargs_handlers=[options]) for name in names}


def test_ddp_that_looks_for_unused_parameters_takes_every_branch(run_distributed) -> None:
    names = [
        "heads_in_turn",
        "a_head_for_each_rank",
        "blocks_skipped_on_one_rank",
    ]
    ranks = run_distributed(find_unused, 2, names)
    hold_all("ddp find_unused_parameters", ranks)
    for found in ranks:
        assert set(found.values()) == {EQUAL}, found
