"""What the states of single ranks are together, from what each has told the others. No collective.

Ranks may hold different blocks of a model, and copies of buffers and registered objects that differ; what a checkpoint
says is said of the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from lockstep.checkpoint.contents import CheckpointContents
from lockstep.checkpoint.format.codec import Document, encode, tensor_names
from lockstep.checkpoint.format.documents import Digest
from lockstep.checkpoint.format.tensors import elements_of
from lockstep.checkpoint.state import ParameterNames, RankState, rename_tensors
from lockstep.errors import CheckpointError, UsageError


def first_ranks(digests: list[str]) -> list[int]:
    """Return for each rank the first one whose document has the same digest: that one alone sends it."""
    first: dict[str, int] = {}
    return [first.setdefault(digest, rank) for rank, digest in enumerate(digests)]


def refuse_other_contents(contents: list[dict[str, int]]) -> None:
    """Raise UsageError, on every rank, where ranks have prepared or registered different numbers of objects."""
    other = next((r for r, counts in enumerate(contents) if counts != contents[0]), None)
    if other is not None:
        raise UsageError(
            f"Rank 0 saves {contents[0]}, but rank {other} {contents[other]}. Prepare and register the same objects in "
            "the same order on every rank."
        )


def digests_of(found: RankState) -> dict[str, str]:
    """Digests of what ranks may hold the same or not: buffers, and tensors of registered objects."""
    return {name: _digest_of(tensor) for name, tensor in (found.of_first | found.shared).items()}


def _digest_of(tensor: torch.Tensor) -> str:
    digest = Digest()
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(elements_of(tensor))
    return digest.record().blake3


def split_divergent_state(
    found: RankState, digests: list[dict[str, str]], rank: int, ranks: list[int]
) -> None:
    """Give this rank tensors of its own where they differ from those of the first of ``ranks``.

    Buffers that it does not have, as its blocks are others, are compared with those of the first rank that has them.
    """
    differ = set()
    for name, digest in digests[rank].items():
        holders = [other for other in ranks if name in digests[other]] if name in found.of_first else ranks
        if digests[holders[0]].get(name) != digest:
            differ.add(name)
    buffers = {name: tensor for name, tensor in found.of_first.items() if name in differ}
    if buffers:
        found.own["buffers"] = encode(buffers, found.of_rank, f"rank.{rank}.buffers")
    # What is alike on all ranks is saved once, a copy that differs under the number of its rank.
    names = {name: f"rank.{rank}.{name}" if name in differ else name for name in found.shared}
    for name, tensor in found.shared.items():
        (found.of_rank if name in differ else found.tensors)[names[name]] = tensor
    for name in [name for name in found.own if name.startswith("object.")]:
        everything = {other: names.get(other, other) for other in tensor_names(found.own[name])}
        found.own[name] = rename_tensors(found.own[name], everything)


def merge_states(everywhere: list[Document], ranks: list[int], contents: CheckpointContents) -> Document:
    """Merge state.json of all ``ranks``: where several tell of the same, the first one's is taken.

    Raises:
        UsageError: optimizers of the ranks have different groups, or parameters that no model has; or stages of a
            model are on other ranks.
    """
    if contents.whole and len(ranks) < len(everywhere):
        raise UsageError(
            f"save_on_each_node=True saves what the {len(ranks)} ranks of a machine have, but other machines may "
            "hold other stages of the pipeline. Leave save_on_each_node out, and save to a file system that all "
            "machines share."
        )
    documents = [everywhere[rank] for rank in ranks]
    state = documents[0]
    # One document stands for all ranks with the same digest; see ``first_ranks``.
    if all(document is state for document in documents):
        return state
    state = copy.deepcopy(state)
    order = _parameter_order(contents)
    for other in _distinct(documents)[1:]:
        for number, model in other["models"].items():
            mine = state["models"].setdefault(number, {"ties": {}, "extra": {}})
            for kind in mine:
                mine[kind] = {**model[kind], **mine[kind]}
        for name, document in other.items():
            if name.startswith("optimizer.") and document["by_name"] and state[name]["by_name"]:
                _join_optimizer(name, state[name]["value"], document["value"], order)
    return state


def refuse_missing_tensors(contents: CheckpointContents, state: Document, names: Collection[str]) -> None:
    """Raise CheckpointError if a tensor of a model that is spread by blocks is held by no rank."""
    for number, whole in contents.whole.items():
        document = state["models"].get(str(number))
        if document is None:
            # A hook took it.
            continue
        for name in whole.names:
            first = document["ties"].get(name, whole.ties.get(name, name))
            if f"model.{number}.{first}" not in names and name not in document["extra"]:
                raise CheckpointError(
                    f"No rank holds {name} of model {number}, so the checkpoint would not have it. Split the "
                    "model so that each of its modules belongs to a stage."
                )


@dataclass(frozen=True)
class GlobalNames:
    """Names on any rank: of tensors, by the model's number, and of parameters, group by group, by the optimizer."""

    models: dict[str, set[str]]
    optimizers: dict[str, list[list[str]]]


