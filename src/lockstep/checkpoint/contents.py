"""What a checkpoint is made of: the prepared objects of a run, and the user's hooks. Imports nothing heavy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.comm.tree import StateDict
from lockstep.errors import ArgumentError, UsageError

SaveHook = Callable[[list[nn.Module], list[StateDict], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


HookFunction = TypeVar("HookFunction")


class Stateful(Protocol):
    """What can be saved and loaded."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict, /) -> object: ...


class AccumulationWindow(Stateful, Protocol):
    """The accumulation window of a run; see ``preparation.window``."""

    def places(self) -> list[str]:
        """Return the names of the parameters that this rank has, each behind the number of its model."""

    def is_unchanged(self, states: list[dict[str, object]]) -> bool:
        """Return whether ranks that are spread as those that saved these go on."""

    def check(self, states: list[StateDict]) -> None:
        """Raise CheckpointError unless the states are of these models."""

    def load_state_dicts(self, states: list[dict[str, object]], rank: int) -> None:
        """Go on in it: one state for each rank with gradients of its own, and the number of this rank's. Collective."""


@dataclass
class Hooks:
    """Functions of the user that run before a state is saved or loaded.

    A model whose entry a hook takes out of the list of weights (of models, when loading) is left to it.
    """

    save: OrderedDict[int, SaveHook] = field(default_factory=OrderedDict)
    load: OrderedDict[int, LoadHook] = field(default_factory=OrderedDict)

    @staticmethod
    def add(hooks: OrderedDict[int, HookFunction], hook: HookFunction) -> RemovableHandle:
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle


@dataclass(frozen=True)
class DataCoordinates:
    """What a rank's own state belongs to: its number among those with batches of their own, and among those whose
    gradients are averaged.

    Ranks that differ in tensor or pipeline parallel only have the same numbers; those that share a sequence (context
    parallel) differ in ``gradient_rank`` alone.
    """

    data_rank: int
    data_size: int
    gradient_rank: int
    gradient_size: int


@dataclass(frozen=True)
class FullModelSpec:
    """A model before its blocks went to several ranks.

    ``names`` are those in its ``state_dict``, in order; ``ties`` the first name of each weight that has several, by
    the others, also where no rank has both.
    """

    names: tuple[str, ...]
    ties: Mapping[str, str]

    def names_of(self, name: str) -> set[str]:
        """Return all names of the weight that has this one."""
        first = self.ties.get(name, name)
        return {first, *(other for other, of in self.ties.items() if of == first)}


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return the first name of each weight that has several, by the others."""
    firsts: dict[int, str] = {}
    names = (
        (name, firsts.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)
    )
    return {name: first for name, first in names if first != name}


NO_TIES = FullModelSpec((), {})


@dataclass
class CheckpointContents:
    """What a checkpoint holds. ``models`` are unwrapped; ``parts`` have ``state_dict``/``load_state_dict``, by kind.

    Models of which each rank has some blocks only list those; ``whole`` tells of such a model by its number.
    ``place`` is None where every rank has batches and gradients of its own. ``keep_waiting`` gets the states of loaders
    that will be prepared after the load.
    """

    models: list[nn.Module]
    parts: dict[str, list[Any]]
    place: DataCoordinates | None = None
    whole: Mapping[int, FullModelSpec] = field(default_factory=dict)
    keep_waiting: Callable[[list[StateDict]], None] | None = None

    def whole_of(self, number: int) -> FullModelSpec:
        """Return what is known of a model's other ranks."""
        return self.whole.get(number, NO_TIES)

    def stateful(self, *kinds: str) -> Iterator[tuple[str, Any]]:
        """Yield the parts of these kinds with their names."""
        for kind in kinds:
            for i, item in enumerate(self.parts.get(kind, ())):
                yield f"{kind}.{i}", item

    def only(self, kinds: Collection[str]) -> CheckpointContents:
        """Return the models, and the parts of these kinds."""
        return replace(self, parts={kind: items for kind, items in self.parts.items() if kind in kinds})

    def counts(self) -> dict[str, int]:
        """Return how many objects of each kind there are."""
        counts = {kind: len(items) for kind, items in self.parts.items() if items and kind != "window"}
        return {"model": len(self.models), **counts}


def checked_stateful(objects: Iterable[object]) -> list[object]:
    """Return the objects, if all of them can be saved and loaded; else UsageError."""
    objects = list(objects)
    refused = [
        f"Item at index {index} is a {type(item).__name__}"
        for index, item in enumerate(objects)
        if not callable(getattr(item, "state_dict", None))
        or not callable(getattr(item, "load_state_dict", None))
    ]
    if refused:
        raise ArgumentError(
            "register_for_checkpointing needs objects with state_dict() and load_state_dict(). "
            f"{', '.join(refused)}. Give these objects both methods, or do not register them."
        )
    return objects


def refuse_options(method: str, options: Mapping[str, object], known: Collection[str] = ()) -> None:
    """Raise UsageError for options that other libraries take, but which mean nothing here."""
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise UsageError(
            f"{method} got {', '.join(unknown)}, which it does not use: states are saved and loaded as they are. "
            "Remove these arguments."
        )
