"""Which entry of a script's own checkpoint dict is what: models, optimizers, schedulers, the rest."""

from __future__ import annotations

import re
from typing import Any

import torch

from lockstep.comm.tree import StateDict
from lockstep.compat.checkpoints.state import ImportedState, require_plain
from lockstep.errors import CheckpointError

# In the order in which they are looked for.
MODEL_KEYS = ("model_state_dict", "state_dict", "model", "module", "model_state", "net")
OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optim", "optimizer_state", "optimizer_states")
SCHEDULER_KEYS = (
    "scheduler_state_dict", "lr_scheduler_state_dict", "scheduler", "lr_scheduler", "schedulers", "lr_schedulers",
)  # fmt: skip
SCALER_KEYS = ("scaler", "scaler_state_dict", "grad_scaler", "grad_scaler_state_dict")


def is_weights(value: object) -> bool:
    """Return whether it is a dict of tensors by name, and nothing else."""
    return isinstance(value, dict) and bool(value) and all(
        isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items()
    )  # fmt: skip


def is_optimizer(value: object) -> bool:
    """Return whether it is of the form of ``torch.optim.Optimizer.state_dict()``."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, dict) and "params" in group for group in value["param_groups"])
    )


def sort_entries(value: Any, where: str, state: ImportedState) -> None:
    """Put the entries of a checkpoint dict into ``state``.

    Raises:
        CheckpointError: it has no weights, or entries that are no plain values.
    """
    if is_weights(value):
        state.models.append(value)
        state.notes.append(f"{where}: weights")
        return
    if isinstance(value, dict) and len(value) == 1:
        (inner,) = value.values()
        if isinstance(inner, dict) and not is_weights(inner) and any(key in inner for key in MODEL_KEYS):
            # An application's state as a whole under one name.
            value = inner
    weights = [key for key in MODEL_KEYS if isinstance(value, dict) and is_weights(value.get(key))]
    if not weights:
        raise CheckpointError(f"{where} is not a checkpoint of a known form: {_seen(value)}. {_KNOWN}")
    rest = dict(value)
    state.models.append(rest.pop(weights[0]))
    state.notes.append(f"{where}[{weights[0]!r}]: weights")
    for key in list(rest):
        if key in OPTIMIZER_KEYS:
            rest[key] = _unflattened(rest[key])
        entries = rest[key] if isinstance(rest[key], list) else [rest[key]]
        if key in OPTIMIZER_KEYS and all(is_optimizer(entry) for entry in entries):
            state.optimizers += [optimizer(entry, f"{where}[{key!r}]") for entry in entries]
        elif key in SCHEDULER_KEYS and all(isinstance(entry, dict) for entry in entries):
            state.schedulers += entries
        elif key in SCALER_KEYS and isinstance(rest[key], dict):
            state.scaler = rest[key] or None
        else:
            state.other[key] = rest[key]
            state.notes.append(
                f"{where}[{key!r}]: kept separately, because Lockstep has no state of this name"
            )
            continue
        state.notes.append(f"{where}[{key!r}]: state of {len(entries)} of that kind")
    for name, part in (("schedulers", state.schedulers), ("scaler", state.scaler), ("other", state.other)):
        require_plain(part, f"{where}, {name}")


def _unflattened(saved: object) -> object:
    """Return the state of an optimizer that was saved as ``state.NAME.exp_avg`` and ``param_groups.NAME.lr``.

    So torch's ``get_optimizer_state_dict`` writes it with ``flatten_optimizer_state_dict``, as torchtitan does.
    Parameters with the same options become one group. Whatever has another form is returned as it is.
    """
    if not isinstance(saved, dict) or not saved:
        return saved
    states: dict[str, dict[str, object]] = {}
    options: dict[str, dict[str, object]] = {}
    for key, value in saved.items():
        kind, _, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
        name, _, what = rest.rpartition(".")
        if kind not in ("state", "param_groups") or not name:
            return saved
        (states if kind == "state" else options).setdefault(name, {})[what] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, given in options.items():
        groups.setdefault(repr(sorted(given.items())), {**given, "params": []})["params"].append(name)
    return {"state": states, "param_groups": list(groups.values())}


def optimizer(saved: Any, where: str) -> StateDict:
    """Return a state of an optimizer, with names for numbers where its groups have ``param_names``.

    Raises:
        CheckpointError: it has another form, or parameters that are in no group.
    """
    if not is_optimizer(saved):
        raise CheckpointError(
            f"{where} is not the state of an optimizer: {_seen(saved)}. Leave it out with skip."
        )
    require_plain(saved, where)
    states, groups = saved["state"], saved["param_groups"]
    names: dict[object, object] = {}
    for group in groups:
        given = group.get("param_names")
        new = given if isinstance(given, list) and len(given) == len(group["params"]) else group["params"]
        names.update(zip(group["params"], new, strict=True))
    # torch.distributed.checkpoint writes numbers as text.
    if any(type(name) is int for name in names):
        states = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in states.items()}
    stray = [key for key in states if key not in names]
    if stray or any(not isinstance(entry, dict) for entry in states.values()):
        raise CheckpointError(
            f"{where} has state of the parameters {stray[:3]}, which are in none of its groups. Copy the file "
            "again."
        )
    kept = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    return kept | {
        "state": {names[key]: dict(values) for key, values in states.items()},
        "param_groups": [
            {key: value for key, value in group.items() if key != "param_names"}
            | {"params": [names[key] for key in group["params"]]}
            for group in groups
        ],
    }


def _seen(value: object) -> str:
    if not isinstance(value, dict):
        return f"it holds a {type(value).__name__}"
    kinds = [
        f"{re.sub('[^ -~]', '?', str(key))[:40]!r} ({type(item).__name__})" for key, item in value.items()
    ]
    return f"it is a dict with {', '.join(kinds[:8]) or 'nothing'}{' and more' if len(kinds) > 8 else ''}"


_KNOWN = (
    "Pass a dict of tensors, or a dict that has one under 'model_state_dict', 'state_dict', 'model', 'module', "
    "'model_state' or 'net'."
)
