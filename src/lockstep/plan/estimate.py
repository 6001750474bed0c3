"""What a model needs, by way of running it and of training it, and the cheapest way that fits.

State is counted as in ``plan/memory.py``, streaming as in ``offload``: so many of the largest unit are on the device at
once. Cheapest is what moves the fewest bytes in a forward (inference) or in a step (training).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lockstep.config.enums import Offload
from lockstep.config.parallel import Parallel
from lockstep.errors import ConfigError
from lockstep.plan.estimate_model import ModelFacts, nbytes_of
from lockstep.plan.memory import STREAMED_BLOCKS, MemoryRow, StateLocation, state_bytes

FOLDER = "FOLDER"
"""Stands for the user's folder on a disk in the lines that are suggested."""

ALONE = ("auto", "offload=optimizer", "offload=optimizer offload_to={}", "offload", "offload=params offload_to={}",
         "offload offload_to={}")  # fmt: skip
TOGETHER = ("ddp", "zero=1", "zero=2", "zero=3", "offload=optimizer", "offload=optimizer offload_to={}",
            "zero=3 offload=optimizer offload_to={}", "zero=3 offload",
            "zero=3 offload=params offload_to={}", "zero=3 offload offload_to={}")  # fmt: skip
MODES = ("none", "full", "offload")
"""Values of ``activation=`` that have a bound, the fastest first."""


