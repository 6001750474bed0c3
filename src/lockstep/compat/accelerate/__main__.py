"""``python -m lockstep.compat.accelerate train.py ...``: for the script, ``import accelerate`` means this library.

``-m module ...`` runs a module.
"""

from __future__ import annotations

import os
import runpy
import sys

from lockstep.compat.accelerate.alias import install

USAGE = "usage: python -m lockstep.compat.accelerate [-m] script_or_module [arguments ...]"


def main(argv: list[str]) -> None:
    """Run what ``argv`` names, as the interpreter would."""
    is_module = argv[:1] == ["-m"]
    program = argv[is_module:]
    if not program or (program[0].startswith("-") and not is_module):
        raise SystemExit(USAGE)
    install()
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        # The interpreter would put it there.
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
