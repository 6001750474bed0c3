"""One run of a model without its parameters' values, which shows what passes between its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep.comm.tree import Args, Kwargs, leaves, map_leaves, map_tensors, tensor_leaves
from lockstep.errors import LockstepError, UsageError
from lockstep.parallel.pipeline.absent import PlaceholderTensors, attach_value, carried, is_placeholder
from lockstep.parallel.pipeline.carried import OUTPUT, Values, calling
from lockstep.parallel.pipeline.errors import kept_elsewhere, leaked, note_module, text_of, unknown_result
from lockstep.parallel.pipeline.traced import (
    RECEIVED,
    Cut,
    ModelTrace,
    StageUse,
    TensorMeta,
    marked,
    storage_of,
)
from lockstep.torch_internals.dispatch import TorchDispatchMode, TorchFunction, changes_arguments
from lockstep.torch_internals.fake import UNKNOWN_VALUE, without_values

_REAL = (Tensor, nn.Parameter)
SOME = 4
"""How many elements a mask without values is taken to choose."""


class Tracer(TorchDispatchMode):
    """Follows every operation: who uses which parameter, and which tensors belong to which segment."""

    def __init__(
        self,
        starts: dict[str, int],
        order: Sequence[str],
        outer: dict[str, Tensor],
        placeholders: PlaceholderTensors,
        names: dict[int, str],
        title: str,
    ) -> None:
        """Take ``starts``: first block -> stage. ``outer``: placeholders of parameters. ``names``: id -> module's name;
        ``title``: that of the model."""
        super().__init__()
        self.traced = ModelTrace([Cut("")] * len(starts), uses={name: set() for name in outer})
        self._starts = starts
        self._order = order
        self._called = 0
        self._segment = 0
        self._values = Values(
            lambda: self._segment,
            lambda tensor: self._born.get(storage_of(tensor)),
            self._new,
            self._attribute,
        )
        self._placeholders = placeholders
        self._parameters = {storage_of(tensor): name for name, tensor in outer.items()}
        # storage -> segment, of everything that another stage has not
        self._born: dict[int, int] = {}
        # Storages' addresses must not be used again.
        self._alive: list[Tensor] = []
        # id -> real tensor, and it without values
        self._empty: dict[int, tuple[Tensor, Tensor]] = {}
        # id -> name of modules whose results are to be kept
        self.parts: dict[int, str] = {}
        # Modules of blocks, whose attributes may be tensors that they made.
        self.kept: list[tuple[str, nn.Module]] = []
        self._names = names
        self._title = title
        self._stack: list[str] = []
        # storage -> name of the model's own parameters, which are not to be used
        self.real: dict[int, str] = {}
        # Blocks whose results are not known without values.
        self._guessed: list[str] = []

    def __torch_dispatch__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        # Most calls ask for the device alone.
        if func is torch.ops.prim.device.default:
            return func(*args)
        with self._values.paused():
            return self._followed(func, args, kwargs or {})

    def _followed(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        # Fake tensors have no values, so what is chosen by values is chosen by places.
        func, args = self._with_places(func, args)
        given = list(tensor_leaves((args, kwargs)).values())
        # Beside a placeholder, a real operand loses its values as well: nothing may be computed from a mixture.
        is_empty = any(is_placeholder(tensor) for tensor in given)
        out = self._without_values(func, args, kwargs, given) if is_empty else func(*args, **kwargs)
        made = tensor_leaves(out).values()
        if not made:
            return out
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        # Each stage would draw another number, so what is drawn belongs to the stage that draws it.
        foreign = random
        # A result belongs to this segment if anything in it does: a parameter, a tensor made here, or a random number.
        # What is made of inputs alone is the same on every stage, and each computes it again.
        for tensor in given:
            name = self._parameters.get(storage_of(tensor))
            if name is not None:
                self.traced.uses[name].add(self._segment)
                foreign = True
                continue
            if type(tensor) is nn.Parameter and (known := self.real.get(storage_of(tensor))) is not None:
                raise kept_elsewhere(self._where(), known)
            born = self._born.get(storage_of(tensor))
            if born is None:
                foreign = foreign or is_placeholder(tensor)
                continue
            foreign = True
            # Made within an earlier stage's block, and neither returned nor kept: no message could carry it.
            if born < self._segment:
                raise leaked(self._where(), tensor.shape)
        for tensor in made if foreign else ():
            if storage_of(tensor) not in self._parameters:
                self._born.setdefault(storage_of(tensor), self._segment)
                self._alive.append(tensor)
        return out

    def _without_values(
        self, func: TorchFunction, args: Args, kwargs: Kwargs, given: Sequence[Tensor]
    ) -> object:
        if any(type(tensor) in _REAL for tensor in given) and not changes_arguments(func):
            args, kwargs = map_leaves(
                lambda _, leaf: self._emptied(leaf) if type(leaf) in _REAL else leaf, (args, kwargs)
            )
        return without_values(func, args, kwargs)

    def _with_places(self, func: TorchFunction, args: Args) -> tuple[TorchFunction, Args]:
        """Elements that a mask chooses, chosen by their places instead: by those of a mask of the inputs, which are
        known; else by as many as any, such as those of the tokens of an expert."""
        if func is torch.ops.aten.nonzero.default and is_placeholder(args[0]):
            return self._some_places, args
        if func is torch.ops.aten.masked_select.default:
            # masked_select is an index by the mask, spread over the tensor.
            func, args = torch.ops.aten.index.Tensor, (args[0], [args[1].expand(args[0].shape)])
        if func is not torch.ops.aten.index.Tensor or not any(map(is_placeholder, (args[0], *args[1]))):
            return func, args
        places: list[object] = []
        for index in args[1]:
            is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            if is_mask and is_placeholder(index):
                places += self._some_places(index).unbind(1)
            else:
                places += index.nonzero(as_tuple=True) if is_mask else [index]
        return func, (args[0], places)

    def _some_places(self, mask: Tensor) -> Tensor:
        return self._placeholders.without_values(
            torch.zeros(SOME, mask.ndim, dtype=torch.int64, device=mask.device)
        )

    def _emptied(self, tensor: Tensor) -> Tensor:
        """Return a real tensor without its values, once: torch remembers the shapes that come of it."""
        # The real tensor is kept beside it, because an id may be given to another object.
        known, empty = self._empty.get(id(tensor), (None, tensor))
        if known is None or empty.shape != tensor.shape or empty.stride() != tensor.stride():
            empty = self._placeholders.without_values(tensor)
            self._empty[id(tensor)] = tensor, empty
        return empty

    def run(self, forward: Callable[[], object]) -> ModelTrace:
        """Run ``forward()``, with the blocks in it replaced by ``block``, and return what it shows.

        Raises:
            UsageError: the forward cannot be cut; it says at which module, and why.
        """
        try:
            with self._following_modules(), self, self._values:
                output = forward()
            self.traced.output = map_leaves(lambda _, leaf: self._values.here(leaf, OUTPUT), output)
        except UNKNOWN_VALUE as error:
            raise UsageError(
                f"The forward of {self._where()} needs the value of a tensor that only another stage of the "
                "pipeline has. Branch on inputs instead of on activations, or move this code into a block."
            ) from error
        except Exception as error:
            # A user's forward may raise anything.
            note_module(error, self._where())
            if self._guessed and not isinstance(error, LockstepError):
                raise unknown_result(self._guessed[0], self._where(), text_of(error)) from error
            raise
        if self._called < len(self._order):
            raise UsageError(
                f"The forward did not call the block '{self._order[self._called]}'. A pipeline needs every "
                "block, once and in order. Choose with blocks=... only blocks that are called so."
            )
        last = len(self._starts) - 1
        # What no stage has made, every stage has: it counts as made by the last one.
        self.traced.early = [
            path
            for path, leaf in tensor_leaves(self.traced.output).items()
            if self._born.get(storage_of(leaf), last) < last
        ]
        self._complete_cuts()
        return self.traced

    def _complete_cuts(self) -> None:
        """Add what stages use beside the arguments of their first blocks."""
        values, cuts = self._values, self.traced.cuts
        paths = [cut.paths for cut in cuts]
        # Behind the arguments of its first block, a stage is sent what later code uses of earlier stages, in the order
        # in which the trace saw it. The stage before it sends the same list, so no names travel.
        for stage, cut in enumerate(cuts):
            if stage:
                kinds = [TensorMeta.of(value.before(stage)) for value in values.messages(stage)]
                sources = values.sources(stage, paths[stage - 1])
                cuts[stage] = Cut(cut.block, cut.paths, (*cut.kinds, *kinds), sources)
            fetches = values.fetches(stage, paths[stage])
            self.traced.stages.append(
                StageUse(
                    fetches, stage in values.between or stage > values.first_change, stage in values.within
                )
            )
        self.traced.shapes[RECEIVED] = {f"[{i}]": kind.shape for i, kind in enumerate(cuts[-1].kinds)}
        self.traced.results[RECEIVED] = ()

    def block(self, name: str, module: nn.Module, args: Args, kwargs: Kwargs) -> object:
        """Trace the call of a block: note a cut before it, and what it returns."""
        with self._values.paused():
            return self._block(name, module, args, kwargs)

    def _block(self, name: str, module: nn.Module, args: Args, kwargs: Kwargs) -> object:
        expected = self._order[self._called] if self._called < len(self._order) else None
        if name != expected:
            behind = f"'{expected}' is next" if expected else "all blocks have been called"
            raise UsageError(
                f"The forward calls the block '{name}' where {behind} in the order of definition. A pipeline "
                "needs every block once and in order. Choose with blocks=... only blocks that are called so."
            )
        self._called += 1
        call = (args, kwargs)
        # In this order: the arguments as they are in the segment before, then the cut, and then as the new segment has
        # them.
        args, kwargs = map_leaves(lambda _, leaf: self._values.here(leaf, calling(name)), call)
        if self._starts.get(name, 0) > 0:
            self._cut(name, call, (args, kwargs))
            args, kwargs = map_leaves(lambda _, leaf: carried(leaf), call)
        out = self._called_for(module, args, kwargs)
        given = tensor_leaves((args, kwargs))
        ids = set(map(id, given.values()))
        self.traced.shapes[name] = {path: leaf.shape for path, leaf in tensor_leaves(out).items()}
        # What is real and no argument, only this block's stage computes.
        out = map_tensors(
            lambda leaf: leaf if id(leaf) in ids or is_placeholder(leaf) else self._new(leaf), out
        )
        self.traced.results[name] = marked(out, given)
        self._values.returned(name, out)
        return out

    def _called_for(self, module: nn.Module, args: Args, kwargs: Kwargs) -> object:
        depth = len(self._stack)
        try:
            with self._values.paused(False), self._values.within_a_block():
                return module(*args, **kwargs)
        except UNKNOWN_VALUE:
            # Experts chosen by a router, for instance. Blocks of such models return what they got, changed.
            del self._stack[depth:]
            given = tensor_leaves((args, kwargs)).values()
            first = next((leaf for leaf in given if is_placeholder(leaf) and leaf.is_floating_point()), None)
            if first is None:
                raise
            self._guessed.append(self._names.get(id(module), ""))
            return self._new(first)
        finally:
            # Tensors of a block are to go with it.
            self._empty.clear()

    def _cut(self, name: str, call: object, present: object) -> None:
        """Cut here; ``present``: what stands for the arguments in the segment before."""
        self._segment = self._starts[name]
        values = leaves(present)
        sent: dict[str, Tensor] = {}
        seen: set[int] = set()
        # Real inputs that no stage has computed are not sent: the next stage has the same batch.
        for path, leaf in tensor_leaves(call).items():
            if (is_placeholder(leaf) or storage_of(leaf) in self._born) and id(leaf) not in seen:
                seen.add(id(leaf))
                sent[path] = leaf
        if not sent:
            raise UsageError(
                f"No argument of the block '{name}' depends on the blocks before it, so a stage cannot begin "
                "there. Choose other blocks with blocks=... or begin stages at other blocks with split=..."
            )
        kinds = []
        for path, leaf in sent.items():
            value = values[path]
            kinds.append(TensorMeta.of(value))
            new = self._new(value)
            self._values.arrived(leaf, new, path)
            attach_value(leaf, new)
        self.traced.cuts[self._segment] = Cut(name, tuple(sent), tuple(kinds))

    def _new(self, tensor: Tensor) -> Tensor:
        new = self._placeholders.like(tensor)
        self._born[storage_of(new)] = self._segment
        self._alive.append(new)
        return new

    def _attribute(self, tensor: Tensor) -> tuple[str, str] | None:
        """Return (name of the module, attribute) where a block keeps this tensor."""
        for name, module in self.kept:
            for key, value in vars(module).items():
                if value is tensor:
                    return name, key
        return None

    def _where(self) -> str:
        name = self._stack[-1] if self._stack else ""
        return f"the module '{name}'" if name else self._title

    @contextmanager
    def _following_modules(self) -> Iterator[None]:
        def enter(module: nn.Module, _: object) -> None:
            self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))

        def leave(module: nn.Module, _: object, result: object) -> None:
            self._stack.pop()
            if id(module) in self.parts:
                self.traced.parts.setdefault(self.parts[id(module)], []).append((self._segment, result))

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
