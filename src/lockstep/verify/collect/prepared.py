"""A run of a script that prepares its objects with an ``Accelerator`` of this library."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import nn

from lockstep.config.options import Options
from lockstep.config.parallel import Parallel
from lockstep.config.world import axes_of
from lockstep.data.loader import PreparedLoader
from lockstep.model.changes import UncopiedHook
from lockstep.observe.run_observer import ObservedRun
from lockstep.parallel.determinism import WithoutDropout, without_dropout
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.runtime.step import StepState
from lockstep.script.inside import of_one_process
from lockstep.verify.collect.batch_position import BatchPosition
from lockstep.verify.collect.plain_calls import step_schedulers_when
from lockstep.verify.collect.process import ProcessRun
from lockstep.verify.collect.reported_ranks import report_length, report_ranks
from lockstep.verify.collect.spanning import (
    ALONE,
    GATHERED,
    refuse_shared_routing,
    refuse_synchronised_statistics,
)
from lockstep.verify.collect.trainers import accumulate_more
from lockstep.verify.collect.virtual_ranks import (
    AccumulatedRanks,
    RanksInTurn,
    SequentialRanks,
    VirtualRanks,
    WholeBatches,
)
from lockstep.verify.spec import Role
from lockstep.verify.trace.regions import ShardAxes

AXES = ("pp", "replicate", "shard", "cp", "tp")
NO_DROPOUT = (
    "Dropout was off in both runs: ranks that share a model's layers draw masks of their own under {words}."
)

LOADED = (
    "The script loads the checkpoint {path} before step {step}: what is compared goes on from there, and not from the "
    "script's own first weights."
)

TWO = "The script makes two Accelerators that prepare objects, but the steps of only one can be compared."
ONE = "Prepare all models with one Accelerator."


class PreparedRun(ProcessRun):
    """One process of it."""

    _step: StepState | None = None

    def options(self, options: Options) -> Options:
        spec = self._spec
        parallel = options.parallel if spec.parallel is None else Parallel.parse(spec.parallel)
        precision = spec.mixed_precision or str(options.mixed_precision)
        # The reference and its disturbed run compute in fp32, whatever the script asks for.
        own_precision = precision if spec.role in (Role.HALF, Role.CANDIDATE) else "no"
        axes = axes_of(parallel, spec.ranks)
        self._facts = replace(
            self._facts,
            parallel=str(parallel),
            mixed_precision=precision,
            data_ranks=axes.data,
            accumulation=options.accumulation.num_steps or 1,
            drops_out=not axes.splits_model,
        )
        self._cp_method = parallel.cp_method
        self._synchronises, self._shares_routing = parallel.sync_batchnorm, axes.pp == 1
        self._splits_batches = bool(options.loaders.split_batches)
        if not self._facts.drops_out:
            self.note(NO_DROPOUT.format(words=parallel))
        parallel = replace(parallel, verify="off")
        self._has_turns = spec.is_alone and axes.data > 1 and spec.role is not Role.WHOLE
        self._window = accumulate_more(axes.data) if self._has_turns else 0
        self._broadcasts = options.ddp.broadcast_buffers
        if spec.reports_ranks:
            self.restores.append(report_ranks(spec.ranks))
        if not spec.is_alone:
            return replace(options, parallel=parallel, mixed_precision=own_precision)
        return replace(of_one_process(options), mixed_precision=own_precision)

    def begins(self, run: ObservedRun) -> None:
        if self._step not in (None, run.step):
            self.refuse(TWO, instead=ONE)
        self._step = run.step
        data_ranks, meshes, seed = self._facts.data_ranks, run.meshes, self._spec.seed
        turns = RanksInTurn(
            data_ranks, run.step, run.models, seed, self._splits_batches, self._data_ended, self.refuse
        )
        place: BatchPosition
        if self._spec.role is Role.WHOLE:
            place = WholeBatches(turns)
        elif self._has_turns:
            place = AccumulatedRanks(turns) if self._window else VirtualRanks(turns, run.optimizers)
        else:
            place = BatchPosition(meshes.data_rank, run.models, seed)
            sizes = {name: int(getattr(meshes.axes, name)) for name in AXES}
            self._facts = replace(
                self._facts,
                data_rank=meshes.data_rank,
                axes={name: (size, meshes.rank_on(name)) for name, size in sizes.items() if size > 1},
            )
        if isinstance(place, VirtualRanks):
            self.restores.append(step_schedulers_when(place.schedules))
        self.attach(run, place, ShardAxes.of(meshes, self._cp_method))
        # Written now for the case that it hangs, or dies.
        self._facts.write(Path(self._spec.folder))

    def loader_prepared(self, loader: PreparedLoader) -> None:
        super().loader_prepared(loader)
        if self._spec.reports_ranks:
            report_length(loader, self._facts.data_ranks)

    def model_prepared(self, model: ParallelModel) -> None:
        if not self._facts.drops_out:
            switch_dropout_off(model)
        if self.place.has_all_ranks:
            refuse_synchronised_statistics(model, self._synchronises, self.refuse)
            if self._shares_routing:
                refuse_shared_routing(model, self.refuse)
        if isinstance(self.place, SequentialRanks):
            self.place.buffers.share(model, self._broadcasts)
        super().model_prepared(model)

    def checkpoint_loaded(self, path: str) -> None:
        self.note(LOADED.format(path=path, step=self.step))

    def gathers_for_loss(self) -> None:
        if self.place.has_all_ranks:
            self.refuse(GATHERED)

    def trains_alone(self) -> None:
        if self.place.has_all_ranks:
            self.refuse(ALONE)


def switch_dropout_off(model: ParallelModel) -> None:
    """Layers of a model drop nothing from now on, nor do functions that it calls in ``forward``."""
    ended = _DropsAgain()
    ended.stack.enter_context(without_dropout(list(model.plain.modules())))
    model.module.register_forward_pre_hook(_DropsNothing(ended), prepend=True)
    model.module.register_forward_hook(ended, always_call=True)


class _DropsAgain(UncopiedHook):
    """A forward hook: functions drop again. It holds what keeps layers from it."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.modes = ExitStack()

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self.modes.close()


class _DropsNothing(UncopiedHook):
    """A forward pre-hook: functions drop nothing."""

    def __init__(self, ended: _DropsAgain) -> None:
        self._ended = ended

    def __call__(self, module: nn.Module, args: object) -> None:
        self._ended.modes.enter_context(WithoutDropout())
