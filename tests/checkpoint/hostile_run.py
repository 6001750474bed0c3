"""Load hostile checkpoints under an audit hook, which no process gets rid of: run as a program of its own.

python hostile_run.py FOLDER RESULTS [FIRST [LAST]]
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoint.draft import Draft
from checkpoint.hostile import Case, cases
from checkpoint.subject import Subject
from lockstep.checkpoint.format import TensorReader
from lockstep.errors import LockstepError
from patching import module_of

WATCHED = (
    "exec",
    "compile",
    "import",
    "subprocess.Popen",
    "pickle.find_class",
    "marshal.loads",
    "ctypes.dlopen",
    "code.__new__",
    "function.__new__",
    "urllib.Request",
)
WATCHED_PREFIXES = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "socket.")
PATHS = ("open", "os.listdir", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.link")
SECONDS, CONSTANT_BYTES = 30, 64 << 20
ADDRESS_SPACE_BYTES = 2 << 30  # what a case may reserve in addition to what the process has


class Hung(BaseException):
    """A load took too long. No Exception, which something might catch."""


@dataclass
class Result:
    """What became of one case."""

    name: str
    fate: str
    error: str = ""
    error_type: str = ""
    is_ours: bool = False
    changed: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    grown_bytes: int = 0
    file_bytes: int = 0


class Watch:
    """An audit hook that notes what happens while ``directory`` is set."""

    def __init__(self) -> None:
        self.directory: str | None = None
        self.events: list[str] = []
        self._busy = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.directory is None or self._busy:
            return
        self._busy = True
        try:
            if event in WATCHED or event.startswith(WATCHED_PREFIXES):
                self.events.append(f"{event} {str(arguments)[:200]}")
            elif event in (*PATHS, "safetensors.open") and isinstance(
                arguments[0], (str, bytes, os.PathLike)
            ):
                path = os.path.realpath(os.fsdecode(arguments[0]))
                # The thread of the hang watch reads it now and then.
                if path == f"/proc/{os.getpid()}/schedstat":
                    return
                if not path.startswith(self.directory + "/") and path != self.directory:
                    self.events.append(f"{event} {path}")
        finally:
            self._busy = False


def main() -> None:
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    first, last = (int(text) for text in (*sys.argv[3:5], "0", "1000000")[:2])
    torch.set_num_threads(1)
    subject, outside = Subject(folder / "project"), folder / "outside"
    good = subject.train_and_save(steps=2)
    outside.mkdir()
    (outside / "secret.bin").write_bytes(b"secret")
    shutil.copytree(good, outside / "good")
    draft = Draft(good)
    watch = Watch()
    make_opens_of_safetensors_audible()
    _limit_address_space()
    signal.signal(signal.SIGALRM, _hung)
    _warm_up(subject, draft, folder)
    found = []
    for number, case in enumerate(cases(outside)[first:last]):
        found.append(_attempt(case, draft.copy(), folder / "cases" / str(number), subject, watch))
        if found[-1].changed:  # what was loaded must not hide what the next case would do
            subject = Subject(folder / "project")
            subject.accelerator.load_state(str(good))
            gc.collect()  # the subject before lets go of its lock now, not while another case is heard
    assert not (outside / "fired").exists(), "a gadget ran"
    results.write_text(json.dumps([asdict(result) for result in found]))


def _attempt(case: Case, draft: Draft, directory: Path, subject: Subject, watch: Watch) -> Result:
    result = Result(case.name, case.fate)
    case.change(draft)
    draft.write(directory)
    result.file_bytes = sum(p.lstat().st_blocks * 512 for p in directory.rglob("*"))
    subject.scramble(7)
    before = {**subject.fingerprint(), **subject.writes()}
    watch.events = []
    resident = _resident(reset=True)
    watch.directory = str(directory.resolve())
    signal.alarm(SECONDS)
    try:
        subject.accelerator.load_state(str(directory))
    except LockstepError as error:
        result.is_ours, result.error, result.error_type = True, str(error), type(error).__name__
    except BaseException as error:
        result.error, result.error_type = str(error), type(error).__name__
    finally:
        signal.alarm(0)
        watch.directory = None
    result.grown_bytes = _resident(reset=False) - resident
    result.events = list(watch.events)
    after = {**subject.fingerprint(), **subject.writes()}
    result.changed = sorted(part for part in before if after[part] != before[part])
    shutil.rmtree(directory)
    return result


def _warm_up(subject: Subject, draft: Draft, folder: Path) -> None:
    """Load a good checkpoint, written as the cases are: imports that loading needs come now."""
    draft.write(folder / "cases" / "good")
    subject.accelerator.load_state(str(folder / "cases" / "good"))


def make_opens_of_safetensors_audible() -> None:
    """It opens files in Rust, which audit hooks don't hear of."""
    reads = module_of(TensorReader)
    original = reads.safe_open

    def audible(path: str, **options: Any) -> Any:
        sys.audit("safetensors.open", path)
        return original(path, **options)

    reads.safe_open = audible


def _limit_address_space() -> None:
    """So that what would fill a machine's memory fails here."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = now + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _resident(reset: bool) -> int:
    """The most bytes of memory that were resident since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _hung(signum: int, frame: Any) -> None:
    raise Hung(f"after {SECONDS} s")


if __name__ == "__main__":
    main()
