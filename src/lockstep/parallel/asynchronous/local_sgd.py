"""Local SGD: each rank trains by itself, and now and then all take the mean of their parameters."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.tree import StateDict
from lockstep.errors import CheckpointError, UsageError
from lockstep.parallel.asynchronous.block import Trainer, TrainingBlock
from lockstep.parallel.parallel_model import unwrap
from lockstep.runtime.failure import is_consequence
from lockstep.torch_internals import optim as torch_optim

STATE_KEYS = frozenset({"num_steps", "in_round", "world_size", "parameters", "buffers", "optimizer"})


class LocalRounds(TrainingBlock):
    """Rounds of steps that each rank makes by itself, with a meeting at the end of each: ``LocalSGD`` and ``DiLoCo``.

    Where ranks meet, they take the mean of their parameters; a subclass may do more in ``_combine``. A rank that leaves
    the block with an exception tells the others, which raise at their next meeting.

    Args:
        steps: Optimizer steps of a round.
        optimizer: Of the steps in between. Its state differs from rank to rank; given here, it is part of
            ``state_dict``.
    """

    def __init__(
        self, accelerator: Trainer, model: nn.Module, steps: int, optimizer: Optimizer | None, enabled: bool
    ) -> None:
        self.steps = steps
        self.num_steps = self._in_round = 0
        super().__init__(accelerator, model, f"steps={steps}", enabled)
        self._optimizer = optimizer
        # Its names are the same in every world, compiled or not.
        plain = unwrap(model, keep_compile=False)
        self._trained: dict[str, torch.Tensor] = {
            name: p for name, p in plain.named_parameters() if p.requires_grad
        }

    def _check(self) -> None:
        self._check_count("a number of steps", self.steps, least=1)
        super()._check()

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks have the same parameters now: from a meeting to the next step."""
        return self._in_round == 0

    def step(self) -> None:
        """Count a step of the optimizer, and end the round if it was the last one. Call it after each
        ``optimizer.step()``.

        Before the last micro-batch of an accumulation window, it does nothing.

        Raises:
            LockstepError: another rank failed.
            UsageError: it is called outside of the block, or another rank made another number of steps.
        """
        if not self._trainer.sync_gradients:
            return
        if self.enabled and self._entered is None:
            raise UsageError(
                f"{self._name}.step was called outside of its block. Train inside 'with {self._name}(...)'."
            )
        self.num_steps += 1
        if not self.enabled:
            return
        self._in_round += 1
        if self._in_round >= self.steps:
            self._synchronize("at the end of a round", merge=True)

    def _begin(self) -> None:
        self._others_know = False

    def _combine(self) -> None:
        """Give all ranks the same parameters. Collective."""
        self._average(self._trained.values())

    def _synchronize(self, where: str, merge: bool) -> None:
        # Whatever is raised from here on is raised on all ranks.
        self._others_know = True
        self._check_ranks_match(f"{self._name} {where}", self.num_steps)
        if merge:
            self._combine()
            self._average(self._floating_buffers())
            self._agree_on_loss_scale()
            self._in_round = 0
        self._others_know = False

    def _agree_on_loss_scale(self) -> None:
        """Take the smallest of the ranks' fp16 loss scales, which each adjusted by itself. Collective with a scaler."""
        scaler = self._trainer.scaler
        if scaler is None or not scaler.is_enabled():
            return
        state = scaler.state_dict()
        own = state["scale"], state[torch_optim.GROWTH_TRACKER]
        # Pairs compare by scale first; of equal scales the one that has grown for fewer steps counts.
        scale, growth = min(self._communicator.gather_object([own]))
        scaler.load_state_dict({**state, "scale": scale, torch_optim.GROWTH_TRACKER: growth})

    def _end(self) -> None:
        # Also right after a meeting: another rank may not have ended.
        self._synchronize("at the end of its block", merge=self._in_round > 0 or self.num_steps == 0)

    def _report_failure(self, error: BaseException) -> None:
        if self._others_know or not isinstance(error, Exception) or is_consequence(error):
            return
        # The error that counts is the one on its way.
        with suppress(Exception):
            self._check_ranks_match(self._name, self.num_steps, error)

    # State ------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the state of this rank, for ``load_state_dict``: name -> tensor, number, mapping or list.

        It has the position in the round, and the state of the optimizer if that was passed. Inside of a round, it
        also has this rank's own parameters and buffers. That of ``DiLoCo`` also has the parameters at the beginning
        of the round (equal on all ranks), and the state of the outer optimizer. The tensors share memory with the
        model.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator, DiLoCo, LocalSGD

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with LocalSGD(accelerator, model, local_sgd_steps=5) as local_sgd:
                accelerator.register_for_checkpointing(local_sgd)  # save_state calls it
                local_sgd.step()
                assert "parameters" in local_sgd.state_dict()  # those of a round that goes on
            with DiLoCo(accelerator, model, steps=5) as diloco:
                diloco.step()
                assert diloco.state_dict()["in_round"] == 1
            ```
        """
        inside = self._in_round > 0
        return {
            "num_steps": self.num_steps,
            "in_round": self._in_round,
            "world_size": self._communicator.world_size,
            "parameters": {name: p.detach() for name, p in self._trained.items()} if inside else {},
            "buffers": self._floating_buffers() if inside else [],
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
            **self._outer_state(),
        }

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
            from lockstep import Accelerator, DiLoCo, LocalSGD

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with LocalSGD(accelerator, model, local_sgd_steps=5) as local_sgd:
                accelerator.register_for_checkpointing(local_sgd)  # load_state calls it
                local_sgd.step()
                local_sgd.load_state_dict(local_sgd.state_dict())
                assert local_sgd.num_steps == 1
            with DiLoCo(accelerator, model, steps=5) as diloco:
                diloco.step()
                diloco.load_state_dict(diloco.state_dict())
                assert diloco.num_steps == 1
            ```
        """
        self._check_state(state)
        self.num_steps, self._in_round = state["num_steps"], state["in_round"]
        for name, value in state["parameters"].items():
            self._trained[name].copy_(value)
        if state["buffers"]:
            for buffer, value in zip(self._floating_buffers(), state["buffers"], strict=True):
                buffer.copy_(value)
        # Each rank's optimizer has a state of its own, and in another world nobody's would be right.
        same_world = state["world_size"] == self._communicator.world_size
        if self._optimizer is not None and state["optimizer"] is not None and same_world:
            self._optimizer.load_state_dict(state["optimizer"])
        self._load_outer_state(state)

    def _outer_state(self) -> StateDict:
        """Return what a subclass adds to the state."""
        return {}

    def _load_outer_state(self, state: StateDict) -> None:
        """Take it from a state that was checked."""

    def _check_state(self, state: StateDict) -> None:
        """Raise CheckpointError if the state cannot be loaded; changes nothing."""
        missing = STATE_KEYS - state.keys()
        if missing:
            raise CheckpointError(
                f"The state of {self._name} lacks {', '.join(sorted(missing))}. Load a state that {self._name} "
                "saved."
            )
        if not state["in_round"]:
            return
        if state["world_size"] != self._communicator.world_size:
            raise CheckpointError(
                f"{self._name} was saved {state['in_round']} steps into a round by {state['world_size']} ranks, "
                f"each with parameters of its own, but this run has {self._communicator.world_size}. Start as "
                "many ranks, or save when ranks_agree."
            )
        self._check_tensors(state["parameters"], self._trained)
        self._check_tensors(_numbered(state["buffers"]), _numbered(self._floating_buffers()))

    def _check_tensors(self, saved: dict[str, torch.Tensor], here: dict[str, torch.Tensor]) -> None:
        for name in {**saved, **here}:
            was, has = (tuple(tensors[name].shape) if name in tensors else None for tensors in (saved, here))
            if was != has:
                raise CheckpointError(
                    f"The state of {self._name} has {was} for '{name}', but the model has {has}. Prepare the model "
                    "that was saved."
                )


def _numbered(buffers: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): buffer for number, buffer in enumerate(buffers)}


class LocalSGD(LocalRounds):
    """Lets each rank train by itself, and averages the parameters of all ranks every ``local_sgd_steps`` optimizer
    steps.

    The end of the block averages them, too. Gradients are not averaged inside of the block. Floating-point buffers
    are averaged with the parameters. The state of the optimizer stays different on each rank.

    Reference: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.

    Args:
        accelerator: The ``Accelerator`` that has prepared the model.
        model: The model that ``prepare`` returned. Each rank has the whole model, and all ranks make the same number
            of steps.
        local_sgd_steps: The number of optimizer steps from one mean to the next.
        enabled: False: gradients are averaged at each step, as without the block.
        optimizer: The optimizer. It is only needed to continue exactly from a checkpoint; see ``state_dict``.

    Raises:
        ConfigError: ``local_sgd_steps`` is below 1. All ranks raise it.
        UsageError: the model is sharded, split or not prepared. All ranks raise it.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, LocalSGD

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with LocalSGD(accelerator, model, local_sgd_steps=5) as local_sgd:
            for batch in torch.randn(10, 8, 4):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()  # every fifth call weights are averaged
        weight = accelerator.gather(accelerator.unwrap_model(model).weight)
        assert (weight == weight[0]).all()
        ```
    """

    def __init__(
        self,
        accelerator: Trainer,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        *,
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(accelerator, model, local_sgd_steps, optimizer, enabled)
        self.enabled = enabled and accelerator.runtime.world_size > 1
