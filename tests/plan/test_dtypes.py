"""The table of dtypes: complete, and what torch really has."""

from __future__ import annotations

import pytest
import torch

from lockstep.comm import message_bytes
from lockstep.plan import BYTES, TABLE, dtypes
from lockstep.utils import Parallel

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_bytes_are_those_of_torch_and_of_quantised_messages() -> None:
    for name, dtype in TORCH.items():
        assert BYTES[name] == dtype.itemsize
    for name, bits in (("int8", 8), ("int4", 4)):
        assert 2**20 * BYTES[name] == message_bytes(2**20, bits=bits)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_lasts_from_step_to_step_is_fp32(stage: int, precision: str) -> None:
    types = dtypes(Parallel(zero=stage), precision)
    lasting = ("stored weights", "sharded gradients", "optimizer state")
    assert {types[tensor] for tensor in lasting} == {"fp32"}


def test_words_of_parallel_change_what_they_name() -> None:
    def changed(text: str) -> dict[str, str]:
        plain, other = dtypes(Parallel(zero=int(text[5])), "bf16"), dtypes(Parallel.parse(text), "bf16")
        return {tensor: other[tensor] for tensor in TABLE if other[tensor] != plain[tensor]}

    on_the_wire = {"gradient reduction": "fp32", "gradients on the wire": "fp32"}
    assert changed("zero=3 reduce=fp32") == on_the_wire
    assert changed("zero=1 reduce=fp32") == on_the_wire | {"unsharded gradients": "fp32"}
    assert changed("zero=3 quantized_weights") == {"weights on the wire": "int8"}
    assert changed("zero=2 quantized_gradients=int4") == {"gradients on the wire": "int4"}
