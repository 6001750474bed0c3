"""What devices could do: as their makers say, or as it is measured."""

from __future__ import annotations

import pytest
import torch

from lockstep.observe.measures import TABLE, peak_of, peak_of_name, precision_of


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 PCIe", "bf16", 756.5e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA GeForce GTX 1080", "fp32", None),
    ],
)
def test_the_table_knows_devices_by_the_names_that_they_have(
    name: str, precision: str, expected: float | None
) -> None:
    assert peak_of_name(name, precision) == expected
    assert peak_of_name("NVIDIA A100-SXM4-80GB", "fp32", allows_tf32=True) == 156e12


def test_each_row_has_a_source_and_peaks_that_grow_with_fewer_bits() -> None:
    for row in TABLE:
        assert row.source.startswith(("NVIDIA", "AMD"))
        order = [row.peaks[name] for name in ("fp32", "tf32", "bf16", "fp8") if name in row.peaks]
        assert order == sorted(order)


def test_a_cpu_is_measured_once() -> None:
    first = peak_of(torch.device("cpu"), "fp32")
    assert first is not None
    assert 1e8 < first < 1e14
    assert peak_of(torch.device("cpu"), "fp32") == first
    assert peak_of(torch.device("cpu"), "fp8") is None
    assert peak_of(torch.device("meta"), "fp32") is None


def test_a_run_multiplies_in_what_autocast_says_or_its_parameters_are() -> None:
    assert precision_of("bf16", torch.float32) == "bf16"
    assert precision_of("no", torch.bfloat16) == "bf16"
    assert precision_of("no", None) == "fp32"
