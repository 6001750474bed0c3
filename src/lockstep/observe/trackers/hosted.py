"""Trackers that hand over to a service's own package; each is a thin translation of its calls.

The packages are imported by ``start``, but constructing a tracker without its package raises.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

from lockstep.config.sources import inherited_environment
from lockstep.errors import MissingExtraError, UsageError
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


class AimTracker(HostedTracker):
    """A tracker that logs to Aim. It needs the package aim.

    Args:
        run_name: The name of the run.
        logging_dir: The folder with Aim's repository.
        kwargs: Arguments of ``aim.Run``.

    Raises:
        MissingExtraError: the package is not installed.

    Examples:
        ```python
        from lockstep import Accelerator

        accelerator = Accelerator(log_with="aim", project_dir="runs")
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.end_training()
        ```
    """

    name, package, extra = "aim", "aim", "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: object) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    @on_main_process
    def start(self) -> None:
        self.run = self.module.Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.run.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        self.run["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        for key, value in plain(values).items():
            self.run.track(value, name=key, step=step, **kwargs)

    @on_main_process
    def log_images(
        self,
        values: dict[str, object],
        step: int | None = None,
        kwargs: dict[str, dict[str, object]] | None = None,
        **options: Any,
    ) -> None:
        """Log images.

        Args:
            values: Name -> image, or a pair (image, caption).
            step: The number of the step. None: it is not known.
            kwargs: Options of ``aim.Image`` under ``"aim_image"``, and of ``track`` under ``"track"``.
            options: The same, as keyword arguments.
        """
        parts = {**(kwargs or {}), **options}
        for key, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = self.module.Image(image, caption=caption, **parts.get("aim_image", {}))
            self.run.track(shown, name=key, step=step, **parts.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        self.run.close()


class DVCLiveTracker(HostedTracker):
    """A tracker that logs with DVCLive. It needs the package dvclive.

    Args:
        run_name: Ignored: DVCLive has no names of runs.
        live: A ``dvclive.Live`` that is used. None: one is made.
        kwargs: Arguments of ``dvclive.Live``.

    Raises:
        MissingExtraError: the package is not installed.

    Examples:
        ```python
        from lockstep import Accelerator

        accelerator = Accelerator(log_with="dvclive")
        accelerator.init_trackers("digits", init_kwargs={"dvclive": {"dir": "dvclive"}})
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.end_training()
        ```
    """

    name, package, extra = "dvclive", "dvclive", "dvclive"

    def __init__(self, run_name: str | None = None, live: object = None, **kwargs: object) -> None:
        super().__init__(run_name, **kwargs)
        self.run = live

    @on_main_process
    def start(self) -> None:
        if self.run is None:
            self.run = self.module.Live(**self.init_kwargs)

    @property
    def live(self) -> object:
        """The ``dvclive.Live`` of this tracker. None: the run has not started."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        self.run.log_params(values)

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        if step is not None:
            self.run.step = step
        for key, value in plain(values).items():
            if isinstance(value, (int, float, str)):
                self.run.log_metric(key, value, **kwargs)
            else:
                self._leave_out(key, value, "numbers and strings")
        self.run.next_step()

    @on_main_process
    def log_images(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Log images.

        Args:
            values: Name of a file -> array or PIL image.
            step: Ignored: DVCLive counts steps.
            kwargs: Options of ``log_image``.
        """
        for key, image in values.items():
            self.run.log_image(key, image, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.end()


class ClearMLTracker(TableTracker):
    """A tracker that logs to ClearML. It needs the package clearml.

    If the script has opened a task itself, that one is used, and it stays open at the end.

    Args:
        run_name: The name of the project and of the task. The variables ``CLEARML_PROJECT`` and ``CLEARML_TASK``
            replace it.
        kwargs: Arguments of ``clearml.Task.init``.

    Raises:
        MissingExtraError: the package is not installed.

    Examples:
        ```python
        from lockstep import Accelerator

        accelerator = Accelerator(log_with="clearml")
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"train_loss": 0.5, "eval_loss": 0.6}, step=1)  # two series of one chart
        accelerator.get_tracker("clearml").log_table("scores", columns=["score"], data=[[1.0]], step=1)
        accelerator.end_training()
        ```
    """

    name, package, extra = "clearml", "clearml", "clearml"

    @on_main_process
    def start(self) -> None:
        task = self.module.Task.current_task()
        self.borrowed = bool(task)
        if not self.borrowed:
            environment = inherited_environment()
            names = {
                "project_name": environment.get("CLEARML_PROJECT", self.run_name),
                "task_name": environment.get("CLEARML_TASK", self.run_name),
            }
            task = self.module.Task.init(**{**names, **self.init_kwargs})
        self.run = task

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> Any:
        return self.run.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Log numbers.

        Args:
            values: Name -> number. ``eval_``, ``test_`` or ``train_`` at the beginning of a name chooses the series.
                Other names belong to the series ``train``.
            step: The number of the step. None: a single value is reported.
            kwargs: Options of ClearML's logger.
        """
        logger = self.run.get_logger()
        for key, value in plain(values).items():
            if not isinstance(value, (int, float)):
                self._leave_out(key, value, "numbers")
            elif step is None:
                logger.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = self._title_and_series(key)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Log images.

        Args:
            values: Name -> array or PIL image.
            step: The number of the step. None: it is not known.
            kwargs: Options of ClearML's ``report_image``.
        """
        for key, image in values.items():
            title, series = self._title_and_series(key)
            self.run.get_logger().report_image(
                title=title, series=series, iteration=step, image=image, **kwargs
            )

    def _send_table(self, name: str, content: dict[str, Any], step: int | None, **kwargs: object) -> None:
        columns, data, dataframe = content.values()
        if dataframe is None and data is None:
            raise UsageError("log_table got neither data nor dataframe. Pass one of them.")
        rows = dataframe if dataframe is not None else [columns, *(data or [])] if columns else data
        title, series = self._title_and_series(name)
        self.run.get_logger().report_table(
            title=title, series=series, table_plot=rows, iteration=step, **kwargs
        )

    @on_main_process
    def finish(self) -> None:
        if not self.borrowed:
            self.run.close()

    @staticmethod
    def _title_and_series(name: str) -> tuple[str, str]:
        for series in ("eval", "test", "train"):
            if name.startswith(series + "_"):
                return name[len(series) + 1 :], series
        return name, "train"
