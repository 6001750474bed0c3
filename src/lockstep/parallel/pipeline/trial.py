"""The first training call runs all forwards once before it trains, and leaves nothing of them.

A rank whose stage raises does not leave the others waiting then: all of them raise. And what forwards change beside
their results is found (``ForwardState``).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lockstep.comm.tree import tensor_leaves
from lockstep.errors import LockstepError
from lockstep.parallel.pipeline.absent import is_placeholder
from lockstep.parallel.pipeline.errors import (
    consequence_of,
    fails_on_parts,
    follows_rows,
    needs_value,
    text_of,
)
from lockstep.parallel.pipeline.local import LocalStages
from lockstep.parallel.pipeline.passes import Batch, fill_only
from lockstep.parallel.pipeline.stage_forward import Pass
from lockstep.runtime.seed import generators_kept


def try_forwards(stages: LocalStages, batch: Batch, needs_whole: bool, rows: str) -> None:
    """Run the forwards of ``batch``. Collective; ``rows``: the arguments that are cut, in words.

    Raises:
        UsageError: a stage raises, or its forward changes something with values of the batch.
    """
    failures: list[Exception] = []

    def finish(part: int | None, output: object) -> tuple[Tensor, ...]:
        found = tensor_leaves(batch.with_loss(output, part))
        # A weight of another stage in it: its backward would fail on this rank alone.
        trained_on = found.values() if batch.plan.loss is None else [found[batch.plan.loss]]
        if any(map(is_placeholder, trained_on)):
            raise needs_value(stages.title)
        return ()

    def whole(outputs: dict[str, list[object]]) -> tuple[Tensor, ...]:
        return finish(None, batch.tail_of(outputs))

    once = Pass(batch.parts, finish, batch.autocast.inside, whole=whole if needs_whole else None)
    once.failures, once.device = failures, stages.device
    with generators_kept():
        fill_only(stages, batch.plan, once, find=True)
    state = stages.state
    wrong, changed = state.follows_rows(), state.changed()
    state.forget_batch()
    failed = [(dist.get_rank(), text_of(error), isinstance(error, LockstepError)) for error in failures[:1]]
    from_ranks = stages.gather_from_ranks((failed, wrong, changed))
    for rank, text, is_refusal in (one for of_rank, _, _ in from_ranks for one in of_rank):
        if not is_refusal:
            cause = next(iter(failures), None)
            raise fails_on_parts(stages.title, text, len(batch.parts), rows) from cause
        raise failures[0] if failures else consequence_of(rank, stages.title, text)
    for kind, name in (one for _, one, _ in from_ranks if one is not None):
        raise follows_rows(stages.title, kind, name)
    # A block is on one rank. What is outside of blocks may be on several: all take what one has changed.
    blocks = tuple(f"{name}." for name in stages.layout.blocks)
    state.share(name for _, _, names in from_ranks for name in names if not name.startswith(blocks))
