"""A saved optimizer state, by the names of parameters, as one for the optimizer that goes on with it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from lockstep.checkpoint.checks import CheckedGroup, check_kind, keeps_shapes, try_optimizer
from lockstep.checkpoint.format.codec import Document, decode, tensor_names
from lockstep.checkpoint.format.index import Index
from lockstep.checkpoint.reader import empty_like
from lockstep.checkpoint.state import is_standard
from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import CheckpointError
from lockstep.train.whole.apply import whole_step_of

HOW_TO_STEP = ("foreach", "fused", "capturable", "differentiable", "param_names")
"""Entries of a parameter group that a run keeps as they are: what suits whole parameters need not suit shards, what
suits a GPU not a CPU, and names that an optimizer was given are those of its own parameters."""


def _check_form(document: Document, what: str) -> None:
    """Raise CheckpointError for what ``encode_optimizer`` never returns."""
    fits = isinstance(document, dict) and document.keys() == {"by_name", "value"}
    if fits and document["by_name"] is True:
        value = document["value"]
        fits = is_standard(value) and isinstance(value["state"], dict)
        fits = fits and isinstance(value["param_groups"], list) and all(map(_is_group, value["param_groups"]))
        if fits:
            names = [name for group in value["param_groups"] for name in group["params"]]
            fits = len(set(names)) == len(names) and value["state"].keys() <= set(names)
            fits = fits and all(isinstance(values, dict) for values in value["state"].values())
    elif fits:
        fits = document["by_name"] is False and not is_standard(document["value"])
    if not fits:
        raise CheckpointError(f"{what} is not in the form of an optimizer's state. Load another checkpoint.")


def _is_group(group: object) -> bool:
    names = group.get("params") if isinstance(group, dict) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _steps_on_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether every rank has the whole of state that is not of a parameter's shape."""
    return whole_step_of(getattr(optimizer, "optimizer", optimizer)) is not None


