"""Plain attributes of modules, and plain arguments, by which a script changes what a forward computes.

A loss that was a mean may be a sum after ``model.reduction = "sum"``. What the forward itself changes (counts) is not
meant, and neither is a number that the script changes step by step: after a few times such a one counts as annealed,
and only its becoming zero, or no longer zero, still does.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.comm.tree import leaves
from lockstep.parallel.pipeline.micro_batch import ModelCall
from lockstep.torch_internals import modules as torch_modules

MOST_CHANGES = 3
"""Of a number, each of which is looked at."""
_PLAIN = (bool, int, float, str, type(None))
_WITHOUT_CHANCE = (torch_modules.Dropout, nn.MultiheadAttention)


def settings_of_call(call: ModelCall) -> object:
    """Equal for calls that compute the same of tensors: numbers count by whether they are zero, others by value."""
    found: list[object] = []
    for path, leaf in leaves(call.tree).items():
        if isinstance(leaf, Tensor):
            found.append(path)
        elif isinstance(leaf, (str, bool, type(None))):
            found.append((path, leaf))
        elif isinstance(leaf, (int, float)):
            found.append((path, leaf == 0))
    return tuple(found)


class _ModuleSettings(NamedTuple):
    """The settings of one module: ``get(attributes)`` are the values of ``keys`` now, one alone if there is one."""

    prefix: str
    attributes: dict[str, object]
    keys: tuple[str, ...]
    get: Callable[[dict[str, object]], object]

    @staticmethod
    def of(prefix: str, attributes: dict[str, object], keys: Iterable[str]) -> _ModuleSettings:
        keys = tuple(keys)
        return _ModuleSettings(prefix, attributes, keys, operator.itemgetter(*keys))


class Settings:
    """Of all modules of a model on this rank, as they are now. ``have_changed`` costs 0.1 ms for 1000 modules."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[_ModuleSettings] = []
        for name, module in model.named_modules():
            # Our own placeholders change with the stage that runs.
            if type(module).__module__.startswith("lockstep."):
                continue
            keys = ["training"] + [
                key
                for key, value in vars(module).items()
                if key not in torch_modules.OWN_ATTRIBUTES
                and isinstance(value, _PLAIN)
                # Rehearsals set these to zero for a while.
                and not (isinstance(module, _WITHOUT_CHANCE) and key in ("p", "dropout"))
            ]
            self._modules.append(_ModuleSettings.of(f"{name}." if name else "", vars(module), keys))
        self._changes: Counter[str] = Counter()
        self._values = self._read_values()

    def _restrict_to(self, wanted: Callable[[_ModuleSettings, str], bool]) -> None:
        self._modules = [
            _ModuleSettings.of(one.prefix, one.attributes, (key for key in one.keys if wanted(one, key)))
            for one in self._modules
        ]

    def _read_values(self) -> list[object]:
        try:
            return [one.get(one.attributes) for one in self._modules]
        except KeyError:
            # One of them was deleted.
            self._restrict_to(lambda one, key: key in one.attributes)
            self._values = []
            return self._read_values()

    def leave_out(self, names: Iterable[str]) -> None:
        """Forwards change these attributes themselves."""
        unwanted = set(names)
        self._restrict_to(lambda one, key: f"{one.prefix}{key}" not in unwanted)
        self._values = self._read_values()

    def have_changed(self) -> bool:
        """Whether the script has set one of them since this was last asked."""
        now = self._read_values()
        if now == self._values:
            return False
        before, self._values = self._values, now
        if len(before) != len(now):
            return True
        found = False
        for one, old, new in zip(self._modules, before, now, strict=True):
            if old == new:
                continue
            for key, a, b in zip(one.keys, _as_values(one.keys, old), _as_values(one.keys, new), strict=True):
                if a != b and self._counts(f"{one.prefix}{key}", a, b):
                    found = True
        return found

    def _counts(self, name: str, old: object, new: object) -> bool:
        if isinstance(new, bool) or not isinstance(new, (int, float)) or not isinstance(old, (int, float)):
            return True
        self._changes[name] += 1
        return self._changes[name] <= MOST_CHANGES or (old == 0) != (new == 0)

    def digest(self) -> int:
        """Equal where they are, but for annealed numbers."""
        return hash(
            tuple(
                value == 0 if self._changes[f"{one.prefix}{key}"] > MOST_CHANGES else value
                for one, values in zip(self._modules, self._values, strict=True)
                for key, value in zip(one.keys, _as_values(one.keys, values), strict=True)
            )
        )


def _as_values(keys: tuple[str, ...], values: Any) -> tuple[object, ...]:
    return values if len(keys) > 1 else (values,)
