"""The command ``lockstep`` in a process of its own, from the source that is tested."""

from __future__ import annotations

import sys

LOCKSTEP = (sys.executable, "-m", "lockstep.cli.main")
