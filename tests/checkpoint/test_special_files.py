"""Pipes, sockets, devices, folders and links in place of files of weights: refused in a sentence, and never opened."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.checkpoint.weights import open_weights, write_file
from lockstep.config import read_plain_file
from lockstep.errors import LockstepError
from lockstep.offload.files import index_of, regions_of
from lockstep.utils import load_checkpoint_in_model
from tests.refusals import expect_refusal

SHARD = "model-00002-of-00002.safetensors"


def sharded(folder: Path) -> Path:
    """A model in two shards with their index."""
    folder.mkdir(parents=True)
    save_file({"weight": torch.ones(2, 3)}, folder / "model-00001-of-00002.safetensors")
    save_file({"bias": torch.ones(2)}, folder / SHARD)
    places = {"weight": "model-00001-of-00002.safetensors", "bias": SHARD}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@contextmanager
def a_pipe(path: Path) -> Iterator[None]:
    """With a writer, so that who opens it would fail and not wait."""
    os.mkfifo(path)
    handle = os.open(path, os.O_RDWR)
    yield
    os.close(handle)


@contextmanager
def a_socket(path: Path) -> Iterator[None]:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
        os.chdir(here)
        yield


def a_link(target: str) -> Callable[[Path], Any]:
    @contextmanager
    def make(path: Path) -> Iterator[None]:
        path.symlink_to(target)
        yield

    return make


@contextmanager
def a_folder(path: Path) -> Iterator[None]:
    path.mkdir()
    yield


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pipe": (a_pipe, "is a pipe"),
    "a socket": (a_socket, "is a socket"),
    "a folder": (a_folder, "is a folder"),
    "a link to a device": (a_link("/dev/zero"), "is a device"),
    "a link to a file of the system": (a_link("/proc/self/mem"), "a file that the system makes"),
    "a link to nothing": (a_link("nothing"), "No such file|is missing|cannot be read"),
}
AS_SHARD = {
    **KINDS,
    "a link out of the folder": (a_link("/etc/passwd"), "is a link to .*, outside its folder"),
}


def merged(folder: Path) -> None:
    write_file(open_weights(str(folder)), str(folder.parent / "out.safetensors"), replace=True)


def loaded(folder: Path) -> None:
    load_checkpoint_in_model(nn.Linear(3, 2), str(folder))


@pytest.mark.parametrize("read", [merged, loaded], ids=["merge", "load_checkpoint_in_model"])
@pytest.mark.parametrize("what", [*AS_SHARD, "an index"])
def test_a_shard_that_is_no_plain_file_is_refused(tmp_path: Path, read: Any, what: str) -> None:
    folder = sharded(tmp_path / "weights")
    with ExitStack() as stack:
        if what == "an index":  # the index itself, and every kind of it
            for number, (kind, (make, words)) in enumerate(KINDS.items()):
                if "nothing" in kind or "folder" in kind:
                    continue
                other = tmp_path / str(number)
                other.mkdir()
                stack.enter_context(make(other / "model.safetensors.index.json"))
                with pytest.raises(LockstepError, match=words):
                    read(other)
            return
        make, words = AS_SHARD[what]
        (folder / SHARD).unlink()
        stack.enter_context(make(folder / SHARD))
        with pytest.raises(LockstepError, match=words):
            read(folder)


@pytest.mark.parametrize("read", [merged, loaded], ids=["merge", "load_checkpoint_in_model"])
def test_the_only_file_of_weights_may_be_a_link_but_nothing_special(tmp_path: Path, read: Any) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    with a_pipe(folder / "x.safetensors"), pytest.raises(LockstepError, match="is a pipe"):
        read(folder)
    (folder / "x.safetensors").unlink()
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "elsewhere.safetensors")
    (folder / "x.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    read(folder)


@pytest.mark.parametrize("read", [merged, loaded], ids=["merge", "load_checkpoint_in_model"])
def test_the_cache_of_the_hub_is_made_of_links(tmp_path: Path, read: Any) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "12ab"
    sharded(blobs)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    read(snapshot)
    assert json.loads((snapshot / "model.safetensors.index.json").read_text())


def test_a_huge_index_is_not_read(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "weights")
    os.truncate(folder / "model.safetensors.index.json", 8 << 30)
    for read in (merged, loaded):
        expect_refusal(LockstepError, "8589934592", read, folder)


def test_an_offload_folder_with_pipes_is_refused(tmp_path: Path) -> None:
    with a_pipe(tmp_path / "index.json"), pytest.raises(LockstepError, match="is a pipe"):
        index_of(str(tmp_path))
    entry = {"dtype": "float32", "shape": [2]}
    for name, entries in {
        "a.dat": {"a": entry},
        "b": {"b": {**entry, "safetensors_file": "b"}},
    }.items():
        with a_pipe(tmp_path / name), pytest.raises(LockstepError, match="is a pipe"):
            regions_of(entries, str(tmp_path))
    (tmp_path / "c.dat").write_bytes(bytes(8))
    for shape in ([-2], [2.0], "2", None, [2**70], [[2]]):
        expect_refusal(LockstepError, "'c'", regions_of, {"c": {**entry, "shape": shape}}, str(tmp_path))


def test_what_grows_while_it_is_read_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_plain_file(str(tmp_path / "file"), 5) == b"12345"
    with pytest.raises(LockstepError, match="5 bytes.*4"):
        read_plain_file(str(tmp_path / "file"), 4)


@pytest.mark.parametrize("name", ["manifest.json", "config.json"])
def test_a_pipe_beside_weights_is_named_and_not_passed_over(tmp_path: Path, name: str) -> None:
    folder = sharded(tmp_path / "model")
    with a_pipe(folder / name), pytest.raises(LockstepError, match=f"{name} is (a pipe|no plain file)"):
        merged(folder)
