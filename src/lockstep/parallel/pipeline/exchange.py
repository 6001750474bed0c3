"""What passes between stages beside the arguments of first blocks, while a stage's forward runs.

``Values`` has seen in the trace of the model what that is. It travels with the messages between stages; a stage's
forward finds it where it uses it, and the blocks of the stage are called with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.comm.tree import Args, Kwargs, Tree, leaves, map_leaves
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.absent import ReplacementModule, attach_value, carried, is_placeholder
from lockstep.parallel.pipeline.carried import (
    ITSELF,
    OUTPUT,
    calling,
    changed_by,
    has_placeholder,
    is_about,
    name_of,
)
from lockstep.parallel.pipeline.traced import Argument, Cut, Fetch, Source
from lockstep.torch_internals.dispatch import TorchFunction


class Exchange(TorchFunctionMode):
    """Within a stage's forward: uses what was received, and keeps what the next stage is sent.

    Args:
        fetches: What the stage uses, in order.
        sources: Where what it sends comes from.
        module: A module of this stage by name.
        within: Whether something is used within blocks.
    """

    def __init__(
        self,
        fetches: Sequence[Fetch],
        sources: Sequence[Source],
        module: Callable[[str], nn.Module],
        within: bool,
        is_first: bool,
        title: str,
    ) -> None:
        super().__init__()
        self._fetches, self._sources, self._module, self._title = fetches, sources, module, title
        self._within, self._is_first = within, is_first
        self._functions = {source.function for source in sources if source.kind == "function"}
        self._outputs = {source.name for source in sources if source.kind == "output"}
        self._wanted = {source for source in sources if source.kind in ("function", "output")}
        self.begin(())

    def begin(self, received: Sequence[Tensor]) -> None:
        """Begin a forward, for which this was received."""
        self._received = received
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        # Real tensors that earlier stages have changed.
        self._changed: dict[int, Tensor] = {}
        self._next = 0
        self._found: dict[Source, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._block = ""
        self._inside = 0
        self._is_own = self._is_first

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if (self._inside and not self._within) or is_about(func):
            return func(*args, **kwargs)
        name = name_of(func)
        # Before its first block a later stage runs code of earlier ones, on placeholders.
        if not self._is_own:
            changed = changed_by(name, args, kwargs)
            if changed is None:
                return func(*args, **kwargs)
            # What comes of it is received.
            self._changed[id(changed)] = changed
            # The earlier stage writes it; here the call is skipped, and the next use fetches what came of it.
            return None if name == "__setitem__" else changed
        if self._changed or has_placeholder(args) or has_placeholder(kwargs.values()):
            args, kwargs = map_leaves(lambda _, leaf: self.here(leaf, name), (args, kwargs))
        out = func(*args, **kwargs)
        if name in self._functions and not self._inside:
            number = self._counts[name]
            self._counts[name] += 1
            self._keep_wanted(out, "function", self._block, name, number)
            if (itself := Source("function", self._block, ITSELF, name, number)) in self._wanted:
                self._found[itself] = kwargs["out"] if "out" in kwargs else args[0]
        return out

    def _keep_wanted(
        self,
        out: object,
        kind: Literal["output", "function"],
        block: str,
        function: str = "",
        number: int = 0,
    ) -> None:
        for path, leaf in leaves(out).items():
            source = Source(kind, block, path, function, number)
            if source in self._wanted:
                self._found[source] = leaf

    @contextmanager
    def calling(self, block: str, call: Tree) -> Iterator[Tree]:
        """Surround a block's call. Gives what it is called with, as far as it is known."""
        by = calling(block)
        self._is_own = True
        call = map_leaves(lambda _, leaf: self.here(leaf, by), call)
        self._inside += 1
        try:
            yield call
        finally:
            self._inside -= 1

    def result(self, output: object) -> object:
        """Return the output of the model.

        Raises:
            UsageError: something that was received was not used where the trace used it.
        """
        output = map_leaves(lambda _, leaf: self.here(leaf, OUTPUT), output)
        self.check_used()
        return output

    def returned(self, block: str, out: object) -> None:
        """Note what a block of this stage gave back."""
        self._block = block
        self._counts.clear()
        if block in self._outputs:
            self._keep_wanted(out, "output", block)

    def here(self, leaf: object, by: str) -> object:
        """Return the real tensor for which ``leaf`` stands, if it is known."""
        if not is_placeholder(leaf) and id(leaf) not in self._changed:
            return leaf
        if id(leaf) in self._known:
            return self._known[id(leaf)][1]
        value = carried(leaf)
        if value is not leaf or self._next == len(self._fetches):
            return value
        # Uses come in the order of the trace: each takes the next that was received, if it is of that kind.
        fetch = self._fetches[self._next]
        if (fetch.by, fetch.ndim, fetch.dtype) != (by, leaf.ndim, leaf.dtype):
            return leaf
        self._next += 1
        value = self._received[fetch.number]
        self._known[id(leaf)] = (leaf, value)
        return value

    def check_used(self) -> None:
        """Raise UsageError if something that was received was not used where the trace used it."""
        if self._next < len(self._fetches):
            raise UsageError(
                f"The forward of {self._title} does not use in {self._fetches[self._next].by} a tensor that an "
                "earlier stage of the pipeline sends to it. It did use this tensor in the trial run without "
                "values. Return from blocks what later code uses (x, aux = block(x)), instead of collecting it "
                "by hooks or in containers that blocks share."
            )

    def sent(self) -> list[object]:
        """Return what goes to the next stage beside the arguments of its first block; None for what is missing."""
        return [self._value_of_source(source) for source in self._sources]

    def _value_of_source(self, source: Source) -> object:
        if source.kind == "received":
            return self._received[source.number]
        if source.kind == "attribute":
            return getattr(self._module(source.name), source.path, None)
        return self._found.get(source)


