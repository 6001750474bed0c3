"""Stand-ins for what a rank does not hold: tensors with a shape but no values, and modules made of them.

The user's ``forward`` runs on every stage. What it computes from stand-ins is a stand-in again and takes no
memory; what it computes from inputs and buffers alone is real.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UsageError
from lockstep.torch_internals import dtensor
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.fake import FakeTensor, FakeTensorMode

_CARRIED = "_lockstep_carried"


class StandIns:
    """Makes tensors without values on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device

    def like(self, tensor: Tensor) -> Tensor:
        """A new stand-in of the same shape, strides, dtype and ``requires_grad``."""
        with self._mode:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        return new.requires_grad_(tensor.requires_grad)


def is_stand_in(value: Any) -> bool:
    """Whether ``value`` is a tensor without values."""
    if isinstance(value, DTensor):
        value = dtensor.local_tensor(value)
    return isinstance(value, FakeTensor)


def carry(stand_in: Tensor, value: Tensor) -> None:
    """Note the real tensor for which ``stand_in`` stands on this stage."""
    setattr(stand_in, _CARRIED, value)


def carried(value: Any) -> Any:
    """The real tensor for which ``value`` stands, if there is one, else ``value``."""
    return getattr(value, _CARRIED, value) if isinstance(value, Tensor) else value


class Instead(nn.Module):
    """Takes the place of a module in calls; its attributes are still to be found."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.replaced = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(torch_modules.children_of(self)["replaced"], name)


class AbsentBlock(nn.Module):
    """Takes the place of a block of another stage. Has its plain attributes, but no parameters."""

    def __init__(self, name: str, block: nn.Module) -> None:
        super().__init__()
        self._name = name
        plain = {key: value for key, value in vars(block).items() if not key.startswith("_")}
        plain.pop("forward", None)  # of the object: it would run the block
        plain.pop("training", None)
        self._plain = {key: value for key, value in plain.items() if not isinstance(value, Tensor)}

    def __getattr__(self, name: str) -> Any:
        plain = self.__dict__.get("_plain", {})
        return plain[name] if name in plain else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"The block '{self._name}' is on another rank of the pipeline, and was called outside of a forward of "
            "the whole model. Call the model that was prepared."
        )


def copy_without_values(module: nn.Module, memo: dict[int, Any], keep_buffers: bool) -> nn.Module:
    """A copy of ``module`` whose parameters are plain attributes, and those of ``memo``: id -> stand-in.

    ``keep_buffers``: buffers are copied with their values, as plain attributes; else they are as in ``memo``.
    """
    new = copy.deepcopy(module, memo)
    for inner in new.modules():
        _attributes_instead(inner, torch_modules.parameters_of(inner))
        if keep_buffers:
            _attributes_instead(inner, torch_modules.buffers_of(inner))
    return new


def _attributes_instead(module: nn.Module, registered: dict[str, Any]) -> None:
    for name, value in list(registered.items()):
        if value is not None:
            del registered[name]
            module.__dict__[name] = value


def slots(model: nn.Module, module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """(dict, key) of each place in ``model`` where ``module`` is registered."""
    for parent in model.modules():
        for key, child in torch_modules.children_of(parent).items():
            if child is module:
                yield torch_modules.children_of(parent), key
