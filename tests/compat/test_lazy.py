"""Other libraries' words are imported only where some of them are there."""

from __future__ import annotations

from pathlib import Path

from tests.warm_interpreter import WarmInterpreter

PLAIN = """
import sys
import torch
from lockstep import Accelerator
from lockstep.utils import set_seed

set_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="no")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.save_state(sys.argv[1])
accelerator.load_state(sys.argv[1])
print(sorted(name for name in sys.modules if name.startswith("lockstep.compat")))
"""


def test_a_plain_run_imports_none_of_it(warm_interpreter: WarmInterpreter, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    assert warm_interpreter.run(tmp_path / "plain.py", str(tmp_path / "state")) == (0, "[]\n")
