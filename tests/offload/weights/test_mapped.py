"""Memory-mapped weights are read ahead and let go, and never lost."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.errors import OffloadError
from lockstep.offload.files import Pages, map_file
from lockstep.offload.weights import MappedMover, WeightGroup, find_weight_groups
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


def test_neighbours_count_as_one_range_and_gaps_are_not_touched(numbers) -> None:
    path, _ = numbers
    tensor = map_file(path)
    Pages([tensor]).drop()
    halves = Pages([tensor[PAGE : PAGE + 100], tensor[PAGE + 100 : 3 * PAGE]])
    assert halves.nbytes == 2 * PAGE
    halves.populate()
    assert resident_bytes(tensor[PAGE : 3 * PAGE]) == 2 * PAGE
    halves.drop()
    assert resident_bytes(tensor[PAGE : 3 * PAGE]) == 0
    gap = Pages([tensor[PAGE : 2 * PAGE - 8], tensor[2 * PAGE : 3 * PAGE]])
    Pages([tensor]).populate()
    gap.drop()
    assert resident_bytes(tensor) == 63 * PAGE
    strided = tensor[4 * PAGE : 8 * PAGE].view(4, PAGE).t()
    assert Pages([strided]).nbytes == Pages([strided[:, ::2]]).nbytes + PAGE == 4 * PAGE
    assert Pages([tensor[:1].expand(100 * PAGE)]).nbytes == PAGE


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


def test_tensors_in_memory_are_left_alone() -> None:
    tensor = torch.arange(1 << 20)
    Pages([tensor]).populate()
    Pages([tensor]).drop()
    assert torch.equal(tensor, torch.arange(1 << 20))
    assert Pages([tensor, torch.empty(0), torch.empty(3, device="meta")]).nbytes == 0


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


def test_a_file_that_is_truncated_while_it_is_read_is_named_as_such(numbers) -> None:
    path, _ = numbers
    pages_of_file = Pages([map_file(path)])

    def stopped() -> bool:
        os.truncate(path, 8 * PAGE)
        return False

    with pytest.raises(OffloadError, match=f"{8 * PAGE} bytes.* {64 * PAGE}"):
        pages_of_file.populate(stopped)


def test_older_kernels_are_served_by_touching_each_page(numbers, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = numbers
    tensor = map_file(path)
    Pages([tensor]).drop()
    monkeypatch.setattr(module_of(Pages), "_POPULATE_READ", 12345)  # no kernel knows it
    Pages([tensor[: 32 * PAGE]]).populate()
    assert resident_bytes(tensor[: 32 * PAGE]) == 32 * PAGE


def test_populating_stops_between_pieces(tmp_path: Path) -> None:
    path = tmp_path / "holes"
    path.touch()
    os.truncate(path, 64 << 20)
    tensor = map_file(path)
    answers = iter([False, True])
    Pages([tensor]).populate(lambda: next(answers))
    assert 0 < resident_bytes(tensor) < tensor.nbytes


def test_a_mover_moves_what_is_mapped_and_keeps_what_was_written(tmp_path: Path) -> None:
    model = Blocks(blocks=2)
    in_memory = find_weight_groups(model, model.named_blocks())
    assert [MappedMover(in_memory).nbytes(group) for group in in_memory] == [0] * 4
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    map_weights(model, tmp_path / "weights")
    groups = find_weight_groups(model, model.named_blocks())
    mover = MappedMover(groups)
    block, weight = groups[1], model.blocks[0][1].weight
    assert block.nbytes <= mover.nbytes(block) < block.nbytes + 2 * PAGE
    for group in groups:
        assert mover.release(group)
    mover.load(block)
    assert resident_bytes(weight) >= weight.nbytes
    mover.release(block)
    assert resident_bytes(weight) <= 2 * PAGE
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
    with torch.no_grad():
        weight.add_(1)
    mover.release(block)
    assert torch.equal(weight, expected["blocks.0.1.weight"] + 1)


def test_parameters_in_files_of_their_own_and_buffers_may_be_written_to(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(PAGE)
    map_weights(model, tmp_path / "weights", writable=True)
    statistics = tmp_path / "statistics"
    statistics.write_bytes(bytes(4 * PAGE))
    model.running_mean = map_file(statistics).view(torch.float32)
    mover = MappedMover(
        [WeightGroup("", [model], {**dict(model.named_parameters()), **dict(model.named_buffers())}, 0)]
    )
    with torch.no_grad():
        model.weight.mul_(2)
    model(torch.full((8, PAGE), 2.0))
    mover.close()
    assert torch.equal(model.weight, torch.full((PAGE,), 2.0))
    torch.testing.assert_close(model.running_mean, torch.full((PAGE,), 0.2))


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
