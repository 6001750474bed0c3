"""``lockstep env``: what to paste into a report of a problem, and what a run would need."""

from __future__ import annotations

import click

from lockstep.cli.values import options_of

EPILOG = """\b
Examples:
  lockstep env
  lockstep env --no-torch --json
  lockstep env --config-file run.yaml
  lockstep env --explain all --params 1.3B
  lockstep env --explain "zero=3 replicate=2" --params 7e9 --ranks 2,4,8 --precision bf16
"""


@click.command("env", epilog=EPILOG)
@options_of("config_file", help={"config_file": "Also show the settings of this configuration file."})
@click.option("--no-torch", is_flag=True, help="Do not import torch (fast; no versions of CUDA, no devices).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--explain", metavar="PARALLEL",
              help="Show the memory and the dtypes that parallel=PARALLEL would need instead; 'all' compares "
              "ddp and the stages of ZeRO. Imports no torch.")  # fmt: skip
@click.option("--params", metavar="N", help="Parameters of the model: 1.3B, 350M, 7e9 (default: 1B).")
@click.option("--ranks", metavar="LIST", help="Numbers of processes (default: 1,2,4,8).")
@click.option("--precision", metavar="no|bf16|fp16", help="Mixed precision (default: no).")
@click.option("--optimizer", metavar="NAME", help="Name of the optimizer (default: adamw).")
@click.option("--blocks", metavar="N", help="Equal blocks in the model (default: 32).")
@click.option("--gradient-accumulation-steps", metavar="K", help="Micro-batches in a step (default: 1).")
def command(
    no_torch: bool, as_json: bool, explain: str | None, config_file: str | None, **options: str | None
) -> None:
    """Show versions, devices and settings of this machine. Prints no secrets: only known variables."""
    given = {name: value for name, value in options.items() if value is not None}
    if explain is not None:
        if config_file is not None:
            raise click.UsageError("--config-file and --explain exclude each other. Drop one of them.")
        from lockstep.cli.explain import explain_parallel

        explain_parallel(explain, as_json, **given)
        return
    if given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise click.UsageError(f"{flag} belongs to --explain. Add --explain PARALLEL, or drop {flag}.")
    from lockstep.launch.inventory import gather_inventory

    facts = gather_inventory(with_torch=not no_torch)
    if config_file is not None:
        facts["configuration"] = config_file
        facts |= {f"configuration: {name}": str(value) for name, value in _settings(config_file).items()}
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


def _settings(path: str) -> dict[str, object]:
    """What the file says, by the names of settings."""
    from lockstep.compat.accelerate.config_file import load

    return load(path).config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
