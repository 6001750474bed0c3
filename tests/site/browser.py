"""A headless Chromium, over the DevTools protocol through a pipe: Debian's package alone, without a driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", *QUIET)


class Browser:
    """One process with one page. Its profile is an empty folder."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM, "install Chromium: apt-get install chromium"
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        # It reads from descriptor 3 and writes to 4.
        shell = ["bash", "-c", f'exec 3<&{commands} 4>&{answers}; exec "$0" "$@"', CHROMIUM, *flags]
        self.process = subprocess.Popen(shell, pass_fds=(commands, answers), stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self._unread, self._number, self._session = b"", 0, dict[str, str]()
        (page,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.call("Page.enable")

    def call(self, method: str, until: str | None = None, **parameters: Any) -> Any:
        """The result of a method of the protocol, or the event that it leads to; what else comes is left out."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._unread:
                part = os.read(self._answers, 1 << 16)
                assert part, "Chromium ended"
                self._unread += part
            text, _, self._unread = self._unread.partition(b"\0")
            answer = json.loads(text)
            if answer.get("method") == until if until else answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer.get("result")

    def open(self, page: Path, width: int, anchor: str = "") -> None:
        """Loads a file in a window of some width."""
        self.resize(width)
        self.call("Page.navigate", until="Page.loadEventFired", url=f"{page.resolve().as_uri()}{anchor}")

    def resize(self, width: int) -> None:
        """Gives the window a width; returns when the page has been laid out for it."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression on the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")
