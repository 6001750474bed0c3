"""One run of a rehearsal: what it is given, what is noted on its way, and its gradients.

Gradients of the ranks together must be those of the whole run. What ranks hold parts of has its part of the gradient.
What is whole has the gradient of the whole run on each rank, once gradients are summed over the ranks where whole
operands met features; parameters of modules that work on a rank's features alone have it as the sum over the ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lockstep.comm.tree import Args, Kwargs
from lockstep.model.blocks import joined_name
from lockstep.model.contents import copy_of
from lockstep.parallel.tensor.communication import part_of_pieces
from lockstep.parallel.tensor.plan import PACKED, features
from lockstep.parallel.tensor.tensor_likes import RankFeatures, ReportedWidth, unmarked
from lockstep.runtime.seed import generators_kept
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.autograd import FunctionContext

BATCH, LENGTHS = 2, (4, 6, 10)
SMALL = 1 << 16
"""Parameters with fewer elements than this have random values, so that none is zero by chance."""


@dataclass(frozen=True)
class TensorRehearsal:
    """``module`` with its column layers (name in it -> style) and its row layers, for ``ranks`` ranks.

    ``holder``: name in ``module`` of the one whose ``attributes`` are set in the ranks' runs, and whose input reports a
    rank's share of its width then if it ``reports_width``. ``heads`` of attention, 0 elsewhere.
    """

    module: nn.Module
    columns: Mapping[str, str]
    rows: tuple[str, ...]
    ranks: int
    holder: str = ""
    heads: int = 0
    attributes: Mapping[str, int] = field(default_factory=dict)
    reports_width: bool = False


@dataclass(frozen=True)
class Example:
    """What a run is given. ``rank``: whose part, or None. ``argument``: (name, dimensions) of a bias of each head."""

    x: Tensor
    outputs: Mapping[str, Tensor]
    keywords: Kwargs
    rank: int | None = None
    width: int = 0
    argument: tuple[str, int] | None = None
    trains: bool = False


@dataclass
class RehearsalRun:
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
        """Note an operand, of any shape; what is used in its place has a gradient of its own."""
        leaf = operand.detach().requires_grad_()
        self.taken.append((operand, leaf))
        return _Same.apply(leaf)


class _Same(torch.autograd.Function):
    """As what ranks send: its result may not be changed in place."""

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionContext, gradient: Tensor) -> Tensor:
        return gradient


def example_of(
    rehearsal: TensorRehearsal,
    call: Callable[[nn.Module, Tensor], dict[str, object]],
    rank: int | None = None,
    argument: tuple[str, int] | None = None,
    trains: bool = False,
) -> Example:
    """The same random numbers each time, or a rank's part of them."""
    layers = {name: rehearsal.module.get_submodule(name) for name in rehearsal.columns}
    first = next(iter(layers.values()))
    weight: Tensor = torch_modules.parameters_of(first)["weight"]
    device = torch.device("cpu") if weight.device.type == "meta" else weight.device
    numbers = torch.Generator().manual_seed(0)
    # A length that is no number of heads: dims that are mixed up would otherwise have equal sizes and pass.
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
    width = x.shape[-1] // rehearsal.ranks if rank is not None and rehearsal.reports_width else 0
    return Example(x, outputs, keywords, rank, width, argument, trains)


def forward_of_part(rehearsal: TensorRehearsal, example: Example) -> RehearsalRun:
    """Forward, with gradients."""
    module = without_weights(rehearsal, example.trains)
    noted = RehearsalRun(example.argument, example.trains)
    noted.pieces = {name: PACKED.get(style, 1) for name, style in rehearsal.columns.items()}
    holder = module.get_submodule(rehearsal.holder)
    for name, value in rehearsal.attributes.items() if example.rank is not None else ():
        setattr(holder, name, value)

    def whole(name: str, value: Tensor) -> Tensor:
        noted.sources[name] = value.detach().requires_grad_()
        # A leaf, so that its gradient can be asked for; times 1, because a forward may change it in place.
        return noted.sources[name] * 1

    def part(name: str, value: Tensor) -> Tensor:
        leaf = noted.parts[name] = value.detach().requires_grad_()
        return leaf * 1 if example.rank is None else RankFeatures.of(leaf * 1, noted.take)

    columns = {name: part(name, output) for name, output in example.outputs.items()}
    _replace_layers(rehearsal, module, noted, columns, whole)
    x = whole("", example.x)
    if example.width:
        x = _reporting(rehearsal, holder, x, example.width)
    keywords = dict(example.keywords)
    if example.argument is not None:
        keywords[example.argument[0]] = part("argument", keywords[example.argument[0]])
    try:
        with generators_kept(), torch.enable_grad():
            # Each run draws the same numbers.
            torch.manual_seed(0)
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