def local_names(contents: CheckpointContents) -> Document:
    """Return this rank's part of ``GlobalNames``, as JSON."""
    names = ParameterNames(contents.models, {i: whole.ties for i, whole in contents.whole.items()})
    return {
        "models": {str(i): list(model.state_dict()) for i, model in enumerate(contents.models)},
        "optimizers": {name: names.by_group(optimizer) for name, optimizer in contents.stateful("optimizer")},
    }


def global_names(documents: list[Document]) -> GlobalNames:
    """Return what all ranks' ``local_names`` say together."""
    found = GlobalNames({}, {})
    for document in _distinct(documents):
        for number, names in document["models"].items():
            found.models.setdefault(number, set()).update(names)
        for name, groups in document["optimizers"].items():
            mine = found.optimizers.setdefault(name, [[] for _ in groups])
            # Other numbers of groups are refused elsewhere.
            for joined, group in zip(mine, groups, strict=False):
                there = set(joined)
                joined += [parameter for parameter in group if parameter not in there]
    return found


def _distinct(documents: list[Document]) -> list[Document]:
    return list({id(document): document for document in documents}.values())


def _parameter_order(contents: CheckpointContents) -> dict[str, int]:
    """Return the places of parameters in whole models."""
    names = (f"{i}.{name}" for i, whole in sorted(contents.whole.items()) for name in whole.names)
    return {name: place for place, name in enumerate(names)}


def _join_optimizer(what: str, mine: Document, other: Document, order: Mapping[str, int]) -> None:
    if len(mine["param_groups"]) != len(other["param_groups"]):
        raise UsageError(
            f"{what} has {len(mine['param_groups'])} groups of parameters on one rank and "
            f"{len(other['param_groups'])} on another. Keep all groups on every rank, also those without "
            "parameters."
        )
    for group, others in zip(mine["param_groups"], other["param_groups"], strict=True):
        there = set(group["params"])
        more = [i for i, name in enumerate(others["params"]) if name not in there]
        if not more:
            continue
        unnamed = [name for name in (*group["params"], *others["params"]) if name.startswith("#")]
        if unnamed:
            raise UsageError(
                f"{what} has parameters on some ranks only, and {len(unnamed)} of its parameters are in no "
                "prepared model, so they have no names to save them under. Put all parameters into the models."
            )
        numbers = list(range(len(group["params"]) + len(more)))
        joined = {
            key: [*group[key], *(others[key][i] for i in more)]
            for key in ("params", "param_names")
            if key in group and key in others
        }
        # The order of the whole model, so that the state does not depend on how blocks went to ranks.
        numbers.sort(key=lambda i: order.get(joined["params"][i], len(order)))
        group.update({key: [values[i] for i in numbers] for key, values in joined.items()})
    mine["state"] = {**other["state"], **mine["state"]}
