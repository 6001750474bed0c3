"""``save_state`` under ``if accelerator.is_main_process``, as scripts for Accelerate have it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

from lockstep import Accelerator, set_seed
from lockstep.errors import UsageError
from lockstep.user_call import call_on_one_rank, lines_of_one_rank

STEPS, SAVED_AFTER = 8, 3


def train(folder: str, mode: str) -> tuple[list[float], torch.Tensor, list[str]]:
    """What this rank trains on, the weights after the last step, and what it was warned of."""
    set_seed(3, device_specific=True)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    torch.manual_seed(accelerator.process_index)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    rows = torch.arange(4.0 * STEPS * accelerator.num_processes).view(-1, 1)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if mode == "resume":
            accelerator.load_state(folder)
        for step, batch in enumerate(loader):
            seen += batch.flatten().tolist()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if mode == "save" and step + 1 == SAVED_AFTER and accelerator.is_main_process:
                accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    said = [str(one.message) for one in caught if "on one rank only" in str(one.message)]
    return seen, accelerator.unwrap_model(model).weight.detach(), said


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_0_saves_the_whole_state_alone_and_the_run_goes_on_from_there(
    run_distributed, tmp_path: Path, ranks: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    straight = run_distributed(train, ranks, folder, "save")
    resumed = run_distributed(train, ranks, folder, "resume")
    for rank, ((seen, weight, said), (rest, again, _)) in enumerate(zip(straight, resumed, strict=True)):
        assert rest == seen[4 * SAVED_AFTER :]
        assert torch.equal(again, weight)
        assert len(said) == (rank == 0 and ranks > 1)
    everything = sorted(row for seen, _, _ in straight for row in seen)
    assert everything == list(range(4 * STEPS * ranks))


def refused(script: str, how: str) -> str:
    accelerator = Accelerator(cpu=True, parallel="zero=2" if how == "zero" else "ddp")
    before, main = sys.modules["__main__"], type(sys)("__main__")
    main.__file__ = script
    try:
        sys.modules["__main__"] = main
        accelerator.prepare(torch.nn.Linear(2, 2))
        if how == "numbered" and accelerator.process_index == 0:
            accelerator.save_state()
    except UsageError as error:
        return str(error)
    finally:
        sys.modules["__main__"] = before
    return ""


@pytest.mark.parametrize("how", ["zero", "ddp", "numbered"])
def test_what_needs_all_ranks_is_refused_with_its_line_before_anything_is_trained(
    run_distributed, tmp_path: Path, how: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "\n\nif accelerator.is_main_process:\n    if step == 9:\n        accelerator.save_state(x)\n"
    )
    first, other = run_distributed(refused, 2, str(script), how)
    if how == "zero":
        assert first == other
        assert first.startswith("train.py:5 calls Accelerator.save_state on one rank only")
    else:
        assert other == ""
        assert ("test_on_one_rank.py" in first) == (how == "numbered")


SOURCE = """
if accelerator.is_main_process:
    a()
else:
    b()
if accelerator.is_main_process or zero:
    c()
if step and self.accelerator.is_local_main_process and other:
    d(
    )
if not accelerator.is_main_process:
    e()
if accelerator.process_index == 0:
    f()
"""


def test_blocks_that_one_rank_enters_are_found_and_no_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SOURCE)
    assert lines_of_one_rank(str(script)) == {3, 9, 10, 14}
    assert lines_of_one_rank("nowhere.py") == frozenset()


def test_a_script_that_also_saves_on_all_ranks_is_not_judged_by_its_source(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("if a.is_main_process:\n    a.save_state(1)\nif zero:\n    a.save_state(1)\n")
    assert call_on_one_rank(str(script), ["save_state"]).name == ""
    script = tmp_path / "other.py"
    script.write_text("if a.is_main_process:\n    a.save_model(1)\n")
    assert call_on_one_rank(str(script), ["save_model"]) == ("Accelerator.save_model", "other.py:2")
