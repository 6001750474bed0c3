"""Memory in which weights take turns: bytes counted, and nobody's memory given away."""

from __future__ import annotations

import pytest
import torch

from lockstep.offload import Copies, Staging, dense_strides, view_of
from lockstep.offload.weights import Slots
from tests.offload.weights.device.late import LateCopies

CPU = torch.device("cpu")


def test_without_knowledge_of_holders_no_slot_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    slots = Slots(Copies(CPU), budget=64)
    first = slots.take(64)
    view = first.buffer[:4].fill_(7)
    assert not first.is_held(0)
    slots.give_back(first, None)
    assert slots.allocated_bytes == 0
    slots.take(64).buffer.fill_(1)
    assert view.tolist() == [7] * 4


# -- layout and staging ----------------------------------------------------------------------------------


def layouts() -> list[torch.Tensor]:
    x = torch.randn(4, 6, 2, 2)
    return [
        x, x[0].t() if x[0].dim() == 2 else x[0, :, :, 0].t(), x.contiguous(memory_format=torch.channels_last),
        x[::2], x[:1].expand(3, 6, 2, 2), torch.tensor(3.0), torch.empty(0, 3), torch.tensor([True, False]),
        torch.arange(5), x.to(torch.bfloat16), torch.view_as_complex(x), x.to(torch.float8_e4m3fn),
    ]  # fmt: skip


def test_a_tensor_of_any_layout_and_dtype_lies_in_bytes_as_torch_would_copy_it() -> None:
    for tensor in layouts():
        buffer = torch.zeros(tensor.nbytes + 512, dtype=torch.uint8)[256:]
        view = view_of(buffer, tensor.dtype, tensor.shape, dense_strides(tensor), offset=256)
        assert view.stride() == tensor.clone().stride()
        assert view.data_ptr() == buffer.data_ptr() + 256 or not tensor.numel()
        view.copy_(tensor)
        assert torch.equal(view.to(tensor.dtype).float(), tensor.float()) or tensor.is_complex()


def test_what_is_not_pinned_goes_through_two_buffers_in_turn_each_filled_when_its_copy_is_done() -> None:
    for tensor in layouts():
        copies = LateCopies(pinned=False)
        staging = Staging(copies, nbytes=64)
        target = torch.empty_like(tensor)
        for _ in range(2):
            staging.copy(target, tensor)
        copies.wait(copies.copied())
        assert target.tolist() == tensor.tolist()
        assert copies.host_buffers == min(2, len(copies.queue))
        assert len(copies.queue) == 2 * -(-tensor.numel() * tensor.element_size() // 64)
    waits = [entry for entry in copies.log if entry[0] != "copy"]
    assert waits == [("host waits", 1), ("host waits", 2), ("host waits", 4)]