def _replace_layers(
    rehearsal: TensorRehearsal,
    module: nn.Module,
    noted: RehearsalRun,
    columns: Mapping[str, Tensor],
    whole: Callable[[str, Tensor], Tensor],
) -> None:
    # Column layers return these numbers and row layers others: the weights of neither are used, because both are linear
    # and right whatever they are.
    for name, inner in module.named_modules():
        if name in columns:
            inner.forward = lambda *_, _output=columns[name], **__: _output
        elif name in rehearsal.rows:
            inner.forward = _row_forward(noted, features(inner)[1], whole)
        else:
            own = torch_modules.parameters_of(inner)
            for key, parameter in own.items():
                if parameter is not None and parameter.requires_grad:
                    noted.sources[joined_name(name, key)] = parameter
            if own and name:
                inner.register_forward_pre_hook(_note_call(noted, name), with_kwargs=True)


def _reporting(rehearsal: TensorRehearsal, holder: nn.Module, x: Tensor, width: int) -> Tensor:
    if not rehearsal.holder:
        return ReportedWidth.of(x, width)
    holder.register_forward_pre_hook(
        lambda _, args: tuple(
            ReportedWidth.of(a, width) if getattr(a, "shape", None) == x.shape else a for a in args
        )
    )
    return x


def _row_forward(
    noted: RehearsalRun, width: int, whole: Callable[[str, Tensor], Tensor]
) -> Callable[..., Tensor]:
    def forward(given: Tensor, *_: object, **__: object) -> Tensor:
        number = len(noted.given)
        noted.given.append(unmarked(given))
        numbers = torch.Generator().manual_seed(10 + number)
        output = torch.randn(*given.shape[:-1], width, generator=numbers).to(given.device, given.dtype)
        return whole(f"row {number}", output)

    return forward


def _note_call(noted: RehearsalRun, name: str) -> Callable[..., None]:
    def note(_: nn.Module, args: Args, kwargs: Kwargs) -> None:
        is_on_part = any(isinstance(value, RankFeatures) for value in (*args, *kwargs.values()))
        noted.on_parts[name] = noted.on_parts.get(name, True) and is_on_part

    return note


def without_weights(rehearsal: TensorRehearsal, trains: bool) -> nn.Module:
    """A copy that drops nothing, and shares large weights; small ones and those on the meta device are random."""
    module = rehearsal.module
    intercepted = {
        id(parameter)
        for name in (*rehearsal.columns, *rehearsal.rows)
        for parameter in module.get_submodule(name).parameters()
    }
    memo: dict[int, object] = {}
    numbers = torch.Generator().manual_seed(1)
    for parameter in nn.Module.parameters(module):
        values = parameter.detach()
        is_float = parameter.is_floating_point()
        if id(parameter) not in intercepted and is_float and (values.is_meta or values.numel() < SMALL):
            device = "cpu" if values.is_meta else values.device
            # Neither zeros nor ones, as in new biases and norms: those hide what is computed with them.
            values = (torch.rand(parameter.shape, generator=numbers) + 0.5).to(device, parameter.dtype)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=is_float)
    copied: nn.Module = copy_of(module, memo).train(trains)
    for inner in copied.modules():
        torch_modules.clear_forward_hooks(inner)
        for name, value in vars(inner).items():
            if isinstance(value, float) and (isinstance(inner, torch_modules.Dropout) or "drop" in name):
                setattr(inner, name, 0.0)
    return copied


TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


class GradientsDifferError(Exception):
    """They are not."""


