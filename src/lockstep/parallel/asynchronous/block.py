"""What all asynchronous training shares: which models it takes, its with block, where ranks meet, and their means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from torch import nn

from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import ConfigError, LockstepError, UsageError
from lockstep.runtime.process import Runtime
from lockstep.torch_internals import optim as torch_optim
from lockstep.torch_internals.fsdp2 import is_sharded

Entered = TypeVar("Entered", bound="TrainingBlock")


class Trainer(Protocol):
    """The part of an ``Accelerator`` that is used here."""

    sync_gradients: bool

    @property
    def runtime(self) -> Runtime: ...

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
        self.enabled = self._is_wanted = enabled  # a single process may have nothing to do
        self._name = type(self).__name__
        self._trainer = accelerator
        self._communicator = Communicator(accelerator.runtime)
        self._entered: AbstractContextManager[None] | None = None
        with raise_on_all_ranks(self._communicator):
            self._check()
        meet(self._communicator, f"{self._name}({settings}, enabled={enabled})", 0)

    def __enter__(self: Entered) -> Entered:
        if self._entered is not None:
            raise UsageError(
                f"{self._name} was entered twice. Leave its with block before you enter it again."
            )
        entered = self._training()
        entered.__enter__()
        self._entered = entered
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._entered is not None
        entered, self._entered = self._entered, None
        entered.__exit__(kind, error, trace)

    @contextmanager
    def _training(self) -> Iterator[None]:
        if not self._is_wanted:
            yield
            return
        with self._trainer.alone(self.model):
            if not self.enabled:
                yield
                return
            self._begin()
            try:
                yield
            except BaseException as error:
                self._report_failure(error)
                raise
            self._end()

    # Each subclass has its own.

    def _check(self) -> None:
        """Refuse what was given. No collective."""

    def _begin(self) -> None:
        """Of an enabled block."""

    def _end(self) -> None:
        """Of an enabled block that no exception left."""

    def _report_failure(self, error: BaseException) -> None:
        """Let the others know what left the block here, instead of leaving them waiting for this rank."""


def check_count(what: str, name: str, value: object, least: int) -> None:
    """Raise ConfigError unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} got {name}={value!r}. Pass a whole number of {least} or more.")


def check_replicas(what: str, trainer: Trainer, model: nn.Module) -> None:
    """Raise UsageError unless every rank holds a replica of the whole model, as in plain data parallel training."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{what} got a {type(model).__name__}. Pass the model that prepare() returned.")
    world_size, kind = trainer.runtime.world_size, type(model).__name__
    needs_whole = f"{what} needs the whole model on every rank, but {kind} is"
    instead = f"Prepare it with parallel='ddp', or leave {what} out."
    if is_sharded(model):
        raise UsageError(f"{needs_whole} sharded by ZeRO. {instead}")
    if any(is_dtensor(parameter) for parameter in model.parameters()):
        raise UsageError(f"{needs_whole} split over ranks. {instead}")
    # Only the front knows of ranks that share a model's work although each holds all of its weights.
    parallel = getattr(trainer, "parallel", None)
    split = [
        f"{axis}={size}" for axis in ("tp", "pp", "cp", "ep") if (size := getattr(parallel, axis, 1)) > 1
    ]
    if split and world_size > 1:
        raise UsageError(
            f"{what} needs ranks that train separately, but with parallel='{' '.join(split)}' they share each "
            f"step. {instead}"
        )
    if any(parameter.is_complex() for parameter in model.parameters()):
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


def meet(communicator: Communicator, what: str, step: int, failure: BaseException | None = None) -> None:
    """Wait until all ranks are here.

    Args:
        what: Names the meeting; equal on all ranks that belong together.
        step: Optimizer steps that this rank has made.
        failure: Why this rank can take no further part.

    Raises:
        LockstepError: some rank failed.
        UsageError: the ranks meet elsewhere, or after different numbers of steps.
    """
    if communicator.world_size == 1:
        return
    message_of_failure = None if failure is None else f"{type(failure).__name__}: {failure}"
    places = communicator.gather_object([(what, step, message_of_failure)])
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


BUCKET_BYTES = 25 * 2**20  # as DDP's: large enough for bandwidth, small beside the model


def floating_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Buffers with a mean, such as running statistics; counters and masks have none."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def buckets(tensors: Iterable[torch.Tensor], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[torch.Tensor]]:
    """The tensors, of any shape, in lists of one type and device and of at most ``limit_bytes`` (or one tensor)."""
    waiting: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = waiting.setdefault((tensor.dtype, tensor.device), [])
        if bucket and sum(one.nbytes for one in bucket) + tensor.nbytes > limit_bytes:
            yield list(bucket)
            bucket.clear()
        bucket.append(tensor)
    yield from waiting.values()


@torch.no_grad()
def means(
    communicator: Communicator, tensors: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tensor, its mean over the ranks) of each, of any shape, by type and device. Collective.

    Halves are added up in fp32.
    """
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        parts = communicator.reduce(flat, "mean").split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            yield tensor, part.view(tensor.shape)


@torch.no_grad()
def average(communicator: Communicator, tensors: Iterable[torch.Tensor]) -> None:
    """Replace each tensor, of any shape, by its mean over the ranks. Collective."""
    for tensor, mean in means(communicator, tensors):
        tensor.detach().copy_(mean)


def agree_on_loss_scale(communicator: Communicator, scaler: torch.amp.GradScaler | None) -> None:
    """Take the smallest of the ranks' fp16 loss scales, which each adjusted by itself. Collective with a scaler."""
    if scaler is None or communicator.world_size == 1:
        return
    state = scaler.state_dict()
    if not state:  # it is switched off
        return
    scale, growth = min(communicator.gather_object([(state["scale"], state[torch_optim.GROWTH_TRACKER])]))
    scaler.load_state_dict({**state, "scale": scale, torch_optim.GROWTH_TRACKER: growth})
