"""What a model consists of, seen by a pipeline: blocks, which are divided, and the rest, which goes where it is used.

The rest comes in *parts*: modules with parameters that hold no block (embedding, final norm, head), and single
parameters of modules that do hold blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lockstep.model.blocks import joined_name
from lockstep.parallel.pipeline.absent import (
    AbsentBlock,
    Change,
    ModuleEntry,
    PlaceholderTensors,
    copy_without_values,
    slots,
)
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.absent_parameters import absent_parameter


@dataclass
class Block:
    """A block, its stage, a copy of it without values, and where it is registered."""

    stage: int
    copy: nn.Module
    absent: AbsentBlock
    slots: list[ModuleEntry]
    # None: it is on another rank.
    module: nn.Module | None
    # Of its parameters, each under its first name.
    names: set[str] = field(default_factory=set)


@dataclass
class OutsideModule:
    """A module outside of blocks. ``names``: of its parameters, each under its first name in the model.

    ``stages``: those that use it, once known.
    """

    copy: nn.Module
    slots: list[ModuleEntry]
    names: set[str]
    stages: set[int] = field(default_factory=set)

    @property
    def module(self) -> nn.Module:
        """What stands in the model now: the module, or the copy where no stage of this rank uses it."""
        entries, key = self.slots[0]
        return entries[key]


@dataclass
class Single:
    """A parameter of a module that holds blocks."""

    owner: str
    module: nn.Module
    key: str
    first_name: str
    placeholder: Tensor
    stages: set[int] = field(default_factory=set)


class Layout:
    """A model's blocks and parts; taken before anything is changed."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        starts: list[int],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take ``starts``: the index of each stage's first block; ``dtype``: of parameters in forwards."""
        self.placeholders = PlaceholderTensors(device)
        self.order = list(blocks)
        self.starts = {self.order[index]: stage for stage, index in enumerate(starts)}
        self.positions = {name: index for index, (name, _) in enumerate(model.named_modules())}
        self.names = {id(module): name for name, module in model.named_modules()}
        self.aliases = _aliases(model)
        self._first = {alias: first for first, names in self.aliases.items() for alias in names}
        parameters = dict(model.named_parameters())
        self.values = {name: self.placeholders.like(value, dtype) for name, value in parameters.items()}
        self.every_name = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        # Models for which it is equal are spread alike.
        self.signature = type(model), self.starts, self.aliases, {n: p.shape for n, p in parameters.items()}
        kind = type(model).__name__
        # What the model lists in the place of a parameter that other ranks have.
        self.elsewhere = {name: absent_parameter(name, kind, value) for name, value in parameters.items()}
        # In copies, placeholders stand for parameters, and the model for itself.
        memo: dict[int, object] = {id(value): self.values[name] for name, value in parameters.items()}
        memo[id(model)] = model
        trunk = self._trunk()
        # Parameters of modules that hold blocks go to stages one by one: the modules are on every rank.
        self.singles = [
            Single(
                owner,
                module,
                key,
                self._first[joined_name(owner, key)],
                self.values[self._first[joined_name(owner, key)]],
            )
            for owner, module in model.named_modules()
            if owner in trunk
            for key, parameter in torch_modules.parameters_of(module).items()
            if parameter is not None
        ]
        self.parts: dict[str, OutsideModule] = {}
        for name, module in _children_of(model, trunk):
            if module not in blocks.values() and next(nn.Module.parameters(module), None) is not None:
                copy = copy_without_values(module, dict(memo), keep_buffers=True)
                names = {self._first[joined_name(name, inner)] for inner, _ in module.named_parameters()}
                self.parts[name] = OutsideModule(copy, list(slots(model, module)), names)
        # Copies of parts have kept their buffers; those of blocks get placeholders for them, too.
        memo |= {id(buffer): self.placeholders.like(buffer) for buffer in model.buffers()}
        self.blocks: dict[str, Block] = {}
        # Blocks belong to the stage that began last.
        stage = 0
        for name, module in blocks.items():
            stage = self.starts.get(name, stage)
            copy = copy_without_values(module, dict(memo), keep_buffers=False)
            absent = AbsentBlock(name, copy)
            names = {self._first[joined_name(name, inner)] for inner, _ in module.named_parameters()}
            self.blocks[name] = Block(stage, copy, absent, list(slots(model, module)), module, names)
        copies = {name: part.copy for name, part in self.parts.items()}
        copies |= {name: block.copy for name, block in self.blocks.items()}
        for name, copy in copies.items():
            self.names |= {id(inner): joined_name(name, path) for path, inner in copy.named_modules()}

    @property
    def outer(self) -> dict[str, Tensor]:
        """First name -> placeholder of the parameters outside of blocks."""
        names = {name for part in self.parts.values() for name in part.names}
        names |= {single.first_name for single in self.singles}
        return {name: value for name, value in self.values.items() if name in names}

    def first_name(self, name: str) -> str:
        """Return the name under which ``named_parameters`` of the whole model knows a parameter."""
        return self._first.get(name, name)

    def module_of_block(self, name: str) -> nn.Module:
        """Return a block of this rank, or a module in one, by its name in the model."""
        for block_name, block in self.blocks.items():
            if block.module is not None and (name == block_name or name.startswith(f"{block_name}.")):
                return block.module.get_submodule(name[len(block_name) + 1 :])
        raise KeyError(name)

    def drop_blocks(self, keep: set[int]) -> None:
        """Blocks of other stages than ``keep`` leave the model."""
        for block in self.blocks.values():
            if block.stage not in keep:
                block.module = None
                for entries, key in block.slots:
                    entries[key] = block.absent

    def place(self, uses: Mapping[str, set[int]]) -> None:
        """Parts belong to the stages that use one of their parameters; what nobody uses, to the first."""
        for part in self.parts.values():
            part.stages = set().union(*(uses[name] for name in part.names)) or {0}
        for single in self.singles:
            single.stages = set(uses[single.first_name]) or {0}

    def drop_parts(self, keep: set[int]) -> None:
        """Parts that none of the stages ``keep`` uses leave the model."""
        for part in self.parts.values():
            if not part.stages & keep:
                for entries, key in part.slots:
                    entries[key] = part.copy
        for single in self.singles:
            if not single.stages & keep and single.key in torch_modules.parameters_of(single.module):
                # An attribute, and no parameter: the model's parameters are to be those of its stages.
                del torch_modules.parameters_of(single.module)[single.key]
                single.module.__dict__[single.key] = single.placeholder

    def holders(self) -> dict[str, set[int]]:
        """First name of each parameter -> the stages that have it, once parts are placed."""
        found: dict[str, set[int]] = {name: set() for name in self.values}
        for block in self.blocks.values():
            for name in block.names:
                found[name].add(block.stage)
        for part in self.parts.values():
            for name in part.names:
                found[name] |= part.stages
        for single in self.singles:
            found[single.first_name] |= single.stages
        return found

    def without_values(self, block_calls: Mapping[str, nn.Module]) -> list[Change]:
        """Return what turns the model into one without any values; ``block_calls`` takes the place of the blocks."""
        changes: list[Change] = [
            (entries, key, block_calls[name])
            for name, block in self.blocks.items()
            for entries, key in block.slots
        ]
        changes += [(entries, key, part.copy) for part in self.parts.values() for entries, key in part.slots]
        changes += [(single.module.__dict__, single.key, single.placeholder) for single in self.singles]
        return changes

    def modules_of(self, stage: int) -> dict[str, nn.Module]:
        """Return name -> module of the blocks and parts of a stage of this rank, in the model's order."""
        found = {name: block.module for name, block in self.blocks.items() if block.stage == stage}
        found |= {name: part.module for name, part in self.parts.items() if stage in part.stages}
        return {name: found[name] for name in sorted(found, key=self.positions.__getitem__)}  # type: ignore[misc]

    def parameters_of(self, stage: int) -> dict[str, dict[str, object]]:
        """Owner -> its parameters among those that stand alone, of a stage of this rank."""
        found: dict[str, dict[str, object]] = {}
        for owner in dict.fromkeys(single.owner for single in self.singles):
            mine = [single for single in self.singles if single.owner == owner]
            used = [single for single in mine if stage in single.stages]
            present = [single for single in mine if single.key in torch_modules.parameters_of(single.module)]
            if used and used == present:
                found[owner] = torch_modules.parameters_of(used[0].module)
            elif used:
                # Several stages of this rank use parameters of one module.
                found[owner] = {
                    single.key: torch_modules.parameters_of(single.module)[single.key] for single in used
                }
        return found

    def own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield name -> module of this rank's blocks and of what is outside of blocks."""
        for name, block in self.blocks.items():
            if block.module is not None:
                yield from block.module.named_modules(prefix=name)
        for name, part in self.parts.items():
            yield from part.module.named_modules(prefix=name)

    def _trunk(self) -> set[str]:
        """Return names of the modules that hold blocks."""
        found = {""}
        for name in self.order:
            parts = name.split(".")
            found |= {".".join(parts[:end]) for end in range(1, len(parts))}
        return found


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[str]] = {name: [] for name in first.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[first[id(parameter)]].append(name)
    return found


def _children_of(model: nn.Module, trunk: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules right below the trunk, each once."""
    for name, module in model.named_modules():
        if name not in trunk and name.rpartition(".")[0] in trunk:
            yield name, module
