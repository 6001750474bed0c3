"""Whose state of those that saved a rank goes on with, where ranks have states of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from lockstep.checkpoint.contents import DataCoordinates
from lockstep.checkpoint.reader import Checkpoint
from lockstep.errors import CheckpointError


class Sources:
    """The ranks that saved, seen from one that loads.

    A rank goes on with its own state if as many ranks had the same batches; else with that of the first rank that had
    its batches; where batches are dealt otherwise now, with that of the first rank.

    ``place`` is that of this rank, None where each rank has batches and gradients of its own.

    Raises:
        CheckpointError: the checkpoint tells of places that no ranks can have.
    """

    def __init__(
        self, checkpoint: Checkpoint, rank: int, world_size: int, place: DataCoordinates | None
    ) -> None:
        self._checkpoint = checkpoint
        self._saved = checkpoint.manifest.saved.world_size
        self._heads = {other: _head(checkpoint.of_rank(other)) for other in checkpoint.ranks}
        self._places = self._saved_places()
        here = place or DataCoordinates(rank, world_size, rank, world_size)
        there = self._places.get(rank if rank in self._places else checkpoint.ranks[0])
        assert there is not None
        as_many = self._saved == world_size
        same_data = there.data_size == here.data_size
        self.same_places = as_many and (rank not in self._places or there == here)
        """Whether as many ranks with the same batches and gradients saved it."""
        self.same_world = as_many and same_data
        """Whether as many ranks saved it, of which as many had batches of their own."""
        self.gradient_rank = here.gradient_rank
        if self.same_world and rank in self._places:
            self.rank = rank
        elif same_data and not as_many:
            with_same = (other for other, its in self._places.items() if its.data_rank == here.data_rank)
            self.rank = next(with_same, checkpoint.ranks[0])
        else:
            self.rank = checkpoint.ranks[0]

    def documents(self) -> list[dict[str, object]]:
        """What each rank that saved alone had, as far as it matters to the others."""
        first = self._heads[self._checkpoint.ranks[0]]
        return [self._heads.get(other, first) for other in self._told()]

    def gradient_ranks(self) -> list[int]:
        """For each rank that saved, whose gradients it had: ranks with other blocks or parts of them had the same."""
        return [
            self._places[other].gradient_rank if other in self._places else other for other in self._told()
        ]

    @property
    def is_part(self) -> bool:
        """Whether it lacks ranks that saved: machines that share no file system have their own only."""
        return len(self._heads) < self._saved

    def _told(self) -> Iterable[int]:
        """The ranks that are looked at: all of this world, or of another those whose state is there."""
        return range(self._saved) if self.same_places else self._checkpoint.ranks

    def _saved_places(self) -> dict[int, DataCoordinates]:
        first, *others = self._checkpoint.ranks
        place = _read(self._heads[first], self._checkpoint.root)
        if place is None:
            return {rank: DataCoordinates(rank, self._saved, rank, self._saved) for rank in (first, *others)}
        places = {first: place}
        for rank in others:
            found = _read(self._heads[rank], self._checkpoint.root)
            if found is None or (found.data_size, found.gradient_size) != (
                place.data_size,
                place.gradient_size,
            ):
                raise CheckpointError(
                    f"{self._checkpoint.root} tells of other places of ranks {first} and {rank} than one run can have. "
                    "Load another checkpoint."
                )
            places[rank] = found
        return places


def _head(document: Mapping[str, object]) -> dict[str, object]:
    """What other ranks look at: its place, and its open window."""
    return {
        key: value
        for key, value in document.items()
        if key in ("place", "parts") or key.startswith("window.")
    }


def _read(document: Mapping[str, Any], what: str) -> DataCoordinates | None:
    found = document.get("place")
    if found is None:
        return None
    names = [one.name for one in fields(DataCoordinates)]
    fits = isinstance(found, dict) and sorted(found) == sorted(names)
    if fits and all(type(number) is int and 0 <= number < 2**17 for number in found.values()):
        place = DataCoordinates(**found)
        if place.data_rank < place.data_size and place.gradient_rank < place.gradient_size:
            return place
    raise CheckpointError(f"{what} has {str(found)[:80]} as a rank's place. Load another checkpoint.")
