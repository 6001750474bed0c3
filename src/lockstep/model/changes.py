"""What is changed of a user's modules: they get subclasses of their own classes, hooks, and no key-value caches."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn

from lockstep.errors import UsageError

logger = logging.getLogger(__name__)


class Subclassed:
    """Mixed into an object's class. Copies keep the subclass; pickles become the user's own class.

    Nobody can import the subclass, so a file must do without it: it can be loaded without Lockstep.
    """

    _plain_class: type
    _attributes: ClassVar[tuple[str, ...]] = ()
    """What the mixin adds to the object, and a pickle leaves out."""

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        # deepcopy must do what it does with the user's own class.
        with attributes_set(self, __class__=self._plain_class):
            copied = copy.deepcopy(self, memo)
        copied.__class__ = type(self)
        return copied

    def __copy__(self) -> object:
        with attributes_set(self, __class__=self._plain_class):
            copied = copy.copy(self)
        copied.__class__ = type(self)
        return copied

    def __reduce_ex__(self, protocol: object) -> str | tuple[object, ...]:
        plain: object = object.__new__(self._plain_class)
        plain.__dict__.update(self.__dict__)
        for name in self._attributes:
            plain.__dict__.pop(name, None)
        # Of protocol 1 is the form that does not insist on the class of the object at hand.
        return plain.__reduce_ex__(1)


def subclass(cls: type, mixin: type[Subclassed], /, **attributes: object) -> type:
    """Return a subclass of ``cls`` with the same name, under ``mixin``."""
    return type(cls.__name__, (mixin, cls), {**identity_of(cls), "_plain_class": cls, **attributes})


def identity_of(cls: type) -> dict[str, object]:
    """Return what a subclass takes over to look like ``cls``."""
    return {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}


@contextmanager
def attributes_set(subject: object, **values: object) -> Iterator[None]:
    """Attributes of ``subject`` have these values inside."""
    before = {name: getattr(subject, name) for name in values}
    try:
        for name, value in values.items():
            setattr(subject, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(subject, name, value)


class PartialStateMark:
    """An attribute of a ``state_dict`` that has only this rank's parameters: it is not pickled, and so not saved."""

    NAME = "_lockstep_part"

    def __deepcopy__(self, memo: object) -> PartialStateMark:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Raise UsageError."""
        raise UsageError(
            "A state_dict that has only the parameters of this rank's pipeline stages was to be saved or pickled. To "
            "write whole weights, call accelerator.save_model(model, folder) on every rank. To have them on rank 0, "
            "call accelerator.get_state_dict(model) on every rank. To save a run that goes on later, call "
            "accelerator.save_state(folder)."
        )


def mark_partial_state(module: object, state: Any, prefix: str, metadata: object) -> None:
    """Mark a state dictionary, as a hook of ``state_dict``."""
    # Not of submodules; a plain dict that the caller passed takes no attribute.
    if not prefix and isinstance(state, OrderedDict):
        setattr(state, PartialStateMark.NAME, PartialStateMark())


class UncopiedHook:
    """Copies and pickles of the module lose it: what is left of it there does nothing."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _copy_of_hook, ()


def _copy_of_hook() -> Callable[..., None]:
    return _ignore


def _ignore(*args: object, **kwargs: object) -> None:
    pass


def disable_cache(model: nn.Module, why: str) -> None:
    """Turn off ``use_cache`` of every configuration in the model; the log says ``why``."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", False) is True:
            config.use_cache = False
            logger.info("use_cache of %s is turned off: %s.", type(module).__name__, why)
