"""How much Python runs in each step of a plain loop. Calls are counted, which no other process disturbs."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from tests.warm_interpreter import WarmInterpreter

SCRIPT = """
import json, math, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import lockstep
from lockstep import Accelerator
from lockstep.observe.measures import StepAssembler

STEPS = 50
BEGINNING = 15  # steps before those that are counted: in some of them measures look at more
ROOT = os.path.dirname(lockstep.__file__) + os.sep

def calls_of(step):
    # of Python functions (and resumed generators) in a step: those of Lockstep, and of all others
    found = {True: 0, False: 0}
    def note(frame, event, _):
        if event == "call":
            found[frame.f_code.co_filename.startswith(ROOT)] += 1
    for _ in range(BEGINNING):
        step()
    sys.setprofile(note)
    for _ in range(STEPS):
        step()
    sys.setprofile(None)
    return found[True] / STEPS, found[False] / STEPS

def loop(model, optimizer, loader, backward, clip):
    batches = iter(loader)
    def step():
        inputs, targets = next(batches)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        backward(loss)
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return step

def made():
    rows = 4 * (BEGINNING + STEPS + 2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    loader = DataLoader(TensorDataset(torch.randn(rows, 8), torch.randn(rows, 1)), batch_size=4)
    return model, torch.optim.AdamW(model.parameters(), fused=True), loader

# What is done a few times a second counts for none of the steps, however slow the machine is.
sys.modules[StepAssembler.__module__].SHOWN_EVERY_S = math.inf
by_hand = calls_of(loop(*made(), torch.Tensor.backward, torch.nn.utils.clip_grad_norm_))
accelerator = Accelerator(cpu=True)
prepared = accelerator.prepare(*made())
ours = calls_of(loop(*prepared, accelerator.backward, accelerator.clip_grad_norm_))
with open(sys.argv[1], "w") as file:
    json.dump([by_hand, ours], file)
"""


def test_a_step_makes_few_calls_more_than_one_by_hand(
    warm_interpreter: WarmInterpreter, tmp_path: Path
) -> None:
    script, found = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text(textwrap.dedent(SCRIPT))
    code, output = warm_interpreter.run(script, str(found))
    assert code == 0, output
    by_hand, ours = json.loads(found.read_text())
    assert by_hand[0] == 0
    assert ours[0] <= 90, ours
    assert ours[1] <= by_hand[1] + 20, (ours, by_hand)
