"""The part of a user's forward that one stage runs: from the call of its first block to the next stage's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.comm.tree import leaves, tensor_leaves
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.absent import Change, StageLeft, carried, changed, is_placeholder
from lockstep.parallel.pipeline.errors import needs_value
from lockstep.parallel.pipeline.exchange import Exchange, LocalBlock
from lockstep.parallel.pipeline.micro_batch import ModelCall
from lockstep.parallel.pipeline.state import ForwardState
from lockstep.parallel.pipeline.traced import RECEIVED, Cut, TensorMeta
from lockstep.runtime.failure import is_consequence
from lockstep.torch_internals import tensors as torch_tensors
from lockstep.torch_internals.autograd import FunctionContext
from lockstep.torch_internals.fake import UNKNOWN_VALUE


@dataclass
class Pass:
    """One way of a batch through the pipeline.

    ``finish(micro_batch, output)``: what the last stage returns; ``autocast``: around each forward; ``state``: what
    forwards change. With ``whole`` the last stage ends each micro-batch's forward with its last block, and what comes
    after that is ``whole(outputs of its blocks)``, which gives what it returns, once, with the last micro-batch.
    ``ends``: outputs of the last stage's blocks for the micro-batch that runs, if it ``wants_ends``. Where ``failures``
    is given, what a stage raises is noted, and it goes on with zeros on ``device``, so that no rank waits for it.
    """

    calls: list[ModelCall]
    finish: Callable[[int, object], object]
    autocast: Callable[[], AbstractContextManager[object]]
    state: ForwardState = field(default_factory=ForwardState)
    whole: Callable[[dict[str, list[object]]], object] | None = None
    ends: list[Tensor] = field(default_factory=list)
    wants_ends: bool = False
    failures: list[Exception] | None = None
    device: torch.device | None = None


class _Contiguous(torch.autograd.Function):
    """The same tensor; its gradient is contiguous, as sending it requires."""

    @staticmethod
    def forward(ctx: FunctionContext, tensor: Tensor) -> Tensor:
        # No view, because blocks may change their input in place.
        return tensor.data

    @staticmethod
    def backward(ctx: FunctionContext, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class StageForward:
    """A stage's part of the forward. Called with a micro-batch's number and what was received for it.

    Args:
        forward: The user's model.
        changes: What the modules and parameters of the model are while this stage runs.
        first: The stage's first block among them; None for stage 0.
        following: What the next stage receives; None for the last stage.
        own: The blocks of this stage, by name.
        exchange: Where more passes between stages than arguments of first blocks.
    """

    def __init__(
        self,
        forward: nn.Module,
        changes: list[Change],
        first: LocalBlock | None,
        following: Cut | None,
        own: dict[str, LocalBlock],
        exchange: Exchange | None,
    ) -> None:
        self._forward = forward
        self._exchange = exchange
        self._own = own
        self._collected: dict[str, list[object]] = {}
        self._changes = changes
        self._first = first
        self._following = following
        self._pass: Pass | None = None

    @property
    def now(self) -> Pass:
        """The way on which the batch is."""
        assert self._pass is not None
        return self._pass

    @now.setter
    def now(self, new: Pass) -> None:
        self._pass = new

    def __call__(self, micro_batch: int, received: tuple[Tensor, ...]) -> object:
        try:
            return self._run(micro_batch, received)
        except UNKNOWN_VALUE as error:
            refusal = needs_value(type(self._forward).__name__)
            refusal.__cause__ = error
            failed: Exception = refusal
        except Exception as error:
            failed = error
        # In a trial each rank goes on with zeros, and all ranks exchange what has failed at its end. Otherwise the
        # others would wait for a message that never comes.
        if self.now.failures is None or is_consequence(failed):
            raise failed
        self.now.failures.append(failed)
        kinds = () if self._following is None else self._following.kinds
        device = self.now.device
        return tuple(torch.zeros(kind.shape, dtype=kind.dtype, device=device) for kind in kinds)

    def _run(self, micro_batch: int, received: tuple[Tensor, ...]) -> object:
        call = self.now.calls[micro_batch]
        # The last stage: its tail runs once for all micro-batches.
        if self.now.whole is not None and self._following is None:
            return self._without_tail(micro_batch, call, received)
        self._listen()
        with self.now.state.micro_batch(), changed(self._changes), self.now.autocast():
            try:
                with self._receiving(received):
                    output = self._forward(*call.args, **call.kwargs)
                    if self._exchange is not None:
                        output = self._exchange.result(output)
            # The call of the next stage's first block: what it is called with is what this stage sends.
            except StageLeft as left:
                return self._sent(left.call)
            finally:
                self._forget_received()
            if self._following is not None:
                raise UsageError(
                    f"The forward ended without calling the block '{self._following.block}', at which the next "
                    "stage of the pipeline begins. A pipeline needs every block in each forward. Choose with "
                    "blocks=... only blocks that are always called."
                )
            return self.now.finish(micro_batch, output)

    def _listen(self) -> None:
        wanted = self.now.wants_ends and self._following is None
        ends = self.now.ends
        # Only the graph of the last forward is looked at; older ends would keep their graphs alive.
        ends.clear()
        for block in self._own.values():
            block.keep = (lambda _, out: ends.extend(tensor_leaves(out).values())) if wanted else None

    def _without_tail(self, micro_batch: int, call: ModelCall, received: tuple[Tensor, ...]) -> object:
        """Run the blocks of the last stage; behind those of the last micro-batch, the rest for all of them."""
        assert self.now.whole is not None
        if micro_batch == 0:
            self._collected = {name: [] for name in self._own}
            if self._exchange is not None:
                self._collected[RECEIVED] = []
        last = next(reversed(self._own))

        def note(name: str, out: object) -> None:
            self._collected[name].append(out)
            # Nothing behind the last block may run for a micro-batch: the rest is computed once, on all of them.
            if name == last:
                raise StageLeft(None)

        for block in self._own.values():
            block.keep = note
        try:
            with (
                self.now.state.micro_batch(),
                changed(self._changes),
                self.now.autocast(),
                self._receiving(received) as entered,
            ):
                if self._exchange is not None:
                    # What comes after the blocks runs again on what was received, before it was changed in place.
                    own = len(self._first.paths) if self._first is not None else 0
                    self._collected[RECEIVED].append((*entered[:own], *(t.clone() for t in entered[own:])))
                self._forward(*call.args, **call.kwargs)
        except StageLeft:
            pass
        finally:
            self._forget_received()
            for block in self._own.values():
                block.keep = None
        if micro_batch + 1 < len(self.now.calls):
            return ()
        collected, self._collected = self._collected, {}
        with self.now.state.micro_batch(), self.now.autocast():
            return self.now.whole(collected)

    @contextmanager
    def _receiving(self, received: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Let the forward inside find what was received."""
        entered = tuple(_Contiguous.apply(t) if t.requires_grad else t for t in received)
        # The arguments of the first block come first in the message, and then everything else that the stage uses.
        if self._first is not None:
            self._first.received = entered
        if self._exchange is None:
            yield entered
            return
        if self._following is None and self.now.wants_ends:
            self.now.ends.extend(entered)
        self._exchange.begin(entered)
        with self._exchange:
            yield entered

    def _forget_received(self) -> None:
        if self._first is not None:
            self._first.received = ()
        if self._exchange is not None:
            self._exchange.begin(())

    def _sent(self, call: object) -> tuple[Tensor, ...]:
        assert self._following is not None
        cut = self._following
        values: list[object] = []
        if self._exchange is not None:
            with self._exchange.calling(cut.block, call) as call:
                values = self._exchange.sent()
            self._exchange.check_used()
        given = leaves(call)
        # The order of ``cut.kinds``, by which the next stage has made its receive buffers.
        values = [*(given.get(path) for path in cut.paths), *values]
        return tuple(
            _sent(carried(value), kind, cut.block) for value, kind in zip(values, cut.kinds, strict=True)
        )


def _sent(value: object, kind: TensorMeta, block: str) -> Tensor:
    """Return what goes to the stage that begins with ``block``: a plain tensor of this kind.

    Raises:
        UsageError: the value is none.
    """
    if not isinstance(value, Tensor) or is_placeholder(value):
        raise UsageError(
            f"The block '{block}' begins a stage of the pipeline and was called with other arguments than for "
            "the first micro-batch. Call it with the same arguments each time."
        )
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if value.shape != kind.shape or (value.requires_grad and not kind.requires_grad):
        raise UsageError(
            f"The block '{block}' begins a stage of the pipeline and expects a tensor of shape "
            f"{tuple(kind.shape)} with requires_grad={kind.requires_grad}, but gets {tuple(value.shape)} with "
            f"requires_grad={value.requires_grad}. Freeze parameters before prepare(), and keep shapes that do "
            "not depend on values."
        )
    value = value.to(kind.dtype).contiguous()
    # torch detaches what was sent in place, which a view does not allow; a leaf is another stage's.
    is_shared = torch_tensors.is_view(value) or (value.is_leaf and value.requires_grad)
    return value.clone() if is_shared else value
