from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if TYPE_CHECKING:
    from lockstep.data.checks import is_iterable as is_iterable
    from lockstep.data.checks import lengths as lengths
else:
    __getattr__ = names_of_modules(
        __name__,
        {
            "batch_sharding": ["CutSamples", "GlobalBatch", "grouped", "rounds", "ShardPlan"],
            "checks": ["is_iterable", "lengths"],
            "dealing": ["Dealing"],
            "drawn": ["Drawing", "DrawnOrder"],
            "loader": ["PreparedLoader"],
            "order": ["announce_epoch", "find_distributed_sampler", "GlobalOrder", "initial_seed_of"],
            "pinned": ["batch_mover", "PinnedCopies"],
            "prepare": ["prepare_loader"],
            "rng": ["draw_privately", "Generators"],
        },
    )
