"""Memory-mapped weights are read ahead and let go, and never lost."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from lockstep.errors import OffloadError
from lockstep.offload.files import Pages, map_file
from lockstep.offload.weights import MappedMover, find_weight_groups
from tests.offload.models import Blocks, map_weights
from tests.offload.resident import resident_bytes
from tests.patching import module_of
from tests.refusals import expect_refusal

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="reads /proc")
PAGE = mmap.PAGESIZE


@pytest.fixture
def numbers(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A file of 64 pages of random bytes, and these bytes."""
    data = torch.randint(0, 256, (64 * PAGE,), dtype=torch.uint8)
    path = tmp_path / "numbers"
    path.write_bytes(data.numpy().tobytes())
    return path, data


def test_a_mapped_file_holds_the_files_bytes_and_is_written_to_only_where_asked(numbers) -> None:
    path, data = numbers
    private, shared = map_file(path), map_file(path, writable=True)
    assert torch.equal(private, data) and torch.equal(shared, data)
    private[3] += 1
    assert path.read_bytes() == data.numpy().tobytes()
    shared[5] += 1
    data[5] += 1
    assert path.read_bytes() == data.numpy().tobytes()
    assert not torch.equal(private[:4], data[:4])


def test_files_that_cannot_be_mapped_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    expect_refusal(OffloadError, "empty is empty", map_file, tmp_path / "empty")
    expect_refusal(OffloadError, "No such file", map_file, tmp_path / "missing")
    with pytest.raises(OffloadError):
        map_file(tmp_path)


@pytest.mark.parametrize("writable", [False, True])
def test_populated_pages_are_in_memory_and_dropped_ones_are_not(numbers, writable: bool) -> None:
    path, data = numbers
    tensor = map_file(path, writable)
    Pages([tensor]).drop()
    assert resident_bytes(tensor) == 0
    part = tensor[10 * PAGE + 7 : 20 * PAGE + 7]
    Pages([part]).populate()
    assert resident_bytes(part) == 11 * PAGE
    assert torch.equal(tensor, data)
    Pages([part]).drop()  # the first and the last page are not its own
    assert resident_bytes(part) == 2 * PAGE
    assert resident_bytes(tensor) == 64 * PAGE - 9 * PAGE
    assert torch.equal(tensor, data)


def test_what_was_written_to_a_private_mapping_is_never_dropped(numbers) -> None:
    path, data = numbers
    tensor = map_file(path)
    tensor[5 * PAGE + 1] += 1
    tensor.data[9 * PAGE] += 1  # no version tells of this
    data[[5 * PAGE + 1, 9 * PAGE]] += 1
    Pages([tensor]).drop()
    assert torch.equal(tensor, data)
    Pages([tensor]).drop()
    assert resident_bytes(tensor) == 2 * PAGE


def test_what_was_written_to_a_shared_mapping_gets_into_the_file_when_dropped(numbers) -> None:
    path, data = numbers
    tensor = map_file(path, writable=True)
    tensor += 1
    Pages([tensor]).drop()
    assert resident_bytes(tensor) == 0
    assert torch.equal(tensor, data + 1)
    assert path.read_bytes() == (data + 1).numpy().tobytes()


def test_a_truncated_file_is_an_error_before_it_is_touched(numbers) -> None:
    path, _ = numbers
    tensor = map_file(path)
    of_group = Pages([tensor])
    of_start = Pages([tensor[: 8 * PAGE]])
    os.truncate(path, 8 * PAGE)
    with pytest.raises(OffloadError, match=f"{8 * PAGE} bytes.* {64 * PAGE}"):
        of_group.populate()
    of_start.populate()
    replacement = path.with_suffix(".new")
    replacement.write_bytes(b"x")
    os.replace(replacement, path)
    # Now the file has no name, so that its size is not known: the kernel tells.
    expect_refusal(OffloadError, "Bad address", of_group.populate)


def test_older_kernels_are_served_by_touching_each_page(numbers, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = numbers
    tensor = map_file(path)
    Pages([tensor]).drop()
    monkeypatch.setattr(module_of(Pages), "_POPULATE_READ", 12345)  # no kernel knows it
    Pages([tensor[: 32 * PAGE]]).populate()
    assert resident_bytes(tensor[: 32 * PAGE]) == 32 * PAGE


def test_pages_outlive_a_parameter_that_was_replaced(tmp_path: Path) -> None:
    """Their addresses are advised later, and must not be somebody else's by then."""
    model = Blocks(blocks=1)
    map_weights(model, tmp_path / "weights")
    groups = find_weight_groups(model, model.named_blocks())
    mover = MappedMover(groups)
    address = model.head.weight.data_ptr()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with open("/proc/self/maps") as lines:
        ranges = [line.split()[0].split("-") for line in lines if line.rstrip().endswith("weights")]
    assert any(int(start, 16) <= address < int(end, 16) for start, end in ranges)
    mover.close()
    libc = ctypes.CDLL(None)
    assert libc.madvise(ctypes.c_void_p(address // PAGE * PAGE), ctypes.c_size_t(PAGE), mmap.MADV_NORMAL) == 0
