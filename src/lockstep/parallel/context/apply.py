"""Context parallelism put into a model, in place."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config.enums import CPMethod
from lockstep.errors import UsageError
from lockstep.model.blocks import joined_name
from lockstep.model.changes import disable_cache, subclass
from lockstep.parallel.context.layout import layout_on
from lockstep.parallel.context.region import (
    Chain,
    ContextParallelBlock,
    ContextParallelModel,
    ContextRegion,
    regions_of,
)


def context_parallel(
    model: nn.Module, blocks: dict[str, nn.Module], mesh: DeviceMesh, method: CPMethod | str = CPMethod.RING
) -> None:
    """Split the sequence over the ranks of ``mesh`` from the first block's input to the last block's output.

    In place; names, classes' names and ``state_dict`` keys stay. Each block is called with this rank's chunk of its
    arguments along the sequence (``arguments`` has the rule), and ``F.scaled_dot_product_attention`` inside it sees
    the whole. What runs between blocks must work position by position. Everything else runs on the whole sequence
    on every rank, from the same batch. The mean over the mesh of the ranks' gradients is the gradient of the mean of
    their losses. Apply before ``recompute``, ``compile`` and ``fully_shard``. With one rank nothing changes.

    Without gradients, a call with a key-value cache, or with a length that cannot be split, runs whole on each rank.

    Raises:
        UsageError: blocks that cannot be split; while running, calls that would see only a part of the sequence.
    """
    method = CPMethod(method)
    if mesh.size() == 1:
        return
    if not blocks:
        raise UsageError(
            f"cp={mesh.size()} splits the sequence between blocks, but no blocks of {type(model).__name__} were "
            "found. Name them with blocks=..., as a class or as a pattern such as 'layers.*'."
        )
    if regions_of(model):
        raise UsageError(f"{type(model).__name__} is context parallel already. Prepare it once.")
    has_another = _has_other_attention(model)
    for name, block in blocks.items():
        _check_block(name, block, mesh.size(), has_another)
    # All blocks were checked: a model that is refused is left as it was.
    region = ContextRegion(layout_on(mesh, method), method, _chains(list(blocks)))
    region.around = _around(model, next(iter(blocks)))
    classes: dict[type, type] = {}
    for name, block in blocks.items():
        cls = type(block)
        if cls not in classes:
            classes[cls] = subclass(cls, ContextParallelBlock, _region=region)
        changed: Any = block
        changed._argument_names = tuple(inspect.signature(cls.forward).parameters)[1:]
        changed._block_name = name
        block.__class__ = classes[cls]
    disable_cache(model, "the cache would hold only the keys and values of one rank's positions")
    model.__class__ = subclass(type(model), ContextParallelModel, _region=region)


def _chains(blocks: list[str]) -> dict[str, Chain]:
    """Blocks of one list, or of lists that differ in a number only, are one chain."""
    lists: dict[str, list[str]] = {}
    for name in blocks:
        parents = name.split(".")[:-1]
        lists.setdefault(".".join("*" if part.isdigit() else part for part in parents), []).append(name)
    return {name: Chain(names[0], names[-1]) for names in lists.values() for name in names}


def _around(model: nn.Module, name: str) -> str:
    """Class of the nearest module around a block that has a forward, if it is not the model."""
    while "." in name:
        name = name.rpartition(".")[0]
        parent = model.get_submodule(name)
        if type(parent).forward is not nn.Module.forward:
            return type(parent).__name__
    return ""


def _check_block(name: str, block: nn.Module, size: int, has_another: bool) -> None:
    if "forward" in vars(block):
        raise UsageError(
            f"The block '{name}' has a forward as an attribute, which hides that of its class {type(block).__name__}. "
            f"So cp={size} would not reach it. Change forward in a subclass, or set it after prepare()."
        )
    for inner, module in block.named_modules():
        full = joined_name(name, inner)
        chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if not isinstance(chosen, str) or chosen == "sdpa" or (chosen == "eager" and not has_another):
            continue
        remedy = (
            'Make the model with attn_implementation="sdpa".'
            if has_another
            else "Its class has no attention that can be split: leave cp out."
        )
        raise UsageError(
            f"'{full}' ({type(module).__name__}) is set to attn_implementation={chosen!r}, but it would get only "
            f"one rank's part of the sequence (cp = {size}). {remedy}"
        )


def _has_other_attention(model: nn.Module) -> bool:
    """Return whether a model of ``transformers`` can call ``scaled_dot_product_attention``; True for other models."""
    flags = [getattr(module, "_supports_sdpa", None) for module in model.modules()]
    # None: the module is none of theirs, and says nothing.
    return False not in flags or True in flags
