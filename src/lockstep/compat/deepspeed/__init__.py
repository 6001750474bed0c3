"""DeepSpeed's JSON and plugin, and the optimizers and schedules that it describes."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "config": ["from_deepspeed"],
            "described": ["build_scheduler"],
            "keys": ["KEYS"],
            "lr_schedule_params": ["parse_schedule"],
            "lr_schedules": ["ScheduledLR"],
            "optimizers": ["build_optimizer"],
            "plugin_settings": ["OWN_FIELDS"],
            "yaml_section": ["DEEPSPEED_KEYS", "FILE_KEY"],
        },
    )
