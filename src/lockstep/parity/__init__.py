"""Whether a script computes on many devices what it computes on one: two runs of it, compared tensor by tensor."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "check": ["ParityCheck", "Request"],
            "reference": ["ReferenceRun", "keep", "kept_in", "refuse_other_run"],
            "runs": ["CheckedProgram", "CouldNotRun", "RunArtifacts", "ScriptRun"],
            "spec": ["ProcessFacts", "RunSpec"],
            "text": [
                "distances",
                "named",
                "remarks",
                "rows",
                "sentence",
                "sentence_of_repeat",
                "TITLES",
                "to_json",
            ],
        },
    )
