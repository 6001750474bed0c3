"""A reader of checkpoints that shares nothing with ours: json, blake3 and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import load_file


def document(directory: str | Path, name: str) -> Any:
    return json.loads((Path(directory) / name).read_bytes())


def manifest(directory: str | Path) -> dict[str, Any]:
    body: dict[str, Any] = document(directory, "manifest.json")["manifest"]
    return body


def assert_manifest_tells_the_truth(directory: str | Path) -> None:
    """Every file but the manifest is in it, with its size and BLAKE3, and nothing else is."""
    root = Path(directory)
    found = {
        path.relative_to(root).as_posix(): {
            "size": path.stat().st_size,
            "blake3": blake3(path.read_bytes()).hexdigest(),
        }
        for path in root.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert manifest(root)["files"] == found


def tensors(directory: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of the index, put together from its pieces; each element must be in exactly one of them.

    Files must hold these pieces and no others.
    """
    root = Path(directory)
    files = {path.name: load_file(path) for path in root.glob("*.safetensors")}
    index = document(root, "tensors.json")
    found = {}
    used: set[tuple[str, str]] = set()
    for name, entry in index.items():
        parts = [files[piece["file"]][piece["key"]] for piece in entry["pieces"]]
        used |= {(piece["file"], piece["key"]) for piece in entry["pieces"]}
        assert all(
            list(part.shape) == piece["shape"] for part, piece in zip(parts, entry["pieces"], strict=True)
        )
        dtype = parts[0].dtype
        whole, times = torch.empty(entry["shape"], dtype=dtype), torch.zeros(entry["shape"])
        for part, piece in zip(parts, entry["pieces"], strict=True):
            assert part.dtype is dtype
            place = tuple(
                slice(start, start + size)
                for start, size in zip(piece["offsets"], piece["shape"], strict=True)
            )
            whole[place] = part
            times[place] += 1
        assert bool((times == 1).all()), f"{name} is written {times.min()} to {times.max()} times"
        found[name] = whole
    assert used == {(file, key) for file, content in files.items() for key in content}
    return found
