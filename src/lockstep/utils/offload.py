"""Names that scripts import from ``accelerate.utils.offload``: weights in a folder, one by one or as a mapping."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TypeVar

import torch

from lockstep.config.files import JsonObject
from lockstep.errors import ConfigError
from lockstep.offload.dispatch.storage import offload_state_dict
from lockstep.offload.files.offload_folder import INDEX, index_of, regions_of
from lockstep.offload.files.stored import FileRegion, MappedFiles, as_bytes, read

T = TypeVar("T")

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
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
        from lockstep.utils import load_offloaded_weight, offload_weight, save_offload_index

        os.makedirs("raw_weights", exist_ok=True)
        index = offload_weight(torch.arange(4.0), "weight", "raw_weights", index={})
        save_offload_index(index, "raw_weights")
        assert load_offloaded_weight("raw_weights/weight.dat", index["weight"]).tolist() == [0, 1, 2, 3]
        ```
    """
    data = weight.detach().to("cpu").contiguous()
    if index is not None:
        index[weight_name] = {"dtype": str(data.dtype).removeprefix("torch."), "shape": list(data.shape)}
    Path(offload_folder, f"{weight_name}.dat").write_bytes(as_bytes(data).numpy().tobytes())
    return index


def load_offloaded_weight(weight_file: Folder, weight_info: JsonObject) -> torch.Tensor:
    """Return the tensor that ``offload_weight`` wrote. It is mapped: its bytes are read when they are used.

    Args:
        weight_file: The path of the file.
        weight_info: Its entry of the index: ``{"dtype": "float32", "shape": [4, 8]}``.

    Examples:
        ```python
        import os
        import torch
        from lockstep.utils import load_offloaded_weight, offload_weight

        os.makedirs("mapped_weights", exist_ok=True)
        index = offload_weight(torch.ones(2, 3), "weight", "mapped_weights", index={})
        assert load_offloaded_weight("mapped_weights/weight.dat", index["weight"]).shape == (2, 3)
        ```
    """
    dtype = getattr(torch, str(weight_info["dtype"]))
    region = FileRegion(os.fspath(weight_file), 0, dtype, torch.Size(weight_info["shape"]))
    return read_region(region, MappedFiles())


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


class PrefixedDataset(Mapping[str, T]):
    """A view of a mapping: the entries whose names begin with a prefix, under their names without it.

    Args:
        dataset: Name -> value.
        prefix: The prefix, such as ``"encoder."``.

    Examples:
        ```python
        import torch
        from lockstep.utils import PrefixedDataset

        encoder = PrefixedDataset({"encoder.weight": torch.ones(2), "decoder.weight": torch.zeros(2)}, "encoder.")
        assert list(encoder) == ["encoder.weight"] and encoder["weight"].sum() == 2
        ```
    """

    def __init__(self, dataset: Mapping[str, T], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> T:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self.dataset if name.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """A mapping name -> weight, from memory and from an offload folder. Weights of the folder are mapped when asked
    for.

    Args:
        state_dict: Name -> tensor of any shape. They come before those of the folder.
        save_folder: An offload folder. Its index is read unless ``index`` is given.
        index: Name -> entry of an offload folder's index.
        device: The device to which weights of the folder go. None: the CPU.

    Raises:
        ValueError: neither ``state_dict`` nor ``save_folder`` nor ``index`` is given.

    Examples:
        ```python
        import torch
        from lockstep.utils import OffloadedWeightsLoader, offload_state_dict

        offload_state_dict("kept_weights", {"weight": torch.ones(2)})
        weights = OffloadedWeightsLoader({"bias": torch.zeros(2)}, save_folder="kept_weights")
        assert sorted(weights) == ["bias", "weight"]
        assert weights["weight"].tolist() == [1, 1]
        ```
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, Mapping[str, object]] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigError(
                "There are no weights to load from. Pass a state_dict, a save_folder or an index."
            )
        self.state_dict = dict(state_dict or {})
        self.save_folder = save_folder
        self.index = dict(index if index is not None else index_of(os.fspath(save_folder or "")))
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self.device = device
        self._files = MappedFiles()

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        folder = None if self.save_folder is None else os.fspath(self.save_folder)
        tensor = read_region(regions_of({key: self.index[key]}, folder)[key], self._files)
        return tensor if self.device is None else tensor.to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict that belong to some modules.

    Args:
        state_dict: Name -> tensor of any shape.
        submodule_names: Names of modules.

    Examples:
        ```python
        import torch
        from lockstep.utils import extract_submodules_state_dict

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        assert sorted(extract_submodules_state_dict(model.state_dict(), ["1"])) == ["1.bias", "1.weight"]
        ```
    """
    names = list(submodule_names)
    return {
        key: value
        for key, value in state_dict.items()
        if any(key == name or key.startswith(f"{name}.") for name in names)
    }
