"""The steps of a run as arrays: a row for each line of ``measures.jsonl``, NaN where nothing is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SCALARS = ("step", "time", "attempt", "epoch", "samples", "tokens", "loss", "gradient_norm")
PARTS = (
    "forward",
    "backward",
    "optimizer",
    "communication",
    "to_device",
    "data",
    "inference",
    "save",
    "wait",
    "other",
    "forward_backward",
)
"""Of a step's time, in the order in which they are drawn."""
WRITTEN = ("loss", "gradient_norm")
MOST_NAMES = 200
"""Scalars, axes and numbers of ranks that are kept; a file may name any number of them."""
BOUNDS = {"step": 1e15, "attempt": 1e9, "time": 1e11}
BOUND = 1e60
"""Numbers beyond it are nobody's, and not known; those of ``BOUNDS`` have their own."""
_NOTHING: dict[str, object] = {}


@dataclass
class SparseColumn:
    """Values that only some lines have: ``rows`` are those lines' numbers."""

    rows: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def filled_forward(self, count: int) -> FloatArray:
        """Return one value a row, the last that was written before or on it."""
        places = np.searchsorted(np.array(self.rows, dtype=np.int64), np.arange(count), side="right") - 1
        # Rows before the first value have place -1: the NaN at the end.
        known = np.array([*self.values, math.nan])
        return known[places]


@dataclass
class RankTimes:
    """Each rank's own times of a step, in seconds, added up over the lines that have them."""

    sums: FloatArray
    counts: FloatArray

    @property
    def means(self) -> FloatArray:
        return self.sums / np.where(self.counts > 0, self.counts, math.nan)


@dataclass(frozen=True)
class StepColumns:
    """What is known of each step, in the order of the file; a step that was done again has several rows.

    ``parts``: seconds of each of ``PARTS``. ``written``: for each of ``WRITTEN`` the rows that say anything of it,
    which may be that it is no number. ``rank_times``: by the number of ranks.
    """

    step: FloatArray
    time: FloatArray
    attempt: FloatArray
    epoch: FloatArray
    samples: FloatArray
    tokens: FloatArray
    loss: FloatArray
    gradient_norm: FloatArray
    learning_rate: FloatArray
    total: FloatArray
    parts: Mapping[str, FloatArray]
    written: Mapping[str, BoolArray]
    model_flops: FloatArray
    hardware_flops: FloatArray
    memory: Mapping[str, SparseColumn]
    logged: Mapping[str, SparseColumn]
    rank_times: Mapping[int, RankTimes]

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def kept(self) -> BoolArray:
        """Rows whose step was not done again later: the run goes back to a checkpoint, and does it anew."""
        if not len(self.step):
            return np.zeros(0, dtype=bool)
        # later[i]: the least step from row i on. Where it is no greater, the step before was done again.
        later = np.minimum.accumulate(self.step[::-1])[::-1]
        return np.append(self.step[:-1] < later[1:], True)


