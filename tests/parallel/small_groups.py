"""Groups of parameters under ZeRO that are so small that the models of tests have several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.parallel.zero import find_groups
from tests.patching import module_of


@contextmanager
def groups_of(limit: int) -> Iterator[None]:
    """Models that are prepared inside have groups of up to so many bytes."""
    module = module_of(find_groups)
    before, module.GROUP_BYTES = module.GROUP_BYTES, limit
    try:
        yield
    finally:
        module.GROUP_BYTES = before


@contextmanager
def groups_in_stage_3(parallel: str, limit: int) -> Iterator[None]:
    """The same under stage 3. Under the other stages a small model stays one group, so that both are tested."""
    if "zero=3" not in parallel:
        yield
        return
    with groups_of(limit):
        yield
