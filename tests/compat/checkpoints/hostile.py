"""Hostile files: each function writes one and returns what to import. None can hurt the machine if it works."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Build = Callable[[Path, Path, int], Path]  # folder, marker file, a port that listens -> what to import


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def called(module: str, name: str, arguments: bytes, opcode: str = "GLOBAL") -> bytes:
    """A pickle that calls ``module.name`` with the pickled items ``arguments``."""
    if opcode == "GLOBAL":
        return b"\x80\x02" + f"c{module}\n{name}\n".encode() + b"(" + arguments + b"tR."
    if opcode == "STACK_GLOBAL":
        return b"\x80\x04" + text(module) + text(name) + b"\x93(" + arguments + b"tR."
    if opcode == "INST":
        return b"\x80\x02(" + arguments + f"i{module}\n{name}\n.".encode()
    if opcode == "OBJ":
        return b"\x80\x02(" + f"c{module}\n{name}\n".encode() + arguments + b"o."
    if opcode == "NEWOBJ":
        return b"\x80\x02" + f"c{module}\n{name}\n".encode() + b"(" + arguments + b"t\x81."
    raise ValueError(opcode)


def archive(data: bytes, **records: bytes) -> bytes:
    """The zip form of torch.save around a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a/data.pkl", data)
        for name, content in records.items():
            file.writestr("a/" + name.replace("__", "/"), content)
    return buffer.getvalue()


def tensor(count: int, size: bytes, stride: bytes, offset: bytes = b"K\x00") -> bytes:
    """A pickle with ``_rebuild_tensor_v2`` over storage "0" of ``count`` floats."""
    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(count) + b"tQ"
    )
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + size + stride + b"\x89)tR."


# Calls that would leave the marker, connect to the port, or give code to something that runs it.
def calls(marker: Path, port: int) -> dict[str, bytes]:
    shell = text(f"touch {marker}")
    python = text(f"open({str(marker)!r}, 'w')")
    address = b"(" + text("127.0.0.1") + number(port) + b"t"
    url = text(f"http://127.0.0.1:{port}/")
    found = {
        f"{module}.{name}": called(module, name, arguments)
        for module, name, arguments in [
            ("os", "system", shell),
            ("posix", "system", shell),
            ("os", "execv", text("/bin/touch") + b"(" + text("touch") + text(str(marker)) + b"t"),
            ("subprocess", "Popen", b"(" + text("touch") + text(str(marker)) + b"t"),
            ("builtins", "eval", python),
            ("builtins", "exec", python),
            ("__builtin__", "eval", python),
            ("builtins", "open", text(str(marker)) + text("w")),
            ("builtins", "__import__", text("antigravity")),
            ("builtins", "getattr", text("x") + text("__class__")),
            ("_io", "FileIO", text(str(marker)) + text("w")),
            ("importlib", "import_module", text("antigravity")),
            ("runpy", "run_path", text(str(marker))),
            ("operator", "methodcaller", text("system") + shell),
            ("functools", "partial", b"cos\nsystem\n" + shell),
            ("marshal", "loads", b"U\x00"),
            ("pickle", "loads", b"U\x00"),
            ("ctypes", "CDLL", text("libc.so.6")),
            ("socket", "create_connection", address),
            ("urllib.request", "urlopen", url),
            ("webbrowser", "open", url),
            ("numpy", "load", text(str(marker)) + b"N\x88"),
            ("numpy.testing._private.utils", "runstring", python + b"}"),
            ("torch", "load", text(str(marker))),
            ("torch.storage", "_load_from_bytes", b"U\x03abc"),
            ("torch.hub", "load_state_dict_from_url", url),
            ("torch._utils", "_import_dotted_name", text("os.system")),
            ("deepspeed.runtime.config", "DeepSpeedConfig", text(str(marker))),
            ("lockstep.compat.checkpoints", "read_foreign", text(str(marker))),
        ]
    }
    for opcode in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ"):
        found[f"os.system by {opcode}"] = called("os", "system", shell, opcode)
    for module, dotted in (
        ("collections", "OrderedDict.__init__.__globals__"),
        ("pathlib", "os.system"),
        ("torch", "os.system"),
        ("builtins", "dict.fromkeys"),
        ("_codecs", "encode.__self__.lookup"),
    ):
        found[f"{module}.{dotted} (dotted)"] = called(module, dotted, shell, "STACK_GLOBAL")
    return found


def nested(levels: int, opened: bytes, closed: bytes) -> bytes:
    return b"\x80\x02" + opened * levels + closed * levels + b"."


