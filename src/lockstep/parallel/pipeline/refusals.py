"""What no cut into micro-batches can be right for, said before the first step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lockstep.errors import UsageError
from lockstep.torch_internals import modules as torch_modules


def batch_norm(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """The first module that normalises by statistics of the batch."""
    found = (name for name, one in modules if isinstance(one, torch_modules.BatchNorm) and one.training)
    return next(found, None)


def sees_micro_batches(title: str, name: str) -> UsageError:
    """For batch normalisation."""
    return UsageError(
        f"The module '{name}' of {title} is a batch normalisation, which takes its statistics over the whole batch, "
        "but a pipeline shows it one micro-batch at a time. Use GroupNorm or LayerNorm in its place, or freeze its "
        "statistics by calling eval() of this module after model.train()."
    )


def follows_rows(title: str, kind: str, name: str) -> UsageError:
    """For a buffer or attribute that micro-batches change differently."""
    return UsageError(
        f"The forward of {title} changes the {kind} '{name}' by what is in the batch, and a pipeline's micro-batches "
        "leave different values there. Only what changes in the same way whatever the rows are (a count of steps) is "
        "changed once a step. Return from the model what this one is made of, and change it in the training loop."
    )
