"""How much host memory is left, against files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.runtime import free_host_bytes
from tests.patching import module_of

MIB = 2**20
MODULE: Any = module_of(free_host_bytes)


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /sys/fs/cgroup, on a machine with 8 GiB to spare; this process is in the group /job/step."""
    monkeypatch.setattr(MODULE, "MOUNT", tmp_path)
    monkeypatch.setattr(MODULE, "MEMBERSHIP", tmp_path / "membership")
    free = psutil.virtual_memory()._replace(available=8192 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    (tmp_path / "membership").write_text("0::/job/step\n")
    return tmp_path


def limit(
    group: Path, limit: object, taken: int, stat: str = "anon 1\ninactive_file 0\n", version: int = 2
) -> None:
    group.mkdir(parents=True, exist_ok=True)
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    for name, value in zip(names, (limit, taken), strict=True):
        (group / f"memory.{name}").write_text(f"{value}\n")
    (group / "memory.stat").write_text(stat)


def test_without_a_limit_it_is_what_the_machine_has(mount: Path) -> None:
    assert free_host_bytes() == 8192 * MIB
    limit(mount / "job/step", "max", 100 * MIB)
    assert free_host_bytes() == 8192 * MIB


def test_a_group_leaves_its_limit_less_what_is_taken(mount: Path) -> None:
    limit(mount / "job/step", 1000 * MIB, 300 * MIB, f"inactive_file {50 * MIB}\nactive_file {20 * MIB}\n")
    assert free_host_bytes() == 750 * MIB
    limit(mount / "job/step", 1000 * MIB, 1001 * MIB)
    assert free_host_bytes() == 0


def test_a_group_around_may_leave_less(mount: Path) -> None:
    limit(mount / "job/step", 1000 * MIB, 0)
    limit(mount / "job", 600 * MIB, 500 * MIB)
    limit(mount / "other", 10 * MIB, 5 * MIB)
    assert free_host_bytes() == 100 * MIB


def test_in_a_container_the_limit_stands_at_the_mount(mount: Path) -> None:
    (mount / "membership").write_text("0::/\n")
    limit(mount, 512 * MIB, 12 * MIB)
    assert free_host_bytes() == 500 * MIB
    (mount / "membership").write_text("0::/../outside\n")  # of a container that sees a part of the groups
    assert free_host_bytes() == 500 * MIB


def test_of_version_1_the_group_of_memory_counts(mount: Path) -> None:
    (mount / "membership").write_text("5:cpu,cpuacct:/limited\n4:memory:/docker/abc\n0::/\n")
    limit(mount / "cpu,cpuacct/limited", 1, 1, version=1)
    stat = f"inactive_file 0\ntotal_inactive_file {30 * MIB}\n"
    limit(mount / "memory/docker/abc", 400 * MIB, 100 * MIB, stat, version=1)
    limit(mount / "memory", 2**63 - 4096, 5000 * MIB, version=1)  # as the kernel says "none"
    assert free_host_bytes() == 330 * MIB


def test_systems_without_control_groups_have_none(mount: Path) -> None:
    (mount / "membership").unlink()
    assert free_host_bytes() == 8192 * MIB