def meetings(whole: RehearsalRun, parts: Sequence[RehearsalRun]) -> tuple[tuple[str, ...], bool]:
    """(modules that work on a rank's features alone and whose gradients are partial sums, whether others meet them).

    Raises:
        GradientsDifferError: no sum over the ranks gives the gradients of the whole run.
    """
    ranks = len(parts)
    # One random gradient for each row layer's input; its part along the features is what a rank's row layer would give.
    seeds = [
        torch.randn(given.shape, generator=torch.Generator().manual_seed(20 + number)).to(given)
        for number, given in enumerate(whole.given)
    ]
    expected = _gradients(whole.given, [*whole.parts.values(), *whole.sources.values()], seeds)
    of_parts = dict(zip(whole.parts, expected, strict=False))
    of_sources = dict(zip(whole.sources, expected[len(whole.parts) :], strict=True))
    direct: list[dict[str, Tensor | None]] = []
    sums: list[Tensor] = []
    for rank, run in enumerate(parts):
        if len(run.taken) != len(parts[0].taken):
            raise GradientsDifferError("whole tensors meet its features in ways that differ between ranks")
        wanted = [*run.parts.values(), *(leaf for _, leaf in run.taken), *run.sources.values()]
        own = [seed.chunk(ranks, dim=-1)[rank] for seed in seeds]
        found = _gradients(run.given, wanted, own)
        for name, gradient in zip(run.parts, found, strict=False):
            _check_part(name, gradient, of_parts[name], whole, rank, ranks)
        # Of whole operands that met a rank's features each rank has one addend of the gradient. Their sum over the
        # ranks is what an all-reduce at that place gives.
        taken = found[len(run.parts) : len(run.parts) + len(run.taken)]
        filled = [_filled(g, leaf) for g, (_, leaf) in zip(taken, run.taken, strict=True)]
        sums = [a + b for a, b in zip(sums, filled, strict=True)] if sums else filled
        direct.append(dict(zip(run.sources, found[len(run.parts) + len(run.taken) :], strict=True)))
    return _check_sources(parts, direct, sums, of_sources)


def _check_part(
    name: str, gradient: Tensor | None, expected: Tensor | None, whole: RehearsalRun, rank: int, ranks: int
) -> None:
    """``gradient`` [..., features / N] must be this rank's part of ``expected`` [..., features]."""
    if expected is None:
        if gradient is not None and bool(gradient.any()):
            raise GradientsDifferError("gradients of its features depend on which a rank has")
        return
    if name in whole.pieces:
        own = part_of_pieces(expected, whole.pieces[name], rank, ranks)
    else:
        own = expected.chunk(ranks, dim=-3)[rank]
    if gradient is None or not _close(gradient, own):
        raise GradientsDifferError("gradients of its features depend on each other, as running it shows")


def _check_sources(
    parts: Sequence[RehearsalRun],
    direct: Sequence[dict[str, Tensor | None]],
    sums: Sequence[Tensor],
    expected: dict[str, Tensor | None],
) -> tuple[tuple[str, ...], bool]:
    """What ``meetings`` returns; gradients of whole tensors are the direct ones, and those through summed operands."""
    alone = {name for name in parts[0].on_parts if all(run.on_parts.get(name) for run in parts)}
    # Operands that come from such modules alone need no sum where they meet: the parameters' sums do.
    meets = any(_owners(operand, parts[0]) - alone for operand, _ in parts[0].taken)
    partial: set[str] = set()
    for rank, run in enumerate(parts):
        operands = [operand for operand, _ in run.taken]
        # By the chain rule: what the summed gradients of the operands give, from where these were computed.
        through = dict(zip(run.sources, _gradients(operands, list(run.sources.values()), sums), strict=True))
        for name, tensor in run.sources.items():
            total = _filled(through[name], tensor)
            owner = name.rpartition(".")[0]
            # It works on a rank's features only, so its gradient is a partial sum on each rank.
            if owner in alone and not meets:
                total = total + sum(_filled(one[name], tensor) for one in direct)
                if bool(total.any()):
                    partial.add(owner)
            # It is whole on each rank, and must have the whole gradient there without a further sum.
            else:
                total = total + _filled(direct[rank][name], tensor)
            if not _close(total, _filled(expected[name], tensor)):
                raise GradientsDifferError(f"no sum over the ranks gives the gradient of {_named(name)}")
    return tuple(sorted(partial)), meets


def _owners(operand: Tensor, run: RehearsalRun) -> set[str]:
    """Of what it was computed from."""
    found = _gradients([operand], list(run.sources.values()), [torch.ones_like(operand)])
    return {
        name.rpartition(".")[0]
        for name, gradient in zip(run.sources, found, strict=True)
        if gradient is not None
    }


def _gradients(of: Sequence[Tensor], to: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor | None]:
    used = [(tensor, seed) for tensor, seed in zip(of, seeds, strict=True) if tensor.requires_grad]
    if not used:
        return [None] * len(to)
    outputs, given = zip(*used, strict=True)
    # The graph of a run is asked several times.
    found = torch.autograd.grad(outputs, to, given, retain_graph=True, allow_unused=True)
    return list(found)


def _filled(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _close(found: Tensor, expected: Tensor) -> bool:
    """By norm: sums in another order are rounded otherwise."""
    if found.shape != expected.shape:
        return False
    tolerance = TOLERANCE.get(found.dtype, 5e-2)
    apart = (found.double() - expected.double()).norm()
    return bool(apart <= tolerance * expected.double().norm() + 1e-6)


def _named(source: str) -> str:
    if not source:
        return "its input"
    return "its output layer's result" if source.startswith("row ") else f"'{source}'"
