"""Attributes that clients set and read, in a script that runs with the installed Accelerate and by alias."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import (
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from saying import say
from torch import nn
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")


def accelerator_with(**options: Any) -> Accelerator:
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def told(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


class Tracker(GeneralTracker):
    name, requires_logging_directory = "told", False

    def __init__(self, run_name: str = "") -> None:
        super().__init__()
        self.run_name, self.lines = run_name, []

    @property
    def tracker(self) -> Any:
        return self.lines

    def store_init_configuration(self, values: Any) -> None:
        self.lines.append(values)

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.lines.append([values, step])


# -- each can be set, and is what was set

accelerator = accelerator_with()
names = """
    scaler project_configuration trackers log_with dataloader_config gradient_state rng_types init_handler
    scaler_handler ao_recipe_handler step flag_tensor
"""
for name in names.split():
    value = getattr(accelerator, name)
    setattr(accelerator, name, value)
    say("set", name, getattr(accelerator, name) == value)
say("values", accelerator.rng_types, accelerator.flag_tensor, accelerator.step, accelerator.scaler)
accelerator.set_trigger()
say("flag", accelerator.flag_tensor.item(), accelerator.check_trigger(), accelerator.flag_tensor.item())
accelerator.flag_tensor = torch.tensor(1)
say("flag that was set", accelerator.check_trigger(), accelerator.check_trigger())

# -- what is set is used

with tempfile.TemporaryDirectory() as folder:
    accelerator = accelerator_with(project_dir=str(Path(folder, "before")))
    accelerator.project_configuration = ProjectConfiguration(
        folder, automatic_checkpoint_naming=True, total_limit=2
    )
    for _ in range(3):
        accelerator.save_state()
    found = sorted(path.name for path in Path(folder, "checkpoints").iterdir() if path.is_dir())
    say("project", accelerator.project_dir == accelerator.logging_dir == folder, found, os.listdir(folder))

accelerator = accelerator_with()
accelerator.log(torch.zeros(2, 2), step=1)
accelerator.log([1, 2])
accelerator.log({"loss": 1.0})
say("logged without trackers", accelerator.log_with, accelerator.trackers)
accelerator.log_with = [Tracker("own")]
accelerator.init_trackers("project", {"lr": 1.0})
accelerator.log({"loss": 2.0}, step=3)
accelerator.log("a text", step=4)
[own] = accelerator.trackers
say("log_with", own.lines)
other = Tracker("other")
accelerator.trackers = [other]
accelerator.log({"loss": 3.0})
say("trackers", len(own.lines), other.lines)

accelerator = accelerator_with()
accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True, even_batches=False)
say("loaders", accelerator.split_batches, accelerator.even_batches)
accelerator.even_batches = True
say("loaders", accelerator.dataloader_config.even_batches)
accelerator.rng_types = ["torch"]
loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))
say("generators", [str(kind) for kind in loader.rng_types], loader.synchronized_generator)

loader = accelerator_with().prepare(DataLoader(torch.arange(8), batch_size=2))
say("loader", str(loader.device), loader.iteration, loader.skip_batches)
loader.skip_batches = 1
say("skips", told(loader), told(loader), loader.iteration)
loader.skip_batches = 0
loader.iteration = 7
say("iteration", told(loader), loader.iteration)
loader.device = torch.device("meta")
say("device", [str(batch.device) for batch in loader])
loader.device = None
say("no device", [str(batch.device) for batch in loader])
for name in ("base_dataloader", "rng_types"):
    setattr(loader, name, getattr(loader, name))
say("same reader", told(loader))

numbered = SimpleNamespace(epochs=[])


class Numbered(torch.utils.data.Dataset):
    def set_epoch(self, epoch: int) -> None:
        numbered.epochs.append(epoch)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> int:
        return row


loader = accelerator_with().prepare(DataLoader(Numbered()))
list(loader)
loader.iteration = 5
list(loader)
list(loader)
say("data set is told", sorted(set(numbered.epochs)))

# -- steps

for options in (
    {},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 3},
    {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)},
    {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False)},
    {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=1, sync_each_batch=True)},
):
    accelerator = accelerator_with(**options)
    say("plugin_kwargs", dict(accelerator.gradient_state.plugin_kwargs))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(torch.ones(5, 1))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps.append([accelerator.step, accelerator.sync_gradients])
    say("step", steps, optimizer.gradient_state.num_steps, scheduler.gradient_state.num_steps)
    accelerator.gradient_accumulation_steps = 4
    say("plugin_kwargs that were set", dict(accelerator.gradient_state.plugin_kwargs))

accelerator = accelerator_with(gradient_accumulation_steps=3)
model = accelerator.prepare(nn.Linear(1, 1))
synchronised = []
for number in range(8):
    if number == 4:
        accelerator.step = 0  # the window begins anew
    with accelerator.accumulate(model):
        synchronised.append(accelerator.sync_gradients)
say("step that was set", synchronised)

accelerator = accelerator_with()
accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
model = nn.Linear(2, 1)
nn.init.ones_(model.weight)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
optimizer.scaler = None
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
say("without a scale", model.weight.tolist(), optimizer.step_was_skipped)
say("dynamo", str(accelerator.state.dynamo_plugin.backend), accelerator.state.dynamo_plugin.backend == "NO")
