"""A forward without chance: nothing is dropped, and what is drawn at random has one fixed value.

Ranks draw other random numbers than one process does, so that only without them two runs can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.comm.tree import Args, Kwargs, tensor_leaves
from lockstep.model.changes import attributes_set
from lockstep.parallel.expert.layer import MixtureOfExperts
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.dispatch import TorchFunction

HALF = 0.5
"""What stands for each number drawn from [0, 1), and for each normal one."""


class WithoutChance(TorchFunctionMode):
    """Within it, functions that draw random numbers give the same ones whatever the shapes and the generator."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        # It draws inside, where no mode is active.
        if func is F.gumbel_softmax:
            return _softmax_without_noise(*args, **kwargs)
        if func in _ARGUMENTS:
            args, kwargs = _with_argument(args, kwargs, *_ARGUMENTS[func])
        elif func in _RECURRENT:
            args = _without_recurrent_dropout(args)
        result = func(*args, **kwargs)
        replace_draw = _DRAWS.get(func)
        return result if replace_draw is None else replace_draw(result, args, kwargs)


class WithoutDropout(TorchFunctionMode):
    """Within it, functions drop nothing; layers' own code does, see ``without_dropout``."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _ARGUMENTS:
            args, kwargs = _with_argument(args, kwargs, *_ARGUMENTS[func])
        elif func in _RECURRENT:
            args = _without_recurrent_dropout(args)
        return func(*args, **kwargs)


class BeforeWrites(TorchFunctionMode):
    """Within it, ``note(tensor)`` is called before a function changes ``tensor`` in place."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # torch's convention: a trailing underscore writes to the first argument, two are those of Python's protocols.
        if (name.endswith("_") and not name.endswith("__")) or name in _WRITES:
            for tensor in tensor_leaves((args[:1], kwargs.get("out"))).values():
                self._note(tensor)
        elif func is F.embedding and (kwargs.get("max_norm") or (len(args) > 3 and args[3])):
            # With ``max_norm`` it scales rows of the weight in place.
            self._note(args[1] if len(args) > 1 else kwargs["weight"])
        elif kwargs.get("out") is not None:
            # One, or a list, as FSDP's gathering gives.
            for tensor in tensor_leaves(kwargs["out"]).values():
                self._note(tensor)
        return func(*args, **kwargs)


_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__set__")


@contextmanager
def without_dropout(modules: list[nn.Module]) -> Iterator[None]:
    """Dropout layers drop nothing inside: for what a function mode does not reach, such as threads of a backward."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, torch_modules.Dropout):
                stack.enter_context(attributes_set(module, p=0.0))
            elif isinstance(module, nn.MultiheadAttention):
                stack.enter_context(attributes_set(module, dropout=0.0))
        yield


@contextmanager
def without_capacities(modules: list[nn.Module]) -> Iterator[None]:
    """Experts take all tokens inside: which ones are dropped depends on the order of the ranks' batches."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, MixtureOfExperts):
                stack.enter_context(attributes_set(module, capacity_factor=None))
        yield


def numbers(shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of ``shape`` from [0, 2), as if it were random, in float64.

    Without a generator, which may be off where a model is verified.
    """
    places = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    # The hash that shaders use for noise: equal on every machine that computes in float64.
    return (torch.frac(torch.sin(places * 12.9898) * 43758.5453).abs() * 2).reshape(shape)


def _with_argument(
    args: tuple[object, ...], kwargs: dict[str, object], place: int, name: str, value: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _without_recurrent_dropout(args: tuple[object, ...]) -> tuple[object, ...]:
    """Turn off the dropout of (input, state, weights, bias, layers, dropout, ...), or of packed (data, sizes, state,
    weights, bias, ...)."""
    place = 5 if isinstance(args[3], bool) else 6
    return (*args[:place], 0.0, *args[place + 1 :])


def _softmax_without_noise(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: object = None, dim: int = -1
) -> Tensor:
    """Compute ``F.gumbel_softmax`` of ``logits`` [..., n] with all noise equal, so that it cancels out."""
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    one_hot = torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    # Forward gives the one-hot, backward the gradient of the softmax (straight-through), as torch's own does.
    return one_hot - soft.detach() + soft


def _constant(value: float) -> Callable[..., object]:
    @torch.no_grad()
    def replace_draw(result: Tensor, args: object, kwargs: object) -> Tensor:
        return result.fill_(value)

    return replace_draw


@torch.no_grad()
def _in_order(result: Tensor, args: object, kwargs: object) -> Tensor:
    return result.copy_(torch.arange(result.numel(), device=result.device))


@torch.no_grad()
def _likeliest(result: Tensor, args: Args, kwargs: Kwargs) -> Tensor:
    """Replace ``multinomial`` by the indices of the largest probabilities."""
    probabilities = args[0] if args else kwargs["input"]
    order = probabilities.argsort(dim=-1, descending=True, stable=True)
    count = min(result.shape[-1], order.shape[-1])
    # With replacement more may be drawn than there are: the likeliest fills the rest.
    result[..., :count] = order[..., :count]
    result[..., count:] = order[..., :1]
    return result


@torch.no_grad()
def _middle(result: Tensor, args: Args, kwargs: Kwargs) -> Tensor:
    """Replace ``uniform_(from, to)`` by its mean."""
    low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
    high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
    return result.fill_((low + high) / 2)


@torch.no_grad()
def _shifted(result: Tensor, args: Args, kwargs: Kwargs) -> Tensor:
    """Replace ``normal_(mean, std)`` by mean + std / 2."""
    mean = args[1] if len(args) > 1 else kwargs.get("mean", 0.0)
    std = args[2] if len(args) > 2 else kwargs.get("std", 1.0)
    return result.fill_(mean + std * HALF)


@torch.no_grad()
def _rounded(result: Tensor, args: Args, kwargs: Kwargs) -> Tensor:
    """Replace ``bernoulli(probabilities)`` by what is likelier."""
    probabilities = args[0] if args else kwargs["input"]
    return result.copy_(probabilities >= HALF)


def _existing(names: str, *places: object) -> list[object]:
    return [getattr(place, name) for name in names.split() for place in places if hasattr(place, name)]


_DROPOUTS = _existing(
    "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_ feature_dropout feature_dropout_",
    torch,
    F,
)
_ARGUMENTS: dict[object, tuple[int, str, object]] = {
    **dict.fromkeys(_DROPOUTS, (1, "p", 0.0)),
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (10, "dropout_p", 0.0),
    **dict.fromkeys(_existing("rrelu", F), (3, "training", False)),
}
_RECURRENT = set(_existing("lstm gru rnn_tanh rnn_relu", torch))
_DRAWS: dict[object, Callable[..., object]] = {
    **dict.fromkeys(_existing("rand rand_like randn randn_like poisson", torch), _constant(HALF)),
    **dict.fromkeys(_existing("randint randint_like", torch), _constant(0)),
    **dict.fromkeys(_existing("randperm", torch), _in_order),
    **dict.fromkeys(_existing("bernoulli", torch, Tensor), _rounded),
    **dict.fromkeys(_existing("multinomial", torch, Tensor), _likeliest),
    **dict.fromkeys(_existing("uniform_", Tensor), _middle),
    **dict.fromkeys(_existing("normal_", Tensor), _shifted),
    **dict.fromkeys(_existing("exponential_ geometric_ log_normal_ bernoulli_", Tensor), _constant(1)),
    **dict.fromkeys(_existing("random_ cauchy_", Tensor), _constant(0)),
}
