"""Which module of a model is split in which way, and where that is known from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from lockstep.config.values import suggestion
from lockstep.errors import UsageError
from lockstep.torch_internals import modules as torch_modules

# style -> what it does with the weight of a module. The names are those of transformers' plans.
STYLES: dict[str, str] = {
    "colwise": "output features split",
    "colwise_gather_output": "output features split, gathered",
    "packed_colwise": "two halves of output features, each split (gate and up in one)",
    "qkv_colwise": "three thirds of output features, each split (query, key and value in one)",
    "rowwise": "input features split, outputs added",
    "rowwise_split_input": "input features split, its whole input too, outputs added",
    "embedding_rowwise": "vocabulary split, outputs added",
    "embedding_colwise": "embedding features split, gathered",
    "replicated_with_grad_allreduce": "whole, used on parts: gradients added",
    "sequence_parallel": "whole",
    "replicate": "whole",
}
OTHER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
COLUMN_STYLES = ("colwise", "colwise_gather_output", "packed_colwise", "qkv_colwise")
ROW_STYLES = ("rowwise", "rowwise_split_input")
EMBEDDING_STYLES = ("embedding_rowwise", "embedding_colwise")
PACKED = {"packed_colwise": 2, "qkv_colwise": 3}
WHOLE_STYLES = ("replicate", "sequence_parallel", "replicated_with_grad_allreduce")


@dataclass(frozen=True)
class PlanEntry:
    """The ``style`` of the module of this ``name``, and ``why`` it has it."""

    name: str
    style: str
    why: str


@dataclass(frozen=True)
class AttentionRegion:
    """An attention module whose heads are split; ``attributes`` of it, with the values that count a rank's share."""

    name: str
    heads: int
    kv_heads: int
    attributes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorPlan:
    """The style of each module that is not left as it is; ``str`` gives a table for review.

    ``left``: name -> why, of layers with weights that stay whole although they look as if they could be split.
    """

    source: str = ""
    entries: tuple[PlanEntry, ...] = ()
    attention: tuple[AttentionRegion, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def styles(self) -> dict[str, str]:
        """Name -> style."""
        return {entry.name: entry.style for entry in self.entries}

    def within(self, model: nn.Module) -> TensorPlan:
        """Return what this plan says of modules of ``model``, such as a stage of the one that it was made for."""
        names = {name for name, _ in model.named_modules()}
        return TensorPlan(
            self.source,
            tuple(entry for entry in self.entries if entry.name in names),
            tuple(region for region in self.attention if region.name in names),
            {name: why for name, why in self.left.items() if name in names},
        )

    def __str__(self) -> str:
        rows = [
            *((e.name, e.style, e.why) for e in self.entries),
            *((name, "whole", why) for name, why in self.left.items()),
        ]
        merged: dict[tuple[str, str, str], int] = {}
        for name, style, why in rows:
            key = (".".join("*" if part.isdigit() else part for part in name.split(".")), style, why)
            merged[key] = merged.get(key, 0) + 1
        table = [("module", "style", "times", "why")]
        table += [(name, style, str(times), why) for (name, style, why), times in merged.items()]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {style:<{widths[1]}}  {times:>{widths[2]}}  {why}"
            for name, style, times, why in table
        ]
        title = f"tensor-parallel plan ({self.source})" if self.source else "tensor-parallel plan"
        return "\n".join([title, *lines])


