"""What a spare process does before its script: imports, waits, and then lets Python go on as if nothing had been."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import site
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from lockstep.config.sources import IMPORTS_VARIABLE, environment_digests
from lockstep.launch.bare import SPARE_VARIABLE as VARIABLE
from lockstep.launch.spare import preload
from lockstep.launch.spare.preload import EnvironmentReads, Unfit
from lockstep.launch.spare.prologue import Prologue, Target, read_prologue, target_of

ONLY_TOP = "top"
"""Third part of the variable's value: no modules but those that the script imports at its top."""
NAME = b"lockstep-spare"
READY = NAME + b"\0ready"
CHUNK = 1 << 16


@dataclass
class Spare:
    """One spare process, seen from inside.

    ``environment`` is what its worker has got at its start, in the round before.
    """

    channel: socket.socket
    only_top: bool
    environment: dict[str, str]
    baseline: Collection[str]
    output: PrintedEarly
    command_line: CommandLine
    reads: EnvironmentReads = field(default_factory=EnvironmentReads)
    target: Target | None = None
    prologue: Prologue = field(default_factory=Prologue)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)

    def send(self, **facts: object) -> None:
        """One line to the launcher; without a launcher there is nobody to wait for."""
        try:
            self.channel.sendall(json.dumps(facts).encode() + b"\n")
        except OSError:
            os._exit(0)

    def is_ready(self) -> None:
        """Say so to the launcher, and to people who look at processes."""
        self.command_line.show(READY)
        self.send(state="ready")


def wait_for_round(place: str, baseline: Collection[str]) -> bool:
    """Import what the script of this command will import, and return when the launcher wants it to begin.

    Args:
        place: The folder of ``sitecustomize``, by which Python came here.
        baseline: The modules that any interpreter has at this point.

    Returns:
        Whether the machine has a ``sitecustomize`` of its own, which stands in ``sys.modules`` now.
    """
    # token:descriptor, and ``ONLY_TOP`` in a process that has begun once more.
    token, descriptor, *rest = os.environ[VARIABLE].split(":")
    raw = {**os.environ}
    _leave_out(place)
    environment = dict(os.environ)
    is_theirs = _import_theirs()
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)
    spare = Spare(channel, ONLY_TOP in rest, environment, baseline, PrintedEarly(), CommandLine())
    spare.command_line.show(NAME)
    try:
        _preload(spare)
        spare.is_ready()
        environment, descriptors = _wait(spare)
    except Unfit as error:
        # What the last process imported later may be at fault: once more without that.
        if spare.target is not None and not spare.only_top and _has_top(spare):
            spare.output.restore(())
            spare.send(state="")
            _again_without_late(raw, token, channel)
        spare.send(state="unfit", why=str(error))
        os._exit(0)
    spare.output.restore(descriptors)
    why = _stale(spare, environment)
    spare.command_line.restore()
    spare.send(state="cold" if why else "warm", why=why)
    if why:
        # What was imported is of no use: the interpreter begins anew, as a new process would.
        os.execvpe(sys.orig_argv[0], sys.orig_argv, environment)
    spare.output.replay()
    for name in preload.changed(spare.environment, environment):
        if name in environment:
            os.environ[name] = environment[name]
        else:
            os.environ.pop(name, None)
    channel.close()
    importlib.invalidate_caches()
    return is_theirs


def _leave_out(place: str) -> None:
    """Environment and path as Python would have made them without this folder."""
    del os.environ[VARIABLE]
    python_path = os.environ["PYTHONPATH"]
    first, separator, others = python_path.partition(os.pathsep)
    if separator:
        os.environ["PYTHONPATH"] = others
    else:
        del os.environ["PYTHONPATH"]
    if os.path.abspath(first) != place:
        raise Unfit("PYTHONPATH was changed")
    sys.path.remove(place)
    sys.path_importer_cache.pop(place, None)


def _import_theirs() -> bool:
    """As Python would have done; whether there is a ``sitecustomize`` beside ours."""
    ours = sys.modules.pop("sitecustomize")
    if PathFinder.find_spec("sitecustomize") is None:
        sys.modules["sitecustomize"] = ours
        return False
    importlib.import_module("sitecustomize")
    return True


def _preload(spare: Spare) -> None:
    if site.ENABLE_USER_SITE and PathFinder.find_spec("usercustomize") is not None:
        raise Unfit("there is a usercustomize, which Python imports first")
    spare.target = target_of(sys.orig_argv, sys.orig_argv[0], sys.path)
    if spare.target is None:
        raise Unfit("the command is no Python script, nor a module run by -m")
    with preload.watched_reads(spare.reads), preload.libraries_only(spare.target.first_path) as libraries:
        try:
            spare.prologue = read_prologue(spare.target.files, libraries.has_package)
        except (OSError, SyntaxError, ValueError) as error:
            raise Unfit(f"the script cannot be read: {error}") from None
        preload.run_imports(spare.prologue.imports)
    if "torch" not in sys.modules:
        raise Unfit(f"{spare.prologue.end or 'the script'} comes before `import torch`")
    _check_no_device()
    _preload_late(spare)
    gc.collect()
    spare.files = preload.files_of(list(sys.modules.values()))


