"""Trackers that hand over to a service's own package; each is a thin translation of its calls.

The packages are imported by ``start``, but constructing a tracker without its package raises.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from lockstep.errors import MissingExtraError
from lockstep.observe.trackers.base import GeneralTracker, on_main_process, plain
from lockstep.runtime.available import is_available


class HostedTracker(GeneralTracker):
    """A tracker that needs the package ``package``, which the extra ``extra`` installs.

    Args:
        run_name: The name of the project.
        kwargs: Arguments of the call that opens the run.

    Raises:
        MissingExtraError: the package is not installed.
    """

    name: str = ""
    requires_logging_directory: bool = False
    package: str = ""
    extra: str = ""

    def __init__(self, run_name: str | None = None, **kwargs: object) -> None:
        super().__init__()
        if not is_available(self.package):
            raise MissingExtraError(f"The tracker '{self.name}'", self.package, self.extra)
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None
        self._unfit: set[str] = set()
        self._logged: dict[str, int] = {}

    @property
    def tracker(self) -> Any:
        """The run object of the tracker's library. None: the run has not started."""
        return self.run

    @property
    def module(self) -> Any:
        """The tracker's library, imported."""
        return importlib.import_module(self.package)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()

    def _not_logged(self, values: dict[str, Any], step: int | None) -> dict[str, Any]:
        """Return ``values`` without those that an earlier process has logged at this step."""
        return {
            key: value for key, value in values.items() if step is None or step > self._logged.get(key, -1)
        }

    def _leave_out(self, key: str, value: object, takes: str) -> None:
        if key not in self._unfit:
            self._unfit.add(key)
            warnings.warn(
                f"{self.name} leaves out '{key}', a {type(value).__name__}: it accepts only {takes}.",
                stacklevel=4,
            )


class _RunTracker(HostedTracker):
    """The packages with the interface ``init``, ``config.update``, ``run.log``, ``run.finish``."""

    @on_main_process
    def start(self) -> None:
        self.run = self.module.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        self.module.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log images.

        Args:
            values: Name -> list of arrays or PIL images.
            step: The number of the step. None: it is not known.
            kwargs: Options of the library's ``log``.
        """
        for key, images in values.items():
            self.run.log({key: [self.module.Image(image) for image in images]}, step=step, **kwargs)


class TableTracker(HostedTracker):
    """A service that shows tables, each by ``_send_table``."""

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[object]] | None = None,
        dataframe: object = None,
        step: int | None = None,
        **kwargs: object,
    ) -> None:
        """Log a table.

        Args:
            table_name: The name of the table.
            columns: The names of the columns.
            data: The rows: a list of lists.
            dataframe: A pandas ``DataFrame``, in place of ``columns`` and ``data``.
            step: The number of the step. None: it is not known.
            kwargs: Options of the tracker's library.

        Raises:
            UsageError: ClearML got neither ``data`` nor ``dataframe``.
        """
        content = {"columns": columns, "data": data, "dataframe": dataframe}
        self._send_table(table_name, content, step=step, **kwargs)

    def _send_table(self, name: str, content: dict[str, object], step: int | None, **kwargs: object) -> None:
        raise NotImplementedError


class WandBTracker(_RunTracker, TableTracker):
    """A tracker that logs to Weights & Biases. It needs the package wandb.

    Args:
        run_name: The name of the project.
        kwargs: Arguments of ``wandb.init``.

    Raises:
        MissingExtraError: the package is not installed.

    Examples:
        ```python
        from lockstep import Accelerator

        accelerator = Accelerator(log_with="wandb")
        accelerator.init_trackers("digits", init_kwargs={"wandb": {"mode": "offline"}})
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.get_tracker("wandb").log_table("scores", columns=["a"], data=[[1]], step=1)
        accelerator.end_training()
        ```
    """

    name, package, extra = "wandb", "wandb", "wandb"

    def continuation(self) -> dict[str, object]:
        return {"id": self.run.id, "resume": "allow"}

    def _send_table(self, name: str, content: dict[str, object], step: int | None, **kwargs: object) -> None:
        self.run.log({name: self.module.Table(**content)}, step=step, **kwargs)


class TrackioTracker(_RunTracker):
    """A tracker that logs to Trackio. It needs the package trackio.

    Args:
        run_name: The name of the project.
        kwargs: Arguments of ``trackio.init``.

    Raises:
        MissingExtraError: the package is not installed.

    Examples:
        ```python
        from lockstep import Accelerator

        accelerator = Accelerator(log_with="trackio")
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.end_training()
        ```
    """

    name, package, extra = "trackio", "trackio", "trackio"

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        if values := self._not_logged(values, step):
            super().log(values, step, **kwargs)

    def continuation(self) -> dict[str, object]:
        return {"name": self.run.name, "resume": "allow"}

    def resume(self, step: int) -> None:
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        rows = storage.get_logs(self.run_name, self.run.name)
        for row in sorted(rows, key=lambda row: row["step"]):
            self._logged |= dict.fromkeys(row, row["step"])


class SwanLabTracker(_RunTracker):
    """A tracker that logs to SwanLab. It needs the package swanlab.

    Args:
        run_name: The name of the project.
        kwargs: Arguments of ``swanlab.init``.

    Raises:
        MissingExtraError: the package is not installed.

    Examples:
        ```python
        from lockstep import Accelerator

        accelerator = Accelerator(log_with="swanlab")
        accelerator.init_trackers("digits", init_kwargs={"swanlab": {"mode": "offline"}})
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.end_training()
        ```
    """

    name, package, extra = "swanlab", "swanlab", "swanlab"


class CometMLTracker(HostedTracker):
    """A tracker that logs to Comet. It needs the package comet_ml.

    Args:
        run_name: The name of the project.
        kwargs: Arguments of ``comet_ml.start``, or of ``comet_ml.Experiment`` before version 3.41.

    Raises:
        MissingExtraError: the package is not installed.

    Examples:
        ```python
        from lockstep import Accelerator

        accelerator = Accelerator(log_with="comet_ml")
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.end_training()
        ```
    """

    name, package, extra = "comet_ml", "comet_ml", "comet"

    @on_main_process
    def start(self) -> None:
        open_run = self.module.start if hasattr(self.module, "start") else self.module.Experiment
        self.run = open_run(project_name=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        self.run.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        if step is not None:
            self.run.set_step(step)
        for key, value in plain(values).items():
            if isinstance(value, (int, float)):
                self.run.log_metric(key, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.run.log_other(key, value, **kwargs)
            elif isinstance(value, dict):
                self.run.log_metrics(value, step=step, **kwargs)
            else:
                self._leave_out(key, value, "numbers, strings and dicts of numbers")

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log images.

        Args:
            values: Name -> list of arrays or PIL images.
            step: The number of the step. None: it is not known.
            kwargs: Options of ``log_image``.
        """
        for key, images in values.items():
            for image in images:
                self.run.log_image(image, name=key, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.end()
