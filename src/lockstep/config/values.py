"""Single values that code, flags, environment and files share: how they are read and shown in messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from lockstep.config.enums import PrecisionType
from lockstep.errors import ConfigError

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y", "on"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n", "off"})
HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")


def shown(value: Any, limit: int = 40) -> str:
    """``value`` as text for a message, cut at ``limit`` characters."""
    text = repr(value)[: limit * 8] if not isinstance(value, str) else repr(value[: limit * 2])
    return text if len(text) <= limit else text[: limit - 3] + "..."


def parse_host(value: Any) -> str | None:
    """A host name or IP address; raises ConfigError."""
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
    raise ConfigError(f"{shown(value)} is not a host name or IP address")


def parse_gpus(value: Any) -> str | None:
    """``all``, or GPU numbers joined by commas, from a list or a text; raises ConfigError."""
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
        raise ConfigError(f"{shown(value)} is not 'all' or a list of GPU numbers such as 0,1")
    if len(set(names)) != len(names):
        raise ConfigError(f"{shown(value)} names a GPU twice")
    return ",".join(names)


def parse_precision(value: Any, origin: str) -> PrecisionType:
    """``no``, ``fp16`` or ``bf16``, in any case; raises ConfigError."""
    word = str(value).lower()
    if word == "fp8":
        raise ConfigError(f"{origin}={value}: fp8 is not available yet. Use 'bf16', 'fp16' or 'no'.")
    if word not in PrecisionType.list():
        raise ConfigError(
            f"{origin}={value} is not one of {', '.join(PrecisionType.list())}.{suggestion(word, PrecisionType.list())}"
        )
    return PrecisionType(word)


def parse_bool(value: Any, origin: str) -> bool:
    """True or False from a bool or from words such as ``yes`` and ``0``; raises ConfigError."""
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ConfigError(f"{origin}={value} is not a truth value. Use 'true' or 'false'.")


def parse_integer(value: Any, origin: str, at_least: int, at_most: int | None = None) -> int:
    """An integer within bounds; raises ConfigError."""
    text = str(value).strip()
    digits = text[1:] if text[:1] == "-" else text
    # isdecimal alone also accepts digits of other scripts; int() refuses huge texts with its own error
    number = int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= 18 else None
    if (
        number is None
        or isinstance(value, bool)
        or number < at_least
        or (at_most is not None and number > at_most)
    ):
        shown = text if len(text) <= 40 else text[:37] + "..."
        bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ConfigError(f"{origin}={shown} is not an integer {bounds}. Set a number in that range.")
    return number


def suggestion(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest known name, or nothing when none is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word[:100].lower(), by_lower, n=1, cutoff=0.5)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""
