"""A model that is read from disk while it computes: time, memory and loading, beside Accelerate.

    python benchmarks/streaming.py
    python benchmarks/streaming.py --quick

Three questions, each with its table:

- forward: blocks of linear layers are computed from disk. Beside it, in turns: the same forward with all weights in
  memory (compute alone), reading the same bytes from disk (read alone), and Accelerate's ``disk_offload``. Before every
  pass the files leave the page cache, so that all read from the disk.
- memory: a process of its own runs forwards of a model in a third of its size as budget. Its peak of resident memory
  above what it held before loading is compared with the budget.
- loading: ``load_checkpoint_and_dispatch`` of a sharded checkpoint into memory, and the first forward; both libraries.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import common

WIDTH = 2048
BLOCK_BYTES = 2 * WIDTH * WIDTH * 4
PIECE = 8 * 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + hidden


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a model of 256 MiB and 3 rounds")
    parser.add_argument("--rounds", type=int, help="passes of each contender (7)")
    parser.add_argument("--blocks", type=int, help="blocks of 32 MiB (48: 1.6 GB)")
    parser.add_argument(
        "--rows", type=int, help="rows of the input; by default such that computing takes as long as reading"
    )
    parser.add_argument("--folder", type=Path, help="where the model lies (default: a temporary directory)")
    parser.add_argument("--output", type=Path, help="JSON file (default benchmarks/results/streaming.json)")
    parser.add_argument(
        "--measure-memory", nargs=3, metavar=("FOLDER", "BLOCKS", "BUDGET"), help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--measure-loading", nargs=3, metavar=("LIBRARY", "FOLDER", "BLOCKS"), help=argparse.SUPPRESS
    )
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (3 if chosen.quick else 7)
    chosen.blocks = chosen.blocks or (8 if chosen.quick else 48)
    return chosen


# -- files ------------------------------------------------------------------------------------------------


def write_model(folder: Path, blocks: int) -> list[Path]:
    """A checkpoint of random weights, one shard for every eight blocks, with an index; block by block in memory."""
    import json

    generator = torch.Generator().manual_seed(0)
    where, files = {}, []
    for first in range(0, blocks, 8):
        name = f"model-{first // 8 + 1:05}-of-{-(-blocks // 8):05}.safetensors"
        weights = {
            f"blocks.{i}.{part}.weight": torch.randn(WIDTH, WIDTH, generator=generator) * (0.5 / WIDTH**0.5)
            for i in range(first, min(first + 8, blocks))
            for part in ("up", "down")
        }
        save_file(weights, folder / name)
        where.update(dict.fromkeys(weights, name))
        files.append(folder / name)
    index = {"metadata": {"total_size": blocks * BLOCK_BYTES}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()
    return files


def forget(folder: Path) -> None:
    """Let the page cache drop these files."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_all(files: list[Path], buffer: memoryview) -> None:
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


# -- forward ----------------------------------------------------------------------------------------------


def forward_contenders(folder: Path, work: Path, files: list[Path], blocks: int) -> dict[str, Any]:
    """Name -> (what runs one pass, where its files lie)."""
    import accelerate

    import lockstep

    def on_disk(library: Any) -> Any:
        with library.init_empty_weights():
            model = Model(blocks)
        return model

    in_memory = Model(blocks)
    for path in files:
        from safetensors.torch import load_file

        in_memory.load_state_dict(load_file(path), strict=False)
    ours = lockstep.load_checkpoint_and_dispatch(
        on_disk(lockstep), folder, device_map={"": "disk"}, no_split_module_classes=["Block"]
    )
    theirs_folder = work / "accelerate"
    theirs = Model(blocks)
    theirs.load_state_dict(in_memory.state_dict())
    theirs = accelerate.disk_offload(theirs, str(theirs_folder))
    buffer = memoryview(bytearray(PIECE))
    return {
        "compute alone": (in_memory, folder),
        "read alone": (lambda x: read_all(files, buffer), folder),
        "lockstep": (ours, folder),
        "accelerate": (theirs, theirs_folder),
    }


