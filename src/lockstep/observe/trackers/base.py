"""What a tracker is: the class that users subclass, and its placeholder on other ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.errors import UsageError
from lockstep.runtime import process

Method = TypeVar("Method", bound=Callable[..., object])

REQUIRED = ("name", "requires_logging_directory", "tracker")


def on_main_process(function: Method) -> Method:
    """Decorate a method of a tracker so that it runs on rank 0 only. On other ranks it returns None.

    Args:
        function: The method. If the tracker's ``main_process_only`` is False, it runs on all ranks.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.tracking import GeneralTracker, on_main_process

        class Counter(GeneralTracker):
            name, requires_logging_directory, tracker = "counter", False, None

            @on_main_process
            def log(self, values, step=None, **kwargs):
                return len(values)

        accelerator = Accelerator()
        counted = Counter().log({"loss": 0.5})
        assert counted == (1 if accelerator.is_main_process else None)
        ```
    """

    @functools.wraps(function)
    def method(self: GeneralTracker, *args: object, **kwargs: object) -> object:
        runtime = process.current_runtime()
        if getattr(self, "main_process_only", False) and runtime is not None and not runtime.is_main:
            return None
        return function(self, *args, **kwargs)

    return method  # type: ignore[return-value]


class GeneralTracker:
    """The base class of all trackers. A subclass defines three attributes, and those methods that it needs.

    - ``name``: the name of the tracker, for ``get_tracker(name)`` and ``init_kwargs``.
    - ``requires_logging_directory``: whether it writes files.
    - ``tracker``: the object of the tracker's library, such as a ``SummaryWriter``. It may exist only after
      ``start``.
    - ``main_process_only``: with False, the tracker is started on every rank and gets what every rank logs.

    ``Accelerator`` makes an object of a class in ``log_with``. It passes the name of the project, the logging
    directory if the class requires one, and the tracker's ``init_kwargs``.

    Raises:
        UsageError: one of the first three attributes is missing.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.tracking import GeneralTracker

        class Printer(GeneralTracker):
            name = "printer"
            requires_logging_directory = False
            tracker = None

            def start(self): self.lines = []
            def store_init_configuration(self, values): self.lines.append(str(values))
            def log(self, values, step=None, **kwargs): self.lines.append(f"{step}: {values}")
            def log_images(self, values, step=None, **kwargs): pass
            def finish(self): print(*self.lines)

        accelerator = Accelerator(log_with=Printer())
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.end_training()
        ```
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    if TYPE_CHECKING:

        @property
        def tracker(self) -> Any: ...

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            check_complete(self)

    def start(self) -> None:
        """Start the run. ``init_trackers`` calls it, when the process group exists. It may not exist yet in
        ``__init__``.
        """

    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Store ``values``, name -> value, as the hyperparameters of the run."""

    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Log values. ``accelerator.log`` calls it.

        Args:
            values: Name -> value. A value may be a 0-d tensor.
            step: The number of the step. None: it is not known.
            kwargs: ``log_kwargs[name]`` of ``accelerator.log``.
        """

    def log_images(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Log images. A tracker that cannot show images does nothing.

        Args:
            values: Name -> images, as the tracker's library takes them.
            step: The number of the step. None: it is not known.
            kwargs: Options of the tracker's library.
        """

    def finish(self) -> None:
        """End the run. ``end_training`` calls it."""

    def continuation(self) -> dict[str, object]:
        """Return arguments of this class, as JSON, with which another process continues this run of the library.

        Examples:
            ```python
            from lockstep.tracking import GeneralTracker

            class Notes(GeneralTracker):
                name, requires_logging_directory, tracker = "notes", False, None

                def continuation(self):
                    return {"run_id": "run-1"}

            assert Notes().continuation() == {"run_id": "run-1"}
            ```
        """
        return {}

    def resume(self, step: int) -> None:
        """Prepare for steps that are logged again, after ``load_state`` in a new process.

        Args:
            step: The first of them. What was logged at this step and later steps is to be replaced.

        Examples:
            ```python
            from lockstep.tracking import GeneralTracker

            class Losses(GeneralTracker):
                name, requires_logging_directory, tracker = "losses", False, None
                steps = {4: 0.5, 5: 0.4, 6: 0.3}

                def resume(self, step):
                    self.steps = {key: value for key, value in self.steps.items() if key < step}

            losses = Losses()
            losses.resume(5)
            assert losses.steps == {4: 0.5}
            ```
        """


class BlankTracker(GeneralTracker):
    """Stands for a tracker that runs on the main process only: takes any call and does nothing."""

    name = "blank"
    requires_logging_directory = False

    @property
    def tracker(self) -> BlankTracker:
        return self

    def __getattr__(self, attribute: str) -> Any:
        # copy and pickle ask for special methods and must not get this object for one.
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self

    def __call__(self, *args: object, **kwargs: object) -> BlankTracker:
        return self

    def __getitem__(self, key: object) -> BlankTracker:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __enter__(self) -> BlankTracker:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def check_complete(tracker: GeneralTracker | type[GeneralTracker]) -> None:
    """Raise UsageError when ``tracker``, or its class, lacks a required attribute."""
    # dir, not hasattr: a property such as tracker may fail until start() has run.
    missing = [attribute for attribute in REQUIRED if attribute not in dir(tracker)]
    if missing:
        kind = tracker if isinstance(tracker, type) else type(tracker)
        raise UsageError(
            f"The tracker class {kind.__name__} is missing the required attributes: "
            f"{', '.join(missing)}. Define them in the class, for example "
            "name = 'my_tracker', requires_logging_directory = False and a property tracker."
        )


def plain(value: object) -> Any:
    """Return ``value`` with tensors, arrays and NumPy scalars as Python numbers or lists, at any depth.

    A tensor or array with one element becomes a number, whatever its shape.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        value = value.tolist()
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
    return value
