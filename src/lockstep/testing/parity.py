"""``check_parity``: what ``lockstep check`` proves of a script, proved of a model in a test."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from lockstep.errors import UsageError
from lockstep.testing.case import MAX_PROCESSES, CaseSettings, ParityCase, function_of
from lockstep.testing.pool import DistributedTestError, WorkerPool, module_of
from lockstep.testing.report import ParityReport
from lockstep.testing.training import run_case
from lockstep.verify.check import ParityCheck, Request
from lockstep.verify.judge.verdict import RunFacts
from lockstep.verify.runs import TITLES, CheckedProgram, CouldNotRun, RunArtifacts
from lockstep.verify.spec import ProcessFacts, RunSpec
from lockstep.verify.text import named, place
from lockstep.verify.trace.measure import read_measured
from lockstep.words import of_ranks

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ParityWorkers:
    """A pool of processes that check one case after another, without importing torch each time; a context manager.

    The processes start when they are first needed. Each has one thread and no GPU. They end with this object, or with
    this process.

    Args:
        timeout_s: The seconds that a run of one case may take. Then it is ended, and the error names its ranks.
        preload: Modules that are imported once for all processes, beside torch, such as ``["transformers"]``. Only
            the first pool of a process can preload modules.

    Examples:
        ```python
        # test_model.py
        import torch
        from lockstep.testing import ParityWorkers

        def make():
            model = torch.nn.Linear(4, 1)
            batches = [torch.randn(8, 4) for _ in range(2)]
            return model, torch.optim.SGD(model.parameters(), lr=0.1), batches, loss

        def loss(model, batch):
            return model(batch).square().mean()

        def test_every_stage_computes_what_one_process_computes():
            with ParityWorkers(timeout_s=60) as workers:  # closes them; workers.close() does, too
                for stage in (1, 3):
                    workers.check_parity(make, parallel=f"zero={stage}", steps=1)
                assert workers.compare_parity(make, parallel="ddp", steps=1).agrees
        ```
    """

    def __init__(self, *, timeout_s: float = 120.0, preload: Sequence[str] = ()) -> None:
        self.timeout_s = timeout_s
        self._pool = WorkerPool(MAX_PROCESSES, preload)
        # Else multiprocessing would wait for them at exit.
        atexit.register(self._pool.close)

    def __enter__(self) -> ParityWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. The end of a ``with`` block does it, too."""
        self._pool.close()
        atexit.unregister(self._pool.close)

    def compare_parity(self, make: Callable[[], object], **settings: Unpack[CaseSettings]) -> ParityReport:
        """Do what the function ``compare_parity`` does, in these processes. ``make`` and ``settings`` are the same."""
        case = ParityCase.of(make, **settings)
        with tempfile.TemporaryDirectory(prefix="lockstep-parity-") as folder:
            request = Request(
                program=CheckedProgram((f"make() ({case.name})",)),
                folder=Path(folder),
                nproc=case.nproc,
                parallel=case.parallel,
                mixed_precision=case.mixed_precision,
                steps=case.steps,
                seed=case.seed,
                reference=case.reference,
                timeout_s=self.timeout_s,
            )
            check = ParityCheck(request, start=lambda spec: _PoolRun(self._pool, case, spec, self.timeout_s))
            return ParityReport(check.verdict())

    def check_parity(self, make: Callable[[], object], **settings: Unpack[CaseSettings]) -> ParityReport:
        """Do what the function ``check_parity`` does, in these processes. ``make`` and ``settings`` are the same.

        Raises:
            ParityError: a tensor differs. The message is the report.
        """
        # With it pytest shows the test's own line.
        __tracebackhide__ = True
        report = self.compare_parity(make, **settings)
        report.raise_if_differs()
        return report


