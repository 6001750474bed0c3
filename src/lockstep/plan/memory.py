"""Bytes of weights, gradients and optimizer state on a rank, and where they rest, before anything runs.

Psi stands for the number of parameters and N for the ranks that share one copy of the state. Counted is what
grows with Psi; activations, buffers and what allocators and communication backends keep for themselves are not.

References: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
sections 3 and 5; Wang et al., ZeRO++, 2023 (hpz); Zhao et al., PyTorch FSDP, VLDB 2023 (hybrid sharding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

from lockstep.config.checks import MAX_ACCUMULATION_STEPS, MAX_PROCESSES
from lockstep.config.enums import Offload, Strategy, StringEnum
from lockstep.config.parallel import Parallel
from lockstep.config.values import parse_integer, repr_short, suggestion
from lockstep.errors import ConfigError
from lockstep.plan.sizes import BYTES, ModelSize, dtypes
from lockstep.plan.traffic import Traffic, sent_bytes


class StateLocation(StringEnum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class StateLocations:
    """Where parts of the state are from one step to the next.

    ``copies``: the fp32 weights that are stepped on the host, where those on the device are others.
    """

    weights: StateLocation = StateLocation.DEVICE
    gradients: StateLocation = StateLocation.DEVICE
    optimizer: StateLocation = StateLocation.DEVICE
    copies: StateLocation | None = None


# offload -> weights, gradients, optimizer, copies; OFFLOADED is what offload_to says
OFFLOADED = None
TABLE: dict[Offload, tuple[StateLocation | None, StateLocation | None, StateLocation | None, bool]] = {
    Offload.NONE: (StateLocation.DEVICE, StateLocation.DEVICE, StateLocation.DEVICE, False),
    Offload.OPTIMIZER: (StateLocation.DEVICE, StateLocation.DEVICE, OFFLOADED, True),
    Offload.PARAMS: (OFFLOADED, OFFLOADED, StateLocation.HOST, False),
    Offload.ALL: (OFFLOADED, OFFLOADED, OFFLOADED, False),
}


def state_locations(parallel: Parallel) -> StateLocations:
    """Return where the state of a model spread like this rests, with an accelerator as the device."""
    rest = StateLocation.HOST if parallel.offload_folder is None else StateLocation.DISK
    weights, gradients, optimizer, copies = TABLE[parallel.offload]
    return StateLocations(weights or rest, gradients or rest, optimizer or rest, rest if copies else None)


FP32 = 4
STREAMED_BLOCKS = 4
"""Blocks of offloaded weights on the device: the one in use, two on their way, and the one that was in use."""
STAGED_BLOCKS = 3
"""Blocks of a state on disk that are in host memory while the optimizer steps: read, stepped, written."""

OPTIMIZERS = {
    "adamw": 8,
    "adam": 8,
    "nadam": 8,
    "radam": 8,
    "adamax": 8,
    "adagrad": 4,
    "rmsprop": 4,
    "sgd": 0,
    "sgd-momentum": 4,
    "lion": 4,
}
"""Bytes of state a parameter, in fp32: torch's classes with their default arguments, and Lion (Chen et al., 2023)."""


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of state on one of ``ranks`` ranks, and what it sends in a step.

    From one step to the next: ``weights``, ``gradients`` (until ``zero_grad``), ``optimizer``, DDP's
    ``buckets``, and ``copies`` (with ``offload=optimizer``: the weights that the host steps). ``locations`` says where
    they lie. Within a step, on the device: ``gathered_weights`` (offloaded without ZeRO: those that are streamed),
    ``kept_weights`` (hpz), ``unreduced_gradients`` (stage 1: whole ones; ``replicate``: shards without the other
    replicas' part), ``block_gradients`` and ``averaged_gradients`` (``replicate``: what was averaged over the
    replicas, which torch keeps until backward ends); on the host: ``staging``, for what comes from and goes to a
    disk, and ``fetched`` (with ``offload=optimizer``: gradients that the host steps with). ``textbook`` is what the
    paper's formula gives.
    """

    ranks: int
    weights: int
    gradients: int
    optimizer: int
    buckets: int = 0
    copies: int = 0
    gathered_weights: int = 0
    kept_weights: int = 0
    unreduced_gradients: int = 0
    block_gradients: int = 0
    averaged_gradients: int = 0
    staging: int = 0
    fetched: int = 0
    locations: StateLocations = field(default_factory=StateLocations)
    textbook: int = 0
    sent: Traffic = field(default_factory=Traffic)

    @property
    def at_rest(self) -> int:
        """After a step, on device, host and disk together."""
        return self.weights + self.gradients + self.optimizer + self.buckets + self.copies

    @property
    def host(self) -> int:
        """After a step, on the host."""
        return self._bytes_at(StateLocation.HOST)

    @property
    def disk(self) -> int:
        """After a step, on the disk."""
        return self._bytes_at(StateLocation.DISK)

    @property
    def device(self) -> int:
        """After a step, on the device."""
        return self._bytes_at(StateLocation.DEVICE) + self.buckets

    @property
    def host_peak(self) -> int:
        """What is on the host within a step."""
        return self.host + self.staging + self.fetched

    def on_device(self, part: str) -> int:
        """Return bytes of ``weights``, ``gradients`` or ``optimizer`` that rest on the device."""
        size: int = getattr(self, part)
        return size if getattr(self.locations, part) is StateLocation.DEVICE else 0

    def _bytes_at(self, place: StateLocation) -> int:
        parts = ("weights", "gradients", "optimizer", "copies")
        return sum(getattr(self, part) for part in parts if getattr(self.locations, part) is place)

    @property
    def peak(self) -> int:
        """An upper bound of what is on the device within a step.

        Unreduced gradients turn into (averages and) shards block by block, so that only the larger side counts.
        That holds when ``zero_grad`` frees the shards (``set_to_none=True``, the default).
        """
        shards = self.on_device("gradients")
        within = self.gathered_weights + self.kept_weights + self.block_gradients
        gradients = max(shards + self.averaged_gradients, self.unreduced_gradients)
        return self.device - shards + gradients + within


def state_bytes(
    parameters: int,
    ranks: int,
    parallel: Parallel,
    mixed_precision: str,
    optimizer: str = "adamw",
    trainable: int | None = None,
    *,
    block: int = 0,
    root: int = 0,
    largest_group: int = 0,
    micro_batches: int = 1,
) -> MemoryRow:
    """Return the state of a model with ``parameters`` parameters on one of ``ranks`` ranks.

    Weights, gradients and optimizer state are fp32. With AdamW they are 4 + 4 + 8 bytes a parameter in one
    process; DDP adds 4 of buckets (unless ``gradient_as_bucket_view``). Under ZeRO every stage keeps them
    sharded between steps, (4 + 4 + 8) / N. The stages differ in what is whole within a step:

    - stage 1: weights, and gradients until the end of the window.
    - stage 2: weights. Gradients are scattered after each micro-batch.
    - stage 3: weights of two blocks, the current one and the next on its way, and of the root group. With
      ``hpz=P`` also 1/P of the blocks' weights, from forward to backward.

    All stages hold one block's gradients, and their copy that is being averaged.

    ``offload`` moves what is at rest to host memory or to a disk (``state_locations``). The device is taken to be an
    accelerator. Where it is a CPU, its memory is the host's, without ``fetched`` and ``copies``.
    Parameters offloaded in one process are on the device for ``STREAMED_BLOCKS`` weight groups at a time, or as many as
    ``offload_budget`` has room for.

    Args:
        trainable: how many of the parameters get gradients; None: all.
        block: parameters of the largest block; 0: blocks are not counted.
        root: parameters in no block, which stay gathered from forward to backward.
        largest_group: the most parameters that are streamed at once: a block, or a module in none. 0: the larger of
            block and root.
        micro_batches: batches in a window of accumulation.

    Raises:
        ConfigError: a number is out of range, the optimizer is not in ``OPTIMIZERS``, or the ranks cannot be
            divided as ``parallel`` says.
    """
    size = ModelSize(parameters, parameters if trainable is None else trainable, block, root)
    parse_integer(ranks, "ranks", 1, MAX_PROCESSES)
    parse_integer(micro_batches, "micro_batches", 1, MAX_ACCUMULATION_STEPS)
    largest_group = parse_integer(largest_group, "largest_group", 0, parameters) or max(block, root)
    _refuse_uncounted(parallel, ranks)
    state = _optimizer_bytes(optimizer)
    parallel.check_offload(ranks)
    sharded = parallel.shards and ranks > 1
    shard = parallel.shard_size(ranks) if sharded else 1
    weights, trained = math.ceil(Fraction(size.parameters, shard)), math.ceil(Fraction(size.trainable, shard))
    row = MemoryRow(
        ranks=ranks,
        weights=FP32 * weights,
        gradients=FP32 * trained,
        optimizer=state * trained,
        copies=FP32 * trained if parallel.offload is Offload.OPTIMIZER else 0,
        fetched=FP32 * trained if parallel.offload is Offload.OPTIMIZER else 0,
        locations=state_locations(parallel),
        textbook=_textbook(size, shard, parallel, mixed_precision, state),
        sent=sent_bytes(size, ranks, parallel, mixed_precision, micro_batches),
    )
    row = replace(row, staging=_staging(row, size, largest_group))
    if sharded:
        return _within_step(row, size, shard, parallel, dtypes(parallel, mixed_precision), micro_batches)
    if ranks > 1:
        return replace(row, buckets=FP32 * size.trainable)
    return _streamed(row, size, largest_group, parallel.offload_budget) if parallel.offloads_params else row


def _refuse_uncounted(parallel: Parallel, ranks: int) -> None:
    if parallel.strategy is Strategy.DATA_PARALLEL and ranks > 1:
        raise ConfigError(
            f"parallel='dataparallel' is one process, but there are {ranks}. Use parallel='ddp' or a stage of "
            "ZeRO."
        )
    if parallel.splits_model or parallel.ep > 1:
        raise ConfigError(
            f"parallel='{parallel}': the table counts data parallel and ZeRO only. Drop tp, pp, cp and ep here."
        )


def textbook_bytes(
    parameters: int, shard: int, stage: int, weights: int = 4, gradients: int = 4, optimizer: int = 8
) -> int:
    """Return the paper's formula (section 3 and figure 1), with so many bytes a parameter for each part.

    Stage 0 (data parallel): everything whole. Stage 1 divides the optimizer state by ``shard``, stage 2 also
    gradients, stage 3 also weights. fp32 training with Adam is 4, 4, 8; the paper's mixed precision 2, 2, 12,
    where the optimizer holds the fp32 weights.
    """
    parts = (weights, gradients, optimizer)
    whole = sum(parts[: 3 - stage])
    return math.ceil(parameters * (whole + Fraction(sum(parts) - whole, shard)))


def _textbook(size: ModelSize, shard: int, parallel: Parallel, mixed_precision: str, state: int) -> int:
    """Frozen parameters have weights alone; with mixed precision the paper stores them in 16 bits."""
    weights, master = (4, 0) if dtypes(parallel, mixed_precision)["activations"] == "fp32" else (2, 4)
    frozen = size.parameters - size.trainable
    return textbook_bytes(size.trainable, shard, parallel.zero, weights, weights, master + state) + (
        textbook_bytes(frozen, shard, parallel.zero, weights, 0, 0)
    )


def _staging(row: MemoryRow, size: ModelSize, largest_group: int) -> int:
    """Host memory for blocks on their way to a disk and back: all of a block's parts that rest there."""
    share = Fraction(min(STAGED_BLOCKS * largest_group, size.parameters), size.parameters)
    return math.ceil(share * row.disk)


