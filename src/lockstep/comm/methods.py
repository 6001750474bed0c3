"""What a script asks of the other ranks, as methods of ``Accelerator``: values, counts, a flag."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lockstep.comm.collectives import Communicator, Reduction
from lockstep.comm.counter import CommCounter
from lockstep.comm.tree import Tree, children, leaves, map_tensors, rebuild
from lockstep.config.options import Options
from lockstep.errors import UsageError
from lockstep.runtime.mesh import DeviceMeshes
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import StepState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def gather_for_metrics(
    communicator: Communicator, step: StepState, data: object, rank: int, use_gather_object: bool = False
) -> Any:
    """Gather ``data`` from all ranks, without the rows that only pad the current batch.

    The active loader knows how many of this rank's rows are samples; the others are cut off before
    anything is sent, so the result has exactly the global batch's samples, in rank order.

    Args:
        data: Nested tensors, or a list of any objects. Tensors and lists whose length is a multiple
            k of the batch's rows are taken as k entries a row; others are gathered whole. Tuples and
            mappings of lists and tensors come back as such. A vector as
            long as a full batch, while the last batch is shorter, is cut to that batch's samples: so
            scripts repeat a loss for ``batch_size`` samples.
        use_gather_object: Gather ``data`` as objects even though it holds tensors only.
    """
    if _has_lists(data):
        # Each part by itself: a list of texts has a row for each of the batch.
        parts = [
            gather_for_metrics(communicator, step, part, rank, use_gather_object)
            for _, part in children(data) or ()
        ]
        return rebuild(data, parts)
    rows, real = _own_rows(step, rank)
    full = getattr(step.active_dataloader, "batch_size", None) or rows
    if use_gather_object or not _all_tensors(data):
        if isinstance(data, torch.Tensor):
            data = _cut(data, rows, real, full)
        elif isinstance(data, (list, tuple)) and 0 < rows < full == len(data):
            data = data[:real]
        elif rows != real and isinstance(data, (list, tuple)):
            data = data[: _real_rows(len(data), rows, real)]
        gathered: object = communicator.gather_object(data)
        return gathered[: _samples(step, len(gathered))] if isinstance(gathered, list) else gathered
    if rows != real or 0 < rows < full:
        data = map_tensors(lambda tensor: _cut(tensor, rows, real, full), data)
    gathered = communicator.gather(data)
    if step.counts is None and step.end_of_data:
        gathered = map_tensors(lambda tensor: tensor[: _samples(step, len(tensor))], gathered)
    return gathered


def gather_for_loss(communicator: Communicator, step: StepState, tree: Tree, rank: int) -> Tree:
    """Gather [rows, ...] of all ranks with gradients, without the rows that only pad the current batch."""
    counts = step.counts
    if counts is None or counts.rows == counts.real:
        return communicator.gather_for_loss(tree)
    rows, real = counts.rows[rank], counts.real[rank]
    problem = None
    for path, leaf in leaves(tree).items():
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or len(leaf) != rows):
            problem = UsageError(
                f"gather_for_loss cannot tell which rows of {path or 'a tensor'} {list(leaf.shape)} only pad the "
                f"last batch, because this rank has {rows} rows of that batch. Pass tensors with one row for "
                "each row of the batch, or make the loader with drop_last=True."
            )
    # All ranks hear of it there, so that none of them waits for this one.
    return communicator.gather_for_loss(
        tree if problem else map_tensors(lambda tensor: tensor[:real], tree), problem
    )


def _samples(step: StepState, rows: int) -> int:
    """Return how many of the gathered rows are samples, where a loader that was not prepared knows only that."""
    return step.remainder if step.counts is None and step.end_of_data and step.remainder > 0 else rows


def sample_weights(step: StepState, rank: int, device: torch.device) -> torch.Tensor | None:
    """Return for each row of this rank's batch 1 for a sample and 0 for padding: float32 of shape (rows,).

    None outside of a prepared loader, or where it cannot count.
    """
    if step.counts is None:
        return None
    rows, real = _own_rows(step, rank)
    weights = torch.ones(rows, device=device)
    weights[real:] = 0
    return weights


def _own_rows(step: StepState, rank: int) -> tuple[int, int]:
    counts = step.counts
    return (counts.rows[rank], counts.real[rank]) if counts is not None else (0, 0)


def _cut(tensor: torch.Tensor, rows: int, real: int, full: int) -> torch.Tensor:
    if 0 < rows < full and tensor.shape == (full,):
        return tensor[:real]
    return tensor if tensor.dim() == 0 else tensor[: _real_rows(tensor.shape[0], rows, real)]


def _real_rows(length: int, rows: int, real: int) -> int:
    # k entries for each row: [k * rows] -> [k * real]
    return length // rows * real if rows and length % rows == 0 else length


def _has_lists(data: object) -> bool:
    """Return whether it is a tuple or mapping of containers and tensors, some of them lists of other objects than
    tensors."""
    parts = [part for _, part in children(data) or ()] if isinstance(data, (tuple, Mapping)) else []
    return all(isinstance(part, (list, tuple, Mapping, torch.Tensor)) for part in parts) and any(
        _has_lists(part) or (isinstance(part, list) and not _all_tensors(part)) for part in parts
    )


def _all_tensors(data: object) -> bool:
    """Return whether every leaf is a tensor, and there is one."""
    found = leaves(data).values()
    return len(found) > 0 and all(isinstance(leaf, torch.Tensor) for leaf in found)


class CollectiveMethods:
    """Methods that need the ranks of a run and what the step shares."""

    runtime: Runtime
    _options: Options
    _step: StepState
    flag_tensor: torch.Tensor | None = None

    @cached_property
    def meshes(self) -> DeviceMeshes:
        """The groups of ranks that share data, weights, gradients and the parts of one model."""
        return DeviceMeshes(self.runtime, self._options.parallel)

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The ``DeviceMesh`` of the ranks, or None.

        It is None if no ranks share the work on one batch (``tp``, ``pp``, ``cp``) and no ``ParallelismConfig`` was
        passed. Its axes are those of ``pp``, ``dp_replicate``, ``dp_shard``, ``cp`` and ``tp`` that have more than one
        rank, in this order. The mesh is made when it is first read, so all ranks must read it.
        """
        config = self._options.parallelism_config
        if config is not None and hasattr(config, "get_device_mesh"):
            return config.get_device_mesh(self.runtime.device.type)
        # Libraries take a mesh beside an FSDP plugin for that of a ParallelismConfig, and ask for it.
        return self.meshes.named_mesh if self.meshes.axes.splits_model else None

    @property
    def tensor_parallel_rank(self) -> int:
        """The index of this rank among the ranks that split layers (``tp``), or 0 if layers are not split."""
        return self.meshes.rank_on("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The index of this rank's stage of the pipeline (``pp``), or 0 if the depth is not split."""
        return self.meshes.rank_on("pp")

    @property
    def context_parallel_rank(self) -> int:
        """The index of this rank's chunk of the sequence (``cp``), or 0 if the sequence is not split."""
        return self.meshes.rank_on("cp")

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's copy of the model. Each copy may be sharded over several ranks."""
        return self.meshes.rank_on("replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The index of this rank among the ranks that shard one copy of the model."""
        return self.meshes.rank_on("shard")

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        """Count the time inside of the block as waiting for other ranks."""
        part = self._step.clock.enter("communication") if self.runtime.world_size > 1 else ""
        try:
            yield
        finally:
            if part:
                self._step.clock.enter(part)

    @cached_property
    def _communicator(self) -> Communicator:
        return Communicator(self.runtime)

    def gather(self, tensor: Tree) -> Tree:
        """Concatenate the tensors of all ranks along dim 0, in rank order, and return the result on every rank.

        Call it on every rank.

        Args:
            tensor: Tensors, alone or nested in lists, tuples and mappings. Tensors of shape [n_r, ...] on rank r
                become one of shape [sum of n_r, ...]. The n_r may differ. A 0-d tensor counts as one row.

        Raises:
            CollectiveMismatchError: dtypes or shapes differ between ranks, apart from n_r. All ranks raise it.
            TypeError: ``tensor`` has something that is not a tensor. All ranks raise it.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device))
            assert ranks.tolist() == list(range(accelerator.num_processes))
            ```
        """
        with self._communicating():
            gathered = self._communicator.gather(tensor)
        counts = self._step.counts
        rows = 0 if counts is None or counts.rows == counts.real else sum(counts.rows)
        if (
            rows
            and self.runtime.is_main
            and any(one.shape[:1] == (rows,) for one in leaves(gathered).values())
        ):
            warnings.warn(
                f"gather returned {rows} rows of the last batch, of which some only fill it up. Use "
                "gather_for_metrics, which leaves them out, unless the script does that itself.",
                stacklevel=2,
            )
        return gathered

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Gather a batch's results from all ranks, without the rows that only pad the last batch. Every sample is
        there once.

        Call it on every rank, in the loop over a prepared loader.

        Args:
            input_data: Nested tensors of shape [rows, ...]. With k entries for each row of the batch, they have the
                shape [k * rows, ...]. A list of other objects, alone or in a tuple or mapping with others, is gathered
                by pickling.
            use_gather_object: Gather tensors by pickling, too. They may then have different shapes on the ranks.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(10), batch_size=4))
            seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
            assert seen.tolist() == list(range(10))  # on any number of ranks
            ```
        """
        with self._communicating():
            return gather_for_metrics(
                self._data_communicator, self._step, input_data, self.meshes.data_rank, use_gather_object
            )

    @cached_property
    def _data_communicator(self) -> Communicator:
        """Over the ranks with batches of their own."""
        if not self.meshes.axes.splits_model:
            return self._communicator
        return Communicator(self.meshes.data_runtime, self.meshes.data_group)

    def reduce(self, tensor: Tree, reduction: Reduction = "sum", scale: float = 1.0) -> Tree:
        """Return the sum, mean or maximum of tensors over all ranks, on every rank. Call it on every rank.

        Args:
            tensor: Tensors of any shape, alone or nested. Shapes and dtypes are the same on all ranks.
            reduction: ``"sum"``, ``"mean"`` or ``"max"``. ``"none"`` returns ``tensor`` as it is.
            scale: A factor by which the result is multiplied.

        Raises:
            CollectiveMismatchError: shapes or dtypes differ between ranks. All ranks raise it.
            ValueError: another ``reduction``.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            count = accelerator.reduce(torch.ones(3, device=accelerator.device), "sum")
            assert count.tolist() == [accelerator.num_processes] * 3
            ```
        """
        with self._communicating():
            return self._communicator.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Tree, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Tree:
        """Pad tensors along one dimension to the length of the longest tensor on any rank. Call it on every rank.

        Args:
            tensor: Tensors of any shape, alone or nested. A tensor without the dimension ``dim`` stays as it is.
            dim: The dimension that is padded.
            pad_index: The value of the padding.
            pad_first: Pad at the beginning, and not at the end.

        Raises:
            CollectiveMismatchError: dtypes or nesting differ between ranks. All ranks raise it.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            rows = torch.ones(accelerator.process_index + 1, 2)  # more on later ranks
            padded = accelerator.pad_across_processes(rows, pad_index=-1)
            assert padded.shape == (accelerator.num_processes, 2)
            ```
        """
        with self._communicating():
            return self._communicator.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set a flag on this rank. ``check_trigger`` then returns True on every rank.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()
            if accelerator.is_last_process:  # say, it has seen a loss that is not finite
                accelerator.set_trigger()
            assert accelerator.check_trigger()  # every rank gets to know
            ```
        """
        self.flag_tensor = torch.tensor(1, device=self.runtime.control_device)

    def check_trigger(self) -> bool:
        """Return whether any rank has called ``set_trigger`` since the last check. It clears the flag. Call it on every
        rank.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator()
            assert not accelerator.check_trigger()
            accelerator.set_trigger()
            assert accelerator.check_trigger()
            assert not accelerator.check_trigger()  # the flag is down again
            ```
        """
        down = torch.tensor(0, device=self.runtime.control_device)
        with self._communicating():
            raised = self._communicator.reduce(down if self.flag_tensor is None else self.flag_tensor, "sum")
        self.flag_tensor = down
        return bool(raised.item())

    def sample_weights(self) -> torch.Tensor | None:
        """Weights for the rows of this rank's batch: 1 for a sample, 0 for a row that only pads the batch.

        They are float32 of shape [rows], on this rank's device. None: the loader cannot tell which rows are padding.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(10, 4), batch_size=4))
            samples = 0
            for batch in loader:  # two ranks get 3 rows that are padding
                samples += accelerator.reduce(accelerator.sample_weights().sum(), reduction="sum").item()
            assert samples == 10
            ```
        """
        return sample_weights(self._step, self.meshes.data_rank, self.runtime.device)

    def communication(self) -> AbstractContextManager[CommCounter]:
        """Count the collectives, and the bytes they send, inside of the block. See ``CommCounter``.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            with accelerator.communication() as counter:
                accelerator.reduce(torch.ones(1000), reduction="sum")
            # All-reduce sends 2 (N - 1) / N of the bytes.
            ranks = accelerator.num_processes
            assert counter.wire_bytes("all_reduce") == 2 * (ranks - 1) / ranks * 4000
            ```
        """
        return CommCounter()
