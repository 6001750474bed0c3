"""Trainers of packages that few have installed, unmodified, by alias against the installed Accelerate.

Install one of ``PACKAGES`` beside the other packages of the tests, and its tests run.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.compat.friends.runs import end, far, start

PACKAGES = {
    "denoising_diffusion": "denoising_diffusion_pytorch",
    "rin": "rin_pytorch",
    "rectified_flow": "rectified_flow_pytorch",
    "imagen": "imagen_pytorch",
    "muse_maskgit": "muse_maskgit_pytorch",
    "magvit2": "magvit2_pytorch",
    "skorch": "skorch",
    "setfit": "setfit",
    "fastai": "fastai",
    "accmt": "accmt",
    "lm_eval": "lm_eval",
}
"""Cell -> the package with its trainer: denoising-diffusion-pytorch 2.3.4, rin-pytorch 0.8.0, imagen-pytorch 2.1.0,
rectified-flow-pytorch 0.14.0, muse-maskgit-pytorch 0.3.5, magvit2-pytorch 0.5.1, skorch 1.4.0, setfit 1.2.0,
fastai 2.8.12, accmt 1.9.5.1, lm-eval 0.4.13."""
ALONE = {
    "magvit2": "on several processes of Accelerate it asks DDP for an attribute of its model",
    "skorch": "on several processes of Accelerate its loss, which has no parameters, is refused by DDP",
    "accmt": "it steps with gradients of one rank, which is refused here",
}
"""Cells that are run on one process only, and why."""
RUNS = [(cell, count) for cell in PACKAGES for count in (1, 2) if count == 1 or cell not in ALONE]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("cell", "processes"), RUNS)
def test_a_trainer_gives_the_losses_and_weights_of_accelerate(
    cell: str, processes: int, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    if importlib.util.find_spec(PACKAGES[cell]) is None:
        pytest.skip(f"{PACKAGES[cell]} is not installed")
    here, there, word = tmp_path / "here", tmp_path / "there", f"client/{cell}"
    end(start(word, here, True, processes, ACCELERATE_USE_CPU="true"))
    end(start(word, there, False, processes, ACCELERATE_USE_CPU="true"))
    assert far(word, here, there, "alone" if processes == 1 else "ddp") == []


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_trainer_whose_ranks_would_part_ways_is_refused(tmp_path: Path) -> None:
    # All micro-batches but an epoch's last run in no_sync there, those before a step too.
    if importlib.util.find_spec("accmt") is None:
        pytest.skip("accmt is not installed")
    run = start("client/accmt", tmp_path, True, 2, ACCELERATE_USE_CPU="true")
    said = run.communicate(timeout=800)[0]
    assert run.returncode != 0
    assert "Run the last forward and backward before a step outside no_sync" in said
