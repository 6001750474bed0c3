"""What a run will need, by arithmetic alone: nothing here runs a model, and importing it does not import torch."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "estimate": ["carried_bytes", "cheapest", "inference_rows", "Limits", "training_rows"],
            "estimate_load": ["facts_of"],
            "estimate_model": ["ModelFacts"],
            "memory": ["MemoryRow", "OPTIMIZERS", "state_bytes", "textbook_bytes"],
            "schedule": ["Action", "by_rank", "simulate", "Timeline", "Times"],
            "schedule_case": ["action_lists", "compared", "parse_times"],
            "schedule_picture": ["text_rows"],
            "schedule_table": ["checked", "RULES"],
            "sizes": ["BYTES", "dtypes", "ModelSize", "NONE", "parse_count", "TABLE"],
            "traffic": ["sent_bytes"],
        },
    )
