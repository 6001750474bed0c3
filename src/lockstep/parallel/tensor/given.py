"""What a given plan leaves open: its layers are rehearsed as those of a plan that is found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from lockstep.errors import UsageError
from lockstep.model.equal_modules import Found
from lockstep.parallel.tensor.plan import PlanEntry, TensorPlan
from lockstep.parallel.tensor.rehearse import Different, Passed, TensorRehearsal, rehearse

COLUMNS = ("colwise", "packed_colwise", "qkv_colwise")
BROUGHT = "the model's own plan"


def with_meetings(model: nn.Module, plan: TensorPlan, ranks: int) -> TensorPlan:
    """The plan, and where whole tensors meet the output of its column layers.

    Where the layers of a module cannot be split like this, those of a plan that the model brings stay whole. Of
    modules that cannot be run alone, all whole tensors count that meet the features.

    Raises:
        UsageError: so it is in a plan that was given.
    """
    modules = dict(model.named_modules())
    attention = {name for region in plan.attention for name in (region.name, region.around)}
    known = Found()
    for parent, group in _groups(modules, plan).items():
        if parent in attention:
            continue
        columns = {_within(parent, e.name): e.style for e in group if e.style in COLUMNS}
        rows = tuple(_within(parent, e.name) for e in group if e.style == "rowwise")
        if not rows:
            continue
        if not columns:
            if plan.source == BROUGHT:  # else the layer itself says what it was given
                plan = without(plan, parent, list(rows), "no layer before it is split by columns")
            continue
        rehearsal = TensorRehearsal(modules[parent], columns, rows, ranks)
        result = known.of(rehearsal.module, (tuple(columns.items()), rows), partial(rehearse, rehearsal))
        if isinstance(result, Different):
            plan = without(plan, parent, [entry.name for entry in group], result)
        else:
            passed = result if isinstance(result, Passed) else Passed(meets=True)
            plan = with_passed(plan, parent, list(columns), passed)
    return plan


def _groups(modules: dict[str, nn.Module], plan: TensorPlan) -> dict[str, list[PlanEntry]]:
    """Module -> column and row layers in it that belong together; neither are alone, but at the root."""
    groups: dict[str, list[PlanEntry]] = {}
    for entry in plan.entries:
        if entry.style in (*COLUMNS, "rowwise"):
            groups.setdefault(called(modules, entry.name), []).append(entry)
    while True:
        alone = next(
            (
                name
                for name, group in groups.items()
                if name and len({e.style == "rowwise" for e in group}) == 1
            ),
            None,
        )
        if alone is None:
            return groups
        groups.setdefault(called(modules, alone), []).extend(groups.pop(alone))


def without(plan: TensorPlan, parent: str, names: list[str], reason: str) -> TensorPlan:
    """The plan with these layers whole, if the model brought it.

    Raises:
        UsageError: a user gave it.
    """
    if plan.source != BROUGHT:
        raise UsageError(
            f"'{parent}' cannot be split as {plan.source} says, because {reason}. "
            "Leave its layers out of the plan."
        )
    tied = (*COLUMNS, "rowwise", "replicated_with_grad_allreduce")
    inside = [e.name for e in plan.entries if _is_inside(e.name, parent) and e.style in tied]
    left = {**plan.left, **dict.fromkeys([*names, *inside], reason)}
    return replace(plan, entries=tuple(e for e in plan.entries if e.name not in left), left=left)


def with_passed(plan: TensorPlan, parent: str, columns: list[str], passed: Passed) -> TensorPlan:
    """The plan with what was seen of ``columns`` in ``parent``."""
    names = {_join(parent, column) for column in columns}
    entries = {}
    for entry in plan.entries:
        if entry.name in names:
            entry = replace(entry, meets=passed.meets)
        elif passed.meets and _is_of_parts(entry) and _is_inside(entry.name, parent):
            entry = replace(entry, style="replicate")  # what meets features is added where it does
        entries[entry.name] = entry
    for inner in passed.partial:
        name = _join(parent, inner)
        entries.setdefault(
            name, PlanEntry(name, "replicated_with_grad_allreduce", "works on parts of features")
        )
    return replace(plan, entries=tuple(entries.values()))


def called(modules: dict[str, nn.Module], name: str) -> str:
    """The nearest module around ``name`` that has a forward."""
    parent = name.rpartition(".")[0]
    while parent and type(modules[parent]).forward is nn.Module.forward:
        parent = parent.rpartition(".")[0]
    return parent


def _is_of_parts(entry: PlanEntry) -> bool:
    return entry.style == "replicated_with_grad_allreduce"


def _is_inside(name: str, parent: str) -> bool:
    return not parent or name.startswith(f"{parent}.")


def _within(parent: str, name: str) -> str:
    return name[len(parent) + 1 :] if parent else name


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent and name else parent or name
