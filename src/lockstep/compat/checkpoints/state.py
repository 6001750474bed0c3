"""What was imported: values that no library's format shapes any more."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from lockstep.comm.tree import StateDict
from lockstep.compat.checkpoints.tensors import StoredObject
from lockstep.errors import CheckpointError


@dataclass
class ImportedState:
    """The state of a training run, or only weights.

    - ``models``: tensors by name; large ones are mapped from the source's files. Tied weights share memory,
      or are there under one name only.
    - ``optimizers``: as ``torch.optim.Optimizer.state_dict()``, but parameters have names, in ``state`` and in
      ``param_groups``, where the source knows them; else numbers in the order of the groups.
    - ``rng``: by rank, what ``lockstep.runtime.seed.rng_state()`` returns.
    - ``step``, ``world_size``: None where the source does not say.
    - ``other``: plain values beside the rest, such as a script's own epoch.
    - ``notes``: what each file became, and what was left out and why.
    """

    layout: str
    models: list[dict[str, torch.Tensor]] = field(default_factory=list)
    optimizers: list[dict[str, object]] = field(default_factory=list)
    schedulers: list[dict[str, object]] = field(default_factory=list)
    scaler: dict[str, object] | None = None
    objects: list[dict[str, object]] = field(default_factory=list)
    rng: dict[int, dict[str, object]] = field(default_factory=dict)
    step: int | None = None
    world_size: int | None = None
    other: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def weights_only(self) -> bool:
        """Whether there is one model and no more."""
        parts = (
            self.optimizers,
            self.schedulers,
            self.scaler,
            self.objects,
            self.rng,
            self.other,
        )
        return len(self.models) == 1 and not any(parts)


StateRow = tuple[str, str, str]


def describe_state(state: ImportedState) -> list[StateRow]:
    """Rows ``(part, number, content)`` for a table, then the notes as ``("note", "", text)``."""
    rows: list[StateRow] = []
    for i, model in enumerate(state.models):
        rows.append(("model", str(i), _tensors(model.values())))
    for i, optimizer in enumerate(state.optimizers):
        rows.append(("optimizer", str(i), _optimizer(optimizer)))
    rows += [("scheduler", str(i), _keys(entry)) for i, entry in enumerate(state.schedulers)]
    if state.scaler is not None:
        rows.append(("loss scale", "", f"scale {state.scaler.get('scale')}"))
    rows += [("object", str(i), _keys(entry)) for i, entry in enumerate(state.objects)]
    if state.rng:
        rows.append(("random generators", "", f"of {len(state.rng)} ranks: {sorted(state.rng)}"))
    if state.step is not None:
        rows.append(("step", "", str(state.step)))
    if state.other:
        rows.append(("other values", "", _keys(state.other)))
    return rows + [("note", "", note) for note in state.notes]


def require_plain(value: object, where: str) -> None:
    """Raise CheckpointError, with the place, for what a checkpoint of tensors and plain values cannot hold."""
    # Not by recursion: a file may nest as deep as it likes.
    waiting = [(value, where)]
    while waiting:
        item, place = waiting.pop()
        if isinstance(item, StoredObject):
            raise CheckpointError(
                f"{place} is an object of {item.name}, which only its own library can read. Save its values in a "
                "dict, or leave this part out with skip."
            )
        if isinstance(item, dict):
            waiting += [(entry, f"{place}[{key!r}]") for key, entry in item.items()]
            waiting += [(key, f"a key of {place}") for key in item if isinstance(key, (StoredObject, tuple))]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            waiting += [(entry, f"{place}[{i}]") for i, entry in enumerate(item)]


def generator_states(saved: StateDict, where: str, notes: list[str]) -> dict[str, object] | None:
    """Read Accelerate's ``random_states_<rank>.pkl`` as ``lockstep.runtime.seed.rng_state()``; None if it is
    incomplete."""
    try:
        version, words, gauss = saved["random_state"]
        generator, keys, position, has_gauss, cached = saved["numpy_random_seed"]
        state = {
            "python.version": int(version),
            "python.words": torch.tensor(words, dtype=torch.int64),
            "python.gauss": gauss,
            "torch": _rng_bytes(saved["torch_manual_seed"]),
            "numpy.generator": str(generator),
            "numpy.words": torch.from_numpy(np.asarray(keys).astype(np.uint32)),
            "numpy.position": int(position),
            "numpy.has_gauss": int(has_gauss),
            "numpy.gauss": float(cached),
        }
        devices = {f"cuda.{i}": _rng_bytes(s) for i, s in enumerate(saved.get("torch_cuda_manual_seed", ()))}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        notes.append(
            f"{where}: its random generators were left out, because its state is not complete "
            f"({type(error).__name__})"
        )
        return None
    known = {"step", "random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed"}
    notes.extend(
        f"{where}: {key} was left out, because it belongs to another device"
        for key in saved
        if key not in known
    )
    return state | devices


def _rng_bytes(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8:
        raise TypeError
    return value.clone()


def _tensors(tensors: Iterable[torch.Tensor]) -> str:
    found = list(tensors)
    kinds = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in found)
    kinds_text = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{len(found)} tensors ({kinds_text}), {sum(tensor.nbytes for tensor in found):,} bytes"


def _optimizer(optimizer: StateDict) -> str:
    entries = [value for values in optimizer["state"].values() for value in values.values()]
    tensors = [value for value in entries if isinstance(value, torch.Tensor)]
    named = "named" if all(isinstance(key, str) for key in optimizer["state"]) else "numbered"
    groups = len(optimizer["param_groups"])
    return f"{len(optimizer['state'])} {named} parameters in {groups} groups, {_tensors(tensors)}"


def _keys(entry: dict[str, object]) -> str:
    return ", ".join(str(key) for key in entry) or "nothing"
