"""Asynchronous data parallelism: ranks that train by themselves for a while, or with updates that come late.

Nothing is imported here, because the front of the library is reached without these.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "stale": ["StalenessReport"],
        },
    )
