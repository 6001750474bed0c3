"""Single values that files and flags share: hosts, lists of GPUs, and how values are shown in messages."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from lockstep.errors import ConfigError

HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")


def shown(value: Any, limit: int = 40) -> str:
    """``value`` as text for a message, cut at ``limit`` characters."""
    text = repr(value)[: limit * 8] if not isinstance(value, str) else repr(value[: limit * 2])
    return text if len(text) <= limit else text[: limit - 3] + "..."


def parse_host(value: Any) -> str | None:
    """A host name or IP address; raises ConfigError."""
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
        return value  # type: ignore[no-any-return]
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