@torch.no_grad()
def seconds(run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> float:
    start = time.perf_counter()
    run(x)
    return time.perf_counter() - start


def seconds_of_reading(read: Callable[[torch.Tensor], Any], folder: Path) -> float:
    forget(folder)
    return seconds(read, torch.empty(0))


def balanced_rows(compute: Any, reading_s: float) -> int:
    """Rows of an input for which computing takes as long as reading."""
    rows = 64
    compute(torch.randn(rows, WIDTH))
    taken = min(seconds(compute, torch.randn(rows, WIDTH)) for _ in range(2))
    return max(1, round(rows * reading_s / taken))


def measure_forward(
    chosen: argparse.Namespace, folder: Path, work: Path, files: list[Path]
) -> dict[str, Any]:
    contenders = forward_contenders(folder, work, files, chosen.blocks)
    reading = min(seconds_of_reading(contenders["read alone"][0], folder) for _ in range(3))
    rows = chosen.rows or balanced_rows(contenders["compute alone"][0], reading)
    x = torch.randn(rows, WIDTH)
    expected = contenders["compute alone"][0](x).detach()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, chosen.rounds):
        names = list(contenders)[turn % 4 :] + list(contenders)[: turn % 4]
        for name in names:
            run, place = contenders[name]
            forget(place)
            value = seconds(run, x)
            if turn >= 0:
                taken[name].append(value)
    for name in ("lockstep", "accelerate"):
        with torch.no_grad():
            if not torch.equal(contenders[name][0](x), expected):
                raise SystemExit(f"{name} gives another result than the model in memory")
    best = [max(a, b) for a, b in zip(taken["compute alone"], taken["read alone"], strict=True)]
    counters = contenders["lockstep"][0]._streamer.counters
    return {
        "rows": rows,
        "seconds": {name: common.summary(values).to_dict() for name, values in taken.items()},
        "over max(compute, read)": {
            name: common.summary(common.ratios(taken[name], best)).to_dict()
            for name in ("lockstep", "accelerate")
        },
        "accelerate over lockstep": common.summary(
            common.ratios(taken["accelerate"], taken["lockstep"])
        ).to_dict(),
        "bytes of a pass": chosen.blocks * BLOCK_BYTES,
        "waits": counters.urgent_loads,
    }


# -- memory -----------------------------------------------------------------------------------------------


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@torch.no_grad()
def memory_of_a_run(folder: Path, blocks: int, budget: int) -> dict[str, Any]:
    import lockstep

    load = lockstep.load_checkpoint_and_dispatch  # imports come before what is measured
    Model(1)(torch.randn(4, WIDTH))  # so does what torch allocates in its first product
    with lockstep.init_empty_weights():
        model = Model(blocks)
    reset_peak()
    before = status("VmRSS")
    model = load(
        model, folder, device_map="auto", max_memory={"cpu": budget}, no_split_module_classes=["Block"]
    )
    loaded = status("VmHWM") - before
    for _ in range(3):
        model(torch.randn(4, WIDTH))
    return {"while loading": loaded, "above": status("VmHWM") - before, "whole process": status("VmHWM")}


# -- loading ----------------------------------------------------------------------------------------------


@torch.no_grad()
def loading_of(library: str, folder: Path, blocks: int) -> dict[str, Any]:
    from importlib import import_module

    module: Any = import_module(library)
    load = module.load_checkpoint_and_dispatch  # imports come before what is measured
    with module.init_empty_weights():
        model = Model(blocks)
    reset_peak()
    before = status("VmRSS")
    start = time.perf_counter()
    model = load(model, str(folder), device_map={"": "cpu"}, no_split_module_classes=["Block"])
    loaded = time.perf_counter() - start
    model(torch.randn(4, WIDTH))
    usable = time.perf_counter() - start
    return {"loaded_s": loaded, "first_forward_s": usable, "peak_bytes": status("VmHWM") - before}


