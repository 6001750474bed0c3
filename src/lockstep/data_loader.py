"""Names that scripts import from ``accelerate.data_loader``."""

from lockstep.data.loader import PreparedLoader
from lockstep.data.loader import PreparedLoader as DataLoaderDispatcher
from lockstep.data.loader import PreparedLoader as DataLoaderShard
from lockstep.data.prepare import prepare_data_loader
from lockstep.data.skip import skip_first_batches

__all__ = [
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "PreparedLoader",
    "prepare_data_loader",
    "skip_first_batches",
]
