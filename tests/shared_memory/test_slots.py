"""Waiting for what other ranks write."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from lockstep.shared_memory import GroupLayout, Peers, Segment
from tests.refusals import expect_refusal


def waits(at_look: Callable[[Peers], None]) -> Peers:
    """Rank 0 of 2 waits for rank 1, which ends while rank 0 looks for it; before that it does ``at_look``."""
    layout = GroupLayout(2)
    peers = Peers(Segment.create(layout.size), layout, 0, [0, 1], timeout_s=30)
    peers.words[layout.word(0)] = 1

    def is_held(rank: int) -> bool:
        at_look(peers)
        return False

    with mock.patch.object(peers.segment, "is_held", is_held):
        peers.await_word(peers.words, peers.segment.base, layout.word(1), 1, rank=1, deadline=0)
    return peers


def test_a_rank_that_has_done_its_part_may_end_while_others_look_for_it() -> None:
    def arrive(peers: Peers) -> None:
        peers.words[peers.layout.word(1)] = 1

    assert waits(arrive).words[GroupLayout(2).word(1)] == 1


def test_a_rank_that_ends_without_its_part_is_named() -> None:
    expect_refusal(RuntimeError, "Rank 1 has ended", waits, lambda peers: None)
