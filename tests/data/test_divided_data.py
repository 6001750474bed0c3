"""Data that differ between ranks, and loaders that prepare does not know, are refused by every rank; others are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

from lockstep import Accelerator, DataLoaderConfiguration
from lockstep.errors import UsageError
from lockstep.runtime import end_runtime
from lockstep.utils import set_seed
from tests.data.helpers import Numbers

datasets.disable_progress_bars()


class Files(Dataset[str]):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> str:
        return self.names[index]


class FileStream(IterableDataset[str]):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)


def split_by_node(source: Any) -> Any:
    return source


class Pipeline(FileStream):
    """As a ``WebDataset``."""

    def __init__(self, *stages: Any) -> None:
        super().__init__(["a", "b"])
        self.pipeline = [*stages]


def single_node_only(source: Any) -> Any:
    return source


class OfLitdata(FileStream):
    __module__ = "litdata.streaming.dataset"


class OfMosaicML(FileStream):
    __module__ = "streaming.base.dataset"


class OfTheScript(FileStream):
    __module__ = "streaming"


def names(count: int = 16, folder: str = "data") -> list[str]:
    return [f"{folder}/{number}.png" for number in range(count)]


def table() -> Any:
    return datasets.Dataset.from_dict({"i": list(range(16)), "text": [str(i) for i in range(16)]})


Make = Callable[[int, int], Any]

OTHERS_ON_EACH_RANK: dict[str, Make] = {
    "split map-style": lambda rank, world: split_dataset_by_node(table(), rank, world),
    "split stream": lambda rank, world: split_dataset_by_node(
        table().to_iterable_dataset(num_shards=4), rank, world
    ),
    "shard": lambda rank, world: table().shard(world, rank),
    "random_split": lambda rank, world: random_split(Numbers(16), [8, 8])[0],
    "subset by NumPy": lambda rank, world: Subset(
        Numbers(16), np.random.RandomState(rank).permutation(16)[:8]
    ),  # type: ignore[arg-type]
    "nested": lambda rank, world: Subset(random_split(Numbers(16), [8, 8])[1], list(range(4))),
    "joined": lambda rank, world: ConcatDataset([Numbers(4), random_split(Numbers(16), [8, 8])[0]]),
    "files of the rank": lambda rank, world: Files(names()[rank::world]),
    "dictionaries": lambda rank, world: [{"id": i, "x": torch.ones(2)} for i in range(16)][rank::world],
    "stream of files": lambda rank, world: FileStream(names()[rank::world]),
    "webdataset": lambda rank, world: Pipeline(iter, split_by_node),
    "webdataset, by default": lambda rank, world: Pipeline(iter, single_node_only),
    "litdata": lambda rank, world: OfLitdata(names()),
    "MosaicML's streaming": lambda rank, world: OfMosaicML(names()),
}
ALIKE: dict[str, Make] = {
    "table": lambda rank, world: table(),
    "table with a transform": lambda rank, world: table().with_transform(
        lambda rows: {"i": [i + rank for i in rows["i"]]}
    ),
    "seeded random_split": lambda rank, world: random_split(
        Numbers(16), [8, 8], generator=torch.Generator().manual_seed(0)
    )[0],
    "files in folders of the rank": lambda rank, world: Files(names(folder=f"/scratch/{rank}")),
    "synthetic rows": lambda rank, world: TensorDataset(torch.randn(16, 2), torch.randint(9, (16,))),
    "own affairs": lambda rank, world: with_attribute(Numbers(16), [rank, "rank"]),
    "stream": lambda rank, world: FileStream(names()),
    "webdataset without a node splitter": lambda rank, world: Pipeline(iter),
    "a stream of the script's module streaming": lambda rank, world: OfTheScript(names()),
    "stream of rank 0": lambda rank, world: FileStream(names() if rank == 0 else []),
}


def with_attribute(dataset: Any, value: object) -> Any:
    dataset.mine = value
    return dataset


def refused(dispatch: bool | None) -> dict[str, str]:
    """The sentences that refuse each of the data."""
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch), parallel="ddp"
    )
    rank, world = accelerator.process_index, accelerator.num_processes
    set_seed(0, device_specific=True)
    random.seed(rank)
    found = {}
    for name, make in (OTHERS_ON_EACH_RANK | ALIKE).items():
        found[name] = ""
        if dispatch is False and name == "stream of rank 0":
            continue
        try:
            accelerator.prepare(DataLoader(make(rank, world), batch_size=1))
        except UsageError as error:
            found[name] = str(error)
    end_runtime()
    return found


@pytest.mark.parametrize(("world_size", "dispatch"), [(1, None), (2, None), (2, False)])
def test_what_the_script_has_divided_is_refused(run_distributed: Any, world_size: int, dispatch: Any) -> None:
    results = run_distributed(refused, world_size, dispatch)
    for found in results:
        for name in ALIKE:
            assert found[name] == "", name
        for name in OTHERS_ON_EACH_RANK:
            assert bool(found[name]) == (world_size > 1), name


def test_ranks_that_share_a_model_compare_their_data_too(run_distributed: Any) -> None:
    for found in run_distributed(refused_under_tp, 2):
        assert "Subset.indices has other rows" in found


def refused_under_tp() -> str:
    accelerator = Accelerator(cpu=True, parallel="tp=2")
    set_seed(0, device_specific=True)
    try:
        accelerator.prepare(DataLoader(random_split(Numbers(16), [8, 8])[0], batch_size=1))
    except UsageError as error:
        return str(error)
    finally:
        end_runtime()
    return ""


class OwnLoader:
    """Gives batches, as grain's loader does."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0).split(2))


