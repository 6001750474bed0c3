"""``python -m lockstep``: the command."""

from lockstep.cli import run_lockstep

run_lockstep()
