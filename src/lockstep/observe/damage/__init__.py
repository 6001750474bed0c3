"""Silent damage: replicas that differ, and gradients that are no numbers."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "divergence": ["CHUNK_ROWS", "COLUMNS", "Digester"],
            "gradients": ["any_not_finite"],
        },
    )
