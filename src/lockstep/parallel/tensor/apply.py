"""Tensor parallelism for a model that exists: its layers are split in place.

Parameters become DTensors on the mesh of the tensor-parallel ranks, split or whole, under their old names. What a
forward computes, and what it sends, is in ``hooks``; which layers are split is a ``TensorPlan``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.config.values import join_names, repr_short, suggestion
from lockstep.errors import UsageError
from lockstep.model.blocks import find_blocks
from lockstep.parallel.tensor.checks import BROUGHT, called, check_plan, complete, with_meetings, with_ties
from lockstep.parallel.tensor.hooks import (
    ColumnRowRegion,
    ColwiseEmbedding,
    ColwiseParallel,
    HeadArguments,
    Root,
    RowwiseParallel,
    VocabularyParallel,
)
from lockstep.parallel.tensor.infer import INFERRED, infer_plan
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
    TensorPlan,
    check_styles,
    features,
    plan_from_patterns,
    transformers_patterns,
)
from lockstep.parallel.tensor.randomness import HasDropout
from lockstep.parallel.tensor.sequence import SequenceBlock, check_blocks
from lockstep.torch_internals import modules as torch_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

WORDS = ("auto", "transformers", "infer")


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
    """The plan by which ``tensor_parallel`` would split ``model`` over ``ranks``; nothing is changed or sent.

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
    plan = complete(model, _choose_plan(model, ranks, options.plan, found), ranks)
    if not is_part and plan.source != INFERRED:
        plan = with_meetings(model, plan, ranks)
    if plan.source == BROUGHT and not plan.entries:
        raise UsageError(
            f"Nothing in {type(model).__name__} can be split over tp={ranks} ranks by {BROUGHT}: "
            f"{next(iter(plan.left.values()), 'the plan names none of its layers')}. Use tp_plan='infer', or "
            f"give {{pattern: style}}."
        )
    plan = with_ties(model, plan)
    check_plan(model, plan, ranks)
    if options.sequence_parallel and not (is_part and not found):
        check_blocks(model, found, plan)
        _check_meetings(plan)
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


def _check_meetings(plan: TensorPlan) -> None:
    """Whole tensors are chunks of the sequence there, features of a rank are of the whole sequence."""
    met = next((entry.name for entry in plan.entries if entry.meets), None)
    if met is not None:
        raise UsageError(
            f"sequence_parallel gives each rank a chunk of the sequence, but the output of '{met}' is combined "
            "with other tensors, which would be chunks. Turn sequence_parallel off, or leave the layer out of "
            "tp_plan."
        )


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
        return plan_from_patterns(model, wanted, "tp_plan")
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


def _why_whole(plan: TensorPlan) -> str:
    """Of the first three layers that stay whole."""
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
    # First what is whole on each rank: its gradients are sums where it works on chunks or on features.
    _reductions(specs, plan, blocks if options.sequence_parallel else {})
    specs[""].parts.append(Root(group, HasDropout(model), device))
    if options.sequence_parallel:
        for index, (name, block) in enumerate(blocks.items()):
            part = SequenceBlock(name, group, HasDropout(block), device)
            part.is_first, part.is_last = index == 0, index == len(blocks) - 1
            specs[name].parts.append(part)
    regions = _add_split_layers(specs, modules, plan, options, blocks, device)
    _prepare_attention(plan, modules, specs, regions, options.sequence_parallel)
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
    """The hooks of column and row layers and of embeddings; returns the region of each parent of the former."""
    group = specs[""].group
    regions: dict[str, ColumnRowRegion] = {}
    met = {entry.name for entry in plan.entries if entry.meets}
    for name, style in plan.styles.items():
        if style in (*COLUMN_STYLES, *ROW_STYLES):
            parent = called(modules, name)
            if parent not in regions:
                regions[parent] = ColumnRowRegion(group, HasDropout(modules[parent]), device)
                specs[parent].parts.append(regions[parent])
            # One of its layers is enough: the region marks the outputs of all.
            regions[parent].meets |= name in met
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


def _reductions(
    specs: dict[str, ParallelModuleSpec], plan: TensorPlan, blocks: Mapping[str, nn.Module]
) -> None:
    for name, spec in specs.items():
        if _inside(name, blocks):
            spec.reduced = "sequence"
    for name, style in plan.styles.items():
        if style == "replicated_with_grad_allreduce":
            for inner, spec in specs.items():
                if inner == name or inner.startswith(f"{name}."):
                    spec.reduced = "always"


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


def _prepare_attention(
    plan: TensorPlan,
    modules: dict[str, nn.Module],
    specs: dict[str, ParallelModuleSpec],
    regions: dict[str, ColumnRowRegion],
    splits_sequence: bool,
) -> None:
    for found in plan.attention:
        module, region = modules[found.name], regions[found.name]
        region.gathers = splits_sequence
        for name, value in found.attributes.items():
            setattr(module, name, value)
        if found.reports_width:
            region.reported = {width: width // region.group.mesh.size() for width in region.widths}
        if found.arguments:
            order = list(inspect.signature(modules[found.around].forward).parameters)
            places = {name: (order.index(name), dims) for name, dims in found.arguments.items()}
            specs[found.around].parts.insert(0, HeadArguments(region, found.heads, places))


def _inside(name: str, blocks: Mapping[str, nn.Module]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)
