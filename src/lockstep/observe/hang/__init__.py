"""Why a run stands still, and where it stops when it is asked to.

In every process: ``process`` (the one watch of it), ``worker`` (its threads, and the gate that holds the main thread
at a step boundary), ``signals``; what it says of itself: ``evidence`` (torch's flight recorder) and ``stacks`` (where
the user's code is), as ``records``. For all of them: ``coordinator``, which asks and decides, from ``ranks`` (what is
known of each, which are slow, and the boundary at which all stop); ``diagnosis`` (who is to blame, in one sentence)
from ``waits`` (who waits for whom).
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.observe.hang.process import ProcessWatch as ProcessWatch
    from lockstep.observe.hang.process import watch_process as watch_process
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "ProcessWatch": "lockstep.observe.hang.process",
            "watch_process": "lockstep.observe.hang.process",
        },
    )
