"""The part of a user's forward that one stage runs: from the call of its first block to the next stage's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.tree import leaves, map_leaves
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.absent import AbsentBlock, Instead, carried, carry, is_stand_in
from lockstep.parallel.pipeline.carried import Exchange
from lockstep.parallel.pipeline.micro_batch import Call
from lockstep.parallel.pipeline.reduction import Undecided
from lockstep.parallel.pipeline.state import ForwardState
from lockstep.parallel.pipeline.trace import RECEIVED, Argument, Cut, Kind
from lockstep.runtime.failure import is_consequence
from lockstep.torch_internals import tensors as torch_tensors
from lockstep.torch_internals.fake import UNKNOWN_VALUE

_MISSING = object()
Change = tuple[dict[str, Any], str, Any]
"""(dict, key, value) of an entry that is changed while a stage runs."""


@dataclass
class Pass:
    """One way of a batch through the pipeline.

    ``finish(micro_batch, output)``: what the last stage returns; ``autocast``: around each forward; ``state``: what
    forwards change. With ``whole`` the last stage ends each micro-batch's forward with its last block, and what comes
    after that is ``whole(outputs of its blocks)``, which gives what it returns, once, with the last micro-batch.
    """

    calls: list[Call]
    finish: Callable[[int, Any], Any]
    autocast: Callable[[], AbstractContextManager[Any]]
    state: ForwardState = field(default_factory=ForwardState)
    whole: Callable[[dict[str, list[Any]]], Any] | None = None
    notes_whole: bool = True  # what ``whole`` changes counts
    ends: list[Tensor] = field(
        default_factory=list
    )  # outputs of the last stage's blocks, where they are wanted
    wants_ends: bool = False
    undecided: Undecided | None = None  # told what comes to the end of the last stage
    failures: list[Exception] | None = None
    """Where given: what a stage raises is noted, and it goes on with zeros, so that no rank waits for it."""
    device: torch.device | None = None


@dataclass
class Conversion:
    """What is done to tensors that leave a stage, and to those that enter one."""

    leave: Callable[[Tensor], Tensor]
    enter: Callable[[Tensor], Tensor]


@contextmanager
def changed(changes: list[Change]) -> Iterator[None]:
    """The entries have other values inside."""
    before = [(entries, key, entries.get(key, _MISSING)) for entries, key, _ in changes]
    for entries, key, value in changes:
        entries[key] = value
    try:
        yield
    finally:
        for entries, key, value in before:
            if value is _MISSING:
                del entries[key]
            else:
                entries[key] = value


class _Left(BaseException):  # not an Exception, so that no handler in the user's forward takes it
    def __init__(self, call: Any) -> None:
        self.call = call


class NextStage(AbsentBlock):
    """The first block of the next stage: this one's forward ends where it is called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Left((args, kwargs))


class Replayed(AbsentBlock):
    """A block of an earlier stage: returns stand-ins of what it returned when the model was traced."""

    def __init__(self, name: str, block: nn.Module, result: Any) -> None:
        super().__init__(name, block)
        self._result = result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = leaves((args, kwargs))
        new: dict[int, Tensor] = {}

        def again(_: str, leaf: Any) -> Any:
            if isinstance(leaf, Argument):
                return given[leaf.path]
            if not isinstance(leaf, Tensor):
                return leaf
            # A new one each time: the value that it carries is of one micro-batch.
            return new.setdefault(id(leaf), leaf.detach())

        return map_leaves(again, self._result)


class ReplayedPart(Instead):
    """A module outside of blocks that an earlier stage calls: returns stand-ins of what it gave in the trace."""

    def __init__(self, module: nn.Module, result: Any) -> None:
        super().__init__(module)
        self._result = result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return map_leaves(lambda _, leaf: leaf.detach(), self._result)


