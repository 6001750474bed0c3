"""All trials of one script: what its steps are made of, then other sizes, until the largest that fits is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.tune.search import divisors, next_size
from lockstep.tune.spec import RankReport, TrialSpec
from lockstep.tune.trial import SizeTrial, TrialEnd, judged, run_trial

TrialRun = Callable[[TrialSpec], TrialEnd]
"""Makes one trial."""


class CouldNotTune(LockstepError):
    """There is no answer; the message says why, and what to do."""


@dataclass(frozen=True)
class TuneRequest:
    """What is to be tuned.

    Attributes:
        words: The script, or the module, and its arguments.
        folder: For what trials leave.
        global_batch: Rows of a step over all ranks; None: as the script has it.
        flags: For `lockstep launch`, with the number of processes.
        memory_limit: Bytes of each rank; None: what is free.
        timeout_s: For each trial.
    """

    words: tuple[str, ...]
    folder: Path
    is_module: bool = False
    as_accelerate: bool = False
    steps: int = 5
    seed: int = 0
    parallel: str | None = None
    global_batch: int | None = None
    memory_limit: int | None = None
    flags: tuple[str, ...] = ()
    timeout_s: float = 600.0


@dataclass(frozen=True)
class TuneResult:
    """What was found.

    Attributes:
        script: The facts of the script as it is, of rank 0.
        own: Its micro-batch and its accumulation steps.
        global_batch: Rows of a step over all ranks, the same in all trials.
        trials: By micro-batch.
        limit: Bytes of each rank, of the one that has the fewest; None: not known.
    """

    script: RankReport
    own: tuple[int, int]
    global_batch: int
    trials: tuple[SizeTrial, ...]
    limit: int | None

    @property
    def largest(self) -> SizeTrial | None:
        """The largest micro-batch that fits on every rank."""
        return max((one for one in self.trials if one.fits), key=lambda one: one.micro_batch, default=None)

    @property
    def quickest(self) -> SizeTrial | None:
        """The one with the most samples a second, of those that fit."""
        timed = [one for one in self.trials if one.fits and one.samples_per_s]
        return max(timed, key=lambda one: one.samples_per_s or 0.0, default=None)

    @property
    def as_it_is(self) -> SizeTrial | None:
        """That of the script's own size, if it was tried."""
        return next((one for one in self.trials if (one.micro_batch, one.accumulation) == self.own), None)


