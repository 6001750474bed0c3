"""Ranks with different versions of torch or lockstep are refused by name, on all of them."""

from __future__ import annotations

import pytest
import torch

import lockstep
from lockstep.errors import UsageError
from lockstep.runtime import check_same_versions, differences, start_runtime


def refusals(odd: list[tuple[str, str, str]]) -> list[str]:
    """What each case says here, in which rank 1 has another version of torch and of lockstep than rank 0."""
    runtime = start_runtime(cpu=True)
    found = []
    own = torch.__version__, lockstep.__version__
    for torchs, theirs, rank_0 in odd:
        torch.__version__, lockstep.__version__ = (torchs, theirs) if runtime.rank == 1 else (rank_0, own[1])
        try:
            check_same_versions(runtime)
            found.append("")
        except UsageError as error:
            found.append(str(error))
        finally:
            torch.__version__, lockstep.__version__ = own
    return found


def test_what_differs_is_named_with_its_ranks_on_every_rank(run_distributed) -> None:
    own = lockstep.__version__
    cases = [
        ("2.14.1", own, "2.14.1"),
        ("2.14.1+cu126", own, "2.14.1+cpu"),
        ("2.15.0", own, "2.14.1"),
        ("2.14.1", "9.9", "2.14.1"),
        ("2.15.0.dev" + "0" * 500, own, "2.14.1"),
    ]
    said = run_distributed(refusals, 2, cases)
    assert said[0] == said[1]
    same, builds, other_torch, other_lockstep, endless = said[0]
    assert same == builds == ""
    assert "different versions of torch: 2.14.1 on rank 0, 2.15.0 on rank 1." in other_torch
    assert f"different versions of lockstep: {own} on rank 0, 9.9 on rank 1." in other_lockstep
    assert "different versions of torch" in endless and len(endless) < 500


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([("2.13.0", "1")] * 4, ""),
        ([("2.13.0", "1")] * 3 + [("2.12.0", "1")], "2.13.0 on ranks 0, 1, 2, 2.12.0 on rank 3"),
        ([("2.13.0", "1")] * 20 + [("2.12.0", "1")], "0, 1, 2, 3, 4, 5, 6, 7 and 12 more, 2.12.0 on rank 20"),
    ],
)
def test_ranks_are_grouped_by_version(ranks: list[tuple[str, str]], said: str) -> None:
    assert said in differences(ranks)
    assert bool(said) == bool(differences(ranks))