def in_process(*arguments: str) -> dict[str, Any]:
    import json

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if finished.returncode:
        raise SystemExit(finished.stderr)
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def measure_loading(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    taken: dict[str, dict[str, list[float]]] = {}
    for turn in range(chosen.rounds):
        for library in ("lockstep", "accelerate")[:: 1 if turn % 2 else -1]:
            forget(folder)
            for name, value in in_process(
                "--measure-loading", library, str(folder), str(chosen.blocks)
            ).items():
                taken.setdefault(library, {}).setdefault(name, []).append(value)
    return {
        library: {name: common.summary(values).to_dict() for name, values in of.items()}
        for library, of in taken.items()
    }


def main() -> None:
    import json

    chosen = options()
    if chosen.measure_memory:
        folder, blocks, budget = chosen.measure_memory
        print(json.dumps(memory_of_a_run(Path(folder), int(blocks), int(budget))))
        return
    if chosen.measure_loading:
        library, folder, blocks = chosen.measure_loading
        print(json.dumps(loading_of(library, Path(folder), int(blocks))))
        return
    torch.set_num_threads(1)
    report = common.Report("streaming", "A model that is read from disk while it computes")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
        folder, work = Path(place, "model"), Path(place, "work")
        folder.mkdir()
        work.mkdir()
        files = write_model(folder, chosen.blocks)
        forward = measure_forward(chosen, folder, work, files)
        loading = measure_loading(chosen, folder)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
        blocks = 16 if chosen.quick else 96
        write_model(Path(place), blocks)
        budget = blocks * BLOCK_BYTES // 3
        memory = {"model": blocks * BLOCK_BYTES, "budget": budget}
        memory |= in_process("--measure-memory", place, str(blocks), str(budget))
    show(report, chosen, forward, memory, loading)


def show(
    report: common.Report,
    chosen: argparse.Namespace,
    forward: dict[str, Any],
    memory: dict[str, Any],
    loading: dict[str, Any],
) -> None:
    rows = []
    for name, seconds_of in forward["seconds"].items():
        ratio = forward["over max(compute, read)"].get(name)
        rows.append(
            [
                "forward from disk",
                name,
                spread(seconds_of, "s"),
                spread(ratio, "of the larger") if ratio else "",
            ]
        )
    rows.append(["", "accelerate / lockstep", spread(forward["accelerate over lockstep"], ""), ""])
    for name in ("while loading", "above", "whole process"):
        share = f"{memory[name] / memory['budget']:.2f} of the budget"
        rows.append(
            [f"{gib(memory['model'])} in {gib(memory['budget'])}", f"peak {name}", gib(memory[name]), share]
        )
    for library, of in loading.items():
        peak = f"peak {gib(of['peak_bytes']['median'])}"
        rows.append(["loading", library, spread(of["loaded_s"], "s"), peak])
        rows.append(["", f"{library}, first forward done", spread(of["first_forward_s"], "s"), ""])
    report.finish(
        ["question", "what", "median (quartiles)", ""],
        rows,
        {"forward": forward, "memory": memory, "loading": loading},
        {"rounds": chosen.rounds, "blocks": chosen.blocks, "block_bytes": BLOCK_BYTES, "threads": 1},
        chosen.output,
        [
            "The page cache is told to drop the files before every pass. Ratios compare passes of one round.",
            "of the larger: over the larger of computing alone and reading alone, of the same round.",
            "peak above: resident memory above what the process held before it built the model.",
        ],
    )


def spread(value: dict[str, float], unit: str) -> str:
    return f"{value['median']:.3f} ({value['q1']:.3f} to {value['q3']:.3f}) {unit}".strip()


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.3f} GiB"


if __name__ == "__main__":
    main()
