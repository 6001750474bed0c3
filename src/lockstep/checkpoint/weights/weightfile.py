"""Write one safetensors file of tensors that are produced while it is written: no two of them need be in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from lockstep.checkpoint.format.digest import Chunk, record_of
from lockstep.checkpoint.format.tensorfile import TensorFile
from lockstep.checkpoint.store.local import LocalStore
from lockstep.errors import CheckpointError, LockstepError

Elements = Callable[[str], Iterable[Chunk]]
"""The elements of a tensor by its name, in order, as bytes. Asked for once, in the order of the files."""


def without_elements(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors without elements, which say dtype and shape."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()
    }


def check_room(directory: str, needed: int) -> None:
    """Raise CheckpointError unless this many bytes are free."""
    free = LocalStore().free_bytes(directory)
    if free is not None and free < needed:
        raise CheckpointError(
            f"{directory} needs {needed} bytes, but {free} are free there. Make room or save elsewhere; weights that "
            "were there before are untouched."
        )


def write_tensor_file(
    path: str, tensors: Mapping[str, torch.Tensor], elements: Elements, verified: bool = False
) -> None:
    """Write a safetensors file as a stream, on the disk when this returns; ``verified``: read it again.

    Raises:
        CheckpointError: it could not be written; names file and tensor.
    """
    store = LocalStore()
    current = ""

    def content() -> Iterable[Chunk]:
        nonlocal current
        yield TensorFile(dict(tensors)).header()
        for current, tensor in tensors.items():
            written = 0
            for chunk in elements(current):
                written += len(chunk)
                yield chunk
            if written != tensor.nbytes:
                raise CheckpointError(
                    f"{path}: {current} gave {written} bytes instead of {tensor.nbytes}. Don't change weights while "
                    "they are saved."
                )

    try:
        record = store.write(path, content())
        if verified and record_of(store.blocks(path)) != record:
            raise CheckpointError(
                f"{path} reads otherwise than it was written. Save to another disk; weights that were there before "
                "are untouched."
            )
    except LockstepError:
        raise
    except Exception as error:
        raise unwritten(path, error, current) from error


def unwritten(path: str, error: Exception, tensor: str = "") -> CheckpointError:
    """The error for a file of weights, and the tensor in it, that could not be written."""
    where = f" at tensor {tensor}" if tensor else ""
    return CheckpointError(
        f"{path} could not be written{where}: {error}. Make room there or mend its permissions, or save elsewhere; "
        "weights that were there before are untouched."
    )
