"""One training loop under each stage of ZeRO: by hand, with Lockstep, with DeepSpeed; and under plain DDP.

Each is an endless generator that yields the mean loss of a window after every optimizer step, so that a benchmark
can take turns between them in one process. Model, data, optimizer and micro-batches are those of ``ZeroTask``.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from contenders import SEED, loss_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))
from model import GPT, GPTConfig

Window = list[tuple[Tensor, Tensor]]  # a rank's micro-batches of one optimizer step
WINDOWS = 512  # then data repeat. Few would be learnt by heart, and rounding then grows to 1e-3 of a loss.


@dataclass(frozen=True)
class ZeroTask:
    """What is trained: ``batch_size`` is a rank's micro-batch, ``accumulation`` how many of them make a step."""

    stage: int
    accumulation: int = 1
    fused: bool = False  # torch's fused AdamW
    width: int = 192
    layers: int = 4
    heads: int = 4
    batch_size: int = 4

    def model(self) -> GPT:
        """The demo's GPT with the same weights for every contender and rank."""
        torch.manual_seed(SEED)
        return GPT(GPTConfig(width=self.width, layers=self.layers, heads=self.heads))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=self.fused or None)

    def windows(self, rank: int, world_size: int) -> Iterator[Window]:
        """This rank's windows, again and again: random bytes, other ones on each rank."""
        generator = torch.Generator().manual_seed(SEED)
        shape = (WINDOWS, self.accumulation, world_size, self.batch_size, GPTConfig.context + 1)
        tokens = torch.randint(0, GPTConfig.vocabulary, shape, generator=generator)[:, :, rank]
        while True:
            for window in tokens:
                yield [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in window]


def hand_written(task: ZeroTask, rank: int, world_size: int) -> Iterator[Tensor]:
    """``fully_shard`` as one writes it for a stage; nothing is gathered twice in a window below stage 3."""
    model = task.model()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=task.stage == 3)
    fully_shard(model)  # the root stays whole until backward, in every stage
    optimizer = task.optimizer(model)
    for window in task.windows(rank, world_size):
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, (inputs, targets) in enumerate(window):
            last = index == len(window) - 1
            if task.stage < 3 and task.accumulation > 1:
                model.set_reshard_after_backward(last)
                model.set_requires_gradient_sync(last or task.stage == 2)
            loss = loss_of(model(inputs), targets) / len(window)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        yield total


def ddp(task: ZeroTask, rank: int, world_size: int) -> Iterator[Tensor]:
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizer(model)
    for window in task.windows(rank, world_size):
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, (inputs, targets) in enumerate(window):
            last = index == len(window) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = loss_of(model(inputs), targets) / len(window)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        yield total


def lockstep(task: ZeroTask, rank: int, world_size: int) -> Iterator[Tensor]:
    from lockstep import Accelerator

    accelerator = Accelerator(
        cpu=True, parallel=f"zero={task.stage}", gradient_accumulation_steps=task.accumulation
    )
    model = task.model()
    model, optimizer = accelerator.prepare(model, task.optimizer(model))
    for window in task.windows(rank, world_size):
        total = torch.zeros(())
        for inputs, targets in window:
            with accelerator.accumulate(model):
                loss = loss_of(model(inputs), targets)
                accelerator.backward(loss)
                total += loss.detach() / len(window)
                optimizer.step()
                optimizer.zero_grad()
        yield total


def deepspeed(task: ZeroTask, rank: int, world_size: int, **settings: Any) -> Iterator[Tensor]:
    """DeepSpeed's engine with torch's AdamW; ``settings`` go into its section ``zero_optimization``."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as package

    package.utils.logger.setLevel("ERROR")
    model = task.model()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it compiles
        engine, *_ = package.initialize(
            model=model,
            optimizer=task.optimizer(model),
            config={
                "train_micro_batch_size_per_gpu": task.batch_size,
                "gradient_accumulation_steps": task.accumulation,
                "gradient_clipping": 0.0,  # its default of 1.0 would be another computation
                "zero_optimization": {"stage": task.stage, **settings},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "steps_per_print": 10**9,
            },
            dist_init_required=False,
        )
    for window in task.windows(rank, world_size):
        total = torch.zeros(())
        for inputs, targets in window:
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            total += loss.detach() / len(window)
            engine.step()
        yield total


Loop = Callable[[ZeroTask, int, int], Iterator[Tensor]]
REFERENCE = "hand-written"
# What is changed of DeepSpeed's defaults in "deepspeed, tuned", by stage: the best of ``--sweep`` here.
TUNED: dict[int, dict[str, Any]] = {
    1: {"contiguous_gradients": False, "use_multi_rank_bucket_allreduce": False, "compute_grad_norm": False},
    2: {"contiguous_gradients": False, "use_multi_rank_bucket_allreduce": False, "compute_grad_norm": False},
    3: {"stage3_param_persistence_threshold": 0},  # as quick as its default, and shards all as the others do
}
BUCKETS = (10**6, 10**7)  # elements; the model has 1.8 million


def contenders(stage: int) -> dict[str, Loop]:
    """In the order of their turns: the two closest to the reference stand beside it."""
    return {
        "hand-written again": hand_written,
        REFERENCE: hand_written,
        "lockstep": lockstep,
        "deepspeed": deepspeed,
        "deepspeed, tuned": partial(deepspeed, **TUNED[stage]),
        "ddp": ddp,
    }


def sweep(stage: int) -> dict[str, Loop]:
    """The reference, and DeepSpeed with everything that may make a difference on this machine."""
    found: dict[str, Loop] = {REFERENCE: hand_written, "deepspeed": deepspeed}
    changes: list[dict[str, Any]] = [{"overlap_comm": stage != 3}, {"contiguous_gradients": False}]
    changes += [{"reduce_bucket_size": size} for size in BUCKETS]
    if stage == 3:
        changes += [{"stage3_param_persistence_threshold": 0}, {"stage3_prefetch_bucket_size": 0}]
        changes += [{"stage3_use_all_reduce_for_fetch_params": True}]
    else:
        changes += [{"allgather_bucket_size": size} for size in BUCKETS]
        changes += [{"use_multi_rank_bucket_allreduce": False}, {"reduce_scatter": False}]
        changes += [{"compute_grad_norm": False}, {"round_robin_gradients": True}]
    changes.append(TUNED[stage])
    for change in changes:
        found[", ".join(f"{name}={value}" for name, value in change.items())] = partial(deepspeed, **change)
    return found