def laughs(levels: int = 40) -> bytes:
    """Lists of two of the list before: 2 ** levels values in a few bytes."""
    data = b"\x80\x02]q\x00"
    for level in range(levels):
        data += b"](h" + bytes([level]) + b"h" + bytes([level]) + b"eq" + bytes([level + 1])
    return data + b"."


def misuse() -> dict[str, bytes]:
    """Names that are allowed, used for what they are not for; and pickles of absurd size."""
    ordered = b"ccollections\nOrderedDict\n"
    return {
        "a name that is no call": b"\x80\x02ctorch\nFloatStorage\n)R.",
        "a type where a value belongs": b"\x80\x02ctorch\nTensor\n.",
        "an allowed name called through another": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n("
        b"cos\nsystem\nctorch\nTensor\n(" + text("true") + b"t}tR.",
        "a builder of something else": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n("
        b"c_codecs\nencode\nctorch\nTensor\n(" + text("x") + text("latin1") + b"t}tR.",
        "bytes of a given size": called("builtins", "bytearray", b"\x8a\x06\x00\x00\x00\x00\x00\x10"),
        "a list of a number": called("builtins", "list", number(10**9)),
        "an encoding that computes": called("_codecs", "encode", text("x" * 9) + text("zip")),
        "an unknown encoding": called("_codecs", "encode", text("x") + text("antigravity")),
        "a class with arguments": called("deepspeed.runtime.fp16.loss_scaler", "LossScaler", number(1)),
        "an attribute for a dict": b"\x80\x02" + ordered + b")R}" + text("__class__") + b"K\x01sb.",
        "a state for a name": b"\x80\x02" + ordered + b"}" + text("__init__") + b"K\x01sb.",
        "slots for a name": b"\x80\x02" + ordered + b"N}" + text("fromkeys") + b"K\x01s\x86b.",
        "a second state": b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81}b}b.",
        "a call of a value": b"\x80\x02K\x01)R.",
        "a call with a dict": b"\x80\x02" + ordered + b"}R.",
        "an extension code": b"\x80\x02\x82\x01.",
        "an out-of-band buffer": b"\x80\x05\x97.",
        "a persistent name": b"\x80\x02Pstorage\n.",
        "a storage in a plain pickle": b"\x80\x02" + text("storage") + b"Q.",
        "an array of objects": called("numpy", "dtype", text("O8") + b"K\x00K\x01"),
        "an unbuilt array": b"\x80\x02cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR.",
        "an integer of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7f",
        "a negative length": b"\x80\x02\x8b\xff\xff\xff\xff",
        "a text of 2 ** 60 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**60),
        "bytes of 2 ** 60 bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**60),
        "an array of 2 ** 60 bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**60),
        "a frame of 2 ** 62 bytes": b"\x80\x04\x95" + struct.pack("<Q", 2**62),
        "a number of a million digits": b"\x80\x02I" + b"9" * 10**6 + b"\n.",
        "protocol 9": b"\x80\x09N.",
        "a value that is not there": b"\x80\x02h\x07.",
        "a bomb of shared lists": laughs(),
        "a hundred thousand lists in lists": nested(100_000, b"](", b"e"),
        "a hundred thousand marks": b"\x80\x02" + b"(" * 100_000 + b".",
        "a list in itself": b"\x80\x02]q\x00h\x00a.",
        "nothing on the stack": b"\x80\x02.",
        "no end": b"\x80\x02]",
        "bytes behind the end": b"\x80\x02N.N.",
        "keys without values": b"\x80\x02}(K\x01u.",
        "random bytes": b"\x80\x02" + bytes(range(40, 250)),
    }


