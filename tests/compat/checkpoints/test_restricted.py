"""The interpreter of opcodes agrees with Python's pickle wherever it reads; the process's answers are checked again."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.compat.checkpoints import (
    Encoder,
    FileSlice,
    Machine,
    MappedFile,
    RefusedError,
    RefusedFile,
    Scratch,
    Storage,
    UnreadableError,
    decode,
    find_pickles,
    read_foreign,
    unpickle,
)
from lockstep.errors import CheckpointError
from tests.marks import examples
from tests.patching import module_of
from tests.refusals import expect_refusal

PROTOCOLS = [2, 3, 4, 5]
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**100), 2**100)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(-(2**50), 2**50), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


def through(data: bytes) -> Any:
    """What the pickle means, by the interpreter, JSON and back."""
    value = Machine(io.BytesIO(data)).run()
    return decode(json.loads(json.dumps(Encoder(len(data)).encode(value))))


@examples(150)
@given(value=plain, protocol=st.sampled_from(PROTOCOLS))
def test_plain_values_are_read_as_pickle_reads_them(protocol: int, value: Any) -> None:
    found = through(pickle.dumps(value, protocol))
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("protocol", [0, 1, *PROTOCOLS])
def test_containers_arrays_and_types_are_read_in_every_protocol(protocol: int) -> None:
    ordered = OrderedDict([("b", 1), ("a", [True, False, None])])
    ordered["self"] = ordered["a"]  # by reference
    value = {
        "ordered": ordered,
        "counter": Counter("aab"),
        "default": defaultdict(list, {"x": [1]}),
        "sets": [{1, 2}, frozenset({"y"}), deque([1, 2])],
        "numbers": [0, -1, 255, 65535, 2**31, 2**64, -(2**63), 1.5, float("inf")],
        "dtype": torch.float16,
        "size": torch.Size([2, 3]),
        "text": "naïve ☃ \ud800 \n\\",
    }
    found = through(pickle.dumps(value, protocol))
    expected = {**value, "ordered": dict(ordered), "default": {"x": [1]}, "size": (2, 3)}
    assert found == expected
    assert isinstance(found["counter"], Counter) and isinstance(found["sets"][2], deque)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", ["?", "<i1", "<u2", "<i4", "<u4", "<i8", "<f2", "<f4", "<f8"])
def test_arrays_and_scalars_of_numpy_are_read(protocol: int, dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    for value in (array, np.asfortranarray(array), array[:, :0]):
        found = through(pickle.dumps(value, protocol))
        assert found.dtype == value.dtype and found.shape == value.shape and (found == value).all()
    assert through(pickle.dumps(array[1, 2], protocol)) == array[1, 2].item()


@examples(300)
@given(st.binary(max_size=60), st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_any_bytes_end_in_a_value_or_a_refusal(noise: bytes, position: int, change: bytes) -> None:
    whole = pickle.dumps({"a": [1, 2.5, "x" * 20, OrderedDict(b=torch.float32)], "c": (1, {2})}, 2)
    changed = whole[:position] + change + whole[position + len(change) :]
    for data in (noise, b"\x80\x02" + noise, changed):
        with contextlib.suppress(RefusedFile):
            value = Encoder(len(data)).encode(Machine(io.BytesIO(data)).run())
            with contextlib.suppress(UnreadableError):
                decode(json.loads(json.dumps(value)))


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
# torch.load itself cannot read these from the form before 1.6.
NEWER = [
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_tensors_of_all_dtypes_and_strides_are_those_that_torch_loads(zipped: bool, tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    values = {str(dtype): base.to(dtype) for dtype in DTYPES + (NEWER if zipped else [])}
    values |= {
        "transposed": base.t(), "strided": base[::2, 1::2], "shared": base[2:], "scalar": base[3, 3], "empty": base[:0],
        "parameter": torch.nn.Parameter(base[1].clone()), "whole": base,
    }  # fmt: skip
    path = tmp_path / "model.pt"
    torch.save(values, path, _use_new_zipfile_serialization=zipped)
    found = read_foreign(path).models[0]
    loaded = torch.load(path, weights_only=True)
    assert found.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].stride() == tensor.stride() or tensor.numel() == 0
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*raw)


def test_a_large_legacy_file_is_not_held_in_memory_by_the_process(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save({"a": torch.zeros(2**25, dtype=torch.uint8)}, path, _use_new_zipfile_serialization=False)
    with open(path, "rb") as file:
        (answer,) = unpickle([(file.fileno(), 0, 5)], memory_bytes=2**25)
    assert answer["storages"][0]["items"][4] == 2**25


# ------------------------------------------------------------------- what the parent makes of an answer


def listed(*items: Any) -> dict[str, Any]:
    return {"$": "tuple", "items": list(items)}


def called(module: str, name: str, *arguments: Any, **more: Any) -> dict[str, Any]:
    return {"$": "call", "items": [{"$": "name", "items": [module, name]}, listed(*arguments)], **more}


def tensor(offset: Any = 0, shape: Any = (4,), stride: Any = (1,), storage: Any = 0) -> dict[str, Any]:
    arguments = ({"$": "storage", "items": [storage]}, offset, listed(*shape), listed(*stride))
    return called("torch._utils", "_rebuild_tensor_v2", *arguments)


def array(code: str = "f4", shape: Any = (0,), data: str = "") -> dict[str, Any]:
    dtype = called("numpy", "dtype", code, False, True, state=listed(3, "<"))
    numpy, content = {"$": "name", "items": ["numpy", "ndarray"]}, {"$": "bytes", "value": data}
    state = listed(1, listed(*shape), dtype, False, content)
    return called("numpy._core.multiarray", "_reconstruct", numpy, state=state)


@pytest.mark.parametrize(
    "answer",
    [
        tensor(storage=1),
        tensor(storage="0"),
        tensor(shape=[5]),
        tensor(shape=[2**40], stride=[0]),
        tensor(shape=[-1]),
        tensor(shape=[True]),
        tensor(stride=[1, 1]),
        tensor(stride=[2**62]),
        tensor(offset=1),
        tensor(offset=-1),
        tensor(shape=[1] * 100, stride=[1] * 100),
        {"$": "storage", "items": [0]},
        {"$": "name", "items": ["torch", "Tensor"]},
        {"$": "name", "items": ["torch"]},
        {"$": "call", "items": []},
        {"$": "code", "value": "x"},
        {"value": 1},
        {"$": "dict", "items": [], "pairs": [[1]]},
        {"$": "dict", "items": [], "pairs": [[[], 1]]},
        {"$": "dict", "items": [], "pairs": [[1.5, 1]]},
        {"$": "dict", "items": [], "pairs": [[2**61 - 1, 1]]},
        {"$": "set", "items": [{"$": "int", "value": hex(2**61 - 1)}]},
        {"$": "int", "value": "zz"},
        {"$": "bytes", "value": "?"},
        called("numpy", "dtype", "O8"),
        called("numpy._core.multiarray", "_reconstruct", {"$": "name", "items": ["numpy", "ndarray"]}),
        array(shape=[9]),
        called("torch", "Size", [1], state={"$": "dict", "items": []}),
        called("collections", "OrderedDict", state={"$": "dict", "items": [], "pairs": [["keys", 1]]}),
    ],
)
def test_an_answer_that_lies_is_refused(answer: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(16))
    with open(path, "rb") as file:
        mapped = MappedFile(file.fileno(), "file", Scratch())
    storage = Storage(mapped, torch.float32, 0, 16, None)
    assert decode(tensor(), [storage]).tolist() == [0, 0, 0, 0]
    with pytest.raises(UnreadableError):
        decode(answer, [storage])


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the restricted process run ``code`` instead."""
    monkeypatch.setattr(module_of(unpickle), "_CODE", "import os, sys, time; sys.stdin.read()\n" + code)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os._exit(0)", "exit code 0"),
        ("os.kill(os.getpid(), 9)", "signal 9"),
        (
            'print(\'{"values": [], "storages": [], "end": 0}\')\nsys.exit(\'gave up \\x1b[31m\')',
            r"gave up \?\[31m",
        ),
        ("print('x')", "it said: x"),
        ("print('[' * 100000)", r"it said: \[\["),
        ("print('[1, 2]')", r"it said: \[1, 2\]"),
    ],
)
def test_a_process_that_ends_oddly_is_reported(code: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, code)
    with pytest.raises(RefusedError, match=said):
        unpickle([(0, 0, 1), (0, 0, 1)])


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "time.sleep(600)")
    expect_refusal(CheckpointError, "1 s", unpickle, [(0, 0, 1)], wall_s=1)


