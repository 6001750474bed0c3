"""Capsules that are torn, of another version or no files at all: one sentence, and no waiting for a writer."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.format import CapsuleFacts, KeptBatch, RankCapsule
from lockstep.errors import ConfigError
from tests.cli.calling import check_refused

FILES = ("capsule.json", "rank-0.json", "rank-0.safetensors")


@pytest.fixture
def capsule(tmp_path: Path) -> Path:
    folder = tmp_path / "step-000003"
    folder.mkdir()
    CapsuleFacts(3, "loss", float("nan"), 12.0, history={"loss": (1.0, 0.5)}, data_ranks=(0,)).write(folder)
    batch = KeptBatch(
        {"x": torch.arange(4.0), "names": ["a", None]}, {"torch": torch.arange(3)}, True, [4], [4]
    )
    RankCapsule([batch], [(float("nan"), 1.0)], {"0.mean": torch.ones(2)}).write(folder, 0)
    return folder


def replay_is_refused(capsys: pytest.CaptureFixture[str], capsule: Path, words: str) -> None:
    script = capsule.parent / "script.py"
    script.write_text("raise SystemExit('this script must not run')\n")
    check_refused(capsys, ["replay", str(capsule), str(script)], words)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_plain_file_is_named(capsule: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (capsule / name).unlink()
    replay_is_refused(capsys, capsule, str(capsule))
    os.mkfifo(capsule / name)
    replay_is_refused(capsys, capsule, "is a pipe")
    (capsule / name).unlink()
    (capsule / name).mkdir()
    replay_is_refused(capsys, capsule, "is a folder")


def changed(**changes: object) -> Callable[[Any], object]:
    return lambda document: {**document, **changes}


DOCUMENTS: list[tuple[str, Callable[[Any], object]]] = [
    ("capsule.json", changed(format="lockstep capsule 2")),
    ("capsule.json", changed(step="three")),
    ("capsule.json", changed(data_ranks=3)),
    ("capsule.json", changed(data_ranks=[0, "one"])),
    ("capsule.json", changed(history={"loss": [1.0]})),
    ("capsule.json", changed(threads=None)),
    ("capsule.json", lambda document: [document]),
    ("rank-0.json", changed(batches=3)),
    ("rank-0.json", changed(batches=[3])),
    ("rank-0.json", changed(batches=[{"batch": 1}])),
    ("rank-0.json", changed(losses=[[1.0]])),
    ("rank-0.json", changed(losses=[["one", 1.0]])),
    ("rank-0.json", changed(buffers={"0.mean": 3})),
    ("rank-0.json", changed(inexact=[])),
    ("rank-0.json", lambda document: {}),
    ("rank-0.json", lambda document: [document]),
]


@pytest.mark.parametrize(("name", "change"), DOCUMENTS)
def test_other_values_are_refused(
    capsule: Path, name: str, change: Callable[[Any], object], capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((capsule / name).read_text("utf-8"))
    (capsule / name).write_text(json.dumps(change(document)), "utf-8")
    replay_is_refused(capsys, capsule, str(capsule))


@pytest.mark.parametrize("name", FILES)
def test_torn_files_are_refused(capsule: Path, name: str) -> None:
    content, draws = (capsule / name).read_bytes(), random.Random(0)

    def read() -> None:
        CapsuleFacts.read(capsule)
        RankCapsule.read(capsule, 0)

    for length in (0, 1, len(content) // 2, len(content) - 2):
        (capsule / name).write_bytes(content[:length])
        with pytest.raises(ConfigError, match="step-000003"):
            read()
    (capsule / name).write_bytes(b"[" * 100_000)
    with pytest.raises(ConfigError, match="step-000003"):
        read()
    for _ in range(200):
        torn = bytearray(content)
        torn[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        (capsule / name).write_bytes(torn)
        # A flipped bit of a number may leave a capsule that is one.
        with contextlib.suppress(ConfigError):
            read()
