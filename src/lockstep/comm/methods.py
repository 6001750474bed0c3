"""What a script asks of the other ranks, as methods of ``Accelerator``: values, counts, a flag."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch

from lockstep.comm.collectives import Communicator, Reduction
from lockstep.comm.ledger import CommunicationLedger
from lockstep.comm.metrics import gather_for_metrics, sample_weights
from lockstep.runtime.mesh import Meshes
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import StepState


class CollectiveMethods:
    """Methods that need the ranks of a run and what the step shares."""

    runtime: Runtime
    meshes: Meshes
    _communicator: Communicator
    _step: StepState
    _trigger: bool = False

    def gather(self, tensor: Any) -> Any:
        """Nested tensors of all ranks, concatenated in rank order on dim 0 (0-d ones become 1-d)."""
        return self._communicator.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """``gather`` without the rows that pad the last batch: each sample exactly once."""
        return gather_for_metrics(
            self._data_communicator, self._step, input_data, self.meshes.data_rank, use_gather_object
        )

    @cached_property
    def _data_communicator(self) -> Communicator:
        """Over the ranks with batches of their own."""
        if not self.meshes.axes.splits_model:
            return self._communicator
        return Communicator(self.meshes.data_runtime, self.meshes.data_group)

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """Sum, mean or maximum over ranks of nested tensors, times ``scale``."""
        return self._communicator.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Nested tensors padded along ``dim`` to the longest of any rank."""
        return self._communicator.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise a flag on this rank that ``check_trigger`` shows to all."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any rank raised the flag since the last check; collective, and clears the flag."""
        flag = torch.tensor(int(self._trigger), device=self.runtime.control_device)
        raised = bool(self._communicator.reduce(flag, "sum").item())
        self._trigger = False
        return raised

    def sample_weights(self) -> torch.Tensor | None:
        """For each row of this rank's batch, 1 if it is a sample and 0 if it is padding.

        Float32 of shape (rows,) on this device. None where the loader cannot count.
        """
        return sample_weights(self._step, self.meshes.data_rank, self.runtime.device)

    def communication(self) -> AbstractContextManager[CommunicationLedger]:
        """Count the collectives and bytes of the block; see ``CommunicationLedger``."""
        return CommunicationLedger()
