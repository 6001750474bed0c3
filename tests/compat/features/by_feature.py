"""What Accelerate's documentation shows, feature by feature, in few lines each. One line of numbers a feature.

Runs with Accelerate, by alias, and with its import changed: every mention of the library becomes ours.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    find_executable_batch_size,
    set_seed,
)
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

FEATURES: dict[str, Callable[[], Any]] = {}


def feature(run: Callable[[], Any]) -> Callable[[], Any]:
    FEATURES[run.__name__] = run
    return run


def accelerator(**given: Any) -> Any:
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    return Accelerator(cpu=True, dataloader_config=order, **given)


def data(count: int = 48) -> TensorDataset:
    source = torch.Generator().manual_seed(1)
    rows = torch.randn(count, 6, generator=source)
    return TensorDataset(rows, (rows.sum(1) > 0).long())


def parts(batch_size: int = 4, dataset: Any = None) -> Any:
    set_seed(42)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train = DataLoader(data() if dataset is None else dataset, batch_size=batch_size, shuffle=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    return model, optimizer, train, schedule


def epoch(
    run: Any, model: Any, optimizer: Any, train: Any, schedule: Any, accumulates: bool = False
) -> float:
    total = 0.0
    model.train()
    for rows, labels in train:
        with run.accumulate(model) if accumulates else torch.enable_grad():
            loss = nn.functional.cross_entropy(model(rows), labels)
            run.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += run.reduce(loss.detach(), "mean").item()
    return total


def weights(run: Any, model: Any) -> list[float]:
    return [float(value.double().sum()) for value in run.get_state_dict(model).values()]


@feature
def gradient_accumulation() -> Any:
    run = accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))
    prepared = run.prepare(*parts())
    return [epoch(run, *prepared, accumulates=True) for _ in range(2)], weights(run, prepared[0])


@feature
def automatic_gradient_accumulation() -> Any:
    run = accelerator()
    seen = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> Any:
        run.free_memory()
        seen.append(batch_size)
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory.")
        run.gradient_accumulation_steps = 8 // batch_size
        prepared = run.prepare(*parts(batch_size))
        return epoch(run, *prepared, accumulates=True), weights(run, prepared[0])

    return train(), seen


@feature
def checkpointing() -> Any:
    run = accelerator()
    folder = run.gather_for_metrics([tempfile.mkdtemp()], use_gather_object=True)[0]
    prepared = run.prepare(*parts())
    epoch(run, *prepared)
    saved = weights(run, prepared[0])
    run.save_state(os.path.join(folder, "epoch_0"))
    after = epoch(run, *prepared)
    run.load_state(os.path.join(folder, "epoch_0"))
    return saved, after, weights(run, prepared[0]) == saved, prepared[3].get_last_lr()


@feature
def resuming_in_an_epoch() -> Any:
    run = accelerator()
    prepared = run.prepare(*parts())
    rest = run.skip_first_batches(prepared[2], 2)
    return epoch(run, prepared[0], prepared[1], rest, prepared[3]), weights(run, prepared[0])


@feature
def cross_validation() -> Any:
    found = []
    for fold in range(3):
        run = accelerator()
        kept = [number for number in range(48) if number % 3 != fold]
        prepared = run.prepare(*parts(dataset=Subset(data(), kept)))
        epoch(run, *prepared)
        test = run.prepare(DataLoader(Subset(data(), range(fold, 48, 3)), batch_size=5))
        with torch.no_grad():
            logits = [run.gather_for_metrics(prepared[0](rows)) for rows, _ in test]
        found.append([len(torch.cat(logits)), float(torch.cat(logits).double().sum())])
    return found


@feature
def multi_process_metrics() -> Any:
    run = accelerator()
    model = run.prepare(parts()[0])
    loader = run.prepare(DataLoader(data(45), batch_size=4))
    right = rows_seen = 0
    with torch.no_grad():
        for rows, labels in loader:
            predicted, labels = run.gather_for_metrics((model(rows).argmax(-1), labels))
            right, rows_seen = right + int((predicted == labels).sum()), rows_seen + len(labels)
    return right, rows_seen


@feature
def early_stopping() -> Any:
    run = accelerator()
    prepared = run.prepare(*parts())
    for number in range(10):
        epoch(run, *prepared)
        if number == 2 and run.is_local_main_process:
            run.set_trigger()
        if run.check_trigger():
            break
    return number, weights(run, prepared[0])


@feature
def local_sgd() -> Any:
    run = accelerator()
    model, optimizer, train, _ = run.prepare(*parts())
    with LocalSGD(accelerator=run, model=model, local_sgd_steps=2, enabled=True) as local:
        for rows, labels in train:
            run.backward(nn.functional.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    return weights(run, model)


@feature
def ddp_comm_hook() -> Any:
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    run = accelerator(kwargs_handlers=[handler])
    prepared = run.prepare(*parts())
    return epoch(run, *prepared)


@feature
def without_amp() -> Any:
    run = accelerator(mixed_precision="bf16")
    run.native_amp = False
    prepared = run.prepare(*parts())
    return epoch(run, *prepared), str(prepared[0](torch.ones(1, 6)).dtype)


@feature
def handler_set_before_prepare() -> Any:
    run = accelerator()
    run.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    model, *others = parts()
    model.unused = nn.Parameter(torch.zeros(1))
    model, *others = run.prepare(model, *others)
    return model.find_unused_parameters, epoch(run, model, *others), epoch(run, model, *others)


@feature
def profiler() -> Any:
    run = accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"])])
    prepared = run.prepare(*parts())
    with run.profile() as profile:
        total = epoch(run, *prepared)
    return total, any("linear" in event.key for event in profile.key_averages())


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = False
    values: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.values

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.values.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.values.append([step, *values.values()])


@feature
def tracking() -> Any:
    run = accelerator(log_with=Kept(), project_config=ProjectConfiguration(tempfile.mkdtemp()))
    prepared = run.prepare(*parts())
    run.init_trackers("example", {"lr": 0.01})
    for number in range(2):
        run.log({"loss": epoch(run, *prepared)}, step=number)
    run.end_training()
    return Kept.values if run.is_main_process else []


@feature
def mixed_precision() -> Any:
    run = accelerator(mixed_precision="bf16")
    prepared = run.prepare(*parts())
    return epoch(run, *prepared), weights(run, prepared[0])


@feature
def clipping() -> Any:
    run = accelerator()
    model, optimizer, train, _ = run.prepare(*parts())
    norms = []
    for rows, labels in train:
        run.backward(nn.functional.cross_entropy(model(rows), labels))
        norms.append(float(run.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, weights(run, model)


if __name__ == "__main__":
    from accelerate.state import AcceleratorState, GradientState

    for name, run_feature in FEATURES.items():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        result = run_feature()
        if int(os.environ.get("RANK", "0")) == 0:
            print("\n" + json.dumps([name, result]), flush=True)
    sys.exit(0)
