"""Hostile files are refused in words; nothing runs, connects, writes or opens anything outside of the source."""

from __future__ import annotations

import inspect
import io
import json
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.compat.checkpoints import Encoder, Machine, UnreadableError, decode, read_foreign, unpickle
from lockstep.errors import CheckpointError

from . import hostile

RESTRICTED = Path(inspect.getfile(unpickle)).parent
PLACEHOLDER = Path("marker"), 1
# The thread of the hang watch reads it now and then.
OF_WATCH = Path(f"/proc/{os.getpid()}/schedstat")
_log: list[tuple[str, tuple[Any, ...]]] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _log is not None and event.split(".")[0] in (
        "open",
        "os",
        "subprocess",
        "socket",
        "pickle",
        "exec",
        "ctypes",
    ):
        _log.append((event, arguments))


@pytest.fixture(scope="module", autouse=True)
def _watched() -> None:
    sys.addaudithook(_audit)  # there is no way to remove it


class Trap:
    """Sees whether a hostile file got anything done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "source"
        self.folder.mkdir()
        self.marker = folder / "marker"
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(0)

    @property
    def port(self) -> int:
        return int(self.server.getsockname()[1])

    def refused(self, source: Path) -> str:
        """Import ``source``, which must be refused without a trace; returns the message."""
        global _log
        _log = []
        try:
            with pytest.raises(CheckpointError) as refusal:
                read_foreign(source)
        finally:
            events, _log = _log, None
        assert not self.marker.exists()
        with pytest.raises(BlockingIOError):
            self.server.accept()
        self._check(events)
        message = str(refusal.value)
        assert message.isprintable() and len(message) < 1500
        return message

    def _check(self, events: list[tuple[str, tuple[Any, ...]]]) -> None:
        for event, arguments in events:
            if event == "open" and isinstance(arguments[0], (str, bytes)):
                path = Path(os.fsdecode(arguments[0]))
                if path == OF_WATCH:
                    continue
                # Names without a folder are opened relative to the source's descriptor.
                inside = not path.is_absolute() and len(path.parts) == 1
                assert inside or path.is_relative_to(self.folder) or path.suffix in (".py", ".pyc"), path
            elif event == "subprocess.Popen":
                assert arguments[0] == sys.executable and arguments[1][1:4] == ["-I", "-S", "-B"]
                assert arguments[3] == {}
            assert event.split(".")[0] not in ("pickle", "socket", "ctypes"), (event, arguments)
            assert event not in ("os.system", "os.exec", "os.fork"), event


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Trap]:
    made = Trap(tmp_path)
    yield made
    made.server.close()


WHOLE = [name for name in hostile.calls(*PLACEHOLDER) if " " in name or name in ("os.system", "torch.load")]


@pytest.mark.parametrize("name", WHOLE)
def test_a_call_is_refused_by_its_name(name: str, trap: Trap) -> None:
    path = trap.folder / "model.pt"
    path.write_bytes(hostile.archive(hostile.calls(trap.marker, trap.port)[name]))
    assert name.split(" ")[0] in trap.refused(path)


@pytest.mark.parametrize("name", hostile.calls(*PLACEHOLDER))
def test_no_name_is_more_than_a_text(name: str) -> None:
    """Read in this process: a name that is not on the list does nothing, and decoding it ends at it."""
    data = hostile.calls(*PLACEHOLDER)[name]
    value = Encoder(len(data)).encode(Machine(io.BytesIO(data)).run())
    with pytest.raises(UnreadableError, match=re.escape(name.split(" ")[0])):
        decode(json.loads(json.dumps(value)))


FILES = {
    **hostile.misuse(),
    **{
        f"{name}, in an archive": hostile.archive(data)
        for name, data in (hostile.LET_THROUGH | hostile.keys_that_cost()).items()
    },
    **hostile.misuse_of_tensors(),
    **hostile.broken_files(),
}


@pytest.mark.parametrize("name", FILES)
def test_misused_names_and_sizes_and_broken_files_are_refused(name: str, trap: Trap) -> None:
    path = trap.folder / "model.pt"
    path.write_bytes(FILES[name])
    trap.refused(path)


@pytest.mark.parametrize("name", hostile.LET_THROUGH)
def test_torchs_own_unpickler_still_lets_it_through(name: str) -> None:
    """Else the reasons in docs/importing-checkpoints.md for not using it are to be looked at again."""
    archive = hostile.archive(hostile.LET_THROUGH[name], version=b"3\n", byteorder=b"little")
    torch.load(io.BytesIO(archive), weights_only=True)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_torchs_own_unpickler_still_does_not_read_the_metadata_of_dcp() -> None:
    metadata = (Path(hostile.__file__).parent / "fixtures" / "dcp" / "checkpoint" / ".metadata").read_bytes()
    with pytest.raises(pickle.UnpicklingError, match="Unsupported operand 149"):  # a frame, of protocol 4
        torch.load(io.BytesIO(metadata), weights_only=True)


@pytest.mark.parametrize("name", hostile.FOLDERS)
def test_a_hostile_folder_is_refused(name: str, trap: Trap) -> None:
    trap.refused(hostile.FOLDERS[name](trap.folder, trap.marker, trap.port))


def test_the_folder_that_the_hostile_ones_are_made_of_is_read(trap: Trap) -> None:
    """Else they would be refused for being made wrongly."""
    state = read_foreign(hostile.Metadata()(trap.folder, trap.marker, trap.port))
    assert state.models[0]["a"].tolist() == [[0, 0], [1, 1]]


def test_the_tensor_that_the_hostile_ones_are_made_of_is_read(trap: Trap) -> None:
    path = trap.folder / "model.pt"
    data = b"\x80\x02}" + hostile.text("a") + hostile.tensor(4, b"K\x04\x85", b"K\x01\x85")[2:-1] + b"s."
    path.write_bytes(hostile.archive(data, data__0=bytes(16)))
    assert read_foreign(path).models[0]["a"].tolist() == [0, 0, 0, 0]


def test_a_hostile_part_can_be_left_out(trap: Trap) -> None:
    folder = hostile.custom_object(trap.folder, trap.marker, trap.port)
    state = read_foreign(folder, skip=["custom_checkpoint_0.pkl"])
    assert state.models[0]["a"].tolist() == [1] and not trap.marker.exists()


def test_a_refusal_says_which_file_and_what_to_do(trap: Trap) -> None:
    message = trap.refused(hostile.custom_object(trap.folder, trap.marker, trap.port))
    assert "custom_checkpoint_0.pkl was refused: it needs os.system" in message
    assert "skip ('custom_checkpoint_0.pkl')" in message


# ------------------------------------------------------------------------- the second layer, by itself


def in_jail(
    code: str, *arguments: str, hook: bool = True, pass_fds: tuple[int, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process that is locked as the restricted one is, after the imports that it may want."""
    before = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import os, socket, subprocess, pickle, ctypes, resource, io, mmap, signal, threading, gc, marshal\n"
        f"from restricted.jail import {'lock' if hook else 'limit'} as close\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "close(2**32, 20)\n"
    )
    command = [sys.executable, "-I", "-S", "-B", "-c", before + code, str(RESTRICTED), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={}, timeout=60, pass_fds=pass_fds, check=False
    )


