"""Loggers of several processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.logging import MultiProcessAdapter, get_logger
from lockstep.runtime import end_runtime, start_runtime


@pytest.fixture
def logger() -> Iterator[MultiProcessAdapter]:
    root, mine = logging.getLogger().level, logging.getLogger("test_log")
    yield get_logger("test_log", log_level="info")
    logging.getLogger().setLevel(root)
    mine.setLevel(logging.NOTSET)


def test_before_a_runtime_exists_the_process_counts_as_the_main_one(
    logger: MultiProcessAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    logger.info("hello %s", "you", main_process_only=True)
    logger.info("in order", in_order=True)
    assert caplog.messages == ["hello you", "in order"]


def test_only_the_main_process_logs_unless_asked(
    logger: MultiProcessAdapter, caplog: pytest.LogCaptureFixture, as_rank: Callable[..., Any]
) -> None:
    as_rank(1)
    logger.info("dropped")
    logger.info("everywhere", main_process_only=False)
    as_rank(0)
    logger.info("main")
    assert caplog.messages == ["[RANK 1] everywhere", "[RANK 0] main"]


def test_our_own_lines_begin_like_those_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_rank: Callable[..., Any]
) -> None:
    as_rank(0)
    own = get_logger("lockstep.test")
    own.warning("with the handlers of the script")
    monkeypatch.setattr(logging.root, "handlers", [])
    own.warning("a line")
    assert capsys.readouterr().err == "lockstep: a line\n"


def test_the_level_is_obeyed(logger: MultiProcessAdapter, caplog: pytest.LogCaptureFixture) -> None:
    logger.debug("too much")
    assert caplog.messages == []


def test_a_record_names_the_line_that_logged(
    logger: MultiProcessAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    logger.info("a")
    logger.log(logging.INFO, "b")
    logger.warning_once("c")
    assert {record.funcName for record in caplog.records} == {"test_a_record_names_the_line_that_logged"}


def test_warning_once_warns_once_per_message(
    logger: MultiProcessAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    for value in (1, 1, 2):
        logger.warning_once("value %s of %s", value, [1, 2])
    assert caplog.messages == ["value 1 of [1, 2]", "value 2 of [1, 2]"]


def log_in_order(path: str) -> None:
    start_runtime(cpu=True)
    handler = logging.FileHandler(path)
    target = logging.getLogger("in_order")
    target.addHandler(handler)
    try:
        logger = get_logger("in_order", log_level="INFO")
        for step in range(20):
            logger.info(str(step), in_order=True)
        logger.info("main")
    finally:
        target.removeHandler(handler)
        handler.close()
        end_runtime()


def test_in_order_every_rank_logs_after_the_one_before(
    run_distributed: Callable[..., Any], tmp_path: Any
) -> None:
    path = tmp_path / "log"
    run_distributed(log_in_order, 2, str(path))
    expected = [f"[RANK {rank}] {step}" for step in range(20) for rank in range(2)]
    assert path.read_text().splitlines() == [*expected, "[RANK 0] main"]
