"""The ClearML tracker."""

from __future__ import annotations

from typing import Any

from lockstep.config.sources import inherited_environment
from lockstep.errors import UsageError
from lockstep.observe.trackers.base import on_main_process, plain
from lockstep.observe.trackers.hosted import TableTracker


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
