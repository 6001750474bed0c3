"""Which parameters of a model are gathered and reduced together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.config.enums import Offload
from lockstep.config.parallel import GROUP_BYTES, Parallel, is_one_group
from lockstep.errors import UsageError
from lockstep.model.blocks import shared_parameters
from lockstep.parallel.materialize import modules_inside_out
from lockstep.torch_internals import fsdp2, fsdp2_forward
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.fsdp2_backward import is_compiled

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FullyShardGroup:
    """What ``fully_shard`` is applied to at once.

    Attributes:
        modules: The model, a block, or blocks that stand side by side in a list.
        members: The modules whose own parameters are in the group, inner ones first.
    """

    modules: list[nn.Module]
    members: list[nn.Module]

    @classmethod
    def of(cls, modules: list[nn.Module]) -> FullyShardGroup:
        """Return all that these modules hold."""
        return cls(modules, [inner for module in modules for inner in modules_inside_out(module)])

    @property
    def name(self) -> str:
        """For messages."""
        return type(self.modules[0]).__name__

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.members for parameter in module.parameters(recurse=False)]


def find_groups(
    model: nn.Module, blocks: dict[str, nn.Module], parallel: Parallel, is_cast: bool, is_main: bool
) -> list[FullyShardGroup]:
    """Return the groups in the order of their blocks; the last one is the model with all that is in no block.

    A model of up to ``GROUP_BYTES`` is one group. In others each block is one, and blocks that stand side by side in a
    list share one up to that size. Blocks that the user has named are groups of their own.

    Args:
        is_cast: Forward computes in another type than that of the parameters.
    """
    if _is_one_group(model, parallel):
        return [FullyShardGroup.of([model])]
    alone = _groupable(model, blocks, is_main)
    groups = [FullyShardGroup.of(modules) for modules in _neighbours(model, alone, parallel, is_cast)]
    inside = {module for group in groups for module in group.members}
    return [*groups, FullyShardGroup([model], [m for m in modules_inside_out(model) if m not in inside])]


def _is_one_group(model: nn.Module, parallel: Parallel) -> bool:
    """See ``is_one_group``. A model with parameters of several types has several messages."""
    parameters = list(nn.Module.parameters(model))
    types = {parameter.dtype for parameter in parameters}
    return len(types) == 1 and is_one_group(parallel, _bytes_of(parameters), GROUP_BYTES)


def _groupable(model: nn.Module, blocks: dict[str, nn.Module], is_main: bool) -> list[nn.Module]:
    """Return the blocks that share no parameter with other modules, and have some to shard."""
    shared = shared_parameters(model, blocks)
    merged = {name for names in shared.values() for name in names if name in blocks}
    if merged and is_main:
        logger.info(
            "%s are gathered together with the root group of the model, because they share parameters with "
            "other modules (%s).",
            ", ".join(sorted(merged)),
            ", ".join(shared),
        )
    found = [
        block
        for name, block in blocks.items()
        if name not in merged and not all(map(stays_whole, nn.Module.parameters(block)))
    ]
    if not found and is_main:
        logger.warning(
            "No blocks of %s are sharded one by one, so all of its weights are gathered at once. Name its blocks: "
            "parallel='zero=... blocks=CLASS'.",
            type(model).__name__,
        )
    return found


# Neighbouring blocks ---------------------------------------------------------------------------------


def _neighbours(
    model: nn.Module, blocks: list[nn.Module], parallel: Parallel, is_cast: bool
) -> Iterator[list[nn.Module]]:
    """Return the blocks, those together that are gathered together."""
    first = {block: [block] for block in blocks}
    if _may_share(model, blocks, parallel, is_cast):
        for run in _runs(model, set(blocks)):
            # A run takes the place of its first block.
            first.update((block, run if block is run[0] else []) for block in run)
    return (run for run in first.values() if run)


def _may_share(model: nn.Module, blocks: list[nn.Module], parallel: Parallel, is_cast: bool) -> bool:
    """Return whether blocks of this model may share a group at all.

    Not where less memory or these very blocks were asked for, where parameters are split in other ways as well, where
    batch normalisation computes in a type of its own, nor in compiled code, in which hooks cannot count, nor with
    torch 2.11.
    """
    if (
        parallel.blocks
        or parallel.hpz
        or parallel.offload is not Offload.NONE
        or not fsdp2_forward.is_known()
    ):
        return False
    if is_cast and any(isinstance(module, torch_modules.BatchNorm) for module in model.modules()):
        return False
    return not (any(map(is_compiled, [model, *blocks])) or any(map(is_dtensor, nn.Module.parameters(model))))


def _runs(model: nn.Module, blocks: set[nn.Module]) -> Iterator[list[nn.Module]]:
    """Blocks that follow one another in a list and share a group: of one type, all trained or none, and small."""
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        run: list[nn.Module] = []
        for member in torch_modules.children_of(container).values():
            if member is None or next(nn.Module.parameters(member), None) is None:
                # An activation between two blocks does not part them.
                continue
            # A block that stands at two places is called twice in a forward.
            may_join = member in blocks and uses[member] == 1
            if run and not (may_join and _fit_together([*run, member])):
                yield run
                run = []
            if may_join:
                run.append(member)
        if run:
            yield run


def _fit_together(modules: list[nn.Module]) -> bool:
    parameters = [parameter for module in modules for parameter in nn.Module.parameters(module)]
    types = {parameter.dtype for parameter in parameters}
    trained = {any(p.requires_grad for p in nn.Module.parameters(module)) for module in modules}
    return len(types) == len(trained) == 1 and _bytes_of(parameters) <= GROUP_BYTES


def _bytes_of(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


# Types -----------------------------------------------------------------------------------------------


def check_types(groups: list[FullyShardGroup], may_be_split: bool) -> None:
    """Raise UsageError where gradients of one group cannot be reduced together."""
    for group in groups:
        own = group.parameters()
        types = {p.dtype for p in own if p.requires_grad and not stays_whole(p)}
        if not may_be_split and any(map(is_dtensor, own)):
            raise UsageError(
                f"{group.name} has parameters that are sharded already (DTensors). Pass the model "
                "before it is sharded: prepare() shards it."
            )
        complex_ones = [p for p in own if p.is_complex() and p.requires_grad]
        if complex_ones and len(types) > 1:
            raise UsageError(
                f"{group.name} trains {len(complex_ones)} complex parameters (shape "
                f"{tuple(complex_ones[0].shape)}, ...) beside real ones, whose gradients cannot be reduced together. "
                "Keep the real and imaginary parts as one real parameter (torch.view_as_real) and make the complex "
                "tensor of it in forward (torch.view_as_complex), or use parallel='ddp'."
            )
        if len(types) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
            raise UsageError(
                f"{group.name} has trainable parameters of types {names}, whose gradients cannot be reduced "
                "together. Convert them to one, such as model.float(); mixed_precision sets the type of computation."
            )


def stays_whole(parameter: nn.Parameter) -> bool:
    """Scalars, which have no rows; empty ones, which torch does not reduce; whole numbers, where it cannot."""
    trains = parameter.is_floating_point() or parameter.is_complex()
    return parameter.ndim == 0 or parameter.numel() == 0 or not (trains or fsdp2.shards_whole_numbers())
