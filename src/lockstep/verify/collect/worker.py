"""``python -m lockstep.verify.collect.worker SPEC script ...``: one process of a run that is compared.

The script is run as it is. What looks on registers before it, and ends the process after the steps that were asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.observe.run_observer import RunObserver
from lockstep.runtime.seed import set_seed
from lockstep.script.inside import import_as_accelerate, run_observed
from lockstep.verify.collect.plain_calls import observe_backward
from lockstep.verify.collect.prepared import PreparedRun
from lockstep.verify.collect.wrapped import WrappedRun
from lockstep.verify.spec import RunSpec


def main(argv: list[str]) -> None:
    """Run what ``argv`` names behind the specification."""
    from lockstep.config.sources import process_environment

    spec, program = RunSpec.read(Path(argv[0])), argv[1:]
    if spec.as_accelerate:
        import_as_accelerate()
    rank = process_environment(need_rendezvous=False).rank
    if spec.wrapped:
        run: PreparedRun | WrappedRun = WrappedRun(spec, rank)
    else:
        run = PreparedRun(spec, rank)
    RunObserver.registered.append(run)
    observe_backward(run)
    set_seed(spec.seed)
    run_observed(run, program, spec.is_module)


if __name__ == "__main__":
    main(sys.argv[1:])
