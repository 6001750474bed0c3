"""Which packages and devices there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep import runtime


def test_an_installed_package_is_available_and_an_invented_one_is_not() -> None:
    assert runtime.is_available("torch")
    assert not runtime.is_available("no_such_package")
    assert not runtime.is_available("no_such_package.part")


def test_a_bare_directory_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leftover_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not runtime.is_available("leftover_runs")


def test_an_import_that_was_blocked_or_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert not runtime.is_wandb_available()
    monkeypatch.setitem(sys.modules, "wandb", type(sys)("wandb"))
    assert runtime.is_wandb_available()


def test_versions_are_compared_as_numbers() -> None:
    assert runtime.has_version("torch", "2.9")
    assert not runtime.has_version("torch", "1000.0")
    assert not runtime.has_version("no_such_package", "0")


def test_versions_compare_by_number_not_by_text() -> None:
    assert runtime.is_torch_version(">=", "2.9") and not runtime.is_torch_version("<", "2.9")
    assert runtime.compare_versions("torch", "==", torch.__version__)
    with pytest.raises(ValueError):
        runtime.is_torch_version("=>", "2.9")


def test_devices_are_those_that_torch_sees() -> None:
    assert runtime.is_cuda_available() == torch.cuda.is_available()
    assert runtime.is_xpu_available() == torch.xpu.is_available()
    assert runtime.is_mps_available() == torch.backends.mps.is_available()
    assert isinstance(runtime.is_bf16_available(), bool)
    assert not runtime.is_npu_available()


def test_asking_for_packages_does_not_import_torch() -> None:
    source = (
        "import sys; from lockstep.runtime import is_wandb_available; is_wandb_available(); "
        "raise SystemExit('torch' in sys.modules)"
    )
    root = Path(runtime.__file__).parents[2]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {source}"]
    assert subprocess.run(command, check=False).returncode == 0
