"""Write what was imported: as weights that every program reads, or as a checkpoint that ``load_state`` loads."""

from __future__ import annotations

import torch

from lockstep.checkpoint.folders import CheckpointGroup
from lockstep.checkpoint.format.codec import encode
from lockstep.checkpoint.format.documents import STATE, TENSORS, Saved, canonical, rank_file, versions
from lockstep.checkpoint.format.tensors import TensorFile
from lockstep.checkpoint.planner import SavePlanner
from lockstep.checkpoint.save import write_checkpoint
from lockstep.checkpoint.state import RankState, collect_weights
from lockstep.checkpoint.store import store_for
from lockstep.checkpoint.weights.model import write_weights
from lockstep.checkpoint.writer import StagedState, Writer, now
from lockstep.comm.collectives import Communicator
from lockstep.comm.tree import StateDict
from lockstep.compat.checkpoints.state import ImportedState
from lockstep.errors import UsageError
from lockstep.runtime.process import Runtime


def write_imported(state: ImportedState, directory: str) -> None:
    """Write weights alone as ``save_model`` does, anything more as a checkpoint without a place in the data.

    Raises:
        UsageError: something is at ``directory``, or a state holds what no checkpoint can.
        CheckpointError: it cannot be written.
    """
    store, place = store_for(directory)
    if store.exists(place):
        raise UsageError(f"{directory} exists already. Pass a directory that does not exist yet.")
    if state.weights_only:
        write_weights(state.models[0], directory)
        return
    found = _collected(state)
    ranks = sorted(state.rng) or [0]
    own = {rank: _of_rank(state, rank, found) for rank in ranks}
    tensors = {**found.tensors, **found.of_first, **found.of_rank}
    group = CheckpointGroup(0, [0])
    planner = SavePlanner(group)
    plan = planner.create_global_plan([planner.create_local_plan(tensors)])
    documents = {rank_file(rank): canonical(document) for rank, document in own.items()}
    documents |= {STATE: canonical(found.common), TENSORS: plan.index_content}
    saved = Saved(
        time=now(),
        world_size=state.world_size or len(ranks),
        ranks=ranks,
        parallel="",
        settings={"imported": state.layout, **({} if state.step is None else {"step": state.step})},
        versions=versions(),
    )
    files = {
        file: TensorFile({key: tensors[name] for key, name in keys.items()})
        for file, keys in plan.mine.items()
    }
    communicator = Communicator(Runtime(0, 1, 0, 1, torch.device("cpu"), None))
    writer = Writer(store, place, store.begin(place), group)
    write_checkpoint(communicator, writer, StagedState(files, documents, saved))


def _collected(state: ImportedState) -> RankState:
    found = RankState()
    parts: dict[str, list[StateDict]] = {
        "optimizer": state.optimizers,
        "scheduler": state.schedulers,
        "scaler": [] if state.scaler is None else [state.scaler],
    }
    counts = {kind: len(items) for kind, items in (*parts.items(), ("object", state.objects)) if items}
    contents = {"model": len(state.models), **counts}
    found.common = {"contents": contents, "models": {}, "imported": state.layout}
    for number, weights in enumerate(state.models):
        found.common["models"][str(number)] = collect_weights(weights, set(weights), number, found)
    for kind, items in parts.items():
        for i, item in enumerate(items):
            name = f"{kind}.{i}"
            if kind == "optimizer":
                named = _renamed(item, state.models)
                found.common[name] = {"by_name": True, "value": encode(named, found.tensors, name)}
            else:
                found.common[name] = encode(item, found.tensors, name)
    return found


def _renamed(optimizer: StateDict, models: list[dict[str, torch.Tensor]]) -> dict[str, object]:
    """Return parameters as checkpoints name them: by the model's number and their name, or by their own number."""

    def name(parameter: str | int) -> str:
        if isinstance(parameter, int):
            return f"#{parameter}"
        owner = next((i for i, weights in enumerate(models) if parameter in weights), 0)
        return f"{owner}.{parameter}"

    return {
        **optimizer,
        "state": {name(parameter): values for parameter, values in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [name(parameter) for parameter in group["params"]]}
            for group in optimizer["param_groups"]
        ],
    }


def _of_rank(state: ImportedState, rank: int, found: RankState) -> dict[str, object]:
    own: dict[str, object] = {}
    if rank in state.rng:
        own["rng"] = encode(state.rng[rank], found.of_rank, f"rank.{rank}.rng")
    for i, item in enumerate(state.objects):
        own[f"object.{i}"] = encode(item, found.of_rank, f"rank.{rank}.object.{i}")
    return own
