"""Names that scripts import from ``accelerate.utils.offload``: weights in a folder, one by one or as a mapping."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch

from lockstep.offload.dispatch.storage import offload_state_dict
from lockstep.offload.files.offload_folder import INDEX, index_of
from lockstep.offload.files.stored import FileRegion, MappedFiles, as_bytes, read

__all__ = [
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]

Folder = str | os.PathLike[str]


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: Folder,
    index: MutableMapping[str, object] | None = None,
) -> MutableMapping[str, object] | None:
    """Write one tensor to ``<weight_name>.dat`` in a folder, as raw bytes, and return ``index``.

    Args:
        weight: A tensor of any shape.
        weight_name: The name of the file.
        offload_folder: The folder, which exists.
        index: An entry with dtype and shape is added to it. None: none is.

    Examples:
        ```python
        import os
        import torch
        from lockstep.utils import load_offloaded_weights, offload_weight, save_offload_index

        os.makedirs("raw_weights", exist_ok=True)
        index = offload_weight(torch.arange(4.0), "weight", "raw_weights", index={})
        save_offload_index(index, "raw_weights")
        model = torch.nn.LayerNorm(4)
        load_offloaded_weights(model, index, "raw_weights")
        assert model.weight.tolist() == [0, 1, 2, 3]
        ```
    """
    data = weight.detach().to("cpu").contiguous()
    if index is not None:
        index[weight_name] = {"dtype": str(data.dtype).removeprefix("torch."), "shape": list(data.shape)}
    Path(offload_folder, f"{weight_name}.dat").write_bytes(as_bytes(data).numpy().tobytes())
    return index


def read_region(region: FileRegion, files: MappedFiles) -> torch.Tensor:
    if not region.nbytes:
        return torch.empty(region.shape, dtype=region.dtype)
    mapped = region.mapped(files)
    return read(region, files, region.dtype) if mapped is None else mapped


def save_offload_index(index: Mapping[str, object] | None, offload_folder: Folder) -> None:
    """Add entries to the ``index.json`` of an offload folder.

    Args:
        index: Name -> entry, from ``offload_weight``. Empty or None: nothing happens.
        offload_folder: The folder.

    Examples:
        ```python
        import json
        import os
        import torch
        from lockstep.utils import offload_weight, save_offload_index

        os.makedirs("indexed_weights", exist_ok=True)
        save_offload_index(offload_weight(torch.ones(2, 3), "weight", "indexed_weights", index={}), "indexed_weights")
        with open("indexed_weights/index.json") as file:
            assert json.load(file) == {"weight": {"dtype": "float32", "shape": [2, 3]}}
        ```
    """
    if not index:
        return
    entries = {**index_of(os.fspath(offload_folder)), **index}
    Path(offload_folder, INDEX).write_text(json.dumps(entries, indent=2), encoding="utf-8")
