"""What a run does, in numbers: measured in every step, written to the run's folder."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "assembler": ["StepAssembler"],
            "batches": ["tokens_in"],
            "flops": ["FlopCounts"],
            "journal": ["Journal", "text_of"],
            "latest": ["latest_numbers"],
            "peaks": ["peak_of", "peak_of_name", "precision_of", "TABLE"],
            "run_folder": ["RunFolder"],
            "step": ["StepMeasures"],
        },
    )
