"""Which micro-batch fits, and which is the quickest, while the rows of a step stay the same."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "memory": ["limit_of_rank", "MemoryWatch", "peak_of_rank"],
            "remarks": ["refuse_sums", "remarks_on"],
            "report": ["how_to_use", "rows", "sentence", "to_json"],
            "search": ["divisors", "next_size"],
            "spec": ["RankReport", "TrialSpec"],
            "trial": ["judged", "SizeVerdict", "TrialEnd", "WORKER"],
            "tuner": ["CouldNotTune", "Tuner", "TuneRequest", "TuneResult"],
        },
    )