FORBIDDEN = {
    "os.system": "os.system('touch ' + sys.argv[2])",
    "subprocess": "subprocess.Popen(['touch', sys.argv[2]])",
    "os.fork": "os.fork()",
    "open for writing": "open(sys.argv[2], 'w')",
    "open for reading": "open('/etc/hostname')",
    "os.listdir": "os.listdir('/')",
    "socket": "socket.socket()",
    "import": "import decimal",
    "exec": "exec('1')",
    "pickle": "pickle.loads(pickle.dumps(os.system))",
    "marshal": "marshal.loads(marshal.dumps(1))",
    "ctypes.dlopen": "ctypes.CDLL('libm.so.6')",
    "mmap": "mmap.mmap(-1, 4096)",
    "signal": "os.kill(os.getppid(), 0)",
    "another hook": "sys.addaudithook(print)",
    "frames": "sys._getframe()",
    "garbage": "gc.get_objects()",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_process_ends_at_whatever_is_not_reading(name: str, tmp_path: Path) -> None:
    ended = in_jail(FORBIDDEN[name] + "\nprint('survived')", str(tmp_path / "marker"))
    assert (ended.returncode, ended.stdout) == (86, "")
    assert ended.stderr.startswith("did ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["os.system", "subprocess.Popen", "builtins.eval", "_io.FileIO", "ctypes.CDLL"]
)
def test_pythons_own_unpickler_would_be_ended_too(name: str, trap: Trap) -> None:
    """The process holds without the interpreter of opcodes: with Python's unpickler in its place."""
    data = hostile.calls(trap.marker, trap.port)[name]
    ended = in_jail(f"pickle.loads({data!r})\nprint('survived')")
    assert (ended.returncode, ended.stdout) == (86, "")
    assert not trap.marker.exists()
    with pytest.raises(BlockingIOError):
        trap.server.accept()


KERNEL = {
    "a file cannot be opened": ("open('/etc/hostname')", "Too many open files"),
    "a socket cannot be made": ("socket.socket()", "Too many open files"),
    "an open file cannot be written": ("os.write(int(sys.argv[2]), b'x')", "File too large"),
    "memory is bounded": ("bytearray(2**33)", "MemoryError"),
    "limits cannot be raised": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))", "not allowed to raise maximum limit",
    ),
    "no new privileges": ("assert libc.prctl(39, 0, 0, 0, 0) == 1; sys.exit('confirmed')", "confirmed"),
    "no capabilities, even for root": (
        "data = (ctypes.c_uint32 * 6)(*[1] * 6); libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data); "
        "sys.exit(f'has {list(data)}')",
        "has [0, 0, 0, 0, 0, 0]",
    ),
    "it ends with its parent": (
        "n = ctypes.c_int(); libc.prctl(2, ctypes.byref(n), 0, 0, 0); sys.exit(f'signal {n.value}')", "signal 9",
    ),
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="these are limits of Linux")
@pytest.mark.parametrize("name", KERNEL)
def test_the_kernel_holds_without_the_hook(name: str, tmp_path: Path) -> None:
    code, said = KERNEL[name]
    code = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + code
    with open(tmp_path / "open", "wb") as file:
        ended = in_jail(code, str(file.fileno()), hook=False, pass_fds=(file.fileno(),))
    assert ended.returncode != 0
    assert said in ended.stderr
    assert (tmp_path / "open").read_bytes() == b""
