"""Tensor parallelism for a model that exists: its layers are split in place.

Parameters become DTensors on the mesh of the tensor-parallel ranks, split or whole, under their old names. What a
forward computes, and what it sends, is in ``hooks``; which layers are split is a ``TensorPlan``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.config.values import join_names, repr_short, suggestion
from lockstep.errors import UsageError
from lockstep.model.blocks import find_blocks
from lockstep.parallel.tensor.attention import attention_regions
from lockstep.parallel.tensor.hooks import (
    ColumnRowRegion,
    ColwiseEmbedding,
    ColwiseParallel,
    Root,
    RowwiseParallel,
    VocabularyParallel,
)
from lockstep.parallel.tensor.infer import infer_plan
from lockstep.parallel.tensor.layers import ParallelLayer
from lockstep.parallel.tensor.loss import handle_split_logits
from lockstep.parallel.tensor.modules import (
    ParallelModuleSpec,
    TensorParallelForward,
    TensorParallelGroup,
    attach_spec,
)
from lockstep.parallel.tensor.parameters import replace_parameters
from lockstep.parallel.tensor.plan import (
    COLUMN_STYLES,
    PACKED,
    ROW_STYLES,
    WHOLE_STYLES,
    TensorPlan,
    called,
    check_styles,
    features,
    plan_from_patterns,
    transformers_patterns,
)
from lockstep.parallel.tensor.randomness import HasDropout
from lockstep.parallel.tensor.refusals import check_plan, entries_of_ties
from lockstep.parallel.tensor.sequence import SequenceBlock, check_blocks
from lockstep.torch_internals import modules as torch_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

WORDS = ("auto", "transformers", "infer")
BROUGHT = "the model's own plan"


@dataclass(frozen=True)
class TensorOptions:
    """How a model is split.

    Attributes:
        plan: ``{pattern: style}``; a ``TensorPlan`` (of a stage: ``make_plan(whole_model, ...).within(stage)``); or a
            word: "transformers" (the plan that the model brings), "infer" (found by looking at it), "auto" (the first
            of these that there is).
        sequence_parallel: Between the first and the last block, activations are split along the sequence.
        loss_parallel: In training, logits stay split over the vocabulary: a DTensor that ``F.cross_entropy`` takes.
        is_main: Whether this rank logs the plan.
        blocks: Name -> module, for ``sequence_parallel``; by default those that ``find_blocks`` finds.
    """

    plan: str | Mapping[str, str] | TensorPlan = "auto"
    sequence_parallel: bool = False
    loss_parallel: bool = False
    is_main: bool = True
    blocks: Mapping[str, nn.Module] | None = None


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, options: TensorOptions | None = None) -> TensorPlan:
    """Split ``model`` over the ranks of ``mesh`` (1-D), in place. Collective; all ranks take the first one's values.

    All parameters become new ``nn.Parameter`` objects that are DTensors on ``mesh``, also those that stay whole; ties
    stay ties. Gradients are DTensors of the same placements. Inputs and outputs of the model are plain tensors, the
    same on all ranks, but for logits with ``loss_parallel``. ``module.weight`` is a plain tensor of this rank's part
    while a forward runs. Attributes that count heads are changed where the module's forward needs it.

    Raises:
        UsageError: the plan does not fit the model, or sizes do not divide; nothing was changed then.
    """
    options = options or TensorOptions()
    blocks = dict(find_blocks(model) if options.blocks is None else options.blocks)
    plan = make_plan(model, mesh.size(), options, blocks)
    _split(model, mesh, plan, options, blocks)
    if options.is_main:
        logger.info("%s", plan)
    return plan


def make_plan(
    model: nn.Module,
    ranks: int,
    options: TensorOptions | None = None,
    blocks: Mapping[str, nn.Module] | None = None,
) -> TensorPlan:
    """Return the plan by which ``tensor_parallel`` would split ``model`` over ``ranks``; nothing is changed or sent.

    Raises:
        UsageError: as ``tensor_parallel``.
    """
    options = options or TensorOptions()
    if any(isinstance(module, TensorParallelForward) for module in model.modules()):
        raise UsageError(
            f"{type(model).__name__} is tensor-parallel already. Pass the model to prepare() only once."
        )
    found = dict(find_blocks(model) if blocks is None else blocks)
    # Its plan was made for a whole model, of which this is a part.
    is_part = isinstance(options.plan, TensorPlan)
    plan = _choose_plan(model, ranks, options.plan, found)
    if not is_part:
        plan = replace(plan, entries=entries_of_ties(model, plan))
        plan = replace(plan, attention=attention_regions(model, plan, ranks))
    check_plan(model, plan, ranks)
    if options.sequence_parallel and not (is_part and not found):
        check_blocks(model, found)
    if (
        options.loss_parallel
        and not is_part
        and not ({"colwise_gather_output", "embedding_rowwise"} & set(plan.styles.values()))
    ):
        raise UsageError(
            f"loss_parallel needs an output layer that is split over the vocabulary, but the plan for "
            f"{type(model).__name__} has none. Name one in tp_plan as 'colwise_gather_output', or turn "
            "loss_parallel off."
        )
    return plan


def _choose_plan(model: nn.Module, ranks: int, wanted: object, blocks: dict[str, nn.Module]) -> TensorPlan:
    if isinstance(wanted, TensorPlan):
        return wanted
    # A model that is written with split layers needs no plan.
    if wanted in WORDS and any(isinstance(module, ParallelLayer) for module in model.modules()):
        return TensorPlan("the model's own layers")
    if isinstance(wanted, Mapping):
        if not wanted:
            raise UsageError(
                "tp_plan is empty, so no layer would be split. Leave it out, and a plan is found automatically."
            )
        plan = plan_from_patterns(model, wanted, "tp_plan")
        if any(style not in WHOLE_STYLES for style in plan.styles.values()):
            return plan
        return _without(model, _choose_plan(model, ranks, "auto", blocks), plan)
    if wanted not in WORDS:
        raise UsageError(
            f"tp_plan={repr_short(wanted)} is not a plan.{suggestion(str(wanted), WORDS)} Give {{pattern: style}}, or "
            f"one of {', '.join(WORDS)}."
        )
    patterns = {} if wanted == "infer" else transformers_patterns(model)
    if patterns:
        plan = plan_from_patterns(model, patterns, BROUGHT, must_match=False)
        if plan.entries:
            return plan
        if wanted == "transformers":
            check_styles(patterns, BROUGHT)
    if wanted == "transformers":
        raise UsageError(
            f"{type(model).__name__} has no tensor-parallel plan of its own. Use tp_plan='infer', or give "
            f"{{pattern: style}}."
        )
    plan = infer_plan(model, ranks, blocks)
    if not plan.entries:
        raise UsageError(
            f"Nothing in {type(model).__name__} could be split over tp={ranks} ranks: {_why_whole(plan)}. "
            "Name its layers, as tp_plan={'*.up': 'colwise', '*.down': 'rowwise'}, or use data parallelism or ZeRO. If "
            f"it is a loss with parameters, prepare one module that calls the model, then {type(model).__name__}."
        )
    return plan


def _without(model: nn.Module, plan: TensorPlan, whole: TensorPlan) -> TensorPlan:
    """Leave out what a plan of whole modules alone names: modules, or layers with those of their pair."""
    modules = dict(model.named_modules())
    named = {called(modules, name) if name in plan.styles else name for name in whole.styles}
    is_left = {
        e.name: any(e.name == n or not n or e.name.startswith(f"{n}.") for n in named) for e in plan.entries
    }
    left = {**plan.left, **{name: "tp_plan keeps it whole" for name, is_whole in is_left.items() if is_whole}}
    return replace(plan, entries=tuple(e for e in plan.entries if not is_left[e.name]), left=left)


def _why_whole(plan: TensorPlan) -> str:
    """Say why the first three layers that stay whole do so."""
    if not plan.left:
        return "it has no nn.Linear and no embedding of tokens"
    return join_names(f"'{name}' ({why})" for name, why in plan.left.items())


# -- splitting -------------------------------------------------------------------------------------------


def _split(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: TensorPlan,
    options: TensorOptions,
    blocks: Mapping[str, nn.Module],
) -> None:
    """Replace parameters by DTensors, then let each module do its part around its own forward.

    Column and row layers of one parent share a region: its input is sent once, and what lies between them works on a
    rank's features.
    """
    group = TensorParallelGroup(mesh, options.sequence_parallel, options.loss_parallel)
    device = next((p.device for p in nn.Module.parameters(model)), torch.device("cpu"))
    modules = dict(model.named_modules())
    specs = {
        name: ParallelModuleSpec(group)
        for name, module in modules.items()
        if not name or next(nn.Module.parameters(module), None) is not None
    }
    partial = [name for name, style in plan.styles.items() if style == "replicated_with_grad_allreduce"]
    for name, spec in specs.items():
        spec.in_sequence = options.sequence_parallel and _inside(name, blocks)
        spec.is_partial = _inside(name, partial)
    specs[""].parts.append(Root(group, HasDropout(model), device))
    if options.sequence_parallel:
        for index, (name, block) in enumerate(blocks.items()):
            part = SequenceBlock(name, group, HasDropout(block), device)
            part.is_first, part.is_last = index == 0, index == len(blocks) - 1
            specs[name].parts.append(part)
    regions = _add_split_layers(specs, modules, plan, options, blocks, device)
    for found in plan.attention:
        regions[called(modules, f"{found.name}.")].set_heads(found.heads, gathers=options.sequence_parallel)
        for name, value in found.attributes.items():
            setattr(modules[found.name], name, value)
    replace_parameters(modules, plan, mesh)
    classes: dict[object, type] = {}
    for name, spec in specs.items():
        module = modules[name]
        # Containers without a forward have nothing to do around it, and a ``ParallelLayer`` sends by itself.
        is_called = type(module).forward is not nn.Module.forward
        if (is_called or torch_modules.parameters_of(module)) and not isinstance(module, ParallelLayer):
            attach_spec(module, spec, classes)
    if options.loss_parallel:
        handle_split_logits()


def _add_split_layers(
    specs: dict[str, ParallelModuleSpec],
    modules: dict[str, nn.Module],
    plan: TensorPlan,
    options: TensorOptions,
    blocks: Mapping[str, nn.Module],
    device: torch.device,
) -> dict[str, ColumnRowRegion]:
    """Add the hooks of split layers; return the region of each parent of column and row layers."""
    group = specs[""].group
    regions: dict[str, ColumnRowRegion] = {}
    for name, style in plan.styles.items():
        if style in (*COLUMN_STYLES, *ROW_STYLES):
            parent = called(modules, name)
            if parent not in regions:
                regions[parent] = ColumnRowRegion(group, HasDropout(modules[parent]), device)
                specs[parent].parts.append(regions[parent])
            specs[name].layer = _linear_part(name, modules[name], style, group, regions[parent])
            specs[name].layer.in_sequence = _inside(name, blocks) and options.sequence_parallel
            if style == "colwise_gather_output" and not _inside(name, blocks):
                specs[name].layer.is_head = True
        elif style == "embedding_rowwise":
            specs[name].layer = VocabularyParallel(
                name, group, torch_modules.parameters_of(modules[name])["weight"].shape[0]
            )
        elif style == "embedding_colwise":
            specs[name].layer = ColwiseEmbedding(
                name, group, torch_modules.parameters_of(modules[name])["weight"].shape[1]
            )
        if specs[name].layer is not None:
            specs[name].parts.append(specs[name].layer)
    return regions


def _linear_part(
    name: str, module: nn.Module, style: str, group: TensorParallelGroup, region: ColumnRowRegion
) -> ColwiseParallel | RowwiseParallel:
    if style in ROW_STYLES:
        wide = features(module)[0]
        return RowwiseParallel(name, group, ("weight",), region, wide, style == "rowwise_split_input")
    column = ColwiseParallel(name, group, ("weight", "bias"), region)
    width, size = features(module)
    column.pieces = PACKED.get(style, 1)
    region.widths.add(width)
    if style == "colwise_gather_output":
        column.size = size
    return column


def _inside(name: str, blocks: Iterable[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)
