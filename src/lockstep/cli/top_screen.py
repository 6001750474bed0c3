"""What ``lockstep top`` shows, and what its keys ask for."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from lockstep.config.sources import LAUNCH_ID_VARIABLE
from lockstep.errors import ConfigError, ControlError
from lockstep.history.events import JsonFields
from lockstep.history.read import RunHistory, read_run
from lockstep.report.live import (
    NEWEST_BYTES,
    SPARKLINE,
    job_screen,
    keys_line,
    screen,
    stacks_panel,
    stacks_text,
)
from lockstep.report.numbers import numbers_of

if TYPE_CHECKING:
    from lockstep.launch.job import JobConnection

STOP_ASKED = "Stop the run at its next step boundary? y: yes, any other key: no."
UNREACHED = "The keys work only with a launch of this user that runs on this machine."


class TopScreen:
    """A run's folder, a connection to the launch that runs it, or both.

    Attributes:
        is_over: There is a connection alone, and the launch has ended.
        notice: What came of the last key, or why there is no connection any more.

    Raises:
        ConfigError: it is no run's folder, or the launch refuses.
    """

    def __init__(self, path: str | None, connection: JobConnection | None) -> None:
        self._path = path
        self._connection = connection
        self._run: RunHistory | None = None
        self._job: JsonFields | None = None
        self._losses: deque[float] = deque(maxlen=SPARKLINE)
        self._last_step = math.nan
        self._stacks: dict[str, JsonFields] = {}
        self._shows_stacks = False
        self._asks_to_stop = False
        self.notice = ""
        self.is_over = False
        self.look()
        if self.is_over:
            raise ConfigError(
                f"{self.notice} The launch has just ended, or it is not watched (--no-watch), or it runs another "
                "version of Lockstep. Look at a launch that runs now, with the version of Lockstep that started "
                "it."
            )

    def connect(self) -> None:
        """Connect to the launch that writes the folder, if it is one of this user on this machine."""
        from lockstep.launch.job import connect_here

        assert self._run is not None
        started = numbers_of(self._run, time.time()).started
        launch_id = started.mapping("environment").get(LAUNCH_ID_VARIABLE) if started is not None else None
        if not isinstance(launch_id, str) or not launch_id:
            return
        try:
            self._connection = connect_here(launch_id)
        except ConfigError as error:
            self.notice = str(error)
        self._look_at_job()

    def look(self) -> None:
        """Read what is new."""
        if self._path is not None:
            self._run = read_run(self._path, NEWEST_BYTES)
        self._look_at_job()

    def take_key(self, key: str) -> None:
        """Do what a key that was pressed stands for."""
        if self._asks_to_stop:
            self._asks_to_stop, self.notice = False, ""
            if key == "y":
                self._request("stop")
        elif key == "d":
            self._shows_stacks = not self._shows_stacks
            if self._shows_stacks:
                self._stacks.clear()
                self._request("stacks")
        elif key == "x":
            self._asks_to_stop = self._connection is not None
            self.notice = STOP_ASKED if self._asks_to_stop else UNREACHED

    def take_news(self) -> bool:
        """Take in what the launch has told; return whether it has told anything."""
        if self._connection is None:
            return False
        try:
            news = [JsonFields(message) for message in self._connection.news(0.0)]
        except ControlError as error:
            self._lost(error)
            return True
        for message in news:
            if message.text("kind") == "top.stack":
                self._stacks[message.text("rank")] = message
            elif message.text("kind") == "top.said":
                self.notice = message.text("sentence", 300)
        return bool(news)

    def rendered(self, keys: bool = True) -> RenderableType:
        """Return the screen; ``keys``: with what they do."""
        parts: list[RenderableType] = [keys_line(self.notice)] if keys else []
        if keys and self._shows_stacks and self._stacks:
            parts.append(stacks_panel(self._stacks.values()))
        elif self._run is not None:
            parts.append(screen(self._run, time.time(), self._job))
        elif self._job is not None:
            parts.append(job_screen(self._job, self._losses, time.time()))
        return Group(*parts)

    def stacks_text(self) -> str:
        """Return the stacks that were asked for last, in full."""
        return stacks_text(self._stacks.values())

    def close(self) -> None:
        """Leave the launch."""
        if self._connection is not None:
            self._connection.close()

    def _look_at_job(self) -> None:
        if self._connection is None:
            return
        try:
            self._job = JsonFields(self._connection.look())
        except ControlError as error:
            self._lost(error)
            return
        latest = JsonFields(self._job.mapping("latest"))
        step = latest.number("step")
        if step != self._last_step and math.isfinite(step):
            self._last_step = step
            self._losses.append(latest.number("loss"))

    def _request(self, verb: str) -> None:
        try:
            if self._connection is not None:
                self._connection.ask(verb)
            else:
                self.notice = UNREACHED
        except ControlError as error:
            self._lost(error)

    def _lost(self, error: ControlError) -> None:
        """Note that the launch has ended, or is out of reach."""
        self._connection, self.notice = None, str(error)
        self.is_over = self._path is None
        if self._path is not None:
            self._job = None
