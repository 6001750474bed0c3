"""Signals of a launcher: which asks for a stop, which ends the run, and that they are given back."""

from __future__ import annotations

import signal
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2

import pytest

from lockstep.launch import ReceivedSignals, received_by

ALL = (SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP, SIGQUIT)


@pytest.mark.parametrize(
    ("received", "stop", "end"),
    [
        ([], None, None),
        ([SIGUSR1], SIGUSR1, None),
        ([SIGTERM, SIGTERM], SIGTERM, SIGTERM),
        ([SIGUSR2, SIGTERM, SIGINT], SIGUSR2, SIGTERM),
        ([SIGINT], None, SIGINT),
        ([SIGHUP, SIGTERM, SIGUSR1], SIGTERM, SIGHUP),
    ],
)
def test_the_first_polite_one_asks_and_the_first_other_one_ends(
    received: list[signal.Signals], stop: signal.Signals | None, end: signal.Signals | None
) -> None:
    asked = ReceivedSignals()
    for number in received:
        asked.add(number)
    assert (asked.stop, asked.end) == (stop, end)
    assert asked.first == (received[0] if received else None)


def test_all_are_received_and_go_where_they_went_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in ALL]
    received: list[signal.Signals] = []
    with pytest.raises(ValueError), received_by(received.append):
        for number in ALL:
            signal.raise_signal(number)
        raise ValueError("on purpose")
    assert received == list(ALL)
    assert [signal.getsignal(number) for number in ALL] == before
