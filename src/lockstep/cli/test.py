"""``lockstep test``: launches the self-check."""

from __future__ import annotations

import click

from lockstep.cli.integers import IntegerRange
from lockstep.config.checks import MAX_PROCESSES


@click.command("test", epilog="\b\nExamples:\n  lockstep test\n  lockstep test --nproc 4 --cpu\n")
@click.option("--nproc", type=IntegerRange(1, MAX_PROCESSES), default=2, show_default=True, help="Processes.")
@click.option("--cpu", is_flag=True, help="Check on CPUs only.")
def command(nproc: int, cpu: bool) -> None:
    """Train and communicate a little on this machine, and compare with formulas and with plain torch."""
    from lockstep.config.sources import inherited_environment
    from lockstep.config.values import SettingValue
    from lockstep.launch import self_check
    from lockstep.launch.local import end_process, launch
    from lockstep.launch.plan import Program, available_cores, make_plan, merge

    flags = {"nproc": SettingValue(nproc, "flag --nproc")}
    if cpu:
        flags["use_cpu"] = SettingValue(True, "flag --cpu")
    settings = merge(flags, {}, inherited_environment())
    program = Program(self_check.__name__, module=True)
    end_process(launch(make_plan(program, settings, device_count=0, cores=available_cores())))