@dataclass
class Tuner:
    """Makes the trials of a request, one after another.

    Args:
        tell: Gets the number of trials that are over, and what is done now.
        run: Makes a trial; None: in processes of its own.
    """

    request: TuneRequest
    tell: Callable[[int, str], None] = lambda done, what: None
    run: TrialRun | None = None
    _trials: dict[int, SizeTrial] = field(default_factory=dict)
    _runs: int = 0

    def result(self) -> TuneResult:
        """Tune.

        Raises:
            CouldNotTune: there is no answer.
        """
        self.tell(0, "the script as it is")
        ended = self._ended(None)
        facts = self._facts_of_script(ended)
        micro, accumulation = facts.micro_batch or 0, facts.accumulation
        rows = self._rows_of_rank(facts)
        sizes = divisors(rows)
        start = max(size for size in sizes if size <= micro)
        # The script's own size divides its rows: the run from which they are known is a trial, too.
        if (start, rows // start) == (micro, accumulation):
            global_batch = rows * facts.data_ranks
            self._trials[micro] = judged(ended, micro, accumulation, global_batch, self.request.timeout_s)
        fits = {size: trial.fits for size, trial in self._trials.items()}
        while (size := next_size(sizes, start, fits)) is not None:
            self._trials[size] = self._tried(size, rows, facts)
            fits[size] = self._trials[size].fits
        trials = tuple(trial for _, trial in sorted(self._trials.items()))
        limits = [one.limit for trial in trials for one in trial.ranks if one.limit is not None]
        return TuneResult(
            facts, (micro, accumulation), rows * facts.data_ranks, trials, min(limits, default=None)
        )

    def _tried(self, size: int, rows: int, facts: RankReport) -> SizeTrial:
        """Try one size."""
        accumulation = rows // size
        self.tell(len(self._trials), f"micro-batch {size}, {accumulation} accumulation steps")
        ended = self._ended(size, accumulation, facts, rows * facts.data_ranks)
        self._refuse(ended.facts)
        trial = judged(ended, size, accumulation, rows * facts.data_ranks, self.request.timeout_s)
        if trial.fits:
            self._check_rows(trial, rows * facts.data_ranks)
        return trial

    def _ended(
        self,
        size: int | None,
        accumulation: int | None = None,
        facts: RankReport | None = None,
        global_batch: int | None = None,
    ) -> TrialEnd:
        request = self.request
        self._runs += 1
        spec = TrialSpec(
            folder=str(request.folder / f"trial-{self._runs}"),
            steps=request.steps,
            seed=request.seed,
            micro_batch=size,
            accumulation=accumulation,
            loader=None if facts is None else facts.loader,
            global_batch=global_batch,
            parallel=request.parallel,
            memory_limit=request.memory_limit,
            as_accelerate=request.as_accelerate,
            is_module=request.is_module,
        )
        if self.run is not None:
            return self.run(spec)
        return run_trial(spec, request.words, request.flags, request.timeout_s)

    # What the script says of itself ----------------------------------------------------------------------

    def _facts_of_script(self, ended: TrialEnd) -> RankReport:
        """Read the facts of rank 0. Raises CouldNotTune where there is nothing to tune."""
        self._refuse(ended.facts)
        script = self.request.words[0]
        facts = next((one for one in ended.facts if one.micro_batch is not None), None)
        if facts is None:
            raise CouldNotTune(self._without_batches(ended, script))
        trial = judged(ended, facts.micro_batch or 0, facts.accumulation, 0, self.request.timeout_s)
        if trial.verdict.value in ("failed", "no answer"):
            raise CouldNotTune(f"{script} failed as it is: {trial.why}{ended.tail}")
        if trial.fits and not facts.made:
            raise CouldNotTune(
                f"{script} ended before its first optimizer step. Tune a script that trains, with arguments with "
                "which it trains."
            )
        _refuse_own_counting(facts)
        return facts

    def _without_batches(self, ended: TrialEnd, script: str) -> str:
        if ended.code is None:
            return (
                f"{script} has not asked for a batch in {self.request.timeout_s:g} s. Give it more time with "
                "--timeout."
            )
        if ended.ran_out_of_memory or ended.is_killed or any(one.over for one in ended.facts):
            return (
                f"{script} ran out of memory before its first batch, so no micro-batch fits. Shard the model "
                f"(--parallel zero=3), or give it more memory.{ended.tail}"
            )
        if ended.code:
            return f"{script} failed as it is: {ended.how}{ended.tail}"
        return (
            f"{script} ended before it trained on a batch of a prepared loader. Tune a script that passes its "
            "loader to accelerator.prepare(), with arguments with which it trains."
        )

    def _refuse(self, ranks: Sequence[RankReport]) -> None:
        refused = next((one.refused for one in ranks if one.refused), None)
        if refused:
            raise CouldNotTune(refused)

    def _rows_of_rank(self, facts: RankReport) -> int:
        """Rows of a step on each rank with batches of its own. Raises CouldNotTune where they are not whole."""
        asked = self.request.global_batch
        if asked is None:
            return (facts.micro_batch or 0) * facts.accumulation
        if asked % facts.data_ranks:
            lower = asked - asked % facts.data_ranks
            raise CouldNotTune(
                f"--global-batch {asked} does not divide by the {facts.data_ranks} ranks that have batches of "
                f"their own. Ask for {lower or facts.data_ranks} or {lower + facts.data_ranks}."
            )
        return asked // facts.data_ranks

    def _check_rows(self, trial: SizeTrial, global_batch: int) -> None:
        """Raise CouldNotTune where a step was not made of the rows that it should have."""
        for one in trial.ranks:
            most = max(one.batches, default=0)
            if most > trial.accumulation:
                raise CouldNotTune(
                    f"With micro-batch {trial.micro_batch} the script made steps of {most} batches instead of "
                    f"{trial.accumulation}, because it counts them itself. {COUNT_BY_ACCUMULATE}"
                )
            if most < trial.accumulation:
                raise CouldNotTune(
                    f"With micro-batch {trial.micro_batch} no step had {trial.accumulation} batches, but {most} "
                    f"at most: an epoch has fewer than {global_batch} rows, or the script counts batches itself. "
                    f"Ask for a smaller global batch. {COUNT_BY_ACCUMULATE}"
                )
            wrong = next((rows for rows in one.rows if rows > global_batch), None)
            if wrong is not None:
                raise CouldNotTune(
                    f"With micro-batch {trial.micro_batch} a step had {wrong} rows instead of {global_batch}. "
                    "Tune a script in which all steps have the same number of batches."
                )


COUNT_BY_ACCUMULATE = (
    "Let Lockstep count: Accelerator(gradient_accumulation_steps=...), and the loop's body in "
    "`with accelerator.accumulate(model):`."
)


def _refuse_own_counting(facts: RankReport) -> None:
    """Raise CouldNotTune where a script decides itself how many batches make a step."""
    # It did not come as far as a batch.
    if not facts.batches:
        return
    made, asked = max(facts.batches), facts.accumulation
    if made > asked or (made < asked and not facts.uses_accumulate):
        raise CouldNotTune(
            f"The script makes a step of {made} batches, but asks for {asked} accumulation steps: it counts "
            f"batches itself, so another micro-batch would change its global batch. {COUNT_BY_ACCUMULATE}"
        )
    if made < asked:
        raise CouldNotTune(
            f"No step of the script has the {asked} batches that it accumulates: an epoch has only {made}. Give "
            "the script more data, or set a smaller gradient_accumulation_steps."
        )
