"""One run at a time writes a place that has no locks: the run that came last, and the one before is told."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time

from lockstep.checkpoint.store.objects import Objects
from lockstep.errors import CheckpointError

OWNER = ".owner.json"
NOBODY = "another run, which has ended"


class Ownership:
    """A record of who writes ``what``, in a file there. Taking it never fails: a run that died cannot hand it back."""

    def __init__(self, objects: Objects, what: str) -> None:
        self.what = what
        self._path = f"{what}/{OWNER}"
        self._objects = objects
        self._run: str | None = None

    def acquire(self) -> None:
        """Take it over; where this object has, see that nobody else did since.

        Raises:
            CheckpointError: another run did; names it.
        """
        if self._run is not None:
            self.check()
            return
        run = secrets.token_hex(8)
        record = {
            "run": run,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self._objects.put(self._path, json.dumps(record).encode())
        self._run = run

    def check(self) -> None:
        """Raise CheckpointError where another run has taken it over; nothing if it was not acquired."""
        if self._run is None:
            return
        run, described = self._read()
        if run != self._run:
            raise CheckpointError(
                f"{self.what} was taken over by {described}, and the run that came last is the one that writes there. "
                "End one of the two, or save elsewhere."
            )

    def release(self) -> None:
        """Remove the record if it is this object's; a place that does not answer keeps it, which stops nobody."""
        run, self._run = self._run, None
        try:
            if run is not None and self._read()[0] == run:
                self._objects.delete(self._path)
        except (CheckpointError, OSError):
            pass

    def _read(self) -> tuple[str, str]:
        """The run in the record, and words for it."""
        try:
            told = json.loads(self._objects.get(self._path))
            return str(told["run"]), f"process {told['process']} on {told['host']} since {told['since']}"
        except FileNotFoundError:
            return "", NOBODY
        except (ValueError, KeyError, TypeError):
            return "", "another run"
