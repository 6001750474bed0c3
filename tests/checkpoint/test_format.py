"""The documents of a checkpoint: whatever was not written so is noticed before it is used."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from blake3 import blake3

from lockstep.checkpoint.format import (
    ChunkMetadata,
    FileEntry,
    Manifest,
    Saved,
    TensorEntry,
    canonical,
    check_name,
    index_from_bytes,
    index_to_bytes,
    parse_json,
)
from lockstep.errors import CheckpointError, UsageError
from tests.refusals import expect_refusal

NAME = "model-00000.safetensors"


def small() -> Manifest:
    saved = Saved(
        time="2026-01-02T03:04:05Z",
        world_size=2,
        ranks=[0, 1],
        parallel="zero=3",
        settings={"seed": -12.5625, "on": True, "none": None, "names": ["a", "ü"], "z": 1, "b": 2},
        versions={"torch": "2.13.0"},
    )
    files = {NAME: FileEntry(size=64, blake3="0f" * 32), "state.json": FileEntry(size=0, blake3="a1" * 32)}
    return Manifest(saved=saved, files=files)


def signed(body: Any) -> bytes:
    """A manifest that names its own digest, whatever is in it; made without our code."""
    text = json.dumps(body, separators=(",", ":")) + "\n"
    document = {"blake3": blake3(text.encode()).hexdigest(), "manifest": body}
    return (json.dumps(document, separators=(",", ":")) + "\n").encode()


def body(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(small().to_bytes())["manifest"]
    return {**found, **changes}


def test_a_manifest_survives_and_names_the_digest_of_what_it_says() -> None:
    content = small().to_bytes()
    assert Manifest.from_bytes(content, "m") == small()
    assert signed(body()) == content
    assert content.isascii()


def test_any_changed_byte_of_a_manifest_is_detected() -> None:
    content = small().to_bytes()
    tried = 0
    for place, byte in enumerate(content):
        changes = {1, 2, 4, 8, 16, 32, 64, 128} | {byte, byte ^ ord("e"), byte ^ ord(" ")} - {0}
        for change in changes:
            damaged = bytearray(content)
            damaged[place] ^= change
            with pytest.raises(CheckpointError):
                Manifest.from_bytes(bytes(damaged), "m")
            tried += 1
    assert tried > 8 * len(content) > 4000


def test_a_manifest_that_was_cut_or_has_something_more_is_detected() -> None:
    content = small().to_bytes()
    for end in range(len(content)):
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(content[:end], "m")
    for place in range(len(content) + 1):
        for more in (b" ", b"\n", b"0", b"\0", b'"', content[place : place + 1]):
            with pytest.raises(CheckpointError):
                Manifest.from_bytes(content[:place] + (more or b"}") + content[place:], "m")


def test_a_manifest_in_another_order_or_spacing_is_not_what_was_written() -> None:
    document = json.loads(small().to_bytes())
    for other in (json.dumps(document), json.dumps(document, indent=1)):
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(other.encode(), "m")
    turned = {key: document[key] for key in reversed(document)}
    with pytest.raises(CheckpointError):
        Manifest.from_bytes((json.dumps(turned, separators=(",", ":")) + "\n").encode(), "m")


def with_file(name: str, **entry: Any) -> dict[str, Any]:
    return body(files={name: {"size": 1, "blake3": "0" * 64} | entry})


def with_saved(**changes: Any) -> dict[str, Any]:
    return body(saved={**body()["saved"], **changes})


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (body(version=2), "format version 2"),
        (body(format="other"), "format"),
        (body(more=1), "more"),
        (body(files=[]), "files"),
        (body(files={NAME: None}), NAME),
        (body(folder="../other"), "folder"),
        (body(folder="a\n"), "folder"),
        ({k: v for k, v in body().items() if k != "saved"}, "saved"),
        (with_file(NAME, size=-1), "size"),
        (with_file(NAME, size=True), "size"),
        (with_file(NAME, size=10**400), "size"),
        (with_file(NAME, blake3="0" * 63), "blake3"),
        (with_file(NAME, blake3="0" * 64 + "\n"), "blake3"),
        (with_file(NAME, mode=0o777), "mode"),
        (with_file("manifest.json"), "lists itself"),
        (with_saved(world_size=0), "world_size"),
        (with_saved(ranks=[-1]), "ranks"),
        (with_saved(time=3), "time"),
        (with_saved(host="me"), "host"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_manifest_that_says_something_else_is_refused(document: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"dir/manifest\.json.*{re.escape(words)}"):
        Manifest.from_bytes(signed(document), "dir/manifest.json")


def test_a_manifest_that_names_files_elsewhere_is_refused() -> None:
    expect_refusal(CheckpointError, "'../x.json'", Manifest.from_bytes, signed(with_file("../x.json")), "m")


@pytest.mark.parametrize("content", [b"[]", b"null", b"{}", b'{"manifest": {}}'])
def test_json_that_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(content, "m")


# -- JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{} {}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"[1e999]",
        b'{"a": 1, "a": 2}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" + b"9" * 5000 + b"]",
        b"\xff\xfe",
        b"[1,]",
        b"\x80\x04K\x01.",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_what_is_no_json_of_ours_is_refused(content: bytes) -> None:
    expect_refusal(CheckpointError, "Load another checkpoint", parse_json, content, "state.json")


@pytest.mark.parametrize(
    "value", [0, -1, 2**70, 0.1, 5e-324, 1.7976931348623157e308, "ü\ud800\0", None, [[]], {"": 1}]
)
def test_json_keeps_values(value: Any) -> None:
    assert parse_json(canonical(value), "x") == value


def test_json_never_holds_what_it_could_not_read_again() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            canonical([value])


def nested(depth: int) -> Any:
    value: Any = 0
    for i in range(depth):
        value = {"a": value} if i % 2 else [value]
    return value


@pytest.mark.parametrize("depth", [300, 990])
def test_json_is_refused_alike_where_it_is_too_deep_to_write_and_to_read(depth: int) -> None:
    with pytest.raises(UsageError):
        canonical(nested(depth))
    opening = "".join('{"a":' if i % 2 else "[" for i in reversed(range(depth)))
    closing = "".join("}" if i % 2 else "]" for i in range(depth))
    with pytest.raises(CheckpointError):
        parse_json(f"{opening}0{closing}".encode(), "x")
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(f'{{"blake3":"","manifest":{opening}0{closing}}}'.encode(), "m")


# -- index --------------------------------------------------------------------------------------------------


def manifest_of(**sizes: int) -> Manifest:
    files = {f"{name}.safetensors": FileEntry(size=size, blake3="0" * 64) for name, size in sizes.items()}
    return small().model_copy(update={"files": files})


def piece(
    offsets: Any = (0, 0), shape: Any = (2, 3), file: Any = "a.safetensors", key: Any = "w"
) -> dict[str, Any]:
    return {"file": file, "key": key, "offsets": list(offsets), "shape": list(shape)}


def index_of(*pieces: Any, dtype: Any = "F32", shape: Any = (2, 3), **more: Any) -> bytes:
    entry = {"dtype": dtype, "shape": list(shape), "pieces": list(pieces), **more}
    return json.dumps({"model.0.w": entry}).encode()


def test_an_index_survives() -> None:
    top = ChunkMetadata(file="a.safetensors", key="w@0x0", offsets=(0, 0), shape=(1, 3))
    below = ChunkMetadata(file="b.safetensors", key="w@1x0", offsets=(1, 0), shape=(1, 3))
    scalar = ChunkMetadata(file="a.safetensors", key="s", offsets=(), shape=())
    index = {
        "model.0.w": TensorEntry(dtype="BF16", shape=(2, 3), pieces=[top, below]),
        "state": TensorEntry(dtype="F64", shape=(), pieces=[scalar]),
        "empty": TensorEntry(dtype="I8", shape=(0, 4), pieces=[]),
    }
    assert index_from_bytes(index_to_bytes(index), manifest_of(a=100, b=100), "t") == index
    assert [entry.nbytes for entry in index.values()] == [12, 8, 0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "not a dict"),
        (index_of(piece(offsets=(1, 0))), "lies outside"),
        (index_of(piece(offsets=(0, 0, 0), shape=(1, 2, 3))), "lies outside"),
        (index_of(piece(offsets=(2**59, 0), shape=(2**59, 0))), "lies outside"),
        (index_of(), "hold 0 elements"),
        (index_of(piece(shape=(2, 2))), "hold 4 elements"),
        (index_of(piece(), piece()), "hold 12 elements"),
        (index_of(piece(file="b.safetensors")), "'b.safetensors', which has no bytes"),
        (index_of(piece(), dtype="F64"), "48 bytes into 'a.safetensors', which has 24"),
        (index_of(piece(file="../a.safetensors")), "not a plain relative name"),
        (index_of(piece(), dtype="F33"), "unknown dtype 'F33'"),
        (index_of(piece(), dtype=None), "dtype"),
        (index_of(piece(), shape=(2.0, 3)), "shape"),
        (index_of(piece(), shape=(-2, -3)), "shape"),
        (index_of(piece(offsets=(0, True))), "offsets"),
        (index_of(piece(file=None)), "file"),
        (index_of(piece(key=3)), "key"),
        (index_of(piece(), stride=[3, 1]), "stride"),
        (json.dumps({"w": 3}).encode(), "valid dictionary"),
        (b'{"w": {"dtype": "F32", "shape": [], "pieces": [], "shape": []}}', "twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_index_that_cannot_be_true_is_refused(content: bytes, words: str) -> None:
    expect_refusal(CheckpointError, words, index_from_bytes, content, manifest_of(a=24), "tensors.json")


def test_an_index_whose_pieces_overlap_and_leave_a_hole_is_refused() -> None:
    content = index_of(piece(shape=(1, 3)), piece(shape=(1, 3), key="v"))
    with pytest.raises(CheckpointError):
        index_from_bytes(content, manifest_of(a=24), "tensors.json")


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "/a", "a/", "a//b", "./a", "a/../b", "~/a~", "a\\b", "C:a"),
        *("a\n", "a\0", "é", "a" * 256, "/".join(["a" * 200] * 6), "a*", "$HOME", "...", "a/ /.."),
    ],
)
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError):
        check_name(name)


@pytest.mark.parametrize("name", [NAME, "a/b/c.txt", ".hidden", "a b", "x..y", "A_1-2.3,=+@", "a" * 255])
def test_plain_names_are_let_through(name: str) -> None:
    assert check_name(name) == name
