"""What Accelerate's guides call, in the order of their code blocks, in loops of our own. One line of numbers a guide.

Runs with Accelerate, by alias, and with its import changed: every mention of the library becomes ours.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    PartialState,
    ProfileKwargs,
    load_checkpoint_in_model,
)
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import TorchDynamoPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GUIDES: dict[str, Callable[[], Any]] = {}
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def guide(run: Callable[[], Any]) -> Callable[[], Any]:
    GUIDES[run.__name__] = run
    return run


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2 = nn.Linear(4, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.block2(torch.relu(self.block1(rows)))))


def data(count: int = 24) -> TensorDataset:
    source = torch.Generator().manual_seed(1)
    rows = torch.randn(count, 4, generator=source)
    return TensorDataset(rows, (rows.sum(1) > 0).long())


def parts(batch_size: int = 3) -> Any:
    set_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    return model, optimizer, DataLoader(data(), batch_size=batch_size), scheduler


def sums(model: Any) -> list[float]:
    return [float(value.detach().double().sum()) for value in model.state_dict().values()]


def shared_folder(run: Any) -> str:
    return str(run.gather_for_metrics([tempfile.mkdtemp()], use_gather_object=True)[0])


loss_function = nn.CrossEntropyLoss()


@guide
def first_loop() -> Any:
    """The quick tour and the tutorial of migration."""
    run = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = run.prepare(*parts())
    model.to(run.device)
    for inputs, targets in loader:
        optimizer.zero_grad()
        inputs, targets = inputs.to(run.device), targets.to(run.device)
        loss = loss_function(model(inputs), targets)
        run.backward(loss)
        optimizer.step()
        scheduler.step()
    model.eval()
    right = rows = 0
    for inputs, targets in run.prepare(DataLoader(data(11), batch_size=4)):
        with torch.no_grad():
            predicted = model(inputs).argmax(dim=-1)
        predicted, targets = run.gather_for_metrics((predicted, targets))
        right, rows = right + int((predicted == targets).sum()), rows + len(targets)
    return (
        float(run.gather(loss.detach()).sum()),
        scheduler.get_last_lr(),
        right,
        rows,
        sums(run.unwrap_model(model)),
    )


@guide
def saved_models() -> Any:
    run = Accelerator(cpu=True)
    model, *_ = run.prepare(*parts())
    folder = shared_folder(run)
    run.wait_for_everyone()
    run.save_model(model, folder, max_shard_size="1GB", safe_serialization=True)
    run.wait_for_everyone()
    plain = Model()
    load_checkpoint_in_model(plain, folder, device_map={"": run.device.type})
    if run.is_main_process:
        torch.save(run.unwrap_model(model).state_dict(), f"{folder}/weights.pth")
    run.wait_for_everyone()
    with run.main_process_first():
        run.unwrap_model(model).load_state_dict(torch.load(f"{folder}/weights.pth"))
    return sorted(os.listdir(folder)), sums(plain), sums(run.unwrap_model(model))


@guide
def decorators() -> Any:
    run = Accelerator(cpu=True)
    done = []
    run.on_main_process(lambda: done.append("main"))()
    run.on_local_main_process(lambda: done.append("local main"))()
    run.on_process(lambda: done.append("process"), process_index=0)()
    run.on_local_process(lambda: done.append("local process"), local_process_index=0)()
    run.on_last_process(lambda: done.append("last"))()

    @run.on_process(process_index=RANKS - 1)
    def noted() -> None:
        done.append("noted")

    noted()
    run.wait_for_everyone()
    return done


@guide
def logs_in_order() -> Any:
    run = Accelerator(cpu=True)
    logger = get_logger("guides", log_level="DEBUG")
    logger.debug("on all processes", main_process_only=False)
    logger.debug("in order", main_process_only=False, in_order=True)
    logger.warning_once("once")
    return logger.logger.level, run.process_index


@guide
def triggers() -> Any:
    run = Accelerator(cpu=True)
    model, optimizer, loader, _ = run.prepare(*parts())
    for number, (inputs, targets) in enumerate(loader):
        loss = loss_function(model(inputs), targets)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and run.is_last_process:
            run.set_trigger()
        if run.check_trigger():
            break
    return number


@guide
def accumulated() -> Any:
    run = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = run.prepare(*parts())
    for inputs, targets in loader:
        with run.accumulate(model):
            optimizer.zero_grad()
            run.backward(loss_function(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return sums(run.unwrap_model(model)), scheduler.get_last_lr()


@guide
def accumulated_over_variable_sizes() -> Any:
    """Batches of a step are read first, so that the loss can be divided by the number of all their labels."""
    steps = 2
    run = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    set_seed(0)
    model = nn.Linear(1, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
    rows = [torch.arange(1, length + 2).float() for length in range(4 * 3 * run.num_processes)]

    def collate(items: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs = nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=-100)
        return {
            "input_ids": inputs[..., None],
            "labels": torch.where(inputs < 0, -100, inputs % 2)[..., None],
        }

    model, optimizer = run.prepare(model, optimizer)
    loader = run.prepare_data_loader(
        DataLoader(rows, batch_size=4, collate_fn=collate), device_placement=True
    )
    count = len(loader)
    updates, left = math.ceil(count / steps), count % steps or steps
    criterion = nn.CrossEntropyLoss(reduction="sum")
    batches = iter(loader)
    for update in range(updates):
        taken = [next(batches) for _ in range(steps if update != updates - 1 else left)]
        number = sum(batch["labels"].ne(-100).sum() for batch in taken)
        number = run.gather(number).sum().item()
        for i, batch in enumerate(taken):
            waits = i < len(taken) - 1 and run.num_processes > 1
            with model.no_sync() if waits else contextlib.nullcontext():
                outputs = model(batch["input_ids"])
                loss = criterion(outputs.view(-1, 2), batch["labels"].view(-1).long())
                run.backward(loss * steps * run.num_processes / number)
        optimizer.step()
        optimizer.zero_grad()
    return sums(run.unwrap_model(model)), count


@guide
def checkpoints() -> Any:
    run = Accelerator(cpu=True)
    folder = shared_folder(run)
    model, optimizer, loader, scheduler = parts()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    run.register_for_checkpointing(scheduler)
    run.save_state(f"{folder}/checkpoint_0")
    before = sums(run.unwrap_model(model))
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            run.backward(loss_function(model(inputs), targets))
            optimizer.step()
        scheduler.step()
    trained, rate = sums(run.unwrap_model(model)), scheduler.get_last_lr()
    run.load_state(f"{folder}/checkpoint_0")
    skipped = run.skip_first_batches(loader, 2)
    return (
        *(trained, rate, sums(run.unwrap_model(model)) == before, scheduler.get_last_lr()),
        *([len(skipped), len(list(skipped)), len(list(loader))]),
    )


@guide
def compiled() -> Any:
    found = []
    plugins = (
        TorchDynamoPlugin(backend="eager", mode="default", dynamic=False),
        TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True),
    )
    for plugin in plugins:
        reset()
        run = Accelerator(cpu=True, dynamo_plugin=plugin)
        set_seed(0)
        model = run.prepare(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))))
        found.append(float(model(torch.ones(2, 4)).double().sum().detach()))
        found.append(sums(run.unwrap_model(model, keep_torch_compile=False)))
    return found


@guide
def communication_hooks() -> Any:
    found = []
    kinds = DDPCommunicationHookType
    for options in (
        {"comm_hook": kinds.FP16},
        {"comm_hook": kinds.POWER_SGD},
        {"comm_hook": kinds.POWER_SGD, "comm_wrapper": kinds.FP16},
        {"comm_hook": kinds.POWER_SGD, "comm_state_option": {"matrix_approximation_rank": 2}},
    ):
        reset()
        run = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        model, optimizer, loader, _ = run.prepare(*parts())
        for inputs, targets in loader:
            run.backward(loss_function(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        found.append(sums(run.unwrap_model(model)))
    return found


@guide
def prompts_between_processes() -> Any:
    state = PartialState(cpu=True)
    found = []
    for padding in (False, True):
        with state.split_between_processes(["a dog", "a cat", "a chicken"], apply_padding=padding) as prompts:
            found.append(list(prompts))
    return found


@guide
def profiles() -> Any:
    folder = tempfile.mkdtemp()
    steps = []
    found = []
    for options in (
        {"activities": ["cpu"], "record_shapes": True},
        {"activities": ["cpu"], "profile_memory": True, "record_shapes": True},
        {"activities": ["cpu"], "output_trace_dir": folder},
        {
            "activities": ["cpu"],
            "schedule_option": {"wait": 1, "warmup": 1, "active": 1, "repeat": 2, "skip_first": 1},
            "on_trace_ready": lambda profile: steps.append(profile.step_num),
        },
        {"with_flops": True, "activities": ["cpu"]},
    ):
        reset()
        run = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(**options)])
        model = run.prepare(parts()[0])
        with run.profile() as profile:
            for _ in range(8):
                with torch.no_grad():
                    model(torch.ones(2, 4))
                profile.step()
        found.append(len(profile.key_averages().table(sort_by="cpu_time_total", row_limit=2)) > 0)
    return (
        found,
        steps,
        [name for name in os.listdir(folder) if name.endswith("_0.json")] != [] or run.process_index,
    )


def reset() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


if __name__ == "__main__":
    for name in GUIDES:
        reset()
        said = [f"{name} on {os.environ.get('RANK', '0')}", GUIDES[name]()]
        print("\n" + json.dumps(said), flush=True)
    sys.exit(0)