class OptimizerPlaces:
    """Memory for a saved optimizer state, laid out as the optimizer's parameters are.

    ``names`` are those of its parameters, ``everywhere`` those on any rank, where ranks have different ones.

    Raises:
        CheckpointError: it has other groups than the optimizer, or tensors that its parameters cannot have.
    """

    def __init__(
        self,
        document: Document,
        optimizer: torch.optim.Optimizer,
        names: list[list[str]],
        index: Index,
        what: str,
        everywhere: list[list[str]] | None = None,
    ) -> None:
        _check_form(document, what)
        self._optimizer = optimizer
        self._what = what
        self._value = document["value"]
        self._by_name = document["by_name"]
        self._parameters: dict[str, tuple[int, torch.Tensor]] = {}
        if self._by_name:
            self._match(names, names if everywhere is None else everywhere, what)
            self._value = self._of_this_rank()
        self._owners = {
            tensor: (key, self._parameters[name][1])
            for name, values in (self._value["state"].items() if self._by_name else ())
            for key, value in values.items()
            for tensor in tensor_names(value)
        }
        self.tensors = {
            name: self._placeholder_of(name, index, what) for name in dict.fromkeys(tensor_names(self._value))
        }

    def state_dict(self) -> Document:
        """Return what the optimizer's ``load_state_dict`` takes, once ``tensors`` have been filled."""
        state: Document = decode(self._value, self.tensors)
        if not self._by_name:
            return state
        for i, (saved, group) in enumerate(
            zip(state["param_groups"], self._optimizer.param_groups, strict=True)
        ):
            # A learning rate that is text would be noticed only in the next step.
            for key in saved.keys() & group.keys() - {"params"}:
                check_kind(saved[key], group[key], f"{self._what}.param_groups.{i}.{key}")
        numbers = {name: number for name, (number, _) in self._parameters.items()}
        groups = [
            # torch pairs these numbers with the group's parameters in turn, so they must rise.
            {**saved, "params": sorted(numbers[name] for name in saved["params"])}
            | {key: group[key] for key in HOW_TO_STEP if key in group and key in saved}
            for saved, group in zip(state["param_groups"], self._optimizer.param_groups, strict=True)
        ]
        states = {numbers[name]: values for name, values in state["state"].items()}
        return {**state, "state": states, "param_groups": groups}

    def small(self, index: Index) -> list[str]:
        """Return the tensors that a step takes for numbers: those that have not the shape of a parameter."""
        found = []
        for name in self.tensors:
            key, owner = self._owners.get(name, ("", None))
            # Only these are read for the trial step: the large ones have the parameters' shapes, and need no values.
            if owner is None or key == "step" or index[name].shape != tuple(owner.shape):
                found.append(name)
        return found if self._by_name and keeps_shapes(self._optimizer) else []

    def check_step(self, small: Mapping[str, torch.Tensor]) -> None:
        """Raise CheckpointError unless the optimizer can step with this state; ``small`` are the values of those."""
        if not self._by_name:
            return
        shapes = {
            name: small.get(name, torch.empty(tuple(place.shape), dtype=place.dtype, device="meta"))
            for name, place in self.tensors.items()
        }
        value = decode(self._value, shapes)
        other = next((name for name, entry in value["state"].items() if not isinstance(entry, Mapping)), None)
        if other is not None:
            raise CheckpointError(
                f"{self._what} holds {str(value['state'][other])[:80]!r} as the state of {other}. Load another "
                "checkpoint."
            )
        groups: list[CheckedGroup] = [
            (
                {key: option for key, option in group.items() if key not in ("params", "param_names")},
                [
                    (name, value["state"].get(name, {}), tuple(self._parameters[name][1].shape))
                    for name in group["params"]
                ],
            )
            for group in value["param_groups"]
        ]
        try_optimizer(self._optimizer, groups, self._what)

    def _match(self, names: list[list[str]], everywhere: list[list[str]], what: str) -> None:
        """Find the parameter of each saved name: by that name, or where other names are used, by its place."""
        saved = [list(group["params"]) for group in self._value["param_groups"]]
        if [len(group) for group in saved] != [len(group) for group in everywhere]:
            raise CheckpointError(
                f"{what} was saved with groups of {[len(group) for group in saved]} parameters, but has groups of "
                f"{[len(group) for group in everywhere]} here. Build it as the run that saved it did."
            )
        mine = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        flat = [name for group in names for name in group]
        place_of = {name: number for number, name in enumerate(flat)}
        number = 0
        for saved_group, group, of_all in zip(saved, names, everywhere, strict=True):
            # A script may have renamed its modules; then the order of the parameters decides, as in torch.
            same_names = set(saved_group) == set(of_all)
            if not same_names and len(group) != len(of_all):
                other = sorted(set(saved_group) - set(of_all))
                raise CheckpointError(
                    f"{what} was saved with parameters {other[:3]} in a group in which no rank has them now. "
                    "Build the optimizer as the run that saved it did."
                )
            for name in saved_group:
                # It is on another rank.
                if same_names and name not in place_of:
                    continue
                found = place_of[name] if same_names else number
                self._parameters[name] = (found, mine[found])
                number += 1

    def _of_this_rank(self) -> dict[str, object]:
        """Return the saved value without the parameters of other ranks."""
        value: Document = self._value
        groups = [
            {**group, "params": [name for name in group["params"] if name in self._parameters]}
            for group in value["param_groups"]
        ]
        state = {name: values for name, values in value["state"].items() if name in self._parameters}
        return {**value, "state": state, "param_groups": groups}

    def _placeholder_of(self, name: str, index: Index, what: str) -> torch.Tensor:
        if name not in index:
            raise CheckpointError(f"{what}: the checkpoint has no tensor {name}. Load another checkpoint.")
        entry = index[name]
        key, owner = self._owners.get(name, ("", None))
        # torch counts steps in plain numbers.
        if owner is None or (key == "step" and not entry.shape):
            return torch.empty(entry.shape, dtype=entry.torch_dtype)
        is_of_another_shape = entry.shape != tuple(owner.shape)
        # Some optimizers keep state of other shapes, such as factored moments: these can only be whole.
        has_shapes = keeps_shapes(self._optimizer)
        is_spread = is_dtensor(owner) and bool(entry.shape)
        if is_of_another_shape and is_spread and _steps_on_whole(self._optimizer) and not has_shapes:
            return torch.empty(entry.shape, dtype=entry.torch_dtype, device=owner.device)
        if is_of_another_shape and (is_spread or (has_shapes and math.prod(entry.shape) != 1)):
            raise CheckpointError(
                f"{what} holds {name} of shape {entry.shape}, whose parameter has shape {tuple(owner.shape)} "
                "here. Give the optimizer its parameters in the order of the run that saved it."
            )
        # Memory that the optimizer has already is filled in place.
        present = self._optimizer.state.get(owner, {}).get(key)
        fits = isinstance(present, torch.Tensor) and is_dtensor(present) == is_dtensor(owner)
        if fits and tuple(present.shape) == entry.shape and present.dtype == entry.torch_dtype:
            return present
        return empty_like(owner, entry)
