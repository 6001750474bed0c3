"""``python -m lockstep.parity.collect.worker SPEC script ...``: one process of a run that is compared.

The script is run as it is. What looks on registers before it, and ends the process after the steps that were asked for.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from lockstep.config.options import Options
from lockstep.config.parallel import Parallel
from lockstep.config.world import BatchSizes, axes_of
from lockstep.parallel.determinism import without_dropout
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parity.collect.collector import RunCollector
from lockstep.parity.collect.disturb import DisturbedInputs, disturb_weights
from lockstep.parity.collect.place import BatchPlace
from lockstep.parity.collect.plain_calls import keep_gradients, see_backward
from lockstep.parity.collect.trainers import accumulate_more
from lockstep.parity.collect.virtual_ranks import AccumulatedRanks, VirtualRanks
from lockstep.parity.collect.watch_sources import SourceWatch
from lockstep.parity.judge.tolerance import Tolerance
from lockstep.parity.spec import ProcessFacts, Role, RunSpec
from lockstep.parity.trace.file import Trace
from lockstep.parity.trace.regions import ShardAxes
from lockstep.parity.trace.sinks import Recording, Sink, TraceComparison
from lockstep.preparation.observers import ObservedRun, RunObserver
from lockstep.runtime.seed import set_seed

AXES = ("pp", "replicate", "shard", "cp", "tp")
NO_DROPOUT = (
    "Dropout was off in both runs: ranks that share a model's layers draw masks of their own under {words}."
)


class CheckedRun(RunCollector):
    """One process of a run.

    Args:
        rank: Of this process, as the launcher says; 0 where it is alone.
    """

    def __init__(self, spec: RunSpec, rank: int, sources: SourceWatch) -> None:
        self._spec = spec
        self._sources = sources
        self._rank = rank
        self._facts = ProcessFacts(rank=rank)
        super().__init__(_sink(spec, rank), spec.steps, lambda made: self.end())

    # What the script asks for, and what it gets -----------------------------------------------------------

    def options(self, options: Options) -> Options:
        spec = self._spec
        parallel = options.parallel if spec.parallel is None else Parallel.parse(spec.parallel)
        precision = spec.mixed_precision or str(options.mixed_precision)
        axes = axes_of(parallel, spec.ranks)
        self._facts = replace(
            self._facts,
            parallel=str(parallel),
            mixed_precision=precision,
            data_ranks=axes.data,
            accumulation=options.accumulation.num_steps or 1,
        )
        self._cp_method = parallel.cp_method
        self._splits_batches = bool(options.loaders.split_batches)
        self._drops_out = not axes.splits_model
        if not self._drops_out:
            self.note(NO_DROPOUT.format(words=parallel))
        parallel = replace(parallel, verify="off") if hasattr(parallel, "verify") else parallel
        self._accumulates = spec.is_alone and axes.data > 1 and accumulate_more(axes.data)
        if not spec.is_alone:
            return replace(options, parallel=parallel, mixed_precision=precision)
        return replace(
            options,
            parallel=Parallel(),
            mixed_precision=precision if spec.role is Role.HALF else "no",
            compile_options=None,
            compile_blocks=False,
            batch=BatchSizes(),
            fsdp_plugin=None,
            deepspeed_plugin=None,
            parallelism_config=None,
        )

    def begins(self, run: ObservedRun) -> None:
        data_ranks, meshes, seed = self._facts.data_ranks, run.meshes, self._spec.seed
        if self._spec.is_alone and data_ranks > 1:
            common = (data_ranks, run.step, run.models, seed, self._splits_batches, self._data_ended)
            place: BatchPlace = (
                AccumulatedRanks(*common) if self._accumulates else VirtualRanks(*common, run.optimizers)
            )
        else:
            place = BatchPlace(meshes.data_rank, run.models, seed)
            sizes = {name: int(getattr(meshes.axes, name)) for name in AXES}
            self._facts = replace(
                self._facts,
                data_rank=meshes.data_rank,
                axes={name: (size, meshes.rank_on(name)) for name, size in sizes.items() if size > 1},
            )
        self.attach(run, place, ShardAxes.of(meshes, self._cp_method))
        self._facts.write(Path(self._spec.folder))  # for the case that it hangs, or dies

    def model_prepared(self, model: ParallelModel) -> None:
        if not self._drops_out:
            without_dropout(list(model.plain.modules())).__enter__()
        if self._spec.role is Role.DISTURBED:
            disturb_weights(model.plain)
            model.module.register_forward_pre_hook(DisturbedInputs(), with_kwargs=True)
        if self.place.has_all_ranks:
            keep_gradients(model.module, self.place)
        super().model_prepared(model)

    def note(self, sentence: str) -> None:
        """Have the report say it."""
        if sentence not in self._facts.notes:
            self._facts = replace(self._facts, notes=(*self._facts.notes, sentence))

    # The end ----------------------------------------------------------------------------------------------

    def _data_ended(self) -> NoReturn:
        self._facts = replace(
            self._facts,
            ended="an epoch ends there with batches that do not go round all ranks",
        )
        self.end()

    def fail(self, error: BaseException) -> None:
        """Leave what was found until the script raised ``error``."""
        self._facts = replace(self._facts, failed=f"{type(error).__name__}: {error}".strip().splitlines()[0])
        self.finish()

    def finish(self) -> None:
        """Leave what was found."""
        facts = replace(self._facts, made=self.made, unrepeatable=self._sources.found)
        self._sink.close(facts.to_json())
        facts.write(Path(self._spec.folder))

    def end(self) -> NoReturn:
        """Leave what was found, and end this process: other ranks may do without it, as none is in a collective."""
        self.finish()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _sink(spec: RunSpec, rank: int) -> Sink:
    folder = Path(spec.folder)
    if spec.trace is None:
        return Recording(folder / f"trace-{rank}.safetensors")
    allowed = None if spec.allowed is None else Tolerance.read(Path(spec.allowed))
    return TraceComparison(Trace(Path(spec.trace)), folder, rank, allowed)


def main(argv: list[str]) -> None:
    """Run what ``argv`` names behind the specification."""
    from lockstep.config.sources import process_environment

    spec, program = RunSpec.read(Path(argv[0])), argv[1:]
    if spec.as_accelerate:
        from lockstep.compat.accelerate.alias import install

        install()
    sources = SourceWatch(os.getcwd() if spec.is_module else os.path.dirname(os.path.realpath(program[0])))
    sources.install()
    run = CheckedRun(spec, process_environment(need_rendezvous=False).rank, sources)
    RunObserver.registered.append(run)
    see_backward(run)
    set_seed(spec.seed)
    sys.argv = program
    try:
        _run(spec, program)
    except SystemExit as error:
        if error.code not in (None, 0):
            run.fail(error)
            raise
    except BaseException as error:
        run.fail(error)
        raise
    run.finish()


def _run(spec: RunSpec, program: list[str]) -> None:
    if spec.is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):  # the interpreter would put it there
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
