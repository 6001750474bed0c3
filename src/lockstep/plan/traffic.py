"""Bytes that a rank sends to others in an optimizer step.

Psi stands for the number of parameters and N for the ranks that share one copy of them. A ring over n ranks sends
(n - 1) / n of a tensor to gather or to scatter it, and twice that to all-reduce it.

References: Rajbhandari et al., ZeRO, SC 2020, section 7; Wang et al., ZeRO++, 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from lockstep.config.parallel import Parallel
from lockstep.plan.sizes import BYTES, ModelSize, dtypes


@dataclass(frozen=True)
class Traffic:
    """Bytes sent in an optimizer step, by collective. Quantised gradients are exchanged all to all, which
    counts as ``reduce_scatter``."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0

    @property
    def total(self) -> int:
        return self.all_gather + self.reduce_scatter + self.all_reduce


def sent_bytes(
    size: ModelSize, ranks: int, parallel: Parallel, mixed_precision: str, micro_batches: int = 1
) -> Traffic:
    """Return what a rank sends in a step of ``micro_batches`` micro-batches, k below. In elements:

    - DDP: one all-reduce of the gradients, 2 Psi (N - 1) / N.
    - stage 1: one all-gather and one reduce-scatter, 2 Psi (N - 1) / N.
    - stage 2: one all-gather and k reduce-scatters, (1 + k) Psi (N - 1) / N.
    - stage 3: two all-gathers for each micro-batch, one of the root group, and k reduce-scatters:
      3 k Psi (N - 1) / N without a root group.
    - ``hpz=P``: the second all-gather is over P ranks, and never quantised.
    - ``replicate=K``: N is that of one group, and at the end of the step the K groups all-reduce their shards,
      2 (Psi / N) (K - 1) / K.

    Raises:
        ConfigError: the ranks cannot be divided as ``parallel`` says, or the precision is unknown.
    """
    shard = parallel.shard_size(ranks)
    width = {name: BYTES[kind] for name, kind in dtypes(parallel, mixed_precision, ranks).items()}
    if ranks == 1:
        return Traffic()
    reduced = size.trainable * width["gradients on the wire"]
    if not parallel.shards:
        return Traffic(all_reduce=math.ceil(2 * _ring(ranks) * reduced))
    gathered = _ring(shard) * size.parameters * width["weights on the wire"]
    if parallel.zero == 3:
        wire = "gathered weights" if parallel.hpz else "weights on the wire"
        again = _ring(parallel.hpz or shard) * (size.parameters - size.root) * width[wire]
        gathered = micro_batches * (gathered + again)
    reduces = 1 if parallel.zero == 1 else micro_batches
    averaged = Fraction(size.trainable, shard) * width["gradient reduction"]
    return Traffic(
        all_gather=math.ceil(gathered),
        reduce_scatter=math.ceil(reduces * _ring(shard) * reduced),
        all_reduce=math.ceil(2 * _ring(ranks // shard) * averaged),
    )


@dataclass(frozen=True)
class AveragingTime:
    """Seconds that ``nbytes`` of gradients on each of ``ranks`` take to become their mean everywhere.

    ``ring``: an all-reduce, in which every rank sends and receives at once. ``parameter_server``: one more process, to
    which all send theirs, and from which they get the mean: its link carries all of it twice. Not counted are latency
    and the time of adding up. References: Patarasuk & Yuan, Bandwidth Optimal All-reduce Algorithms, JPDC 2009;
    Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014.
    """

    ranks: int
    nbytes: int
    ring: float
    parameter_server: float


def averaging_time(nbytes: int, ranks: int, bandwidth: float) -> AveragingTime:
    """Compute how long gradients take to be averaged; ``bandwidth``: bytes a second of a link, in each direction."""
    if ranks == 1:
        return AveragingTime(ranks, nbytes, 0.0, 0.0)
    once = nbytes / bandwidth
    return AveragingTime(ranks, nbytes, float(2 * _ring(ranks)) * once, 2 * ranks * once)


def _ring(ranks: int) -> Fraction:
    """Return the share of a tensor that each of ``ranks`` ranks sends to gather or to scatter it."""
    return Fraction(ranks - 1, ranks)
