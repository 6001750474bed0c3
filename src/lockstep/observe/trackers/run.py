"""Which trackers a run has, and the object that owns them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.enums import LoggerType
from lockstep.config.files import read_json, replacing
from lockstep.config.values import suggestion
from lockstep.errors import ConfigError, MissingExtraError, UsageError
from lockstep.observe.trackers import hosted, local, repositories
from lockstep.observe.trackers.base import BlankTracker, GeneralTracker, check_complete
from lockstep.observe.trackers.clearml import ClearMLTracker
from lockstep.observe.trackers.mlflow import MLflowTracker
from lockstep.runtime.available import is_available

TrackerChoice = GeneralTracker | type[GeneralTracker]


class TrackerEntry(NamedTuple):
    """A built-in tracker; without ``package`` it needs nothing more."""

    name: str
    kind: type[GeneralTracker]
    package: str | None
    extra: str


TRACKERS: Mapping[str, TrackerEntry] = {
    entry.name: entry
    for entry in (
        TrackerEntry("tensorboard", local.TensorBoardTracker, "tensorboard", "tensorboard"),
        TrackerEntry("jsonl", local.JSONLinesTracker, None, ""),
        *(
            TrackerEntry(kind.name, kind, kind.package, kind.extra)
            for kind in (
                hosted.WandBTracker,
                hosted.TrackioTracker,
                hosted.CometMLTracker,
                MLflowTracker,
                repositories.AimTracker,
                ClearMLTracker,
                repositories.DVCLiveTracker,
                hosted.SwanLabTracker,
            )
        ),
    )
}


LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {name: entry.kind for name, entry in TRACKERS.items()}
"""Name -> class of each tracker that ``log_with`` may name: built in, or registered."""


def resolve_trackers(
    log_with: object, logging_dir: str | os.PathLike[str] | None = None
) -> list[TrackerChoice]:
    """Return the trackers that ``log_with`` means, without repeats: classes to construct, or the user's instances.

    ``log_with`` is None, one of the following, or a list of them: a name or ``LoggerType``, a
    ``GeneralTracker`` class or object, ``"all"`` for every built-in tracker that can run here.
    The name of a user's class is known by ``register_tracker_class``.

    Raises:
        ConfigError: for an unknown name, or a tracker that writes files without a directory.
        MissingExtraError: for a tracker whose package is not installed.
    """
    if log_with is None:
        return []
    asked = list(log_with) if isinstance(log_with, (list, tuple, set)) else [log_with]
    chosen: list[TrackerChoice] = []
    for item in asked:
        for tracker in _meant_by(item, logging_dir):
            if tracker not in chosen:
                chosen.append(tracker)
    return chosen


def available_trackers() -> list[LoggerType]:
    """Return those built-in trackers whose packages are installed.

    Examples:
        ```python
        from lockstep.tracking import get_available_trackers

        assert "jsonl" in get_available_trackers()
        ```
    """
    return [LoggerType(entry.name) for entry in TRACKERS.values() if _is_installed(entry)]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let ``log_with`` name a class of trackers by its ``name``.

    Args:
        tracker_class: The class. It replaces another class of this name, and a warning says so.

    Raises:
        ConfigError: it is not a subclass of ``GeneralTracker``, or lacks ``name`` or ``requires_logging_directory``.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.tracking import GeneralTracker, register_tracker_class

        class Silent(GeneralTracker):
            name, requires_logging_directory, tracker = "silent", False, None

        register_tracker_class(Silent)
        accelerator = Accelerator(log_with="silent")  # by its name
        ```
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigError(
            f"{tracker_class!r} is not a subclass of GeneralTracker. Derive it from GeneralTracker."
        )
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name or not hasattr(tracker_class, "requires_logging_directory"):
        raise ConfigError(
            f"{tracker_class.__name__} does not have both class attributes name (a text) and "
            "requires_logging_directory (True or False). Define both in the class."
        )
    before = LOGGER_TYPE_TO_CLASS.get(name, tracker_class)
    if before is not tracker_class:
        warnings.warn(
            f"The tracker '{name}' was {before.__name__}, and is {tracker_class.__name__} now. Give the class "
            "another name to keep both.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


class TrackerSet:
    """Owner of a run's trackers: opens them, logs to each, closes them.

    On ranks other than 0 only trackers whose ``main_process_only`` is False exist.

    Raises:
        ConfigError, MissingExtraError: as ``resolve_trackers``.
    """

    def __init__(
        self, log_with: object = None, logging_dir: str | os.PathLike[str] | None = None, is_main: bool = True
    ) -> None:
        self.log_with = resolve_trackers(log_with, logging_dir)
        self.logging_dir = logging_dir
        self.is_main = is_main
        self.trackers: list[GeneralTracker] = []
        self.started = False
        self._has_warned = False
        self._has_logged = False
        self._resumes = False

    def __iter__(self) -> Iterator[GeneralTracker]:
        return iter(self.trackers)

    def __len__(self) -> int:
        return len(self.trackers)

    def start(
        self,
        project_name: str,
        config: dict[str, object] | None = None,
        init_kwargs: dict[str, dict[str, object]] | None = None,
    ) -> None:
        """Open a run named ``project_name`` in each tracker and store ``config`` as its hyperparameters.

        ``init_kwargs`` maps the name of a tracker to arguments for its constructor.

        Raises:
            UsageError: when a run is already open.
            ConfigError: when ``init_kwargs`` names a tracker that ``log_with`` does not.
        """
        if self.started:
            raise UsageError(
                "init_trackers was called while a run is open. Call end_training() before another run."
            )
        init_kwargs = init_kwargs or {}
        for name in init_kwargs:
            self._check_name(str(name), "init_kwargs")
        self.started = True
        self._arguments = project_name, config, init_kwargs
        here = [choice for choice in self.log_with if self.is_main or not choice.main_process_only]
        for tracker in [self._construct(choice) for choice in here]:
            self._open(tracker)

    def loaded(self) -> None:
        """Continue the run of an earlier process in the same folder, unless this process has logged already.

        ``load_state`` calls it, before or after ``start``.
        """
        self._resumes = not self._has_logged
        if not self._resumes:
            return
        classes = {_name_of(choice): choice for choice in self.log_with if isinstance(choice, type)}
        names = classes.keys() & self._continued().keys()
        for tracker in [one for one in self.trackers if one.name in names]:
            self.trackers.remove(tracker)
            tracker.finish()
            self._open(self._construct(classes[tracker.name]))

    def log(
        self,
        values: dict[str, object],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, object]] | None = None,
    ) -> None:
        """Log ``values`` to each tracker; ``log_kwargs`` maps its name to arguments for its ``log``."""
        if self.log_with and not self.started and self.is_main and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "log was called before init_trackers, so nothing is logged. Call init_trackers first.",
                stacklevel=3,
            )
        log_kwargs = log_kwargs or {}
        if self.started:
            self._log_begins(step)
        for tracker in self.trackers:
            tracker.log(values, step=step, **log_kwargs.get(tracker.name, {}))

    def log_images(self, values: dict[str, object], step: int | None = None) -> None:
        """Log ``values``, images by name, to each tracker that can hold images."""
        for tracker in self.trackers:
            tracker.log_images(values, step=step)

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker ``name``, or with ``unwrap`` the object underneath.

        Where it does not run on this rank, or ``log_with`` was empty, the result takes every call and
        does nothing.

        Raises:
            ConfigError: when ``log_with`` has other trackers but not this one (on every rank).
            UsageError: before ``start``.
        """
        if not self.log_with:
            return BlankTracker(_blank=True)
        self._check_name(str(name), "get_tracker")
        if not self.started:
            raise UsageError(
                f"get_tracker('{name}') was called before init_trackers. Call init_trackers first."
            )
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        return BlankTracker(_blank=True)

    def finish(self) -> None:
        """Close every run, then raise the first error that one of them raised. May be called again."""
        trackers, self.trackers, self.started = self.trackers, [], False
        self._has_logged = self._resumes = False
        errors = []
        for tracker in trackers:
            try:
                tracker.finish()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _open(self, tracker: GeneralTracker) -> None:
        tracker.start()
        # Only now: finish() closes what is listed, which must have been opened.
        self.trackers.append(tracker)
        config = self._arguments[1]
        if config is not None:
            tracker.store_init_configuration(config)

    def _log_begins(self, step: int | None) -> None:
        """Keep how each run is continued, and prepare the trackers for steps that are logged again."""
        if not self._has_logged:
            self._has_logged = True
            kept = {one.name: one.continuation() for one in self.trackers if one.continuation()}
            if kept and self.is_main and (file := self._file()):
                file.parent.mkdir(parents=True, exist_ok=True)
                with replacing(file) as whole:
                    whole.write(json.dumps(kept).encode())
        if self._resumes and step is not None:
            self._resumes = False
            for tracker in self.trackers:
                tracker.resume(step)

    def _file(self) -> Path | None:
        """Return the file with the continuations, where the run has a folder."""
        if self.logging_dir is None or _is_url(self.logging_dir) or not self.started:
            return None
        return Path(self.logging_dir, self._arguments[0], "trackers.json")

    def _continued(self) -> dict[str, Any]:
        file = self._file()
        return read_json(file) if self._resumes and file and file.exists() else {}

    def _construct(self, choice: TrackerChoice) -> GeneralTracker:
        if isinstance(choice, GeneralTracker):
            return choice
        project_name, _, init_kwargs = self._arguments
        arguments: list[object] = [project_name]
        if choice.requires_logging_directory:
            arguments.append(self.logging_dir)
        make: Any = choice
        name = _name_of(choice)
        tracker: GeneralTracker = make(
            *arguments, **{**self._continued().get(name, {}), **init_kwargs.get(name, {})}
        )
        check_complete(tracker)
        return tracker

    def _check_name(self, name: str, where: str) -> None:
        names = [_name_of(choice) for choice in self.log_with]
        # Options of a tracker that is not in use, as scripts have them that choose theirs by a flag, do nothing.
        if name not in names and not (name in LOGGER_TYPE_TO_CLASS and where == "init_kwargs"):
            have = f"has only {', '.join(names)}" if names else "is empty"
            raise ConfigError(f"{where} has '{name}', but log_with {have}.{suggestion(name, names)}")


