"""``lockstep env``: what to paste into a report of a problem."""

from __future__ import annotations

import click


@click.command("env", epilog="\b\nExamples:\n  lockstep env\n  lockstep env --no-torch --json\n")
@click.option("--no-torch", is_flag=True, help="Do not import torch (fast; no versions of CUDA, no devices).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(no_torch: bool, as_json: bool) -> None:
    """Show versions, devices and settings of this machine. Prints no secrets: only known variables."""
    from lockstep.launch.inventory import inventory

    facts = inventory(with_torch=not no_torch)
    if as_json:
        import json

        click.echo(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name, str(value), style=None)
    Console(soft_wrap=True, highlight=False).print(table)