def test_a_process_that_floods_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "while True: os.write(1, b'x' * 2**16)")
    monkeypatch.setattr(module_of(unpickle), "MAX_ANSWER_BYTES", 2**20)
    expect_refusal(CheckpointError, "1048576", unpickle, [(0, 0, 1)])


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_locked_process_asks_the_kernel_for_reading_only(tmp_path: Path) -> None:
    """Counted by strace: from the last limit on, pread of the source, writes of the answer, memory, the end."""
    path, log = tmp_path / "model.pt", tmp_path / "log"
    torch.save({"a": torch.ones(3), "b": [1, "x"]}, path)
    with open(path, "rb") as file:
        part = [file.fileno(), find_pickles(FileSlice(file.fileno(), 0, path.stat().st_size)).start, 1]
        request = json.dumps({"memory": 2**32, "cpu_s": 20, "parts": [part]})
        python = [
            sys.executable,
            "-I",
            "-S",
            "-B",
            "-c",
            module_of(unpickle)._CODE,
            str(Path(inspect.getfile(unpickle)).parent),
        ]
        subprocess.run(
            ["strace", "-o", str(log), *python], input=request, text=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=[file.fileno()], timeout=60, check=True,
        )  # fmt: skip
    lines = log.read_text().splitlines()
    locked = next(i for i, line in enumerate(lines) if "RLIMIT_NOFILE, {rlim_cur=0" in line)
    asked = Counter(line.split("(")[0] for line in lines[locked + 1 :] if "(" in line)
    assert asked.pop("read") > 0 and asked.pop("write") == 1 and asked.pop("exit_group") == 1
    assert asked.keys() <= {"lseek", "brk", "mmap", "munmap", "mremap", "madvise"}


def test_the_process_inherits_no_variables_and_no_other_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    listed = "import json\nopen_ = sorted(os.listdir('/proc/self/fd'))\n"
    monkeypatch.setattr(module_of(unpickle), "_CODE", "import os, sys; sys.stdin.read()\n" + listed + (
        "said = [dict(os.environ), open_, os.getcwd(), sys.flags.isolated, sys.flags.no_site]\n"
        "print(json.dumps({'values': said, 'storages': [], 'end': 0}))"
    ))  # fmt: skip
    with open(tmp_path / "other", "wb") as other, open(tmp_path / "file", "wb") as file:
        os.set_inheritable(other.fileno(), True)
        (answer,) = unpickle([(file.fileno(), 0, 0)])
        environment, descriptors, folder, isolated_, no_site = answer["values"]
        assert set(environment) <= {"LC_CTYPE"} and (folder, isolated_, no_site) == ("/", 1, 1)
        extra = [int(d) for d in descriptors if int(d) > 2]
        # The file, and the listing itself.
        assert file.fileno() in extra and other.fileno() not in extra and len(extra) <= 2