def _preload_late(spare: Spare) -> None:
    """What the last process had imported after its first lines; only once :func:`_has_top` is sure of the rest."""
    path = spare.environment.get(IMPORTS_VARIABLE)
    if spare.only_top or not path:
        return
    assert spare.target is not None
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # It is being written, or its process has been started again.
        return
    state, written = _random_state(), spare.output.size()
    reads = EnvironmentReads()
    set_by_script = preload.changed(record["environment"], environment_digests())
    with preload.watched_reads(reads), preload.libraries_only(spare.target.first_path):
        preload.import_all(record["modules"])
    spare.reads.names |= reads.names
    # Imports set variables, too.
    set_by_script &= preload.changed(record["environment"], environment_digests())
    if found := reads.matter(set_by_script):
        raise Unfit(f"the script sets {', '.join(found)}")
    if _random_state() != state:
        raise Unfit("an import draws random numbers")
    if spare.output.size() != written:
        raise Unfit("an import prints")
    _check_no_device()
    spare.files = preload.files_of(list(sys.modules.values()))


def _has_top(spare: Spare) -> bool:
    return "torch" in sys.modules and bool(spare.prologue.imports)


def _random_state() -> bytes:
    return bytes(sys.modules["torch"].get_rng_state().tolist())


def _check_no_device() -> None:
    """Raise Unfit if an import has opened an accelerator: what the script says of devices would come too late."""
    for entry in os.scandir("/proc/self/fd"):
        try:
            file = os.readlink(entry.path)
        except OSError:
            # A descriptor that is closed by now, such as that of the scan.
            continue
        if file.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
            raise Unfit(f"importing its libraries opens {file}")


def _again_without_late(raw: Mapping[str, str], token: str, channel: socket.socket) -> NoReturn:
    """This process from its beginning, without the modules that the script does not import at its top."""
    channel.set_inheritable(True)
    os.execve(sys.executable, sys.orig_argv, {**raw, VARIABLE: f"{token}:{channel.fileno()}:{ONLY_TOP}"})


def _wait(spare: Spare) -> tuple[dict[str, str], list[int]]:
    """The variables of the worker that this process is to be, and files for its standard output and error, if any.

    Raises:
        Unfit: what the last process has imported meanwhile cannot be imported here.
    """
    received = b""
    descriptors: list[int] = []
    while True:
        data, files, _, _ = socket.recv_fds(spare.channel, CHUNK, 2)
        descriptors += files
        # The launcher has ended, or has no use for this process.
        if not data:
            os._exit(0)
        received += data
        while b"\n" in received:
            line, _, received = received.partition(b"\n")
            message = json.loads(line)
            if "environment" in message:
                spare.send(state="taken")
                return message["environment"], descriptors
            _preload_late(spare)
            spare.is_ready()


def _stale(spare: Spare, environment: Mapping[str, str]) -> str:
    """Why what was imported is not what the script would import now; "": it is."""
    assert spare.target is not None
    found = spare.reads.matter(preload.changed(spare.environment, environment))
    if found:
        return f"its libraries read {', '.join(found)} when they are imported"
    for file, before in spare.files.items():
        if preload.stamp(file) != before:
            return f"{file} has changed"
    modules = {name.partition(".")[0] for name in set(sys.modules) - set(spare.baseline)}
    if hiding := preload.shadowed(spare.target.first_path, modules):
        return f"{hiding[0]} is in {spare.target.first_path} now"
    try:
        now = read_prologue(spare.target.files, preload.Libraries().has_package)
    except (OSError, SyntaxError, ValueError) as error:
        return f"the script cannot be read: {error}"
    if now.imports[: len(spare.prologue.imports)] != spare.prologue.imports:
        return "the imports at the top of the script have changed"
    return ""


class CommandLine:
    """What other processes see of ``sys.argv``: people who look for their script shall not find a spare process."""

    def __init__(self) -> None:
        # Fields 48 and 49 are where the arguments begin and end; behind the name comes field 3.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._start, end = int(fields[45]), int(fields[46])
        self._original = ctypes.string_at(self._start, end - self._start)

    def show(self, text: bytes) -> None:
        """Something else, in the same room."""
        room = len(self._original)
        ctypes.memmove(self._start, text[: room - 1].ljust(room, b"\0"), room)

    def restore(self) -> None:
        """What it was."""
        ctypes.memmove(self._start, self._original, len(self._original))


class PrintedEarly:
    """Keeps what is written to standard output and error, and writes it where it belongs once that is known."""

    def __init__(self) -> None:
        self._own = [os.dup(number) for number in (1, 2)]
        self._kept = [os.memfd_create("output") for _ in self._own]
        for number, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, number)

    def size(self) -> int:
        """Bytes that were written so far."""
        sys.stdout.flush()
        sys.stderr.flush()
        return sum(os.fstat(kept).st_size for kept in self._kept)

    def restore(self, descriptors: Sequence[int]) -> None:
        """Standard output and error as they were, or these files."""
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in zip((1, 2), descriptors or self._own, strict=True):
            os.dup2(file, number)
        for file in (*descriptors, *self._own):
            os.close(file)

    def replay(self) -> None:
        """Write what the imports have written."""
        for number, kept in zip((1, 2), self._kept, strict=True):
            os.lseek(kept, 0, os.SEEK_SET)
            while data := os.read(kept, CHUNK):
                while data:
                    data = data[os.write(number, data) :]
            os.close(kept)
