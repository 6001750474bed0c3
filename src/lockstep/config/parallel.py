"""How a model is spread, as one line of words: ``Accelerator(parallel="zero=3 replicate=2")``."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lockstep.config.enums import (
    Activation,
    Compile,
    CPMethod,
    Offload,
    QuantizedType,
    ReduceType,
    Schedule,
    Strategy,
)
from lockstep.config.parallel_words import HOST, PARSERS, SWITCHED_ON, known_word, stages_per_rank, text_of
from lockstep.config.parallel_words import BlockRule as BlockRule
from lockstep.config.values import repr_short
from lockstep.errors import ConfigError

GROUP_BYTES = 25 * 1024 * 1024
"""Up to this size small blocks and small models are gathered and reduced together: DDP's default for its buckets."""


@dataclass(frozen=True)
class Parallel:
    """How models are spread over ranks: the value of ``Accelerator(parallel=...)``.

    ``str()`` of one is the line that ``parse`` reads, such as ``"zero=3 activation=full"``.

    - ``strategy``: ``ddp`` (each process has the whole model), ``dataparallel`` (one process drives all GPUs), or
      ``auto``, which is ``ddp`` where there are several processes.
    - ``zero``: the stage of ZeRO. 1 shards the optimizer state, 2 also gradients, 3 also parameters. 0: nothing.
    - ``replicate``: the number of groups of ranks that hold a whole model each (hybrid sharding).
    - ``hpz``: with stage 3, keep parameters sharded over this number of neighbouring ranks between forward and
      backward (the secondary partition of ZeRO++). 0: over all ranks of the group.
    - ``reduce``: the type in which gradients are averaged under mixed precision: ``fp32``, ``bf16`` or ``fp16``.
      None: the type of the computation.
    - ``quantized_weights``: gather weights as 8-bit integers.
    - ``quantized_gradients``: average gradients as integers of this type, ``int8`` or ``int4``.
    - ``offload``: what is kept outside of the device: ``optimizer`` (its state), ``params`` (parameters and
      gradients), ``all`` (or the word alone), or ``none``. In several processes, ``params`` and ``all`` need a stage
      of ZeRO, and each rank offloads its shards.
    - ``offload_to``: where it is kept: ``cpu`` (host memory), or a folder (without spaces in its path).
    - ``offload_budget``: the most bytes (or a text such as ``4GB``) of parameters in the device's memory at once.
      They are brought there block by block. 0: four times the largest block.
    - ``forward_prefetch``: gather the next block's parameters before the current block runs.
    - ``sync_batchnorm``: compute the statistics of batch normalisation over the batches of all ranks.
    - ``activation``: which activations of a block are kept for backward: ``none`` (all), ``full`` (only its inputs;
      the others are computed again), ``selective`` (also results of matrix products and attention), or ``offload``
      (only its inputs, in host memory).
    - ``compile``: ``blocks`` compiles each block by itself with ``torch.compile``. The backend is that of
      ``dynamo_backend``, or inductor. ``none``: this word compiles nothing.
    - ``blocks``: the modules that are sharded, recomputed and compiled one by one: names of classes or modules,
      patterns such as ``layers.*``, or a function (name, module) -> bool. Empty: they are found by the model's
      structure.
    - ``tp``: the number of ranks over which layers are split (tensor parallel).
    - ``pp``: the number of ranks over which the depth is split (pipeline parallel).
    - ``cp``: the number of ranks over which the sequence is split (context parallel).
    - ``ep``: the number of ranks over which experts are split (expert parallel).
    - ``sequence_parallel``: with tp, split activations between its layers along the sequence.
    - ``loss_parallel``: with tp, keep logits split over the vocabulary in the loss.
    - ``tp_plan``: which layers tp splits and how: (name, style) pairs, ``transformers`` (the model's own plan), or
      ``infer`` (found by the model's structure). None: the first of these that exists.
    - ``cp_method``: how attention sees the whole sequence. ``ring``: keys and values travel around. ``ulysses``: each
      rank gets the whole sequence for some of the heads.
    - ``schedule``: the order in which stages of the pipeline work: ``1f1b``, ``gpipe``, ``interleaved``,
      ``zero_bubble``, ``zbv`` or ``dualpipev``.
    - ``micro_batches``: the number of parts into which the pipeline cuts a batch. 0: it is chosen.
    - ``stages_per_rank``: the number of stages of the pipeline on each rank. 0: what the schedule needs.
    - ``split``: names of the blocks at which stages begin, without the first. Empty: stages are balanced by
      parameters.
    - ``batch_dims``: for arguments of a pipeline's model, by name, the dimension that is cut into micro-batches
      (``ids=0,pos=none``). For the other arguments it is dim 0, if that is as long as the batch.
    - ``loss``: what the loss that a pipeline's model returns is over the batch: ``mean``, ``sum``, or ``whole``
      (computed on the whole batch at once). ``auto``: a mean, which is checked in each step.
    - ``verify``: when a model whose forward is split (tp, pp, cp, ep) is compared with the whole model:
      ``first_step`` (before the first step), ``every:N`` (also in every N-th training call), or ``off``.

    References: Rajbhandari et al., ZeRO, SC 2020; Wang et al., ZeRO++, 2023; Zhao et al., PyTorch FSDP, VLDB 2023;
    Shoeybi et al., Megatron-LM, 2019.

    Raises:
        ConfigError: a value is not allowed, or two values contradict each other.

    Examples:
        ```python
        from lockstep.utils import Parallel

        parallel = Parallel.parse("zero=3 activation=full")
        assert parallel.zero == 3 and parallel.shards
        assert parallel.merged(tp=2).tp == 2
        assert parallel.shard_size(world_size=4) == 4  # each rank has a fourth of each weight
        parallel.check_offload(world_size=4)  # nothing is offloaded: all is well
        ```
    """

    strategy: Strategy = Strategy.AUTO
    zero: int = 0
    replicate: int = 1
    hpz: int = 0
    reduce: ReduceType | None = None
    quantized_weights: QuantizedType | None = None
    quantized_gradients: QuantizedType | None = None
    offload: Offload = Offload.NONE
    offload_to: str = HOST
    offload_budget: int = 0
    forward_prefetch: bool = False
    sync_batchnorm: bool = False
    activation: Activation = Activation.NONE
    compile: Compile = Compile.NONE
    blocks: tuple[str, ...] | BlockRule = ()
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    tp_plan: str | tuple[tuple[str, str], ...] | None = None
    cp_method: CPMethod = CPMethod.RING
    schedule: Schedule = Schedule.ONE_F_ONE_B
    micro_batches: int = 0
    stages_per_rank: int = 0
    split: tuple[str, ...] = ()
    batch_dims: tuple[str, ...] = ()
    loss: str = "auto"
    verify: str = "first_step"

    def __post_init__(self) -> None:
        for name, parse in PARSERS.items():
            object.__setattr__(self, name, parse(getattr(self, name), f"parallel: {name}"))
        self._check_together()

    @classmethod
    def parse(cls, given: str | Parallel | Mapping[str, Any] | None) -> Parallel:
        """Return the ``Parallel`` that ``given`` describes.

        Args:
            given: A line such as ``"zero=3 activation=full"``, a mapping of fields, a ``Parallel``, or None (the
                default).

        Raises:
            ConfigError: a word is unknown, a value is not allowed, or two values contradict each other.
        """
        if given is None:
            return cls()
        if isinstance(given, Parallel):
            return given
        if isinstance(given, Mapping):
            return cls(**{_known_word(name): value for name, value in given.items()})
        if not isinstance(given, str):
            raise ConfigError(
                f"parallel is {repr_short(given)}, but must be a text such as 'zero=3', or a Parallel. Pass one of "
                "these."
            )
        values: dict[str, Any] = {}
        for word in given.split():
            name, equals, value = word.rstrip(",").partition("=")
            if not equals and name in Strategy.list():
                name, value = "strategy", name
            elif not equals:
                value = SWITCHED_ON.get(_known_word(name), "")
            if _known_word(name) in values:
                raise ConfigError(f"parallel={given!r} says {name} twice. Say it once.")
            if not value:
                raise ConfigError(f"parallel={given!r}: {name} has no value. Write {name}=VALUE.")
            values[name] = value
        return cls(**values)

    def merged(self, **values: Any) -> Parallel:
        """Return a copy with the fields in ``values``; a value that is None changes nothing.

        Raises:
            ConfigError: this ``Parallel`` and ``values`` both set a field, to different values.
        """
        given = {_known_word(name): value for name, value in values.items() if value is not None}
        for name, value in given.items():
            mine = getattr(self, name)
            value = PARSERS[name](value, name)
            if mine != getattr(Parallel, name) and mine != value:
                raise ConfigError(
                    f"{name} is {text_of(mine)} in parallel='{self}' but {name}={text_of(value)} was given too. "
                    "Give it in one place only."
                )
        return replace(self, **given)

    def __str__(self) -> str:
        words = [] if self.strategy is Strategy.AUTO else [str(self.strategy)]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "strategy" or value == getattr(Parallel, field.name):
                continue
            alone = value is True or value is Offload.ALL
            words.append(field.name if alone else f"{field.name}={text_of(value)}")
        return " ".join(words) or "auto"

    @property
    def shards(self) -> bool:
        """Whether any stage of ZeRO is asked for."""
        return self.zero > 0

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state is kept outside of the device. It is wherever parameters are, too."""
        return self.offload is not Offload.NONE

    @property
    def offloads_params(self) -> bool:
        """Whether parameters and gradients are kept outside of the device."""
        return self.offload in (Offload.PARAMS, Offload.ALL)

    @property
    def offload_folder(self) -> Path | None:
        """The folder of ``offload_to``, with ``~`` resolved; None: host memory."""
        return None if self.offload_to == HOST else Path(os.path.expanduser(self.offload_to))

    @property
    def params_folder(self) -> Path | None:
        """The folder of parameters and gradients. None: they are not offloaded to a folder."""
        return self.offload_folder if self.offloads_params else None

    @property
    def state_folder(self) -> Path | None:
        """The folder of the optimizer's state. None: it is not offloaded to a folder."""
        return None if self.offload is Offload.PARAMS else self.offload_folder

    @property
    def splits_model(self) -> bool:
        """Whether ranks share the work on one batch."""
        return self.tp * self.pp * self.cp > 1

    @property
    def replaces_parameters(self) -> bool:
        """Whether models get other parameters than they had, such as shards, where there are several ranks."""
        return self.shards or self.divides_weights

    @property
    def divides_weights(self) -> bool:
        """Whether ranks hold different weights between a forward and a backward too."""
        return self.tp * self.pp * self.ep > 1

    @property
    def splits_forward(self) -> list[str]:
        """The words of what takes a user's forward apart."""
        return [axis for axis in ("tp", "pp", "cp", "ep") if getattr(self, axis) > 1]

    @property
    def verify_interval(self) -> int:
        """Training calls from one verification to the next; 0: only the first call is verified."""
        return int(self.verify.partition(":")[2] or 0)

    def shard_size(self, world_size: int) -> int:
        """Return the number of ranks over which one copy of each weight is sharded. It is 1 if ``world_size`` is 1.

        Raises:
            ConfigError: ``world_size`` ranks cannot be divided in this way. The message has the arithmetic.
        """
        if world_size <= 1:  # one process runs any script that only shards
            return 1
        # Ranks with the same part of the same layers. Those of one cp group are among them.
        ranks = max(1, world_size // (self.tp * self.pp))
        if ranks % self.replicate:
            raise ConfigError(
                f"parallel='{self}' wants {self.replicate} groups of equal size, but there are {ranks} processes "
                f"for each weight ({ranks} / {self.replicate} is not whole). Set replicate to a divisor of {ranks}."
            )
        size = ranks // self.replicate
        if size == 1 and self.replicate > 1:
            raise ConfigError(
                f"parallel='{self}' with {ranks} processes makes groups of {ranks} / {self.replicate} = 1 "
                "process, in which nothing is sharded. Use a smaller replicate, or parallel='ddp'."
            )
        if size % self.cp:
            raise ConfigError(
                f"parallel='{self}' makes groups of {ranks} / {self.replicate} = {size} ranks, but {size} is not "
                f"a multiple of cp={self.cp}. Use a smaller replicate."
            )
        if self.hpz and (size % self.hpz or not 1 < self.hpz < size):
            raise ConfigError(
                f"parallel='{self}': hpz={self.hpz} must divide the {size} ranks that share a model, and be neither 1 "
                f"nor {size}. Choose such a divisor, or drop hpz."
            )
        return size

    def check_offload(self, world_size: int) -> None:
        """Check that ``world_size`` processes can offload as this asks for.

        Raises:
            ConfigError: several processes would each offload whole parameters.
        """
        if self.offloads_params and world_size > 1 and not self.shards:
            raise ConfigError(
                f"parallel='{self}' offloads whole parameters, and each of the {world_size} processes would hold "
                "all of them. Add zero=1, zero=2 or zero=3, or use offload=optimizer."
            )

    def _check_together(self) -> None:
        if self.shards and self.strategy is not Strategy.AUTO:
            raise ConfigError(
                f"parallel has both '{self.strategy}' and zero={self.zero}, which exclude each other. Remove one "
                "of them."
            )
        for name in _NEED_ZERO:
            if not self.shards and getattr(self, name) != getattr(Parallel, name):
                raise ConfigError(f"parallel: {name} needs a stage of ZeRO. Add zero=1, zero=2 or zero=3.")
        if self.hpz and self.zero != 3:
            raise ConfigError(
                f"parallel: hpz={self.hpz} changes how stage 3 keeps parameters, but zero={self.zero}. Use zero=3, or "
                "drop hpz."
            )
        self._check_split()
        self._check_offloaded()
        if self.sync_batchnorm and (self.pp > 1 or self.strategy is Strategy.DATA_PARALLEL):
            other = "pp" if self.pp > 1 else "dataparallel"
            raise ConfigError(
                f"parallel='{self}': with {other}, batch normalisation gets one part of the batch at a time, so "
                f"it cannot compute statistics over all ranks. Drop sync_batchnorm, or {other}."
            )
        works_on_blocks = self.activation is not Activation.NONE or self.compile is Compile.BLOCKS
        if self.blocks != () and not (works_on_blocks or self.shards or self.pp * self.cp > 1):
            raise ConfigError(
                "parallel: blocks= is given, but no other option uses blocks. Add zero=..., activation=... or "
                "compile=blocks, or drop blocks."
            )

    def _check_offloaded(self) -> None:
        if self.offload is Offload.NONE:
            for name in ("offload_to", "offload_budget"):
                if getattr(self, name) != getattr(Parallel, name):
                    raise ConfigError(
                        f"parallel: {name} says how to offload, but nothing is offloaded. Add offload=optimizer, "
                        f"params or all, or drop {name}."
                    )
            return
        if self.offload_budget and not self.offloads_params:
            raise ConfigError(
                f"parallel='{self}': offload_budget is for offloaded parameters, but offload={self.offload} "
                "keeps parameters on the device. Use offload=params or all, or drop offload_budget."
            )
        if self.strategy is Strategy.DATA_PARALLEL:
            raise ConfigError(
                "parallel='dataparallel' copies whole models within one process, and offloads nothing. Drop "
                "offload, or dataparallel."
            )
        axis = next((axis for axis in ("tp", "pp", "cp", "ep") if getattr(self, axis) > 1), None)
        if axis is None:
            return
        if self.offload is Offload.OPTIMIZER or self.offload_to != HOST or axis == "ep":
            word = "offload_to" if self.offload_to != HOST else "offload"
            also = "" if axis == "ep" else ", or use a stage of ZeRO with offload=all to host memory"
            raise ConfigError(
                f"parallel='{self}': {word}={getattr(self, word)} goes with ddp and ZeRO only. Drop {axis}{also}."
            )
        if not self.shards:
            raise ConfigError(
                f"parallel='{self}': with {axis}, offload needs a stage of ZeRO. Add zero=1, zero=2 or zero=3, or "
                "drop offload."
            )

    def _check_whole_between_stages(self) -> None:
        for word, axes in (("sequence_parallel", ("pp", "cp")), ("loss_parallel", ("pp",))):
            axis = next((axis for axis in axes if getattr(self, axis) > 1), None)
            if getattr(self, word) and axis is not None:
                raise ConfigError(
                    f"parallel='{self}': {word} leaves tensors split over the ranks of tp, but {axis} needs "
                    f"whole tensors. Drop {word}."
                )

    def _check_stages(self) -> None:
        if self.pp == 1:
            return
        try:
            stages = self.pp * stages_per_rank(self.schedule, self.stages_per_rank)
        except ConfigError as error:
            raise ConfigError(f"parallel='{self}': {error}") from None
        if self.split and len(self.split) != stages - 1:
            raise ConfigError(
                f"parallel='{self}': split names {len(self.split)} blocks, but {stages} stages need {stages - 1} "
                f"names: the first block of each stage after the first. Name {stages - 1} blocks, or drop split."
            )

    def _check_split(self) -> None:
        if self.strategy is Strategy.DATA_PARALLEL and self.splits_model:
            raise ConfigError(
                "parallel='dataparallel' copies whole models within one process, so it cannot be combined with "
                "tp, pp, cp or ep. Drop dataparallel."
            )
        for axis, names in _NEED_AXIS.items():
            for name in names:
                if getattr(self, axis) == 1 and getattr(self, name) != getattr(Parallel, name):
                    raise ConfigError(f"parallel: {name} needs {axis}. Add {axis}=2 or more, or drop {name}.")
        self._check_stages()
        self._check_whole_between_stages()
        if self.ep > 1 and (self.splits_model or self.shards):
            raise ConfigError(
                f"parallel='{self}': ep goes with replicated data parallel training only. Drop ep, or the other "
                "options."
            )


def _known_word(name: str) -> str:
    return known_word(name, [field.name for field in fields(Parallel)])


_NEED_AXIS = {
    "tp": ("sequence_parallel", "loss_parallel", "tp_plan"),
    "cp": ("cp_method",),
    "pp": ("schedule", "micro_batches", "stages_per_rank", "split", "batch_dims", "loss"),
}

_NEED_ZERO = ("replicate", "hpz", "reduce", "quantized_weights", "quantized_gradients", "forward_prefetch")


def is_one_group(parallel: Parallel, nbytes: int, limit: int = GROUP_BYTES) -> bool:
    """Return whether ZeRO gathers and reduces a model of so many bytes, of one type, as a whole.

    Messages of its single blocks would cost more than they carry. With hpz and offload a user asks for less memory,
    and who names blocks wants these.
    """
    is_asked_for_less = parallel.blocks or parallel.hpz or parallel.offload is not Offload.NONE
    return parallel.shards and not is_asked_for_less and nbytes <= limit
