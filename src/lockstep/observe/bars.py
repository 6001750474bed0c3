"""Whether a script shows a progress bar of its own: one of tqdm, or of rich."""

from __future__ import annotations

import sys
import threading


def shows_bar() -> bool:
    """Whether one is open in this process. Imports nothing, and any thread may ask."""
    return _of_tqdm() or _of_rich()


def _of_tqdm() -> bool:
    """tqdm keeps a set of the bars that are open; those that are disabled are not in it."""
    bar = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return bool(len(getattr(bar, "_instances", ())))


def _of_rich() -> bool:
    """Each display of rich that draws itself anew has a thread for that, which knows it."""
    if "rich.live" not in sys.modules:
        return False
    for thread in threading.enumerate():
        display = getattr(thread, "live", None) if type(thread).__module__ == "rich.live" else None
        if display is not None and display.is_started and display.console.is_terminal:
            return True
    return False
