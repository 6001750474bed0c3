"""Values for the parameters of one group of modules: on the right device, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UsageError
from lockstep.offload.files.direct import OffloadedParameters
from lockstep.torch_internals import modules as torch_modules

InitWeights = Callable[[nn.Module], object]
"""Called with each module that has parameters or buffers of its own; fills these."""


def is_on_meta(model: nn.Module) -> bool:
    """Return whether any tensor of the model has no values yet."""
    return any(tensor.is_meta for _, tensor in _tensors(model.modules()))


def initialisers(model: nn.Module, init_weights: InitWeights | None = None) -> dict[nn.Module, InitWeights]:
    """Return for each module with tensors on the meta device the function that fills them.

    In this order: ``init_weights``; the ``_init_weights`` of the enclosing transformers model; the module's
    own ``reset_parameters``. Modules of transformers models that have tensors only inside others are there too.

    Raises:
        UsageError: a module has none of these.
    """
    found: dict[nn.Module, InitWeights] = {}
    homeless: list[str] = []
    for name, module in model.named_modules():
        own = [label for label, tensor in _tensors([module]) if tensor.is_meta]
        enclosing = None if init_weights else _enclosing_initialiser(model, name)
        if not own:
            if enclosing is not None and _is_bare(module) and _all_on_meta(module):
                found[module] = enclosing
            continue
        reset = torch_modules.reset_method(module)
        initialise = init_weights or enclosing or (reset and _call_reset)
        if initialise:
            found[module] = initialise
        else:
            homeless.append(f"{type(module).__name__} '{name}' ({', '.join(own[:3])})")
    if homeless:
        raise UsageError(
            f"{type(model).__name__} is on the meta device, but {len(homeless)} of its modules have no function "
            f"that initialises them: {'; '.join(homeless[:3])}{'; ...' if len(homeless) > 3 else ''}. Give them "
            "reset_parameters(), or call accelerator.prepare_model(model, init_weights=function)."
        )
    return found


class GroupValues:
    """Gives the modules of one group after the other their values. The objects stay: parameters tied are tied,
    and an optimizer that holds them still does.

    A module none of whose tensors are on meta any more, as they are those of an earlier one, is not initialised
    again. ``offloaded``: where parameters are kept, once they have their values.
    """

    def __init__(
        self,
        device: torch.device,
        initialisers: dict[nn.Module, InitWeights],
        world_size: int,
        offloaded: OffloadedParameters | None = None,
    ) -> None:
        self._device = device
        self._initialisers = initialisers
        self._world_size = world_size
        self._offloaded = offloaded
        self._offloaded_ids: set[int] = set()

    @torch.no_grad()
    def fill(self, modules: Iterable[nn.Module]) -> None:
        """Materialise what is on meta, move the rest to the device, and take rank 0's values. Collective.

        Modules come after those inside them, so that an initialiser may change these too.

        Raises:
            UsageError: an initialiser left values unset.
        """
        modules = list(modules)
        present = set(modules)
        made: list[nn.Module] = []
        for module in modules:
            initialise = self._initialisers.get(module)
            # One without tensors of its own may have rules for those inside, if they are all at hand.
            if self._make_tensors(module) or (
                initialise and _is_bare(module) and present.issuperset(module.modules())
            ):
                self._initialisers[module](module)
                made.append(module)
            if self._offloaded is not None:
                self._offload_parameters(module, module in made)
        # After all initialisers, because that of an outer module may fill the tensors of inner ones.
        for module in made if self._offloaded is None else ():
            _check_filled(module)
        # By ``id``: a tied tensor stands in several modules, and all ranks must send it equally often.
        tensors = {id(tensor): tensor for _, tensor in _tensors(modules)}.values()
        for tensor in tensors:
            if tensor.device != self._device or not tensor.is_contiguous():
                tensor.data = tensor.data.to(self._device).contiguous()
        if self._world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.data, src=0)

    def _offload_parameters(self, module: nn.Module, was_made: bool) -> None:
        """Move a module's parameters to where they are kept, before the next module's are made."""
        assert self._offloaded is not None
        if was_made:
            _check_filled(module)
        for parameter in torch_modules.parameters_of(module).values():
            if parameter is not None and id(parameter) not in self._offloaded_ids:
                parameter.data = self._offloaded.keep(parameter.data)
                self._offloaded_ids.add(id(parameter))

    def _make_tensors(self, module: nn.Module) -> bool:
        """Return whether a tensor of this module was made now."""
        empty = [tensor for _, tensor in _tensors([module]) if tensor.is_meta]
        for tensor in empty:
            # The object stays, with what others know of it: its hooks, ties, and its place in an optimizer.
            torch.utils.swap_tensors(tensor, _unset_like(tensor, self._device))
        return bool(empty)


def materialize(
    model: nn.Module,
    device: torch.device,
    init_weights: InitWeights | None,
    world_size: int,
    offloaded: OffloadedParameters | None = None,
) -> None:
    """Give a whole model values on ``device``, those of rank 0, where it is on meta. Collective.

    With ``offloaded`` its parameters go there, module after module: no more than one is in memory besides.

    Raises:
        UsageError: nothing says how to initialise it, or an initialiser left values unset.
    """
    values = GroupValues(device, initialisers(model, init_weights), world_size, offloaded)
    values.fill(modules_inside_out(model))


def modules_inside_out(model: nn.Module) -> list[nn.Module]:
    """Return all modules, each after those inside it: the order in which constructors initialise them."""
    order: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        order.setdefault(module)

    visit(model)
    return list(order)


def check_same_model(model: nn.Module, world_size: int) -> None:
    """Raise UsageError on all ranks unless they hold the same parameters and buffers. Collective."""
    mine = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {'trainable' if tensor.requires_grad else 'frozen'}"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    all_ranks = [mine] * world_size
    dist.all_gather_object(all_ranks, mine)
    # Every rank goes through the same lists, and so raises the same error.
    for rank, theirs in enumerate(all_ranks):
        if theirs != all_ranks[0]:
            ours_only = [line for line in all_ranks[0] if line not in theirs][:1]
            theirs_only = [line for line in theirs if line not in all_ranks[0]][:1]
            raise UsageError(
                f"{type(model).__name__} differs between the ranks: rank 0 has {ours_only or 'another order'}, "
                f"rank {rank} has {theirs_only or 'another order'}. Build the same model on every rank."
            )


def _tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors that belong to the modules themselves, not to modules inside them."""
    for module in modules:
        for name, tensor in (
            *torch_modules.parameters_of(module).items(),
            *torch_modules.buffers_of(module).items(),
        ):
            if tensor is not None:
                yield name, tensor


