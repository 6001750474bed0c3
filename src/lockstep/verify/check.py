"""One check: the reference, how far rounding moves it, the candidate, and the verdict."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lockstep.parallel.autocast import DTYPES
from lockstep.verify.judge.decide import judge_repeat, judge_runs
from lockstep.verify.judge.tolerance import Tolerance, tolerance_of
from lockstep.verify.judge.verdict import Fault, Mismatch, ParityVerdict, RunFacts
from lockstep.verify.kept_trace import ReferenceRun, keep, kept_in, refuse_other_run
from lockstep.verify.runs import (
    CheckedProgram,
    CouldNotRun,
    RunArtifacts,
    RunStarter,
    ScriptRun,
    StartedRun,
    following,
    wait_for_all,
)
from lockstep.verify.spec import ProcessFacts, Role, RunSpec
from lockstep.verify.text import sentence_of_repeat
from lockstep.verify.trace.file import Trace, join_traces
from lockstep.verify.trace.items import ItemKind
from lockstep.verify.trace.measure import Measured
from lockstep.words import count, two_digits

DEPENDS_ON_RANKS = (
    "The script computes its {what} from the number of processes, which was {count} in the reference ({by})."
)
SEEN_WITH_ACCELERATOR = "accelerator.num_processes, and len() of loaders"
SEEN_WITHOUT_ACCELERATOR = "torch.distributed.get_world_size() and WORLD_SIZE"
FILLED_UP = (
    "Several ranks fill such a round up with rows of the epoch's beginning, which one process does not read."
)
IN_TURN = "The reference trained on the batches of {ranks} ranks in turn, and averaged their gradients."
WHOLE_BATCH = {
    "same": "On all of them as one batch it has the same gradients in step 1.",
    "other": (
        "On all of them as one batch, the gradient of `{name}` in step 1 is off by {distance} of its norm. So the loss "
        "is not a mean over rows, or a layer such as BatchNorm looks at the whole batch: {ranks} ranks minimise "
        "another function than one process. `loss-differs` in the docs says what to do."
    ),
    "draws": "One batch of all of them was not compared, as random numbers are drawn with each batch (dropout).",
    "unknown": "One batch of all of them was not compared: they cannot be joined, or the script refuses it.",
}
COMPUTED_FROM_BATCH = {ItemKind.BATCH, ItemKind.OUTPUT, ItemKind.LOSS}
OWN_GENERATOR = (
    "Does the script draw from a generator of its own with each batch? One process draws for all ranks from one "
    "sequence: seed it with the number of the batch over all ranks, or use the global one."
)


@dataclass(frozen=True)
class Request:
    """What is to be checked.

    Attributes:
        nproc: Ranks of the candidate.
        parallel: The words for its models; None: those of the script.
        mixed_precision: Likewise.
        reference: Words for the models of a reference on as many ranks; None: one plain process.
        record: Where to keep the trace of the reference.
        against: A trace that was kept, in the place of the reference.
        flags: Further ones for `lockstep launch`.
    """

    program: CheckedProgram
    folder: Path
    nproc: int = 2
    parallel: str | None = None
    mixed_precision: str | None = None
    steps: int = 3
    seed: int = 0
    reference: str | None = None
    record: Path | None = None
    against: Path | None = None
    flags: tuple[str, ...] = ()
    timeout_s: float = 3600.0


class ParityCheck:
    """Makes the runs of a request, one after another or side by side.

    Args:
        tell: Gets a few words on what is being done.
        start: Starts a run; None: in processes of its own.
    """

    def __init__(
        self,
        request: Request,
        tell: Callable[[str], None] = lambda what: None,
        start: RunStarter | None = None,
    ) -> None:
        self._request = request
        self._starter = start or self._processes
        self._tell = tell
        self._runs = 0

    def verdict(self) -> ParityVerdict:
        """Compare.

        Raises:
            CouldNotRun: there is no answer; the message says why.
            ConfigError: what was asked for is not possible.
        """
        request = self._request
        reference = (
            kept_in(request.against, request.seed, request.steps)
            if request.against is not None
            else self._make_reference()
        )
        verdict = self._compared(reference)
        # Told of the candidate's processes, one process may make the same rates and batches as they do.
        is_plain = request.reference is None and request.against is None and reference.facts.data_ranks > 1
        if is_plain and _differs_in(verdict) is not None:
            with_ranks = self._make_reference(reports_ranks=True)
            what = "learning rate" if _differs_in(verdict) is ItemKind.RATE else "batch size"
            by = SEEN_WITHOUT_ACCELERATOR if request.program.wrapped else SEEN_WITH_ACCELERATOR
            second = self._compared(
                with_ranks, (DEPENDS_ON_RANKS.format(what=what, count=request.nproc, by=by),)
            )
            if _differs_in(second) is None:
                reference, verdict, is_plain = with_ranks, second, False
            elif what == "learning rate" and reference.facts.sets_rate:
                raise CouldNotRun(
                    "The script sets its learning rate without a scheduler, from a count of its own, but one "
                    f"process has {reference.facts.data_ranks} times as many batches. Compare with several "
                    "processes instead: --reference ddp."
                )
        if not reference.facts.knows_rows and _has_unknown_rows(verdict):
            raise CouldNotRun(
                "The script picks the rows of each process itself, so one process does not know the rows of the "
                "others. Let torch's DistributedSampler pick them: sampler=DistributedSampler(data)."
            )
        if is_plain and verdict.findings and verdict.findings[0].item.kind in COMPUTED_FROM_BATCH:
            verdict = replace(verdict, notes=(*verdict.notes, OWN_GENERATOR))
        if request.record is not None:
            keep(reference, request.record)
        if is_plain and verdict.agrees and not request.program.wrapped:
            verdict = replace(verdict, notes=(*verdict.notes, self._compare_whole_batches(reference)))
        return verdict

    def _compare_whole_batches(self, reference: ReferenceRun) -> str:
        """Say whether one process computes the same of the batches of all ranks as one."""
        ranks, name, distance = reference.facts.data_ranks, "", ""
        found = "draws" if reference.facts.draws else "unknown"
        if not reference.facts.draws:
            self._tell("reference: on whole batches")
            spec = self._spec(Role.WHOLE, self._folder(), steps=1, trace=str(reference.trace.path))
            with suppress(CouldNotRun, ValueError):
                [left] = wait_for_all([self._start(spec)])
                ratio, worst = _farthest_gradient(left, reference.tolerance)
                found = "same" if ratio <= 1 else "other"
                name, distance = (
                    worst.item.name,
                    two_digits(reference.tolerance[worst.item.key].distance(worst.sums)),
                )
        words = WHOLE_BATCH[found].format(name=name, distance=distance, ranks=ranks)
        return f"{IN_TURN.format(ranks=ranks)} {words}"

    def _compared(self, reference: ReferenceRun, notes: tuple[str, ...] = ()) -> ParityVerdict:
        """Run the candidate and compare it with a reference."""
        request = self._request
        self._tell(f"candidate: {request.nproc} processes")
        folder = self._folder()
        allowed = folder.with_suffix(".json")
        reference.tolerance.write(allowed)
        spec = self._spec(
            Role.CANDIDATE,
            folder,
            steps=reference.facts.made,
            trace=str(reference.trace.path),
            allowed=str(allowed),
            is_alone=False,
        )
        failure: CouldNotRun | None = None
        try:
            # A candidate that stopped has made steps before: what differs there is the better answer.
            [left] = wait_for_all([self._start(spec)])
        except CouldNotRun as error:
            if error.left is None:
                raise
            left, failure = error.left, error
        refuse_other_run(reference.facts, left.facts[0], request.against, request.nproc)
        facts = self._facts(reference, left, notes)
        found = {
            one.rank: Trace(path)
            for one in left.facts
            if (path := left.folder / f"found-{one.rank}.safetensors").exists()
        }
        if failure is not None:
            facts = replace(facts, notes=(*facts.notes, _failure_note(left)))
        verdict = judge_runs(
            reference.trace, reference.tolerance, left.measured(), facts, found, failure is None
        )
        # Steps that agree say nothing about the one in which it failed.
        if failure is not None and verdict.agrees:
            raise failure
        return verdict

    # The reference ----------------------------------------------------------------------------------------

    def _make_reference(self, reports_ranks: bool = False) -> ReferenceRun:
        request = self._request
        is_alone = request.reference is None
        self._tell("reference: one process" if is_alone else f"reference: {request.nproc} processes")
        spec = self._spec(
            Role.REFERENCE,
            self._folder(),
            is_alone=is_alone,
            reports_ranks=reports_ranks,
            parallel=request.parallel if is_alone else request.reference,
        )
        [left] = wait_for_all([self._start(spec)])
        facts = left.facts[0]
        if facts.refused:
            raise CouldNotRun(facts.refused)
        trace = self._trace_of(left)
        if not left.made:
            raise CouldNotRun(_without_steps(facts, request))
        again = {"trace": str(trace.path), "steps": left.made}
        # The runs that follow need nothing of each other, only the trace: they go side by side.
        roles = [Role.REPEAT, Role.DISTURBED]
        if facts.mixed_precision != "no":
            roles.append(Role.HALF)
        self._tell("reference: what rounding changes")
        artifacts = dict(
            zip(
                roles,
                wait_for_all([self._start(following(spec, role, self._folder(), **again)) for role in roles]),
                strict=True,
            )
        )
        self._refuse_unrepeatable(trace, facts, artifacts[Role.REPEAT])
        dtype = DTYPES.get(facts.mixed_precision, torch.float32) if Role.HALF in artifacts else torch.float32
        half = artifacts[Role.HALF].measured() if Role.HALF in artifacts else ()
        return ReferenceRun(
            trace, tolerance_of(trace, artifacts[Role.DISTURBED].measured(), half, dtype), facts
        )

    def _trace_of(self, left: RunArtifacts) -> Trace:
        paths = [left.folder / f"trace-{one.rank}.safetensors" for one in left.facts]
        # Each rank has recorded what it holds: joined, they are whole tensors.
        return Trace(paths[0]) if len(paths) == 1 else join_traces(paths, left.folder / "trace.safetensors")

    def _refuse_unrepeatable(self, trace: Trace, facts: ProcessFacts, repeat: RunArtifacts) -> None:
        verdict = judge_repeat(trace, repeat.measured(), RunFacts(data_ranks=facts.data_ranks))
        if verdict.agrees:
            return
        raise CouldNotRun(sentence_of_repeat(verdict))

    # Runs -------------------------------------------------------------------------------------------------

    def _folder(self) -> Path:
        """Return the folder of the next run."""
        self._runs += 1
        return self._request.folder / f"run-{self._runs}"

    def _spec(self, role: Role, folder: Path, **changes: object) -> RunSpec:
        request = self._request
        fields = {
            "steps": request.steps,
            "parallel": request.parallel,
            "mixed_precision": request.mixed_precision,
            **changes,
        }
        return RunSpec(
            role=role,
            folder=str(folder),
            seed=request.seed,
            ranks=request.nproc,
            as_accelerate=request.program.as_accelerate,
            is_module=request.program.is_module,
            wrapped=request.program.wrapped,
            **fields,  # type: ignore[arg-type]
        )

    def _start(self, spec: RunSpec) -> StartedRun:
        return self._starter(spec)

    def _processes(self, spec: RunSpec) -> ScriptRun:
        request = self._request
        flags = ["--nproc", str(request.nproc), *request.flags]
        return ScriptRun(spec, request.program, flags, timeout_s=request.timeout_s)

    def _facts(self, reference: ReferenceRun, left: RunArtifacts, further: tuple[str, ...]) -> RunFacts:
        request, first = self._request, left.facts[0]
        notes = dict.fromkeys((*reference.facts.notes, *first.notes, *further))
        if reference.facts.made < request.steps:
            notes[_end_note(reference.facts)] = None
        return RunFacts(
            reference=request.reference or "",
            candidate=first.parallel if first.parallel != "auto" else "ddp",
            nproc=request.nproc,
            data_ranks=first.data_ranks,
            accumulation_steps=first.accumulation,
            axes={name: size for name, (size, _) in first.axes.items() if name in ("pp", "cp", "tp")},
            dtype="fp32" if first.mixed_precision == "no" else first.mixed_precision,
            steps_asked=request.steps,
            steps_compared=min(reference.facts.made, left.made),
            notes=tuple(notes),
        )


def _farthest_gradient(left: RunArtifacts, tolerance: Tolerance) -> tuple[float, Measured]:
    """Return that of step 1 which is the farthest from the reference, by what is allowed. ValueError: there is none."""
    gradients = [
        (tolerance[one.item.key].ratio(one.sums), one)
        for one in left.measured()
        if (one.item.step, one.item.kind) == (1, ItemKind.GRADIENT) and one.item.key in tolerance
    ]
    return max(gradients, key=lambda one: one[0])


def _differs_in(verdict: ParityVerdict) -> ItemKind | None:
    """Return what differs first, if it is a learning rate, or the shape of a batch."""
    first = verdict.findings[0] if verdict.findings else None
    if first is None or not (first.item.kind is ItemKind.RATE or _is_other_batch_size(first)):
        return None
    return first.item.kind


def _has_unknown_rows(verdict: ParityVerdict) -> bool:
    """Return whether ranks begin with rows of their own choice; what all of them read alike is no such choice."""
    first = verdict.findings[0] if verdict.findings else None
    if first is None or first.item.kind is not ItemKind.BATCH or first.item.step > 1:
        return False
    return first.item.data_rank == 0 or not first.looks_like


def _is_other_batch_size(finding: Mismatch) -> bool:
    return finding.item.kind is ItemKind.BATCH and finding.fault is Fault.SHAPE


def _failure_note(left: RunArtifacts) -> str:
    """Note that the candidate came to no end, which a difference before that may explain."""
    failed = next((one for one in left.facts if one.failed), None)
    if failed is None:
        return "The candidate did not end in time, so only the steps that it had computed were compared."
    return f"The candidate failed on rank {failed.rank}; the steps that it had computed were compared. {failed.failed}"


def _end_note(facts: ProcessFacts) -> str:
    """Note that the reference made fewer steps than were asked for."""
    if facts.ended:
        return f"Steps end after {facts.made}: {facts.ended}. {FILLED_UP}"
    return f"The script itself makes no more than {count(facts.made, 'step')}."


def _without_steps(facts: ProcessFacts, request: Request) -> str:
    if facts.ended:
        return (
            f"No step could be compared: {facts.ended}. {FILLED_UP} Give the script at least {facts.data_ranks} whole "
            "batches for each epoch, or check with fewer processes."
        )
    script = request.program.words[0]
    seen = "when accelerator.prepare() gets them; of a script that spreads its models itself with --wrapped"
    if request.program.wrapped:
        seen = "when a model with parameters of an optimizer is called"
    return (
        f"{script} ended before its first optimizer step. Check a script that trains, with arguments with which "
        f"it trains. Models and optimizers are found {seen}."
    )
