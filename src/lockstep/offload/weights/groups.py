"""The groups in which weights move: blocks, and the modules outside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

# Modules of torch that only call what they hold. Others of torch's may use the weights of their children
# without calling these: MultiheadAttention, TransformerEncoderLayer.
_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
)


@dataclass(eq=False)
class WeightGroup:
    """Weights that are needed together: of one block, or of one module outside of blocks."""

    name: str
    # Whose forward needs them; several where weights are tied.
    modules: list[nn.Module]
    # Full name -> parameter or buffer, each object once.
    tensors: dict[str, torch.Tensor]
    nbytes: int

    def __repr__(self) -> str:
        return f"WeightGroup({self.name!r}, {len(self.tensors)} tensors, {self.nbytes} bytes)"


def find_weight_groups(
    model: nn.Module, blocks: Mapping[str, nn.Module], wanted: Callable[[str], bool] = lambda name: True
) -> list[WeightGroup]:
    """Return the groups of ``model``, in order of registration; every wanted tensor is in exactly one.

    Outside of ``blocks`` (name -> module) each module that has tensors of its own is a group, and a module of
    torch.nn that may use its children's weights itself (MultiheadAttention) is one as a whole. Tensors of
    modules that are never called (ParameterList) belong to the module around them. Groups that share a tensor
    become one.

    Args:
        wanted: Called with a tensor's full name: whether it belongs to a group. Groups without tensors are
            left out.
    """
    found: list[WeightGroup] = []
    # The group of each tensor.
    owners: dict[int, WeightGroup] = {}
    for name, module, tensors in _parts(model, "", {id(block) for block in blocks.values()}, set()):
        tensors = {full: tensor for full, tensor in tensors.items() if wanted(full)}
        if not tensors:
            continue
        merged = WeightGroup(name, [module], {}, 0)
        for other in dict.fromkeys(owners[id(t)] for t in tensors.values() if id(t) in owners):
            merged = _joined(other, merged)
            found.remove(other)
        known = set(map(id, merged.tensors.values()))
        for full, tensor in tensors.items():
            if id(tensor) not in known:
                known.add(id(tensor))
                merged.tensors[full] = tensor
        merged.nbytes = sum(map(_nbytes, merged.tensors.values()))
        owners.update((id(tensor), merged) for tensor in merged.tensors.values())
        found.append(merged)
    order = {id(module): position for position, module in enumerate(model.modules())}
    return sorted(found, key=lambda group: min(order[id(module)] for module in group.modules))


def enclosing_groups(groups: Sequence[WeightGroup]) -> dict[WeightGroup, list[WeightGroup]]:
    """Return for each group those in whose modules its modules are: they are in use at the same time."""
    owners: dict[int, list[WeightGroup]] = {}
    for group in groups:
        for module in group.modules:
            owners.setdefault(id(module), []).append(group)
    found: dict[WeightGroup, dict[WeightGroup, None]] = {group: {} for group in groups}
    for outer in groups:
        for inner in (inner for module in outer.modules for inner in module.modules()):
            for group in owners.get(id(inner), ()):
                if group is not outer:
                    found[group][outer] = None
    return {group: list(outer) for group, outer in found.items()}


def _parts(
    module: nn.Module, name: str, blocks: set[int], visited: set[int]
) -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    """Yield (name, module, its tensors) of every block and of the modules around them."""
    if id(module) in visited:
        return
    visited.add(id(module))
    if id(module) in blocks or _is_whole(module):
        yield name, module, _tensors(module, name, recurse=True)
        visited.update(map(id, module.modules()))
        return
    own = _tensors(module, name, recurse=False)
    called = []
    for key, child in module.named_children():
        child_name = f"{name}.{key}" if name else key
        if id(child) not in blocks and _is_never_called(child):
            own |= _tensors(child, child_name, recurse=False)
        called.append((child_name, child))
    if own and (not name or not _is_never_called(module)):
        yield name, module, own
    for child_name, child in called:
        yield from _parts(child, child_name, blocks, visited)


def _tensors(module: nn.Module, name: str, recurse: bool) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(name, recurse=recurse)),
        **dict(module.named_buffers(name, recurse=recurse)),
    }


def _is_whole(module: nn.Module) -> bool:
    """Return whether it is a module of torch.nn, or a subclass, with children whose weights it may use itself."""
    if isinstance(module, _CONTAINERS) or next(module.children(), None) is None:
        return False
    return any(
        cls.__module__.startswith("torch.nn.") and cls is not nn.Module for cls in type(module).__mro__
    )


def _is_never_called(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward


def _joined(one: WeightGroup, other: WeightGroup) -> WeightGroup:
    modules = list(dict.fromkeys([*one.modules, *other.modules]))
    return WeightGroup(one.name, modules, {**one.tensors, **other.tensors}, 0)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