class LocalBlock(ReplacementModule):
    """A block of this stage: placeholders among its arguments are replaced by what was received for them."""

    def __init__(self, name: str, block: nn.Module, cut: Cut | None, exchange: Exchange | None) -> None:
        super().__init__(block)
        self._name = name
        # Where it is the first of its stage.
        self._cut = cut
        self._exchange = exchange
        self.paths = cut.paths if cut is not None else ()
        self.received: tuple[Tensor, ...] = ()
        # It is told what the block returns.
        self.keep: Callable[[str, object], None] | None = None

    def forward(self, *args: object, **kwargs: object) -> object:
        if self._cut is not None:
            given = leaves((args, kwargs))
            for path, value in zip(self._cut.paths, self.received, strict=False):
                attach_value(given[path], value)
        exchange = self._exchange
        if exchange is None:
            args, kwargs = map_leaves(lambda _, leaf: carried(leaf), (args, kwargs))
            out = self.replaced(*args, **kwargs)
        else:
            with exchange.calling(self._name, (args, kwargs)) as (args, kwargs):
                out = self.replaced(*args, **kwargs)
            exchange.returned(self._name, out)
        if self.keep is not None:
            self.keep(self._name, out)
        return out


class PrecomputedBlock(ReplacementModule):
    """A block of the last stage whose outputs are there already, those of several micro-batches as one."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        result: object,
        returned: object,
        exchange: Exchange | None = None,
        received: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take ``returned``: the result in the trace, in which arguments that come back unchanged are marked.

        ``received``: path -> argument, of the first block of the stage.
        """
        super().__init__(block)
        self._name = name
        self._result = result
        self._returned = leaves(returned)
        self._exchange = exchange
        self._received = received or {}

    def forward(self, *args: object, **kwargs: object) -> object:
        if self._exchange is not None:
            for path, value in self._received.items():
                attach_value(leaves((args, kwargs))[path], value)
            # The block does not run, but its call uses what the trace has seen it use.
            with self._exchange.calling(self._name, (args, kwargs)) as (args, kwargs):
                pass
        given = leaves((args, kwargs))

        def own(path: str, leaf: object) -> object:
            argument = self._returned.get(path)
            if isinstance(argument, Argument) and not is_placeholder(given[argument.path]):
                return given[argument.path]
            return for_itself(leaf)

        out = map_leaves(own, self._result)
        if self._exchange is not None:
            self._exchange.returned(self._name, out)
        return out


def for_itself(leaf: object) -> Any:
    """Return a tensor that may be changed in place, where ``leaf`` begins a graph."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_leaf else leaf
