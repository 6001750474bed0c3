"""What all asynchronous training shares: which models it takes, its with block, where ranks meet, and their means."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol, TypeVar

import torch
from torch import nn

from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.comm.dtensor import is_dtensor
from lockstep.config.parallel import Parallel
from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.parallel.gradient_mean import buckets
from lockstep.runtime.process import Runtime
from lockstep.torch_internals.fsdp2 import is_sharded

Entered = TypeVar("Entered", bound="TrainingBlock")


class Trainer(Protocol):
    """The part of an ``Accelerator`` that is used here."""

    sync_gradients: bool

    @property
    def runtime(self) -> Runtime: ...

    @property
    def parallel(self) -> Parallel: ...

    @property
    def mixed_precision(self) -> str: ...

    @property
    def scaler(self) -> torch.amp.GradScaler | None: ...

    def alone(self, model: nn.Module) -> AbstractContextManager[None]: ...


class TrainingBlock:
    """Entered by one ``with`` at a time; inside of it no gradients are averaged. Building it is collective.

    Args:
        settings: Equal on all ranks that belong together.
        enabled: False: training is as it would be without the block.
    """

    def __init__(self, accelerator: Trainer, model: nn.Module, settings: str, enabled: bool) -> None:
        self.model = model
        # A subclass may switch itself off where a single process has nothing to exchange.
        self.enabled = self._is_wanted = enabled
        self._name = type(self).__name__
        self._trainer = accelerator
        self._communicator = Communicator(accelerator.runtime)
        self._entered: ExitStack | None = None
        with raise_on_all_ranks(self._communicator):
            self._check()
        self._check_ranks_match(f"{self._name}({settings}, enabled={enabled})", 0)

    def __enter__(self: Entered) -> Entered:
        if self._entered is not None:
            raise UsageError(
                f"{self._name} was entered twice. Leave its with block before you enter it again."
            )
        with ExitStack() as stack:
            if self._is_wanted:
                stack.enter_context(self._trainer.alone(self.model))
            if self.enabled:
                self._begin()
            self._entered = stack.pop_all()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        assert self._entered is not None
        stack, self._entered = self._entered, None
        with stack:
            if self.enabled and error is None:
                self._end()
            elif self.enabled and error is not None:
                self._report_failure(error)

    def _begin(self) -> None:
        """Begin an enabled block."""

    def _end(self) -> None:
        """End an enabled block that no exception left."""

    def _report_failure(self, error: BaseException) -> None:
        """Let the others know what left the block here, instead of leaving them waiting for this rank."""

    # What is refused --------------------------------------------------------------------------------

    def _check_count(self, name: str, value: object, least: int) -> None:
        """Raise ConfigError unless ``value`` is a whole number of at least ``least``."""
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{self._name} got {name}={value!r}. Pass a whole number of {least} or more.")

    def _check(self) -> None:
        """Raise UsageError unless every rank holds a replica of the whole model, as in plain data parallel training.

        Subclasses check their own arguments too. No collective.
        """
        model, what, kind = self.model, self._name, type(self.model).__name__
        if not isinstance(model, nn.Module):
            raise UsageError(f"{what} got a {kind}. Pass the model that prepare() returned.")
        world_size, parallel = self._communicator.world_size, self._trainer.parallel
        needs_whole = f"{what} needs the whole model on every rank, but {kind} is"
        instead = f"Prepare it with parallel='ddp', or leave {what} out."
        if is_sharded(model):
            raise UsageError(f"{needs_whole} sharded by ZeRO. {instead}")
        if any(is_dtensor(parameter) for parameter in nn.Module.parameters(model)):
            raise UsageError(f"{needs_whole} split over ranks. {instead}")
        # Such ranks share a model's work, although each may hold all of its weights.
        axes = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "cp", "ep")}
        split = " ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
        if split and world_size > 1:
            raise UsageError(
                f"{what} needs ranks that train separately, but with parallel='{split}' they share each step. "
                f"{instead}"
            )
        if any(parameter.is_complex() for parameter in nn.Module.parameters(model)):
            raise UsageError(
                f"{what} averages real numbers, but {kind} has complex parameters. Leave {what} out."
            )
        if world_size == 1:
            return
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"{what} got a {kind} that is not a data parallel replica. Pass the model that prepare() returned. "
                "It must have parameters that require gradients."
            )
        ranks = model.process_group.size()
        if ranks != world_size:
            raise UsageError(
                f"{what} needs a replica on every rank, but {kind} has {ranks} on {world_size} ranks. {instead}"
            )

    # Between ranks ----------------------------------------------------------------------------------

    def _check_ranks_match(self, what: str, step: int, failure: BaseException | None = None) -> None:
        """Wait until all ranks are here.

        Args:
            what: Names the check; equal on all ranks that belong together.
            step: Optimizer steps that this rank has made.
            failure: Why this rank can take no further part.

        Raises:
            LockstepError: some rank failed.
            UsageError: the ranks meet elsewhere, or after different numbers of steps.
        """
        if self._communicator.world_size == 1:
            return
        message_of_failure = None if failure is None else f"{type(failure).__name__}: {failure}"
        places = self._communicator.gather_object([(what, step, message_of_failure)])
        for rank, (_, steps, message) in enumerate(places):
            if message is not None:
                raise LockstepError(
                    f"Rank {rank} left {what} after {steps} steps with {message} This rank stops with it. "
                    "Mend the cause on that rank."
                )
        if len(set(places)) > 1:
            found = ", ".join(
                f"rank {rank} {name} after {steps} steps" for rank, (name, steps, _) in enumerate(places)
            )
            raise UsageError(
                f"Ranks exchanged data at different places: {found}. Let every rank make the same number of steps: "
                "prepare the loader with even_batches=True."
            )

    def _floating_buffers(self) -> list[torch.Tensor]:
        """Buffers with a mean, such as running statistics; counters and masks have none."""
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]

    @torch.no_grad()
    def _average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor, of any shape, by its mean over the ranks. Collective. Halves are added up in fp32."""
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            # One message for a bucket: [n1] + [n2] + ... -> [n1 + n2 + ...] and back.
            means = self._communicator.reduce(flat, "mean").split([tensor.numel() for tensor in bucket])
            for tensor, mean in zip(bucket, means, strict=True):
                tensor.detach().copy_(mean.view(tensor.shape))
