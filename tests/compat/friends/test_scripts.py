"""Example scripts of transformers, diffusers and peft, unmodified, by alias against the installed Accelerate.

Set ``EXAMPLES`` to a folder with the sources of each library, ``transformers/examples/...`` and so on, and install
torchvision beside the other packages of the tests. They were run with the scripts of transformers 4.56 (58cebc84),
diffusers 0.40 (58eb52c0) and peft 0.20 (5d602fdb), on transformers 5.24, diffusers 0.42.1, peft 0.21.2.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.compat.friends.compare import difference
from tests.compat.friends.runs import MOST, end, start

SCRIPTS = {
    "transformers": (
        "glue glue_resumed glue_accumulated clm clm_resumed mlm mlm_resumed translation translation_resumed "
        "image_classification image_classification_resumed"
    ),
    "diffusers": (
        "text_to_image text_to_image_resumed text_to_image_lora text_to_image_lora_resumed dreambooth_lora "
        "dreambooth_lora_resumed textual_inversion textual_inversion_resumed controlnet controlnet_resumed "
        "train_unconditional"
    ),
    "peft": "feature_extraction feature_extraction_resumed prompt_tuning conditional_generation lora_dreambooth",
}
"""Library -> the cells of its scripts. A resumed one goes on from a checkpoint that the one before left."""
ALONE = {
    "conditional_generation": "on several processes of Accelerate it asks DDP for an attribute of its model",
    "feature_extraction_resumed": "its checkpoint lies inside of a window, of which Accelerate keeps no gradients",
}
"""Cells that are not compared with several processes of Accelerate, and why."""

ROUNDED = {"diffusers": 2e-5, "peft": 2e-5}
"""Weights on two processes: new ones are small beside the others, and a last digit of a gradient is seen in them."""


@pytest.fixture(autouse=True)
def libraries() -> None:
    # They are not imported here: torchvision's wheel needs the operators that the cells define.
    for name in ("accelerate", "transformers", "diffusers", "peft", "torchvision"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("library", SCRIPTS)
def test_a_script_gives_the_losses_and_weights_of_accelerate(
    library: str, processes: int, tmp_path: Path
) -> None:
    if not Path(os.environ.get("EXAMPLES", "examples"), library, "examples").is_dir():
        pytest.skip(f"EXAMPLES names no folder with the scripts of {library}")
    here, there = tmp_path / "here", tmp_path / "there"
    cells = SCRIPTS[library].split()
    resumed = [cell for cell in cells if cell.endswith("_resumed")]
    if processes == 1:
        compared = [cell for cell in cells if cell not in resumed]
    else:
        compared = [cell for cell in cells if cell not in ALONE]
    words, words_there = (" ".join(f"script/{cell}" for cell in part) for part in (cells, compared))
    for run, place, is_here in ((words, here, True), (words_there, there, False)):
        variables = {"ACCELERATE_USE_CPU": "true", "HF_HOME": str(tmp_path / "cache" / place.name)}
        end(start(run, place, is_here, processes, **variables))
    for cell in compared:
        numbers, weights = difference(here / cell, there / cell)
        most = MOST["alone" if processes == 1 else "ddp"]
        assert numbers <= most, cell
        assert weights <= (most if processes == 1 else ROUNDED.get(library, most)), cell
    if processes == 1:
        # Accelerate's loaders begin the epoch from the start, or in another order, where ours continue.
        for cell in resumed:
            apart = difference(here / cell, here / cell.removesuffix("_resumed"), goes_on=True)
            assert max(apart) <= MOST["alone"], cell


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_script_that_skips_batches_a_second_time_is_refused(tmp_path: Path) -> None:
    if not Path(os.environ.get("EXAMPLES", "examples"), "diffusers", "examples").is_dir():
        pytest.skip("EXAMPLES names no folder with the scripts of diffusers")
    words = "script/train_unconditional script/train_unconditional_resumed"
    run = start(words, tmp_path / "out", True, 1, ACCELERATE_USE_CPU="true", HF_HOME=str(tmp_path / "cache"))
    said = run.communicate(timeout=800)[0]
    assert run.returncode != 0
    assert "Remove the skip from the script: the loader continues by itself." in said
