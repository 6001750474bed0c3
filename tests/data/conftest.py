"""What the tests of loaders share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_search() -> Iterator[None]:
    """Take the objects of other tests out of what ``gc`` searches.

    A loader that goes on from a checkpoint asks once who holds its first batch (data/continued.py). Here hundreds do,
    in a process full of objects.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