def _is_bare(module: nn.Module) -> bool:
    return next(_tensors([module]), None) is None


def _all_on_meta(module: nn.Module) -> bool:
    tensors = [tensor for _, tensor in _tensors(module.modules())]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def _unset(dtype: torch.dtype) -> float | int | None:
    """Return a value that no initialiser leaves; None where every value may be meant."""
    if dtype.is_floating_point:
        return float("nan")
    return None if dtype in (torch.bool, torch.uint8) or dtype.is_complex else torch.iinfo(dtype).min


def _unset_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(tensor, device=device)
    value = _unset(made.dtype)
    if value is not None:
        made.fill_(value)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _check_filled(module: nn.Module) -> None:
    for name, tensor in _tensors([module]):
        value = _unset(tensor.dtype)
        if value is None:
            continue
        unset = tensor.isnan() if tensor.is_floating_point() else tensor == value
        if bool(unset.any()):
            raise UsageError(
                f"{type(module).__name__}.{name} of shape {tuple(tensor.shape)} was on the meta device, and its "
                "initialiser did not set its values. Let the initialiser fill every parameter and buffer."
            )


def _call_reset(module: nn.Module) -> None:
    reset = torch_modules.reset_method(module)
    assert reset is not None
    reset()


def _enclosing_initialiser(model: nn.Module, name: str) -> InitWeights | None:
    """Return the ``_init_weights`` of the innermost transformers model around the module of this name."""
    path = name.split(".") if name else []
    for length in range(len(path), -1, -1):
        module = model.get_submodule(".".join(path[:length]))
        if hasattr(module, "_no_split_modules") and hasattr(module, "_init_weights"):
            initialiser: object = module._init_weights
            return cast(InitWeights, initialiser)
    return None