def with_unknown_loaders(parallel: str) -> list[str]:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    found = []
    for loader in (OwnLoader(), iter(OwnLoader()), (batch for batch in OwnLoader()), FileStream(["a", "b"])):
        try:
            found.append("" if accelerator.prepare(loader) is loader else "changed")
        except UsageError as error:
            found.append(str(error))
    known = ("a text", [1], {"a": 1}, None, torch.ones(2), {1, 2}, Numbers(3), 5, nn.ReLU)
    assert accelerator.prepare(*known) is not None
    end_runtime()
    return found


@pytest.mark.parametrize(("world_size", "parallel"), [(1, "ddp"), (2, "ddp"), (2, "tp=2")])
def test_a_loader_that_is_not_known_is_refused_where_it_must_be_divided(
    run_distributed: Any, world_size: int, parallel: str
) -> None:
    is_divided = (world_size, parallel) == (2, "ddp")
    for found in run_distributed(with_unknown_loaders, world_size, parallel):
        assert [("would train on the same rows" in one) for one in found] == [is_divided] * 4, found


def test_on_one_rank_a_word_says_that_its_position_is_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    for item, words in ((OwnLoader(), 1), ([torch.ones(2)], 0), ("text", 0)):
        caplog.clear()
        accelerator.prepare(item)
        found = [record.getMessage() for record in caplog.records]
        assert sum("OwnLoader, which gives batches" in text for text in found) == words, (item, found)


def warnings_of_a_forgotten_loader(forgets: bool) -> int:
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    loader: Any = DataLoader(torch.arange(8.0).view(-1, 1), batch_size=2)  # type: ignore[arg-type]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loader if forgets else accelerator.prepare(loader):
        accelerator.backward(model(batch).mean())
        optimizer.step()
    logging.getLogger("lockstep").removeHandler(handler)
    end_runtime()
    return sum("no loader that prepare() returned" in record for record in records)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forgotten_loader_is_told_once(run_distributed: Any, world_size: int) -> None:
    counts = run_distributed(warnings_of_a_forgotten_loader, world_size, True)
    assert counts[0] == int(world_size > 1) and max(counts) <= 1
    assert run_distributed(warnings_of_a_forgotten_loader, world_size, False) == [0] * world_size
