"""``python -m lockstep.replay.worker SPEC script ...``: the process that makes one step again."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lockstep.observe.run_observer import RunObserver
from lockstep.replay.run import ReplayedRun, ReplaySpec
from lockstep.script.inside import import_as_accelerate, of_script, run_script


def main(argv: list[str]) -> None:
    """Run what ``argv`` names behind the specification."""
    spec, program = ReplaySpec.read(Path(argv[0])), argv[1:]
    if spec.as_accelerate:
        import_as_accelerate()
    run_replay(ReplayedRun(spec), program, spec.is_module)


def run_replay(run: ReplayedRun, program: list[str], is_module: bool = False) -> None:
    """Run the script; it ends the process, or leaves the verdict when it ends itself."""
    torch.set_num_threads(run.facts.threads)
    RunObserver.registered.append(run)
    try:
        # Anomaly mode notes the line of each node; its own check would raise at the first NaN.
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            run_script(program, is_module)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    except Exception as error:
        raise error.with_traceback(of_script(error.__traceback__)) from error.__cause__
    run.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
