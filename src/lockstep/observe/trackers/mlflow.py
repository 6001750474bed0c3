"""The MLflow tracker."""

from __future__ import annotations

import json
import os

from lockstep.config.sources import inherited_environment
from lockstep.config.values import parse_bool
from lockstep.observe.trackers.base import on_main_process, plain
from lockstep.observe.trackers.hosted import HostedTracker


class MLflowTracker(HostedTracker):
    """A tracker that logs to a run of an MLflow experiment. It needs the package mlflow.

    Args:
        experiment_name: The name of the experiment. ``init_trackers`` passes the name of the project. The variable
            ``MLFLOW_EXPERIMENT_NAME`` replaces it.
        logging_dir: The place in which a new experiment stores files.
        run_id: The id of a run that is continued. The variable ``MLFLOW_RUN_ID`` replaces it. None: a new run.
        tags: Name -> value, or JSON. The variable ``MLFLOW_TAGS`` replaces it.
        nested_run: Start the run inside of the run that is active. The variable ``MLFLOW_NESTED_RUN`` replaces it.
        run_name: The name of the run.
        description: A text about the run.

    Raises:
        MissingExtraError: the package is not installed.

    Examples:
        ```python
        from lockstep import Accelerator

        accelerator = Accelerator(log_with="mlflow", project_dir="runs")
        accelerator.init_trackers("digits", init_kwargs={"mlflow": {"run_name": "first"}})
        accelerator.log({"loss": 0.5}, step=1)
        tracker = accelerator.get_tracker("mlflow")
        tracker.log_artifact("train.py")  # one file
        tracker.log_artifacts("samples")  # a folder
        accelerator.end_training()
        ```
    """

    name, package, extra = "mlflow", "mlflow", "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, object] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        environment = inherited_environment()
        self.experiment_name = environment.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = environment.get("MLFLOW_RUN_ID", run_id)
        tags = environment.get("MLFLOW_TAGS", tags)
        self.tags = json.loads(tags) if isinstance(tags, str) else tags
        self.nested_run = parse_bool(environment.get("MLFLOW_NESTED_RUN", nested_run), "MLFLOW_NESTED_RUN")
        self.description = description

    @on_main_process
    def start(self) -> None:
        found = self.module.search_experiments(filter_string=f"name = '{self.experiment_name}'")
        if found:
            experiment_id = found[0].experiment_id
        else:
            experiment_id = self.module.create_experiment(
                name=self.experiment_name, artifact_location=self.logging_dir, tags=self.tags
            )
        self.run = self.module.start_run(
            run_id=self.run_id,
            experiment_id=experiment_id,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        limits = self.module.utils.validation
        fitting = []
        for key, value in values.items():
            if len(str(value)) > limits.MAX_PARAM_VAL_LENGTH:
                self._leave_out(key, value, f"values of up to {limits.MAX_PARAM_VAL_LENGTH} characters")
            else:
                fitting.append((key, value))
        batch = limits.MAX_PARAMS_TAGS_PER_BATCH
        for start in range(0, len(fitting), batch):
            self.module.log_params(dict(fitting[start : start + batch]))

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        metrics = {}
        for key, value in plain(values).items():
            if isinstance(value, (int, float)):
                metrics[key] = value
            else:
                self._leave_out(key, value, "numbers")
        self.module.log_metrics(self._not_logged(metrics, step), step=step, **kwargs)

    def continuation(self) -> dict[str, object]:
        return {"run_id": self.run.info.run_id}

    def resume(self, step: int) -> None:
        client, run_id = self.module.MlflowClient(), self.run.info.run_id
        names = client.get_run(run_id).data.metrics
        self._logged = {
            name: max(point.step for point in client.get_metric_history(run_id, name)) for name in names
        }

    @on_main_process
    def log_figure(self, figure: object, artifact_file: str, **save_kwargs: object) -> None:
        """Store a figure as a file of the run.

        Args:
            figure: A figure of matplotlib or plotly.
            artifact_file: The name of the file.
            save_kwargs: Further arguments of ``mlflow.log_figure``.

        Examples:
            ```python
            import matplotlib.pyplot as plt
            from lockstep import Accelerator

            accelerator = Accelerator(log_with="mlflow", project_dir="runs")
            accelerator.init_trackers("digits")
            figure, axes = plt.subplots()
            axes.plot([3, 2, 1])
            accelerator.get_tracker("mlflow").log_figure(figure, "loss.png")
            accelerator.end_training()
            ```
        """
        self.module.log_figure(figure=figure, artifact_file=artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store all files of a folder in the run.

        Args:
            local_dir: The folder.
            artifact_path: A folder of the run to which they go. None: its top.
        """
        self.module.log_artifacts(local_dir=local_dir, artifact_path=artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file in the run.

        Args:
            local_path: The path of the file.
            artifact_path: A folder of the run to which it goes. None: its top.
        """
        self.module.log_artifact(local_path=local_path, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        self.module.end_run()
