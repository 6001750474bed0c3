"""Batches on their way to a CUDA device: through pinned memory that is used again. Run where there is a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import Accelerator, DataLoaderConfiguration

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is visible here"),
]

BATCHES, BATCH_SIZE, WIDTH = 60, 64, 4096


def rows() -> torch.Tensor:
    return torch.randn(BATCHES * BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(0))


class Rows(IterableDataset[Any]):
    def __iter__(self):
        return iter(rows())


def prepared(data: Any, workers: int = 0, **options: Any) -> Any:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    return accelerator.prepare(DataLoader(data, batch_size=BATCH_SIZE, num_workers=workers))


def keep_busy(matrix: torch.Tensor) -> None:
    """Give the device work for longer than the next batch takes to come, so that copies have to wait their turn."""
    for _ in range(20):
        torch.mm(matrix, matrix)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_no_batch_is_overwritten_while_the_device_has_yet_to_copy_it(workers, iterable, pin_memory) -> None:
    data = Rows() if iterable else TensorDataset(rows())
    loader = prepared(data, workers, pin_memory=pin_memory)
    matrix = torch.randn(2048, 2048, device="cuda")
    received = []
    for batch in loader:
        received.append(batch if iterable else batch[0])
        keep_busy(matrix)
    torch.testing.assert_close(torch.cat(received).cpu(), rows(), rtol=0, atol=0)


class PinnedAddresses(TorchFunctionMode):
    """Where the pinned memory is that copies of tensors are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (kwargs or {}).get("pin_memory"):
            self.addresses.append(result.data_ptr())
        return result


def test_pinned_memory_is_used_again() -> None:
    """Each copy is done before the next batch comes. torch counts what it asks the driver for."""
    loader = prepared(TensorDataset(rows()))
    torch.cuda.init()
    asked = []
    with PinnedAddresses() as pinned:
        for [batch] in loader:
            assert batch.is_cuda
            torch.cuda.synchronize()
            asked.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert len(pinned.addresses) == BATCHES
    assert len(set(pinned.addresses)) <= 3
    assert asked[-1] == asked[3]


def test_taking_a_batch_does_not_wait_for_the_device() -> None:
    for pin_memory in (True, False):
        batches = iter(prepared(TensorDataset(rows()), pin_memory=pin_memory))
        next(batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            if pin_memory:
                next(batches)
            else:
                with pytest.raises(RuntimeError, match="synchroniz"):
                    next(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_batches_that_the_loader_pins_are_not_copied_again() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(rows()), batch_size=BATCH_SIZE, pin_memory=True))
    received = torch.cat([batch for [batch] in loader])
    torch.testing.assert_close(received.cpu(), rows(), rtol=0, atol=0)