def misuse_of_tensors() -> dict[str, bytes]:
    """Zip files of torch.save whose tensors are not what they say; the storage has 16 bytes."""
    huge = b"\x8a\x06\x00\x00\x00\x00\x00\x10"  # 2 ** 44
    good = tensor(4, b"K\x04\x85", b"K\x01\x85")
    other = good.replace(b"FloatStorage", b"LongStorage")
    sound = {"data__0": bytes(16)}
    return {
        "a shape beyond the storage": archive(tensor(4, b"(" + huge + b"t", b"K\x01\x85"), **sound),
        "a stride beyond the storage": archive(tensor(4, b"K\x02\x85", b"(" + huge + b"t"), **sound),
        "an offset beyond the storage": archive(tensor(4, b"K\x01\x85", b"K\x01\x85", huge), **sound),
        "a negative size": archive(tensor(4, b"(" + number(-1) + b"t", b"K\x01\x85"), **sound),
        "a negative stride": archive(tensor(4, b"K\x02\x85", b"(" + number(-1) + b"t"), **sound),
        "a negative offset": archive(tensor(4, b"K\x02\x85", b"K\x01\x85", number(-4)), **sound),
        "one value spread over many": archive(tensor(4, b"(" + huge + b"t", b"K\x00\x85"), **sound),
        "more strides than sizes": archive(tensor(4, b"K\x04\x85", b"K\x01K\x01\x86"), **sound),
        "a size that is a text": archive(tensor(4, b"(" + text("4") + b"t", b"K\x01\x85"), **sound),
        "a storage of 2 ** 44 elements": archive(
            tensor(4, b"K\x04\x85", b"K\x01\x85").replace(number(4), huge), **sound
        ),
        "a storage of another type": archive(other, **sound),
        "no such storage": archive(good),
        "a storage out of the archive": archive(
            good.replace(text("0"), text("../../../etc/passwd")), **sound
        ),
        "a quantized tensor": archive(good.replace(b"_rebuild_tensor_v2", b"_rebuild_qtensor"), **sound),
        "a sparse tensor": archive(good.replace(b"_rebuild_tensor_v2", b"_rebuild_sparse_tensor"), **sound),
        "a big-endian machine": archive(good, byteorder=b"big", **sound),
        "a TorchScript archive": archive(good, constants__pkl=b"", **{"constants.pkl": b"x"}, **sound),
    }