class ColumnReader:
    """Takes the lines of a file, block by block, and makes columns of them."""

    def __init__(self) -> None:
        self._count = 0
        self._blocks: dict[str, list[FloatArray]] = {}
        self._memory: dict[str, SparseColumn] = {}
        self._logged: dict[str, SparseColumn] = {}
        self._ranks: dict[int, RankTimes] = {}

    def add(self, lines: Sequence[Mapping[str, object]]) -> None:
        for name in SCALARS:
            self._append(name, [line.get(name, math.nan) for line in lines])
        for name in WRITTEN:
            self._append(f"{name} written", [float(line.get(name) is not None) for line in lines])
        self._append("learning_rate", [_first(line.get("learning_rate")) for line in lines])
        self._append_inner(lines, "seconds", {"total": "total", **{part: part for part in PARTS}})
        self._append_inner(lines, "flops", {"model": "model_flops", "hardware": "hardware_flops"})
        for row, line in enumerate(lines, self._count):
            if "memory" in line:
                _add(self._memory, row, line["memory"])
            if "logged" in line:
                _add(self._logged, row, line["logged"])
        self._add_ranks([line["rank_seconds"] for line in lines if "rank_seconds" in line])
        self._count += len(lines)

    def columns(self) -> StepColumns:
        every = {name: np.concatenate(blocks) for name, blocks in self._blocks.items()}
        nothing = np.zeros(0)
        step = every.get("step", nothing)
        step = np.where(np.isnan(step), np.arange(1, len(step) + 1), step)
        time, attempt = every.get("time", nothing), np.nan_to_num(every.get("attempt", nothing))
        parts = {part: every.get(part, nothing) for part in PARTS}
        total = _totals(every.get("total", nothing), parts, time, attempt)
        parts["other"] = _with_rest(total, parts)
        return StepColumns(
            step=step,
            time=time,
            attempt=attempt,
            total=total,
            parts=parts,
            written={name: every.get(f"{name} written", nothing) > 0 for name in WRITTEN},
            memory=self._memory,
            logged=self._logged,
            rank_times=self._ranks,
            **{name: every.get(name, nothing) for name in (
                "epoch", "samples", "tokens", "loss", "gradient_norm", "learning_rate", "model_flops", "hardware_flops",
            )},
        )  # fmt: skip

    def _append(self, name: str, values: list[object]) -> None:
        found = numbers(values)
        bound = BOUNDS.get(name)
        # A loss may be infinite, which is worth saying; a step may not.
        wild = ~(np.abs(found) < bound) if bound else (np.abs(found) > BOUND) & np.isfinite(found)
        self._blocks.setdefault(name, []).append(np.where(wild, math.nan, found) if wild.any() else found)

    def _append_inner(
        self, lines: Sequence[Mapping[str, object]], key: str, names: Mapping[str, str]
    ) -> None:
        inner = [found if type(found := line.get(key)) is dict else _NOTHING for line in lines]
        for name, column in names.items():
            self._append(column, [one.get(name, math.nan) for one in inner])

    def _add_ranks(self, found: Iterable[object]) -> None:
        by_size: dict[int, list[list[object]]] = {}
        for one in found:
            if type(one) is list and one:
                by_size.setdefault(len(one), []).append(one)
        for ranks, rows in by_size.items():
            if ranks not in self._ranks and len(self._ranks) >= MOST_NAMES:
                continue
            times = numbers([one for row in rows for one in row]).reshape(len(rows), ranks)
            known = np.abs(times) < BOUND
            so_far = self._ranks.setdefault(ranks, RankTimes(np.zeros(ranks), np.zeros(ranks)))
            so_far.sums += np.where(known, times, 0).sum(0)
            so_far.counts += known.sum(0)


def numbers(values: Sequence[object]) -> FloatArray:
    """Return one number for each value; NaN for what is no number."""
    # Most blocks are numbers only, which one call converts.
    try:
        found = np.array(values, dtype=np.float64)
        if found.shape == (len(values),):
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([number(value) for value in values], dtype=np.float64)


def number(value: object) -> float:
    """Return a value as a float; NaN for what is no number, or beyond all floats."""
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            pass
    return math.nan


def bounded(value: object, bound: float = BOUND) -> float:
    """Return the same; NaN beyond ``bound`` too."""
    found = number(value)
    return found if abs(found) < bound else math.nan


def _first(value: object) -> object:
    if type(value) is list:
        return value[0] if value else math.nan
    return math.nan if value is None else value


def _add(columns: dict[str, SparseColumn], row: int, found: object) -> None:
    if type(found) is not dict:
        return
    for name, value in found.items():
        if name not in columns and len(columns) >= MOST_NAMES:
            continue
        if not isinstance(value, (int, float)):
            continue
        column = columns.setdefault(name, SparseColumn())
        column.rows.append(row)
        column.values.append(bounded(value))


def _with_rest(total: FloatArray, parts: Mapping[str, FloatArray]) -> FloatArray:
    """Return seconds of the part ``other``, with what no known part explains."""
    if not len(total):
        return total
    stacked = np.vstack(list(parts.values()))
    rest = np.where(np.isfinite(stacked).any(0), total - np.nansum(stacked, 0), 0.0)
    # What is less than that comes from rounded numbers.
    return np.where(rest > 1e-3 * total, np.nan_to_num(parts["other"]) + rest, parts["other"])


def _totals(
    total: FloatArray, parts: Mapping[str, FloatArray], time: FloatArray, attempt: FloatArray
) -> FloatArray:
    """Return the seconds of each step: as written, or what its parts add up to, or the time since the line before."""
    if not len(total) or not np.isnan(total).any():
        return total
    stacked = np.vstack(list(parts.values()))
    added = np.where(np.isfinite(stacked).any(0), np.nansum(stacked, 0), math.nan)
    # Not across starts: no process ran between them.
    since = np.append(math.nan, np.where(attempt[1:] == attempt[:-1], np.diff(time), math.nan))
    since = np.where(since >= 0, since, math.nan)
    total = np.where(np.isnan(total), added, total)
    return np.where(np.isnan(total), since, total)
