"""Objects that get a subclass of their own class: as in torch's ``fully_shard``, names and ``isinstance`` stay."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class Subclassed:
    """Mixed into an object's class. Copies keep the subclass; pickles become the user's own class.

    Nobody can import the subclass, so a file must do without it: it can be loaded without Lockstep.
    """

    _plain_class: type
    _attributes: ClassVar[tuple[str, ...]] = ()
    """What the mixin adds to the object, and a pickle leaves out."""

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        cls = type(self)
        with _as_plain(self):  # as the user's class is copied
            copied = copy.deepcopy(self, memo)
        copied.__class__ = cls
        return copied

    def __copy__(self) -> Any:
        cls = type(self)
        with _as_plain(self):
            copied = copy.copy(self)
        copied.__class__ = cls
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        plain: Any = object.__new__(self._plain_class)
        plain.__dict__.update(self.__dict__)
        for name in self._attributes:
            plain.__dict__.pop(name, None)
        # Of protocol 1 is the form that does not insist on the class of the object at hand.
        return plain.__reduce_ex__(1)


def subclass(cls: type, mixin: type[Subclassed], /, **attributes: object) -> type:
    """A subclass of ``cls`` with the same name, under ``mixin``."""
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_plain_class": cls,
    }
    return type(cls.__name__, (mixin, cls), {**names, **attributes})


@contextmanager
def _as_plain(subclassed: Any) -> Iterator[None]:
    cls = type(subclassed)
    subclassed.__class__ = subclassed._plain_class
    try:
        yield
    finally:
        subclassed.__class__ = cls