def _long(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little")


LET_THROUGH = {
    "numbers that are in no file": b"\x80\x02ctorch\nTensor\n(" + number(2**10) + b"tR.",
    "a storage that is in no file": b"\x80\x02ctorch.storage\nUntypedStorage\n(" + number(2**10) + b"tR.",
    "bytes made of a number": b"\x80\x02c__builtin__\nbytearray\n(" + number(2**10) + b"tR.",
    "a tensor of nothing": b"\x80\x02ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n("
    + _long(2**44)
    + b"t("
    + number(1)
    + b"t\x89tR.",
    "an attribute in place of a method": b"\x80\x02ccollections\nOrderedDict\n)R}"
    + text("items")
    + b"K\x01sb.",
    "bytes behind the end": b"\x80\x02N.N.",
    "a bomb of shared lists": laughs(),
}
"""What torch's own restricted unpickler reads, though torch never writes it."""


def keys_that_cost() -> dict[str, bytes]:
    """Keys that are never to be hashed: torch's own restricted unpickler crashes, or takes a minute."""
    of_one_hash = b"".join(_long(factor * (2**61 - 1)) + b"N" for factor in range(1, 50_000))
    return {
        "nested tuples": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
        "integers of one hash": b"\x80\x02}(" + of_one_hash + b"u.",
    }


def _compressed(data: bytes, name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a/data.pkl", data, zipfile.ZIP_DEFLATED if name == "data.pkl" else zipfile.ZIP_STORED)
        if name != "data.pkl":
            file.writestr(f"a/{name}", bytes(2**26), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def broken_files() -> dict[str, bytes]:
    """Files that are damaged, cut, or bombs."""
    whole = saved({"a": torch.arange(64.0), "b": torch.ones(3)})
    legacy = io.BytesIO()
    torch.save({"a": torch.arange(64.0)}, legacy, _use_new_zipfile_serialization=False)
    old = legacy.getvalue()
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as file:
        for folder in "ab":
            file.writestr(f"{folder}/data.pkl", b"\x80\x02N.")
    lying = bytearray(whole)
    entry = lying.rindex(b"PK\x01\x02", 0, lying.rindex(b"/data/0"))
    lying[entry + 20 : entry + 28] = struct.pack("<II", 2**31, 2**31)
    flipped = bytearray(whole)
    flipped[flipped.index(struct.pack("<3f", 5, 6, 7))] ^= 1
    pickle_flipped = bytearray(whole)
    pickle_flipped[pickle_flipped.index(b"_rebuild_tensor_v2") + 3] ^= 1
    return {
        "nothing": b"",
        "a text": b"import os\nos.system('true')\n",
        "zeros": bytes(1000),
        "a tar": bytes(257) + b"ustar" + bytes(300),
        "a compressed pickle": _compressed(b"\x80\x02" + b"0" * 10**6, "data.pkl"),
        "a compressed storage": _compressed(tensor(2**24, b"K\x04\x85", b"K\x01\x85"), "data/0"),
        "two pickles in an archive": twice.getvalue(),
        "no pickle in an archive": archive(b"").replace(b"data.pkl", b"date.pkl"),
        "a record that claims 2 GiB": bytes(lying),
        "a flipped bit in a tensor": bytes(flipped),
        "a flipped bit in the pickle": bytes(pickle_flipped),
        "the first half": whole[: len(whole) // 2],
        "all but the last byte": whole[:-1],
        "only the end": whole[-100:],
        "legacy, cut in a tensor": old[:-30],
        "legacy, cut in the pickle": old[:150],
        "legacy, without its storages": old[: old.index(struct.pack("<Q", 64))],
        "legacy, a storage of another length": old.replace(struct.pack("<Q", 64), struct.pack("<Q", 2**50)),
    }


# --------------------------------------------------------------------------------------------- folders


def shards_elsewhere(folder: Path, marker: Path, port: int) -> Path:
    (folder.parent / "outside.bin").write_bytes(saved({"a": torch.ones(1)}))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../outside.bin"}}))
    return folder


def shards_linked(folder: Path, marker: Path, port: int) -> Path:
    (folder.parent / "outside.bin").write_bytes(saved({"a": torch.ones(1)}))
    (folder / "x.bin").symlink_to(folder.parent / "outside.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "x.bin"}}))
    return folder


def index_nested(folder: Path, marker: Path, port: int) -> Path:
    (folder / "pytorch_model.bin.index.json").write_text("[" * 100_000)
    return folder


def custom_object(folder: Path, marker: Path, port: int) -> Path:
    (folder / "pytorch_model.bin").write_bytes(saved({"a": torch.ones(1)}))
    (folder / "custom_checkpoint_0.pkl").write_bytes(called("os", "system", text(f"touch {marker}")))
    return folder


def random_states(folder: Path, marker: Path, port: int) -> Path:
    (folder / "pytorch_model.bin").write_bytes(saved({"a": torch.ones(1)}))
    (folder / "random_states_0.pkl").write_bytes(archive(called("os", "system", text(f"touch {marker}"))))
    return folder


def missing_second_optimizer(folder: Path, marker: Path, port: int) -> Path:
    (folder / "pytorch_model.bin").write_bytes(saved({"a": torch.ones(1)}))
    for name in ("optimizer.bin", "optimizer_2.bin"):
        (folder / name).write_bytes(saved({"state": {}, "param_groups": []}))
    return folder


def latest_elsewhere(folder: Path, marker: Path, port: int) -> Path:
    (folder / "latest").write_text("../../etc")
    return folder


def latest_linked(folder: Path, marker: Path, port: int) -> Path:
    (folder / "latest").symlink_to("/etc/hostname")
    return folder


def tag_linked(folder: Path, marker: Path, port: int) -> Path:
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "mp_rank_00_model_states.pt").write_bytes(saved({"module": {"a": torch.ones(1)}}))
    (folder / "latest").write_text("global_step1")
    (folder / "global_step1").symlink_to(outside)
    return folder


def pipe(folder: Path, marker: Path, port: int) -> Path:
    import os

    os.mkfifo(folder / "optimizer.bin")
    (folder / "pytorch_model.bin").write_bytes(saved({"a": torch.ones(1)}))
    return folder


class Metadata:
    """Writes ``.metadata`` of torch.distributed.checkpoint with one tensor "a" of two rows, as it should be or not."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def __call__(self, folder: Path, marker: Path, port: int) -> Path:
        from torch.distributed.checkpoint import filesystem, metadata

        rows = [saved(torch.full((1, 2), float(i))) for i in range(2)]
        (folder / "__0_0.distcp").write_bytes(b"".join(rows))
        (folder.parent / "outside.distcp").write_bytes(b"".join(rows))
        change = self.changes.get
        offsets = change("offsets", [0, 1])
        chunks = [
            metadata.ChunkStorageMetadata(torch.Size((offset, 0)), torch.Size(change("sizes", (1, 2))))
            for offset in offsets
        ]
        tensor_ = metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=change("dtype", torch.float32)),
            torch.Size(change("size", (2, 2))),
            chunks,
        )
        places = {
            metadata.MetadataIndex("a", chunk.offsets): filesystem._StorageInfo(
                change("path", "__0_0.distcp"),
                change("start", i * len(rows[0])),
                change("length", len(rows[i])),
            )
            for i, chunk in enumerate(chunks)
        }
        if change("lost"):
            places.popitem()
        described = {"a": tensor_, **change("more", {})}
        whole = metadata.Metadata(described, change("planner", {"a": ("a",)}), places)
        if change("link"):
            (folder / "__0_0.distcp").unlink()
            (folder / "__0_0.distcp").symlink_to(folder.parent / "outside.distcp")
        if change("gone"):
            (folder / "__0_0.distcp").unlink()
        (folder / ".metadata").write_bytes(pickle.dumps(whole))
        return folder


def hostile_metadata(folder: Path, marker: Path, port: int) -> Path:
    (folder / ".metadata").write_bytes(called("os", "system", text(f"touch {marker}"), "STACK_GLOBAL"))
    return folder


def hostile_chunk(folder: Path, marker: Path, port: int) -> Path:
    """A BYTES item of DCP that is a hostile file of torch.save."""
    from torch.distributed.checkpoint import filesystem, metadata

    data = archive(called("posix", "system", text(f"touch {marker}")))
    (folder / "__0_0.distcp").write_bytes(data)
    places = {metadata.MetadataIndex("epoch"): filesystem._StorageInfo("__0_0.distcp", 0, len(data))}
    whole = metadata.Metadata({"epoch": metadata.BytesStorageMetadata()}, {"epoch": ("epoch",)}, places)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    return folder


class Zero:
    """Copies the fixture of ZeRO stage 1 and changes it."""

    def __init__(self, change: Callable[[Path], None]) -> None:
        self.change = change

    def __call__(self, folder: Path, marker: Path, port: int) -> Path:
        import shutil

        fixture = Path(__file__).parent / "fixtures" / "zero1" / "checkpoint"
        shutil.copytree(fixture, folder, dirs_exist_ok=True)
        self.change(folder / "global_step3")
        return folder


def _rank_1(folder: Path) -> Path:
    return folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"


FOLDERS: dict[str, Build] = {
    "shards in another folder": shards_elsewhere,
    "a linked shard": shards_linked,
    "a deeply nested index": index_nested,
    "a hostile registered object": custom_object,
    "hostile random states": random_states,
    "an optimizer that is missing": missing_second_optimizer,
    "latest names another folder": latest_elsewhere,
    "latest is a link": latest_linked,
    "the tag's folder is a link": tag_linked,
    "a pipe instead of a file": pipe,
    "hostile metadata": hostile_metadata,
    "a hostile chunk": hostile_chunk,
    "a chunk in the folder above": Metadata(path="../outside.distcp"),
    "a chunk at an absolute path": Metadata(path="/etc/passwd"),
    "a chunk in a hidden file": Metadata(path=".metadata"),
    "a chunk with NUL in its name": Metadata(path="__0_0.distcp\0x"),
    "a chunk in a file that is a link": Metadata(link=True),
    "a chunk in a file that is missing": Metadata(gone=True),
    "a chunk behind the end": Metadata(start=10**9),
    "a chunk of negative length": Metadata(length=-5),
    "a chunk of 2 ** 60 bytes": Metadata(length=2**60),
    "a chunk without a place": Metadata(lost=True),
    "chunks on each other": Metadata(offsets=[0, 0]),
    "chunks with a gap": Metadata(size=(3, 2)),
    "chunks outside of the tensor": Metadata(offsets=[0, 5]),
    "a tensor of 2 ** 60 elements": Metadata(size=(2**30, 2**30)),
    "chunks of another shape": Metadata(sizes=(2, 1)),
    "chunks of another dtype": Metadata(dtype=torch.int64),
    "a path that is no path": Metadata(planner={"a": 7}),
    "a path through a tensor": Metadata(planner={"a": ("x", 5)}),
    "ZeRO without a rank": Zero(lambda folder: _rank_1(folder).unlink()),
    "ZeRO with a cut rank": Zero(
        lambda folder: void(_rank_1(folder).write_bytes(_rank_1(folder).read_bytes()[:900]))
    ),
    "ZeRO with another rank's file": Zero(
        lambda folder: void(_rank_1(folder).write_bytes(saved({"optimizer_state_dict": {}})))
    ),
    "ZeRO over tensor ranks": Zero(
        lambda folder: void(_rank_1(folder).rename(folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt"))
    ),
    "ZeRO without a model": Zero(lambda folder: (folder / "mp_rank_00_model_states.pt").unlink()),
}


def void(_: object) -> None:
    """For expressions where a statement is meant."""
