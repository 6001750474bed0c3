"""What is known of the two runs beside their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class RankFacts:
    """Where a rank of the candidate stands.

    Attributes:
        data_rank: Whose batches it has; ranks that compute one batch together have the same.
        coordinates: Its index along each axis of the mesh: {"tp": 1}.
    """

    rank: int
    data_rank: int
    coordinates: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFacts:
    """How the reference and the candidate were run.

    Attributes:
        reference: Its strategy in words; "": one process.
        candidate: Likewise: "zero=3 tp=2".
        nproc: Ranks of the candidate.
        data_ranks: How many of them have batches of their own.
        accumulation_steps: Micro-batches of a step, on each rank.
        ranks: One entry a rank; a missing one is taken for a data rank of its own number.
        dtype: The candidate computes in: "fp32", "bf16" or "fp16".
        steps_asked: Optimizer steps that were asked for.
        steps_compared: Those that both runs made.
        notes: Sentences for the end of the report: "Dropout was off in both runs."
    """

    reference: str = ""
    candidate: str = ""
    nproc: int = 1
    data_ranks: int = 1
    accumulation_steps: int = 1
    ranks: tuple[RankFacts, ...] = ()
    dtype: str = "fp32"
    steps_asked: int = 0
    steps_compared: int = 0
    notes: tuple[str, ...] = ()

    @cached_property
    def _by_rank(self) -> dict[int, RankFacts]:
        return {one.rank: one for one in self.ranks}

    def data_rank(self, rank: int) -> int:
        """Whose batches a rank has."""
        return self._by_rank[rank].data_rank if rank in self._by_rank else rank % max(self.data_ranks, 1)

    @cached_property
    def axes(self) -> dict[str, int]:
        """The size of each axis of the mesh along which ranks compute one batch together: {"tp": 2}."""
        of_batch: dict[tuple[str, int], set[int]] = {}
        for one in self.ranks:
            for axis, index in one.coordinates.items():
                of_batch.setdefault((axis, one.data_rank), set()).add(index)
        # An axis of data has one index within a data rank: it has size 1 here, and drops out.
        sizes: dict[str, int] = {}
        for (axis, _), indices in of_batch.items():
            sizes[axis] = max(sizes.get(axis, 1), len(indices))
        return {axis: size for axis, size in sizes.items() if size > 1}

    def to_json(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)
