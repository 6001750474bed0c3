"""What one call of ``save`` is about on one rank, and what the user's hooks see of it. No collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from lockstep.checkpoint.checkpointer import Checkpointer, SaveTarget
from lockstep.checkpoint.contents import CheckpointContents, SaveHook
from lockstep.checkpoint.deferred import DeferredCopies
from lockstep.checkpoint.folders import StagingArea
from lockstep.checkpoint.format.documents import STATE, TENSORS, Saved, canonical, rank_file, versions
from lockstep.checkpoint.format.tensors import TensorFile
from lockstep.checkpoint.planner import SavePlan
from lockstep.checkpoint.state import RankState
from lockstep.checkpoint.store.base import Store
from lockstep.checkpoint.writer import StagedState, Writer, now
from lockstep.errors import UsageError


@dataclass
class SaveRequest:
    """One call of ``save`` on this rank: what is saved, where to, and how.

    ``copies`` are those of the state that are made later, of a save in the background; ``area`` is known to the
    coordinator alone, until it has told.
    """

    checkpointer: Checkpointer
    target: SaveTarget
    contents: CheckpointContents
    settings: Mapping[str, object]
    add_files: Callable[[str], None] | None
    is_numbered: bool
    store: Store
    directory: str
    state: RankState
    copies: DeferredCopies | None
    area: StagingArea | None = None

    @property
    def plans_at_once(self) -> bool:
        """Whether files are planned before ``save`` returns: then what is wrong with what is saved is said by it.

        The thread plans those of a later save in the background, unless hooks are to run, shards to be gathered by the
        groups of the model, or some tensors to be copied at once.
        """
        return (
            self.copies is None
            or self.copies.uncloned
            or not self.target.planner.has_plan
            or self.changes_state
            or self.add_files is not None
        )

    @property
    def adds_files(self) -> bool:
        """Whether hooks, or ``add_files``, may write into the staging area."""
        return bool(self.checkpointer.hooks.save) or self.add_files is not None

    @property
    def gathers(self) -> bool:
        """Whether machines share no file system, so that each needs all shards."""
        return len(self.target.group.ranks) < self.checkpointer.communicator.world_size

    @property
    def changes_state(self) -> bool:
        """Whether other tensors than were collected come into the state before files are planned."""
        return bool(self.checkpointer.hooks.save) or self.gathers

    def freeze(self) -> None:
        """From now on the state that a save in the background writes is that of now."""
        if self.copies is not None:
            self.copies.freeze(self.state)

    def stage(self, plan: SavePlan, tensors: dict[str, torch.Tensor]) -> StagedState:
        """What this rank will write. Of a save in the background only what is to be copied is kept of the state."""
        checkpointer, state, copies = self.checkpointer, self.state, self.copies
        group = self.target.group
        if copies is None:
            files = {file: TensorFile(plan.content(file, tensors)) for file in plan.mine}
        else:
            files = {file: TensorFile(plan.content(file, tensors, copies.part_of)) for file in plan.mine}
            files = checkpointer.background.stager.stage(files, copies)
            tensors.clear()
            copies.begin(state)
        documents = {rank_file(group.rank): canonical(state.own)}
        if group.is_coordinator:
            documents[STATE] = canonical(state.common)
            documents[TENSORS] = plan.index_content
        others = {**self.settings}
        saved = Saved(
            time=now(),
            world_size=checkpointer.runtime.world_size,
            ranks=group.ranks,
            parallel=str(others.pop("parallel", "")),
            settings=others,
            versions=versions(),
        )
        return StagedState(files, documents, saved, copies)


def run_hooks(
    hooks: Iterable[SaveHook],
    contents: CheckpointContents,
    weights: list[dict[str, object]],
    state: RankState,
    staging: str,
) -> None:
    """Hooks see whole weights, and what they leave of them is what is saved."""
    left = list(weights)
    with _as_whole_models(contents, weights):
        for hook in list(hooks):
            hook(list(contents.models), left, staging)
    for number, of_model in enumerate(weights):
        state.replace_model(number, of_model if any(of_model is kept for kept in left) else None)


@contextmanager
def _as_whole_models(contents: CheckpointContents, weights: list[dict[str, object]]) -> Iterator[None]:
    """Inside, ``state_dict`` of a model gives the weights that were gathered: one rank may save them alone."""
    with ExitStack() as handles:
        for model, gathered in zip(contents.models, weights, strict=True):
            handles.callback(model.register_state_dict_post_hook(partial(_show, dict(gathered))).remove)
        yield


def _show(gathered: dict[str, object], _: object, state: dict[str, object], prefix: str, *__: object) -> None:
    state.update({prefix + name: tensor for name, tensor in gathered.items() if prefix + name in state})


def refuse_url(writer: Writer) -> None:
    if not writer.store.is_local:
        raise UsageError(
            f"A hook that runs before save_state would write files into {writer.directory}, but that is a URL. "
            "Save to a local directory, or remove the hook."
        )
