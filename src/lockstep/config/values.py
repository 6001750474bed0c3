"""Single values that code, flags, environment and files share: how they are read and shown in messages."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from lockstep.config.enums import PrecisionType
from lockstep.errors import ConfigError

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y", "on"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n", "off"})
MAX_PORT = 65535
USUAL_PORT = 29500
"""Torch's default of MASTER_PORT."""
MAX_MACHINES = 100_000
MAX_SECONDS = 10_000_000.0
MAX_INTERVAL_S = 3600.0
RENDEZVOUS_KEYS = ("join_timeout", "last_call_timeout", "heartbeat_timeout")
SHORTEST_SILENCE_S = 5
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}")
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,14}")  # Linux allows 15 bytes
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
DECIMAL = re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?")
OPTION = re.compile(r"[A-Za-z][A-Za-z0-9._/-]{0,127}")
HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")


def repr_short(value: object, limit: int = 40) -> str:
    """Return ``value`` as text for a message, cut at ``limit`` characters."""
    try:
        text = repr(value)[: limit * 8] if not isinstance(value, str) else repr(value[: limit * 2])
    except ValueError:  # of integers with thousands of digits
        return "a huge number"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def plain(value: object, limit: int = 40) -> str:
    """Return ``value`` as text for a message, without quotes: on one line, and cut at ``limit`` characters."""
    text = "".join(character if character.isprintable() else "?" for character in str(value)[: limit + 1])
    return text if len(text) <= limit else text[: limit - 3] + "..."


class SettingValue(NamedTuple):
    """A value, and where it was said; ``words``: where each word of ``parallel`` was, if in several places."""

    value: Any
    source: str
    words: Mapping[str, str] = {}


def refused(value: object, origin: str, what: str, instead: str) -> ConfigError:
    """Return the error for a value that is not ``what``: a sentence and ``instead``, or what follows the name of a
    key."""
    if origin:
        return ConfigError(f"{origin}={plain(value)} is not {what}. {instead}")
    return ConfigError(f"{repr_short(value)} is not {what}")


def join_names(names: Iterable[str], most: int = 3, none: str = "none", separator: str = ", ") -> str:
    """Return the first names for a message, and how many more there are; ``none`` if there is no name."""
    every = list(names)
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return (separator.join(every[:most]) or none) + rest


def parse_host(value: object) -> str | None:
    """Return a host name or IP address; raises ConfigError."""
    import ipaddress  # here, because workers read this module without needing it

    if value is None:
        return None
    text = value if isinstance(value, str) else ""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        # digits and dots alone are a mistyped address, not a name
        if len(text) <= 253 and HOST_NAME.fullmatch(text) and not re.fullmatch(r"[0-9.]+", text):
            return text
    raise ConfigError(f"{repr_short(value)} is not a host name or IP address")


def parse_gpus(value: object) -> str | None:
    """Parse ``all``, or GPU numbers joined by commas, from a list or a text. Raises ConfigError."""
    if value is None or value == "all":
        return value
    parts = (
        value
        if isinstance(value, list)
        else str(value)[:4096].split(",")
        if type(value) in (int, str)
        else [""]
    )
    names = [str(part).strip() for part in parts if not isinstance(part, bool)]
    known = [bool(re.fullmatch(r"[0-9]{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,80}", name)) for name in names]
    if not names or len(names) != len(parts) or not all(known):
        raise ConfigError(f"{repr_short(value)} is not 'all' or a list of GPU numbers such as 0,1")
    if len(set(names)) != len(names):
        raise ConfigError(f"{repr_short(value)} names a GPU twice")
    return ",".join(names)


def parse_precision(value: object, origin: str) -> PrecisionType:
    """Parse ``no``, ``fp16``, ``bf16`` or ``fp8``, in any case. Raises ConfigError."""
    word, known = str(value).lower(), PrecisionType.list()
    if word not in known:
        raise ConfigError(
            f"{origin}={plain(value)} is not one of {', '.join(known)}.{suggestion(word, known)}"
        )
    return PrecisionType(word)


def parse_bool(value: object, origin: str) -> bool:
    """Return True or False from a bool or from words such as ``yes`` and ``0``; raises ConfigError."""
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise refused(value, origin, "a truth value", "Use 'true' or 'false'.")


