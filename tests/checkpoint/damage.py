"""Ways to damage a checkpoint on disk, drawn at random from a seed. Knows files and bytes only."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Damage:
    """What was done. An error that tells of it names at least one of ``names``."""

    kind: str
    names: tuple[str, ...]


Kind = Callable[[random.Random, Path, Path], tuple[str, ...]]
"""Damages the checkpoint in the first folder, with the help of an older one, and returns the names of the files."""

KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__.strip("_").replace("_", " ")] = function
    return function


def damage(name: str, rng: random.Random, newest: Path, older: Path) -> Damage:
    """Damage ``newest`` in the way of this name. Raises AssertionError if it is still what it was."""
    before = content(newest)
    names = KINDS[name](rng, newest, older)
    assert content(newest) != before, f"{name} left {newest} as it was"
    return Damage(name, names)


def content(directory: Path) -> dict[str, bytes | str]:
    """All that is below a folder: bytes of files, targets of links, and what else there is by its kind."""
    found: dict[str, bytes | str] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "folder"
        else:
            found[name] = path.read_bytes()
    return found


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())


def _any(rng: random.Random, directory: Path) -> Path:
    return rng.choice(_files(directory))


def _rewrite(path: Path, change: Callable[[bytearray], None]) -> tuple[str, ...]:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return (path.name,)


@kind
def flipped_bit(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    """In any byte of all files, so that big files are hit more often than small ones."""
    files = _files(newest)
    path = rng.choices(files, [file.stat().st_size for file in files])[0]
    return _flip(rng, path)


@kind
def flipped_bit_of_any_file(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    return _flip(rng, _any(rng, newest))


@kind
def flipped_bit_of_the_manifest(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    return _flip(rng, newest / "manifest.json")


def _flip(rng: random.Random, path: Path) -> tuple[str, ...]:
    bit = rng.randrange(8 * path.stat().st_size)

    def change(content: bytearray) -> None:
        content[bit // 8] ^= 1 << (bit % 8)

    return _rewrite(path, change)


@kind
def overwritten_bytes(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    path = _any(rng, newest)
    start = rng.randrange(path.stat().st_size)

    def change(content: bytearray) -> None:
        for at in range(start, min(start + rng.randint(1, 64), len(content))):
            content[at] ^= rng.randint(1, 255)

    return _rewrite(path, change)


@kind
def truncated(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    path = _any(rng, newest)
    size = path.stat().st_size
    os.truncate(path, rng.choice([0, 1, size // 2, size - 1, rng.randrange(size)]))
    return (path.name,)


@kind
def zeroed_page(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    """As after a crash that lost a page of the cache."""
    path = _any(rng, newest)
    pages = range(0, path.stat().st_size, PAGE_BYTES)
    start = rng.choice([page for page in pages if any(path.read_bytes()[page : page + PAGE_BYTES])])

    def change(content: bytearray) -> None:
        stop = min(start + PAGE_BYTES, len(content))
        content[start:stop] = bytes(stop - start)

    return _rewrite(path, change)


@kind
def appended_bytes(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    path = _any(rng, newest)
    with path.open("ab") as file:
        file.write(rng.choice([b"\0", b"\n", b" ", b"{}", rng.randbytes(rng.randint(1, 5000))]))
    return (path.name,)


@kind
def missing_file(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    path = _any(rng, newest)
    path.unlink()
    return (path.name,)


@kind
def missing_files(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    gone = rng.sample(_files(newest), rng.randint(2, len(_files(newest))))
    for path in gone:
        path.unlink()
    return tuple(path.name for path in gone)


@kind
def file_that_is_a_link(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    """To its own content, elsewhere."""
    path = _any(rng, newest)
    elsewhere = newest.parent / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)
    return (path.name,)


@kind
def file_that_is_a_folder(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    path = _any(rng, newest)
    path.unlink()
    path.mkdir()
    return (path.name,)


@kind
def swapped_files(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    one, other = rng.sample(_files(newest), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return one.name, other.name


@kind
def renamed_file(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    path = _any(rng, newest)
    path.rename(path.with_name(path.name + ".bak"))
    return (path.name,)


@kind
def file_of_an_older_checkpoint(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    """All files but the manifest may come from the older one: what a torn copy looks like."""
    different = [
        path.name
        for path in _files(newest)
        if path.name != "manifest.json" and path.read_bytes() != (older / path.name).read_bytes()
    ]
    names = rng.sample(different, rng.randint(1, len(different)))
    for name in names:
        shutil.copyfile(older / name, newest / name)
    return tuple(names)


@kind
def manifest_of_an_older_checkpoint(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    shutil.copyfile(older / "manifest.json", newest / "manifest.json")
    return tuple(path.name for path in _files(newest))


@kind
def emptied_folder(rng: random.Random, newest: Path, older: Path) -> tuple[str, ...]:
    shutil.rmtree(newest)
    newest.mkdir()
    return ("manifest.json",)
