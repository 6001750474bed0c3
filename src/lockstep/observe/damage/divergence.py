"""Whether ranks that must hold the same parameters do, bit for bit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import local
from lockstep.comm.transfer import transfer
from lockstep.errors import DamageError
from lockstep.observe.damage.digest import Digester
from lockstep.observe.damage.pieces import ParameterShard, pieces
from lockstep.parallel.parallel_model import ParallelModel

logger = logging.getLogger("lockstep.damage")


@dataclass(frozen=True)
class ReplicaDifference:
    """A piece that is not the same on all ranks that hold it.

    ``right``: the ranks of the majority; none if there is none. ``odd``: the others.
    """

    piece: ParameterShard
    right: tuple[int, ...]
    odd: tuple[int, ...]


class Shared:
    """Which pieces are on several ranks, and in what order their digests arrive."""

    def __init__(self, held: Sequence[Sequence[ParameterShard]], rank: int) -> None:
        """``held``: of each rank its pieces, in its order."""
        counts = Counter(piece for of_rank in held for piece in of_rank)
        shared = [[piece for piece in of_rank if counts[piece] > 1] for of_rank in held]
        self.mine = shared[rank]
        # All digests in one row, rank after rank; each has to be that of the piece's first holder.
        self._places: dict[ParameterShard, list[tuple[int, int]]] = {}
        first: list[int] = []
        for other, of_rank in enumerate(shared):
            for piece in of_rank:
                places = self._places.setdefault(piece, [])
                places.append((other, len(first)))
                first.append(places[0][1])
        self.first = torch.tensor(first, dtype=torch.int64)

    def differences(self, digests: Sequence[int]) -> list[ReplicaDifference]:
        """All pieces of which the holders have several digests."""
        found = []
        for piece, places in self._places.items():
            of_ranks = {rank: digests[place] for rank, place in places}
            (common, count), *others = Counter(of_ranks.values()).most_common()
            if not others:
                continue
            right = [rank for rank, digest in of_ranks.items() if digest == common]
            is_majority = 2 * count > len(of_ranks)
            odd = [rank for rank in of_ranks if not is_majority or rank not in right]
            found.append(ReplicaDifference(piece, tuple(right) if is_majority else (), tuple(odd)))
        return found


class Divergence:
    """Compares the parameters of replicas. ``heal``: overwrite what a minority holds with what the majority does."""

    def __init__(self, communicator: Communicator, heal: bool) -> None:
        self._communicator = communicator
        self._heal = heal
        self._digester = Digester()
        self._known: list[ParameterShard] | None = None
        self._shared: Shared | None = None
        self._equal_at: int | None = None

    def check(self, step: int, models: Sequence[ParallelModel], optimizers: Iterable[Optimizer]) -> None:
        """Collective. One all-gather of 8 bytes for each piece that is on several ranks.

        Raises:
            DamageError: on all ranks: a parameter differs, and is not to be healed or has no majority.
        """
        here = pieces(models)
        shared = self._shared_pieces(list(here))
        if not len(shared.first):
            return
        device = self._communicator.runtime.device
        own = [self._digester.digest(local(here[piece])).to(device) for piece in shared.mine]
        mine = torch.stack(own) if own else torch.empty(0, dtype=torch.int64, device=device)
        everywhere = self._communicator.gather(mine)
        if bool((everywhere == everywhere[shared.first.to(device)]).all()):
            self._equal_at = step
            return
        found = shared.differences(everywhere.tolist())
        if not self._heal or any(not one.right for one in found):
            raise DamageError(self._explain(found, step))
        for one in found:
            self._overwrite(one, here.get(one.piece), optimizers)
        logger.warning("%s", self._explain(found, step, healed=True))
        self._equal_at = step

    def _shared_pieces(self, here: list[ParameterShard]) -> Shared:
        if self._shared is None or here != self._known:
            held = self._communicator.gather_object([here])
            self._known, self._shared = here, Shared(held, self._communicator.runtime.rank)
        return self._shared

    def _overwrite(
        self, one: ReplicaDifference, parameter: torch.Tensor | None, optimizers: Iterable[Optimizer]
    ) -> None:
        """The parameter and what the optimizers know of it, on the ranks of the minority."""
        if parameter is None:
            return
        tensors = [parameter, *_state_of(parameter, optimizers)]
        source = one.right[0]
        for target in one.odd:
            for tensor in tensors:
                part = local(tensor)
                sent = transfer(part.contiguous(), part, source, target, self._communicator)
                if sent is not None:
                    with torch.no_grad():
                        part.copy_(sent)

    def _explain(self, found: list[ReplicaDifference], step: int, healed: bool = False) -> str:
        one, *more = found
        name = one.piece.name if one.piece.model == 0 else f"{one.piece.name} (model {one.piece.model})"
        if one.right:
            which = f"{ranks_are(one.odd)} from {ranks_are(one.right)}"
        else:
            which = f"{ranks_are(one.odd)} from each other, so that no majority says which is right"
        since = "" if self._equal_at is None else f"; after step {self._equal_at} it was the same"
        others = f", and {len(more)} other parameters do" if len(more) > 1 else ""
        others = f", and so does '{more[0].piece.name}'" if len(more) == 1 else others
        said = f"Parameter '{name}' differs at step {step}: {which}{others}{since}."
        if healed:
            return f"{said} The ranks that differ got the values of the others; watch the memory of their machines."
        return (
            f"{said} Load the last checkpoint, and look at the memory of that machine and at code that changes "
            "parameters on some ranks alone."
        )


def ranks_are(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _state_of(parameter: torch.Tensor, optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Tensors that optimizers keep of this parameter, in the order of their names."""
    states: list[Mapping[str, object]] = [
        optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state
    ]
    return [
        value for state in states for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)
    ]
