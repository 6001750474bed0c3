"""The blocks of a model: the modules that are sharded, recomputed and compiled one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from lockstep.config.parallel import BlockRule
from lockstep.config.values import join_names, repr_short, suggestion
from lockstep.errors import UsageError
from lockstep.torch_internals import modules as torch_modules

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module, blocks: tuple[str, ...] | BlockRule = ()) -> dict[str, nn.Module]:
    """Return name -> module of each block, in the order of definition.

    No block lies inside another (of nested matches the outermost is taken), each module object occurs once
    even where it has several names, and the model itself is never one.

    - ``blocks`` empty: the classes of ``_no_split_modules``, the attribute of transformers models, that stand
      in a list; else the members of the outermost ``ModuleList``, ``Sequential`` and ``ModuleDict`` that have
      parameters and layers of their own and whose class is there more than once, or that are alone in their
      list; else single layers of the outermost lists. A ``Sequential`` of repeated blocks (a stage of a
      ResNet) gives its members. Nothing found: an empty dict.
    - Names: a class, also a base class (``Block``); a module (``layers.0``); or a pattern of which each part
      matches one part of a module's name: ``layers.*`` is ``layers.0`` but not ``layers.0.mlp``.
    - A rule: called with (name, module) of every submodule.

    Raises:
        UsageError: a name or the rule matches nothing, or a container that has no ``forward``.
    """
    if callable(blocks):
        matches = {name for name, module in model.named_modules() if name and blocks(name, module)}
        if not matches:
            rule = getattr(blocks, "__name__", "it")
            raise UsageError(
                f"The rule for blocks ({rule}) chose none of the {_parameter_count(model)} submodules of "
                f"{_class(model)}. {_what_there_is(model)}"
            )
        return _checked(_outermost(model, matches))
    if not blocks:
        return _detect(model)
    matches = set()
    every = list(model.named_modules(remove_duplicate=False))
    for pattern in blocks:
        matched = {name for name, module in every if name and _matches(pattern, name, module)}
        if not matched:
            raise UsageError(
                f"blocks={repr_short(pattern)} matches no class and no module in {_class(model)}."
                f"{suggestion(pattern, _candidates(model))} {_what_there_is(model)}"
            )
        matches |= matched
    return _checked(_outermost(model, matches))


def shared_parameters(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, list[str]]:
    """First name of each parameter that several blocks use, or a block and the rest -> those blocks' names."""
    block_names = {id(block): name for name, block in blocks.items()}
    users: dict[int, set[str]] = {}
    visited: set[tuple[int, str]] = set()

    def visit(module: nn.Module, block: str) -> None:
        block = block_names.get(id(module), block)
        # A module that several blocks use is visited once from each.
        if (id(module), block) in visited:
            return
        visited.add((id(module), block))
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(block)
        for child in module.children():
            visit(child, block)

    visit(model, "")
    return {
        name: [block for block in blocks if block in users[id(parameter)]]
        for name, parameter in model.named_parameters()
        if len(users[id(parameter)]) > 1
    }


# -- named -----------------------------------------------------------------------------------------------


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    if pattern in (name, *_classes(module)):
        return True
    patterns, parts = pattern.split("."), name.split(".")
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))


def _classes(module: nn.Module) -> list[str]:
    """Return the names of its class and of the bases that say more than ``Module``."""
    return [
        cls.__name__ for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module
    ]


def _outermost(model: nn.Module, names: set[str]) -> dict[str, nn.Module]:
    # Some may be further names of one module.
    wanted = {id(model.get_submodule(name)) for name in names}
    chosen = {name: module for name, module in model.named_modules() if id(module) in wanted}
    inside = {id(inner) for module in chosen.values() for inner in module.modules() if inner is not module}
    return {name: module for name, module in chosen.items() if id(module) not in inside}


