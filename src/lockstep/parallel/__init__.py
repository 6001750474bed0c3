from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "determinism": ["BeforeWrites", "without_dropout", "WithoutChance"],
            "float8": ["check_float8", "filter_linear_layers", "find_first_last_linear_layers"],
            "gradient_mean": ["buckets", "GradientAllReduce"],
            "parallel_model": ["ParallelModel"],
            "recompute": ["apply_activation_checkpointing"],
        },
    )
