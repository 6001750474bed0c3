"""A model that a module of the user makes: ``package.module:Class`` or ``path/to/file.py:function``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.config.values import repr_short, suggestion
from lockstep.errors import UsageError


def call_factory(text: str, arguments: Mapping[str, object]) -> object:
    """What ``module:name`` gives: an object as it is, a class or function called with ``arguments``.

    What it prints goes to stderr.

    Raises:
        UsageError: it cannot be imported, is not there, needs other arguments, or fails; the message has the last
            line of its own traceback.
    """
    place, _, name = text.rpartition(":")
    with contextlib.redirect_stdout(sys.stderr):
        made = _attribute(_imported(place), name, place)
        if not callable(made) or not (inspect.isclass(made) or inspect.isroutine(made)):
            if arguments:
                raise UsageError(f"{text} is an object, which takes no arguments. Drop --args.")
            return made
        _check_arguments(made, text, arguments)
        with _blamed(f"Calling {text} failed"):
            return made(**arguments)


def _imported(place: str) -> ModuleType:
    with _blamed(f"{place} cannot be imported"):
        if not place.endswith(".py"):
            with _first_on_path(Path.cwd()):
                return importlib.import_module(place)
        path = Path(place).expanduser()
        if not path.is_file():
            raise UsageError(f"There is no file {place}. Check its path.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
        with _first_on_path(path.resolve().parent):
            spec.loader.exec_module(module)
        return module


def _attribute(module: ModuleType, name: str, place: str) -> object:
    found: Any = module
    for part in name.split("."):
        if not part or not hasattr(found, part):
            public = [known for known in vars(module) if not known.startswith("_")]
            raise UsageError(
                f"{place} has no {repr_short(name)}.{suggestion(name, public)} Name a class or a function in it."
            )
        found = getattr(found, part)
    return found


def _check_arguments(made: Callable[..., object], text: str, arguments: Mapping[str, object]) -> None:
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError):
        return  # of a built-in; calling it will tell
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"{text} cannot be called with {', '.join(arguments) or 'no arguments'}: {error}. It takes "
            f"{repr_short(str(signature), 100)}; give keyword arguments with --args '{{\"name\": value}}', or name a "
            "function that needs none."
        ) from None


@contextlib.contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Errors of the user's code as one sentence."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what}: {last_line(error)}{_hint(error)}") from error


def last_line(error: BaseException) -> str:
    """The last line of an error's traceback, and where it was raised in a file."""
    lines = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()
    text = (lines or [type(error).__name__])[0][:300].rstrip(".")
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{text} ({Path(error.filename).name}:{error.lineno})."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    if not frames or frames[-1].filename.startswith("<"):
        return f"{text}."
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})."


def _hint(error: BaseException) -> str:
    if "meta" in str(error):
        return " It is built on the meta device, without values: move what reads values out of it."
    return " Correct it, or try it in Python."