def plan_from_patterns(
    model: nn.Module, patterns: Mapping[str, str], source: str, must_match: bool = True
) -> TensorPlan:
    """Make the plan of ``{pattern: style}``: each part of a pattern matches one part of a module's name.

    Where several patterns match a module the last one counts. A plan that need not match is one that a model brings:
    of it, modules stay whole whose styles are unknown here, and so do parameters that have styles of their own.

    Raises:
        UsageError: an unknown style, a pattern without a match (if it ``must_match``), or a style that the module
            cannot have.
    """
    left: dict[str, str] = {}
    if must_match:
        check_styles(patterns, source)
    names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: dict[str, PlanEntry] = {}
    for pattern, given in patterns.items():
        style = OTHER_NAMES.get(given, given)
        matches = [name for name in names if matches_parts(pattern, name)]
        if not must_match and style not in STYLES:
            left.update(dict.fromkeys(matches, f"{source} says '{given}', which is unknown here"))
            continue
        if not matches and must_match and any(matches_parts(pattern, name) for name in parameters):
            raise UsageError(
                f"'{pattern}' in {source} names a parameter, but styles belong to modules. Name its module."
            )
        if not matches and must_match:
            generic = sorted({_generic(name) for name in names})
            raise UsageError(
                f"'{pattern}' in {source} matches no module of "
                f"{type(model).__name__}.{suggestion(pattern, generic)} Each * in a pattern stands for one part "
                "of a name between dots, as in 'layers.*.mlp.up'."
            )
        for name in matches:
            check_fits(name, names[name], style, source)
            found.pop(name, None)
            found[name] = PlanEntry(name, style, f"{source}: {pattern}")
    return TensorPlan(source, tuple(found.values()), left=left)


def check_styles(patterns: Mapping[str, str], source: str) -> None:
    unknown = {
        pattern: style
        for pattern, style in patterns.items()
        if not isinstance(style, str) or style not in (*STYLES, *OTHER_NAMES)
    }
    if not unknown:
        return
    shown = ", ".join(f"'{style}' (of {pattern})" for pattern, style in list(unknown.items())[:4])
    hint = suggestion(str(next(iter(unknown.values()))), [*STYLES, *OTHER_NAMES])
    raise UsageError(
        f"{source} has styles that are unknown here: {shown}.{hint} Known styles are {', '.join(STYLES)}. Give a "
        f"plan of your own, tp_plan={{pattern: style}}, or tp_plan='infer'."
    )


def check_fits(name: str, module: nn.Module, style: str, source: str) -> None:
    """Raise UsageError where ``module`` cannot have the ``style``."""
    if isinstance(module, nn.MultiheadAttention) and style not in WHOLE_STYLES:
        raise UsageError(
            f"'{name}' is an nn.MultiheadAttention, which computes with all of its weights at once and cannot be "
            f"split as '{style}'. Leave it whole, or replace it by lockstep.nn.ParallelAttention."
        )
    if style in WHOLE_STYLES:
        return
    if style in EMBEDDING_STYLES:
        fits, wanted = isinstance(module, nn.Embedding), "an nn.Embedding"
    else:
        fits, wanted = is_linear(module), "an nn.Linear or a Conv1D of transformers"
    if not fits:
        raise UsageError(
            f"'{name}' is a {type(module).__name__}, but '{style}' in {source} is for {wanted}. Name such a layer, or "
            "leave it out."
        )
    if "weight" not in torch_modules.parameters_of(module):
        raise UsageError(
            f"The weight of '{name}' is computed from other tensors (a parametrization), so it cannot be split "
            f"as '{style}'. Leave it out of {source}."
        )


def transformers_patterns(model: nn.Module) -> dict[str, str]:
    """Return the plan that a transformers model brings, of its own names; empty where there is none."""
    own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if isinstance(own, Mapping) and own:
        return dict(own)
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not base:
        return {}
    # The plan of the base model names modules from there.
    prefix = getattr(model, "base_model_prefix", "")
    inner = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {f"{inner}{pattern}": style for pattern, style in base.items()}


def words(text: str) -> tuple[str, ...]:
    """Return the words of a table of names."""
    return tuple(text.split())


def is_linear(module: nn.Module) -> bool:
    """Return whether it is nn.Linear, or transformers' Conv1D, whose weight is [in, out]."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def features(module: nn.Module) -> tuple[int, int]:
    """Return (input, output) features of a linear layer."""
    rows, columns = torch_modules.parameters_of(module)["weight"].shape
    return (rows, columns) if is_conv1d(module) else (columns, rows)


def called(modules: Mapping[str, nn.Module], name: str) -> str:
    """Return the nearest module around ``name`` that has a forward."""
    parent = name.rpartition(".")[0]
    while parent and type(modules[parent]).forward is nn.Module.forward:
        parent = parent.rpartition(".")[0]
    return parent


def matches_parts(pattern: str, name: str) -> bool:
    patterns, parts = pattern.split("."), name.split(".")
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))


def _generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
