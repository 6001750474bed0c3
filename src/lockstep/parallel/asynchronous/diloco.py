"""DiLoCo: each rank trains by itself for many steps; an outer optimizer follows the mean of where they went."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lockstep.comm.collectives import raise_on_all_ranks
from lockstep.comm.tree import StateDict
from lockstep.errors import CheckpointError, UsageError
from lockstep.parallel.asynchronous.block import Trainer
from lockstep.parallel.asynchronous.local_sgd import LocalRounds

OUTER_OPTIMIZER = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
"""That of the paper."""


class DiLoCo(LocalRounds):
    """Lets each rank train by itself for many steps, and then steps an outer optimizer on the mean of the results
    (DiLoCo).

    A round is ``steps`` optimizer steps of each rank. Its outer gradient is the parameters at its beginning minus the
    mean over the ranks of those at its end. The outer optimizer applies it to the parameters at the beginning, and
    the next round begins there on all ranks. The end of the block ends a round, too. Floating-point buffers are
    averaged. The state of the inner optimizer stays different on each rank. With ``SGD(lr=1)`` as outer optimizer it
    is local SGD.

    Reference: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023.

    Args:
        accelerator: The ``Accelerator`` that has prepared the model.
        model: The model that ``prepare`` returned. Each rank has the whole model, and all ranks make the same number
            of steps.
        steps: The number of steps of the inner optimizer in a round. The paper takes 500.
        outer_optimizer: A function that builds the outer optimizer from a list of tensors: a copy of the parameters,
            of their shapes, in float32 or a wider dtype. None: SGD with a learning rate of 0.7 and Nesterov momentum
            of 0.9.
        optimizer: The inner optimizer. It is only needed to continue exactly from a checkpoint; see ``state_dict``.
        offload: Keep that copy and the state of the outer optimizer in host memory.
        enabled: False: gradients are averaged at each step, as without the block.

    Raises:
        ConfigError: ``steps`` is below 1. All ranks raise it.
        UsageError: the model is sharded, split or not prepared, or ``outer_optimizer`` builds no optimizer. All ranks
            raise it.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, DiLoCo

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with DiLoCo(accelerator, model, steps=5) as diloco:
            for batch in torch.randn(10, 8, 4):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()  # every fifth call the ranks exchange weights
        weight = accelerator.gather(accelerator.unwrap_model(model).weight)
        assert (weight == weight[0]).all()  # the ranks agree
        ```
    """

    def __init__(
        self,
        accelerator: Trainer,
        model: nn.Module,
        steps: int,
        outer_optimizer: Callable[[list[torch.Tensor]], Optimizer] | None = None,
        *,
        optimizer: Optimizer | None = None,
        offload: bool = False,
        enabled: bool = True,
    ) -> None:
        super().__init__(accelerator, model, steps, optimizer, enabled)
        self._start = {
            name: p.detach().to(
                device="cpu" if offload else p.device,
                # Outer steps may be smaller than the rounding of bf16.
                dtype=torch.promote_types(p.dtype, torch.float32),
                copy=True,
            )
            for name, p in self._trained.items()
        }
        build = outer_optimizer or OUTER_OPTIMIZER
        with raise_on_all_ranks(self._communicator):
            outer = build(list(self._start.values())) if callable(build) else None
            if not isinstance(outer, Optimizer):
                raise UsageError(
                    f"DiLoCo got outer_optimizer={outer_optimizer!r}, which does not return an optimizer. Pass a "
                    "function of a list of tensors, such as functools.partial(torch.optim.SGD, lr=0.7)."
                )
            self.outer_optimizer = outer

    @torch.no_grad()
    def _begin(self) -> None:
        super()._begin()
        # In a round that was loaded, the parameters at its beginning are known.
        if self.ranks_agree:
            for name, parameter in self._trained.items():
                self._start[name].copy_(parameter)

    @torch.no_grad()
    def _combine(self) -> None:
        super()._combine()
        for name, mean in self._trained.items():
            # What the ranks have moved on average, with the sign of a gradient.
            self._start[name].grad = self._start[name] - mean.to(self._start[name])
        self.outer_optimizer.step()
        for name, parameter in self._trained.items():
            self._start[name].grad = None
            parameter.copy_(self._start[name])

    def _outer_state(self) -> StateDict:
        return {"start": dict(self._start), "outer": self.outer_optimizer.state_dict()}

    def _load_outer_state(self, state: StateDict) -> None:
        for name, value in state["start"].items():
            self._start[name].copy_(value)
        self.outer_optimizer.load_state_dict(state["outer"])

    def _check_state(self, state: StateDict) -> None:
        super()._check_state(state)
        if not {"start", "outer"} <= state.keys():
            raise CheckpointError("The state of DiLoCo lacks start or outer. Load a state that DiLoCo saved.")
        self._check_tensors(state["start"], self._start)
