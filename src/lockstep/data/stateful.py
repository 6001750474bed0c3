"""A prepared loader that reads through torchdata's. A file of its own, because torchdata may not be installed."""

from __future__ import annotations

from torchdata.stateful_dataloader import StatefulDataLoader

from lockstep.data.loader import PreparedLoader


class StatefulPreparedLoader(PreparedLoader, StatefulDataLoader):
    """A ``PreparedLoader`` that scripts which ask by ``isinstance`` take for torchdata's."""
