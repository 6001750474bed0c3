"""What an ``Accelerator`` was asked for, under the names that scripts read."""

from __future__ import annotations

import os
from typing import Any

from lockstep.config.handlers import DataLoaderConfiguration, ProjectConfiguration
from lockstep.config.options import Options
from lockstep.config.parallel import Parallel


class OptionsView:
    """What one ``Accelerator`` was asked for, under the names that scripts read."""

    _options: Options

    # Scripts ask for this; it is always False.
    is_composable_parallelism_enabled: bool = False

    @property
    def parallelism_config(self) -> Any:
        """The sizes of axes that were passed."""
        return self._options.parallelism_config

    @property
    def parallel(self) -> Parallel:
        """How models are spread."""
        return self._options.parallel

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded, by torch's ``fully_shard``."""
        return self._options.parallel.shards

    @property
    def mixed_precision(self) -> str:
        return self._options.mixed_precision

    @property
    def deepspeed_plugin(self) -> Any:
        """The plugin that was passed."""
        return self._options.deepspeed_plugin

    @property
    def project_configuration(self) -> ProjectConfiguration:
        return self._options.project

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        return self._options.loaders

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        return self._options.project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        return self._options.project.logging_dir

    @property
    def save_iteration(self) -> int:
        return self._options.project.iteration

    @property
    def split_batches(self) -> bool:
        return self._options.loaders.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        return self._options.loaders.dispatch_batches

    @property
    def even_batches(self) -> bool:
        return self._options.loaders.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        """For loaders that are prepared from now on."""
        self._options.loaders.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        return self._options.loaders.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        return self._options.loaders.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        return self._options.loaders.use_stateful_dataloader
