"""``python -m lockstep.tune.worker SPEC script ...``: one rank of a trial."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.observe.run_observer import RunObserver
from lockstep.runtime.seed import set_seed
from lockstep.script.inside import import_as_accelerate, run_observed
from lockstep.tune.observer import TrialObserver
from lockstep.tune.spec import TrialSpec


def main(argv: list[str]) -> None:
    """Run what ``argv`` names behind the specification."""
    from lockstep.config.sources import process_environment

    spec, program = TrialSpec.read(Path(argv[0])), argv[1:]
    if spec.as_accelerate:
        import_as_accelerate()
    trial = TrialObserver(spec, process_environment(need_rendezvous=False).rank)
    RunObserver.registered.append(trial)
    set_seed(spec.seed)
    run_observed(trial, program, spec.is_module)


if __name__ == "__main__":
    main(sys.argv[1:])
