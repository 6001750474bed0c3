"""Spare processes: they have imported a script's libraries, and wait to become the workers of the next round."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "preload": [
                "EnvironmentReads",
                "Finder",
                "Libraries",
                "libraries_only",
                "run_imports",
                "shadowed",
                "Unfit",
                "watched_reads",
            ],
            "prologue": ["Prologue", "read_prologue", "target_of"],
            "spares": ["SpareProcess"],
        },
    )
