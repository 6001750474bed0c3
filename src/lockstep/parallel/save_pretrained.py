"""``save_pretrained`` of a model of which each rank holds parts: refused where it would write those."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lockstep.errors import UsageError
from lockstep.model.changes import Subclassed, subclass

NAME = "save_pretrained"


class RefusesParts(Subclassed):
    """Mixed into the class of a model whose weights are split over ranks."""

    def save_pretrained(self, *args: object, **kwargs: object) -> object:
        call = getattr(super(), NAME)
        return saved(type(self).__name__, NAME, call, args, kwargs)


def refuse_parts(model: nn.Module) -> None:
    """Let the model say what to do where its own method would save this rank's parts. In place."""
    if callable(getattr(type(model), NAME, None)):
        model.__class__ = subclass(type(model), RefusesParts)


def saved(
    kind: str, name: str, call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Return what ``call`` returns.

    Raises:
        UsageError: it was given shards.
    """
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        # These are safetensors' words for a tensor without storage.
        if "invalid python storage" not in str(error):
            raise
        raise UsageError(
            f"{kind}.{name}() would save the shards of one rank. Pass it the whole weights, which all ranks "
            "gather together: state_dict=accelerator.get_state_dict(model)."
        ) from error
