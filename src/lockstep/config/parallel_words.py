"""The words of ``parallel="..."``: how each value is read and shown again, and what a schedule says of stages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from lockstep.config.enums import (
    Activation,
    Compile,
    CPMethod,
    Offload,
    QuantizedType,
    ReduceType,
    Schedule,
    Strategy,
    StringEnum,
)
from lockstep.config.values import (
    bytes_of,
    integer_between,
    parse_bool,
    parse_integer,
    repr_short,
    suggestion,
)
from lockstep.errors import ConfigError

EnumWord = TypeVar("EnumWord", bound=StringEnum)
BlockRule = Callable[[str, Any], bool]
"""Called with (name, module) of each submodule: whether it is a block."""

MOST_RANKS = 2**20
TP_PLANS = ("auto", "transformers", "infer")
VERIFY = ("first_step", "off", "every:100")
LOSSES = ("auto", "mean", "sum", "whole")
HOST = "cpu"
OF_OTHERS = {
    "fsdp": "zero=3",
    "fsdp2": "zero=3",
    "full_shard": "zero=3",
    "deepspeed": "zero=2",
    "tensor": "tp=2",
}
"""Words of other libraries, and what says the same."""
NOT_FOLDERS = ("auto", "cuda", "disk", "gpu", "host", "meta", "none", "nvme", "ram", "ssd")
"""Words that are no places to offload to; ``./disk`` is a folder of that name."""


def known_word(name: str, known: Collection[str]) -> str:
    """Return ``name``, if it is a field. Raises ConfigError with the nearest one else."""
    if name not in known:
        words = [*(field for field in known if field != "strategy"), *Strategy.list()]
        near = re.sub(r"[-:]?(\d+)$", r"=\1", name.lower())
        near = OF_OTHERS.get(name.lower(), near if near.partition("=")[0] in known else "")
        hint = (
            f" Did you mean {near!r}?"
            if near
            else suggestion(name, words) or f" Use one of {', '.join(words)}."
        )
        raise ConfigError(f"parallel: {repr_short(name)} is an unknown word.{hint}")
    return name


def _word_parser(kind: type[EnumWord]) -> Callable[[object, str], EnumWord]:
    def parse(value: object, origin: str) -> EnumWord:
        if isinstance(value, kind):
            return value
        if str(value) not in kind.list():
            hint = suggestion(str(value), kind.list()) or f" Use one of {', '.join(kind.list())}."
            raise ConfigError(f"{origin}={repr_short(value)} is not known.{hint}")
        return kind(str(value))

    return parse


def _optional(parse: Callable[[object, str], EnumWord]) -> Callable[[object, str], EnumWord | None]:
    return lambda value, origin: None if value in (None, "no", "none") else parse(value, origin)


def _weights_type(value: object, origin: str) -> QuantizedType | None:
    if isinstance(value, bool):
        value = QuantizedType.INT8 if value else None
    kind = _optional(_word_parser(QuantizedType))(value, origin)
    if kind is QuantizedType.INT4 and origin.endswith("quantized_weights"):
        raise ConfigError(f"{origin}=int4 has too few bits for weights. Use int8.")
    return kind


def _names_of(what: str, example: str) -> Callable[[object, str], tuple[str, ...]]:
    def parse(value: object, origin: str) -> tuple[str, ...]:
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                f"{origin} is {repr_short(value)}, but must be names of {what}. Pass {example}."
            )
        return tuple(names)

    return parse


_names_of_blocks = _names_of("modules or classes", "'Block' or 'layers.*'")


def _blocks(value: Any, origin: str) -> tuple[str, ...] | BlockRule:
    return value if callable(value) else _names_of_blocks(value, origin)


def _batch_dims(value: object, origin: str) -> tuple[str, ...]:
    """Read ``ids=0,pos=none``, in code also ``{"ids": 0, "pos": None}``, as ``("ids=0", "pos=none")``."""
    if isinstance(value, Mapping):
        value = [f"{name}={'none' if dim is None else dim}" for name, dim in value.items()]
    entries = value.split(",") if isinstance(value, str) else value
    found: dict[str, str] = {}
    for entry in entries if isinstance(entries, (list, tuple)) else (None,):
        name, _, dim = entry.rpartition("=") if isinstance(entry, str) else ("", "", "")
        if not name or not (dim == "none" or dim.isdecimal()) or any(c.isspace() for c in entry):
            raise ConfigError(
                f"{origin}={repr_short(value)} must give arguments of the model and the dimension of the batch "
                "in each, or none. Write it like batch_dims=ids=0,pos=none."
            )
        if found.setdefault(name, dim) != dim:
            raise ConfigError(f"{origin}={repr_short(value)} says {name} twice. Say it once.")
    return tuple(f"{name}={dim}" for name, dim in found.items())


def _loss(value: object, origin: str) -> str:
    if str(value) not in LOSSES:
        raise ConfigError(
            f"{origin}={repr_short(value)} is not known.{suggestion(str(value), LOSSES)} Use mean or sum (of the "
            "losses of the batch), whole (compute the loss on the whole batch at once), or auto."
        )
    return str(value)


def _offload(value: object, origin: str) -> Offload:
    """Read one of the words; a truth value is all or nothing."""
    if isinstance(value, str) and value in Offload.list():
        return Offload(value)
    try:
        return Offload.ALL if parse_bool(value, origin) else Offload.NONE
    except ConfigError:
        raise ConfigError(
            f"{origin}={repr_short(value)} is not known.{suggestion(str(value), Offload.list())} "
            f"Use one of {', '.join(Offload.list())}."
        ) from None


def _offload_to(value: object, origin: str) -> str:
    """Read ``cpu``, or a folder as a text that stays one word in a line."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or text.lower() in NOT_FOLDERS:
        raise ConfigError(
            f"{origin}={repr_short(value)} is neither cpu nor a folder. Name a folder on a disk, such as "
            "/scratch/offload."
        )
    if not text.isprintable() or any(character.isspace() for character in text):
        raise ConfigError(
            f"{origin}={repr_short(value)} has spaces or control characters, which are not allowed here. Use a "
            "folder (or a link to one) whose path has none."
        )
    return HOST if text.lower() == HOST else text


