"""The only package that touches private names of torch: one file an engine.

Each function says which behaviour of torch is relied on. Each engine has a ``probe``, which shows by presence, kind
and a tiny computation that the installed torch behaves so; it runs once, at the first use of the engine. Where an
engine has several files, one of them has the probe for all. A torch of unknown shape is refused in one sentence, and
never trained on.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "c10d": ["recorder_traces"],
            "copy_on_write": ["is_shared", "lazy_clone", "take_back"],
            "fsdp2": ["params"],
            "pipelining": ["splits_backward_exactly"],
            "versions": ["NEWEST", "OLDEST", "unknown"],
        },
    )
