"""A model to be estimated: what ``package.module:Class`` or ``path/to/file.py:function`` makes, or a configuration of
transformers describes, without values.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from lockstep.config.files import MAX_FILE_BYTES, parse_json, read_regular_file
from lockstep.config.values import repr_short, suggestion
from lockstep.errors import ConfigError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


def call_factory(text: str, arguments: Mapping[str, object]) -> object:
    """Return what ``module:name`` gives: an object as it is, a class or function called with ``arguments``.

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
        # Dataclasses look their module up.
        sys.modules.setdefault(path.stem, module)
        with _first_on_path(path.resolve().parent):
            spec.loader.exec_module(module)
        return module


def _attribute(module: ModuleType, name: str, place: str) -> object:
    found: object = module
    for part in name.split("."):
        if not part or not hasattr(found, part):
            public = [known for known in vars(module) if not known.startswith("_")]
            raise UsageError(
                f"{place} has no {repr_short(name)}.{suggestion(name, public)} Name a class or a function in it."
            )
        found = getattr(found, part)
    return found


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
    """Return the last line of an error's traceback, and where it was raised in a file."""
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
    if isinstance(error, TypeError):
        return " Give keyword arguments with --args '{\"name\": value}', or name a function that needs none."
    return " Correct it, or try it in Python."


QUANTIZED = "Its weights are quantised, and the configuration does not show how. Name its files of weights."


def configuration(path: Path) -> Path:
    """Return the ``config.json`` that a path means.

    Raises:
        UsageError: it means none.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() or file.suffix != ".json":
        what = "has no config.json" if path.is_dir() else "is not a .json file"
        raise UsageError(
            f"{path} {what}, so the model is not known. Name a folder or file of weights (without --batch), a "
            "config.json, or module:Class (path/to/file.py:Class)."
        )
    return file


def built_from_config(path: Path) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model that a ``config.json`` describes, on the meta device: of its ``architectures``, or a
    causal language model, or else the base model of its type. And notes of what was left out.

    Raises:
        ConfigError: the file is no configuration.
        UsageError: its type is not known, needs code of its own, or the model cannot be built.
        MissingExtraError: transformers is not installed.
    """
    data = _read(path)
    try:
        import torch
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        raise MissingExtraError("Building a model from its config.json", "transformers", "examples") from None
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        own = " The model comes with code of its own, which is not run." if "auto_map" in data else ""
        near = suggestion(str(kind), CONFIG_MAPPING)
        raise UsageError(
            f"{path}: model_type={repr_short(kind)} is not a model of transformers "
            f"{transformers.__version__}.{own}{near} Name its class as module:Class, or its files of weights."
        )
    with contextlib.redirect_stdout(sys.stderr):
        try:
            config = CONFIG_MAPPING[kind].from_dict(data)
            with torch.device("meta"):
                model = _model(config, data, path)
            dtype = getattr(config, "dtype", None)
            notes = (QUANTIZED,) if data.get("quantization_config") else ()
            return (model.to(dtype) if isinstance(dtype, torch.dtype) else model), notes
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{path}: transformers cannot build this {kind}: {last_line(error)} Correct the configuration."
            ) from error


def _model(config: PretrainedConfig, data: dict[str, object], path: Path) -> nn.Module:
    import transformers

    names = data.get("architectures") or ()
    for name in names if isinstance(names, (list, tuple)) else (names,):
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            made: nn.Module = found(config)
            return made
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            built: nn.Module = auto.from_config(config, trust_remote_code=False)
            return built
    raise UsageError(
        f"{path}: transformers has no model for architectures={repr_short(names)} of type {config.model_type}. Name "
        "its class as module:Class."
    )


def _read(path: Path) -> dict[str, object]:
    try:
        content = read_regular_file(path, 64 * MAX_FILE_BYTES + 1)
        data = parse_json(content.decode("utf-8-sig"), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Check its path.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text. Name the config.json of a model.") from None
    return data
