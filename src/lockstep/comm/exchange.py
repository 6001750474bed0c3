"""What comes before each collective of the library: the ranks tell each other what they are about to call.

One all-gather of two integers does it. Ranks that differ all raise; none of them enters a collective that cannot end.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from lockstep.comm.agreement import CollectiveCall, check_same
from lockstep.errors import (
    CheckpointError,
    CollectiveMismatchError,
    ConfigError,
    LockstepError,
    NoCheckpointError,
    UsageError,
)
from lockstep.runtime import failure
from lockstep.runtime.process import Runtime
from lockstep.user_call import user_call

Exchanged = TypeVar("Exchanged")
# torch 2.13 renamed them and warns of the old names; 2.11 has only the old ones.
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

AGREE, BARRIER = map(CollectiveCall, ("agree", "barrier"))
GATHER_ALIKE = CollectiveCall("gather_alike")

# A rank that was heard to end may have begun anew in the same process.
CONFIRMED_AFTER_S = 0.3

CAUGHT = {kind.__name__: kind for kind in (CheckpointError, NoCheckpointError, ConfigError, UsageError)}


class CallExchange:
    """The part of a ``Communicator`` in which all ranks come to know of every rank's call, and of its errors."""

    def __init__(self, runtime: Runtime, group: dist.ProcessGroup | None = None) -> None:
        self.runtime = runtime
        self._group = group
        self.world_size = runtime.world_size
        pairs = (runtime.backend or "").split(",")
        self._control_device = runtime.control_device
        # "cpu:gloo,cuda:nccl" names the devices whose tensors the group takes; "gloo" takes cpu.
        self._devices = {pair.split(":")[0] for pair in pairs if ":" in pair} or {self._control_device.type}

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            self._exchange_calls(BARRIER)

    def error_barrier(self, error: Exception | None = None) -> None:
        """Fail together: where any rank passes an exception, every rank raises.

        Raises:
            Exception: the rank's own ``error``.
            LockstepError: this rank passed None but another one failed; names it and its message, and is of the
                other's class if that is one of ``CAUGHT``.
        """
        if self.world_size > 1:
            self._exchange_calls(AGREE, error)
        elif error is not None:
            raise error

    def _exchange_calls(
        self,
        call: CollectiveCall,
        error: Exception | None = None,
        free_dim: int | None = None,
        any_shape: bool = False,
        content: int = 0,
        numbers: list[int] | None = None,
    ) -> list[CollectiveCall]:
        """Wait for all ranks and return their calls, once it is clear that they belong together.

        ``numbers`` is filled with 62 bits of every rank's ``content``.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return [call]
        # The last bit tells of an error, those above it are of the content.
        second = content >> 1 << 1 | (error is not None)
        mine = torch.tensor([call.digest, second], device=self._control_device)
        # [digest, number] of each rank, one behind the other
        all_ranks = mine.new_empty(2 * self.world_size)
        if failure.departures():
            self._check_departures(CONFIRMED_AFTER_S)
        try:
            all_gather_into_tensor(all_ranks, mine, group=self._group)
        except RuntimeError as lost:
            if failure.is_consequence(lost):
                # The end of a rank's connection is seen sooner than its departure is heard of.
                failure.departures().ranks(failure.DEPARTURE_WAIT_S)
                self._check_departures()
            raise
        digests, seconds = all_ranks[0::2].tolist(), all_ranks[1::2].tolist()
        failed = [number & 1 for number in seconds]
        if numbers is not None:
            numbers[:] = [number >> 1 for number in seconds]
        calls = [call] * self.world_size
        # All ranks have the same digests here, so that all of them enter the second exchange, or none.
        if len(set(digests)) > 1:
            calls = self._exchange(replace(call, user=user_call()))
            check_same(calls, free_dim, any_shape)
        if any(failed):
            messages = self._exchange((type(error).__name__, str(error)))
            if error is not None:
                raise error
            rank = failed.index(1)
            where = "" if call in (AGREE, GATHER_ALIKE) else f" in {call.operation}"
            name, message = messages[rank]
            consequence = CAUGHT.get(name, LockstepError)(
                f"Rank {rank} failed{where} with {name}: {message} This rank stops with it. Mend the cause on that "
                "rank."
            )
            consequence.caused_by_rank = rank
            raise consequence
        return calls

    def _check_departures(self, confirmed_after_s: float = 0.0) -> None:
        """Raise where a rank of the group has ended: it will never come to this collective."""
        time.sleep(confirmed_after_s)
        members = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        gone = [rank for rank in failure.departures().ranks() if rank in members]
        if gone:
            raise CollectiveMismatchError(failure.ended_without(gone, user_call())) from None

    def _exchange(self, value: Exchanged) -> list[Exchanged]:
        values = [value] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values
