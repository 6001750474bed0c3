"""Bytes that autograd keeps for backward, counted in a forward without values (fake tensors).

A model of token ids only: its ``forward`` takes ``input_ids``, as those of transformers do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.errors import UsageError
from lockstep.model.contents import copy_of
from lockstep.plan.estimate_build import last_line
from lockstep.plan.estimate_model import Activations

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from lockstep.torch_internals.fake import FakeTensorMode

# name -> type of the computation, and of the weights that the model sees
PRECISIONS = {
    "no": ("float32", "float32"),
    "bf16": ("bfloat16", "float32"),
    "bf16 gathered": ("bfloat16", "bfloat16"),
    "fp16": ("float16", "float32"),
    "fp16 gathered": ("float16", "float16"),
}


def count_activations(
    model: nn.Module, blocks: Mapping[str, nn.Module], batch: int, sequence: int
) -> dict[str, Activations]:
    """Count activations for ``batch`` rows of ``sequence`` tokens, by the precisions that work, with the model's loss
    if it has one.

    Raises:
        UsageError: the model takes no ``input_ids``, or its forward fails.
    """
    names = inspect.signature(type(model).forward).parameters
    if "input_ids" not in names:
        raise UsageError(
            f"{type(model).__name__}.forward takes no input_ids, so its activations cannot be counted. Drop "
            "--batch and --sequence."
        )
    counted: dict[str, Activations] = {}
    failure: Exception | None = None
    for precision, (dtype, weights) in PRECISIONS.items():
        try:
            counted[precision] = _count_activations(model, blocks, (batch, sequence), dtype, weights, names)
        except Exception as error:
            # Some models have kernels for one type only.
            failure = error
    if failure is not None and not counted:
        raise UsageError(
            f"A forward of {type(model).__name__} with {batch} rows of {sequence} tokens failed: "
            f"{last_line(failure)} Give other sizes, or drop --batch and --sequence."
        ) from failure
    return counted


def _count_activations(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    size: tuple[int, int],
    dtype: str,
    weights: str,
    names: Mapping[str, object],
) -> Activations:
    import torch

    from lockstep.torch_internals.fake import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = _faked(model, mode, getattr(torch, weights))
        inside = {name: fake.get_submodule(name) for name in blocks}
        counter = _Counter(fake, inside)
        ids = torch.zeros(size, dtype=torch.long)
        given: dict[str, object] = {
            name: ids for name in ("input_ids", "labels", "decoder_input_ids") if name in names
        }
        # Training has no cache of keys and values.
        given |= {"use_cache": False} if "use_cache" in names else {}
        half = torch.autocast(
            "cpu", None if dtype == "float32" else getattr(torch, dtype), enabled=dtype != "float32"
        )
        with half, counter.counting():
            fake(**given)
        kept = sum(counter.bytes_inside.values())
        outside = counter.bytes_kept - kept
        largest = max(counter.bytes_inside.values(), default=0)
        inputs = sum(counter.input_bytes.values())
        most = max(counter.input_bytes.values(), default=0)
        # Autocast has them until its end.
        copies = 0 if dtype == weights else _bytes_in_blocks(inside.values(), dtype)
    # Recomputed, a block keeps its own beside the inputs of all blocks; ``offload`` leaves one of these.
    return Activations(
        *size,
        none=outside + kept,
        full=outside + inputs + largest + copies,
        offload=outside + most + largest + copies,
        inputs=inputs,
    )


def _bytes_in_blocks(blocks: Iterable[nn.Module], dtype: str) -> int:
    import torch

    parameters = {id(parameter): parameter for block in blocks for parameter in block.parameters()}
    return sum(parameter.numel() for parameter in parameters.values()) * getattr(torch, dtype).itemsize


def _faked(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the model in training mode whose tensors have no values but say that they are a
    CPU's, with its parameters in ``dtype``."""
    import torch

    with mode:
        # deepcopy takes what its memo has: modules are copied, tensors are replaced.
        memo: dict[int, object] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            kind = (
                dtype
                if tensor.is_floating_point() and isinstance(tensor, torch.nn.Parameter)
                else tensor.dtype
            )
            fake = torch.empty(tensor.shape, dtype=kind, device="cpu")
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = fake
        return copy_of(model, memo).train()


class _Counter:
    """Storages that autograd keeps in a forward, each once and without the model's own; those of blocks apart."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._own = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._blocks = blocks
        self._current: str | None = None
        self.bytes_inside = dict.fromkeys(blocks, 0)
        self.input_bytes = dict.fromkeys(blocks, 0)

    @property
    def bytes_kept(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        import torch

        handles = []
        for name, block in self._blocks.items():
            handles.append(block.register_forward_pre_hook(self._enters(name), with_kwargs=True))
            handles.append(block.register_forward_hook(lambda *_: setattr(self, "_current", None)))
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield

    def _enters(self, name: str) -> Callable[[nn.Module, object, object], None]:
        import torch

        from lockstep.torch_internals.fake import tree_leaves

        def enter(module: nn.Module, args: object, kwargs: object) -> None:
            self._current = name
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.input_bytes[name] = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)

        return enter

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _key(tensor)
        if key not in self._own and key not in self._kept:
            storage = tensor.untyped_storage()
            # It is kept, so that no other gets its key.
            self._kept[key] = storage
            if self._current is not None:
                self.bytes_inside[self._current] += storage.nbytes()
        return tensor


def _key(tensor: torch.Tensor) -> int:
    from lockstep.torch_internals.tensors import storage_key

    return storage_key(tensor)
