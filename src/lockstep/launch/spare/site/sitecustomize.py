"""Turns an interpreter into a spare process: Python imports this before the script, where the launcher has put it on
the path.

What comes after the script's first line is Python's own doing: ``__main__``, ``sys.argv``, tracebacks and the end of
the process are those of ``python script.py``.
"""

import os
import sys

if "LOCKSTEP_SPARE" in os.environ:
    # The launcher asks whether Python comes here.
    if os.environ["LOCKSTEP_SPARE"] == "probe":
        os._exit(71)
    present = tuple(sys.modules)
    try:
        from lockstep.launch.spare.process import wait_for_round

        is_theirs = wait_for_round(os.path.dirname(os.path.abspath(__file__)), present)
    except BaseException:
        # Python would say so, and go on with the script.
        os._exit(70)
    # Python goes on as if there were no such module; from here on there is none.
    if not is_theirs:
        raise ImportError(name="sitecustomize")
