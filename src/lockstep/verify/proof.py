"""The first batch proves a split: the whole model computes it too, on one rank, and all numbers are compared."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.comm.collectives import Communicator
from lockstep.errors import LockstepError, UsageError
from lockstep.model.changes import UncopiedHook
from lockstep.parallel.determinism import BeforeWrites, WithoutChance, without_capacities, without_dropout
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.pipeline.errors import module_noted
from lockstep.parallel.sync_batchnorm import unsynchronized
from lockstep.runtime import failure
from lockstep.runtime.process import Runtime
from lockstep.torch_internals import compile as torch_compile
from lockstep.verify import sentences
from lockstep.verify.compare import Comparison, RoundingLimits, compare_with_whole
from lockstep.verify.module_sums import observed
from lockstep.verify.passes import Chunks, ComparedBatch, PassResult, in_full_precision, run_pass, shapes_of
from lockstep.verify.snapshot import Snapshot, numbers
from lockstep.verify.whole_model import Collector, Reference, SplitModelState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """How a model is split.

    ``axes``: the words of those that split it; ``interval``: see ``Verification``; ``half``: the type in which weights
    are gathered, where it has 16 bits.
    """

    parallel: object
    axes: list[str]
    interval: int
    device: torch.device
    shares_batches: bool
    half: torch.dtype | None
    is_compiled: bool
    at_rest: Callable[[], None] = lambda: None
    unnoticed: Callable[[Callable[[], None]], None] = lambda call: call()


class Verification:
    """Of one model, made before it is split.

    In its first training call, and with ``interval`` N > 0 in every N-th, the model is run forward and backward once
    more, without dropout, as it is split and, on rank 0, whole. Loss, outputs, all gradients, buffers and numbers that
    modules keep are compared. Nothing of these passes is left: gradients, buffers, random numbers are put back.
    """

    def __init__(self, model: nn.Module, setup: Setup, communicator: Communicator) -> None:
        self._setup = setup
        self._communicator = communicator
        self._name = type(model).__name__
        self._collector = Collector(model, communicator)
        self._reference: Reference | None = None
        self._reason = ""
        self._prepared: ParallelModel | None = None
        self._handle: RemovableHandle | None = None
        self._calls = 0
        self._is_due = True
        self._is_running = False
        self._has_verified = False
        if communicator.runtime.is_main:
            try:
                self._reference = Reference(model)
            except UsageError as error:
                self._reason = str(error)

    def watch(self, prepared: ParallelModel) -> None:
        """Verify calls of the model as it is split."""
        self._prepared = prepared
        self._collector.note_split(prepared.plain)
        hook = _BeforeForward(self)
        self._handle = prepared.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)

    def before_call(self, batch: ComparedBatch) -> None:
        """Verify with this batch, if it is time. Collective.

        Raises:
            UsageError: the split model computes something else, or cannot run what the whole one can.
        """
        if self._is_running or not torch.is_grad_enabled() or not self._counts():
            return
        self._verify(batch)

    def _counts(self) -> bool:
        interval = self._setup.interval
        if interval and self._calls % interval == 0:
            self._is_due = True
        self._calls += 1
        return self._is_due

    def _verify(self, batch: ComparedBatch) -> None:
        # The forwards that are compared are calls, too.
        self._is_running = True
        try:
            self._verify_now(batch)
        finally:
            self._is_running = False

    def _verify_now(self, batch: ComparedBatch) -> None:
        assert self._prepared is not None
        model = self._prepared.plain
        if not self._collector.is_ready(self._prepared):
            # Gradients wait for more: verified at the next call.
            return
        chunks = Chunks.of(model, batch)
        if chunks is not None:
            batch = chunks.whole(batch)
        # Rank 0 decides: all ranks run the passes, or none does.
        reason = self._shared([self._why_not(chunks)])[0]
        if not reason and self._setup.shares_batches:
            batch, reason = self._same_batch(batch)
        if reason:
            self._say_not(reason)
            self._finish()
            return
        batch = batch.detached()
        self._setup.at_rest()
        # Before it is noted what modules keep.
        with unsynchronized(model.modules()):
            comparison, reason = self._compared_twice(model, batch, chunks)
        axes = self._setup.axes
        self._report(comparison, reason, axes if chunks is None else ["chunks", *axes])
        self._is_due = False
        if not self._setup.interval:
            self._finish()

    def _compared_twice(
        self, model: nn.Module, batch: ComparedBatch, chunks: Chunks | None
    ) -> tuple[Comparison | None, str]:
        """Compare, and if something differs again to see where that begins; everything is put back."""
        snapshot = Snapshot(model)
        before = numbers(model)
        with self._apart(model), ExitStack() as undo, BeforeWrites(snapshot.before_write):
            undo.callback(snapshot.restore)
            live = self._collector.live(model, snapshot)
            comparison, reason = self._compared(model, batch, chunks, live, before, look=False)
            # Rank 0 alone has compared. All ranks take part in the second run, or none.
            if self._shared([comparison is not None and bool(comparison.differences)])[0]:
                self._collector.drop_gradients(model)
                snapshot.restore()
                comparison, reason = self._compared(model, batch, chunks, live, before, look=True)
        return comparison, reason

    def _finish(self) -> None:
        self._is_due = False
        self._reference = None
        if self._handle is not None:
            self._handle.remove()

    def _compared(
        self,
        model: nn.Module,
        batch: ComparedBatch,
        chunks: Chunks | None,
        live: SplitModelState,
        before: dict[str, object],
        look: bool,
    ) -> tuple[Comparison | None, str]:
        """Compare on rank 0, or say why not. To ``look`` at modules costs more, and shows where a difference begins."""
        whole, limits, reason = self._run_reference(batch, live, look)
        reason = self._shared([reason])[0]
        if reason:
            return None, reason
        if chunks is None:
            split = self._split(model, batch, look)
        else:
            shapes = self._shared([shapes_of(whole.outputs) if whole is not None else {}])[0]
            with chunks.split(batch) as part:
                split = self._split(model, part, look, lambda output: chunks.joined(output, shapes))
        digests, ranks = self._collector.gather(model, split, before)
        if whole is None or limits is None:
            return None, ""
        return compare_with_whole(split, whole, digests, ranks, limits), ""

    # The two passes -----------------------------------------------------------------------------------

    def _split(
        self,
        model: nn.Module,
        batch: ComparedBatch,
        look: bool,
        joined: Callable[[object], object] = lambda output: output,
    ) -> PassResult:
        assert self._prepared is not None
        prepared, module = self._prepared, self._prepared.module

        def call(given: ComparedBatch) -> object:
            if given.loss_function is not None and prepared.runs_micro_batches:
                pipeline: Any = module
                return pipeline.train_step(given.loss_function, given.targets, given.args, given.kwargs)
            output = joined(module(*given.args, **given.kwargs))
            return output if given.loss_function is None else given.loss_function(output, *given.targets)

        def backward(objective: Tensor) -> None:
            prepared.backward_begins(objective)
            self._setup.unnoticed(objective.backward)
            prepared.reduce_gradients()

        try:
            with observed(model if look else None) as seen, prepared.synchronised():
                result = run_pass(call, batch, backward)
        except LockstepError:
            raise
        except Exception as error:
            # Whatever a user's forward raises once it is split.
            if failure.is_consequence(error):
                raise
            for cause in sentences.causes_of(error):
                # torch's schedules wrap what a stage raises.
                if isinstance(cause, LockstepError):
                    raise cause from error
            setup, cause = self._setup, sentences.causes_of(error)[-1]
            name = module_noted(error) or sentences.module_of(cause, model)
            raise UsageError(
                sentences.cannot_run(self._name, setup.parallel, setup.axes, cause, name)
            ) from error
        result.observed = seen
        return result

    def _run_reference(
        self, batch: ComparedBatch, live: SplitModelState, look: bool
    ) -> tuple[PassResult | None, RoundingLimits | None, str]:
        """Return the result on rank 0 and what rounding explains of it, or why there is none."""
        if self._reference is None:
            return None, None, ""
        setup, without_chance = self._setup, self._without_chance
        try:
            with _threads_of_all(self._communicator.runtime):
                whole = self._reference.run(batch, live, setup.device, without_chance, look)
                if not whole.gradients:
                    return None, None, "no gradient comes of its outputs."
                moved = self._reference.run_disturbed(batch, live, setup.device, without_chance, setup.half)
        except Exception as error:
            # Whatever a user's forward raises.
            reason = f"the whole model raises {type(error).__name__} on rank 0: {sentences.line_of(error)}."
            return None, None, reason
        return whole, RoundingLimits(whole, moved, setup.half, batch.positions), ""

    @contextmanager
    def _without_chance(self, model: nn.Module) -> Iterator[None]:
        modules = list(model.modules())
        with without_dropout(modules), unsynchronized(modules), ExitStack() as stack:
            if self._setup.shares_batches and "pp" not in self._setup.axes:
                stack.enter_context(without_capacities(modules))
            yield

    @contextmanager
    def _apart(self, model: nn.Module) -> Iterator[None]:
        """Nothing random, nothing compiled, full precision."""
        assert self._prepared is not None
        with ExitStack() as stack:
            stack.enter_context(WithoutChance())
            stack.enter_context(self._without_chance(model))
            # Where weights are gathered with 16 bits it stays so: ``RoundingLimits`` says what that explains.
            if self._setup.half is None:
                stack.enter_context(in_full_precision(self._prepared.module))
                stack.enter_context(torch.autocast(self._setup.device.type, enabled=False))
            if self._setup.is_compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
            self._collector.drop_gradients(model)

    # What ranks tell each other -----------------------------------------------------------------------

    def _shared(self, values: list[object]) -> list[Any]:
        """Return rank 0's values."""
        return self._communicator.broadcast_object_list(values)

    def _why_not(self, chunks: Chunks | None) -> str:
        if self._reference is None:
            return self._reason
        if chunks is not None and chunks.why_not():
            return chunks.why_not()
        try:
            self._reference.check_memory(self._setup.device)
        except UsageError as error:
            return str(error)
        return ""

    def _same_batch(self, batch: ComparedBatch) -> tuple[ComparedBatch, str]:
        """Return rank 0's, so that ranks with batches of their own have the same."""
        host = batch.detached(torch.device("cpu"))
        try:
            values = self._shared([(host.args, host.kwargs, host.targets)])
        except Exception as error:
            # Of pickle, or of what it pickles.
            return (
                batch,
                f"its batch cannot be sent to other ranks ({type(error).__name__}: {sentences.line_of(error)}).",
            )
        args, kwargs, targets = values[0]
        return ComparedBatch(args, kwargs, batch.loss_function, targets).detached(self._setup.device), ""

    def _report(self, comparison: Comparison | None, reason: str, axes: list[str]) -> None:
        if reason:
            self._say_not(reason)
            return
        text, is_right = "", True
        if comparison is not None:
            is_right = not comparison.differences
            parallel = self._setup.parallel
            when = f"in training call {self._calls}" if self._has_verified else "on the first batch"
            text = (
                sentences.verified(self._name, parallel, when, comparison)
                if is_right
                else sentences.different(self._name, parallel, when, axes, comparison)
            )
        text, is_right = self._shared([text, is_right])
        if not is_right:
            raise UsageError(text)
        if self._communicator.runtime.is_main:
            logger.log(logging.INFO if self._has_verified else logging.WARNING, "%s", text)
        self._has_verified = True

    def _say_not(self, reason: str) -> None:
        if self._communicator.runtime.is_main:
            logger.warning("%s", sentences.not_verified(self._name, self._setup.parallel, reason))


class _BeforeForward(UncopiedHook):
    """A forward pre-hook."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification

    @torch_compile.disable
    def __call__(
        self, module: nn.Module, args: Sequence[object], kwargs: dict[str, object] | None = None
    ) -> None:
        # Without kwargs it is a pipeline's train_step, which is verified with its loss.
        if kwargs is not None:
            self._verification.before_call(ComparedBatch(args, kwargs))


@contextmanager
def _threads_of_all(runtime: Runtime) -> Iterator[None]:
    """Compute with the threads of all ranks of this machine, which wait meanwhile."""
    before = torch.get_num_threads()
    if runtime.device.type == "cpu":
        torch.set_num_threads(max(before, min(before * runtime.local_world_size, os.cpu_count() or 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
