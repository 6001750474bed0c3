"""Find and count the model that ``lockstep estimate`` is asked about. Nothing is downloaded, no weights are made.

Imports torch, and transformers for a configuration, when it is called.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.values import repr_short
from lockstep.errors import UsageError
from lockstep.plan.estimate_model import FLOATS, ElementCounts, ModelFacts, added
from lockstep.plan.sizes import parse_count

if TYPE_CHECKING:
    import torch
    from torch import nn

NUMBER = re.compile(r"[0-9]+")

BUFFERS = (
    "The file does not say which tensors are buffers or frozen, so all are counted as trained parameters."
)
INTEGERS = "For training, weights in integers or in 8 bits are counted as frozen and in float32."


def facts_of_files(path: Path) -> ModelFacts:
    """Count the tensors of a file of weights, of an index of such files, or of a folder with either.

    Raises:
        CheckpointError: a file is missing or cannot be read, or is damaged.
    """
    from lockstep.offload.files.checkpoint_files import stored_tensors

    groups: dict[str, list[ElementCounts]] = {}
    for name, tensor in stored_tensors(path).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        groups.setdefault(_group_name(name), []).append({dtype: math.prod(tensor.shape)})
    sizes = {name: added(parts) for name, parts in groups.items()}
    blocks = {name: sum(elements.values()) for name, elements in sizes.items() if _is_block(name)}
    elements = added(sizes.values())
    return ModelFacts(
        name=str(path),
        kind="files of weights",
        parameters=elements,
        buffers={},
        trainable=sum(elements.get(dtype, 0) for dtype in FLOATS),
        blocks=len(blocks),
        block=max(blocks.values(), default=0),
        root=sum(elements.values()) - sum(blocks.values()),
        groups=sizes,
        notes=(BUFFERS, INTEGERS) if any(dtype not in FLOATS for dtype in elements) else (BUFFERS,),
    )


def _group_name(name: str) -> str:
    """Return the block that a tensor is in, which is its name up to the first number, or else its module."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if NUMBER.fullmatch(part)), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1])


def _is_block(name: str) -> bool:
    return bool(NUMBER.fullmatch(name.rpartition(".")[2]))


NO_BLOCKS = "It has no blocks: zero=3 gathers all of it at once, and each module is streamed by itself."
WEIGHTS = (".safetensors", ".index.json", "pytorch_model.bin")


def facts_of(
    text: str, arguments: Mapping[str, object] | None = None, batch: int = 0, sequence: int = 0
) -> ModelFacts:
    """Count ``text``: a module path, a configuration of transformers, weights in files, or a number of parameters.

    ``arguments``: of what a module path names. ``batch``, ``sequence``: of one micro-batch; with both, activations
    are counted too.

    Raises:
        UsageError: there is no such model, it cannot be built, or activations cannot be counted.
        ConfigError: a configuration cannot be read.
        CheckpointError: a file of weights is damaged.
    """
    path = Path(os.path.expanduser(text))
    is_path = os.path.exists(path)
    if arguments and (is_path or ":" not in text):
        raise UsageError(
            f"--args are for a class or function, which {repr_short(text)} is not. Drop them, or name module:Class."
        )
    weights = is_path and _has_weights(path)
    if weights and not batch:
        return facts_of_files(path)
    if is_path:
        from lockstep.plan.estimate_build import built_from_config, configuration

        model, notes = built_from_config(configuration(path))
        facts = _facts(model, text, "transformers config", batch, sequence)
        return replace(facts, notes=(*facts.notes, *notes))
    if text[:1].isdigit() and ":" not in text:
        return facts_of_count(text)
    if not all(text.rpartition(":")):
        raise UsageError(
            f"{repr_short(text, 100)} is not a file, a folder, module:Class or a number such as 7B. Nothing is "
            "downloaded here: fetch a model from the Hub first, and give its folder."
        )
    return _facts(_module(text, arguments or {}), text, "module", batch, sequence)


BLOCKS = 32
"""Of a model of which only the number of parameters is known."""


def facts_of_count(text: str) -> ModelFacts:
    """Describe a model of so many parameters in equal blocks.

    Raises:
        ConfigError: it is no number of parameters.
    """
    count = parse_count(text, "MODEL")
    blocks = min(BLOCKS, count)
    block = count // blocks
    return ModelFacts(
        name=f"a model of {text}",
        kind="number of parameters",
        parameters={"float32": count},
        buffers={},
        trainable=count,
        blocks=blocks,
        block=block,
        root=count - blocks * block,
        groups={"a block": {"float32": block}},
        notes=(f"It is counted as {blocks} equal blocks.",),
    )


def _has_weights(path: Path) -> bool:
    if path.is_dir():
        return any(entry.name.endswith(WEIGHTS) for entry in path.iterdir())
    return path.name.endswith(WEIGHTS)


def _module(text: str, arguments: Mapping[str, object]) -> nn.Module:
    import torch

    from lockstep.plan.estimate_build import call_factory

    with torch.device("meta"):
        made = call_factory(text, arguments)
    if not isinstance(made, torch.nn.Module):
        raise UsageError(
            f"{repr_short(text, 100)} gives a {type(made).__name__}, not a torch.nn.Module. Name a class of modules, "
            "or a function that returns one."
        )
    return made


def _facts(model: nn.Module, name: str, kind: str, batch: int, sequence: int) -> ModelFacts:
    from torch import nn

    from lockstep.model.blocks import find_blocks, shared_parameters
    from lockstep.offload.weights.groups import find_weight_groups

    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            f"{repr_short(name, 100)} has lazy modules, whose sizes are not known before a first forward. Give "
            "these modules their sizes."
        )
    blocks = find_blocks(model)
    shared = {block for names in shared_parameters(model, blocks).values() for block in names}
    sizes = {
        block: sum(parameter.numel() for parameter in module.parameters())
        for block, module in blocks.items()
        if block not in shared
    }
    parameters = added(_elements(parameter) for parameter in model.parameters())
    activations = None
    if batch:
        from lockstep.plan.estimate_activations import count_activations

        activations = count_activations(model, blocks, batch, sequence)
    return ModelFacts(
        name=name,
        kind=kind,
        parameters=parameters,
        buffers=added(_elements(buffer) for buffer in model.buffers()),
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        blocks=len(blocks),
        block=max(sizes.values(), default=0),
        root=sum(parameters.values()) - sum(sizes.values()),
        groups={
            group.name or "the model": added(map(_elements, group.tensors.values()))
            for group in find_weight_groups(model, blocks)
        },
        notes=() if blocks else (NO_BLOCKS,),
        activations=activations,
    )


def _elements(tensor: torch.Tensor) -> ElementCounts:
    return {str(tensor.dtype).removeprefix("torch."): tensor.numel()}