def parse_integer(value: object, origin: str, at_least: int, at_most: int | None = None) -> int:
    """Return an integer within bounds; raises ConfigError."""
    try:
        text = str(value).strip()
    except ValueError:  # an integer of thousands of digits
        text = "a huge number"
    digits = text[1:] if text[:1] == "-" else text
    # isdecimal alone also accepts digits of other scripts; int() refuses huge texts with its own error
    number = int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= 18 else None
    if (
        number is None
        or isinstance(value, bool)
        or number < at_least
        or (at_most is not None and number > at_most)
    ):
        bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise refused(
            text if origin else value, origin, f"an integer {bounds}", "Set a number in that range."
        )
    return number


def no_text(value: object, origin: str) -> object:
    """Return a number that code passes. Only files, flags and variables may write it as a text; raises ConfigError
    for one."""
    if isinstance(value, str):
        raise ConfigError(f"{origin} is the text {value!r}, but must be a number. Pass an integer.")
    return value


def integer_between(at_least: int, at_most: int | None = None) -> Callable[[object, str], int]:
    """Return a reader of integers within bounds."""
    return lambda value, origin: parse_integer(value, origin, at_least, at_most)


def check_between(name: str, value: object, low: int, high: int) -> None:
    """Raise ConfigError unless code passed an integer within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}, but must be an integer from {low} to {high}. Pass one.")


def check_word(name: str, value: object, known: Sequence[str]) -> None:
    """Raise ConfigError unless code passed one of these words."""
    if value not in known:
        near = suggestion(str(value), known) or " Pass one of them."
        raise ConfigError(f"{name} is {str(value)!r}, which is not one of {', '.join(known)}.{near}")


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest known name, or nothing when none is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word[:100].lower(), by_lower, n=1, cutoff=0.5)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


def decimal_number(value: object) -> float:
    """Return a number, or a text of one in the digits 0 to 9; NaN for everything else."""
    if isinstance(value, str):
        # float() also reads 1_0, and digits of other scripts
        return float(value) if DECIMAL.fullmatch(value.strip()) else math.nan
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def parse_machines(value: object) -> tuple[int, int]:
    """Parse ``N`` or ``MIN:MAX`` as (least, most) machines. Raises ConfigError."""
    text = str(value).strip() if type(value) in (int, str) else ""
    least, _, most = text.partition(":")
    try:
        low = parse_integer(least, "", 1, MAX_MACHINES)
        high = parse_integer(most, "", low, MAX_MACHINES) if ":" in text else low
    except ConfigError:
        raise ConfigError(
            f"{repr_short(value)} is not a number of machines from 1 to {MAX_MACHINES}, or MIN:MAX"
        ) from None
    return low, high


def parse_endpoint(value: object) -> tuple[str, int]:
    """Parse ``HOST:PORT`` or ``[IPV6]:PORT`` as (host, port). Raises ConfigError."""
    host, colon, port = str(value).rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        if not colon or (":" in host and not bracketed):
            raise ConfigError("")
        return parse_host(host[1:-1] if bracketed else host) or "", parse_integer(port, "", 1, MAX_PORT)
    except ConfigError:
        raise ConfigError(f"{repr_short(value)} is not HOST:PORT, such as 10.0.0.1:29500") from None


def parse_interface(value: object) -> str | None:
    """Return the name of a network interface, such as ``eth0``; raises ConfigError."""
    if value is None or (isinstance(value, str) and INTERFACE.fullmatch(value)):
        return value
    raise ConfigError(f"{repr_short(value)} is not the name of a network interface, such as eth0")


def parse_names(value: object) -> tuple[str, ...]:
    """Parse names of environment variables from a list or joined by commas. Raises ConfigError."""
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, (list, tuple)):
        names = [part.strip() for part in parts if isinstance(part, str)]
        if len(names) == len(parts) and all(VARIABLE.fullmatch(name) for name in names):
            return tuple(dict.fromkeys(names))
    raise ConfigError(f"{repr_short(value)} is not a list of names of environment variables")


def parse_pairs(value: object) -> dict[str, str]:
    """Options ``KEY=VALUE``, from a mapping or a list of such texts; raises ConfigError."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)):
        split = [part.partition("=") if isinstance(part, str) else ("", "", "") for part in value]
        for (_, equals, _), part in zip(split, value, strict=True):
            if not equals:
                raise ConfigError(f"{repr_short(part)} is not KEY=VALUE")
        if len({key for key, _, _ in split}) != len(split):
            raise ConfigError(f"{repr_short(value)} gives an option twice")
        value = {key: text for key, _, text in split}
    if not isinstance(value, dict):
        raise ConfigError(f"{repr_short(value)} is not a section of options")
    for key, item in value.items():
        if not isinstance(key, str) or not OPTION.fullmatch(key):
            raise ConfigError(f"{repr_short(key)} is not the name of an option")
        if type(item) not in (str, int, float) or not str(item).isprintable():
            raise ConfigError(f"option {key}={repr_short(item)} is not a number or a line of text")
    return {key: str(item) for key, item in value.items()}


