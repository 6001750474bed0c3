"""Tests of one's own models: does a strategy compute on many ranks what one process computes?"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.testing.parity import ParityWorkers, check_parity, compare_parity
    from lockstep.testing.report import ParityError, ParityReport
    from lockstep.verify.runs import CouldNotRun

__all__ = [
    "CouldNotRun",
    "ParityError",
    "ParityReport",
    "ParityWorkers",
    "check_parity",
    "compare_parity",
]

__getattr__ = lazy_names(
    __name__,
    {
        "CouldNotRun": "lockstep.verify.runs",
        "DistributedTestError": "lockstep.testing.pool",
        "ParityError": "lockstep.testing.report",
        "ParityReport": "lockstep.testing.report",
        "ParityWorkers": "lockstep.testing.parity",
        "RANK_VARIABLES": "lockstep.testing.pool",
        "WorkerPool": "lockstep.testing.pool",
        "check_parity": "lockstep.testing.parity",
        "compare_parity": "lockstep.testing.parity",
        "free_port": "lockstep.testing.pool",
        "server_environment": "lockstep.testing.pool",
    },
)