def _streamed(row: MemoryRow, size: ModelSize, largest_group: int, budget: int) -> MemoryRow:
    """Add what is on the device while the parameters of one process are offloaded."""
    weights = min(budget or FP32 * STREAMED_BLOCKS * largest_group, FP32 * size.parameters)
    # Those of one block, and of the one on its way to the host.
    gradients = FP32 * min(2 * largest_group, size.trainable)
    return replace(row, gathered_weights=weights, block_gradients=gradients)


def _within_step(
    row: MemoryRow, size: ModelSize, shard: int, parallel: Parallel, types: dict[str, str], micro_batches: int
) -> MemoryRow:
    gathered, unsharded, averaged = (
        BYTES[types[name]] for name in ("gathered weights", "unsharded gradients", "gradient reduction")
    )
    in_blocks = size.parameters - size.root
    weights = min(2 * size.block, in_blocks) + size.root if parallel.zero == 3 else size.parameters
    # Added up until the end of the window: whole gradients, or shards that are not averaged over replicas.
    unreduced = Fraction(0)
    if parallel.zero == 1:
        unreduced = size.trainable * unsharded
    elif parallel.replicate > 1 and micro_batches > 1:
        unreduced = Fraction(size.trainable, shard) * averaged
    # Averages in fp32 on the device are the shards themselves.
    copied = parallel.replicate > 1 and (averaged != FP32 or not row.on_device("gradients"))
    return replace(
        row,
        gathered_weights=math.ceil(weights * gathered),
        kept_weights=math.ceil(Fraction(in_blocks, parallel.hpz) * gathered) if parallel.hpz else 0,
        unreduced_gradients=math.ceil(unreduced),
        block_gradients=math.ceil(min(size.block, size.trainable) * (unsharded + averaged)),
        averaged_gradients=math.ceil(Fraction(size.trainable, shard) * averaged) if copied else 0,
    )


def _optimizer_bytes(name: str) -> int:
    known = OPTIMIZERS.get(name.lower())
    if known is None:
        raise ConfigError(
            f"optimizer={repr_short(name)} has no known size of state.{suggestion(name, OPTIMIZERS)} "
            f"Use one of {', '.join(OPTIMIZERS)}."
        )
    return known
