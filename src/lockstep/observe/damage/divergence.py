"""Whether ranks that must hold the same parameters do, bit for bit.

What each rank holds is told by what it is a shard of (``ParameterShard``); ranks that hold the same shard compare 64
bits of it. Its bytes are read as 64-bit words w[r, c] in rows of ``COLUMNS``. The digest is the sum of
a[r] b[c] w[r, c] modulo 2^64, with fixed odd a and b: odd numbers can be divided by, so one changed word always
changes it. Two words that change places do so unless (a[r] b[c] - a[s] b[d]) times their difference is a multiple of
2^64, which of random factors one in about 2^32 is. It is no cryptographic hash: it finds accidents, not forgeries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import local, regions_of
from lockstep.errors import DamageError
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.torch_internals import fsdp2


class ParameterShard(NamedTuple):
    """Part of a parameter. Ranks that hold the same shard must hold the same bits.

    ``regions``: (offsets, shape) of what the part consists of within the whole parameter.
    """

    model: int
    name: str
    dtype: str
    regions: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def parameter_shards(models: Sequence[ParallelModel]) -> dict[ParameterShard, torch.Tensor]:
    """Return the parameters that this rank holds from step to step, without empty ones."""
    found = {}
    for number, model in enumerate(models):
        for name, parameter in local_parameters(model):
            if local(parameter).numel():
                regions = tuple((region.offsets, region.shape) for region in regions_of(parameter))
                found[ParameterShard(number, name, str(parameter.dtype), regions)] = parameter
    return found


def local_parameters(model: ParallelModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, parameter or shard) of each, also where a gathered parameter stands in the model now."""
    named = list(model.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    shards = {name: shard for sharding in model.shardings for name, shard in sharding.shards(names)}
    yield from shards.items()
    yield from ((name, parameter) for name, parameter in named if name not in shards)


def autograd_leaves(model: ParallelModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of what autograd computes gradients of: parameters, gathered ones where they are sharded."""
    named = list(model.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    sharded: set[str] = set()
    for sharding in model.shardings:
        for group in sharding.parameter_groups():
            for record in fsdp2.params(group):
                gathered = fsdp2.unsharded_param(record)
                name = next((names[id(form)] for form in fsdp2.forms(record) if id(form) in names), None)
                if name is not None:
                    sharded.add(name)
                    if gathered is not None and gathered.requires_grad:
                        yield name, gathered
    yield from ((name, p) for name, p in named if name not in sharded and p.requires_grad)


COLUMNS = 4096
CHUNK_ROWS = 256
"""Rows that are multiplied at a time: 8 MiB of words."""

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Digester:
    """Digests of tensors; keeps the factors on each device that it met."""

    def __init__(self) -> None:
        self._columns: dict[torch.device, torch.Tensor] = {}
        self._rows: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def digest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute a digest, 0-d int64 on the tensor's device; equal for equal bits in equal order, whatever their
        strides."""
        words = _as_words(tensor)
        full = words.numel() // COLUMNS
        columns, rows = self._factors(words.device, full + 1)
        rest = words[full * COLUMNS :]
        # The last row is not full.
        total = (rest * columns[: rest.numel()]).sum() * rows[full]
        if full:
            matrix = words[: full * COLUMNS].view(full, COLUMNS)
            for start in range(0, full, CHUNK_ROWS):
                chunk = matrix[start : start + CHUNK_ROWS]
                # sum over c of b[c] (sum over r of a[r] w[r, c]): so b is multiplied once for many rows.
                of_columns = (chunk * rows[start : start + len(chunk), None]).sum(0)
                total = total + (of_columns * columns).sum()
        return total

    def _factors(self, device: torch.device, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._columns:
            self._columns[device] = factors(COLUMNS, 1, device)
        known = self._rows.get(device)
        if known is None or known.numel() < rows:
            self._rows[device] = known = factors(max(rows, 1024), 2, device)
        return self._columns[device], known


def factors(count: int, series: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` odd numbers (int64) that look random: the i-th is the same on every device, for every count.

    Reference: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014 (SplitMix64).
    """
    # As int64 has these bits: sums and products of it wrap modulo 2^64.
    add, first, second = (value - 2**64 if value >= 2**63 else value for value in _MIX)
    # Two series begin 2^32 apart, so that factors of rows and of columns are other numbers.
    x = (torch.arange(count, dtype=torch.int64, device=device) + (series << 32)) * add
    x = (x ^ _shift(x, 30)) * first
    x = (x ^ _shift(x, 27)) * second
    return (x ^ _shift(x, 31)) | 1


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right, with zeros: that of int64 repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as 64-bit words, the last filled up with zeros; a view if possible."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    # Words must begin at a multiple of eight bytes.
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    if whole == data.numel():
        return words
    last = data.new_zeros(8)
    last[: data.numel() - whole] = data[whole:]
    if not whole:
        return last.view(torch.int64)
    return torch.cat((words, last.view(torch.int64)))


@dataclass(frozen=True)
class ReplicaDifference:
    """A shard that is not the same on all ranks that hold it.

    ``right``: the ranks of the majority; none if there is none. ``odd``: the others.
    """

    shard: ParameterShard
    right: tuple[int, ...]
    odd: tuple[int, ...]


class Shared:
    """Which shards are on several ranks, and in what order their digests arrive."""

    def __init__(self, shards_of_ranks: Sequence[Sequence[ParameterShard]], rank: int) -> None:
        """Take the shards of each rank, in the rank's order."""
        counts = Counter(shard for of_rank in shards_of_ranks for shard in of_rank)
        shared = [[shard for shard in of_rank if counts[shard] > 1] for of_rank in shards_of_ranks]
        self.mine = shared[rank]
        # All digests in one row, rank after rank; each has to be that of the shard's first holder.
        self._places: dict[ParameterShard, list[tuple[int, int]]] = {}
        first: list[int] = []
        for other, of_rank in enumerate(shared):
            for shard in of_rank:
                places = self._places.setdefault(shard, [])
                places.append((other, len(first)))
                first.append(places[0][1])
        self.first = torch.tensor(first, dtype=torch.int64)

    def differences(self, digests: Sequence[int]) -> list[ReplicaDifference]:
        """Return all shards of which the holders have several digests."""
        found = []
        for shard, places in self._places.items():
            of_ranks = {rank: digests[place] for rank, place in places}
            (common, count), *others = Counter(of_ranks.values()).most_common()
            if not others:
                continue
            right = [rank for rank, digest in of_ranks.items() if digest == common]
            is_majority = 2 * count > len(of_ranks)
            odd = [rank for rank in of_ranks if not is_majority or rank not in right]
            found.append(ReplicaDifference(shard, tuple(right) if is_majority else (), tuple(odd)))
        return found


class Divergence:
    """Compares the parameters of replicas."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._digester = Digester()
        self._known: list[ParameterShard] | None = None
        self._shared: Shared | None = None
        self._equal_at: int | None = None

    def check(self, step: int, models: Sequence[ParallelModel]) -> None:
        """Compare the replicas. Collective: one all-gather of 8 bytes for each shard that is on several ranks.

        Raises:
            DamageError: on all ranks: a parameter differs.
        """
        here = parameter_shards(models)
        shared = self._shared_shards(list(here))
        if not len(shared.first):
            return
        device = self._communicator.runtime.device
        own = [self._digester.digest(local(here[shard])).to(device) for shard in shared.mine]
        mine = torch.stack(own) if own else torch.empty(0, dtype=torch.int64, device=device)
        everywhere = self._communicator.gather(mine)
        if bool((everywhere == everywhere[shared.first.to(device)]).all()):
            self._equal_at = step
            return
        raise DamageError(self._explain(shared.differences(everywhere.tolist()), step))

    def _shared_shards(self, here: list[ParameterShard]) -> Shared:
        if self._shared is None or here != self._known:
            # Models that are prepared later change this on all ranks alike, so that all come here.
            shards_of_ranks = self._communicator.gather_object([here])
            self._known, self._shared = here, Shared(shards_of_ranks, self._communicator.runtime.rank)
        return self._shared

    def _explain(self, found: list[ReplicaDifference], step: int) -> str:
        one, *more = found
        name = one.shard.name if one.shard.model == 0 else f"{one.shard.name} (model {one.shard.model})"
        if one.right:
            which = f"{ranks_are(one.odd)} from {ranks_are(one.right)}"
        else:
            which = f"{ranks_are(one.odd)} from each other, so no majority shows which value is right"
        since = "" if self._equal_at is None else f"; after step {self._equal_at} it was the same"
        others = f", and {len(more)} other parameters do" if len(more) > 1 else ""
        others = f", and so does '{more[0].shard.name}'" if len(more) == 1 else others
        return (
            f"Parameter '{name}' differs at step {step}: {which}{others}{since}. Load the last checkpoint, and check "
            "the memory of that machine and any code that changes parameters on some ranks only."
        )


def ranks_are(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
