"""What an ``Accelerator`` was asked for, under the names that scripts read."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

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

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs:
        """The options of DDP. To change them, set this before ``prepare``."""
        return self._options.ddp

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        self._change_options(ddp=handler or DistributedDataParallelKwargs())

    @property
    def autocast_handler(self) -> AutocastKwargs:
        """The options of autocast. To change them, set this before ``prepare``."""
        return self._options.autocast

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._change_options(autocast=handler or AutocastKwargs())

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
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The options with which torchao converts linear layers to 8 bits. None: it converts none."""
        return self._options.fp8

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The package that computes in 8 bits: ``AO`` (torchao), or ``NO`` without ``mixed_precision="fp8"``."""
        return FP8BackendType.NO if self._options.fp8 is None else FP8BackendType.AO

    @property
    def scaler_handler(self) -> GradScalerKwargs:
        """The options of the loss scale of fp16."""
        return self._options.scaler

    @property
    def init_handler(self) -> InitProcessGroupKwargs:
        """The options of the process group."""
        return self._options.init

    @property
    def profile_handler(self) -> ProfileKwargs:
        """The default options of ``profile``."""
        return self._options.profile

    @profile_handler.setter
    def profile_handler(self, handler: ProfileKwargs | None) -> None:
        self._change_options(profile=handler or ProfileKwargs())

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
    def project_configuration(self) -> ProjectConfiguration:
        """Where the run writes its checkpoints and logs."""
        return self._options.project

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How ``prepare`` treats data loaders."""
        return self._options.loaders

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
        """Whether torchdata's ``StatefulDataLoader`` reads the data."""
        return self._options.loaders.use_stateful_dataloader
