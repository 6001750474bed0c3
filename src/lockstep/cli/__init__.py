from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "accelerate": ["COMMANDS_OF_ACCELERATE"],
            "accelerate_commands": ["launch_command", "launch_command_parser", "load_config_from_file"],
            "check": ["page_of_verdict"],
            "main": ["cli", "COMMANDS"],
            "values": ["value_type"],
        },
    )


def run_lockstep(arguments: list[str] | None = None) -> None:
    """Run the command ``lockstep`` with these arguments, or those of this process. Ends in ``SystemExit``."""
    from lockstep.cli.main import main

    main(arguments)
