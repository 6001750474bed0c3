"""What goes wrong in a pipeline: what no cut into micro-batches can be right for, and which rank failed.

A rank that fails in a pass is named on the others, which only see that it went away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch.distributed as dist
from torch import nn

from lockstep.errors import LockstepError, UsageError
from lockstep.runtime import failure
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.c10d import default_store


def batch_norm(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Return the first module that normalises by statistics of the batch."""
    found = (name for name, one in modules if isinstance(one, torch_modules.BatchNorm) and one.training)
    return next(found, None)


def sees_micro_batches(title: str, name: str) -> UsageError:
    """Return the error for batch normalisation."""
    return UsageError(
        f"The module '{name}' of {title} is a batch normalisation, which computes statistics over the whole "
        "batch, but a pipeline gives it one micro-batch at a time. Use GroupNorm or LayerNorm instead, or "
        "freeze its statistics by calling eval() of this module after model.train()."
    )


def follows_rows(title: str, kind: str, name: str) -> UsageError:
    """Return the error for a buffer or attribute that micro-batches change differently, or a parameter that they
    change."""
    if kind == "parameter":
        return UsageError(
            f"The forward of {title} changes the parameter '{name}' in place, and a pipeline would do that once "
            "for each micro-batch. Change it in the training loop, after optimizer.step(), or keep these values "
            "in buffers."
        )
    return UsageError(
        f"The forward of {title} changes the {kind} '{name}' with values of the batch, so each micro-batch of a "
        "pipeline leaves another value in it. Only changes that do not depend on the rows, such as a count of "
        f"steps, are possible. Return these values from the model, and change '{name}' in the training loop."
    )


def fails_on_parts(title: str, text: str, micro_batches: int, names: str) -> UsageError:
    """Return the error for a forward that raises what ``text`` says of a micro-batch."""
    return UsageError(
        f"The forward of {title} raises {text.rstrip('.')} on one of the {micro_batches} micro-batches of a "
        f"pipeline. Each gets its rows of {names}. If one of these must not be cut, write batch_dims=NAME=none in "
        "parallel='pp=...'; if it needs more rows, set a smaller micro_batches. If samples depend on each other "
        "(nodes of one graph, bags that begin at offsets), give the batch a dimension of its own in all "
        "arguments, or leave pp out."
    )


def counts_differ(title: str) -> UsageError:
    """Return the error for a mean of micro-batches that divide by other numbers."""
    return UsageError(
        f"The loss of {title} is no mean of the losses of its micro-batches: they divide by different numbers (of "
        "unpadded tokens, for example), or a function of your own computes it. Say loss=mean, loss=sum or "
        "loss=whole in parallel='pp=...'. For a mean over unpadded tokens, say loss=whole. Or return a sum that is "
        "divided by a number that is passed in (num_items_in_batch), with loss=sum."
    )


def unknown_result(block: str, where: str, text: str) -> UsageError:
    """Return the error for a forward that raises ``text`` after a block whose results are not known without values."""
    return UsageError(
        f"The forward of the block '{block}' branches on values or reads one. A pipeline first runs the blocks "
        "without values, and assumes that such a block returns one tensor like its first argument and keeps "
        f"nothing. Then the forward of {where} raises {text.rstrip('.')}. Let the block return one tensor only, "
        "or choose by masks (torch.where, x[mask], index_add) instead of by if, .item() or .tolist()."
    )


def needs_value(title: str) -> UsageError:
    """Return the error for a forward that needs, or returns, a value that only another stage has."""
    return UsageError(
        f"The forward of {title} needs a value of a tensor that only another "
        "stage of the pipeline has, such as a weight of its blocks. Move this code into that block, or "
        "into the training loop."
    )


def leaked(where: str, shape: Sequence[int]) -> UsageError:
    """Return the error for a tensor that ``where`` uses, and that an earlier stage has made and not handed on."""
    return UsageError(
        f"The forward of {where} uses a tensor of shape {tuple(shape)} that was made inside "
        "of a block of an earlier stage of the pipeline. That block neither returns it nor keeps it as an "
        "attribute (a hook took it, or a container that blocks share). Let the block return it: x, aux = "
        "block(x). For transformers, set output_router_logits, output_attentions and output_hidden_states "
        "to False."
    )


def kept_elsewhere(where: str, name: str) -> UsageError:
    """Return the error for a parameter that the forward of ``where`` does not read from a module."""
    return UsageError(
        f"The forward of {where} uses the parameter '{name}' without reading it from a module (a "
        "function or a list holds it, or holds its module). So a pipeline cannot know which of its stages "
        "needs it. Read it as an attribute, such as self.scale, or pass it as an argument; hold modules in "
        "an nn.ModuleList."
    )


MOST_CHARACTERS = 300
PassPart = Literal["forward", "backward"]


@contextmanager
def first_is_named(
    group: dist.ProcessGroup, title: str, call: int, part: PassPart = "forward"
) -> Iterator[None]:
    """Name the rank that failed first in a pass of a model called ``title``; ``call``: its number, the same on all
    ranks of ``group``.

    The store of the main group has the message of the rank that failed. Nothing is sent while none does.

    Raises:
        UsageError: another rank of the pipeline has failed.
    """
    try:
        yield
    except Exception as error:
        key = f"lockstep/pipeline/{dist.get_process_group_ranks(group)}/{title}/{part}/{call}"
        # A rank that failed by itself says why; the others only saw a connection end.
        if not failure.is_consequence(error):
            _publish_error(key, error)
            raise
        message = _reported_error(key)
        if message is None:
            raise
        rank, _, text = message.partition(" ")
        raise consequence_of(int(rank), title, text, part) from error


def consequence_of(rank: int, title: str, text: str, part: PassPart = "forward") -> UsageError:
    """Return what other ranks raise where ``rank`` has failed."""
    consequence = UsageError(
        f"Rank {rank} failed in the {part} of {title} with {text} This rank stops with it. Mend the cause on that "
        "rank."
    )
    consequence.caused_by_rank = rank
    return consequence


def text_of(error: Exception) -> str:
    """Return what it was, in one line."""
    cause: BaseException = error
    while not isinstance(cause, LockstepError) and isinstance(cause.__cause__, Exception):
        # torch wraps what a forward raises.
        cause = cause.__cause__
    return f"{type(cause).__name__}: {failure.first_line(cause)[:MOST_CHARACTERS].rstrip('.')}."


def _publish_error(key: str, error: Exception) -> None:
    text = text_of(error)
    try:
        store = default_store()
        if not store.check([key]):
            store.set(key, f"{dist.get_rank()} {text}")
    except RuntimeError:
        # The store is gone with its rank: the error itself is still raised.
        return


def _reported_error(key: str) -> str | None:
    try:
        store = default_store()
        return str(store.get(key).decode()) if store.check([key]) else None
    except RuntimeError:
        return None


def note_module(error: Exception, where: str) -> None:
    """Remember in which module ``error`` was raised, where frames only show copies of it."""
    if module_noted(error) is None:
        error.raised_in = where  # type: ignore[attr-defined]


def module_noted(error: BaseException | None) -> str | None:
    """Return what ``note_module`` remembered of it or of its causes."""
    while error is not None:
        noted: str | None = getattr(error, "raised_in", None)
        if noted is not None:
            return noted
        error = error.__cause__
    return None