def _tp_plan(value: Any, origin: str) -> str | tuple[tuple[str, str], ...] | None:
    if value is None or value in TP_PLANS:
        return None if value == "auto" else value
    entries = value.items() if isinstance(value, Mapping) else value
    if isinstance(entries, str) or not all(
        isinstance(entry, tuple) and len(entry) == 2 and all(isinstance(word, str) for word in entry)
        for entry in entries
    ):
        raise ConfigError(
            f"{origin} is {repr_short(value)}, but must be one of {', '.join(TP_PLANS)}, or in code a mapping of names "
            "to styles, such as {'layers.*.mlp.up': 'colwise'}. Pass one of these."
        )
    return tuple(entries)


def _verify(value: object, origin: str) -> str:
    """Read ``first_step``, ``off``, or ``every:N`` (in code also "every N")."""
    if isinstance(value, bool):
        return "first_step" if value else "off"
    text = str(value)
    word, _, number = text.replace(" ", ":").replace("=", ":").partition(":")
    if word == "every":
        return f"every:{parse_integer(number, f'{origin}=every', 1, 2**31)}"
    if text not in VERIFY:
        raise ConfigError(
            f"{origin}={repr_short(value)} is not known.{suggestion(text, VERIFY)} Use first_step, off, or every:N "
            "with a number of training calls."
        )
    return text


def text_of(value: object) -> str:
    """Return a field's value as ``parse`` reads it."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return f"{len(value)}_entries"
    if callable(value):
        return getattr(value, "__name__", "a rule")
    return ",".join(value) if isinstance(value, tuple) else str(value)


PARSERS: dict[str, Callable[[Any, str], object]] = {
    "strategy": _word_parser(Strategy),
    "zero": integer_between(0, 3),
    "replicate": integer_between(1, MOST_RANKS),
    "hpz": integer_between(0, MOST_RANKS),
    "reduce": _optional(_word_parser(ReduceType)),
    "quantized_weights": _weights_type,
    "quantized_gradients": _weights_type,
    "offload": _offload,
    "offload_to": _offload_to,
    "offload_budget": bytes_of,
    "forward_prefetch": parse_bool,
    "sync_batchnorm": parse_bool,
    "activation": _word_parser(Activation),
    "compile": _word_parser(Compile),
    "blocks": _blocks,
    "tp": integer_between(1, MOST_RANKS),
    "pp": integer_between(1, MOST_RANKS),
    "cp": integer_between(1, MOST_RANKS),
    "ep": integer_between(1, MOST_RANKS),
    "sequence_parallel": parse_bool,
    "loss_parallel": parse_bool,
    "tp_plan": _tp_plan,
    "cp_method": _word_parser(CPMethod),
    "schedule": _word_parser(Schedule),
    "micro_batches": integer_between(0, 2**20),
    "stages_per_rank": integer_between(0, 2**10),
    "split": _names_of("modules", "'layers.4,layers.8'"),
    "batch_dims": _batch_dims,
    "loss": _loss,
    "verify": _verify,
}

# What a word means that stands alone.
SWITCHED_ON = {
    "compile": Compile.BLOCKS.value,
    "offload": Offload.ALL.value,
    "forward_prefetch": "true",
    "sync_batchnorm": "true",
    "sequence_parallel": "true",
    "loss_parallel": "true",
    "quantized_weights": QuantizedType.INT8.value,
    "quantized_gradients": QuantizedType.INT8.value,
}


V_SHAPED = (Schedule.ZBV, Schedule.DUALPIPEV)
LOOPED = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)


def stages_per_rank(schedule: Schedule, asked: int) -> int:
    """Stages that each rank holds under ``schedule``; ``asked``: 0 lets it choose.

    Raises:
        ConfigError: the schedule does not work with that many.
    """
    if schedule in V_SHAPED:
        if asked not in (0, 2):
            raise ConfigError(
                f"schedule={schedule} folds the stages into a V, two on each rank, but stages_per_rank={asked}. "
                "Leave stages_per_rank out."
            )
        return 2
    if schedule in LOOPED:
        if asked == 1 and schedule is Schedule.INTERLEAVED:
            raise ConfigError(
                "schedule=interleaved needs several stages on each rank, but stages_per_rank=1. Use "
                "stages_per_rank=2 or schedule=1f1b."
            )
        return asked or (2 if schedule is Schedule.INTERLEAVED else 1)
    if asked > 1:
        raise ConfigError(
            f"schedule={schedule} has one stage on each rank, but stages_per_rank={asked}. Use "
            "schedule=interleaved, which has several."
        )
    return 1
