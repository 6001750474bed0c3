"""A user's script, run as it is in processes of its own: by `lockstep check` and `lockstep tune`."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "inside": ["of_script", "run_script"],
            "process": ["ScriptProcess"],
        },
    )
