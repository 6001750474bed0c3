"""Data of other libraries in a prepared loader: what a run that is stopped in an epoch and resumed has read.

``python -m tests.data.libraries FOLDER record`` runs the cases of the libraries that are installed, each in three runs
of processes of their own: one that is not stopped, one that stops in its second epoch, and one that resumes there. It
writes what came of them to ``docs/data/libraries.yaml``, of which the table of ``docs/data.md`` is made.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import multiprocessing
import os
import socket
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.data import DataLoader, IterableDataset

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "data.md"
RECORDED = ROOT / "docs" / "data" / "libraries.yaml"

SAMPLES, BATCH, STOP = 40, 2, 5

Make = Callable[[Path, int], Any]
CASES: dict[str, dict[str, Make]] = {}
"""By library: what the script gives to ``prepare``, made from a folder with files and a number of workers."""


def case(library: str, name: str) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        CASES.setdefault(library, {})[name] = make
        return make

    return add


def loader(data: Any, workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=BATCH, num_workers=workers, **options)


def place() -> tuple[int, int]:
    """Rank and number of ranks."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# -- datasets ----------------------------------------------------------------------------------------


def table() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"i": list(range(SAMPLES))})


@case("datasets", "map-style, `shuffle=True`")
def _(folder: Path, workers: int) -> Any:
    return loader(table(), workers, shuffle=True)


@case("datasets", '`with_format("torch")`, `shuffle=True`')
def _(folder: Path, workers: int) -> Any:
    return loader(table().with_format("torch"), workers, shuffle=True)


for shards in (1, 3, 4):

    @case("datasets", f"iterable, {shards} shards" if shards > 1 else "iterable, 1 shard")
    def _(folder: Path, workers: int, shards: int = shards) -> Any:
        return loader(table().to_iterable_dataset(num_shards=shards), workers)

    @case(
        "datasets",
        f"iterable, {shards} shards, `shuffle(seed=1)`"
        if shards > 1
        else "iterable, 1 shard, `shuffle(seed=1)`",
    )
    def _(folder: Path, workers: int, shards: int = shards) -> Any:
        stream = table().to_iterable_dataset(num_shards=shards).shuffle(seed=1, buffer_size=8)
        return loader(stream, workers)


@case("datasets", "iterable, `shuffle()` without a seed")
def _(folder: Path, workers: int) -> Any:
    return loader(table().to_iterable_dataset(num_shards=4).shuffle(buffer_size=8), workers)


@case("datasets", 'streaming JSON, `with_format("torch")`')
def _(folder: Path, workers: int) -> Any:
    import datasets

    files = sorted(map(str, (folder / "json").glob("*.jsonl")))
    stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    return loader(stream.shuffle(seed=1, buffer_size=8).with_format("torch"), workers)


