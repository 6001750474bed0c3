"""Bytes appended in parts of any length are the file."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from lockstep.offload.files import FileWriter
from tests.patching import module_of


@pytest.mark.parametrize("direct", [True, False])
def test_parts_of_any_length_are_written_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    monkeypatch.setattr(module_of(FileWriter), "BUFFER_BYTES", 8192)
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    rng = random.Random(0)
    for number, lengths in enumerate(
        [[], [1], [8192], [8191, 2], [rng.randint(0, 30_000) for _ in range(20)]]
    ):
        parts = [torch.randint(0, 256, (length,), dtype=torch.uint8) for length in lengths]
        path = tmp_path / str(number)
        path.touch()
        with FileWriter(str(path)) as file:
            for part in parts:
                file.write(part)
            file.finish()
        assert path.read_bytes() == b"".join(part.numpy().tobytes() for part in parts)
