from __future__ import annotations

import signal

from lockstep.launch import Failure, describe_failure, exit_code, first_failure
from lockstep.runtime import report_of


def reported(rank: int, consequence: bool, time_ns: int) -> Failure:
    return Failure(rank, 1, report_of(ValueError(f"of rank {rank}"), consequence, time_ns))


def test_the_earliest_report_that_is_no_consequence_is_the_first_failure() -> None:
    late, early, consequence = reported(0, False, 30), reported(2, False, 20), reported(1, True, 10)
    assert first_failure([late, early, consequence]).rank == 2


def test_a_killed_rank_comes_before_the_errors_that_its_end_caused() -> None:
    killed = Failure(3, -signal.SIGKILL, {})
    assert (
        first_failure([reported(0, True, 10), killed, Failure(1, -signal.SIGTERM, {}, ended_by_us=True)])
        is killed
    )


def test_ranks_that_the_launcher_ended_come_last() -> None:
    ended = Failure(0, -signal.SIGKILL, {}, ended_by_us=True)
    assert first_failure([ended, reported(1, True, 5)]).rank == 1


def test_exit_codes_are_those_of_a_shell() -> None:
    assert exit_code(Failure(0, 7, {})) == 7
    assert exit_code(Failure(0, -9, {})) == 137


def test_the_last_line_names_rank_error_and_the_rest() -> None:
    text = describe_failure(reported(1, False, 0), num_processes=4)
    assert text == "lockstep: rank 1 failed first (ValueError: of rank 1); the other 3 processes were ended."


def test_a_report_of_another_format_is_tolerated() -> None:
    assert Failure(0, 3, {"message": "text"}).summary == "exit code 3"
    assert Failure(0, 3, {"message": {"extraInfo": None}}).own == {}
