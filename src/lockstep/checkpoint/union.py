"""The documents of ranks that hold different blocks of a model, joined: what a checkpoint says is said of the whole."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.format.digest import digest_of
from lockstep.checkpoint.format.json_text import canonical
from lockstep.checkpoint.parameters import ParameterNames
from lockstep.checkpoint.training import CheckpointContents
from lockstep.comm.collectives import Communicator
from lockstep.errors import CheckpointError, UsageError


def gather_documents(document: Any, communicator: Communicator) -> list[Any]:
    """A JSON document of each rank; equal ones travel once. Collective."""
    digests = communicator.gather_object([digest_of(canonical(document))])
    if len(set(digests)) == 1:
        return [document] * len(digests)
    first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
    rank = communicator.runtime.rank
    sent = communicator.gather_object([document if first[digests[rank]] == rank else None])
    return [sent[first[digest]] for digest in digests]


def joined_state(documents: list[dict[str, Any]], training: CheckpointContents) -> dict[str, Any]:
    """state.json of all ranks: where several tell of the same, the first one's is taken.

    Raises:
        UsageError: optimizers of the ranks have different groups, or parameters that no model has.
    """
    state = documents[0]
    if all(document is state for document in documents):
        return state
    state = copy.deepcopy(state)
    order = _order(training)
    for other in _distinct(documents)[1:]:
        for number, model in other["models"].items():
            mine = state["models"].setdefault(number, {"ties": {}, "extra": {}})
            for kind in mine:
                mine[kind] = {**model[kind], **mine[kind]}
        for name, document in other.items():
            if name.startswith("optimizer.") and document["by_name"] and state[name]["by_name"]:
                _join_optimizer(name, state[name]["value"], document["value"], order)
    return state


def refuse_untold(training: CheckpointContents, state: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise CheckpointError if a tensor of a model that is spread by blocks is held by no rank."""
    for number, whole in training.whole.items():
        told = state["models"].get(str(number))
        if told is None:
            continue  # a hook took it
        for name in whole.names:
            first = told["ties"].get(name, whole.ties.get(name, name))
            if f"model.{number}.{first}" not in names and name not in told["extra"]:
                raise CheckpointError(
                    f"No rank holds {name} of model {number}, so that the checkpoint would lack it. Split the model "
                    "such that each of its modules belongs to a stage."
                )


@dataclass(frozen=True)
class Everywhere:
    """Names on any rank: of tensors, by the model's number, and of parameters, group by group, by the optimizer."""

    models: dict[str, set[str]]
    optimizers: dict[str, list[list[str]]]


def names_here(training: CheckpointContents) -> dict[str, Any]:
    """This rank's part of ``Everywhere``, as JSON."""
    names = ParameterNames(training.models, {i: whole.ties for i, whole in training.whole.items()})
    return {
        "models": {str(i): list(model.state_dict()) for i, model in enumerate(training.models)},
        "optimizers": {name: names.of(optimizer) for name, optimizer in training.stateful("optimizer")},
    }


def joined_names(documents: list[dict[str, Any]]) -> Everywhere:
    """What all ranks' ``names_here`` say together."""
    found = Everywhere({}, {})
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


def _distinct(documents: list[Any]) -> list[Any]:
    return list({id(document): document for document in documents}.values())


def _order(training: CheckpointContents) -> dict[str, int]:
    """The places of parameters in whole models."""
    names = (f"{i}.{name}" for i, whole in sorted(training.whole.items()) for name in whole.names)
    return {name: place for place, name in enumerate(names)}


def _join_optimizer(
    what: str, mine: dict[str, Any], other: Mapping[str, Any], order: Mapping[str, int]
) -> None:
    if len(mine["param_groups"]) != len(other["param_groups"]):
        raise UsageError(
            f"{what} has {len(mine['param_groups'])} groups of parameters on one rank and "
            f"{len(other['param_groups'])} on another. Keep all groups on every rank, those without parameters too."
        )
    for group, others in zip(mine["param_groups"], other["param_groups"], strict=True):
        there = set(group["params"])
        more = [i for i, name in enumerate(others["params"]) if name not in there]
        if not more:
            continue
        unnamed = [name for name in (*group["params"], *others["params"]) if name.startswith("#")]
        if unnamed:
            raise UsageError(
                f"{what} has parameters on some ranks only, and {len(unnamed)} that no prepared model has, so that "
                "they cannot be told apart. Put all parameters into the models."
            )
        numbers = list(range(len(group["params"]) + len(more)))
        joined = {
            key: [*group[key], *(others[key][i] for i in more)]
            for key in ("params", "param_names")
            if key in group and key in others
        }
        numbers.sort(key=lambda i: order.get(joined["params"][i], len(order)))  # stable
        group.update({key: [values[i] for i in numbers] for key, values in joined.items()})
    mine["state"] = {**other["state"], **mine["state"]}