class LocalBlock(Instead):
    """A block of this stage: stand-ins among its arguments are replaced by what was received for them."""

    def __init__(
        self, name: str, block: nn.Module, cut: Cut | None = None, exchange: Exchange | None = None
    ) -> None:
        super().__init__(block)
        self._name = name
        self._cut = cut  # where it is the first of its stage
        self._exchange = exchange
        self.paths = cut.paths if cut is not None else ()
        self.received: tuple[Tensor, ...] = ()
        self.keep: Callable[[Any], None] | None = None  # told what the block returns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._cut is not None:
            given = leaves((args, kwargs))
            for path, value in zip(self._cut.paths, self.received, strict=False):
                carry(given[path], value)
        exchange = self._exchange
        if exchange is None:
            args, kwargs = map_leaves(lambda _, leaf: carried(leaf), (args, kwargs))
            out = self.replaced(*args, **kwargs)
        else:
            with exchange.calling(self._name, (args, kwargs)) as (args, kwargs):
                out = self.replaced(*args, **kwargs)
            exchange.returned(self._name, out)
        if self.keep is not None:
            self.keep(out)
        return out


class Given(Instead):
    """A block of the last stage whose outputs are there already, those of several micro-batches as one."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        result: Any,
        returned: Any,
        exchange: Exchange | None = None,
        received: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``returned``: the result in the trace, in which arguments that come back unchanged are marked; ``received``:
        path -> argument, of the first block of the stage."""
        super().__init__(block)
        self._name = name
        self._result = result
        self._returned = leaves(returned)
        self._exchange = exchange
        self._received = received or {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._exchange is not None:
            for path, value in self._received.items():
                carry(leaves((args, kwargs))[path], value)
            with self._exchange.calling(self._name, (args, kwargs)) as (args, kwargs):
                pass
        given = leaves((args, kwargs))

        def own(path: str, leaf: Any) -> Any:
            argument = self._returned.get(path)
            if isinstance(argument, Argument) and not is_stand_in(given[argument.path]):
                return given[argument.path]
            return for_itself(leaf)

        out = map_leaves(own, self._result)
        if self._exchange is not None:
            self._exchange.returned(self._name, out)
        return out


def for_itself(leaf: Any) -> Any:
    """A tensor that may be changed in place, where ``leaf`` begins a graph."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_leaf else leaf


class _Contiguous(torch.autograd.Function):
    """The same tensor; its gradient is contiguous, as sending it requires."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data  # no view: blocks may change their input in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class Segment:
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
        conversion: Conversion,
        own: dict[str, LocalBlock] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._forward = forward
        self._exchange = exchange
        self._own = own or {}
        self._collected: dict[str, list[Any]] = {}
        self._changes = changes
        self._first = first
        self._following = following
        self._conversion = conversion
        self.now: Pass | None = None

    def __call__(self, micro_batch: int, received: tuple[Tensor, ...]) -> Any:
        assert self.now is not None
        try:
            return self._run(micro_batch, received)
        except UNKNOWN_VALUE as error:
            refusal = UsageError(
                f"The forward of {type(self._forward).__name__} needs a value of a tensor that only another stage of "
                "the pipeline has, such as a weight of its blocks. Move this into that block, or into the training "
                "loop."
            )
            refusal.__cause__ = error
            failed: Exception = refusal
        except Exception as error:
            failed = error
        if self.now.failures is None or is_consequence(failed):
            raise failed
        self.now.failures.append(failed)
        kinds = () if self._following is None else self._following.kinds
        device = self.now.device
        return tuple(torch.zeros(kind.shape, dtype=kind.dtype, device=device) for kind in kinds)

    def _run(self, micro_batch: int, received: tuple[Tensor, ...]) -> Any:
        assert self.now is not None
        call = self.now.calls[micro_batch]
        if self.now.whole is not None and self._following is None:
            return self._without_tail(micro_batch, call, received)
        self._listen()
        with self.now.state.micro_batch(), changed(self._changes), self.now.autocast():
            try:
                with self._given(received):
                    output = self._forward(*call.args, **call.kwargs)
                    if self._exchange is not None:
                        output = self._exchange.result(output)
            except _Left as left:
                return self._sent(left.call)
            finally:
                self._let_go()
            if self._following is not None:
                raise UsageError(
                    f"The forward ended without calling the block '{self._following.block}', at which the next stage "
                    "of the pipeline begins. A pipeline needs every block in each forward: choose them with blocks=..."
                )
            return self.now.finish(micro_batch, output)

    def _listen(self) -> None:
        assert self.now is not None
        wanted = self.now.wants_ends and self._following is None
        ends, undecided = self.now.ends, self.now.undecided
        ends.clear()

        def keep(name: str) -> Callable[[Any], None]:
            def note(out: Any) -> None:
                found = leaves(out)
                ends.extend(leaf for leaf in found.values() if isinstance(leaf, Tensor))
                if undecided is not None:
                    undecided.note(name, found.items())

            return note

        for name, block in self._own.items():
            block.keep = keep(name) if wanted else None

    def _without_tail(self, micro_batch: int, call: Call, received: tuple[Tensor, ...]) -> Any:
        """The blocks of the last stage; behind those of the last micro-batch, the rest for all of them."""
        assert self.now is not None
        assert self.now.whole is not None
        if micro_batch == 0:
            self._collected = {name: [] for name in self._own}
            if self._exchange is not None:
                self._collected[RECEIVED] = []
        last = next(reversed(self._own))
        undecided = self.now.undecided

        def keep(name: str) -> Callable[[Any], None]:
            def note(out: Any) -> None:
                self._collected[name].append(out)
                if undecided is not None:
                    undecided.note(name, leaves(out).items())
                if name == last:
                    raise _Left(None)

            return note

        for name, block in self._own.items():
            block.keep = keep(name)
        try:
            with (
                self.now.state.micro_batch(),
                changed(self._changes),
                self.now.autocast(),
                self._given(received) as entered,
            ):
                if self._exchange is not None:
                    # What comes after the blocks runs again on what was received, before it was changed in place.
                    own = len(self._first.paths) if self._first is not None else 0
                    self._collected[RECEIVED].append((*entered[:own], *(t.clone() for t in entered[own:])))
                self._forward(*call.args, **call.kwargs)
        except _Left:
            pass
        finally:
            self._let_go()
            for block in self._own.values():
                block.keep = None
        if micro_batch + 1 < len(self.now.calls):
            return ()
        collected, self._collected = self._collected, {}
        with self.now.state.micro_batch(note=self.now.notes_whole), self.now.autocast():
            return self.now.whole(collected)

    @contextmanager
    def _given(self, received: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """The forward inside finds what was received."""
        entered = tuple(self._enter(tensor) for tensor in received)
        if self._first is not None:
            self._first.received = entered
        if self._exchange is None:
            yield entered
            return
        assert self.now is not None
        if self._following is None:
            if self.now.wants_ends:
                self.now.ends.extend(entered)
            if self.now.undecided is not None:
                self.now.undecided.note(RECEIVED, ((f"[{i}]", tensor) for i, tensor in enumerate(entered)))
        self._exchange.begin(entered)
        with self._exchange:
            yield entered

    def _let_go(self) -> None:
        if self._first is not None:
            self._first.received = ()
        if self._exchange is not None:
            self._exchange.begin(())

    def _enter(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor = _Contiguous.apply(tensor)
        return self._conversion.enter(tensor)

    def _sent(self, call: Any) -> tuple[Tensor, ...]:
        assert self._following is not None
        cut = self._following
        values: list[Any] = []
        if self._exchange is not None:
            with self._exchange.calling(cut.block, call) as call:
                values = self._exchange.sent()
            self._exchange.check_used()
        given = leaves(call)
        sent = tuple(
            self._leave(value, kind, cut.block)
            for value, kind in zip(
                [*(given.get(path) for path in cut.paths), *values], cut.kinds, strict=True
            )
        )
        return sent

    def _leave(self, value: Any, kind: Kind, block: str) -> Tensor:
        value = carried(value)
        if not isinstance(value, Tensor) or is_stand_in(value):
            raise UsageError(
                f"The block '{block}' begins a stage of the pipeline and was called with other arguments than for the "
                "first micro-batch. Call it in the same way each time."
            )
        value = self._conversion.leave(value)
        if value.shape != kind.shape or (value.requires_grad and not kind.requires_grad):
            raise UsageError(
                f"The block '{block}' begins a stage of the pipeline and expects a tensor of shape "
                f"{tuple(kind.shape)} with requires_grad={kind.requires_grad}, but gets {tuple(value.shape)} with "
                f"requires_grad={value.requires_grad}. Freeze parameters before prepare(), and keep shapes that do "
                "not depend on values."
            )
        value = value.to(kind.dtype).contiguous()
        # torch detaches what was sent in place, which a view does not allow; a leaf is another stage's.
        return (
            value.clone()
            if torch_tensors.is_view(value) or (value.is_leaf and value.requires_grad)
            else value
        )
