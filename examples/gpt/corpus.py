"""The source code of Python's own standard library: real text that every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

SKIPPED = {"test", "tests", "idlelib", "encodings", "lib2to3", "site-packages", "dist-packages"}
FILE_BYTES = 64 * 1024  # of each file, so that no single one dominates
TOTAL_BYTES = 8 * 1024 * 1024
VALIDATION_EVERY = 20  # each 20th file is held out


def source_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(root / path for path in files if not SKIPPED & set(path.parts))


def load() -> tuple[Tensor, Tensor]:
    """Training and validation text as uint8 tensors. Whole files are held out, always the same ones."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for index, path in enumerate(source_files()):
        text = path.read_bytes()[:FILE_BYTES]
        total += len(text)
        if total > TOTAL_BYTES:
            break
        parts[index % VALIDATION_EVERY == 0].append(text)
    training, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return training, validation


def unigram_entropy(text: Tensor) -> float:
    """Nats per byte of the best model that ignores context: what a trained model must beat."""
    probability = torch.bincount(text.long(), minlength=256).double() / len(text)
    return -torch.special.xlogy(probability, probability).sum().item()


class Windows(Dataset[Tensor]):
    """The text cut into windows of `context + 1` bytes: inputs are all but the last, targets all but the
    first. `limit` keeps that many, spread evenly over the text."""

    def __init__(self, text: Tensor, context: int, limit: int | None = None) -> None:
        starts = range(0, len(text) - context, context)
        if limit is not None and limit < len(starts):
            starts = starts[:: len(starts) // limit][:limit]
        self.text, self.context, self.starts = text, context, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.text[start : start + self.context + 1].long()
