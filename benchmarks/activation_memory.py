"""Bytes of activations that each mode of recomputation keeps for backward, what the formulas say, and its step time.

    python benchmarks/activation_memory.py

One process, the blocks of the demo's GPT. Bytes are those of the tensors made between the start of forward
and the end of backward that are alive, asked of their storages after each operator. A step is forward,
backward and AdamW of the whole model; each mode's has one of the plain model next to it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
from lockstep.config import Activation
from lockstep.model import find_blocks
from lockstep.parallel import apply_activation_checkpointing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))
from model import GPT, GPTConfig

BATCH = 8
CONFIG = GPTConfig(context=128, width=144, layers=8, heads=4)
TOKENS = BATCH * CONFIG.context
INPUT_BYTES = TOKENS * CONFIG.width * 4
STEPS_A_TURN = 2


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 turns instead of 15")
    parser.add_argument("--turns", type=int, help="turns of each mode (default 15, quick 3)")
    parser.add_argument(
        "--output", type=Path, help="JSON file (default benchmarks/results/activation_memory.json)"
    )
    chosen = parser.parse_args()
    chosen.turns = chosen.turns or (3 if chosen.quick else 15)
    return chosen


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made under it and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in tensors((args, kwargs))}
        results = func(*args, **(kwargs or {}))
        for tensor in tensors(results):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in given:
                self.storages[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.live())
        return results

    def live(self) -> int:
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        return sum(size for _, size in self.storages.values())


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def make_model(mode: Activation) -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    apply_activation_checkpointing(model, mode, find_blocks(model))
    return model


def kept_and_peak(mode: Activation) -> tuple[int, int]:
    """Of the blocks alone, with gradients that are there already."""
    blocks = make_model(mode).blocks
    outside = torch.randn(BATCH, CONFIG.context, CONFIG.width, requires_grad=True)
    blocks(outside * 1.0).sum().backward()
    with LiveBytes() as counter:
        loss = blocks(outside * 1.0).sum()
        kept = counter.live() - loss.nbytes
        loss.backward()
    return kept, counter.peak


def saved_by_autograd() -> int:
    """What plain torch saves for backward in the blocks, each storage once, without parameters."""
    blocks = make_model(Activation.NONE).blocks
    own = {parameter.untyped_storage().data_ptr() for parameter in blocks.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # kept, so that no address is used twice
        return tensor

    x = torch.randn(BATCH, CONFIG.context, CONFIG.width)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        blocks(x)
    return sum(storage.nbytes() for storage in saved.values())


def formulas() -> dict[Activation, tuple[str, int]]:
    full = CONFIG.layers * INPUT_BYTES
    # qkv 3, attention 1, out 1, up 4, down 1: ten results of the input's size; and the log-sum-exp.
    products = CONFIG.layers * (10 * INPUT_BYTES + TOKENS * CONFIG.heads * 4)
    return {
        Activation.NONE: ("saved by autograd", saved_by_autograd()),
        Activation.SELECTIVE: ("L(11·4bsh + 4bsa)", full + products),
        Activation.FULL: ("L·4bsh", full),
        Activation.OFFLOAD: ("L·4bsh (on a CPU as full)", full),
    }


def make_step(mode: Activation) -> Callable[[], None]:
    model = make_model(mode)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randint(0, 256, (BATCH, CONFIG.context + 1))

    def step() -> None:
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_s(step: Callable[[], None]) -> float:
    """Median of some steps."""
    times = []
    for _ in range(STEPS_A_TURN):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def step_ratios(turns: int) -> dict[Activation, common.Summary]:
    steps = {mode: make_step(mode) for mode in Activation}
    plain = make_step(Activation.NONE)
    for step in (*steps.values(), plain):
        step()
    found: dict[Activation, list[float]] = {mode: [] for mode in steps}
    for turn in range(turns):
        for mode, step in steps.items():
            first, second = (step, plain) if turn % 2 else (plain, step)
            times = {first: time_s(first), second: time_s(second)}
            found[mode].append(times[step] / times[plain])
    return {mode: common.summary(values) for mode, values in found.items()}


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    report = common.Report("activation_memory", "Activations of the blocks, MB (10^6 bytes)")
    ratios = step_ratios(chosen.turns)
    rows, figures = [], []
    for mode, (formula, expected) in formulas().items():
        kept, peak = kept_and_peak(mode)
        ratio = ratios[mode]
        rows.append(
            [
                str(mode),
                f"{kept / 1e6:.3f}",
                formula,
                f"{expected / 1e6:.3f}",
                f"{kept / expected:.4f}",
                f"{peak / 1e6:.3f}",
                ratio.show(2),
            ]
        )
        figures.append(
            {
                "mode": str(mode),
                "kept_bytes": kept,
                "formula": formula,
                "formula_bytes": expected,
                "peak_bytes": peak,
                "step_time_over_none": ratio.to_dict(),
            }
        )
    report.finish(
        [
            "mode",
            "kept for backward",
            "formula",
            "formula's",
            "kept / formula",
            "peak",
            "step time over none",
        ],
        rows,
        figures,
        {
            "turns": chosen.turns,
            "batch": BATCH,
            "context": CONFIG.context,
            "width": CONFIG.width,
            "layers": CONFIG.layers,
            "heads": CONFIG.heads,
            "threads": 1,
        },
        chosen.output,
        [
            "L blocks, b rows of s tokens of width h, a heads, 4 bytes a number. The first block's input is counted.",
            "Peak: of all tensors made in forward and backward, beside parameters and their gradients.",
        ],
    )


if __name__ == "__main__":
    main()
