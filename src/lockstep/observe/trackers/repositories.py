"""Trackers whose packages keep runs in a repository on this machine: Aim and DVCLive."""

from __future__ import annotations

import os
from typing import Any

from lockstep.observe.trackers.base import on_main_process, plain
from lockstep.observe.trackers.hosted import HostedTracker


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

    def continuation(self) -> dict[str, object]:
        return {"run_hash": self.run.hash}

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
        fresh = self._not_logged(plain(values), step)
        if values and not fresh:
            return
        if step is not None:
            self.run.step = step
        for key, value in fresh.items():
            if isinstance(value, (int, float, str)):
                self.run.log_metric(key, value, **kwargs)
            else:
                self._leave_out(key, value, "numbers and strings")
        self.run.next_step()

    def continuation(self) -> dict[str, object]:
        return {"resume": True}

    def resume(self, step: int) -> None:
        self._logged = dict.fromkeys(self.run.summary, self.run.step - 1)

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
