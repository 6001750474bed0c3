"""Charts and pieces of pages: little code of our own, which loads nothing."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "charts": ["bars", "line_chart", "means", "PlotLine", "stacked_chart", "thinned"],
            "hover": ["policy", "SCRIPT"],
            "html": ["long_table", "MOST_ROWS", "safe", "table"],
            "scale": ["Scale", "scale_of", "span_of"],
            "style": ["STYLE"],
            "svg": ["area", "HEIGHT", "line", "WIDTH"],
        },
    )