def _checked(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    for name, module in blocks.items():
        if not _is_called(module):
            raise UsageError(
                f"The block '{name}' is a {_class(module)}, which is not called itself: only its members are. "
                f"Use '{name}.*'."
            )
    return blocks


def _candidates(model: nn.Module) -> list[str]:
    classes = {_class(module) for name, module in model.named_modules() if name}
    lists = [name for name, module in model.named_modules() if name and isinstance(module, _LISTS)]
    return [*sorted(classes), *lists, *(f"{name}.*" for name in lists)]


def _what_there_is(model: nn.Module) -> str:
    classes = sorted(
        {_class(module) for name, module in model.named_modules() if name and _has_layers(module)}
    )
    lists = [f"{name}.*" for name, module in model.named_modules() if name and isinstance(module, _LISTS)]
    return f"Name a class ({join_names(classes, 6)}) or members of a list ({join_names(lists, 6)})."


# -- found -----------------------------------------------------------------------------------------------


def _detect(model: nn.Module) -> dict[str, nn.Module]:
    # From what the model's author says to what can only be guessed.
    in_lists = Counter(_kind(member) for _, _, member in _list_members(model))
    for names in (_not_split(model), _repeated(model, "", in_lists), _layers(model, "")):
        if names:
            return _outermost(model, names)
    return {}


def _not_split(model: nn.Module) -> set[str]:
    """Return modules of the classes that transformers models ask not to be split, without embeddings and the like."""
    wanted = {cls for module in model.modules() for cls in getattr(module, "_no_split_modules", None) or ()}
    members = {id(member) for _, _, member in _list_members(model)}
    return {
        name
        for name, module in model.named_modules()
        if name
        and id(module) in members
        and wanted.intersection(_classes(module))
        and _has_parameters(module)
    }


def _list_members(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield (list, name of the member in the model, member); a member as often as it is in the list."""
    for name, module in model.named_modules():
        if isinstance(module, _LISTS):
            for key, member in torch_modules.children_of(module).items():
                if member is not None:
                    yield module, joined_name(name, key), member


def _repeated(module: nn.Module, name: str, in_lists: Counter[str]) -> set[str]:
    """Return names of the blocks inside ``module``: of lists' members, those whose class is repeated."""
    found: set[str] = set()
    # Of a model with one layer the only member of its list is a block.
    alone = name != "" and isinstance(module, _LISTS) and len(torch_modules.children_of(module)) == 1
    for key, child in module.named_children():
        child_name = joined_name(name, key)
        is_block = isinstance(module, _LISTS) and _has_layers(child) and (alone or in_lists[_kind(child)] > 1)
        if is_block and type(child) not in _LISTS:
            found.add(child_name)
            continue
        inner = _repeated(child, child_name, in_lists)
        if is_block and not inner and _is_called(child):
            inner = {child_name}
        found |= inner
    return found


def _layers(module: nn.Module, name: str) -> set[str]:
    """Return names of the members of the outermost lists that hold several layers with parameters."""
    members = {
        joined_name(name, key)
        for key, child in module.named_children()
        if _has_parameters(child) and _is_called(child)
    }
    if isinstance(module, _LISTS) and len(members) > 1:
        return members
    return set().union(*(_layers(child, joined_name(name, key)) for key, child in module.named_children()))


def _has_parameters(module: nn.Module) -> bool:
    return next(nn.Module.parameters(module), None) is not None


def _has_layers(module: nn.Module) -> bool:
    """Return whether it is more than a single layer; what reparametrises a weight is no layer, and a table of
    embeddings with a scale or positions is still one."""
    return any(
        _has_parameters(child) and not isinstance(child, (nn.Embedding, nn.EmbeddingBag))
        for name, child in module.named_children()
        if name != "parametrizations"
    )


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _class(module: nn.Module) -> str:
    return type(module).__name__


def _kind(module: nn.Module) -> str:
    # Not the class itself: reparametrised modules have one each, of the same name.
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _parameter_count(model: nn.Module) -> int:
    return sum(1 for _ in model.modules()) - 1


def joined_name(parent: str, name: str) -> str:
    """Return the name of a module or parameter ``name`` inside of ``parent``; either may be empty."""
    return f"{parent}.{name}" if parent and name else parent or name
