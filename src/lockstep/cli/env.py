"""``lockstep env``: what to paste into a report of a problem, and what a run would need."""

from __future__ import annotations

import click

from lockstep.cli.values import options_of

EPILOG = """\b
Examples:
  lockstep env
  lockstep env --no-torch --json
  lockstep env --config-file run.yaml
"""


@click.command("env", epilog=EPILOG)
@options_of("config_file", help={"config_file": "Also show the settings of this configuration file."})
@click.option("--no-torch", is_flag=True, help="Do not import torch (fast; no versions of CUDA, no devices).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(no_torch: bool, as_json: bool, config_file: str | None) -> None:
    """Show versions, devices and settings of this machine. Prints no secrets: only known variables."""
    from lockstep.launch.inventory import gather_inventory

    facts = gather_inventory(with_torch=not no_torch)
    if config_file is not None:
        from lockstep.compat.accelerate.config_file import load

        given = load(config_file).config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        facts["configuration"] = config_file
        facts |= {f"configuration: {name}": str(value) for name, value in given.items()}
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
