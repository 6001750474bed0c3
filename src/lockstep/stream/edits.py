"""Whether a model still consists of the modules and parameters that it had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lockstep.errors import UsageError
from lockstep.stream.units import Unit
from lockstep.torch_internals import modules as torch_modules


class Edits:
    """What ``model`` consists of when this is made: all its modules, and the parameters of ``units``."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        # Not the modules that hold them, among which is the model: nothing here shall keep it.
        self._modules: list[_Place] = []
        self._parameters: list[_Place] = []
        streamed = {id(tensor) for unit in units for tensor in unit.tensors.values()}
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            for key, child in torch_modules.children_of(module).items():
                self._modules.append((torch_modules.children_of(module), key, child, prefix + key))
            for key, parameter in torch_modules.parameters_of(module).items():
                # fully_shard puts whole ones in the place of DTensors, and may leave them there.
                if id(parameter) in streamed and not hasattr(parameter, "__tensor_flatten__"):
                    self._parameters.append(
                        (torch_modules.parameters_of(module), key, parameter, prefix + key)
                    )

    def check(self) -> None:
        """Raise UsageError where something else is there now, or nothing."""
        for kind, places in (("module", self._modules), ("parameter", self._parameters)):
            for members, key, original, name in places:
                if members.get(key) is not original:
                    what = "replaced" if members.get(key) is not None else "removed"
                    raise UsageError(
                        f"The {kind} '{name}' was {what} while the model's weights are streamed. "
                        "End streaming first, change the model, and then begin again."
                    )


_Place = tuple[dict[str, Any], str, Any, str]  # what holds it, under which key, itself, and its full name
