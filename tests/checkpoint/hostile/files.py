"""Hostile manifests, names, links, special files and files of tensors."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkpoint.draft import MODEL, STATE, Draft, as_json, nested, sealed
from checkpoint.hostile.case import WEIGHT, Case, Change, several


def manifests() -> Iterator[Case]:
    def body(key: str, *values: Any) -> Iterator[Case]:
        return several(f"manifest {key}", lambda draft: draft.body, key, values)

    def saved(key: str, *values: Any) -> Iterator[Case]:
        return several(f"manifest saved.{key}", lambda draft: draft.body["saved"], key, values)

    def whole(name: str, content: Callable[[Draft], bytes]) -> Case:
        return Case(f"manifest {name}", lambda draft: setattr(draft, "manifest", content(draft)))

    yield from body("folder", "..", "/", "../outside", "a\0", 7, "absent")
    yield from body("version", 0, 2, True, 10**100)
    yield from body("files", None, {"state.json": None}, {"state.json": {"size": 1}}, {})
    yield from body("unknown", {"$": "load"})
    yield from saved("world_size", 0, -1, None, 10**30)
    yield from saved("ranks", [], [-1], [10**30], [1], None, [2**59])
    yield whole("empty", lambda draft: b" ")
    yield whole("deep list", lambda draft: nested(100_000))
    yield whole("deep settings", lambda draft: b'{"blake3": "", "manifest": {"saved": ' + nested(900) + b"}}")
    yield whole("pickle", lambda draft: pickle.dumps({"version": 1}))
    yield whole("duplicate key", lambda draft: sealed(draft.body).replace(b"{", b'{"blake3": 1,', 1))
    yield whole("bytes behind", lambda draft: sealed(draft.body) + b"\n")


def names(outside: Path) -> Iterator[Case]:
    """Names of files in the manifest that lead elsewhere."""
    secret = str(outside / "secret.bin")
    bad = [
        "../outside/secret.bin",
        "../../../../../../../../etc/passwd",
        secret,
        "a/../../outside/secret.bin",
        "a/",
        "",
        "state.json\0.txt",
        "C:\\secret.bin",
        "/".join("y" * 100 for _ in range(20)),
        "\uff0e\uff0e/secret.bin",
        "a\x1b[2Jb",
        "manifest.json",
    ]
    for name in bad:
        entry = {"size": 6, "blake3": "0" * 64}
        yield Case(f"listed file {name[:40]!r}", lambda draft, n=name, e=entry: draft.entries.update({n: e}))

        def change(draft: Draft, name: str = name) -> None:
            draft.index[WEIGHT]["pieces"][0]["file"] = name

        yield Case(f"piece in file {name[:40]!r}", change)
    for size in (-1, 2**63, "1"):
        yield Case(
            f"size {size!r}",
            lambda draft, s=size: draft.entries.update({MODEL: {"size": s, "blake3": "0" * 64}}),
        )
    for digest in ("", "g" * 64, None, "0" * 63 + "\n"):
        yield Case(
            f"digest {digest!r}",
            lambda draft, d=digest: draft.entries.update(
                {MODEL: {"size": len(draft.raw[MODEL]), "blake3": d}}
            ),
        )


def links(outside: Path) -> Iterator[Case]:
    """Links out of the folder. Hard links cannot be told from files, and are allowed."""

    def replaced(name: str, target: Path | str) -> Change:
        def then(directory: Path) -> None:
            if (directory / name).exists():
                (directory / name).unlink()
            (directory / name).symlink_to(target)

        return lambda draft: setattr(draft, "then", then)

    good = outside / "good"
    for name in ("manifest.json", "tensors.json", "state.json", "rank-00000.json", MODEL, STATE):
        yield Case(f"{name} is a link outside", replaced(name, good / name))
    yield Case("extra link", replaced("extra", outside / "secret.bin"), "harmless")
    yield Case("link to itself", replaced("state.json", "state.json"))
    yield Case("link to /dev/zero", replaced("state.json", "/dev/zero"))
    yield Case("manifest links to /dev/zero", replaced("manifest.json", "/dev/zero"))
    yield Case("manifest links to itself", replaced("manifest.json", "manifest.json"))
    yield Case("link to the parent", replaced("up", ".."), "harmless")

    def in_linked_folder(draft: Draft) -> None:
        draft.entries["sub/secret.bin"] = {"size": 6, "blake3": "0" * 64}
        draft.then = lambda directory: (directory / "sub").symlink_to(outside)

    def linked_root(draft: Draft) -> None:
        draft.body["folder"] = "root"
        draft.then = lambda directory: (directory / "root").symlink_to(good)

    def hard_link(draft: Draft) -> None:
        def then(directory: Path) -> None:
            copy = directory.with_name("copy of the model")
            copy.write_bytes((directory / MODEL).read_bytes())
            (directory / MODEL).unlink()
            (directory / MODEL).hardlink_to(copy)

        draft.then = then

    yield Case("file in a linked folder", in_linked_folder)
    yield Case("root is a link", linked_root)
    yield Case("hard link", hard_link, "harmless")


def special_files() -> Iterator[Case]:
    def made(name: str, make: Callable[[Path], object]) -> Change:
        def then(directory: Path) -> None:
            path = directory / name
            if path.exists():
                path.unlink()
            make(path)

        return lambda draft: setattr(draft, "then", then)

    for name in ("manifest.json", "tensors.json", MODEL, "extra"):
        yield Case(f"{name} is a FIFO", made(name, os.mkfifo), "harmless" if name == "extra" else "refused")
        yield Case(f"{name} is a folder", made(name, os.mkdir), "harmless" if name == "extra" else "refused")
    yield Case("a manifest of 2 GB", made("manifest.json", lambda path: _sparse(path, 2 << 30)))
    yield Case("an extra file of 1 TB", made("extra", lambda path: _sparse(path, 1 << 40)), "harmless")


def _sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


def tensor_files() -> Iterator[Case]:
    """Headers of safetensors files."""

    def entry(**changed: Any) -> Change:
        def change(draft: Draft) -> None:
            header, data = draft.header(MODEL)
            header["0.weight"] |= changed
            draft.put_header(MODEL, header, data)

        return change

    def whole(make: Callable[[dict[str, Any], bytes], tuple[Any, bytes]]) -> Change:
        return lambda draft: draft.put_header(MODEL, *make(*draft.header(MODEL)))

    for dtype in ("F64", "load", None):
        yield Case(f"stored dtype {dtype!r}", entry(dtype=dtype))
    for shape in ([6, 8], [-8, 6], [2**32, 2**32], None):
        yield Case(f"stored shape {shape!r}", entry(shape=shape))
    for offsets in ([0, 0], [-1, 191], [0, 2**63], [4, 196], None):
        yield Case(f"stored offsets {offsets!r}", entry(data_offsets=offsets))
    yield Case(
        "stored twice", whole(lambda header, data: (as_json(header)[:-1] + b"," + as_json(header)[1:], data))
    )
    yield Case("bytes behind the tensors", whole(lambda header, data: (header, data + b"\0" * 64)))
    yield Case("a tensor less", whole(lambda h, data: ({k: v for k, v in h.items() if k != "0.bias"}, data)))
    yield Case(
        "metadata of objects", whole(lambda header, data: ({**header, "__metadata__": {"a": {"b": 1}}}, data))
    )
    yield Case("a huge header", lambda draft: draft.raw.update({MODEL: struct.pack("<Q", 2**63) + b"{}" * 8}))
    yield Case("a pickle for a file", lambda draft: draft.raw.update({MODEL: pickle.dumps({"0.weight": 1})}))
