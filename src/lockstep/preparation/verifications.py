"""Which prepared models are compared with the whole ones: those whose forward is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.comm.tree import LossFunction
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.preparation.run_context import RunContext

if TYPE_CHECKING:
    from lockstep.check.verification import Verification


class Verifications:
    """Belongs to one ``Accelerator``.

    Args:
        at_rest: Lets go of gathered parameters.
        unnoticed: Runs a backward of which nothing will be left.
    """

    def __init__(
        self,
        run: RunContext,
        at_rest: Callable[[], None],
        unnoticed: Callable[[Callable[[], None]], None],
    ) -> None:
        self._run = run
        self._at_rest = at_rest
        self._unnoticed = unnoticed
        self._of_models: dict[int, Verification] = {}
        self._next: Verification | None = None

    def before_split(self, model: nn.Module) -> None:
        """``model`` is still whole: take a copy, if it will be split. Collective where it is."""
        parallel = self._run.options.parallel
        self._next = None
        if not parallel.splits_forward or parallel.verify == "off" or self._run.runtime.world_size == 1:
            return
        # Here, because it imports DTensor, which takes long.
        from lockstep.check.verification import Setup, Verification

        setup = Setup(
            parallel=parallel,
            axes=parallel.splits_forward,
            interval=parallel.verify_interval,
            device=self._run.runtime.device,
            shares_batches=self._run.meshes.data_size > 1,
            half=self._half(),
            is_compiled=self._run.options.compile_options is not None,
            at_rest=self._at_rest,
            unnoticed=self._unnoticed,
        )
        self._next = Verification(model, setup, self._run.communicator)

    def _half(self) -> torch.dtype | None:
        """The type of gathered weights, where it has 16 bits."""
        precision = self._run.options.mixed_precision
        if not self._run.options.parallel.shards or precision == "no":
            return None
        return torch.float16 if precision == "fp16" else torch.bfloat16

    def watch(self, prepared: ParallelModel) -> None:
        """It was made of the last model that was given to ``before_split``."""
        if self._next is not None:
            self._next.watch(prepared)
            self._of_models[id(prepared.module)] = self._next
            self._next = None

    def before_step(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        targets: tuple[object, ...],
    ) -> None:
        """Verify a call of a model whose loss is computed outside of it, if it is time."""
        verification = self._of_models.get(id(model))
        if verification is not None:
            from lockstep.check.passes import ComparedBatch

            verification.before_call(ComparedBatch(args, kwargs, loss_function, targets))

    def clear(self) -> None:
        """Forget all models."""
        self._of_models.clear()
