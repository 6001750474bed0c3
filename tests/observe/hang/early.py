"""``early.py WHEN NUMBER OUT [plain]``: rank 0 sends its launcher, or itself if alone, a signal at a certain moment."""

from __future__ import annotations

import os
import sys
import time

when, number, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]


def here(moment: str) -> None:
    if moment == when and os.environ.get("RANK", "0") == "0":
        os.kill(os.getppid() if "RANK" in os.environ else os.getpid(), number)
        if moment in ("import", "prepared"):
            time.sleep(600)  # who is ended there needs no help


here("import")

import torch  # noqa: E402

from lockstep import Accelerator, ProjectConfiguration  # noqa: E402

project = ProjectConfiguration(out, automatic_checkpoint_naming="plain" not in sys.argv)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.ones(400, 2), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
here("prepared")
for step, batch in enumerate(loader):
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
    here(f"step {step}")
    time.sleep(0.1)