def _meant_by(item: object, logging_dir: str | os.PathLike[str] | None) -> list[TrackerChoice]:
    """Return the trackers that one item of ``log_with`` stands for, checked."""
    if isinstance(item, GeneralTracker):
        check_complete(item)
        return [item]
    if isinstance(item, type) and issubclass(item, GeneralTracker):
        check_complete(item)
        return [_with_directory(item, logging_dir)]
    name = str(item)
    if name == LoggerType.ALL:
        usable = [entry.kind for entry in TRACKERS.values() if _is_installed(entry)]
        has_folder = logging_dir is not None and not _is_url(logging_dir)
        return [kind for kind in usable if has_folder or not kind.requires_logging_directory]
    entry = TRACKERS.get(name)
    if entry is not None and LOGGER_TYPE_TO_CLASS.get(name, entry.kind) is entry.kind:
        if not _is_installed(entry):
            raise MissingExtraError(f"The tracker '{name}'", str(entry.package), entry.extra)
        return [_with_directory(entry.kind, logging_dir)]
    if name in LOGGER_TYPE_TO_CLASS:
        check_complete(LOGGER_TYPE_TO_CLASS[name])
        return [_with_directory(LOGGER_TYPE_TO_CLASS[name], logging_dir)]
    valid = [*LOGGER_TYPE_TO_CLASS, LoggerType.ALL.value]
    raise ConfigError(
        f"log_with has {item!r}, but may name only {', '.join(valid)}.{suggestion(name, valid)}"
    )


def _is_installed(entry: TrackerEntry) -> bool:
    return entry.package is None or is_available(entry.package)


def _with_directory(
    kind: type[GeneralTracker], logging_dir: str | os.PathLike[str] | None
) -> type[GeneralTracker]:
    if kind.requires_logging_directory and logging_dir is None:
        raise ConfigError(
            f"Logging with `{_name_of(kind)}` requires a `logging_dir`, because it writes files. "
            "Pass project_dir='...' to Accelerator, or logging_dir in its project_config."
        )
    if kind.requires_logging_directory and _is_url(logging_dir):
        raise ConfigError(
            f"The tracker '{_name_of(kind)}' writes local files, but its directory is a URL. Pass a local logging_dir "
            "in ProjectConfiguration."
        )
    return kind


def _is_url(directory: str | os.PathLike[str] | None) -> bool:
    return directory is not None and "://" in os.fspath(directory)


def _name_of(choice: TrackerChoice) -> str:
    return str(choice.name)
