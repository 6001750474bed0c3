"""What a run has written about itself, as it is read: its steps, its events, its starts, its goodput."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "attempts": ["RunStatus"],
            "columns": ["ColumnReader"],
            "events": ["configuration", "event_of", "JsonFields"],
            "goodput": ["Goodput", "goodput_of"],
            "lines": ["BLOCK", "EVENTS", "json_lines", "MEASURES", "read_lines"],
            "read": ["read_run", "RunHistory"],
        },
    )
