"""Lines of plain DDP that were left in a script: what each comes to, as JSON, on one process or on several.

``works`` are losses as without the line, ``refused`` is an error of Lockstep, ``torch's error`` is any other one.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep import Accelerator
from lockstep.errors import LockstepError

Case = Callable[[], object]
CASES: dict[str, Case] = {}
PARALLEL = sys.argv[1]
torch.manual_seed(0)
INPUTS = torch.randn(64, 8)
LABELS = (INPUTS @ torch.randn(8, 3)).argmax(1)
DATA = TensorDataset(INPUTS, LABELS)


def left_in(line: str) -> Callable[[Case], Case]:
    """Registers what a script with this line does; it returns True if that is right."""
    return lambda case: CASES.setdefault(line, case)


class Script:
    """A loop for Lockstep, whose parts can be replaced by those of plain DDP."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(split_batches=True, parallel=PARALLEL)
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader: DataLoader[tuple[Tensor, ...]] = DataLoader(DATA, batch_size=16)

    def prepare(self) -> Script:
        prepared = self.accelerator.prepare(self.model, self.optimizer, self.loader)
        self.model, self.optimizer, self.loader = prepared
        return self

    def losses(
        self,
        backward: Callable[[Tensor], None] | None = None,
        mean: Callable[[Tensor], Tensor] | None = None,
    ) -> list[float]:
        found = []
        for inputs, labels in self.loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(inputs), labels)
            (backward or self.accelerator.backward)(loss)
            self.optimizer.step()
            loss = loss.detach()
            found.append((mean(loss) if mean else self.accelerator.reduce(loss, "mean")).item())
        return found

    def is_right(self, **parts: Callable[[Tensor], object]) -> bool:
        torch.testing.assert_close(self.losses(**parts), EXPECTED)  # type: ignore[arg-type]
        return True


def plain_losses() -> list[float]:
    """On one process, without Lockstep."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for inputs, labels in DataLoader(DATA, batch_size=16):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


EXPECTED = plain_losses()


@left_in("dist.init_process_group()")
def group() -> object:
    dist.init_process_group()
    return Script().prepare().is_right()


@left_in('dist.init_process_group("nccl")')
def second_group() -> object:
    script = Script().prepare()
    dist.init_process_group("nccl")
    return script.is_right()


@left_in('int(os.environ["LOCAL_RANK"])')
def local_rank() -> object:
    return int(os.environ["LOCAL_RANK"]) == Accelerator(parallel=PARALLEL).local_process_index


@left_in("model.to(local_rank)")
def to_a_gpu() -> object:
    script = Script()
    script.model = script.model.to(script.accelerator.local_process_index)
    return script.prepare().is_right()


@left_in("DistributedSampler(data)")
def sampler() -> object:
    script = Script()
    place = script.accelerator.num_processes, script.accelerator.process_index
    script.loader = DataLoader(DATA, batch_size=16, sampler=DistributedSampler(DATA, *place, shuffle=False))
    return script.prepare().is_right()


@left_in("sampler.set_epoch(epoch)")
def epoch_of_a_sampler() -> object:
    script = Script().prepare()
    script.loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    return script.is_right()


@left_in("DistributedDataParallel(model)")
def wrapped() -> object:
    script = Script()
    script.model = DistributedDataParallel(script.model)
    return script.prepare().is_right()


@left_in("loss.backward()")
def plain_backward() -> object:
    return Script().prepare().is_right(backward=lambda loss: loss.backward())


@left_in("with model.no_sync():")
def no_sync() -> object:
    script = Script().prepare()
    found = []
    for inputs, labels in script.loader:
        script.optimizer.zero_grad()
        with script.model.no_sync():  # type: ignore[operator]
            script.accelerator.backward(F.cross_entropy(script.model(inputs), labels) / 2)
        loss = F.cross_entropy(script.model(inputs), labels)
        script.accelerator.backward(loss / 2)
        script.optimizer.step()
        found.append(script.accelerator.reduce(loss.detach(), "mean").item())
    torch.testing.assert_close(found, EXPECTED)
    return True


@left_in("model.module")
def module() -> object:
    return type(Script().prepare().model.module) is nn.Sequential


@left_in("dist.all_reduce(loss)")
def reduced() -> object:
    def mean(loss: Tensor) -> Tensor:
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    return Script().prepare().is_right(mean=mean)


@left_in("dist.get_rank() == 0")
def rank() -> object:
    return dist.get_rank() == Accelerator(parallel=PARALLEL).process_index


@left_in("dist.barrier()")
def barrier() -> object:
    script = Script().prepare()
    dist.barrier()
    return script.is_right()


@left_in("torch.save(model.state_dict(), path)")
def saved() -> object:
    script = Script().prepare()
    script.losses()
    whole = script.accelerator.get_state_dict(script.model)
    file = io.BytesIO()
    if script.accelerator.is_main_process:
        torch.save(script.model.state_dict(), file)
        file.seek(0)
        return {name.removeprefix("module."): len(t) for name, t in torch.load(file).items()} == {
            name: len(t) for name, t in whole.items()
        }
    return True


@left_in("model.load_state_dict(torch.load(path))")
def loaded() -> object:
    script = Script().prepare()
    script.model.load_state_dict(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)).state_dict())
    return True


@left_in("dist.destroy_process_group()")
def destroyed() -> object:
    script = Script().prepare()
    is_right = script.is_right()
    dist.destroy_process_group()
    return is_right


def outcome(case: Case) -> list[str]:
    try:
        return ["works" if case() else "wrong", ""]
    except LockstepError as error:
        return ["refused", str(error)]
    except Exception as error:
        return ["torch's error", f"{type(error).__name__}: {error}"]


found = {line: outcome(case) for line, case in CASES.items()}
if os.environ.get("RANK", "0") == "0":
    print("FOUND " + json.dumps(found))
