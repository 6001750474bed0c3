"""One stage: the modules that it owns, and torch's record of it in a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import LockstepError
from lockstep.parallel.pipeline.segment import Segment
from lockstep.parallel.pipeline.trace import Cut, Kind
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.pipelining_stage import StageBase

Executed = tuple[int, int, str, int]
"""(rank, stage, kind, micro-batch); kinds ``F``, ``B``, ``I``, ``W``."""


class StageModule(nn.Module):
    """The blocks and other modules of one stage, under their names in the user's model.

    The forward runs the user's model on this stage; whoever shards this module shards the stage.
    """

    def __init__(self, modules: Mapping[str, nn.Module], parameters: Mapping[str, dict[str, object]]) -> None:
        """``parameters``: name of a module that belongs to no stage as a whole -> its own parameters."""
        super().__init__()
        self.segment: Segment | None = None
        self.micro_batch = 0
        for name, registered in parameters.items():
            # The same dict: whoever replaces one replaces it in the model.
            torch_modules.set_parameters_of(self._at(name), registered)
        for name, module in modules.items():
            path, _, key = name.rpartition(".")
            self._at(path).add_module(key, module)

    def _at(self, name: str) -> nn.Module:
        module: nn.Module = self
        for key in name.split(".") if name else ():
            if key not in torch_modules.children_of(module):
                module.add_module(key, nn.Module())
            module = torch_modules.children_of(module)[key]
        return module

    def forward(self, *received: torch.Tensor) -> Any:
        assert self.segment is not None
        return self.segment(self.micro_batch, received)


class Stage(StageBase):
    """torch's stage, with static shapes, which notes what it did."""

    def __init__(
        self,
        module: StageModule,
        index: int,
        cuts: list[Cut],
        device: torch.device,
        group: dist.ProcessGroup,
        executed: list[Executed],
        results: int,
    ) -> None:
        """``cuts[s]``: what stage s receives; ``results``: how many tensors the last stage's forward returns."""
        number = Kind(torch.Size(), torch.float32, False)  # nobody looks at what the last stage returns
        following = cuts[index + 1].kinds if index + 1 < len(cuts) else (number,) * results
        super().__init__(
            module,
            index,
            len(cuts),
            device,
            input_args=tuple(map(_example, cuts[index].kinds)),
            output_args=tuple(map(_example, following)),
            group=group,
        )
        self._module = module
        self._executed = executed

    def _note(self, kind: str, micro_batch: int) -> None:
        self._executed.append((self.group_rank, self.stage_index, kind, micro_batch))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: object, **kwargs: object) -> object:
        self._note("F", fwd_chunk_id)
        self._module.micro_batch = fwd_chunk_id
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, LockstepError):
                raise error.__cause__ from None  # torch wraps what a forward raises
            raise

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._note("B" if full_backward else "I", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: object, **kwargs: object) -> None:
        self._note("W", bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def _example(kind: Kind) -> torch.Tensor:
    return torch.empty(kind.shape, dtype=kind.dtype, device="meta", requires_grad=kind.requires_grad)
