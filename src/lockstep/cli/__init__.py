from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "accelerate": ["COMMANDS_OF_ACCELERATE"],
            "accelerate_commands": ["launch_command", "launch_command_parser", "load_config_from_file"],
            "main": ["COMMANDS"],
            "top_screen": ["TopScreen"],
            "values": ["value_type"],
        },
    )
