"""What a script writes down of a run, as methods of ``Accelerator``: metrics, and traces of ``torch.profiler``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.config.handlers import ProfileKwargs
from lockstep.config.options import Options
from lockstep.config.values import suggestion
from lockstep.errors import ConfigError
from lockstep.observe import trackers
from lockstep.runtime.process import Runtime

if TYPE_CHECKING:
    from lockstep.observe.measures.measures import Measures
    from lockstep.observe.trackers.base import GeneralTracker
    from lockstep.observe.trackers.run import TrackerSet

TRACE_NAME = "profile_{rank}.json"
ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")


@contextmanager
def build_profiler(
    handler: ProfileKwargs, runtime: Runtime | None = None
) -> Iterator[torch.profiler.profile]:
    """Profile the block with the options of ``handler``; yields the ``torch.profiler.profile``.

    With ``output_trace_dir``, each rank writes ``profile_<rank>.json`` there when the block ends
    without an exception. With a schedule, that is the last cycle that was recorded; where no cycle
    was, no file is written. ``on_trace_ready`` sees each cycle as it ends.

    Raises:
        ConfigError: for an activity or schedule option that this torch does not know.
    """
    profiler = torch.profiler.profile(
        activities=_activities(handler.activities),
        schedule=_schedule(handler.schedule_option),
        on_trace_ready=handler.on_trace_ready,
        record_shapes=handler.record_shapes,
        profile_memory=handler.profile_memory,
        with_stack=handler.with_stack,
        with_flops=handler.with_flops,
        with_modules=handler.with_modules,
    )
    with profiler:
        yield profiler
    if handler.output_trace_dir is not None:
        _write_trace(profiler, Path(handler.output_trace_dir), 0 if runtime is None else runtime.rank)


def _write_trace(profiler: torch.profiler.profile, folder: Path, rank: int) -> None:
    if profiler.profiler is None:
        warnings.warn(
            "The profile schedule ended before it recorded a step, so no trace was written. "
            "Call profiler.step() after each step, at least wait + warmup + active times.",
            stacklevel=4,
        )
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        profiler.export_chrome_trace(str(folder / TRACE_NAME.format(rank=rank)))
    except RuntimeError as error:
        # torch writes a trace once; an on_trace_ready that exports has taken it.
        if "already saved" not in str(error):
            raise
        warnings.warn(
            f"on_trace_ready has already exported the trace, so no trace was written to {folder}. Drop "
            "on_trace_ready or the folder.",
            stacklevel=4,
        )


def _activities(names: Sequence[str] | None) -> list[torch.profiler.ProfilerActivity] | None:
    if names is None:
        return None
    members = torch.profiler.ProfilerActivity.__members__
    known = {name: members[name.upper()] for name in ACTIVITIES if name.upper() in members}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"ProfileKwargs.activities has {name!r}, but may name only {', '.join(known)}."
                f"{suggestion(str(name), known)}"
            )
    return [known[name] for name in names]


def _schedule(options: dict[str, int] | None) -> Callable[[int], torch.profiler.ProfilerAction] | None:
    if options is None:
        return None
    try:
        return torch.profiler.schedule(**options)
    except (TypeError, AssertionError) as error:
        raise ConfigError(
            f"ProfileKwargs.schedule_option is {options}, which torch.profiler.schedule refuses: {error}. "
            "Give wait, warmup and active, and optionally repeat and skip_first."
        ) from None


class TrackingMethods:
    """Methods that need the trackers."""

    runtime: Runtime
    _options: Options
    _log_with: object = None

    if TYPE_CHECKING:

        @property
        def measures(self) -> Measures: ...

    @cached_property
    def _trackers(self) -> TrackerSet:
        return trackers.TrackerSet(self._log_with, self._options.project.logging_dir, self.runtime.is_main)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that run on this rank. Those that are set replace them."""
        return self._trackers.trackers

    @trackers.setter
    def trackers(self, running: list[GeneralTracker]) -> None:
        self._trackers.trackers = running

    @property
    def log_with(self) -> list[Any]:
        """The trackers that ``log_with`` asked for. To change them, set this before ``init_trackers``."""
        return self._trackers.log_with

    @log_with.setter
    def log_with(self, log_with: object) -> None:
        folder = self._options.project.logging_dir
        self._trackers.log_with = trackers.TrackerSet(log_with, folder).log_with

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, object] | None = None,
        init_kwargs: dict[str, dict[str, object]] | None = None,
    ) -> None:
        """Start the trackers that ``log_with`` names.

        Args:
            project_name: The name of the project or run, in all trackers.
            config: Hyperparameters that the trackers store: name -> value.
            init_kwargs: Name of a tracker -> arguments for it, such as ``{"wandb": {"mode": "offline"}}``.

        Raises:
            UsageError: the trackers run already.
            ConfigError: ``init_kwargs`` has a name that is unknown.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator(log_with="jsonl", project_dir="tracked")
            accelerator.init_trackers("digits", config={"learning_rate": 0.1})
            accelerator.log({"loss": 0.5}, step=1)  # a line of tracked/digits/metrics.jsonl
            accelerator.end_training()
            ```
        """
        self._trackers.logging_dir = self._options.project.logging_dir
        self._trackers.start(project_name, config, init_kwargs)

    def log(
        self,
        values: dict[str, object],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, object]] | None = None,
    ) -> None:
        """Send values to all trackers. On ranks other than 0, only trackers with ``main_process_only=False`` get
        them.

        Args:
            values: Name -> number, text, 0-d tensor, or another value that a tracker takes.
            step: The number of the step. None: it is not known.
            log_kwargs: Name of a tracker -> arguments of its ``log``.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator(log_with="jsonl", project_dir="run")
            accelerator.init_trackers("digits", config={"lr": 0.1})
            accelerator.log({"loss": 0.25}, step=1)
            accelerator.end_training()
            ```
        """
        if isinstance(values, Mapping):  # others are for the trackers alone
            self.measures.logged(values)
            if self._options.log_measures:
                values = self.measures.numbers() | dict(values)
        self._trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker of this run. On ranks on which it does not run, the result takes any call and does
        nothing.

        Args:
            name: The name of the tracker.
            unwrap: Return the run object of its library.

        Raises:
            ConfigError: ``log_with`` does not have this tracker.
            UsageError: ``init_trackers`` was not called.

        Examples:
            ```python
            from lockstep import Accelerator

            accelerator = Accelerator(log_with="jsonl", project_dir="own_lines")
            accelerator.init_trackers("digits")
            accelerator.get_tracker("jsonl").log({"note": "half way"}, step=5)
            accelerator.end_training()
            ```
        """
        return self._trackers.get(name, unwrap)

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[torch.profiler.profile]:
        """Run ``torch.profiler`` over the block, and yield the profiler.

        Args:
            profile_handler: Options of the profiler. None: those of the ``Accelerator``.

        Raises:
            ConfigError: torch does not know an activity or an option of the schedule.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator, ProfileKwargs

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
                model(torch.randn(8, 4))
            assert any(event.key == "aten::linear" for event in profiler.key_averages())
            ```
        """
        return build_profiler(profile_handler or self._options.profile, self.runtime)
