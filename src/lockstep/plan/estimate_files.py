"""A model from the headers of its files of weights: shapes and dtypes, no values."""

from __future__ import annotations

import math
import re
from pathlib import Path

from lockstep.plan.estimate_model import FLOATS, Elements, ModelFacts, added

NUMBER = re.compile(r"[0-9]+")

BUFFERS = "Which tensors of a file are buffers or frozen is not in it: all are counted as parameters that are trained."
INTEGERS = "Weights in integers or in 8 bits are counted for training as frozen and float32."


def facts_of_files(path: Path) -> ModelFacts:
    """Count the tensors of a file of weights, of an index of such files, or of a folder with either.

    Raises:
        CheckpointError: a file is missing or cannot be read, or is damaged.
    """
    from lockstep.placement.checkpoint_files import stored_tensors

    units: dict[str, list[Elements]] = {}
    for name, tensor in stored_tensors(path).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        units.setdefault(_unit(name), []).append({dtype: math.prod(tensor.shape)})
    sizes = {name: added(parts) for name, parts in units.items()}
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
        units=sizes,
        notes=(BUFFERS, INTEGERS) if any(dtype not in FLOATS for dtype in elements) else (BUFFERS,),
    )


def _unit(name: str) -> str:
    """The block that a tensor is in, which is its name up to the first number, or else its module."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if NUMBER.fullmatch(part)), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1])


def _is_block(name: str) -> bool:
    return bool(NUMBER.fullmatch(name.rpartition(".")[2]))
