"""Trackers that write files and need no account: TensorBoard and JSON lines."""

from __future__ import annotations

import json
import math
import os
import re
import time
import warnings
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

import yaml

from lockstep.config.files import replacing
from lockstep.errors import MissingExtraError
from lockstep.observe.trackers.base import GeneralTracker, on_main_process, plain
from lockstep.runtime.available import is_available

STEP = re.compile(r'\{"step": (\d+),')


class TensorBoardTracker(GeneralTracker):
    """A tracker that writes TensorBoard's event files to ``logging_dir/run_name``.

    Args:
        run_name: The name of the run: a folder in ``logging_dir``.
        logging_dir: The folder of all runs.
        kwargs: Arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        MissingExtraError: the package tensorboard is not installed.

    Examples:
        ```python
        from pathlib import Path
        from lockstep.tracking import TensorBoardTracker

        tracker = TensorBoardTracker("digits", logging_dir="board")
        tracker.start()
        tracker.log({"loss": 0.5}, step=1)
        tracker.finish()
        assert list(Path("board/digits").glob("events.out.tfevents.*"))  # tensorboard --logdir board
        ```
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: object) -> None:
        super().__init__()
        if not is_available("tensorboard"):
            raise MissingExtraError("The tracker 'tensorboard'", "tensorboard", "tensorboard")
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs
        self._unfit: set[str] = set()

    @on_main_process
    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Untyped in torch.
        make_writer = SummaryWriter
        self.writer = make_writer(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``. It exists after ``start``."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Add ``values`` to the board's table of hyperparameters, and write them to ``<time>/hparams.yml`` in the
        run's folder.
        """
        run = str(time.time())
        config = plain(values)
        # The board's table holds only these types; None has no cell.
        cells = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in config.items()
            if value is not None
        }
        self.writer.add_hparams(cells, metric_dict={}, run_name=run)
        self.writer.flush()
        folder = Path(self.logging_dir) / run
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(_serialisable(config)), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Log values: numbers as scalars, strings as text, and mappings of numbers as one chart with several lines.

        Args:
            values: Name -> value. A warning names values that are left out.
            step: The number of the step. None: it is not known.
            kwargs: Options of ``SummaryWriter.add_scalar``, ``add_text`` or ``add_scalars``.
        """
        for key, value in plain(values).items():
            if isinstance(value, (bool, int, float)):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
            elif key not in self._unfit:
                self._unfit.add(key)
                warnings.warn(
                    f"TensorBoard cannot show '{key}', a {type(value).__name__}, so it is left out. Log numbers, "
                    "strings or dicts of numbers.",
                    stacklevel=3,
                )
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Log images.

        Args:
            values: Name -> images [N, 3, H, W], or of another shape that ``dataformats`` in ``kwargs`` names.
            step: The number of the step. None: it is not known.
            kwargs: Options of ``SummaryWriter.add_images``.
        """
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)

    @on_main_process
    def resume(self, step: int) -> None:
        writer: Any = self.writer
        # Each of the writer's folders, one for a line of a chart, has to be told.
        charts = {path.parent.name for path in Path(self.logging_dir).glob("*/events.out.tfevents.*")}
        self.writer.close()
        self.writer.purge_step = step
        # Without lines, it only opens the file.
        self.writer.add_scalars("", {})
        for chart in charts:
            folder = f"{writer.file_writer.get_logdir()}/{chart}"
            writer.all_writers[folder] = type(writer)(folder, purge_step=step).file_writer

    @on_main_process
    def finish(self) -> None:
        self.writer.close()


class JSONLinesTracker(GeneralTracker):
    """A tracker that writes one JSON object a line to ``logging_dir/run_name/metrics.jsonl``. A resumed run appends
    to it. The lines of steps that it logs again move to ``metrics.jsonl.replaced``.

    The configuration is ``{"time": ..., "config": {...}}``. Each call of ``log`` writes ``{"step": ..., "time": ...,
    "values": {...}}``. ``time`` is in seconds since 1970. JSON has no numbers for NaN and infinity: they are the
    strings "NaN", "Infinity" and "-Infinity", which ``float`` reads.

    Args:
        run_name: The name of the run: a folder in ``logging_dir``.
        logging_dir: The folder of all runs.
        file_name: The name of the file.

    Examples:
        ```python
        from lockstep.tracking import JSONLinesTracker

        tracker = JSONLinesTracker("digits", logging_dir="lines")
        tracker.start()
        tracker.store_init_configuration({"lr": 0.1})
        tracker.log({"loss": 0.5}, step=1)
        tracker.finish()
        with open("lines/digits/metrics.jsonl") as file:
            assert '"loss":0.5' in file.read().replace(" ", "")
        ```
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str], file_name: str = "metrics.jsonl"
    ) -> None:
        super().__init__()
        self.path = Path(logging_dir) / run_name / file_name

    @on_main_process
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a", encoding="utf-8")

    @property
    def tracker(self) -> TextIO:
        """The open file. It exists after ``start``."""
        return self.file

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        self._write({"time": time.time(), "config": values})

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        self._write({"step": step, "time": time.time(), "values": values})

    @on_main_process
    def resume(self, step: int) -> None:
        kept: list[str] = []
        replaced: list[str] = []
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                match = STEP.match(line)
                (replaced if match and int(match[1]) >= step else kept).append(line)
        if replaced:
            with open(f"{self.path}.replaced", "a", encoding="utf-8") as file:
                file.writelines(replaced)
            self.file.close()
            with replacing(self.path) as whole:
                whole.write("".join(kept).encode())
            self.file = self.path.open("a", encoding="utf-8")

    @on_main_process
    def finish(self) -> None:
        self.file.close()

    def _write(self, record: dict[str, object]) -> None:
        line = json.dumps(_serialisable(_finite(plain(record))), allow_nan=False, ensure_ascii=False)
        self.file.write(line + "\n")
        # A run that is killed leaves whole lines behind.
        self.file.flush()


def _finite(value: object) -> object:
    """Return ``value`` with the floats that JSON cannot write as strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _serialisable(value: object) -> object:
    """Return ``value``, from ``plain``, with every object that is not plain data as its ``str``."""
    if isinstance(value, dict):
        return {key: _serialisable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_serialisable(item) for item in value]
    if isinstance(value, Enum):
        value = value.value
    # YAML knows exact types only, so a subclass of one becomes the type itself.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None if value is None else str(value)
