"""What other libraries' words mean here. The core imports it only when some of them are there."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "rules": ["NoEffect", "Refused", "Translation"],
            "settings": ["DEEPSPEED_VARIABLES", "environment_settings", "external_settings"],
        },
    )
