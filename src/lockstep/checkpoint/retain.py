"""Numbered checkpoints of a project: where the next one goes, which is the newest, which are removed."""

from __future__ import annotations

import re
from collections.abc import Collection

from lockstep.checkpoint import added
from lockstep.checkpoint.store.base import REMOVED, REPLACED, STAGING, Store
from lockstep.checkpoint.store.place import store_for
from lockstep.checkpoint.store.verify import is_published
from lockstep.config.handlers import ProjectConfiguration
from lockstep.errors import NoCheckpointError, UsageError


def next_directory(output_dir: str | None, project: ProjectConfiguration, store: Store) -> str:
    """Where ``save_state`` writes: the given directory, else the project's next numbered one.

    Raises:
        UsageError: neither a directory nor automatic naming, or there are later ones that this run has not loaded.
    """
    if output_dir is not None:
        return refuse_unfinished(output_dir)
    if not project.automatic_checkpoint_naming:
        raise UsageError(
            "save_state was called without a directory. Pass one, or ProjectConfiguration(project_dir=..., "
            "automatic_checkpoint_naming=True)."
        )
    folder = folder_of(project)
    there = numbers(folder, store)
    if there and there[-1] >= project.iteration:
        raise UsageError(
            f"{folder}/checkpoint_{there[-1]} exists already, and this run would save checkpoint_{project.iteration} "
            "behind it. Call load_state first to go on with that run, or save to a project_dir of its own, or set "
            f"ProjectConfiguration.iteration to {there[-1] + 1} or more."
        )
    return f"{folder}/checkpoint_{project.iteration}"


def candidates(input_dir: str | None, project: ProjectConfiguration, store: Store) -> list[str]:
    """Where ``load_state`` looks, best first: the given directory, or the numbered ones from the newest on."""
    if input_dir is not None:
        return store.candidates(input_dir)
    if not project.automatic_checkpoint_naming:
        raise UsageError("load_state was called without a directory. Pass the one that save_state wrote.")
    folder = folder_of(project)
    found = [f"{folder}/checkpoint_{number}" for number in reversed(numbers(folder, store))]
    if not found:
        raise NoCheckpointError(f"There is no checkpoint in {folder}. Save one first.")
    return found


def numbers(folder: str, store: Store) -> list[int]:
    """The numbers of the checkpoints ``checkpoint_<i>`` in ``folder``, ascending; others are ignored."""
    matches = (re.fullmatch(r"checkpoint_(0|[1-9]\d{0,17})", name) for name in store.children(folder))
    return sorted(int(match[1]) for match in matches if match)


def number_after(project: ProjectConfiguration, store: Store) -> int:
    """The number of the next checkpoint, once one has been loaded: above all that are there."""
    there = numbers(folder_of(project), store)
    return there[-1] + 1 if there else project.iteration


def superfluous(
    directory: str, project: ProjectConfiguration, store: Store, damaged: Collection[str] = ()
) -> list[str]:
    """The checkpoints beyond ``total_limit``, once ``directory`` is one of them: the ``damaged``, then the oldest.

    Numbered folders that no ``save_state`` wrote are not counted and stay.
    """
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return []
    folder = folder_of(project)
    if directory.rpartition("/")[0] != folder:  # elsewhere, perhaps in another store
        return []
    others = [f"{folder}/checkpoint_{number}" for number in numbers(folder, store)]
    others = [path for path in others if path != directory and is_published(store, path)]
    others.sort(key=lambda path: path not in damaged)  # stable: the oldest of each kind first
    return others[: max(0, len(others) + 1 - project.total_limit)]


def prune(old: list[str], folder: str, store: Store) -> None:
    """Remove checkpoints, and what an earlier removal left in their folder; files that were added to them stay."""
    for directory in old:
        added.remove(store, directory)
    for name in store.children(folder):
        if re.fullmatch(rf"checkpoint_\d+{re.escape(REMOVED)}", name):
            store.abandon(f"{folder}/{name}")


def clear_unfinished(folder: str, store: Store) -> None:
    """Remove what saves and removals left in ``folder`` that did not come to their end; the caller holds its lock."""
    unfinished = rf"checkpoint_\d+({re.escape(STAGING)}|{re.escape(REMOVED)})"
    for name in store.children(folder):
        if re.fullmatch(unfinished, name):
            store.abandon(f"{folder}/{name}")


def folder_of(project: ProjectConfiguration) -> str:
    """The folder of a project's numbered checkpoints."""
    if project.project_dir is None:
        raise UsageError(
            "automatic_checkpoint_naming needs a place. Pass project_dir to ProjectConfiguration."
        )
    return f"{store_for(project.project_dir)[1]}/checkpoints"


def refuse_unfinished(directory: str) -> str:
    """``directory``; raises UsageError for a name that directories have while they are written or removed."""
    if directory.endswith((STAGING, REPLACED, REMOVED)):
        raise UsageError(
            f"{directory} has a suffix that unfinished checkpoints are given. Pass a directory with another name."
        )
    return directory
