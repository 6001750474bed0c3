"""Methods of ``Accelerator`` for models and their weights: unwrapped, gathered, written for other libraries."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from lockstep.comm.collectives import raise_on_all_ranks
from lockstep.comm.dtensor import is_dtensor, whole
from lockstep.parallel.parallel_model import unwrap as unwrap_module
from lockstep.preparation.parts import AcceleratorParts


class WeightMethods(AcceleratorParts):
    """Methods that need the prepared models."""

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the model that was passed to ``prepare``, without wrappers such as DDP.

        Args:
            model: The prepared model.
            keep_fp32_wrapper: False: its forward no longer runs under autocast.
            keep_torch_compile: False: return the model that was compiled, and not the compiled one.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            plain = torch.nn.Linear(4, 1)
            model = accelerator.prepare(plain)
            assert accelerator.unwrap_model(model) is plain
            ```
        """
        self._preparation.finish_steps()
        return unwrap_module(model, keep_autocast=keep_fp32_wrapper, keep_compile=keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the ``state_dict`` of the whole model: name -> tensor of its whole shape. Call it on every rank.

        - Of a sharded model, the tensors are gathered into host memory, one after the other. All of them are copies,
          even those that are not sharded, such as scalars.
        - Of a pipeline, rank 0 gets the whole, and the other ranks get an empty mapping.
        - Of other models, the tensors share memory with the model, as those of ``model.state_dict()`` do.

        Args:
            model: The prepared model.
            unwrap: Use the names of the unwrapped model. False: use those that wrappers such as DDP give them.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator(parallel="zero=3")
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            weights = accelerator.get_state_dict(model)  # on every rank
            assert weights["weight"].shape == (1, 4)  # whole, though each rank has a shard
            ```
        """
        whole_model = self._preparation.models.whole_of(model)
        if whole_model is not None:
            from lockstep.checkpoint.weights.export import collect_stages

            plain = unwrap_module(model, keep_compile=False)
            return collect_stages(plain.state_dict(), self._communicator, whole_model)
        state = (unwrap_module(model, keep_compile=False) if unwrap else model).state_dict()
        gathered: dict[str, Any] = whole(state)
        if not any(map(is_dtensor, state.values())):
            return gathered
        copies: dict[int, object] = {}  # by what they are copies of, so that tied ones stay tied
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not is_dtensor(value):
                gathered[name] = copies.setdefault(id(value), gathered[name].clone())
        return gathered

    def save(self, obj: object, f: object, safe_serialization: bool = False) -> None:
        """Write an object to a file on rank 0, or with ``save_on_each_node`` on one process of each machine. It does
        not wait.

        Args:
            obj: Any object that can be pickled; with ``safe_serialization`` a mapping name -> tensor of any shape.
            f: The path of the file.
            safe_serialization: Write safetensors, which cannot run code when it is read. Otherwise ``torch.save``
                writes.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            accelerator.save({"mean": torch.zeros(4)}, "mean.pt")  # rank 0 writes
            accelerator.wait_for_everyone()
            assert torch.load("mean.pt")["mean"].shape == (4,)
            ```
        """
        from lockstep.checkpoint.weights.model import save

        save(obj, f, self._options.project.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of the unwrapped model to a folder, as safetensors. Call it on every rank; rank 0 writes.

        All ranks return when the files are complete.

        Args:
            model: The prepared model.
            save_directory: The folder. It is made if it does not exist.
            max_shard_size: Bytes, or a text such as ``"5GB"``. More weights are written as several files with an
                index.
            safe_serialization: False: ``torch.save`` writes ``pytorch_model.bin``, and a warning says that such a
                file can run code when it is read.

        Raises:
            CheckpointError: the files cannot be written. All ranks raise it.
            ConfigError: ``max_shard_size`` is not a size.
            UsageError: an entry of the state dict is not a tensor, or has no values; or with
                ``safe_serialization=False``, the folder has safetensors files of a model. All ranks raise it.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            accelerator.save_model(model, "export")  # export/model.safetensors
            ```
        """
        plain = unwrap_module(model, keep_compile=False)
        if not safe_serialization:
            self._save_pickled(plain, save_directory, max_shard_size)
            return
        # With pydantic, which a run may never need.
        from lockstep.checkpoint.weights.export import save_model, save_stages

        whole_model = self._preparation.models.whole_of(model)
        if whole_model is not None:
            save_stages(plain, whole_model, save_directory, max_shard_size, self._communicator)
        else:
            save_model(plain, save_directory, max_shard_size, self._communicator)

    def _save_pickled(
        self, model: nn.Module, directory: str | os.PathLike[str], max_shard_size: int | str
    ) -> None:
        from lockstep.checkpoint.weights import parse_size
        from lockstep.checkpoint.weights.export import check_folder, warn_of_pickles, write_pickled
        from lockstep.checkpoint.weights.folder import local_directory

        with raise_on_all_ranks(self._communicator):
            limit, folder = parse_size(max_shard_size), local_directory(directory)
            if self.is_main_process:
                check_folder(folder)
                warn_of_pickles()
        state = self.get_state_dict(model)
        with raise_on_all_ranks(self._communicator):
            if self.is_main_process:
                write_pickled(state, folder, limit)
