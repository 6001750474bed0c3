"""What Accelerate's guides on FSDP and DeepSpeed call, in the order of their code blocks, in loops of our own.

Two processes run it by alias. Each guide prints one line: the mean losses of the batches, and a sum for each weight.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    get_active_deepspeed_plugin,
    merge_fsdp_weights,
)
from safetensors.torch import load_file
from sharded_problem import BATCH, LR, ROWS, Model, data, sums
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

GUIDES: dict[str, Callable[[], Any]] = {}


def guide(run: Callable[[], Any]) -> Callable[[], Any]:
    GUIDES[run.__name__] = run
    return run


def loader(run: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data()), batch_size=BATCH // run.num_processes)


def parts(run: Any) -> Any:
    model = Model()
    return run.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR), loader(run))


def epoch(run: Any, model: Any, optimizer: Any, batches: Any, scheduler: Any = None) -> list[float]:
    losses = []
    for inputs, targets in batches:
        with run.accumulate(model):
            loss = cross_entropy(model(inputs), targets)
            run.backward(loss)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    return losses


def folder_of(run: Any) -> str:
    return str(run.gather_for_metrics([tempfile.mkdtemp()], use_gather_object=True)[0])


def saved_and_continued(run: Any) -> Any:
    """Two epochs; between them a checkpoint is written, weights are spoilt, and it is read."""
    model, optimizer, batches = parts(run)
    losses = epoch(run, model, optimizer, batches)
    folder = folder_of(run)
    run.save_state(f"{folder}/ckpt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    run.load_state(f"{folder}/ckpt")
    losses += epoch(run, model, optimizer, batches)
    return losses, sums(run.get_state_dict(model))


@guide
def fsdp_with_whole_state_dicts() -> Any:
    plugin = FullyShardedDataParallelPlugin(
        state_dict_config=FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )
    return saved_and_continued(Accelerator(cpu=True, fsdp_plugin=plugin))


@guide
def fsdp_2() -> Any:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_offload=True,
        activation_checkpointing=True,
    )
    return saved_and_continued(Accelerator(cpu=True, fsdp_plugin=plugin))


@guide
def fsdp_merged_weights() -> Any:
    run = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model, optimizer, batches = parts(run)
    losses = epoch(run, model, optimizer, batches)
    folder = folder_of(run)
    run.save_state(f"{folder}/ckpt")
    run.wait_for_everyone()
    if run.is_main_process:
        merge_fsdp_weights(f"{folder}/ckpt", f"{folder}/whole", safe_serialization=True)
        merge_fsdp_weights(f"{folder}/ckpt", f"{folder}/pickled", safe_serialization=False)
        weights = load_file(f"{folder}/whole/model.safetensors")
        pickled = torch.load(f"{folder}/pickled/pytorch_model.bin")
        assert all(torch.equal(pickled[name], value) for name, value in weights.items())
        return losses, sums(weights)
    return losses, None


@guide
def deepspeed_stage_2() -> Any:
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2, gradient_clipping=0.1)
    run = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model, optimizer, batches = parts(run)
    losses = epoch(run, model, optimizer, batches)
    folder = folder_of(run)
    run.save_model(model, folder)
    run.wait_for_everyone()
    return losses, sums(load_file(f"{folder}/model.safetensors"))


@guide
def deepspeed_stage_3_offloaded() -> Any:
    plugin = DeepSpeedPlugin(
        zero_stage=3, offload_optimizer_device="cpu", offload_param_device="cpu", zero3_save_16bit_model=True
    )
    return saved_and_continued(Accelerator(cpu=True, deepspeed_plugin=plugin))


@guide
def evaluated_at_stage_3() -> Any:
    run = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    model, batches = run.prepare(Model(), loader(run))
    model.eval()
    with torch.no_grad():
        losses = [
            float(run.reduce(cross_entropy(model(inputs), targets), "mean")) for inputs, targets in batches
        ]
    return losses, sums(run.get_state_dict(model))


@guide
def two_accelerators() -> Any:
    plugins = {"first": DeepSpeedPlugin(zero_stage=2), "second": DeepSpeedPlugin(zero_stage=3)}
    one = Accelerator(cpu=True, deepspeed_plugins=plugins)
    other = Accelerator()
    assert get_active_deepspeed_plugin(one.state) is plugins["first"] is one.deepspeed_plugin
    one.state.select_deepspeed_plugin("first")
    first, first_optimizer, batches = parts(one)
    other.state.select_deepspeed_plugin("second")
    second = Model(1)
    second, second_optimizer = other.prepare(second, torch.optim.AdamW(second.parameters(), lr=LR))
    losses = []
    for inputs, targets in batches:
        for run, model, optimizer in ((one, first, first_optimizer), (other, second, second_optimizer)):
            loss = cross_entropy(model(inputs), targets)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    return losses, sums(one.get_state_dict(first)), sums(other.get_state_dict(second))


@guide
def as_the_file_says() -> Any:
    """Placeholders, since the DeepSpeed JSON describes the optimizer and the scheduler."""
    run = Accelerator()
    run.print(str(AcceleratorState()))
    model = Model()
    optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=ROWS // BATCH, warmup_num_steps=3)
    model, optimizer, batches, scheduler = run.prepare(model, optimizer, loader(run), scheduler)
    losses = epoch(run, model, optimizer, batches, scheduler)
    return losses, sums(run.get_state_dict(model))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        said = [f"{name} on {os.environ.get('RANK', '0')}", GUIDES[name]()]
        print("\n" + json.dumps(said), flush=True)
