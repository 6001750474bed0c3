"""A rank whose coordinator does not answer yet, or stands still so long that the connection is lost."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lockstep.control import Client, Server, new_secret
from lockstep.errors import ControlError
from lockstep.observe.hang import Coordinator, ProcessWatch, StopSignals, WatchSettings, WorkerWatch
from lockstep.runtime import Departures, StepClock
from tests.patching import module_of

HERE = "127.0.0.1"


def comes_true(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


@pytest.mark.parametrize("is_there", [True, False])
def test_a_rank_that_was_not_reached_or_was_lost_is_watched_and_stops_with_the_others(is_there: bool) -> None:
    secret = new_secret()
    coordinator = Coordinator(WatchSettings(), lambda sentence: None)
    coordinator.start_round(1)
    server = Server(secret, HERE, 0, {"watch": coordinator})
    host, port = server.address
    server.start()
    if not is_there:
        server.close()
    clock, stopped = StepClock(), []
    clock.stepped()
    clock.batch_wanted()
    watch = WorkerWatch(
        0,
        1,
        clock,
        stopped.append,
        lambda: Client((host, port), secret, 2.0),
        Client((host, port), secret, 2.0) if is_there else None,
        Departures(),
        StopSignals(),
    )
    watch.start()
    if is_there:
        assert comes_true(lambda: coordinator.steps == 1)
        server.close()
    again = Coordinator(WatchSettings(), lambda sentence: None)
    again.start_round(1)
    with Server(secret, host, port, {"watch": again}) as server:
        assert comes_true(lambda: again.steps == 1)
        server.call(lambda: again.request_stop("SIGTERM"))

        def step() -> bool:
            clock.stepped()
            clock.batch_wanted()
            return bool(stopped)

        assert comes_true(step)
        assert set(stopped) == {"SIGTERM"}
        watch.end()


def test_a_rank_does_not_begin_before_its_launcher_answers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module_of(ProcessWatch), "PAUSE_S", 0.02)
    monkeypatch.setenv("LOCKSTEP_CONTROL", f"{HERE}:1")
    secret, tries = new_secret(), []
    monkeypatch.setenv("LOCKSTEP_CONTROL_SECRET", secret.hex())
    with Server(secret, HERE) as server:

        def connect(limit_s: float) -> Client:
            tries.append(limit_s)
            return Client(server.address if len(tries) > 3 else (HERE, 1), secret, limit_s)

        client = ProcessWatch(StepClock())._connected(connect, 3)
        assert client is not None and len(tries) == 4
        client.close()
        assert capfd.readouterr().err.count("rank 3 waits for its launcher") == 1

        def wrong(limit_s: float) -> Client:
            return Client(server.address, new_secret(), limit_s)

        with pytest.raises(ControlError, match="secret"):
            ProcessWatch(StepClock())._connected(wrong, 3)
