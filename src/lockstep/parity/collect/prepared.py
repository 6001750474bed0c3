"""A run of a script that prepares its objects with an ``Accelerator`` of this library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.config.options import Options
from lockstep.config.parallel import Parallel
from lockstep.config.world import BatchSizes, axes_of
from lockstep.data.loader import PreparedLoader
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parity.collect.chance import switch_dropout_off
from lockstep.parity.collect.place import BatchPlace
from lockstep.parity.collect.plain_calls import step_schedulers_when
from lockstep.parity.collect.process import ProcessRun
from lockstep.parity.collect.spanning import refuse_shared_routing, refuse_synchronised_statistics
from lockstep.parity.collect.told import tell_length, tell_of_ranks
from lockstep.parity.collect.trainers import accumulate_more
from lockstep.parity.collect.virtual_ranks import AccumulatedRanks, RanksInTurn, VirtualRanks
from lockstep.parity.spec import Role
from lockstep.parity.trace.regions import ShardAxes
from lockstep.preparation.observers import ObservedRun

AXES = ("pp", "replicate", "shard", "cp", "tp")
NO_DROPOUT = (
    "Dropout was off in both runs: ranks that share a model's layers draw masks of their own under {words}."
)


class PreparedRun(ProcessRun):
    """One process of it."""

    def options(self, options: Options) -> Options:
        spec = self._spec
        parallel = options.parallel if spec.parallel is None else Parallel.parse(spec.parallel)
        precision = spec.mixed_precision or str(options.mixed_precision)
        own_precision = precision if spec.role in (Role.HALF, Role.CANDIDATE) else "no"
        axes = axes_of(parallel, spec.ranks)
        self._facts = replace(
            self._facts,
            parallel=str(parallel),
            mixed_precision=precision,
            data_ranks=axes.data,
            accumulation=options.accumulation.num_steps or 1,
        )
        self._cp_method = parallel.cp_method
        self._synchronises, self._shares_routing = parallel.sync_batchnorm, axes.pp == 1
        self._splits_batches = bool(options.loaders.split_batches)
        self._drops_out = not axes.splits_model
        if not self._drops_out:
            self.note(NO_DROPOUT.format(words=parallel))
        parallel = replace(parallel, verify="off") if hasattr(parallel, "verify") else parallel
        self._accumulates = spec.is_alone and axes.data > 1 and accumulate_more(axes.data)
        if spec.tells_ranks:
            self.restores.append(tell_of_ranks(spec.ranks))
        if not spec.is_alone:
            return replace(options, parallel=parallel, mixed_precision=own_precision)
        return replace(
            options,
            parallel=Parallel(),
            mixed_precision=own_precision,
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
            turns = RanksInTurn(
                data_ranks, run.step, run.models, seed, self._splits_batches, self._data_ended, self.refuse
            )
            place: BatchPlace = (
                AccumulatedRanks(turns) if self._accumulates else VirtualRanks(turns, run.optimizers)
            )
        else:
            place = BatchPlace(meshes.data_rank, run.models, seed)
            sizes = {name: int(getattr(meshes.axes, name)) for name in AXES}
            self._facts = replace(
                self._facts,
                data_rank=meshes.data_rank,
                axes={name: (size, meshes.rank_on(name)) for name, size in sizes.items() if size > 1},
            )
        if isinstance(place, VirtualRanks):
            self.restores.append(step_schedulers_when(place.schedules))
        self.attach(run, place, ShardAxes.of(meshes, self._cp_method))
        self._facts.write(Path(self._spec.folder))  # for the case that it hangs, or dies

    def loader_prepared(self, loader: PreparedLoader) -> None:
        super().loader_prepared(loader)
        if self._spec.tells_ranks:
            tell_length(loader, self._facts.data_ranks)

    def model_prepared(self, model: ParallelModel) -> None:
        if not self._drops_out:
            switch_dropout_off(model)
        if self.place.has_all_ranks:
            refuse_synchronised_statistics(model, self._synchronises, self.refuse)
            if self._shares_routing:
                refuse_shared_routing(model, self.refuse)
        super().model_prepared(model)
