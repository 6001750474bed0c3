"""What a run is, as typed values: the model behind configuration files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from lockstep.config import checks, readers
from lockstep.config.enums import PrecisionType
from lockstep.config.parallel import Parallel
from lockstep.config.values import (
    parse_bool,
    parse_gpus,
    parse_host,
    parse_integer,
    parse_precision,
    shown,
    suggestion,
)
from lockstep.errors import ConfigError


def _integer(at_least: int, at_most: int, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{shown(value)} is not an integer from {at_least} to {at_most}")
    try:
        return parse_integer(value, "", at_least, at_most)
    except ValueError:  # also that of str() on an integer of thousands of digits
        short = value if isinstance(value, str) or abs(value) < 10**30 else "a huge number"
        raise ConfigError(f"{shown(short)} is not an integer from {at_least} to {at_most}") from None


def _flag(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        try:
            return parse_bool(value, "")
        except ConfigError:
            pass
    raise ConfigError(f"{shown(value)} is not a truth value; use true or false")


def _precision(value: Any) -> Any:
    if value is None or value is False:  # YAML reads an unquoted `no` as false
        return PrecisionType.NO
    if not isinstance(value, str) or len(value) > 40:
        raise ConfigError(f"{shown(value)} is not one of {', '.join(PrecisionType.list())}")
    return parse_precision(value, "mixed_precision")


def _word(words: tuple[str, ...], value: Any) -> Any:
    if value not in words:
        near = suggestion(value, words) if isinstance(value, str) else ""
        raise ConfigError(f"{shown(value)} is not one of {', '.join(words)}.{near}")
    return value


def _parallel(value: Any) -> str | None:
    return None if value is None else str(Parallel.parse(value))


def _plain(read: Callable[[Any, str], Any], value: Any) -> Any:
    """A value checked by a reader, as plain data."""
    if value is None:
        return None
    found = read(value, "")
    return asdict(found) if is_dataclass(found) and not isinstance(found, type) else found


def _path(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise ConfigError(f"{shown(value)} is not the path of a file")
    return value


Flag = Annotated[bool, BeforeValidator(_flag)]


def bounded(at_least: int, at_most: int) -> BeforeValidator:
    """An integer, or a string of digits, within bounds."""
    return BeforeValidator(partial(_integer, at_least, at_most))


class RunConfig(BaseModel):
    """How to start a run. ``num_processes`` is the total over all machines; None: one for each GPU, else 1.

    Raises ``pydantic.ValidationError`` for fields alone and together; ``config.accelerate.load``
    turns it into a ConfigError with file, line and key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_processes: Annotated[int | None, bounded(1, checks.MAX_PROCESSES)] = None
    num_machines: Annotated[int, bounded(1, checks.MAX_MACHINES)] = 1
    machine_rank: Annotated[int, bounded(0, checks.MAX_MACHINES - 1)] = 0
    main_process_ip: Annotated[str | None, BeforeValidator(parse_host)] = None
    main_process_port: Annotated[int | None, bounded(0, checks.MAX_PORT)] = None
    rdzv_backend: Annotated[
        Literal["static", "c10d"], BeforeValidator(partial(_word, ("static", "c10d")))
    ] = "static"
    mixed_precision: Annotated[PrecisionType, BeforeValidator(_precision)] = PrecisionType.NO
    use_cpu: Flag = False
    gpu_ids: Annotated[str | None, BeforeValidator(parse_gpus)] = None
    debug: Flag = False
    gradient_accumulation_steps: Annotated[int, bounded(1, checks.MAX_ACCUMULATION_STEPS)] = 1
    parallel: Annotated[str | None, BeforeValidator(_parallel)] = None
    gradient_clipping: Annotated[float | None, BeforeValidator(partial(_plain, readers.number))] = None
    micro_batch_size: Annotated[int | None, bounded(1, checks.MAX_ACCUMULATION_STEPS)] = None
    optimizer: Annotated[dict[str, Any] | None, BeforeValidator(partial(_plain, readers.optimizer))] = None
    scheduler: Annotated[dict[str, Any] | None, BeforeValidator(partial(_plain, readers.scheduler))] = None
    grad_scaler: Annotated[dict[str, Any] | None, BeforeValidator(partial(_plain, readers.grad_scaler))] = (
        None
    )
    deepspeed_config_file: Annotated[str | None, BeforeValidator(_path)] = None
    num_cpu_threads_per_process: Annotated[int | None, bounded(1, checks.MAX_THREADS)] = None

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        checks.check_topology(self.model_dump())
        return self

    def given(self) -> dict[str, Any]:
        """The settings that were said, not defaulted."""
        return self.model_dump(exclude_unset=True)