@dataclass(frozen=True)
class Limits:
    """Bytes that there are; None: not said, and so no limit.

    ``device``: of one device. ``host``, ``disk``: of one machine, which ``ranks_per_machine`` ranks share.
    ``on_cpu``: the device is the CPU, ``device`` its memory, which the machine's ranks share too.
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    ranks_per_machine: int = 8
    on_cpu: bool = False

    def hold(self, device: int, host: int, disk: int, ranks: int = 1) -> bool | None:
        """Return whether there is room for this on each rank; None where no limit was given."""
        if self.device is None and self.host is None and self.disk is None:
            return None
        together = min(ranks, self.ranks_per_machine)
        needs = ((device * (together if self.on_cpu else 1), self.device), (host * together, self.host),
                 (disk * together, self.disk))  # fmt: skip
        return all(limit is None or need <= limit for need, limit in needs)


@dataclass(frozen=True)
class InferenceRow:
    """Weights and buffers in one dtype, and where they are: ``whole`` on the device, or streamed from ``ram`` or
    ``disk``. ``moved``: bytes that come to the device in a forward."""

    dtype: str
    placement: str
    device: int
    host: int = 0
    disk: int = 0
    moved: int = 0
    fits: bool | None = None


@dataclass(frozen=True)
class TrainingRow:
    """One way to train on each of ``ranks`` ranks: the most within a step on device and host, and what is on disk.
    ``way`` is ``parallel`` without ``activation``.

    ``moved``: bytes of a rank's step of one micro-batch to other ranks, to the host and back, and to the disk and
    back. ``activations``: of them ``device`` has so many; None: not counted. ``reason``: why this way cannot be.
    """

    parallel: str
    way: str
    ranks: int
    precision: str
    device: int = 0
    host: int = 0
    disk: int = 0
    moved: int = 0
    activations: int | None = None
    fits: bool | None = None
    state: MemoryRow | None = None
    reason: str = ""


def inference_rows(facts: ModelFacts, limits: Limits) -> list[InferenceRow]:
    """Rows for float32, for 16 bits, and for the model as it is, where that is another."""
    dtypes: dict[str, str | None] = {"float32": "float32", "bfloat16, float16": "bfloat16"}
    if facts.nbytes() not in {facts.nbytes(dtype) for dtype in dtypes.values()}:
        dtypes["as it is"] = None
    return [row for label, dtype in dtypes.items() for row in _placements(facts, label, dtype, limits)]


def _placements(facts: ModelFacts, label: str, dtype: str | None, limits: Limits) -> Iterable[InferenceRow]:
    total, largest = facts.nbytes(dtype), facts.largest(dtype)[1]

    def row(placement: str, device: int, host: int = 0, disk: int = 0, moved: int = 0) -> InferenceRow:
        return InferenceRow(label, placement, device, host, disk, moved, limits.hold(device, host, disk))

    yield row("whole", total)
    least = STREAMED_BLOCKS * largest
    if least >= total:
        return
    moved = total - _resident_bytes(total, largest, limits.device)
    if not limits.on_cpu:
        yield row("from RAM", least, host=total, moved=moved)
    staged = 0 if limits.on_cpu else 2 * largest
    yield row("from disk", least, host=staged, disk=total, moved=moved)


def _resident_bytes(total: int, largest: int, budget: int | None) -> int:
    """Return bytes that stay on the device from forward to forward: all of the budget but what the stream needs."""
    if budget is None:
        # As with a budget of STREAMED_BLOCKS of the largest, the least that streams.
        return largest
    return total if budget >= total else max(largest, budget - (STREAMED_BLOCKS - 1) * largest)


def training_rows(
    facts: ModelFacts, ranks: Sequence[int], precisions: Sequence[str], optimizer: str, limits: Limits
) -> list[TrainingRow]:
    """Rows of every way to train, for each number of ranks and precision.

    Raises:
        ConfigError: the model has no parameters, or too many; the optimizer or a precision is not known.
    """
    if not facts.count:
        raise ConfigError(
            f"{facts.name} has no parameters, so there is nothing to train or to place. Name another model."
        )
    # What is wrong is so for every row: say it before.
    state_bytes(facts.count, 1, Parallel(), precisions[0], optimizer, facts.trainable)
    return [
        row
        for n in ranks
        for precision in precisions
        for text in (ALONE if n == 1 else TOGETHER)
        for row in _trained(facts, text.format(FOLDER), n, precision, optimizer, limits)
    ]


def _trained(
    facts: ModelFacts, text: str, ranks: int, precision: str, optimizer: str, limits: Limits
) -> Iterable[TrainingRow]:
    plan = Parallel.parse(text)
    sizes = {"block": facts.block, "root": facts.root, "largest_group": facts.largest_group}
    if limits.on_cpu and plan.offload is not Offload.NONE and plan.offload_folder is None:
        # The memory of a CPU is the host's.
        return
    if plan.offload is Offload.OPTIMIZER and plan.shards and not limits.on_cpu:
        # An Accelerator refuses this.
        return
    try:
        state = state_bytes(facts.count, ranks, plan, precision, optimizer, facts.trainable, **sizes)
    except ConfigError as error:
        yield TrainingRow(text, text, ranks, precision, reason=str(error))
        return
    device, host, disk = state.peak + nbytes_of(facts.buffers), state.host_peak, state.disk
    # Both are one memory, in which gradients for the host's step need no copy.
    if limits.on_cpu:
        device, host = device + host - state.fetched, 0
        # The CPU steps its own weights.
        disk -= state.copies
    moved = state.sent.total + sum(carried_bytes(state, plan, limits.on_cpu))
    # ZeRO gathers weights in 16 bits, of which autocast makes no further copies.
    gathered = precision != "no" and ranks > 1 and plan.shards
    activations = (facts.activations or {}).get(f"{precision} gathered" if gathered else precision)
    for mode in MODES if activations is not None else MODES[:1]:
        words = plan if mode == "none" else plan.merged(activation=mode)
        kept = activations.nbytes(mode) if activations is not None else None
        # Inputs of blocks go to the host and come back.
        moved_too = 2 * activations.inputs if activations is not None and mode == "offload" else 0
        if mode == "offload" and limits.on_cpu:
            continue
        on_host = host + (moved_too // 2)
        needs = (device + (kept or 0), on_host, disk)
        yield TrainingRow(
            str(words),
            text,
            ranks,
            precision,
            *needs,
            moved + moved_too,
            kept,
            limits.hold(*needs, ranks),
            state,
        )


def carried_bytes(state: MemoryRow, plan: Parallel, on_cpu: bool = False) -> tuple[int, int]:
    """Return bytes between a rank's device and its host, and between its host and a disk, in a step of one micro-batch.

    Parameters come for the forward and, in one process and with stage 3, again for the backward; gradients go once.
    Parameters that stay on the device come once, when they have been stepped. What rests on a disk is read and written
    once more where the optimizer steps on it.
    """
    if plan.offload is Offload.NONE:
        return 0, 0
    passes = 1 if plan.zero in (1, 2) and state.ranks > 1 else 2
    # Of trained weights there are as many bytes as of their gradients: both are fp32.
    link = state.gradients + (passes * state.weights if plan.offloads_params else state.gradients)
    disk = 0
    if state.locations.weights is StateLocation.DISK:
        # Backward writes gradients, and the step reads them; weights are read for each pass, and stepped.
        disk += passes * state.weights + 2 * state.gradients + 2 * state.weights
    if state.locations.optimizer is StateLocation.DISK:
        disk += 2 * (state.optimizer + (0 if on_cpu else state.copies))
    return (0 if on_cpu else link), disk


def cheapest(rows: Iterable[TrainingRow]) -> TrainingRow | None:
    """Return the row that moves the fewest bytes among those that fit; the first of several."""
    return _least(rows, lambda row: row.fits is True and not row.reason, lambda row: row.moved)


def least_memory(rows: Iterable[TrainingRow]) -> TrainingRow | None:
    """Return the row that needs least on the device."""
    return _least(rows, lambda row: not row.reason, lambda row: row.device)


def _least(
    rows: Iterable[TrainingRow], wanted: Callable[[TrainingRow], bool], cost: Callable[[TrainingRow], int]
) -> TrainingRow | None:
    return min(filter(wanted, rows), key=cost, default=None)


NOTHING = "nothing fits"


def suggestions(
    limits: Limits, inference: Sequence[InferenceRow], training: Sequence[TrainingRow]
) -> dict[str, str]:
    """Return what to write, by what it is for; empty where no limit says what fits."""
    if limits.hold(0, 0, 0) is None:
        return {}
    found: dict[str, str] = {}
    for dtype in dict.fromkeys(row.dtype for row in inference):
        fitting = [row for row in inference if row.dtype == dtype and row.fits]
        chosen = min(fitting, key=lambda row: row.moved, default=None)
        found[f"run in {dtype}"] = NOTHING if chosen is None else _call(chosen, limits)
    for ranks in dict.fromkeys(row.ranks for row in training):
        for precision in dict.fromkeys(row.precision for row in training):
            rows = [row for row in training if (row.ranks, row.precision) == (ranks, precision)]
            best = cheapest(rows)
            what = f"train on {several(ranks)} in {'fp32' if precision == 'no' else precision}"
            more = "" if precision == "no" else f', mixed_precision="{precision}"'
            found[what] = NOTHING if best is None else f'Accelerator(parallel="{best.parallel}"{more})'
    return found


def _call(row: InferenceRow, limits: Limits) -> str:
    """Return how to run a model this way."""
    if row.placement == "whole":
        return "model.to(device)" if not limits.on_cpu else "the model as it is"
    if limits.on_cpu:
        return 'disk_offload(model, "FOLDER", execution_device="cpu")'
    given = {"0": limits.device, '"cpu"': limits.host}
    memory = ", ".join(f"{place}: {_exact(size)}" for place, size in given.items() if size is not None)
    folder = ', offload_folder="FOLDER"' if row.placement == "from disk" else ""
    return (
        f'load_checkpoint_and_dispatch(model, CHECKPOINT, device_map="auto", max_memory={{{memory}}}{folder})'
    )


def _exact(size: int) -> str:
    """Return a size as ``max_memory`` takes it: in the largest unit that loses nothing."""
    for exponent, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        for base, unit in ((1000, "B"), (1024, "iB")):
            if size and size % base**exponent == 0:
                return f'"{size // base**exponent}{letter}{unit}"'
    return str(size)


def several(ranks: int) -> str:
    """So many processes, in words."""
    return "1 process" if ranks == 1 else f"{ranks} processes"
