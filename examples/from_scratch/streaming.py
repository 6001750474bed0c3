"""Streaming a model from disk: compute with a model that does not fit into memory.

    python examples/from_scratch/streaming.py

A block of layers is read, used, and dropped. While one block computes, a thread reads the next. So two blocks are in
memory at a time, however many the model has. If reading takes no longer than computing, it costs no time.

Papers: Rajbhandari et al., ZeRO-Infinity, SC 2021; Sheng et al., FlexGen, ICML 2023.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from world import Check, count, run, same

BLOCKS, WIDTH = 6, 64


def new_block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def size_of(weights: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def write(model: nn.Sequential, folder: Path) -> None:
    """One file for each block."""
    for number, block in enumerate(model):
        torch.save(block.state_dict(), folder / f"{number}.pt")


class Reader:
    """Reads the blocks' files in order, one ahead of what is used.

    Counts what is in memory, and what was read.
    """

    def __init__(self, folder: Path) -> None:
        self.files = [folder / f"{number}.pt" for number in range(BLOCKS)]
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.held = self.most_held = self.read_bytes = 0

    def begin(self, file: Path) -> Future[dict[str, Tensor]]:
        """Read a block in the thread. It has its place in memory from now on."""
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        return self.thread.submit(torch.load, file, weights_only=True)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The weights of each block.

        They must be dropped before the next one is asked for.
        """
        coming = self.begin(self.files[0])
        for after in [*self.files[1:], None]:
            weights = coming.result()
            self.read_bytes += size_of(weights)
            # Before this block computes: reading from a disk does not need Python's
            # lock, so both go on.
            if after is not None:
                coming = self.begin(after)
            yield weights
            del weights
            self.held -= 1


class StreamedModel(nn.Module):
    """A model whose weights are on disk.

    It has the shape of one block, without memory: on the meta device.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        with torch.device("meta"):
            self.shape = new_block()
        self.reader = Reader(folder)

    @torch.no_grad()
    def forward(self, batches: list[Tensor]) -> list[Tensor]:
        # All batches pass a block before the next one is used: a read serves them all.
        for weights in self.reader:
            batches = [functional_call(self.shape, weights, (batch,)) for batch in batches]
            # A name keeps its tensors: without this the block would stay while the next
            # but one is read.
            del weights
        return batches


def demo() -> list[Check]:
    torch.manual_seed(0)
    model = nn.Sequential(*(new_block() for _ in range(BLOCKS)))
    batches = [torch.randn(8, WIDTH) for _ in range(3)]
    with torch.no_grad():
        expected = [model(batch) for batch in batches]

    with tempfile.TemporaryDirectory() as folder:
        write(model, Path(folder))
        streamed = StreamedModel(Path(folder))
        outputs = streamed(batches)

    block_bytes = size_of(model[0].state_dict())
    return [
        same("outputs, beside the model in memory", outputs, expected),
        count("blocks in memory at once", streamed.reader.most_held, 2),
        count(
            "bytes read for all batches: the model, once", streamed.reader.read_bytes, BLOCKS * block_bytes
        ),
    ]


if __name__ == "__main__":
    run(demo, processes=1)
