"""What an ``Accelerator`` was asked for, under the names that scripts read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from lockstep.config.fp8 import AORecipeKwargs, FP8BackendType
from lockstep.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from lockstep.config.options import Options
from lockstep.config.parallel import Parallel
from lockstep.errors import UsageError

T = TypeVar("T")


class Option(Generic[T]):
    """A field of ``Options``, as an attribute. What is set counts for what is prepared afterwards.

    ``of_none`` makes what None stands for. Without it, the field was used up when the ``Accelerator`` was made.
    """

    def __init__(self, field: str, of_none: Callable[[], T] | None = None) -> None:
        self._field, self._of_none = field, of_none

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, accelerator: Any, owner: type) -> T:
        found: Any = self if accelerator is None else getattr(accelerator._options, self._field)
        return cast(T, found)

    def __set__(self, accelerator: Any, value: T | None) -> None:
        if self._of_none is not None:
            accelerator._change_options(**{self._field: self._of_none() if value is None else value})
        elif value != getattr(accelerator._options, self._field):
            raise UsageError(
                f"{self._name} was set, but it was read when this Accelerator was made, so it would change nothing. "
                f"Pass {type(value).__name__} in kwargs_handlers to Accelerator."
            )


class OptionsView:
    """What one ``Accelerator`` was asked for, under the names that scripts read."""

    _options: Options

    # Scripts ask for these of what is not here: fp8 by other packages than torchao, and LOMO optimizers.
    is_composable_parallelism_enabled: bool = False
    delayed_fp8_autocast: bool = False
    has_lomo_optimizer: bool = False
    fp8_recipe_handler: None = None
    te_recipe_handler: None = None
    msamp_recipe_handler: None = None

    def _change_options(self, **changes: object) -> None:
        """Let models that are prepared from now on have other options."""
        raise NotImplementedError

    ddp_handler = Option("ddp", DistributedDataParallelKwargs)
    """The options of DDP. To change them, set this before ``prepare``."""

    autocast_handler = Option("autocast", AutocastKwargs)
    """The options of autocast. To change them, set this before ``prepare``."""

    profile_handler = Option("profile", ProfileKwargs)
    """The default options of ``profile``."""

    scaler_handler: Option[GradScalerKwargs] = Option("scaler")
    """The options of the loss scale of fp16."""

    init_handler: Option[InitProcessGroupKwargs] = Option("init")
    """The options of the process group."""

    ao_recipe_handler: Option[AORecipeKwargs | None] = Option("fp8")
    """The options with which torchao converts linear layers to 8 bits. None: it converts none."""

    project_configuration = Option("project", ProjectConfiguration)
    """Where the run writes its checkpoints and logs. To change it, set this before the first of them."""

    dataloader_config = Option("loaders", DataLoaderConfiguration)
    """How ``prepare`` treats data loaders. To change it, set this before ``prepare``."""

    rng_types = Option("rng_types", lambda: ["generator"])
    """Generators to make equal on all ranks at the start of each epoch. To change them, set this before ``prepare``."""

    @property
    def native_amp(self) -> bool:
        """Whether prepared models run under autocast. To turn autocast off, set it to False before ``prepare``.

        Sharded models then compute in the dtype of their gathered weights.
        """
        return self._options.mixed_precision != "no" and self._options.autocast.enabled

    @native_amp.setter
    def native_amp(self, enabled: bool) -> None:
        self._change_options(autocast=replace(self._options.autocast, enabled=enabled))

    @property
    def fp8_enabled(self) -> bool:
        """Whether linear layers of prepared models compute in 8 bits."""
        return self._options.fp8 is not None

    @property
    def has_fp8_handler(self) -> bool:
        """Whether linear layers of prepared models compute in 8 bits, as ``fp8_enabled`` tells."""
        return self._options.fp8 is not None

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The package that computes in 8 bits: ``AO`` (torchao), or ``NO`` without ``mixed_precision="fp8"``."""
        return FP8BackendType.NO if self._options.fp8 is None else FP8BackendType.AO

    @property
    def parallelism_config(self) -> Any:
        """The ``ParallelismConfig`` that was passed, or None."""
        return self._options.parallelism_config

    @property
    def parallel(self) -> Parallel:
        """How models are spread over the ranks."""
        return self._options.parallel

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded. Torch's ``fully_shard`` does it under every stage of ZeRO."""
        return self._options.parallel.shards

    @property
    def mixed_precision(self) -> str:
        """The precision of prepared models: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""
        return self._options.mixed_precision

    @property
    def deepspeed_plugin(self) -> Any:
        """The ``DeepSpeedPlugin`` that was passed or selected, or None."""
        return self._options.deepspeed_plugin

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """The folder of the run. None: it has none."""
        return self._options.project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """The folder of the trackers. None: there is none."""
        return self._options.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint, with ``automatic_checkpoint_naming``."""
        return self._options.project.iteration

    @property
    def split_batches(self) -> bool:
        """Whether the ``batch_size`` of a loader is that of the global batch."""
        return self._options.loaders.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads the data for all ranks. None: only for iterable datasets."""
        return self._options.loaders.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether loaders complete their last round, so that all ranks get equally many batches.

        To change it for the loaders that are prepared afterwards, set it.
        """
        return self._options.loaders.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._options.loaders.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether a ``RandomSampler`` is seeded with seed + epoch in each epoch."""
        return self._options.loaders.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self._options.loaders.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether ``use_stateful_dataloader=True`` was given. It has no effect: all prepared loaders keep positions."""
        return self._options.loaders.use_stateful_dataloader
