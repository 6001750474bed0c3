"""The options that a loader over other rows takes over from the one it replaces."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

# The options of a loader that have nothing to do with which rows it reads.
CARRIED_OPTIONS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
    "snapshot_every_n_steps",
)


def carried_options(loader: DataLoader[object]) -> dict[str, Any]:
    """Those of ``CARRIED_OPTIONS`` that the loader has and that mean something for it."""
    options = {name: getattr(loader, name) for name in CARRIED_OPTIONS if hasattr(loader, name)}
    if loader.num_workers == 0:
        for name in ("prefetch_factor", "multiprocessing_context"):
            options.pop(name, None)
    return options
