"""What must hold of whatever is accepted, from the documentation alone; each function says what is wrong, or None."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from typing import Any

from tests.config.fuzzing.pools import Input

NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


def is_integer(value: Any, low: int, high: int = 2**63) -> bool:
    return type(value) is int and low <= value <= high


def is_host(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
        return True
    except ValueError:
        return (
            len(value) <= 253
            and bool(NAME.fullmatch(value))
            and value[0] != "-"
            and not re.fullmatch(r"[\d.]+", value)
        )


def nonsense_in_settings(settings: Mapping[str, Any]) -> str | None:
    """Of the settings of a run, by the names of its file."""
    said = {name: value for name, value in settings.items() if value is not None}
    rules: dict[str, Any] = {
        "num_processes": lambda v: is_integer(v, 1, 10**6),
        "num_machines": lambda v: is_integer(v, 1, 10**5),
        "min_machines": lambda v: is_integer(v, 1, said.get("num_machines", 1)),
        "machine_rank": lambda v: is_integer(v, 0, said.get("num_machines", 1) - 1),
        "main_process_ip": lambda v: isinstance(v, str) and is_host(v),
        "main_process_port": lambda v: is_integer(v, 0, 65535),
        "rdzv_backend": lambda v: v in ("static", "c10d"),
        "mixed_precision": lambda v: v in ("no", "fp16", "bf16", "fp8"),
        "use_cpu": lambda v: type(v) is bool,
        "debug": lambda v: type(v) is bool,
        "watch": lambda v: type(v) is bool,
        "gpu_ids": lambda v: v == "all" or len(set(v.split(","))) == len(v.split(",")),
        "gradient_accumulation_steps": lambda v: is_integer(v, 1),
        "micro_batch_size": lambda v: is_integer(v, 1),
        "gradient_clipping": lambda v: isinstance(v, float) and 0 <= v < math.inf,
        "num_cpu_threads_per_process": lambda v: is_integer(v, 1),
        "max_restarts": lambda v: is_integer(v, 0),
        "hang_timeout": lambda v: isinstance(v, (int, float)) and 0 <= v < math.inf,
        "grace": lambda v: isinstance(v, (int, float)) and 0 <= v < math.inf,
        "parallel": lambda v: isinstance(v, str) and nonsense_in_line(v) is None,
        "interface": lambda v: re.fullmatch(r"[A-Za-z0-9][\w.:@-]{0,14}", v),
    }
    for name, rule in rules.items():
        if name in said and not rule(said[name]):
            return f"{name}={said[name]!r} was accepted"
    machines, processes = said.get("num_machines", 1), said.get("num_processes")
    if processes is not None and processes % machines:
        return f"{processes} processes on {machines} machines were accepted"
    return None


def nonsense_in_line(line: str) -> str | None:
    """Of a line for ``parallel=``, by its words."""
    said: dict[str, str] = {}
    for word in line.split():
        name, _, value = word.partition("=")
        if name in said:
            return f"{name} is there twice"
        said[name] = value
    for name in ("tp", "pp", "cp", "ep", "replicate"):
        if name in said and not (said[name].isascii() and said[name].isdigit() and int(said[name]) >= 1):
            return f"{name}={said[name]!r} was accepted"
    stage = said.get("zero", "0")
    if stage not in ("0", "1", "2", "3"):
        return f"zero={stage!r} was accepted"
    how = [name for name in ("replicate", "hpz") if said.get(name, "no") not in ("1", "0", "false", "no")]
    if stage == "0" and how:
        return f"{line!r} shards nothing but says how"
    if said.get("offload", "none") in ("none", "false", "no", "0") and said.get("offload_to", "cpu") != "cpu":
        return f"{line!r} offloads nothing but says how"
    if said.get("hpz", "0") != "0" and stage != "3":
        return f"hpz was accepted with zero={stage}"
    return None


def differs(given: Input, found: Mapping[str, Any], names: Mapping[str, str] | None = None) -> str | None:
    """The first value that was said and did not arrive."""
    for name, meaning in given.means.items():
        key = (names or {}).get(name, name)
        if key in found and meaning != "warned" and not same(found[key], meaning):
            return f"{name} is {found[key]!r}, but was said to be {meaning!r}"
    return None


def same(found: Any, meant: Any) -> bool:
    if isinstance(meant, Mapping) and not isinstance(found, Mapping):
        return True
    return bool(found == meant) or str(found) == str(meant)


def complaint_about_output(code: int, out: str, err: str) -> str | None:
    """Of what a command printed: no traceback, one error when it fails, nothing for the terminal to obey."""
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if "Traceback (most recent call last)" in out + err:
        return "a traceback was printed"
    errors = sum(line.startswith("lockstep: error:") for line in err.splitlines())
    if code and errors != 1:
        return f"exit code {code} with {errors} messages: {err[:300]!r}"
    if any(not (c.isprintable() or c in "\n\t") for c in out + err):
        return f"control characters were printed: {(out + err)[:300]!r}"
    if len(err) > 20_000:
        return f"a message of {len(err)} characters"
    return None
