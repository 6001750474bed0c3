"""The kinds of values that settings have: how each is read and shown, wherever it comes from.

A reader takes a value and its origin, and raises ConfigError. With an origin ("LOCKSTEP_WATCH") the message is a whole
sentence that says what to do. Without one, as for files and flags, it is what follows the name of the key or flag.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config import readers
from lockstep.config.checks import MAX_MACHINES
from lockstep.config.enums import DynamoBackend, PrecisionType
from lockstep.config.files import check_readable, parse_json
from lockstep.config.hosts import parse_hosts
from lockstep.config.parallel import Parallel
from lockstep.config.values import (
    integer_between,
    parse_bool,
    parse_endpoint,
    parse_gpus,
    parse_host,
    parse_interface,
    parse_interval,
    parse_machines,
    parse_names,
    parse_pairs,
    parse_precision,
    parse_rendezvous,
    parse_seconds,
    parse_word,
    plain,
    repr_short,
    suggestion,
)
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class ValueKind:
    """One kind of values.

    Attributes:
        read: (value, origin) -> the value; None is read by nobody: it says nothing.
        type: What files have once it was read, as an annotation.
        metavar: How help shows the value of a flag; "": a switch, or what ``bounds`` and ``words`` say.
        bounds: The least and the greatest, of integers.
        words: All allowed ones.
        values: What the documentation says of values in a file; "": nothing, or the words.
        in_worker: Reads what workers have from their environment or from code, if that is another matter.
        on_flag: Reads a flag's text, if that is another matter.
        is_section: In a file a section, in the environment JSON.
    """

    read: Callable[[Any, str], Any]
    type: Any = str
    metavar: str = ""
    bounds: tuple[int, int] | None = None
    words: tuple[str, ...] = ()
    values: str = ""
    in_worker: Callable[[object, str], object] | None = None
    on_flag: Callable[[Any], Any] | None = None
    is_section: bool = False

    def __post_init__(self) -> None:
        if self.words and not self.values:
            object.__setattr__(self, "values", ", ".join(f"`{word}`" for word in self.words))

    def for_worker(self, value: object, origin: str) -> object:
        """Return the value as an ``Accelerator`` takes it."""
        return (self.in_worker or self.read)(value, origin)

    def as_data(self, value: object) -> object:
        """Return the value as plain data, as files and plans have it; raises ConfigError without the name of a key."""
        if value is None:
            return None
        found = self.read(value, "")
        if isinstance(found, Parallel):
            return str(found)
        return self.plain_data(found)

    @staticmethod
    def plain_data(value: object) -> object:
        """Return what was read as files have it: of a described object what has a key there."""
        if isinstance(value, (readers.OptimizerConfig, readers.SchedulerConfig)):
            return {"type": value.type, "params": value.params}
        return value


def _kind(read: Callable[[object], object], **other: Any) -> ValueKind:
    """Return the kind of a reader whose messages need a name before them and what to do after them."""

    def with_origin(value: object, origin: str) -> object:
        try:
            return read(value)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}. Give one." if origin else str(error)) from None

    return ValueKind(with_origin, **other)


def integer(at_least: int, at_most: int) -> ValueKind:
    """Integers within bounds."""
    return ValueKind(integer_between(at_least, at_most), int, bounds=(at_least, at_most))


def one_of(*words: str) -> ValueKind:
    """Return some words."""

    def read(value: object, origin: str) -> str:
        if value not in words:
            near = suggestion(value, words) if isinstance(value, str) else ""
            wrong = f"{origin}={plain(value)}" if origin else repr_short(value)
            raise ConfigError(
                f"{wrong} is not one of {', '.join(words)}.{near or ' Use one of them.' * bool(origin)}"
            )
        return str(value)

    return ValueKind(read, words=words)


def _precision(value: object, origin: str) -> PrecisionType:
    if value is False:  # YAML reads an unquoted `no` as false
        return PrecisionType.NO
    if not isinstance(value, str) or len(value) > 40:
        raise ConfigError(f"{repr_short(value)} is not one of {', '.join(PrecisionType.list())}")
    return parse_precision(value, origin or "mixed_precision")


def _path(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"{repr_short(value)} is not the path of a file")
    return value


def _flag_path(value: object) -> str:
    if not str(value).strip():
        raise ConfigError(f"{repr_short(value)} is not a path")
    return str(value)


def _readable(value: object, origin: str) -> str | None:
    if value == "none":  # Accelerate writes it
        return None
    check_readable(str(value), origin)
    return os.path.expanduser(str(value))


def _norm_in_worker(value: object, origin: str) -> float | None:
    return None if value in ("auto", "none") else readers.number(value, origin)


def _parallel(value: str | Parallel | Mapping[str, object] | None, origin: str) -> Parallel:
    try:
        return Parallel.parse(value)
    except ConfigError as error:
        what = str(error).removeprefix("parallel: ")
        raise ConfigError(f"{origin}: {what}" if origin else what) from None


def _parallel_of_flag(value: str) -> str:
    if not str(value).strip():
        raise ConfigError(f"{repr_short(value)} has no word such as zero=3 or ddp")
    return str(_parallel(value, ""))


def _section(read: Callable[[object, str], object]) -> ValueKind:
    """Return a section, which the environment has as JSON."""
    return ValueKind(
        read,
        dict[str, object],
        in_worker=lambda value, origin: read(
            parse_json(value, origin) if isinstance(value, str) else value, origin
        ),
        is_section=True,
    )


def _backend(value: object, origin: str) -> object:
    """Return the name of a backend of ``torch.compile``; in code any that torch knows there, or a function."""
    if callable(value):
        return value
    word = "no" if value is False else str(value)  # YAML reads an unquoted NO as false
    if word.upper() in DynamoBackend.list():
        return word.lower()
    from importlib.metadata import entry_points  # here, because workers seldom need it

    registered = {point.name for point in entry_points(group="torch_dynamo_backends")}
    if not origin.startswith("Accelerator(") and word not in registered:
        known = [name.lower() for name in DynamoBackend.list()]
        quoted = f"{origin}={plain(word)}" if origin else repr_short(word)
        raise ConfigError(
            (
                f"{quoted} is no backend of torch.compile.{suggestion(word, known)} Use one of "
                f"{', '.join(sorted({*known, *registered}))}"
            )
            + ("." if origin else "")
        )
    return word


SWITCH = ValueKind(parse_bool, bool, values="true or false")
PRECISION = ValueKind(_precision, PrecisionType, words=tuple(PrecisionType.list()), in_worker=parse_precision)
SECONDS = _kind(parse_seconds, type=float, metavar="SECONDS", values="seconds")
INTERVAL = _kind(parse_interval, type=float, metavar="SECONDS", values="seconds")
HOST = _kind(parse_host, metavar="HOST")
INTERFACE = _kind(parse_interface, metavar="NAME")
GPUS = _kind(parse_gpus, metavar="GPUS")
HOSTS = _kind(lambda value: ",".join(map(str, parse_hosts(value))), metavar="HOSTS")
NAMES = _kind(parse_names, type=tuple[str, ...], metavar="NAME")
PAIRS = _kind(
    parse_pairs,
    type=dict[str, str],
    metavar="KEY=VALUE",
    on_flag=lambda value: next(iter(parse_pairs(value).items())),
)
WORD = _kind(parse_word, metavar="NAME")
RENDEZVOUS = _kind(parse_rendezvous, type=dict[str, float], metavar="KEY=SECONDS,...")
ENDPOINT = _kind(parse_endpoint, metavar="HOST:PORT")
MACHINES = replace(integer(1, MAX_MACHINES), bounds=None, metavar="N or MIN:MAX", on_flag=parse_machines)
"""A number; on a flag also the least and the most."""
FILE = _kind(_path, metavar="FILE", on_flag=_flag_path)
FOLDER = _kind(_path, metavar="DIRECTORY", on_flag=_flag_path)
READABLE_FILE = _kind(_path, metavar="FILE", on_flag=_flag_path, in_worker=_readable)
NORM = ValueKind(readers.number, float, metavar="NORM", in_worker=_norm_in_worker)
PARALLEL = ValueKind(_parallel, metavar="WORDS", on_flag=_parallel_of_flag)
OPTIMIZER = _section(readers.optimizer)
SCHEDULER = _section(readers.scheduler)
GRAD_SCALER = replace(
    _section(readers.grad_scaler), values=", ".join(f"`{name}`" for name in readers.SCALER_FIELDS)
)
COMPILER = ValueKind(_backend, metavar="NAME")
COMPILE_MODE = one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
