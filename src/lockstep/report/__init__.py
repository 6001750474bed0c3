"""What a run did, why it was slow and why it stopped: one page of its folder. No torch."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "charts": [
                "Chart",
                "HEIGHT",
                "line_chart",
                "means",
                "path",
                "PlotLine",
                "Scale",
                "scale_of",
                "stacked_chart",
                "thinned",
                "WIDTH",
            ],
            "live": ["bar", "NEWEST_BYTES", "screen", "sparkline"],
            "numbers": ["numbers_of", "RunNumbers"],
            "page": ["check_page", "MOST_ROWS", "policy", "SCRIPT", "STYLE", "template_environment"],
            "report": ["report_of", "to_json"],
            "summary": ["REASONS", "sentences"],
        },
    )
