"""A checkpoint taken apart, to be put together again with other contents and right digests."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from lockstep.checkpoint.format import canonical, digest_of

MODEL, STATE = "model-00000.safetensors", "state-00000.safetensors"


class Draft:
    """The documents of a checkpoint of one rank, as plain values, and its other files as bytes.

    ``raw`` replaces whole files; ``body`` is merged into the manifest, ``entries`` into its list of files; ``then``
    acts on the written folder.
    """

    def __init__(self, directory: Path) -> None:
        contents = {path.name: path.read_bytes() for path in directory.iterdir()}
        manifest = json.loads(contents.pop("manifest.json"))["manifest"]
        self.body: dict[str, Any] = {key: value for key, value in manifest.items() if key != "files"}
        self.index: dict[str, Any] = json.loads(contents.pop("tensors.json"))
        self.common: dict[str, Any] = json.loads(contents.pop("state.json"))
        self.own: dict[str, Any] = json.loads(contents.pop("rank-00000.json"))
        self.raw: dict[str, bytes] = contents
        self.entries: dict[str, Any] = {}
        self.manifest: bytes | None = None
        self.then: Callable[[Path], object] | None = None

    def copy(self) -> Draft:
        return copy.deepcopy(self)

    @property
    def optimizer(self) -> dict[str, Any]:
        """The value of the optimizer's state."""
        value: dict[str, Any] = self.common["optimizer.0"]["value"]
        return value

    @property
    def group(self) -> dict[str, Any]:
        """The optimizer's parameter group."""
        group: dict[str, Any] = self.optimizer["param_groups"][0]
        return group

    def tensors(self, file: str) -> dict[str, torch.Tensor]:
        return safetensors.torch.load(self.raw[file])

    def put(self, file: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.raw[file] = safetensors.torch.save(dict(tensors))

    def replace_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Another tensor under this name, in the index and in its file alike."""
        piece = self.index[name]["pieces"][0]
        self.put(piece["file"], {**self.tensors(piece["file"]), piece["key"]: tensor})
        kinds = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8"}
        self.index[name] |= {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape)}
        piece |= {"offsets": [0] * tensor.dim(), "shape": list(tensor.shape)}

    def header(self, file: str) -> tuple[dict[str, Any], bytes]:
        """The header of a safetensors file, and the bytes behind it."""
        content = self.raw[file]
        (size,) = struct.unpack("<Q", content[:8])
        return json.loads(content[8 : 8 + size]), content[8 + size :]

    def put_header(self, file: str, header: Any, data: bytes) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        self.raw[file] = struct.pack("<Q", len(text)) + text + data

    def write(self, directory: Path) -> None:
        """Put it together."""
        directory.mkdir(parents=True)
        documents = {"tensors.json": self.index, "state.json": self.common, "rank-00000.json": self.own}
        files = {**{name: as_json(document) for name, document in documents.items()}, **self.raw}
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        listed = {name: {"size": len(data), "blake3": digest_of(data)} for name, data in files.items()}
        entries = {name: entry for name, entry in (listed | self.entries).items() if entry is not None}
        body = {**self.body, "files": self.body.get("files", entries)}
        (directory / "manifest.json").write_bytes(self.manifest or sealed(body))
        if self.then is not None:
            self.then(directory)


def sealed(body: Any) -> bytes:
    """A manifest with the right digest."""
    return canonical({"blake3": digest_of(canonical(body)), "manifest": body})


def as_json(document: Any) -> bytes:
    """Also of what is no JSON: NaN."""
    return json.dumps(document).encode()


def nested(depth: int, inner: str = "0") -> Any:
    """A list in a list in a list, as JSON text."""
    return ("[" * depth + inner + "]" * depth).encode()
