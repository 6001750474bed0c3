"""DiLoCo: each rank trains by itself for many steps; an outer optimizer follows the mean of where they went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lockstep.comm.collectives import raise_on_all_ranks
from lockstep.comm.tree import StateDict
from lockstep.errors import CheckpointError, UsageError
from lockstep.parallel.asynchronous.block import Trainer, means
from lockstep.parallel.asynchronous.local_sgd import LocalRounds

OuterOptimizer = Callable[[list[torch.Tensor]], Optimizer]


def nesterov(parameters: list[torch.Tensor]) -> Optimizer:
    """The outer optimizer of the paper."""
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(LocalRounds):
    """Every ``steps`` optimizer steps, and at the end of the block, step the outer optimizer.

    The outer gradient is where the round began, minus the mean over the ranks of where it ended. The outer optimizer
    steps on the former, and there the next round begins on all ranks. With ``SGD(lr=1)`` that is local SGD.
    Floating-point buffers are averaged. The inner optimizer's state stays each rank's own.
    Reference: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023.

    Args:
        model: What ``prepare`` returned, replicated on every rank. All ranks must make the same number of steps.
        steps: Of the inner optimizer, from one outer step to the next (the paper: 500).
        outer_optimizer: Builds it from the parameters at which rounds begin, a copy of the model's in at least fp32.
            None: SGD with a learning rate of 0.7 and Nesterov momentum of 0.9.
        optimizer: The inner one. Only needed to go on exactly from a checkpoint; see ``state_dict``.
        offload: Keep that copy and the outer optimizer's state in host memory.
        enabled: False: gradients are averaged at each step, as without the block.

    Raises:
        ConfigError: ``steps`` is below 1.
        UsageError: the model is sharded, split, or not prepared. Both are raised on all ranks.

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
        outer_optimizer: OuterOptimizer | None = None,
        *,
        optimizer: Any = None,
        offload: bool = False,
        enabled: bool = True,
    ) -> None:
        super().__init__(accelerator, model, steps, optimizer, enabled)
        self._offload = offload
        self._start = {name: self._copy(p) for name, p in self._trained.items()}
        build = outer_optimizer or nesterov
        with raise_on_all_ranks(self._communicator):
            outer = build(list(self._start.values())) if callable(build) else None
            if not isinstance(outer, Optimizer):
                raise UsageError(
                    f"DiLoCo got outer_optimizer={outer_optimizer!r}, which builds no optimizer. Pass a function of a "
                    "list of tensors, such as functools.partial(torch.optim.SGD, lr=0.7)."
                )
            self.outer_optimizer = outer

    def _copy(self, parameter: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        device = torch.device("cpu") if self._offload else parameter.device
        return parameter.detach().to(device=device, dtype=dtype, copy=True)

    @torch.no_grad()
    def _begin(self) -> None:
        super()._begin()
        if self.ranks_agree:  # a round begins
            for name, parameter in self._trained.items():
                self._start[name].copy_(parameter)

    @torch.no_grad()
    def _combine(self) -> None:
        starts = {id(parameter): self._start[name] for name, parameter in self._trained.items()}
        for parameter, mean in means(self._communicator, self._trained.values()):
            start = starts[id(parameter)]
            start.grad = start - mean.to(start)
        self.outer_optimizer.step()
        for name, parameter in self._trained.items():
            self._start[name].grad = None
            parameter.copy_(self._start[name])

    def state_dict(self) -> StateDict:
        """Return this rank's position, and the state of the round, which is equal on all ranks.

        The state of the round has the parameters at which it began, and the outer optimizer's state.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator, DiLoCo

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with DiLoCo(accelerator, model, steps=5) as diloco:
                accelerator.register_for_checkpointing(diloco)  # save_state calls it
                diloco.step()
                assert diloco.state_dict()["in_round"] == 1
            ```
        """
        outer = self.outer_optimizer.state_dict()
        return {**super().state_dict(), "start": dict(self._start), "outer": outer}

    @torch.no_grad()
    def load_state_dict(self, state: StateDict) -> None:
        """Continue where this rank was when ``state_dict`` was called, in the same round.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator, DiLoCo

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with DiLoCo(accelerator, model, steps=5) as diloco:
                accelerator.register_for_checkpointing(diloco)  # load_state calls it
                diloco.step()
                diloco.load_state_dict(diloco.state_dict())
                assert diloco.num_steps == 1
            ```
        """
        super().load_state_dict(state)
        for name, value in state["start"].items():
            self._start[name].copy_(value)
        self.outer_optimizer.load_state_dict(state["outer"])

    def _check_state(self, state: StateDict) -> None:
        super()._check_state(state)
        if not {"start", "outer"} <= state.keys():
            raise CheckpointError("A state of DiLoCo lacks start or outer. Load a state that DiLoCo saved.")
        self._check_tensors(state["start"], self._start)