@case("datasets", "`interleave_datasets(seed=1)`")
def _(folder: Path, workers: int) -> Any:
    import datasets

    rows = table()
    halves = [rows.select(range(SAMPLES // 2)), rows.select(range(SAMPLES // 2, SAMPLES))]
    streams = [half.to_iterable_dataset(num_shards=2) for half in halves]
    mixed = datasets.interleave_datasets(
        streams, probabilities=[0.6, 0.4], seed=1, stopping_strategy="all_exhausted_without_replacement"
    )
    return loader(mixed, workers)


@case("datasets", "`batch(2)`, `batch_size=None`")
def _(folder: Path, workers: int) -> Any:
    stream = table().to_iterable_dataset(num_shards=2).batch(BATCH).with_format("torch")
    return DataLoader(stream, batch_size=None, num_workers=workers)


@case("datasets", "iterable, `split_dataset_by_node`")
def _(folder: Path, workers: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    stream = table().to_iterable_dataset(num_shards=4)
    return loader(split_dataset_by_node(stream, *place()), workers)


# -- torchdata ---------------------------------------------------------------------------------------


class Rows(IterableDataset[int]):
    """Each worker reads every n-th."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, SAMPLES, step))


@case("torchdata", "`StatefulDataLoader`, map-style, `shuffle=True`")
def _(folder: Path, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(list(range(SAMPLES)), BATCH, num_workers=workers, shuffle=True)


@case("torchdata", "`StatefulDataLoader`, iterable")
def _(folder: Path, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Rows(), BATCH, num_workers=workers)


@case("torchdata", "`StatefulDataLoader`, shuffled stream of datasets")
def _(folder: Path, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    stream = table().to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=8)
    return StatefulDataLoader(stream, BATCH, num_workers=workers)


def nodes() -> Any:
    import torchdata.nodes as tn
    from torch.utils.data import RandomSampler

    sampler = RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(1))
    return tn.ParallelMapper(tn.SamplerWrapper(sampler), lambda i: i, num_workers=2)


@case("torchdata", "`nodes.Loader`")
def _(folder: Path, workers: int) -> Any:
    import torchdata.nodes as tn

    return tn.Loader(tn.Batcher(nodes(), BATCH))


@dataclass
class Registered:
    """A loader that keeps its own position: it is not prepared, but passed to ``register_for_checkpointing``."""

    loader: Any


@case("torchdata", "`nodes.Loader`, registered, its sampler has `set_epoch`")
def _(folder: Path, workers: int) -> Any:
    import torchdata.nodes as tn
    from torch.utils.data.distributed import DistributedSampler

    rank, world = place()
    sampler: DistributedSampler[Any] = DistributedSampler(table(), world, rank)
    return Registered(tn.Loader(tn.Batcher(tn.SamplerWrapper(sampler), BATCH)))


class Around(IterableDataset[Any]):
    """What docs/data.md says to write around what is no data of torch."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        for number, item in enumerate(self.make()):
            if worker is None or number % worker.num_workers == worker.id:
                yield item


def loader_of_nodes() -> Any:
    import torchdata.nodes as tn

    return tn.Loader(nodes())


@case("torchdata", "`nodes.Loader` inside of an `IterableDataset`")
def _(folder: Path, workers: int) -> Any:
    return loader(Around(loader_of_nodes), workers)


# -- webdataset --------------------------------------------------------------------------------------


def tars(folder: Path) -> list[str]:
    return sorted(map(str, (folder / "tar").glob("*.tar")))


def number_of(sample: Any) -> int:
    return int(sample["__key__"])


def web(folder: Path, **options: Any) -> Any:
    import webdataset

    return webdataset.WebDataset(tars(folder), **{"shardshuffle": False, **options})


@case("webdataset", "`WebDataset` as it is")
def _(folder: Path, workers: int) -> Any:
    return loader(web(folder).map(number_of), workers)


@case("webdataset", "`nodesplitter=split_by_node`")
def _(folder: Path, workers: int) -> Any:
    import webdataset

    return loader(web(folder, nodesplitter=webdataset.split_by_node).map(number_of), workers)


@case("webdataset", "`nodesplitter=None`")
def _(folder: Path, workers: int) -> Any:
    return loader(web(folder, nodesplitter=None).map(number_of), workers)


@case("webdataset", "`nodesplitter=None`, `.shuffle(8)`")
def _(folder: Path, workers: int) -> Any:
    return loader(web(folder, nodesplitter=None).shuffle(8).map(number_of), workers)


@case("webdataset", "`nodesplitter=None`, `shardshuffle=4, seed=1`, `.shuffle(8, seed=1)`")
def _(folder: Path, workers: int) -> Any:
    data = web(folder, nodesplitter=None, shardshuffle=4, seed=1).shuffle(8, seed=1)
    return loader(data.map(number_of), workers)


@case("webdataset", "`nodesplitter=None`, `shardshuffle=4, detshuffle=True, seed=1`")
def _(folder: Path, workers: int) -> Any:
    data = web(folder, nodesplitter=None, shardshuffle=4, detshuffle=True, seed=1)
    return loader(data.map(number_of), workers)


@case("webdataset", "`nodesplitter=None`, 1 tar file")
def _(folder: Path, workers: int) -> Any:
    import webdataset

    data = webdataset.WebDataset(str(folder / "one.tar"), shardshuffle=False, nodesplitter=None)
    return loader(data.map(number_of), workers)


@case("webdataset", "`WebLoader`")
def _(folder: Path, workers: int) -> Any:
    import webdataset

    data = web(folder, nodesplitter=None).map(number_of)
    return webdataset.WebLoader(data, batch_size=BATCH, num_workers=workers)


# -- grain -------------------------------------------------------------------------------------------


def grain_rows(seed: int | None = 1) -> Any:
    import grain

    rows = grain.MapDataset.range(SAMPLES)
    return rows if seed is None else rows.shuffle(seed=seed)


@case("grain", "`MapDataset.shuffle(seed=1)` in a torch loader")
def _(folder: Path, workers: int) -> Any:
    return loader(grain_rows(), workers)


@case("grain", "`MapDataset`, `shuffle=True` of the torch loader")
def _(folder: Path, workers: int) -> Any:
    return loader(grain_rows(None), workers, shuffle=True)


@case("grain", "`IterDataset` in a torch loader")
def _(folder: Path, workers: int) -> Any:
    return loader(grain_rows().to_iter_dataset(), workers)


def grain_stream() -> Any:
    return grain_rows().to_iter_dataset()


@case("grain", "`IterDataset` inside of an `IterableDataset`")
def _(folder: Path, workers: int) -> Any:
    return loader(Around(grain_stream), workers)


@case("grain", "`grain.DataLoader`")
def _(folder: Path, workers: int) -> Any:
    import grain

    sampler = grain.samplers.IndexSampler(SAMPLES, shuffle=True, num_epochs=1, seed=1)
    source = list(range(SAMPLES))
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(BATCH)])


# -- litdata -----------------------------------------------------------------------------------------


def lit(folder: Path, **options: Any) -> Any:
    import litdata

    return litdata.StreamingDataset(str(folder / "lit"), **options)


@case("litdata", "`StreamingDataset`")
def _(folder: Path, workers: int) -> Any:
    return loader(lit(folder), workers)


@case("litdata", "`StreamingDataset(shuffle=True)`")
def _(folder: Path, workers: int) -> Any:
    return loader(lit(folder, shuffle=True), workers)


@case("litdata", "`StreamingDataLoader`")
def _(folder: Path, workers: int) -> Any:
    import litdata

    return litdata.StreamingDataLoader(lit(folder, shuffle=True), batch_size=BATCH, num_workers=workers)


@case("litdata", "`StreamingDataLoader`, registered")
def _(folder: Path, workers: int) -> Any:
    import litdata

    return Registered(litdata.StreamingDataLoader(lit(folder), batch_size=BATCH, num_workers=workers))


@case("litdata", "`StreamingDataLoader(shuffle=True)`, registered")
def _(folder: Path, workers: int) -> Any:
    import litdata

    return Registered(
        litdata.StreamingDataLoader(lit(folder, shuffle=True), batch_size=BATCH, num_workers=workers)
    )


# -- mosaicml-streaming ------------------------------------------------------------------------------


def mosaic(folder: Path, **options: Any) -> Any:
    from streaming import StreamingDataset

    return StreamingDataset(local=str(folder / "mds"), batch_size=BATCH, **options)


@case("mosaicml-streaming", "`StreamingDataset`")
def _(folder: Path, workers: int) -> Any:
    return loader(mosaic(folder), workers)


@case("mosaicml-streaming", "`StreamingDataset(shuffle=True)`")
def _(folder: Path, workers: int) -> Any:
    return loader(mosaic(folder, shuffle=True), workers)


@case("mosaicml-streaming", "`StreamingDataLoader`")
def _(folder: Path, workers: int) -> Any:
    from streaming import StreamingDataLoader

    return StreamingDataLoader(mosaic(folder), batch_size=BATCH, num_workers=workers)


@case("mosaicml-streaming", "`StreamingDataLoader`, registered")
def _(folder: Path, workers: int) -> Any:
    from streaming import StreamingDataLoader

    return Registered(StreamingDataLoader(mosaic(folder), batch_size=BATCH, num_workers=workers))


@case("mosaicml-streaming", "`StreamingDataLoader(shuffle=True)`, registered")
def _(folder: Path, workers: int) -> Any:
    from streaming import StreamingDataLoader

    return Registered(
        StreamingDataLoader(mosaic(folder, shuffle=True), batch_size=BATCH, num_workers=workers)
    )


# -- objects with __iter__ ---------------------------------------------------------------------------


class OwnLoader:
    """As ffcv's: batches, a length, no data set of torch."""

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(SAMPLES).split(BATCH))


@case("objects with `__iter__`", "as they are")
def _(folder: Path, workers: int) -> Any:
    return OwnLoader()


def rows_of_own_loader() -> Iterator[int]:
    return (int(row) for batch in OwnLoader() for row in batch)


@case("objects with `__iter__`", "inside of an `IterableDataset`")
def _(folder: Path, workers: int) -> Any:
    return loader(Around(rows_of_own_loader), workers)


OWN = "objects with `__iter__`"

MODULES = {"mosaicml-streaming": "streaming", OWN: "torch"}


def installed() -> list[str]:
    return [name for name in CASES if importlib.util.find_spec(MODULES.get(name, name)) is not None]


# -- files -------------------------------------------------------------------------------------------


def write_files(folder: Path) -> None:
    """40 samples in the form of each library that is installed, in 4 files where it has several."""
    (folder / "json").mkdir(parents=True)
    for part in range(4):
        rows = range(part * SAMPLES // 4, (part + 1) * SAMPLES // 4)
        (folder / "json" / f"{part}.jsonl").write_text("".join(json.dumps({"i": i}) + "\n" for i in rows))
    if "webdataset" in installed():
        import webdataset

        (folder / "tar").mkdir()
        for part in range(4):
            with webdataset.TarWriter(str(folder / "tar" / f"{part}.tar")) as writer:
                for i in range(part * SAMPLES // 4, (part + 1) * SAMPLES // 4):
                    writer.write({"__key__": f"{i:04d}", "txt": str(i)})
        with webdataset.TarWriter(str(folder / "one.tar")) as writer:
            for i in range(SAMPLES):
                writer.write({"__key__": f"{i:04d}", "txt": str(i)})
    if "litdata" in installed():
        import litdata

        litdata.optimize(
            fn=row_of,
            inputs=list(range(SAMPLES)),
            output_dir=str(folder / "lit"),
            num_workers=1,
            chunk_size=10,
        )
    if "mosaicml-streaming" in installed():
        from streaming import MDSWriter

        with MDSWriter(out=str(folder / "mds"), columns={"i": "int"}, size_limit=200) as mds:
            for i in range(SAMPLES):
                mds.write({"i": i})


def row_of(i: int) -> dict[str, int]:
    return {"i": i}


# -- the three runs ----------------------------------------------------------------------------------


def numbers(batch: Any) -> list[int]:
    while isinstance(batch, dict):
        batch = batch["i"]
    return [int(i) for i in torch.as_tensor(batch).flatten()]


def read(accelerator: Any, loader: Any, stop: int | None = None) -> list[list[int]]:
    """The samples of all ranks, step by step."""
    steps = []
    for batch in loader:
        mine = numbers(batch)
        steps.append(accelerator.gather_for_metrics(torch.tensor(mine)).tolist())
        if len(steps) == stop:
            break
    return steps


def one_run(phase: str, make: Make, workers: int, dispatch: bool | None, files: Path, state: Path) -> Any:
    from lockstep import Accelerator, DataLoaderConfiguration
    from lockstep.utils import set_seed

    set_seed(3)
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    try:
        made = make(files, workers)
        if isinstance(made, Registered):
            prepared = made.loader
            accelerator.register_for_checkpointing(prepared)
        else:
            prepared = accelerator.prepare(made)
            if any("no position in it is saved" in text for text in warned):
                return f"warned: {warned[0]}"
        if phase == "resumed":
            accelerator.load_state(str(state))
            return [read(accelerator, prepared), read(accelerator, prepared)]
        if phase == "whole":
            return [read(accelerator, prepared) for _ in range(3)]
        first = read(accelerator, prepared)
        second = read(accelerator, prepared, STOP)
        accelerator.save_state(str(state))
        return [first, second]
    except Exception as error:
        # Of an error in a worker process, what it says itself.
        lines = str(error).splitlines() or [""]
        said = lines[-1].removeprefix("lockstep.errors.") if lines[0].startswith("Caught ") else str(error)
        kind = f"{type(error).__name__}: "
        return kind + said.removeprefix(kind)
    finally:
        logging.getLogger("lockstep").removeHandler(handler)


Cell = tuple[str, str, int, int, "bool | None"]
"""Library, case, ranks, workers, ``dispatch_batches``."""


def cells_of(libraries: Iterable[str], ranks: Sequence[int] = (1, 2), only: str = "") -> list[Cell]:
    return [
        (library, name, world, workers, dispatch)
        for library in libraries
        for name in CASES[library]
        for world in ranks
        for dispatch in ((None,) if world == 1 else (None, False))
        for workers in (0, 2)
        if only in f"{library} {name}"
    ]


def _rank(rank: int, world: int, port: int, phase: str, folder: Path, cells: Sequence[Cell]) -> None:
    """One rank of a run, for all cells one after the other."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (folder / f"{phase}-{world}-{rank}.jsonl").open("w") as file:
        for cell in cells:
            print(phase, rank, *cell, file=sys.stderr, flush=True)
            state = folder / "states" / f"{zlib.crc32(repr(cell).encode())}"
            result = one_run(phase, CASES[cell[0]][cell[1]], cell[3], cell[4], folder, state)
            file.write(json.dumps(result) + "\n")
            file.flush()


def in_processes(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """In forks of this process: what it has imported is imported there."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=one) for one in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        process.kill()


def run(folder: Path, cells: Sequence[Cell]) -> dict[Cell, str]:
    """What came of each cell."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    for library in {cell[0] for cell in cells}:
        importlib.import_module(MODULES.get(library, library))
    if not (folder / "json").exists():
        in_processes(write_files, [(folder,)])
    found = {}
    for world in sorted({cell[2] for cell in cells}):
        chosen = [cell for cell in cells if cell[2] == world]
        results = []
        for phase in ("whole", "stopped", "resumed"):
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            in_processes(_rank, [(rank, world, port, phase, folder, chosen) for rank in range(world)])
            lines = (folder / f"{phase}-{world}-0.jsonl").read_text().splitlines()
            results.append([*map(json.loads, lines)] + ["ended"] * (len(chosen) - len(lines)))
        for number, cell in enumerate(chosen):
            found[cell] = verdict(*(result[number] for result in results))
    return found


def verdict(whole: Any, stopped: Any, resumed: Any) -> str:
    for phase, result in (("", whole), ("", stopped), ("resumed: ", resumed)):
        if isinstance(result, str):
            return phase + result
    once = list(range(SAMPLES))
    epochs = [stopped[0], stopped[1] + resumed[0], resumed[1]]
    flat = [[row for step in epoch for row in step] for epoch in epochs]
    if epochs == whole:
        return (
            "same order"
            if all(sorted(rows) == once for rows in flat)
            else "same order, epochs of " + ", ".join(f"{len(set(rows))}" for rows in flat)
        )
    said = []
    for rows in flat:
        counts = Counter(rows)
        said.append(f"{SAMPLES - len(counts)} lost, {sum(counts.values()) - len(counts)} twice")
    if said == ["0 lost, 0 twice"] * 3:
        return "each once"
    return "; ".join(said)


# -- the record, and its table -----------------------------------------------------------------------


def place_of(cell: Cell) -> str:
    """A cell without its data, as the record names it."""
    _, _, ranks, workers, dispatch = cell
    ways = {None: "", False: ", dispatch_batches=False"}
    return f"ranks={ranks}, num_workers={workers}{ways[dispatch]}"


def rows_of(found: dict[Cell, str]) -> list[dict[str, Any]]:
    """What came of the cells, as the record has it: for each kind of data, the outcomes and where they were seen."""
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for cell, outcome in found.items():
        rows.setdefault(cell[:2], {}).setdefault(outcome, []).append(place_of(cell))
    return [
        {"library": library, "version": version_of(library), "data": data, "outcomes": outcomes}
        for (library, data), outcomes in rows.items()
    ]


def version_of(library: str) -> str:
    return "" if library == OWN else importlib.metadata.version(library)


def recorded() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = yaml.safe_load(RECORDED.read_text()) or []
    return rows


def record(found: dict[Cell, str]) -> None:
    """Replace the rows of the libraries that were run."""
    new = rows_of(found)
    kept = [row for row in recorded() if row["library"] not in {row["library"] for row in new}]
    order = [*CASES]
    rows = sorted([*kept, *new], key=lambda row: order.index(row["library"]))
    comment = RECORDED.read_text().partition("- library")[0]
    RECORDED.write_text(comment + yaml.safe_dump(rows, sort_keys=False, width=10_000, allow_unicode=True))


REFUSALS = {
    "no position in it is saved": "warned: is no `DataLoader`",
    "would train on the same rows": "is no `DataLoader`",
    "by itself, so prepare() cannot divide it": "divides itself",
    "has the node splitter": "node splitter",
    "divided by split_dataset_by_node": "divided twice",
    "up to the position again": "not the same samples again",
}
"""A part of the sentence that refuses, and its short form in the table."""


def library_table() -> str:
    """The table of ``docs/data.md``."""
    places = {
        "1 rank": "ranks=1, num_workers={}",
        "2 ranks": "ranks=2, num_workers={}",
        "2 ranks, `dispatch_batches=False`": "ranks=2, num_workers={}, dispatch_batches=False",
    }
    lines = [["library", "data", *places], ["---"] * (2 + len(places))]
    for row in recorded():
        outcomes = {place: short(outcome) for outcome, seen in row["outcomes"].items() for place in seen}
        cells = []
        for place in places.values():
            alone, with_workers = (outcomes[place.format(workers)] for workers in (0, 2))
            same = alone == with_workers
            cells.append(alone if same else f"{alone}; with 2 workers: {with_workers}")
        lines.append([f"{row['library']} {row['version']}".strip(), row["data"], *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def short(outcome: str) -> str:
    refusals = [text for part, text in REFUSALS.items() if part in outcome]
    if refusals:
        return refusals[0] if refusals[0].startswith("warned") else f"refused: {refusals[0]}"
    if outcome in ("same order", "each once"):
        return outcome
    kind = outcome.removeprefix("resumed: ").partition(": ")[0]
    return f"`{kind}` of the library" if kind.endswith("Error") else outcome


def page() -> str:
    """The page with the table as it should be."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    return head + BEGIN + "\n" + library_table() + "\n" + END + rest.partition(END)[2]


BEGIN, END = "<!-- libraries: begin -->\n", "<!-- libraries: end -->"

if __name__ == "__main__":
    arguments = sys.argv[2:]
    of = [name for name in installed() if name in arguments] or installed()
    results = run(Path(sys.argv[1]), cells_of(of))
    if "record" in arguments:
        record(results)
    print(yaml.safe_dump(rows_of(results), sort_keys=False, width=10_000))
