"""``lockstep env --explain``: memory, traffic and dtypes of a strategy, as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.cli.values import process_counts
from lockstep.config.checks import MAX_ACCUMULATION_STEPS
from lockstep.config.parallel import Parallel, is_one_group
from lockstep.config.values import parse_integer, parse_precision
from lockstep.errors import ConfigError
from lockstep.plan.memory import MemoryRow, state_bytes
from lockstep.plan.sizes import BYTES, dtypes, parse_count
from lockstep.words import BINARY_UNITS, three_digits

COMPARED = ("ddp", "zero=1", "zero=2", "zero=3")
MAX_ROWS = 64
BAR_WIDTH = 20

# title, bytes; a column that is zero everywhere is left out unless it is in ALWAYS
COLUMNS: dict[str, Callable[[MemoryRow], int]] = {
    "weights": lambda row: row.weights,
    "gradients": lambda row: row.gradients,
    "optimizer": lambda row: row.optimizer,
    "buckets": lambda row: row.buckets,
    "at rest": lambda row: row.at_rest,
    "copies": lambda row: row.copies,
    "on host": lambda row: row.host_peak,
    "on disk": lambda row: row.disk,
    "peak": lambda row: row.peak,
    "textbook": lambda row: row.textbook,
    "sent": lambda row: row.sent.total,
}
TOTALS = ("at_rest", "device", "host", "disk", "peak", "host_peak")
ALWAYS = ("weights", "gradients", "optimizer", "at rest", "peak", "textbook", "sent")

# what a bar is made of, on the device
BAR: tuple[tuple[str, str, Callable[[MemoryRow], int]], ...] = (
    ("█", "weights", lambda row: row.on_device("weights")),
    ("▓", "gradients and buckets", lambda row: row.on_device("gradients") + row.buckets),
    ("▒", "optimizer", lambda row: row.on_device("optimizer")),
    ("░", "within a step", lambda row: row.peak - row.device),
)


OFFLOADED = (
    "on host, on disk: what rests there, and on the host what is on its way to a disk. copies: fp32 weights that the "
    "host steps for an accelerator. A CPU's own memory is the host's: there, peak and host are one, without copies."
)


@dataclass(frozen=True)
class ExplainedRow:
    """One strategy on one number of ranks: its row, or why there is none."""

    parallel: Parallel
    ranks: int
    row: MemoryRow | None
    reason: str = ""


def explain_parallel(
    text: str,
    as_json: bool,
    params: str = "1B",
    ranks: str = "1,2,4,8",
    precision: str = "no",
    optimizer: str = "adamw",
    blocks: str = "32",
    gradient_accumulation_steps: str = "1",
) -> None:
    """Print what ``parallel=text`` needs, or a comparison for ``all``.

    Raises:
        ConfigError: one of the texts cannot be read.
    """
    plans = [Parallel.parse(words) for words in (COMPARED if text.strip() == "all" else (text,))]
    parameters = parse_count(params, "--params")
    count = parse_integer(blocks, "--blocks", 1, parameters)
    steps = parse_integer(
        gradient_accumulation_steps, "--gradient-accumulation-steps", 1, MAX_ACCUMULATION_STEPS
    )
    mixed_precision = str(parse_precision(precision, "--precision"))

    block = -(-parameters // count)  # rounded up

    def state(plan: Parallel, n: int) -> MemoryRow:
        groups = (
            {"root": parameters} if is_one_group(plan, int(BYTES["fp32"] * parameters)) else {"block": block}
        )
        return state_bytes(parameters, n, plan, mixed_precision, optimizer, micro_batches=steps, **groups)

    state(Parallel(), 1)  # what is wrong for every row is an error, not a row's reason
    cases = [_case(plan, n, state) for n in process_counts(ranks, "--ranks", MAX_ROWS) for plan in plans]
    facts = {
        "parameters": parameters,
        "blocks": count,
        "gradient_accumulation_steps": steps,
        "mixed_precision": mixed_precision,
        "optimizer": optimizer,
    }
    if as_json:
        types = {str(plan): dtypes(plan, mixed_precision) for plan in plans}
        click.echo(json.dumps(facts | {"rows": [_facts(case) for case in cases], "dtypes": types}, indent=2))
        return
    console = Console(highlight=False)
    console.width = max(console.width, 110)
    _print_memory(console, cases, facts, compared=len(plans) > 1)
    _print_dtypes(console, plans, mixed_precision)


def _case(plan: Parallel, ranks: int, state: Callable[[Parallel, int], MemoryRow]) -> ExplainedRow:
    try:
        return ExplainedRow(plan, ranks, state(plan, ranks))
    except ConfigError as error:
        return ExplainedRow(plan, ranks, None, str(error))


def _facts(case: ExplainedRow) -> dict[str, object]:
    facts: dict[str, object] = {"parallel": str(case.parallel), "ranks": case.ranks}
    if case.row is None:
        return facts | {"reason": case.reason}
    totals = {name: getattr(case.row, name) for name in TOTALS}
    # The printed key is older than the field's name.
    row = {"homes" if name == "locations" else name: value for name, value in asdict(case.row).items()}
    return facts | row | totals | {"sent": asdict(case.row.sent) | {"total": case.row.sent.total}}


def _print_memory(
    console: Console, cases: Sequence[ExplainedRow], facts: dict[str, object], compared: bool
) -> None:
    rows = [case.row for case in cases if case.row is not None]
    columns = {
        title: value for title, value in COLUMNS.items() if title in ALWAYS or any(value(row) for row in rows)
    }
    largest = max((value(row) for row in rows for value in columns.values()), default=1)
    scale, unit = next((scale, unit) for scale, unit in BINARY_UNITS if largest >= scale)
    full = max((row.peak for row in rows), default=1)

    name = "ddp and ZeRO" if compared else str(cases[0].parallel)
    console.print(
        Text(
            f"{name}: {facts['parameters']:,} parameters, {facts['optimizer']}, precision {facts['mixed_precision']}"
        ),
        style="bold",
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("ranks", justify="right")
    if compared:
        table.add_column("parallel")
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column(f"{unit} on each rank")
    for case, before in zip(cases, (None, *cases), strict=False):
        if compared and before and before.ranks != case.ranks:
            table.add_row()
        cells: list[Text] = [Text(str(case.ranks))]
        if compared:
            cells.append(Text(str(case.parallel)))
        if case.row is None:
            table.add_row(*cells, *([Text("-")] * len(columns)), Text(case.reason))
            continue
        cells += [Text(three_digits(value(case.row) / scale)) for value in columns.values()]
        table.add_row(*cells, Text(_bar(case.row, full)))
    console.print(table)
    console.print(Text("   ".join(f"{mark} {label}" for mark, label, _ in BAR)))
    if any(row.host_peak or row.disk for row in rows):
        console.print(Text(f"\n{OFFLOADED}"))
    console.print(
        Text(
            f"\nat rest: after a step, until zero_grad. peak: an upper bound of state on the device within a step, "
            f"with {facts['blocks']} equal blocks. sent: bytes that a rank sends in a step of "
            f"{facts['gradient_accumulation_steps']} micro-batch(es). textbook: the formula of the ZeRO paper.\n"
            "Not counted: activations, buffers, the optimizer's temporaries, fragmentation, what the allocator and "
            "the communication backend keep."
        )
    )


def _bar(row: MemoryRow, full: int) -> str:
    """The parts of ``row`` in marks, ``BAR_WIDTH`` for ``full``. Rounding is of the ends, so that lengths add up."""
    bar, end = "", 0
    for mark, _, value in BAR:
        end += value(row)
        bar += mark * (round(BAR_WIDTH * end / full) - len(bar))
    return bar


def _print_dtypes(console: Console, plans: Sequence[Parallel], mixed_precision: str) -> None:
    columns = [dtypes(plan, mixed_precision) for plan in plans]
    table = Table(box=None, pad_edge=False)
    table.add_column("dtype of")
    for plan in plans:
        table.add_column(str(plan))
    for tensor in columns[0]:
        table.add_row(tensor, *(types[tensor] for types in columns))
    console.print()
    console.print(table)
