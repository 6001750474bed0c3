"""What a module does in a tensor-parallel model, mixed into its class.

Parameters are DTensors, but a forward computes with this rank's part of them, as plain tensors: any code
works on these, and what the ranks send each other is only what the parts say (see ``hooks``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.comm.tree import Args, Kwargs
from lockstep.model.changes import Subclassed, subclass
from lockstep.parallel.tensor import communication
from lockstep.parallel.tensor.rank_features import RankFeatures
from lockstep.torch_internals import modules as torch_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class TensorParallelGroup:
    """What the modules of one model share.

    Attributes:
        mesh: The ranks, a 1-D DeviceMesh.
        sequence: Whether activations between blocks are split along the sequence.
        loss: Whether logits stay split over the vocabulary in training.
        is_split: False while a forward without gradients cannot split its sequence.
        after_forward: Called when a forward of the model has ended.
    """

    def __init__(self, mesh: DeviceMesh, sequence: bool = False, loss: bool = False) -> None:
        self.mesh = mesh
        self.sequence = sequence
        self.loss = loss
        self.is_split = sequence
        self.after_forward: list[Callable[[], None]] = []
        self._depth = 0

    @property
    def computes(self) -> bool:
        return self._depth > 0

    def begin(self) -> None:
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        # The model's own forward has ended: the next one may split its sequence again.
        if self._depth == 0:
            self.is_split = self.sequence
            for call in self.after_forward:
                call()

    def __deepcopy__(self, memo: object) -> TensorParallelGroup:
        return self


class ParallelHook:
    """Something that a module does around its own forward. The base does nothing."""

    def enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Args, Kwargs]:
        return args, kwargs

    def leave(self, module: nn.Module, output: Any) -> object:
        return output

    def close(self, module: nn.Module) -> None:
        """Close after ``leave``, or after a failure."""


class ParallelModuleSpec:
    """Of one module: its parts, and how its parameters are used.

    ``layer`` is the part that its split parameters belong to. The gradient of its whole parameters is a sum over the
    ranks if it ``is_partial``, or is ``in_sequence`` and the sequence is split.
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group
        self.parts: list[ParallelHook] = []
        self.layer: Any = None
        self.is_partial = False
        self.in_sequence = False

    def value(self, module: nn.Module, name: str, parameter: DTensor) -> Tensor:
        if not is_dtensor(parameter):
            return parameter
        is_split = self.layer is not None and name in self.layer.names
        value = self.layer.value(module, name, parameter) if is_split else self.whole_value(parameter)
        # Layers of torch sum over rows in kernels, which make new tensors.
        if not _is_of_torch(module):
            value = communication.own_gradient(value)
        is_summed = self.is_partial and not is_split and torch.is_grad_enabled()
        return RankFeatures.of(value, None) if is_summed else value

    def whole_value(self, parameter: DTensor) -> Tensor:
        value: Tensor = parameter.to_local()
        is_sum = self.is_partial or (self.in_sequence and self.group.is_split)
        return communication.copy(value, self.group.mesh) if is_sum else value


def _is_of_torch(module: nn.Module) -> bool:
    return str(module._plain_class.__module__).startswith("torch.nn.")


class TensorParallelForward(Subclassed, nn.Module):
    """Mixed into the class of each module that has parameters, or that has such modules inside."""

    _attributes = ("_tensor_spec",)
    _tensor_spec: ParallelModuleSpec

    def forward(self, *args: object, **kwargs: object) -> object:
        spec = self._tensor_spec
        spec.group.begin()
        entered: list[ParallelHook] = []
        try:
            for part in spec.parts:
                # First, so that it is closed even if entering fails halfway.
                entered.append(part)
                args, kwargs = part.enter(self, args, kwargs)
            output = super().forward(*args, **kwargs)
            for part in reversed(spec.parts):
                output = part.leave(self, output)
            return output
        finally:
            for part in reversed(entered):
                part.close(self)
            spec.group.end()


def spec_of(module: nn.Module) -> ParallelModuleSpec:
    """Return what was attached to this module."""
    return vars(module)["_tensor_spec"]


def attach_spec(module: nn.Module, spec: ParallelModuleSpec, classes: dict[object, type]) -> None:
    """Give ``module`` the mixin; ``classes`` are those made so far."""
    module._tensor_spec = spec  # type: ignore[assignment]
    names = tuple(torch_modules.parameters_of(module))
    key = (type(module), names, isinstance(module, nn.Embedding))
    if key not in classes:
        # Properties: the forward of another module may use a weight, too, as in `F.linear(x, self.token.weight)`.
        properties: dict[str, object] = {name: _parameter_property(name) for name in names}
        if isinstance(module, nn.Embedding):
            properties["padding_idx"] = _padding_property()
        if isinstance(module, nn.RNNBase):
            properties[torch_modules.FLAT_WEIGHTS] = _flat_weights_property()
        classes[key] = subclass(type(module), TensorParallelForward, **properties)
    module.__class__ = classes[key]


def _parameter_property(name: str) -> property:
    """Make a property of the parameter: a plain tensor of this rank's part while a forward runs."""

    def get(module: nn.Module) -> object:
        # A pipeline's placeholder for what another stage has.
        if name in module.__dict__:
            return module.__dict__[name]
        try:
            parameter = torch_modules.parameters_of(module)[name]
        except KeyError:
            raise AttributeError(name) from None
        spec = spec_of(module)
        if parameter is None or not spec.group.computes:
            return parameter
        return spec.value(module, name, parameter)

    return property(get)


def _padding_property() -> property:
    def get(module: nn.Module) -> int | None:
        index = module.__dict__["padding_idx"]
        layer = spec_of(module).layer
        return index if layer is None else layer.padding_index(module, index)

    def set_(module: nn.Module, index: object) -> None:
        module.__dict__["padding_idx"] = index

    return property(get, set_)


def _flat_weights_property() -> property:
    """Make a property of the list in which a recurrent module has its weights, too."""

    def get(module: nn.Module) -> list[object]:
        return torch_modules.flat_weights(module)

    def set_(module: nn.Module, weights: object) -> None:
        """Set nothing: the values are read from the parameters."""

    return property(get, set_)


def first_tensor(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[int | str, Tensor] | None:
    """Return (place, value) of the first tensor in the arguments of a call; None if there is none."""
    given: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
    return next(((place, value) for place, value in given if isinstance(value, Tensor)), None)


def with_argument(
    args: tuple[object, ...], kwargs: dict[str, object], place: int | str, value: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments with another value in one place."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: value}
