"""What splitting a model into stages and a batch into micro-batches means for its arguments, its state and its loss.

Found by what the forward computes, in the first training call, and again where the script changes a setting.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch import nn

from lockstep.comm.tree import LossFunction, tensor_leaves
from lockstep.errors import LockstepError, UsageError
from lockstep.model.changes import attributes_set
from lockstep.parallel.determinism import without_constants
from lockstep.parallel.pipeline.errors import (
    batch_norm,
    consequence_of,
    follows_rows,
    runs_only_whole,
    sees_micro_batches,
    text_of,
)
from lockstep.parallel.pipeline.local import LocalStages
from lockstep.parallel.pipeline.micro_batch import BatchDims, ModelCall, batch_size
from lockstep.parallel.pipeline.options import PipelineOptions
from lockstep.parallel.pipeline.passes import Batch, FoundReduction, WhyNot
from lockstep.parallel.pipeline.plan import PipelinePlan
from lockstep.parallel.pipeline.reduction import Edge, TensorPath, Undecided
from lockstep.parallel.pipeline.rehearsal import Rehearsal, without_chance
from lockstep.parallel.pipeline.rows import (
    argument_names,
    batch_of,
    check_known,
    described,
    find,
    given_dims,
    known_arguments,
)
from lockstep.parallel.pipeline.settings import Settings, settings_of_call
from lockstep.parallel.pipeline.whole_trace import used_arguments
from lockstep.runtime.seed import generators_kept

logger = logging.getLogger(__name__)

RankFindings = tuple[str, "tuple[str, str] | None", str, "list[str]", "list[tuple[int, str, bool]]", bool]
"""What a rehearsal found on one rank: what the loss is; (kind, name) of state that follows the rows; why a tensor can't
be put together; names of changed state; failures; whether something is watched."""


class Derivation:
    """Of one model. Collective over the pipeline's ranks.

    ``is_on``: False cuts all that is as long as the batch, takes each loss for a mean, and watches no state; for tests
    of what the proof finds by itself.
    """

    is_on: ClassVar[bool] = True

    def __init__(self, module: nn.Module, stages: LocalStages, options: PipelineOptions) -> None:
        self._module = module
        self._stages = stages
        self._options = options
        self._title = type(module).__name__
        self._known_dims: dict[str, int | None] = {}
        self._reductions: dict[object, FoundReduction] = {}
        self._kinds: dict[object, dict[tuple[str, str], str]] = {}
        self._left_alone: set[tuple[str, str]] = set()
        self._knows_numbers: set[object] = set()
        # What is decided now.
        self._moved: tuple[set[TensorPath], set[Edge]] = (set(), set())
        self._settings = Settings(module)
        # Whether something was found that nobody has proved.
        self.is_new = False
        self.is_rehearsing = False
        # Of all ranks; () is the first one.
        self._setting: tuple[int, ...] = ()
        self._first_setting = self._settings.digest()

    # -- arguments ---------------------------------------------------------------------------------------

    def arguments(self, call: ModelCall, loss_fn: LossFunction | None) -> Arguments:
        """Which of a call's arguments are cut."""
        names = argument_names(self._module, call)
        options = self._options
        given = dict(given_dims(options.batch_dims, names, call))
        check_known(options.batch_dims, names, known_arguments(self._module, names))
        given |= {path: None for path in names for name in options.whole if path.startswith(f"[1][{name!r}]")}
        return Arguments(self, call, loss_fn, names, given)

    def batch_size(self, arguments: Arguments) -> int:
        """How many samples the call has."""
        call, names, given = arguments.call, arguments.names, arguments.given
        tensors = tensor_leaves(call.tree)
        known = {path: dim for path, dim in self._known_dims.items() if path in names and dim is not None}
        if known:
            path, dim = next(iter(known.items()))
            return int(tensors[path].shape[dim])
        if not self.is_on:
            return batch_size(call, given)
        return batch_of(call, given, lambda tried: self._used_arguments(tried, arguments.loss_fn))

    def dims(self, arguments: Arguments, size: int, rows: int) -> BatchDims:
        """Which dimension of each argument is cut: known from another call, or found. ``rows``: of a micro-batch."""
        call, names, given = arguments.call, arguments.names, arguments.given
        tensors = tensor_leaves(call.tree)
        known = {path: self._known_dims[path] for path in names if path in self._known_dims}
        # Dimensions that were found once hold for any batch size, as long as shapes agree with them.
        if known.keys() == names.keys() and all(
            dim is None or tensors[path].shape[dim] == size for path, dim in known.items()
        ):
            return known
        if self.is_on:
            found = find(
                call,
                size,
                given,
                names,
                rows,
                lambda tried: self._used_arguments(tried, arguments.loss_fn),
                self._title,
            )
        else:
            found = {
                path: 0 if t.ndim and t.shape[0] == size else None for path, t in tensors.items()
            } | given
        self._known_dims |= found
        if dist.get_rank() == 0:
            logger.warning("%s: each micro-batch gets its rows of %s.", self._title, described(found, names))
        return found

    def _used_arguments(self, call: ModelCall, loss_fn: LossFunction | None) -> set[str] | None:
        return used_arguments(self._module, self._stages.layout, call, loss_fn)

    # -- state and loss ----------------------------------------------------------------------------------

    def refuse_batch_norm(self) -> None:
        """Raise UsageError if a module normalises by statistics of the batch."""
        if not self.is_on:
            return
        from_ranks = self._stages.gather_from_ranks(batch_norm(self._stages.layout.own_modules()))
        name = next((one for one in from_ranks if one is not None), None)
        if name is not None:
            raise sees_micro_batches(self._title, name)

    def reduction(self, batch: Batch) -> FoundReduction:
        """What the loss is over the batch; with the first batch a forward finds it, and what forwards change.

        Raises:
            UsageError: something that a forward changes follows the rows, or cannot be put together.
        """
        plan = batch.plan
        has_numbers = plan.micro_batches > 1 and plan.has_tensors_without_rows(self._stages.layout)
        kind = self._batch_kind(batch)
        plan.kinds = self._kinds.setdefault(kind, {})
        known = self._reductions.get(kind)
        # The first batch may have had no tensors without rows, and so has not shown what these are.
        if known is None or (has_numbers and kind not in self._knows_numbers):
            known = self._reductions[kind] = self._rehearsed(batch, has_numbers)
            self._knows_numbers |= {kind} if has_numbers else set()
            self._log_reduction(known, "the first batch")
        known.settings = self._settings if known.was_found or has_numbers else None
        known.puts_together = has_numbers
        return known

    def another(self, why: WhyNot, batch: Batch) -> FoundReduction:
        """What the loss is where ``reduction`` does not hold any more."""
        if why == "settings":
            mine = self._settings.digest()
            # A setting may change on one rank alone; the reduction is kept by what all ranks have.
            from_ranks = self._stages.gather_from_ranks((mine, mine == self._first_setting))
            is_first = all(same for _, same in from_ranks)
            self._setting = () if is_first else tuple(digest for digest, _ in from_ranks)
            self.refuse_batch_norm()
            return self.reduction(batch)
        kind = self._batch_kind(batch)
        before = self._reductions[kind].undecided
        if why == "undecided":
            del self._reductions[kind]
            self._moved = before.moved()
            try:
                return self.reduction(batch)
            finally:
                self._moved = set(), set()
        # Its gradient is right whatever parts it has; tensors that come to it may still be means or sums.
        rest = Undecided(before.places, is_watched=before.is_watched)
        self._reductions[kind] = FoundReduction("whole", True, undecided=rest)
        self._log_reduction(self._reductions[kind], "this batch")
        return self._reductions[kind]

    def _batch_kind(self, batch: Batch) -> object:
        settings = settings_of_call(batch.whole), self._setting
        return batch.plan.loss, batch.loss_fn is not None, self._module.training, settings

    def _rehearsed(self, batch: Batch, has_numbers: bool) -> FoundReduction:
        stages, plan, word = self._stages, batch.plan, self._options.loss_reduction
        if not self.is_on:
            return FoundReduction("mean" if word == "auto" else word, False)
        is_open = word == "auto" and plan.loss is not None and plan.micro_batches > 1
        rehearsal = Rehearsal(stages, batch, is_open, self._title)
        whole = None
        if plan.micro_batches > 1 and (is_open or word == "whole" or plan.loss is None):
            whole = self._whole_plan(plan)
        modules = dict(self._module.named_modules())
        own = {id(p): p for _, m in stages.layout.own_modules() for p in m.parameters()}.values()
        with generators_kept(), without_chance(modules), attributes_set(self, is_rehearsing=True):
            # With weights of zero or one a sum and a mean could look alike.
            with without_constants(own):
                rehearsal.run(whole, has_numbers)
            undecided = self._still_undecided(rehearsal)
            entry, changed = stages.state.differing(), stages.state.changed()
            mine = None if entry is None else (entry.kind, entry.name)
            if (parameter := stages.state.written_parameter()) is not None:
                mine = ("parameter", parameter)
            stages.state.forget_batch()
            failures = self._failures(rehearsal, plan)
        is_watched = bool(undecided.places or undecided.edges)
        from_ranks = stages.gather_from_ranks(
            (rehearsal.word, mine, rehearsal.refusal, changed, failures, is_watched)
        )
        # Only the rank of the last stage knows, but all must take part in asking whether it has moved.
        undecided.is_watched = any(one[-1] for one in from_ranks)
        self._refuse(rehearsal, batch, from_ranks)
        # A block is on one rank. What is outside of blocks may be on several: all take what one has changed.
        blocks = tuple(f"{name}." for name in stages.layout.blocks)
        names = {name for _, _, _, names, *_ in from_ranks for name in names}
        stages.state.share(name for name in names if not name.startswith(blocks))
        self._settings.leave_out(names)
        if not self._setting:
            self._first_setting = self._settings.digest()
        found = next((one for one, *_ in from_ranks if one), "mean" if word == "auto" else word)
        if found == "whole":
            undecided.edges = set()
        self.is_new = True
        return FoundReduction(found, is_open, undecided=undecided)

    def _refuse(self, rehearsal: Rehearsal, batch: Batch, from_ranks: list[RankFindings]) -> None:
        """Raise what any rank has found wrong: the same kind on all ranks, in the same order."""
        for _, _, _, _, others, _ in from_ranks:
            for rank, text, is_by_cut in others:
                if is_by_cut:
                    cut = described(batch.plan.dims, argument_names(self._module, batch.whole))
                    cause = next(iter(rehearsal.failures), None)
                    raise runs_only_whole(self._title, text, batch.plan.micro_batches, cut) from cause
                if rehearsal.failures:
                    raise rehearsal.failures[0]
                raise consequence_of(rank, self._title, text)
        wrong = next((one for _, one, *_ in from_ranks if one is not None), None)
        if wrong is not None:
            raise follows_rows(self._title, *wrong)
        refusal = next((one for _, _, one, *_ in from_ranks if one), None)
        if refusal is not None:
            raise UsageError(refusal)

    def _whole_plan(self, plan: PipelinePlan) -> PipelinePlan:
        """Of the whole batch as one micro-batch."""
        whole = PipelinePlan.of(plan.whole, plan.whole, 1, plan.dims)
        whole.build_segments(self._module, self._stages.layout, self._stages.indices)
        return whole

    def _failures(self, rehearsal: Rehearsal, plan: PipelinePlan) -> list[tuple[int, str, bool]]:
        """This rank, what its forwards raised first, and whether they raise it of micro-batches alone."""
        own = rehearsal.failures[:1]
        from_ranks = self._stages.gather_from_ranks([isinstance(error, LockstepError) for error in own])
        is_by_cut = False
        # Refusals of our own say themselves what is wrong; any other error may come from the cut.
        if plan.micro_batches > 1 and any(from_ranks) and not any(map(any, from_ranks)):
            raises = rehearsal.raises_on_whole(self._whole_plan(plan))
            is_by_cut = not any(self._stages.gather_from_ranks(raises))
        return [(dist.get_rank(), text_of(error), is_by_cut) for error in own]

    def _still_undecided(self, rehearsal: Rehearsal) -> Undecided:
        """What is to be watched from now on.

        What has come to differ only with dropout or with random numbers is not found again without them: such a loss
        is computed on the whole batch, and such a tensor is refused where it was zero.
        """
        undecided = rehearsal.undecided
        places, edges = self._moved
        if edges & undecided.edges:
            rehearsal.word = "whole"
        for name, path in places & undecided.places.keys():
            self._left_alone.add((name, path))
            if undecided.places[name, path] and not rehearsal.refusal:
                rehearsal.refusal = str(rehearsal.neither(name, path))
        for place in self._left_alone & undecided.places.keys():
            del undecided.places[place]
        return undecided

    def _log_reduction(self, reduction: FoundReduction, when: str) -> None:
        if dist.get_rank() == 0 and reduction.word == "whole" and reduction.was_found:
            logger.warning(
                "%s: on %s the loss is neither the mean nor the sum of the losses of the micro-batches (for "
                "example because of padded tokens). So it is computed on the whole batch at once, with all "
                "forwards before all backwards. To keep schedule=%s, return the sum over the batch divided by a "
                "number that is passed in (such as num_items_in_batch).",
                self._title,
                when,
                self._options.schedule,
            )


@dataclass(frozen=True)
class Arguments:
    """Those of one call. ``names``: of its tensors by path; ``given``: what the options say of them."""

    derivation: Derivation
    call: ModelCall
    loss_fn: LossFunction | None
    names: dict[str, str]
    given: dict[str, int | None]

    def batch_size(self) -> int:
        """How many samples the call has."""
        return self.derivation.batch_size(self)

    def dims(self, size: int, rows: int) -> BatchDims:
        """Which dimension of each is cut into micro-batches of ``rows``."""
        return self.derivation.dims(self, size, rows)
