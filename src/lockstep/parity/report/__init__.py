"""A verdict as text, as JSON and as a page."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "html": ["heat", "MOST_MODULES", "shade", "to_html"],
            "text": ["named", "remarks", "rows", "sentence", "sentence_of_repeat", "TITLES", "to_json"],
        },
    )