def parse_seconds(value: object) -> float:
    """Return a time in seconds, from 0 to 10 million; raises ConfigError."""
    number = decimal_number(value)
    if not 0 <= number <= MAX_SECONDS:
        raise ConfigError(f"{repr_short(value)} is not a number of seconds from 0 to {MAX_SECONDS:.0f}")
    return number


def parse_interval(value: object) -> float:
    """Return a time between two looks, of more than 0 seconds and at most an hour; raises ConfigError."""
    number = decimal_number(value)
    if not 0 < number <= MAX_INTERVAL_S:
        raise ConfigError(
            f"{repr_short(value)} is not a number of seconds of more than 0 and at most {MAX_INTERVAL_S:.0f}"
        )
    return number


def parse_word(value: object) -> str:
    """Return a name of one line, as processes are called; raises ConfigError."""
    if not isinstance(value, str) or not WORD.fullmatch(value):
        raise ConfigError(f"{repr_short(value)} is not a name of letters, digits and ._:- (at most 64)")
    return value


def parse_rendezvous(value: object) -> dict[str, float]:
    """Return how long machines wait for each other: ``KEY=SECONDS,...`` or a mapping; raises ConfigError.

    ``timeout`` is another name of ``join_timeout``, as in torchrun. ``rdzv_backend`` and ``rdzv_endpoint``, which many
    scripts for Slurm repeat here, have no effect there and here: the flags of these names say it.
    """
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    found: dict[str, float] = {}
    for key, text in parse_pairs(value).items():
        if key in ("rdzv_backend", "rdzv_endpoint"):
            continue
        name = "join_timeout" if key == "timeout" else key
        if name not in RENDEZVOUS_KEYS:
            known = (*RENDEZVOUS_KEYS, "timeout")
            raise ConfigError(f"{repr_short(key)} is not one of {', '.join(known)}")
        seconds = parse_seconds(text)
        if name == "heartbeat_timeout" and seconds < SHORTEST_SILENCE_S:
            raise ConfigError(
                f"heartbeat_timeout is {seconds:g} s, but machines send heartbeats each second. Give at least "
                f"{SHORTEST_SILENCE_S} s"
            )
        if found.setdefault(name, seconds) != seconds:
            raise ConfigError(
                f"timeout and join_timeout are two names of the same time, but {found[name]:g} and {seconds:g} "
                "are given"
            )
    return found


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def bytes_of(size: int | float | str, origin: str, at_least: int = 0) -> int:
    """Parse bytes from a number, or from a text such as ``"10GB"`` or ``"512MiB"``, in any case.

    Raises:
        ConfigError: it is neither, or below ``at_least``; the message begins with ``origin``.
    """
    match = re.fullmatch(
        r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?I?B?)\s*", str(size)[:80].upper(), re.ASCII
    )
    factor = _UNITS.get(match[2]) if match else None
    number = -1
    if match is not None and factor is not None and not isinstance(size, bool):
        number = int(match[1]) * factor if match[1].isdecimal() else int(float(match[1]) * factor)
    if number < at_least:
        raise ConfigError(
            f"{origin}={repr_short(size)} is not a size. Pass a number of bytes or a text such as '10GB' or '512MiB'."
        )
    return number
