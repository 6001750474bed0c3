"""Whether a split model, or a script on many devices, computes what the whole one, or one process, computes.

Two proofs with one distance, one tolerance and one snapshot: that of the first batch (``proof.py``), and that of two
runs of a script (``check.py``, the command ``lockstep check``).
"""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "check": ["ParityCheck", "Request"],
            "compare": ["RoundingLimits", "compare_with_whole"],
            "judge.decide": ["judge_runs", "judge_repeat"],
            "judge.tolerance": ["Tolerance", "tolerance_of"],
            "judge.verdict": ["Fault", "Mismatch", "ParityVerdict", "Ratio", "RunFacts"],
            "kept_trace": ["ReferenceRun", "keep", "kept_in", "refuse_other_run"],
            "module_sums": ["Observations", "Observed", "observed"],
            "passes": ["ComparedBatch", "PassResult", "run_pass"],
            "rounding": ["FEW", "LARGE", "MULTIPLE", "Rounding", "disturbed"],
            "runs": ["CheckedProgram", "CouldNotRun", "RunArtifacts", "ScriptRun"],
            "snapshot": ["numbers", "Snapshot"],
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
            "trace.file": ["Trace"],
            "trace.items": ["ItemKind", "TraceItem"],
            "trace.measure": ["as_pairs", "as_regions", "Measured", "read_measured"],
            "trace.regions": ["region", "ShardAxes"],
            "trace.sinks": ["Recording", "TraceComparison"],
            "whole_model": ["Reference", "SplitModelState"],
        },
    )
