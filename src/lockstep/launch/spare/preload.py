"""Imports ahead of time: what is watched meanwhile, so that nobody can tell afterwards when they were made."""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

PACKAGE = Path(__file__).parents[2]
OURS = ("torch", PACKAGE.name)
"""Packages whose modules may be imported although the script does more before: they are known to change nothing."""

READ_BY_LIBRARIES = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "GOTO_", "VECLIB_", "NUMEXPR_", "BLIS_", "MALLOC_", "GLIBC_", "LD_",
    "CUDA_", "NVIDIA_", "NCCL_", "CUBLAS_", "CUDNN_", "GLOO_", "TORCH_", "PYTORCH_", "TRITON_", "ATEN_", "DNNL_",
    "ONEDNN_", "HIP_", "ROCR_", "XPU_", "PYTHON",
)  # fmt: skip
"""How variables begin that compiled libraries read, which nobody sees."""

SCANS = {"tqdm.utils": "TQDM_"}
"""Modules that look through all variables when they are imported, for those that begin like this."""

BUSY_SHARE = 3.0


class Unfit(BaseException):
    """Importing ahead of time would not be what the script does; no library may catch it."""


class EnvironmentReads:
    """The names of environment variables that Python code reads inside :func:`watched_reads`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def matter(self, changed: Iterable[str]) -> list[str]:
        """Of variables with another value, those that may have made a difference."""
        return sorted(name for name in changed if name in self.names or name.startswith(READ_BY_LIBRARIES))


@contextmanager
def watched_reads(reads: EnvironmentReads) -> Iterator[None]:
    """Note which variables are read by way of ``os.environ`` and ``os.getenv``."""
    kind = type(os.environ)

    class WatchedEnvironment(kind):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            if name.startswith(SCANS.get(_reader(), "")):
                reads.names.add(name)
            return str(super().__getitem__(name))

        def __iter__(self) -> Iterator[str]:
            names, prefix = list(super().__iter__()), SCANS.get(_reader(), "")
            reads.names.update(name for name in names if name.startswith(prefix))
            return iter(names)

    # The class, and not the object, to which other modules have references.
    os.environ.__class__ = WatchedEnvironment
    try:
        yield
    finally:
        os.environ.__class__ = kind


def _reader() -> str:
    """The module that reads a variable."""
    # Above this function and the method that was called; what only passes a name on is skipped.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in (
        "collections.abc",
        "os",
        __name__,
    ):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def library_folders() -> tuple[str, ...]:
    """Where Python, installed packages and this one are; what is elsewhere is the user's."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages(), str(PACKAGE)}
    folders |= {os.path.realpath(folder) for folder in folders}
    return tuple(folder + os.sep for folder in folders)


class Libraries:
    """Which modules belong to libraries."""

    def __init__(self) -> None:
        self._folders = library_folders()

    def has_file(self, origin: str) -> bool:
        """Whether a file is one of a library's."""
        return origin in ("built-in", "frozen") or origin.startswith(self._folders)

    def has_package(self, name: str) -> bool:
        """Whether ``import name`` finds a library."""
        module = sys.modules.get(name)
        if module is None and name in sys.builtin_module_names:
            return True
        spec = PathFinder.find_spec(name) if module is None else getattr(module, "__spec__", None)
        return spec is not None and spec.origin is not None and self.has_file(spec.origin)


class Finder:
    """Finds modules as Python does, but no files of the user's, and yields to others on a busy machine."""

    def __init__(self, libraries: Libraries, yield_to_others: Callable[[], None]) -> None:
        self._libraries = libraries
        self._yield = yield_to_others
        self.refused = ""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if (
            spec is not None
            and spec.has_location
            and spec.origin
            and not self._libraries.has_file(spec.origin)
        ):
            self.refused = f"a library imports {name}, which is {spec.origin}: a file that is not a library's"
            raise Unfit(self.refused)
        self._yield()
        return spec


class Throttle:
    """Sleeps after each piece of work while more processes want to run than there are cores.

    A nice value would do the same, but could not be taken back without privileges.
    """

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0))
        self._used_s = time.process_time()

    def __call__(self) -> None:
        used_s = time.process_time()
        if used_s - self._used_s > 0.002:
            if running() > self._cores:
                time.sleep(BUSY_SHARE * (used_s - self._used_s))
            self._used_s = time.process_time()


def running() -> int:
    """How many processes of this machine run or are ready to."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 0


@contextmanager
def libraries_only(first_path: str) -> Iterator[Libraries]:
    """Import inside the block as a script would for which ``first_path`` stands before all others.

    Raises:
        Unfit: also at the end, if the imports changed what a script in the same process would see otherwise.
    """
    libraries = Libraries()
    finder = Finder(libraries, Throttle())
    folder, present = os.getcwd(), set(sys.modules)
    sys.path.insert(0, first_path)
    path = list(sys.path)
    finders = sys.meta_path
    finders.insert(finders.index(PathFinder) if PathFinder in finders else 0, finder)
    try:
        yield libraries
    finally:
        finders.remove(finder)
    # A bare `except` may have gone on after Unfit was raised.
    if finder.refused:
        raise Unfit(finder.refused)
    for what, same in {"sys.path": sys.path == path, "the working directory": os.getcwd() == folder}.items():
        if not same:
            raise Unfit(f"importing its libraries changes {what}")
    del sys.path[0]
    # Other finders may have found them.
    for name in sorted(set(sys.modules) - present):
        spec = getattr(sys.modules[name], "__spec__", None)
        if spec is not None and spec.has_location and spec.origin and not libraries.has_file(spec.origin):
            raise Unfit(f"{name} is {spec.origin}: a file that is not a library's")


def run_imports(imports: Sequence[str]) -> None:
    """Execute import statements in a namespace of their own. Raises Unfit when one fails."""
    namespace: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    for statement in imports:
        try:
            exec(compile(statement, "<imports>", "exec"), namespace)
        except Exception as error:
            raise Unfit(f"`{statement}` fails: {type(error).__name__}: {error}") from None


def import_all(names: Sequence[str]) -> None:
    """Import modules of torch and of this package that the last process had; those that are gone are passed over."""
    for name in names:
        if name.partition(".")[0] in OURS and name not in sys.modules:
            try:
                importlib.import_module(name)
            except ImportError:
                continue


def changed(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    """The names whose values differ, or which only one of them has."""
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def files_of(modules: Iterable[ModuleType]) -> dict[str, tuple[int, int]]:
    """The files of modules, each with when it was written and its size."""
    found = {}
    for module in modules:
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.has_location and spec.origin:
            found[spec.origin] = stamp(spec.origin)
    return found


def stamp(file: str) -> tuple[int, int]:
    """By which a change of a file is seen; of one that is not there, zeros."""
    try:
        status = os.stat(file)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def shadowed(folder: str, modules: Iterable[str]) -> list[str]:
    """Modules that a script in ``folder`` would now find there."""
    names = set(modules)
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    found = []
    for entry in entries:
        name = entry.name.partition(".")[0]
        is_module = entry.name.endswith((".py", ".so")) or os.path.exists(
            os.path.join(entry.path, "__init__.py")
        )
        if name in names and is_module:
            found.append(name)
    return found
