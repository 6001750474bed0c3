"""What a plan leaves open is found out, and what cannot work is refused, before a model is changed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from lockstep.errors import UsageError
from lockstep.model.blocks import joined_name
from lockstep.model.equal_modules import Found
from lockstep.parallel.tensor.attention import COUNTS, by_names_alone, check_heads, heads_of
from lockstep.parallel.tensor.infer import output_layer, projections, rehearsed_region
from lockstep.parallel.tensor.plan import (
    COLUMN_STYLES,
    EMBEDDING_STYLES,
    PACKED,
    ROW_STYLES,
    AttentionRegion,
    PlanEntry,
    TensorPlan,
    check_fits,
    check_styles,
    features,
)
from lockstep.parallel.tensor.rehearsal_run import TensorRehearsal
from lockstep.parallel.tensor.rehearse import Different, Passed, run_rehearsal
from lockstep.torch_internals import modules as torch_modules


def complete(model: nn.Module, plan: TensorPlan, ranks: int) -> TensorPlan:
    """The plan with its attention modules, where it was given without: their heads, and what counts them.

    Where a module can be run alone, that also tells whether the rows of a fused layer are [q; k; v], and which
    modules inside work on parts.

    Raises:
        UsageError: heads do not divide, or running the module shows that it cannot be split like this.
    """
    if plan.attention:
        return plan
    modules = dict(model.named_modules())
    regions: list[AttentionRegion] = []
    known = Found(attributes=COUNTS)
    for name, module in modules.items():
        # Query, key and value must all be split, because each rank computes some of the heads and needs all three of
        # these.
        for columns, query, key in projections(module):
            entries = {entry.name: entry for entry in plan.entries}
            names = [joined_name(name, column) for column in columns]
            split = [entries[n] for n in names if n in entries and entries[n].style in COLUMNS]
            if not split:
                continue
            if len(split) < len(names):
                missing = ", ".join(repr(n) for n in names if n not in {entry.name for entry in split})
                raise UsageError(
                    f"{plan.source} splits '{split[0].name}' but not {missing} of the same attention, but all of "
                    "these must have the same heads. Give all of them the style 'colwise', or none."
                )
            place, prefix, row = output_layer(name, module, columns, modules)
            heads = heads_of(module, query, key)
            if heads is None or row is None:
                continue
            check_heads(name, heads, ranks)
            styles = {
                joined_name(prefix, column): entry.style for column, entry in zip(columns, split, strict=True)
            }
            rehearsal = TensorRehearsal(modules[place], styles, (row,), ranks, prefix, heads[0])
            found = rehearsed_region(known, rehearsal, name, module, heads)
            # It ran, and a rank's part was wrong: the layers stay whole, or the user's plan is refused.
            if isinstance(found, Different):
                plan = without(plan, name, [*names, joined_name(place, row)], found)
            # It could not be run alone, so the names of its attributes must do.
            elif isinstance(found, str):
                regions.append(by_names_alone(name, module, heads, ranks))
            else:
                region, passed, styles = found
                regions.append(replace(region, name=name, around=place))
                entries.update(
                    {
                        joined_name(place, c): replace(entries[joined_name(place, c)], style=s)
                        for c, s in styles.items()
                    }
                )
                plan = replace(plan, entries=tuple(entries.values()))
                plan = with_passed(plan, place, list(styles), passed)
    return replace(plan, attention=tuple(regions))


def with_ties(model: nn.Module, plan: TensorPlan) -> TensorPlan:
    """The plan with modules that share a split weight split alike.

    Raises:
        UsageError: they cannot be.
    """
    entries = {entry.name: entry for entry in plan.entries}
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        weight = torch_modules.parameters_of(module).get("weight")
        if weight is not None:
            # By identity: the layers that share a weight have names of their own.
            owners.setdefault(id(weight), []).append((name, module))
    for sharing in owners.values():
        dims = {name: _dim(entries[name].style) if name in entries else None for name, _ in sharing}
        if len(sharing) < 2 or set(dims.values()) == {None}:
            continue
        wanted = {dim for dim in dims.values() if dim is not None}
        first = next(name for name, dim in dims.items() if dim is not None)
        if len(wanted) > 1:
            raise UsageError(
                f"{' and '.join(map(repr, dims))} share one weight, but the plan splits it in two ways. Split both by "
                "the vocabulary: 'embedding_rowwise' and 'colwise_gather_output'."
            )
        for name, module in sharing:
            if dims[name] is None:
                style = _same_split(name, module, wanted.pop() if len(wanted) == 1 else 0, first)
                wanted = {_dim(style)}  # type: ignore[arg-type]
                entries.pop(name, None)
                entries[name] = PlanEntry(name, style, f"shares its weight with {first}")
    return replace(plan, entries=tuple(entries.values()))


def _dim(style: str) -> int | None:
    """The dimension of an [out, in] weight that is split; a number of its own for packed layers."""
    # Pieces are cut one by one, so such a shard is not that of a plain cut along dim 0.
    if style in PACKED:
        return 10 + PACKED[style]
    if style in COLUMN_STYLES or style == "embedding_rowwise":
        return 0
    return 1 if style in ROW_STYLES or style == "embedding_colwise" else None


def _same_split(name: str, module: nn.Module, dim: int, other: str) -> str:
    if isinstance(module, nn.Embedding) and dim in (0, 1):
        return "embedding_rowwise" if dim == 0 else "embedding_colwise"
    if isinstance(module, nn.Linear) and dim in (0, 1):
        return "colwise_gather_output" if dim == 0 else "rowwise_split_input"
    raise UsageError(
        f"'{name}' shares its weight with '{other}', which the plan splits, but a {type(module).__name__} cannot "
        f"be split in the same way. Leave '{other}' out of the plan."
    )


def check_plan(model: nn.Module, plan: TensorPlan, ranks: int) -> None:
    """Raises UsageError where sizes do not divide, or modules cannot be split."""
    check_styles(plan.styles, plan.source or "tp_plan")
    modules = dict(model.named_modules())
    aliases = {id(module): name for name, module in modules.items()}
    for name, style in plan.styles.items():
        module = modules.get(name)
        if module is None:
            try:
                first = aliases[id(model.get_submodule(name))]
            except (AttributeError, KeyError):
                raise UsageError(
                    f"The plan names '{name}', but {type(model).__name__} has no such module. Correct the name."
                ) from None
            raise UsageError(
                f"'{name}' is the same module as '{first}'. Name it once in tp_plan, as '{first}'."
            )
        check_fits(name, module, style, plan.source or "tp_plan")
        if "forward" in vars(module) and style not in ("replicate", "sequence_parallel"):
            raise UsageError(
                f"'{name}' has a forward as an attribute, which hides the one of its class {type(module).__name__}, so "
                "it cannot be split. Change forward in a subclass, or leave it out of tp_plan."
            )
        if style in (*COLUMN_STYLES, *ROW_STYLES):
            _check_linear(name, module, style, ranks)
        elif style in EMBEDDING_STYLES:
            _check_embedding(name, module, style, ranks)
    for name, module in modules.items():
        if any(
            type(p).__name__.startswith("Uninitialized") for p in torch_modules.parameters_of(module).values()
        ):
            raise UsageError(
                f"'{name}' has weights whose shape is not known before its first call. Run a batch through the model "
                "first, or give the layer its input size."
            )


def _check_linear(name: str, module: nn.Module, style: str, ranks: int) -> None:
    is_column = style in COLUMN_STYLES
    number = features(module)[1 if is_column else 0]
    kind = "output" if is_column else "input"
    if style in ("colwise_gather_output", "rowwise_split_input"):
        _check_parts(name, number, f"{kind} features", ranks)
    elif number % (ranks * PACKED.get(style, 1)):
        pieces = f" in {PACKED[style]} pieces" if style in PACKED else ""
        raise UsageError(
            f"The {number} {kind} features of '{name}'{pieces} cannot be divided among tp={ranks} ranks. "
            "Choose sizes that divide, or leave the layer out with a tp_plan of your own."
        )


def _check_embedding(name: str, module: nn.Embedding, style: str, ranks: int) -> None:
    rows, width = torch_modules.parameters_of(module)["weight"].shape
    if module.max_norm is not None or module.sparse:
        raise UsageError(
            f"'{name}' has {'max_norm' if module.max_norm is not None else 'sparse gradients'}, which a split "
            "embedding cannot have. Turn that off, or leave the embedding out with a tp_plan of your own."
        )
    if style == "embedding_rowwise":
        _check_parts(name, rows, "rows", ranks)
    else:
        _check_parts(name, width, "features", ranks)


def _check_parts(name: str, number: int, kind: str, ranks: int) -> None:
    """Parts may differ by some elements, but each rank has one."""
    # Parts are cut as by torch.chunk: ceil(n / N) for each rank, and what is left for the last.
    if -(-number // ranks) * (ranks - 1) >= number:
        raise UsageError(
            f"The {number} {kind} of '{name}' are too few for tp={ranks} ranks: the last rank would have none. "
            "Use fewer ranks, or leave the layer out with a tp_plan of your own."
        )


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
            # Of a user's plan the layer itself says what it was given.
            if plan.source == BROUGHT:
                plan = without(plan, parent, list(rows), "no layer before it is split by columns")
            continue
        rehearsal = TensorRehearsal(modules[parent], columns, rows, ranks)
        result = known.find_once(
            rehearsal.module, (tuple(columns.items()), rows), partial(run_rehearsal, rehearsal)
        )
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
        # A group without both column and row layers is joined with the module around it, until none is left.
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
    # What else is split inside fits only with these layers split.
    tied = (*COLUMNS, "rowwise", "replicated_with_grad_allreduce")
    inside = [e.name for e in plan.entries if _is_inside(e.name, parent) and e.style in tied]
    left = {**plan.left, **dict.fromkeys([*names, *inside], reason)}
    return replace(plan, entries=tuple(e for e in plan.entries if e.name not in left), left=left)


def with_passed(plan: TensorPlan, parent: str, columns: list[str], passed: Passed) -> TensorPlan:
    """The plan with what was seen of ``columns`` in ``parent``."""
    names = {joined_name(parent, column) for column in columns}
    entries = {}
    for entry in plan.entries:
        if entry.name in names:
            entry = replace(entry, meets=passed.meets)
        elif passed.meets and _is_of_parts(entry) and _is_inside(entry.name, parent):
            # Its gradients are summed where it meets the features, and not once more.
            entry = replace(entry, style="replicate")
        entries[entry.name] = entry
    for inner in passed.partial:
        name = joined_name(parent, inner)
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
