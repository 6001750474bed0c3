"""Files of aligned regions: what is written through one road is read through the other."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from lockstep.errors import OffloadError
from lockstep.offload.files import ALIGNMENT, OffloadFile, aligned_buffer, region_of
from tests.refusals import expect_refusal

FOLDERS = ["disk", "/dev/shm"]


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path if request.param == "disk" else Path(request.param)


def test_reads_and_writes_and_mapped_tensors_show_the_same_bytes(folder: Path) -> None:
    file = OffloadFile(folder, 3 * ALIGNMENT)
    first, second = file.place(10), file.place(ALIGNMENT + 1)
    assert (first, second, file.free_bytes) == (0, ALIGNMENT, 0)
    mapped = file.tensor(second, (16, 64), torch.float32)
    buffer = aligned_buffer(2 * ALIGNMENT)
    assert buffer.data_ptr() % ALIGNMENT == 0
    expected = torch.randn(16, 64)
    for _ in range(3):
        buffer[:ALIGNMENT].copy_(expected.view(torch.uint8).view(-1))
        file.write(second, buffer)
        assert torch.equal(mapped, expected)
        mapped.add_(1)
        expected = expected + 1
        file.read(second, buffer)
        assert torch.equal(buffer[:ALIGNMENT].view(torch.float32).view(16, 64), expected)
    assert file.bytes_read == file.bytes_written == 6 * ALIGNMENT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool])
def test_every_dtype_and_shape_has_a_mapped_tensor_with_a_storage_of_its_own(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    file = OffloadFile(tmp_path, 10 * ALIGNMENT)
    for shape in [(), (3,), (0, 4), (5, 7)]:
        offset = file.place(1000)
        tensor = file.tensor(offset, shape, dtype)
        assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        tensor.copy_(torch.ones(shape, dtype=dtype))
        assert torch.equal(tensor, torch.ones(shape, dtype=dtype))


def test_the_region_of_a_tensor_is_known_and_its_file_lives_as_long_as_it(tmp_path: Path) -> None:
    file = OffloadFile(tmp_path, 4 * ALIGNMENT)
    file.place(1)
    offset = file.place(800)
    tensor = file.tensor(offset, (10, 20), torch.float32)
    parameter = torch.nn.Parameter(torch.zeros(10, 20))
    parameter.data = tensor
    assert region_of(tensor) == (file, offset)
    assert region_of(parameter) == (file, offset)
    assert region_of(tensor.view(20, 10)) == (file, offset)
    assert region_of(tensor[2:]) == (file, offset + 160)
    assert region_of(tensor.clone()) is None
    alive = weakref.ref(file)
    del file
    gc.collect()
    assert region_of(tensor[1:]) == (alive(), offset + 80)
    del tensor, parameter
    gc.collect()
    assert alive() is None


def test_nothing_is_left_in_the_folder_and_a_missing_one_is_made(tmp_path: Path) -> None:
    file = OffloadFile(tmp_path / "a" / "b", 1)
    assert os.listdir(tmp_path / "a" / "b") == []
    descriptors = {file._fd, file._direct_fd}
    del file
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_too_little_space_is_said_with_both_numbers(tmp_path: Path) -> None:
    needed = 1 << 50
    with pytest.raises(OffloadError, match=f"needs {needed} bytes"):
        OffloadFile(tmp_path, needed)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_an_error() -> None:
    expect_refusal(OffloadError, "/proc", OffloadFile, "/proc/nowhere", 1)


def test_a_file_system_without_direct_access_is_used_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return _open(path, flags, *rest)

    _open = os.open
    monkeypatch.setattr(os, "open", refuse)
    file = OffloadFile(tmp_path, ALIGNMENT)
    monkeypatch.undo()
    assert not file.is_direct and OffloadFile(tmp_path, ALIGNMENT).is_direct
    buffer = aligned_buffer(ALIGNMENT).fill_(7)
    file.write(0, buffer)
    file.read(0, buffer.zero_())
    assert buffer.sum() == 7 * ALIGNMENT


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OffloadFile(tmp_path, 2 * ALIGNMENT)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", broken)
    expect_refusal(OffloadError, "Input/output error", file.write, ALIGNMENT, aligned_buffer(ALIGNMENT))
    monkeypatch.setattr(os, "preadv", lambda *_: 5)
    expect_refusal(OffloadError, "5 bytes", file.read, 0, aligned_buffer(ALIGNMENT))


def test_nothing_is_left_of_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch; from lockstep.offload.files import OffloadFile;"
        f"file = OffloadFile({str(tmp_path)!r}, 1 << 20); file.tensor(0, (9,), torch.float32).fill_(1);"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("system_writes_ranges", [True, False])
def test_what_is_changed_through_a_tensor_is_written_by_flush(
    system_writes_ranges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not system_writes_ranges:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    file = OffloadFile(tmp_path, 4 * ALIGNMENT)
    file.place(ALIGNMENT)
    tensor = file.tensor(file.place(2 * ALIGNMENT), (2 * ALIGNMENT // 4,), torch.float32)
    tensor.copy_(torch.arange(tensor.numel()))
    file.flush(ALIGNMENT, 2 * ALIGNMENT)
    assert (file.bytes_read, file.bytes_written) == (0, 2 * ALIGNMENT)
    buffer = aligned_buffer(2 * ALIGNMENT)
    file.read(ALIGNMENT, buffer)
    assert torch.equal(buffer.view(torch.float32), torch.arange(tensor.numel(), dtype=torch.float32))
