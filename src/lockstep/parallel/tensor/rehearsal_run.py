"""One run of a rehearsal: what it is given, and what is noted on its way."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.model.contents import copy_of
from lockstep.parallel.tensor.communication import part_of_pieces
from lockstep.parallel.tensor.operands import RankFeatures, unmarked
from lockstep.parallel.tensor.plan import PACKED, features
from lockstep.parallel.tensor.width import ReportedWidth
from lockstep.runtime.seed import generators_kept
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.autograd import FunctionContext

BATCH, LENGTHS = 2, (4, 6, 10)
SMALL = 1 << 16
"""Parameters with fewer elements than this have random values, so that none is zero by chance."""


@dataclass(frozen=True)
class Example:
    """What a run is given. ``rank``: whose part, or None. ``argument``: (name, dimensions) of a bias of each head."""

    x: Tensor
    outputs: Mapping[str, Tensor]
    keywords: dict[str, Any]
    rank: int | None = None
    width: int = 0
    argument: tuple[str, int] | None = None
    trains: bool = False


@dataclass
class Run:
    """What was noted.

    Attributes:
        given: What row layers were given, call by call.
        parts: Name -> what is split over the ranks, whose gradients are: outputs of column layers, and an argument.
        sources: Name -> what is whole: the input, parameters, outputs of row layers.
        taken: (operand, what was used in its place) of whole operands that met a rank's features.
        on_parts: Names of modules inside that were called with a rank's features only.
        output: The first tensor that the module returned, where it ran to its end.
        is_marked: Whether that was computed from a rank's features.
        stopped: After its row layers: what it raised, and by which lines of code.
    """

    argument: tuple[str, int] | None = None
    trains: bool = False
    given: list[Tensor] = field(default_factory=list)
    parts: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, Tensor] = field(default_factory=dict)
    taken: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    on_parts: dict[str, bool] = field(default_factory=dict)
    output: Tensor | None = None
    is_marked: bool = False
    stopped: tuple[object, ...] = ()
    pieces: Mapping[str, int] = field(default_factory=dict)

    def take(self, operand: Tensor) -> Tensor:
        """Note an operand; what is used in its place has a gradient of its own."""
        leaf = operand.detach().requires_grad_()
        self.taken.append((operand, leaf))
        return _Same.apply(leaf)


class _Same(torch.autograd.Function):
    """As what ranks send: its result may not be changed in place."""

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionContext, gradient: Tensor) -> Any:
        return gradient


def example_of(
    rehearsal: Any,
    call: Callable[[nn.Module, Tensor], dict[str, object]],
    rank: int | None = None,
    argument: tuple[str, int] | None = None,
) -> Example:
    """The same random numbers each time, or a rank's part of them."""
    layers = {name: rehearsal.module.get_submodule(name) for name in rehearsal.columns}
    first = next(iter(layers.values()))
    weight: Any = torch_modules.parameters_of(first)["weight"]
    device = torch.device("cpu") if weight.device.type == "meta" else weight.device
    numbers = torch.Generator().manual_seed(0)
    length = next(n for n in LENGTHS if n not in (rehearsal.heads, rehearsal.heads // rehearsal.ranks))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers).to(device, weight.dtype)

    x = draw(BATCH, length, features(first)[0])
    outputs = {name: draw(BATCH, length, features(layer)[1]) for name, layer in layers.items()}
    keywords = call(rehearsal.module, x)
    if argument is not None:
        name, dims = argument
        bias = draw(*(1,) * (dims - 3), rehearsal.heads, length, length)
        keywords[name] = bias if rank is None else bias.chunk(rehearsal.ranks, dim=-3)[rank]
    if rank is not None:
        outputs = {
            name: part_of_pieces(output, PACKED.get(rehearsal.columns[name], 1), rank, rehearsal.ranks)
            for name, output in outputs.items()
        }
    return Example(x, outputs, keywords, rank, argument=argument)


def forward_of_part(rehearsal: Any, attributes: Mapping[str, int], example: Example) -> Run:
    """Forward, with gradients."""
    module = without_weights(rehearsal, example.trains)
    noted = Run(example.argument, example.trains)
    noted.pieces = {name: PACKED.get(style, 1) for name, style in rehearsal.columns.items()}
    holder = module.get_submodule(rehearsal.holder)
    for name, value in attributes.items():
        setattr(holder, name, value)

    def whole(name: str, value: Tensor) -> Tensor:
        noted.sources[name] = value.detach().requires_grad_()
        return noted.sources[name] * 1  # a forward may change it in place

    def part(name: str, value: Tensor) -> Tensor:
        leaf = noted.parts[name] = value.detach().requires_grad_()
        return leaf * 1 if example.rank is None else RankFeatures.of(leaf * 1, noted.take)

    columns = {name: part(name, output) for name, output in example.outputs.items()}
    for name, inner in module.named_modules():
        if name in columns:
            inner.forward = lambda *_, _output=columns[name], **__: _output
        elif name in rehearsal.rows:
            inner.forward = _row(noted, features(inner)[1], whole)
        else:
            own = torch_modules.parameters_of(inner)
            for key, parameter in own.items():
                if parameter is not None and parameter.requires_grad:
                    noted.sources[f"{name}.{key}" if name else key] = parameter
            if own and name:
                inner.register_forward_pre_hook(_note_call(noted, name), with_kwargs=True)
    x = whole("", example.x)
    if example.width:
        x = _reporting(rehearsal, holder, x, example.width)
    keywords = dict(example.keywords)
    if example.argument is not None:
        keywords[example.argument[0]] = part("argument", keywords[example.argument[0]])
    try:
        with generators_kept(), torch.enable_grad():
            torch.manual_seed(0)  # each run draws the same
            returned = module(x, **keywords)
    except Exception as error:
        if len(noted.given) < len(rehearsal.rows):
            raise
        # What follows its row layers needs more than the example has; a part must stop there as the whole does.
        lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
        noted.stopped = (type(error), str(error), *lines)
        return noted
    if isinstance(returned, (tuple, list)) and returned:
        returned = returned[0]
    if isinstance(returned, Tensor):
        noted.is_marked = isinstance(returned, RankFeatures)
        noted.output = unmarked(returned).detach()
    return noted


def _reporting(rehearsal: Any, holder: nn.Module, x: Tensor, width: int) -> Tensor:
    if not rehearsal.holder:
        return ReportedWidth.of(x, width)
    holder.register_forward_pre_hook(
        lambda _, args: tuple(
            ReportedWidth.of(a, width) if getattr(a, "shape", None) == x.shape else a for a in args
        )
    )
    return x


def _row(noted: Run, width: int, whole: Callable[[str, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(given: Tensor, *_: Any, **__: object) -> Tensor:
        number = len(noted.given)
        noted.given.append(unmarked(given))
        numbers = torch.Generator().manual_seed(10 + number)
        output = torch.randn(*given.shape[:-1], width, generator=numbers).to(given.device, given.dtype)
        return whole(f"row {number}", output)

    return forward


def _note_call(noted: Run, name: str) -> Callable[..., None]:
    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        is_on_part = any(isinstance(value, RankFeatures) for value in (*args, *kwargs.values()))
        noted.on_parts[name] = noted.on_parts.get(name, True) and is_on_part

    return note


def without_weights(rehearsal: Any, trains: bool) -> nn.Module:
    """A copy that drops nothing, and shares large weights; small ones and those on the meta device are random."""
    module = rehearsal.module
    intercepted = {
        id(parameter)
        for name in (*rehearsal.columns, *rehearsal.rows)
        for parameter in module.get_submodule(name).parameters()
    }
    memo: dict[int, object] = {}
    numbers = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        values = parameter.detach()
        is_float = parameter.is_floating_point()
        if id(parameter) not in intercepted and is_float and (values.is_meta or values.numel() < SMALL):
            device = "cpu" if values.is_meta else values.device
            values = (torch.rand(parameter.shape, generator=numbers) + 0.5).to(device, parameter.dtype)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=is_float)
    copied: nn.Module = copy_of(module, memo).train(trains)
    for inner in copied.modules():
        torch_modules.clear_forward_hooks(inner)
        for name, value in vars(inner).items():
            if isinstance(value, float) and (isinstance(inner, torch_modules.Dropout) or "drop" in name):
                setattr(inner, name, 0.0)
    return copied
