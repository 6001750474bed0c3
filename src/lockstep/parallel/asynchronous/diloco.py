"""DiLoCo: each rank trains by itself for many steps; an outer optimizer follows the mean of where they went."""

from __future__ import annotations

from collections.abc import Callable

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
    """The outer optimizer of the paper, for parameters of any shape."""
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


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
        outer_optimizer: OuterOptimizer | None = None,
        *,
        optimizer: Optimizer | None = None,
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
                    f"DiLoCo got outer_optimizer={outer_optimizer!r}, which does not return an optimizer. Pass a "
                    "function of a list of tensors, such as functools.partial(torch.optim.SGD, lr=0.7)."
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
            # What the ranks have moved on average, with the sign of a gradient.
            start.grad = start - mean.to(start)
        self.outer_optimizer.step()
        for name, parameter in self._trained.items():
            self._start[name].grad = None
            parameter.copy_(self._start[name])

    def state_dict(self) -> StateDict:
        """Return the state of this rank, for ``load_state_dict``: name -> tensor, number, mapping or list.

        It has the position in the round, the parameters at the beginning of the round (equal on all ranks), and the
        state of the outer optimizer. Inside of a round, it also has this rank's own parameters.

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
        """Continue at the step of the round at which ``state_dict`` was called.

        Args:
            state: The state of this rank.

        Raises:
            CheckpointError: it is the state of another model, or it was saved inside of a round by another number of
                ranks. Nothing was changed.

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
            raise CheckpointError("The state of DiLoCo lacks start or outer. Load a state that DiLoCo saved.")
        self._check_tensors(state["start"], self._start)
