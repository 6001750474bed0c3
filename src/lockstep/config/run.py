"""What a run is, as typed values: the model behind configuration files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from lockstep.config import checks, readers
from lockstep.config.enums import PrecisionType
from lockstep.config.hosts import parse_filter, parse_hosts
from lockstep.config.parallel import Parallel
from lockstep.config.values import (
    parse_bool,
    parse_gpus,
    parse_host,
    parse_integer,
    parse_interface,
    parse_machines,
    parse_names,
    parse_pairs,
    parse_precision,
    parse_seconds,
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


def _unless_none(read: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else read(value)


def _hosts(value: Any) -> str | None:
    return None if value is None else ",".join(map(str, parse_hosts(value)))


def _filter(value: Any) -> str | None:
    return None if value is None else "@".join(parse_filter(value))


def _kubernetes(value: Any) -> str | None:
    return None if value is None else str(_word(checks.KUBERNETES_KINDS, value))


def _seconds(value: Any) -> float | None:
    return None if value is None else parse_seconds(value)


Flag = Annotated[bool, BeforeValidator(_flag)]
OptionalFlag = Annotated[bool | None, BeforeValidator(partial(_unless_none, _flag))]


def bounded(at_least: int, at_most: int) -> BeforeValidator:
    """An integer, or a string of digits, within bounds."""
    return BeforeValidator(partial(_integer, at_least, at_most))


class RunConfig(BaseModel):
    """How to start a run. ``num_processes`` is the total over all machines; None: one for each GPU, else 1.

    ``num_machines`` is the most that take part, ``min_machines`` the least (None: as many). Of the settings
    that are None here, ``launch.plan.DEFAULTS`` has the defaults.

    Raises ``pydantic.ValidationError`` for fields alone and together; ``config.accelerate.load``
    turns it into a ConfigError with file, line and key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_processes: Annotated[int | None, bounded(1, checks.MAX_PROCESSES)] = None
    num_machines: Annotated[int, bounded(1, checks.MAX_MACHINES)] = 1
    min_machines: Annotated[int | None, bounded(1, checks.MAX_MACHINES)] = None
    machine_rank: Annotated[int | None, bounded(0, checks.MAX_MACHINES - 1)] = None
    main_process_ip: Annotated[str | None, BeforeValidator(parse_host)] = None
    main_process_port: Annotated[int | None, bounded(0, checks.MAX_PORT)] = None
    rdzv_backend: Annotated[
        Literal["static", "c10d"], BeforeValidator(partial(_word, ("static", "c10d")))
    ] = "static"
    interface: Annotated[str | None, BeforeValidator(parse_interface)] = None
    secret_file: Annotated[str | None, BeforeValidator(_path)] = None
    hosts: Annotated[str | None, BeforeValidator(_hosts)] = None
    hostfile: Annotated[str | None, BeforeValidator(_path)] = None
    include_hosts: Annotated[str | None, BeforeValidator(_filter)] = None
    exclude_hosts: Annotated[str | None, BeforeValidator(_filter)] = None
    slurm: OptionalFlag = None
    slurm_options: Annotated[dict[str, str] | None, BeforeValidator(partial(_unless_none, parse_pairs))] = (
        None
    )
    mpi: OptionalFlag = None
    ray: OptionalFlag = None
    k8s: Annotated[str | None, BeforeValidator(_kubernetes)] = None
    k8s_options: Annotated[dict[str, str] | None, BeforeValidator(partial(_unless_none, parse_pairs))] = None
    forward_env: Annotated[tuple[str, ...] | None, BeforeValidator(partial(_unless_none, parse_names))] = None
    max_restarts: Annotated[int | None, bounded(0, checks.MAX_RESTARTS)] = None
    hang_timeout: Annotated[float | None, BeforeValidator(_seconds)] = None
    grace: Annotated[float | None, BeforeValidator(_seconds)] = None
    watch: OptionalFlag = None
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

    @model_validator(mode="before")
    @classmethod
    def _range_of_machines(cls, data: Any) -> Any:
        """``num_machines: "1:4"`` says both ends."""
        said = data.get("num_machines") if isinstance(data, dict) else None
        if not isinstance(said, str) or ":" not in said:
            return data
        try:
            least, most = parse_machines(said)
        except ConfigError as error:
            raise ConfigError(f"num_machines: {error}") from None
        if data.get("min_machines") not in (None, least, str(least)):
            raise ConfigError(
                f"num_machines is {said} but min_machines is {shown(data['min_machines'])}. Say it once."
            )
        return {**data, "num_machines": most, "min_machines": least}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        checks.check_topology(self.model_dump())
        return self

    def given(self) -> dict[str, Any]:
        """The settings that were said, not defaulted."""
        return self.model_dump(exclude_unset=True)
