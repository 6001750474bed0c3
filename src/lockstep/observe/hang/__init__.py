"""Why a run stands still, and where it stops when it is asked to.

In every process: ``process`` (the one watch of it), ``worker`` (its threads, and the gate that holds the main thread
at a step boundary); what it says of itself: ``evidence`` (torch's flight recorder) and ``stacks`` (where
the user's code is), as ``records``. For all of them: ``coordinator``, to which they tell it; ``ranks`` (what is known
of each, and the boundary at which all stop); ``hangs``, which asks them, and decides by ``diagnosis``
(who is to blame, in one sentence) from ``waits`` (who waits for whom). ``host`` runs it on rank 0 if there is no
launcher of ours.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if TYPE_CHECKING:
    from lockstep.observe.hang.process import ProcessWatch as ProcessWatch
    from lockstep.observe.hang.process import watch_process as watch_process
else:
    __getattr__ = names_of_modules(
        __name__,
        {
            "coordinator": ["Coordinator"],
            "diagnosis": ["diagnose", "Finding", "SILENCE", "Silent"],
            "evidence": ["gather_evidence"],
            "gate": ["StopGate"],
            "hangs": ["HangJudge", "WatchSettings"],
            "process": ["ProcessWatch", "watch_process"],
            "ranks": [
                "numbers_of",
                "totals_of_ranks",
                "WatchedRank",
            ],
            "processes": ["machine_of_process", "process_state", "ProcessState"],
            "records": ["Evidence", "PendingCollective", "SourceLine"],
            "wording": ["named"],
            "worker": ["json_numbers", "StopSignals", "WorkerWatch"],
        },
    )
