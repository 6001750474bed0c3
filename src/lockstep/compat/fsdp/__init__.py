"""Accelerate's settings and plugin for FSDP."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "plugin_settings": ["FIELD_NAMES", "from_fsdp_plugin", "POLICY_KEYS"],
            "section": ["from_fsdp", "KEYS", "STRATEGIES"],
        },
    )
