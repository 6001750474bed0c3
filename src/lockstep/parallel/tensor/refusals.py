"""Plans that cannot work are refused before a model is changed."""

from __future__ import annotations

from torch import nn

from lockstep.errors import UsageError
from lockstep.parallel.tensor.plan import (
    COLUMN_STYLES,
    EMBEDDING_STYLES,
    PACKED,
    ROW_STYLES,
    PlanEntry,
    TensorPlan,
    check_fits,
    check_styles,
    features,
)
from lockstep.torch_internals import modules as torch_modules


def entries_of_ties(model: nn.Module, plan: TensorPlan) -> tuple[PlanEntry, ...]:
    """Return the plan's entries, with modules that share a split weight split alike.

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
    return tuple(entries.values())


def _dim(style: str) -> int | None:
    """Return the dimension of an [out, in] weight that is split; a number of its own for packed layers."""
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
    """Raise UsageError where sizes do not divide, or modules cannot be split."""
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
