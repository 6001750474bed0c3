"""Time of a process that is stopped meanwhile; the clock is made up."""

from __future__ import annotations

from lockstep.control import AwakeClock


def test_pauses_do_not_count_and_time_in_small_pieces_does() -> None:
    now = [1000.0]
    clock = AwakeClock(lambda: now[0])
    for _ in range(50):
        now[0] += 0.2
        seen = clock()
    assert abs(seen - 10.0) < 1e-6
    now[0] += 3600.0  # it was suspended for an hour
    assert clock() - seen == 1.0
    now[0] = 0.0  # a clock that goes back
    assert clock() - seen == 1.0
    now[0] += 0.5
    assert abs(clock() - seen - 1.5) < 1e-6
