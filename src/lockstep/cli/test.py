"""``lockstep test``: launches the self-check."""

from __future__ import annotations

import click

from lockstep.cli.values import options_of

EPILOG = """\b
Examples:
  lockstep test
  lockstep test --nproc 4 --cpu
  lockstep test --config-file run.yaml
"""


@click.command("test", epilog=EPILOG)
@options_of(
    "config_file",
    "nproc",
    "use_cpu",
    help={
        "config_file": "Use the processes, the precision and the sharding of this file.",
        "nproc": "Processes (default: 2, or as in the file).",
        "use_cpu": "Check on CPUs only.",
    },
)
def command(config_file: str | None, nproc: int | None, use_cpu: bool) -> None:
    """Run small computations on several processes of this machine, and compare them with formulas and plain torch."""
    from lockstep.launch import self_check

    words = ["--module", self_check.__name__]
    if config_file is not None:
        from lockstep.cli.launch import command as launch_command

        flags = ["--config-file", config_file, *(["--cpu"] if use_cpu else [])]
        flags += ["--nproc", str(nproc)] if nproc is not None else []
        launch_command.main([*flags, *words], "lockstep launch", standalone_mode=False)
        return
    from lockstep.config.sources import inherited_environment
    from lockstep.config.values import SettingValue
    from lockstep.launch.local import end_process, launch
    from lockstep.launch.plan import Program, available_cores, make_plan, merge

    given_flags = {"nproc": SettingValue(nproc or 2, "flag --nproc" if nproc else "default")}
    if use_cpu:
        given_flags["use_cpu"] = SettingValue(True, "flag --cpu")
    settings = merge(given_flags, {}, inherited_environment())
    program = Program(self_check.__name__, module=True)
    end_process(launch(make_plan(program, settings, device_count=0, cores=available_cores())))
