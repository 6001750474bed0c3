"""What the operating system says that a process is doing."""

from __future__ import annotations

WORDS = {
    "stopped": "stopped",
    "tracing-stop": "stopped",
    "running": "running",
    "sleeping": "sleeping",
    "idle": "sleeping",
    "disk-sleep": "uninterruptible",
    "zombie": "zombie",
    "dead": "gone",
}


def state_of(pid: int) -> str:
    """``running``, ``sleeping``, ``stopped``, ``uninterruptible``, ``zombie``, ``gone`` or ``unknown``."""
    import psutil  # when something is wrong, not before

    try:
        return WORDS.get(psutil.Process(pid).status(), "unknown")
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:
        return "unknown"
