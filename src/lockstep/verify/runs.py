"""The runs of one check: started, waited for, and what each has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from lockstep.errors import LockstepError
from lockstep.script.process import ScriptProcess
from lockstep.verify.spec import ProcessFacts, Role, RunSpec
from lockstep.verify.trace.measure import Measured, read_measured

WORKER = "lockstep.verify.collect.worker"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""What a script that spreads its models itself asks for, of a process that is alone."""
STARTS_ITSELF = "environment variable RANK expected"


class CouldNotRun(LockstepError):
    """A run that a check needs has failed. The attribute ``left`` has what the run had written until then, or is
    None.

    Examples:
        ```python
        # test_model.py
        import pytest
        import torch
        from lockstep.testing import CouldNotRun, compare_parity

        def make():
            model = torch.nn.Linear(4, 1)
            batches = [torch.randn(8, 4) for _ in range(2)]
            return model, torch.optim.SGD(model.parameters(), lr=0.1), batches, loss

        def loss(model, batch):
            raise RuntimeError("no such file")

        def test_a_run_that_fails_is_no_answer():
            with pytest.raises(CouldNotRun):
                compare_parity(make, nproc=2, steps=1)
        ```
    """

    left: RunArtifacts | None = None


@dataclass(frozen=True)
class CheckedProgram:
    """What is checked: ``words`` are the script, or the module, and its arguments."""

    words: tuple[str, ...]
    is_module: bool = False
    as_accelerate: bool = False
    wrapped: bool = False


@dataclass(frozen=True)
class RunArtifacts:
    """What a run has left in ``folder``."""

    folder: Path
    facts: tuple[ProcessFacts, ...]

    @property
    def made(self) -> int:
        """Steps that all its processes made."""
        return min(one.made for one in self.facts)

    def measured(self) -> Iterator[Measured]:
        """Return what all its ranks have compared."""
        return read_measured(sorted(self.folder.glob("measured-*.jsonl")))


class StartedRun(Protocol):
    """A run that was started."""

    def wait(self) -> RunArtifacts:
        """Wait, and return what it has left. Raises CouldNotRun."""

    def end(self) -> None:
        """End its processes, if they still run."""


class ScriptRun:
    """One run of a script, in processes of its own, whose output goes to a file.

    Args:
        processes: Started by `lockstep launch`, unless the run is alone.
        flags: For that command.
        environment: Variables beside those of this process.
        timeout_s: After which the run is ended.
    """

    def __init__(
        self,
        spec: RunSpec,
        program: CheckedProgram,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        self.spec = spec
        self.folder = Path(spec.folder)
        self.folder.mkdir(parents=True)
        self._timeout_s = timeout_s
        words = [str(spec.write(self.folder / "spec.json")), *program.words]
        alone: dict[str, str] = {}
        if spec.is_alone and spec.wrapped:
            alone = ALONE | ({"WORLD_SIZE": str(spec.ranks)} if spec.reports_ranks else {})
        self._process = ScriptProcess(
            ["-m", WORKER, *words] if spec.is_alone else ScriptProcess.launched(WORKER, words, flags),
            self.folder / "output.txt",
            {**alone, **(environment or {})},
            timeout_s,
        )

    def wait(self) -> RunArtifacts:
        """Wait, and return what it has left.

        Raises:
            CouldNotRun: it failed, or took too long.
        """
        code = self._process.wait()
        if code is None:
            raise self._could_not(
                f"{self.title} has not made {self.spec.steps} steps in {self._timeout_s:g} s. Give it more time "
                f"with --timeout, or ask for fewer steps with --steps.{self._process.tail()}"
            )
        facts = ProcessFacts.read_all(self.folder)
        if code or not facts:
            raise self._could_not(self._failure(code))
        return RunArtifacts(self.folder, tuple(facts))

    def _could_not(self, why: str) -> CouldNotRun:
        error = CouldNotRun(why)
        if facts := ProcessFacts.read_all(self.folder):
            error.left = RunArtifacts(self.folder, tuple(facts))
        return error

    def end(self) -> None:
        """End its processes, if they still run."""
        self._process.end()

    @property
    def title(self) -> str:
        """For messages."""
        return TITLES[self.spec.role]

    def _failure(self, code: int) -> str:
        tail = self._process.tail()
        if self._process.ran_out_of_memory(code):
            what = f"{self.title} ran out of memory"
            if self.spec.is_alone:
                return (
                    f"{what}: the whole model does not fit this one process. Check a smaller model of the same kind, "
                    "such as one with fewer layers, or compare with another strategy: --reference zero=3."
                    f"{tail}"
                )
            return f"{what}. Check a smaller model of the same kind, or more ranks.{tail}"
        if STARTS_ITSELF in self._process.output() and not self.spec.wrapped:
            return (
                f"{self.title} failed, because the script starts its process group itself. Check scripts that spread "
                f"their models themselves with --wrapped.{tail}"
            )
        return f"{self.title} failed: {self._process.how_it_failed(code)}{tail}"


TITLES = {
    Role.REFERENCE: "The reference",
    Role.REPEAT: "The second run of the reference",
    Role.DISTURBED: "The disturbed run of the reference",
    Role.HALF: "The run of the reference in half precision",
    Role.WHOLE: "The run of the reference on whole batches",
    Role.CANDIDATE: "The candidate",
}


def wait_for_all(runs: Sequence[StartedRun]) -> list[RunArtifacts]:
    """Wait for runs that were started together; if one fails, the others are ended."""
    try:
        return [run.wait() for run in runs]
    finally:
        for run in runs:
            run.end()


def following(spec: RunSpec, role: Role, folder: Path, **changes: object) -> RunSpec:
    """Return the specification of another run of the same check."""
    return replace(spec, role=role, folder=str(folder), **changes)  # type: ignore[arg-type]


RunStarter = Callable[[RunSpec], StartedRun]
"""Starts a run."""
