"""Hostile checkpoints whose digests are right: refused in our words, and nothing is run, opened or changed by them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import hostile_run
from lockstep.checkpoint.format import (
    ChunkMetadata,
    Manifest,
    TensorEntry,
    canonical,
    digest_of,
    index_from_bytes,
    index_to_bytes,
)
from lockstep.errors import CheckpointError, UsageError
from tests.refusals import expect_refusal

LEAST_CASES = 300


def environment() -> dict[str, str]:
    """Of processes that import from the tests."""
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[1])])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of each case, in a process of its own: audit hooks stay."""
    folder = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, hostile_run.__file__, str(folder), str(folder / "results.json")]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    assert len(found) >= LEAST_CASES
    return found


def described(results: list[dict[str, Any]], *keys: str) -> list[Any]:
    return [[result["name"], *(result[key] for key in keys)] for result in results]


def check_that_what_may_load_loads_and_all_else_is_refused_in_our_words(
    results: list[dict[str, Any]],
) -> None:
    wrong = [result for result in results if result["is_ours"] == (result["fate"] == "harmless")]
    assert described(wrong, "error_type", "error") == []
    assert results[0]["name"] == "nothing is wrong" and "weights" in results[0]["changed"]


def check_that_nothing_is_changed_by_what_is_refused(results: list[dict[str, Any]]) -> None:
    changed = [result for result in results if result["fate"] == "refused" and result["changed"]]
    assert described(changed, "changed", "error") == []
    late = [result["name"] for result in results if result["fate"] == "refused late"]
    # What the user's own class alone can judge.
    assert all(name.startswith("rank object.0 ") for name in late)


def check_that_no_code_is_run_and_nothing_outside_is_opened(results: list[dict[str, Any]]) -> None:
    heard = [result for result in results if result["events"]]
    assert described(heard, "events") == []


def check_that_memory_stays_within_twice_the_files_and_a_constant(results: list[dict[str, Any]]) -> None:
    allowed = hostile_run.CONSTANT_BYTES
    large = [result for result in results if result["grown_bytes"] > 2 * result["file_bytes"] + allowed]
    assert described(large, "grown_bytes", "file_bytes") == []


def test_hostile_checkpoints_are_refused_and_do_nothing(results: list[dict[str, Any]]) -> None:
    """One test, because the cases take a minute, and another worker would run them again."""
    check_that_what_may_load_loads_and_all_else_is_refused_in_our_words(results)
    check_that_nothing_is_changed_by_what_is_refused(results)
    check_that_no_code_is_run_and_nothing_outside_is_opened(results)
    check_that_memory_stays_within_twice_the_files_and_a_constant(results)


def test_the_watch_hears_what_it_must_hear(tmp_path: Path) -> None:
    """Each event that must not happen is made to happen, or its absence above would prove nothing."""
    program = f"""
import importlib, os, pickle, socket, subprocess, sys
from checkpoint import hostile_run
from patching import module_of
from lockstep.checkpoint.format import TensorReader
watch = hostile_run.Watch()
hostile_run.make_opens_of_safetensors_audible()
os.symlink("/etc/passwd", {str(tmp_path / "link")!r})
open({str(tmp_path / "good")!r}, "w").close()
watch.directory = {str(tmp_path)!r}
def heard(what, act):
    watch.events.clear()
    try:
        act()
    except Exception:
        pass
    print(what, any(event.startswith(what) for event in watch.events))
heard("open", lambda: open("/etc/passwd").close())
heard("open", lambda: open({str(tmp_path / "link")!r}).close())
heard("open", lambda: open({str(tmp_path / "sub" / ".." / ".." / "x")!r}).close())
heard("safetensors.open", lambda: module_of(TensorReader).safe_open("/etc/passwd", framework="pt"))
heard("exec", lambda: exec("1"))
heard("compile", lambda: compile("1", "x", "exec"))
heard("exec", lambda: importlib.import_module("this"))
heard("import", lambda: __import__("antigravity_that_is_not_there"))
heard("subprocess.Popen", lambda: subprocess.run(["true"]))
heard("os.system", lambda: os.system("true"))
heard("socket.", lambda: socket.socket().close())
heard("pickle.find_class", lambda: pickle.loads(b"cos\\ngetpid\\n."))
watch.events.clear()
open({str(tmp_path / "good")!r}).close()
print("good", not watch.events)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert len(lines) == 13 and all(line.endswith(" True") for line in lines), done.stdout


def test_pieces_are_taken_only_if_they_tile_their_tensor() -> None:
    """Against counting how often each element is covered."""
    rng = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(2000):
        shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        boxes = _tiles(rng, [(0, size) for size in shape]) if rng.random() < 0.5 else []
        if not boxes or rng.random() < 0.5:
            boxes += [[(start := rng.randrange(size), rng.randint(1, size - start)) for size in shape]]
            boxes.pop(rng.randrange(len(boxes)))
        covered = torch.zeros(shape, dtype=torch.int64)
        for box in boxes:
            covered[tuple(slice(start, start + length) for start, length in box)] += 1
        is_tiled = bool((covered == 1).all())
        seen[is_tiled] += 1
        assert _is_taken(shape, boxes) == is_tiled, (shape, boxes)
    assert min(seen.values()) > 300


def _tiles(rng: random.Random, box: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """A box cut in two at random, again and again: starts and lengths along each dim."""
    dim = rng.randrange(len(box))
    start, length = box[dim]
    if length == 1 or rng.random() < 0.3:
        return [box]
    cut = rng.randint(1, length - 1)
    one, other = list(box), list(box)
    one[dim], other[dim] = (start, cut), (start + cut, length - cut)
    return _tiles(rng, one) + _tiles(rng, other)


def _is_taken(shape: list[int], boxes: list[list[tuple[int, int]]]) -> bool:
    pieces = [
        ChunkMetadata(
            file="a", key=str(i), offsets=tuple(start for start, _ in box), shape=tuple(n for _, n in box)
        )
        for i, box in enumerate(boxes)
    ]
    entry = TensorEntry(dtype="U8", shape=tuple(shape), pieces=pieces)
    try:
        index_from_bytes(index_to_bytes({"t": entry}), _manifest_of_a_file(10_000), "tensors.json")
    except CheckpointError:
        return False
    return True


def _manifest_of_a_file(size: int) -> Manifest:
    body: dict[str, Any] = {
        "format": "lockstep-checkpoint",
        "version": 1,
        "folder": "",
        "saved": {
            "time": "",
            "world_size": 1,
            "ranks": [0],
            "parallel": "",
            "settings": {},
            "versions": {},
        },
        "files": {"a": {"size": size, "blake3": "0" * 64}},
    }
    sealed = canonical({"blake3": digest_of(canonical(body)), "manifest": body})
    return Manifest.from_bytes(sealed, "manifest.json")


def test_what_could_not_be_loaded_is_not_saved() -> None:
    deep: Any = 1
    for _ in range(101):
        deep = [deep]
    expect_refusal(UsageError, "100", canonical, deep)
    canonical(deep[0])
