"""How a model is spread, as one line of words: ``Accelerator(parallel="zero=3 replicate=2")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lockstep.config.enums import Activation, QuantizedType, ReduceType, Strategy
from lockstep.config.values import parse_bool, parse_integer, shown, suggestion
from lockstep.errors import ConfigError

BlockRule = Callable[[str, Any], bool]
"""Called with (name, module) of each submodule: whether it is a block."""

LATER_WORDS = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class Parallel:
    """What ``parallel=`` asks for. ``str()`` of one is the line that ``parse`` reads.

    - ``strategy``: ``auto`` (several processes use DistributedDataParallel), ``ddp``, ``dataparallel``.
    - ``zero``: the stage of ZeRO; 0: off. 1 shards the optimizer, 2 also gradients, 3 also parameters.
    - ``replicate``: groups of ranks that hold a whole model each (hybrid sharding).
    - ``hpz``: with stage 3, keep parameters sharded over so many neighbouring ranks between forward and
      backward (the secondary partition of ZeRO++); 0: over all.
    - ``reduce``: the type in which gradients are averaged under mixed precision; None: that of the
      computation.
    - ``quantized_weights``: gather weights as 8-bit integers.
    - ``quantized_gradients``: average gradients as integers of this type.
    - ``offload``: shards of parameters, gradients and optimizer state live in host memory.
    - ``forward_prefetch``: gather the next block's parameters before the current block runs.
    - ``activation``: what of a block's activations is kept for backward.
    - ``blocks``: names of the modules to shard and to recompute one by one: a class, a module's name, or
      a pattern such as ``layers.*``; or a rule (name, module) -> bool. Empty: found.

    References: Rajbhandari et al., ZeRO, SC 2020; Wang et al., ZeRO++, 2023; Zhao et al., PyTorch FSDP, VLDB 2023.

    Raises:
        ConfigError: a value is not allowed, or two contradict each other.
    """

    strategy: Strategy = Strategy.AUTO
    zero: int = 0
    replicate: int = 1
    hpz: int = 0
    reduce: ReduceType | None = None
    quantized_weights: QuantizedType | None = None
    quantized_gradients: QuantizedType | None = None
    offload: bool = False
    forward_prefetch: bool = False
    activation: Activation = Activation.NONE
    blocks: tuple[str, ...] | BlockRule = ()

    def __post_init__(self) -> None:
        for name, parse in _PARSERS.items():
            object.__setattr__(self, name, parse(getattr(self, name), f"parallel: {name}"))
        self._check_together()

    @classmethod
    def parse(cls, given: str | Parallel | Mapping[str, Any] | None) -> Parallel:
        """From a line such as ``"zero=3 activation=full"``, a mapping, or None (the default).

        Raises:
            ConfigError: an unknown word, a value that is not allowed, or a contradiction.
        """
        if given is None:
            return cls()
        if isinstance(given, Parallel):
            return given
        if isinstance(given, Mapping):
            return cls(**{_known(name): value for name, value in given.items()})
        if not isinstance(given, str):
            raise ConfigError(
                f"parallel is {shown(given)}, but must be a text such as 'zero=3', or a Parallel. Pass one of these."
            )
        values: dict[str, Any] = {}
        for word in given.split():
            name, equals, value = word.partition("=")
            if not equals and name in Strategy.list():
                name, value = "strategy", name
            elif not equals:
                value = _SWITCHED_ON.get(_known(name), "")
            if _known(name) in values:
                raise ConfigError(f"parallel={given!r} says {name} twice. Say it once.")
            if not value:
                raise ConfigError(f"parallel={given!r}: {name} has no value. Write {name}=VALUE.")
            values[name] = value
        return cls(**values)

    def merged(self, **values: Any) -> Parallel:
        """This with other values; None leaves a field as it is.

        Raises:
            ConfigError: a field was given both here and there, differently.
        """
        given = {_known(name): value for name, value in values.items() if value is not None}
        for name, value in given.items():
            mine = getattr(self, name)
            value = _PARSERS[name](value, name)
            if mine != getattr(Parallel, name) and mine != value:
                raise ConfigError(
                    f"{name} is {_text(mine)} in parallel='{self}' but {name}={_text(value)} was given too. "
                    "Say it in one place."
                )
        return replace(self, **given)

    def __str__(self) -> str:
        words = [] if self.strategy is Strategy.AUTO else [str(self.strategy)]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "strategy" or value == getattr(Parallel, field.name):
                continue
            words.append(field.name if value is True else f"{field.name}={_text(value)}")
        return " ".join(words) or "auto"

    @property
    def shards(self) -> bool:
        """Whether any stage of ZeRO is asked for."""
        return self.zero > 0

    def shard_size(self, world_size: int) -> int:
        """The number of ranks over which one copy of the model's state is sharded; 1 in a world of one.

        Raises:
            ConfigError: the world cannot be divided this way; the message has the arithmetic.
        """
        if world_size == 1:
            return 1
        if world_size % self.replicate:
            raise ConfigError(
                f"parallel='{self}' wants {self.replicate} groups of equal size, but there are {world_size} processes "
                f"({world_size} / {self.replicate} is not whole). Set replicate to a divisor of {world_size}."
            )
        size = world_size // self.replicate
        if size == 1 and self.replicate > 1:
            raise ConfigError(
                f"parallel='{self}' with {world_size} processes leaves groups of {world_size} / {self.replicate} = 1, "
                "in which nothing is sharded. Use a smaller replicate, or parallel='ddp'."
            )
        if self.hpz and (size % self.hpz or not 1 < self.hpz < size):
            raise ConfigError(
                f"parallel='{self}': hpz={self.hpz} must divide the {size} ranks that share a model, and be neither 1 "
                f"nor {size}. Choose such a divisor, or drop hpz."
            )
        return size

    def _check_together(self) -> None:
        if self.shards and self.strategy is not Strategy.AUTO:
            raise ConfigError(
                f"parallel has both '{self.strategy}' and zero={self.zero}, which exclude each other. Drop one of them."
            )
        for name in _NEED_ZERO:
            if not self.shards and getattr(self, name) != getattr(Parallel, name):
                raise ConfigError(f"parallel: {name} needs a stage of ZeRO. Add zero=1, zero=2 or zero=3.")
        if self.hpz and self.zero != 3:
            raise ConfigError(
                f"parallel: hpz={self.hpz} changes how stage 3 keeps parameters, but zero={self.zero}. Use zero=3, or "
                "drop hpz."
            )
        if self.blocks and not self.shards and self.activation is Activation.NONE:
            raise ConfigError(
                "parallel: blocks are named, but nothing uses them. Add zero=... or activation=..., or drop blocks."
            )


def _known(name: str) -> str:
    known = [field.name for field in fields(Parallel)]
    if name in LATER_WORDS:
        raise ConfigError(f"parallel: {name} is not available yet. Use zero, or remove it.")
    if name not in known:
        words = [*known[1:], *Strategy.list()]
        hint = suggestion(name, words) or f" Use one of {', '.join(words)}."
        raise ConfigError(f"parallel has no word {shown(name)}.{hint}")
    return name


def _word(kind: Any) -> Callable[[Any, str], Any]:
    def parse(value: Any, origin: str) -> Any:
        if isinstance(value, kind):
            return value
        if str(value) not in kind.list():
            hint = suggestion(str(value), kind.list()) or f" Use one of {', '.join(kind.list())}."
            raise ConfigError(f"{origin}={shown(value)} is not known.{hint}")
        return kind(str(value))

    return parse


def _optional(parse: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, origin: None if value in (None, "no", "none") else parse(value, origin)


def _between(low: int, high: int) -> Callable[[Any, str], int]:
    return lambda value, origin: parse_integer(value, origin, low, high)


def _weights_type(value: Any, origin: str) -> QuantizedType | None:
    if isinstance(value, bool):
        value = QuantizedType.INT8 if value else None
    kind: QuantizedType | None = _optional(_word(QuantizedType))(value, origin)
    if kind is QuantizedType.INT4 and origin.endswith("quantized_weights"):
        raise ConfigError(f"{origin}=int4 is too coarse for weights. Use int8.")
    return kind


def _blocks(value: Any, origin: str) -> tuple[str, ...] | BlockRule:
    if callable(value):
        rule: BlockRule = value
        return rule
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"{origin} is {shown(value)}, but must be names of modules or classes. Pass 'Block' or 'layers.*'."
        )
    return tuple(names)


def _text(value: Any) -> str:
    if callable(value):
        return getattr(value, "__name__", "a rule")
    return ",".join(value) if isinstance(value, tuple) else str(value)


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "strategy": _word(Strategy),
    "zero": _between(0, 3),
    "replicate": _between(1, 2**20),
    "hpz": _between(0, 2**20),
    "reduce": _optional(_word(ReduceType)),
    "quantized_weights": _weights_type,
    "quantized_gradients": _weights_type,
    "offload": parse_bool,
    "forward_prefetch": parse_bool,
    "activation": _word(Activation),
    "blocks": _blocks,
}

# What a word means that stands alone.
_SWITCHED_ON = {
    "offload": "true",
    "forward_prefetch": "true",
    "quantized_weights": "int8",
    "quantized_gradients": "int8",
}

_NEED_ZERO = (
    "replicate",
    "hpz",
    "reduce",
    "quantized_weights",
    "quantized_gradients",
    "offload",
    "forward_prefetch",
)
