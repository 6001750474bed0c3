"""A folder that a run has really written, by what writes it today."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from lockstep.history import RunStatus, configuration
from lockstep.report import report_of
from tests.warm_interpreter import WarmInterpreter

SCRIPT = """
import torch
from lockstep import Accelerator, ProjectConfiguration

project = ProjectConfiguration("project", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project, mixed_precision="no", gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if {resume}:
    accelerator.load_state()
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({{"squared": float(loss)}})
    accelerator.save_state()
    if {fail}:
        raise ValueError("the disk <b>is</b> full")
accelerator.end_training()
"""


@pytest.fixture
def project(tmp_path: Path, warm_interpreter: WarmInterpreter) -> Path:
    """Of a run that failed after an epoch, and was started again from its checkpoint."""
    for resume, fail in ((False, True), (True, False)):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(resume=resume, fail=fail))
        exit_code, output = warm_interpreter.run(script)
        assert (exit_code != 0) == fail, output
    return tmp_path / "project"


def test_a_real_run_is_reported(project: Path) -> None:
    lines = [json.loads(line) for line in (project / "run" / "measures.jsonl").read_text().splitlines()]
    report = report_of(project, time.time())
    run, numbers = report.run, report.numbers
    assert numbers.status is RunStatus.FINISHED
    last = {line["step"]: line for line in lines}
    assert numbers.steps == len(last) and len(numbers.attempts) == 2
    assert numbers.samples == sum(line["samples"] for line in last.values())
    assert run.steps.loss.tolist() == [line["loss"] for line in lines]
    assert np.isfinite(run.steps.gradient_norm).all() and np.isfinite(run.steps.learning_rate).all()
    assert numbers.step_times is not None and numbers.goodput is not None
    assert sum(numbers.step_times.shares.values()) == pytest.approx(1, abs=0.02)
    assert numbers.goodput.productive + sum(numbers.goodput.lost.values()) == pytest.approx(
        numbers.goodput.total, rel=0.02
    )
    assert "squared" in run.steps.logged
    assert [event.name for event in run.events if event.name in ("error", "loaded")] == ["error", "loaded"]
    assert set(run.on_disk.values()) == {True} and len(run.on_disk) == 3
    names = {name for name, _, _ in configuration(numbers.started)}
    assert "gradient_accumulation_steps" in names
    page = report.page()
    assert "ValueError: the disk &lt;b&gt;is&lt;/b&gt; full" in page
    assert "on disk" in page