def compare_parity(make: Callable[[], object], **settings: Unpack[CaseSettings]) -> ParityReport:
    """Train a model on ``nproc`` ranks and in one process, on CPUs, and compare every tensor of the two runs.

    It compares batches, outputs of modules and their gradients, the loss, gradients of parameters, their norm and the
    clipped gradients, learning rates, updates and buffers. It computes how far two tensors may be apart: as far as
    they move in one process when weights and inputs are changed by one rounding step.

    Args:
        make: A function that returns ``model, optimizer, batches, loss``, the same ones in each call. It stands at
            the top level of a module, because other processes import it. Use ``functools.partial`` to give it
            arguments. ``batches`` is a list of batches or a DataLoader, as one process would read it. On several
            ranks, rank 0 gets the first batch, rank 1 the second, and so on. ``loss(model, batch)`` returns a 0-d
            tensor. If ``loss`` is None, it is ``model(**batch).loss``.
        settings: By name:

            - ``parallel``: how the ranks spread the model, as ``Accelerator`` takes it: ``"zero=3"``, ``"ddp tp=2"``.
              Default: ``"ddp"``.
            - ``nproc``: the number of ranks; by default 2.
            - ``steps``: the number of optimizer steps to compare; by default 3.
            - ``mixed_precision``: "no" (the default), "bf16" or "fp16" for the ranks; the one process computes in
              fp32.
            - ``gradient_accumulation_steps``: the number of batches of each rank in one step; by default 1.
            - ``max_grad_norm``: gradients are clipped to this norm. None (the default): they are not clipped.
            - ``seed``: the seed of the generators in all runs, set before ``make`` is called; by default 0.
            - ``reference``: compare with another run on ``nproc`` ranks, not with one process. This is the
              ``parallel`` of that run.

    Raises:
        ConfigError: an argument is not allowed.
        UsageError: ``make`` cannot be imported, or does not return these four values.
        CouldNotRun: a run failed or hung, or it gives other numbers when it is repeated, so there is no answer.

    Examples:
        ```python
        # test_model.py
        import torch
        from lockstep.testing import compare_parity

        def make():
            model = torch.nn.Linear(4, 1)
            batches = [torch.randn(8, 4) for _ in range(2)]
            return model, torch.optim.SGD(model.parameters(), lr=0.1), batches, loss

        def loss(model, batch):
            return model(batch).square().mean()

        def test_two_ranks_compute_what_one_computes():
            report = compare_parity(make, parallel="zero=3", nproc=2, steps=1)
            assert report.agrees, report.sentence
        ```
    """
    with ParityWorkers() as workers:
        return workers.compare_parity(make, **settings)


def check_parity(make: Callable[[], object], **settings: Unpack[CaseSettings]) -> ParityReport:
    """Do what ``compare_parity`` does, and raise an error if a tensor differs.

    Args:
        make: As in ``compare_parity``.
        settings: As in ``compare_parity``.

    Raises:
        ParityError: a tensor differs. The message is the report.
        ConfigError, UsageError, CouldNotRun: as in ``compare_parity``.

    Examples:
        ```python
        # test_model.py
        import torch
        from lockstep.testing import check_parity

        def make():
            model = torch.nn.Linear(4, 1)
            batches = [torch.randn(8, 4) for _ in range(2)]
            return model, torch.optim.SGD(model.parameters(), lr=0.1), batches, loss

        def loss(model, batch):
            return model(batch).square().mean()

        def test_two_ranks_compute_what_one_computes():
            check_parity(make, parallel="zero=2", nproc=2, steps=1)
        ```
    """
    __tracebackhide__ = True
    with ParityWorkers() as workers:
        return workers.check_parity(make, **settings)


class _PoolRun:
    """One run of a case in warm processes."""

    def __init__(self, pool: WorkerPool, case: ParityCase, spec: RunSpec, timeout_s: float) -> None:
        self._pool, self._case, self._spec, self._timeout_s = pool, case, spec, timeout_s
        self._folder = Path(spec.folder)

    def wait(self) -> RunArtifacts:
        """Make it. Raises CouldNotRun, or UsageError for what ``make`` has returned."""
        self._folder.mkdir(parents=True)
        try:
            refused, *_ = self._pool.run(
                run_case,
                1 if self._spec.is_alone else self._spec.ranks,
                self._case,
                self._spec,
                timeout_s=self._timeout_s,
                title=TITLES[self._spec.role],
                modules=[module_of(function_of(self._case.make))],
            )
        except DistributedTestError as error:
            raise CouldNotRun(f"{error}{self._progress()}") from None
        if refused is not None:
            raise UsageError(refused)
        return RunArtifacts(self._folder, tuple(ProcessFacts.read_all(self._folder)))

    def end(self) -> None:
        """Do nothing: it has ended."""

    def _progress(self) -> str:
        """Return where each rank stood, as far as that can be seen, and which is behind."""
        measured = [list(read_measured([path])) for path in sorted(self._folder.glob("measured-*.jsonl"))]
        last = {of_rank[-1].rank: (of_rank[-1].item, len(of_rank)) for of_rank in measured if of_rank}
        if not last:
            return ""
        places = [
            f"rank {rank}: {place(item)}, {named(item, RunFacts())}" for rank, (item, _) in last.items()
        ]
        counts = [count for _, count in last.values()]
        behind = [rank for rank, (_, count) in last.items() if count == min(counts) < max(counts)]
        begins = f"Behind the others: {of_ranks(behind)}. " if behind else ""
        return f"\n{begins}Compared last by {'; '.join(places)}."
