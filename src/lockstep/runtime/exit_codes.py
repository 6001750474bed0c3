"""The exit codes of a launch and of its processes that say more than "failed"."""

from __future__ import annotations

PREEMPTED = 75
"""All ranks stopped at one step boundary and saved their state: run the same command again (``EX_TEMPFAIL``)."""

HANG = 124
"""A hang lasted longer than its limit and was ended (the code of ``timeout``)."""


def of_signal(number: int) -> int:
    """The code of a process that a signal ended, as shells count: 128 + its number."""
    return 128 + number
