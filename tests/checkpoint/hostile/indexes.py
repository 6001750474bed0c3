"""tensors.json against the files it speaks of, and against itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoint.draft import STATE, Draft
from checkpoint.hostile.case import EXP_AVG, WEIGHT, Case, Change, several


def indexes(outside: Path) -> Iterator[Case]:
    """tensors.json against the files it speaks of, and against itself."""

    def entry(key: str, *values: Any) -> Iterator[Case]:
        return several(f"tensor {key}", lambda draft: draft.index[WEIGHT], key, values)

    def piece(key: str, *values: Any) -> Iterator[Case]:
        return several(f"piece {key}", lambda draft: draft.index[WEIGHT]["pieces"][0], key, values)

    yield from entry("dtype", "load", "F33", "float32", "I64", "F64", "BF16", None, ["F32"])
    yield from entry("shape", [-8, -6], [8, 6, 1], [6, 8], [2**59, 6], [10**30], ["8", 6])
    yield from entry("shape", [8.0, 6], None, [True, 6], [0, 6], [0, 2**59, 2**59])
    yield from entry("pieces", [], None, [None], [{}])
    yield from entry("__class__", "x")
    yield from piece("offsets", [-1, 0], [1, 0], [0], [2**62, 0], None, ["0", 0])
    yield from piece("shape", [-8, -6], [4, 6], [2**32, 2**32], [0, 0], None)
    yield from piece("key", "absent", "1.weight", "__metadata__", None, "a" * 100_000)
    yield from piece("file", STATE, "state.json", "absent.safetensors", None)

    def halves(first: list[int], second: list[int]) -> Change:
        def change(draft: Draft) -> None:
            one = draft.index[WEIGHT]["pieces"][0]
            draft.index[WEIGHT]["pieces"] = [
                {**one, "offsets": first, "shape": [4, 6]},
                {**one, "offsets": second, "shape": [4, 6]},
            ]

        return change

    yield Case("overlapping pieces", halves([0, 0], [0, 0]))
    yield Case("partly overlapping pieces", halves([0, 0], [2, 0]))
    yield Case("pieces of another size", halves([0, 0], [4, 0]))

    def same_place(draft: Draft) -> None:
        draft.index["model.0.1.weight"]["pieces"] = draft.index["model.0.1.bias"]["pieces"]

    def unknown_tensor(draft: Draft) -> None:
        draft.index["model.0.__class__"] = draft.index["model.0.1.bias"]

    def one_tensor_less(draft: Draft) -> None:
        del draft.index[WEIGHT]

    def one_state_less(draft: Draft) -> None:
        del draft.index[EXP_AVG]

    def bomb(shape: list[int], pieces: int = 1) -> Change:
        def change(draft: Draft) -> None:
            one = draft.index[EXP_AVG]["pieces"][0]
            draft.index[EXP_AVG]["shape"] = shape
            draft.index[EXP_AVG]["pieces"] = [{**one, "offsets": [0] * len(shape), "shape": shape}] * pieces

        return change

    yield Case("two tensors in one place", same_place)
    yield Case("a tensor that the model lacks", unknown_tensor)
    yield Case("a tensor less than the model has", one_tensor_less)
    yield Case("a tensor less than the optimizer names", one_state_less)
    yield Case("declares 4 GB", bomb([1 << 30]))
    yield Case("declares 1 TB in 4 dims", bomb([1 << 10, 1 << 10, 1 << 10, 1 << 8]))
    yield Case("declares more than an address", bomb([2**59, 2**59]))
    yield Case("declares nothing, hugely", bomb([0, 2**59, 2**59]))
    yield Case("many pieces of nothing", bomb([0, 4], 20_000))

    def other_state(tensor: torch.Tensor) -> Change:
        return lambda draft: draft.replace_tensor(EXP_AVG, tensor)

    yield Case("an optimizer state of another shape", other_state(torch.zeros(3, 3)))
    yield Case("a transposed optimizer state", other_state(torch.zeros(6, 8)))
    yield Case("a huge optimizer state", other_state(torch.zeros(500, 500)))
    yield Case("an optimizer state of bytes", other_state(torch.zeros(8, 6, dtype=torch.uint8)), "harmless")
    yield Case(
        "weights of bytes",
        lambda draft: draft.replace_tensor(WEIGHT, torch.zeros(8, 6).to(torch.uint8)),
        "harmless",
    )
