"""What torch does on each version, in ``torch_changes.json``, and the tables of ``docs/torch-changes.md`` made of it.

``python -m tests.torch_changes`` asks the installed torch and writes what it did into both files. The tests compare
what the installed torch does with the record.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.run import get_args_parser
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lockstep.runtime import start_runtime
from lockstep.testing import WorkerPool

RECORD = Path(__file__).with_name("torch_changes.json")
PAGE = Path(__file__).parents[1] / "docs" / "torch-changes.md"
RANKS = 2
Answer = Callable[[], str]


class Question(NamedTuple):
    """A row of the page: what torch is asked, on two ranks, and what a user of Lockstep meets."""

    asked: str
    answer: Answer
    with_lockstep: str


PARTS: dict[str, dict[str, Question]] = {}
"""Part of torch -> name -> question."""


def question(part: str, asked: str, with_lockstep: str) -> Callable[[Answer], Answer]:
    def add(answer: Answer) -> Answer:
        PARTS.setdefault(part, {})[answer.__name__] = Question(asked, answer, with_lockstep)
        return answer

    return add


def answers() -> dict[str, str]:
    """What the installed torch answers, on each of two ranks."""
    start_runtime(cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: one.answer() for questions in PARTS.values() for name, one in questions.items()}


def table(record: dict[str, dict[str, str]], part: str) -> str:
    """The rows of one part, with a column for each version."""
    lines = [["torch does", *record, "with Lockstep"], ["---"] * (len(record) + 2)]
    lines += [
        [one.asked, *(seen[name] for seen in record.values()), one.with_lockstep]
        for name, one in PARTS[part].items()
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def with_tables(page: str, record: dict[str, dict[str, str]]) -> str:
    """The page with the table of each part between its two marks."""
    for part in PARTS:
        between = re.compile(rf"(?<=<!-- {part} -->\n\n).*?(?=<!-- end of {part} -->)", re.DOTALL)
        page, found = between.subn(lambda _, part=part: table(record, part) + "\n", page)
        if found != 1:
            raise ValueError(f"the page has {found} places for the table of {part}, and not 1")
    return page


def installed() -> str:
    return str(torch.__version__).split("+")[0]


# How to ask


def is_taken(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"no ({type(error).__name__})"
    return "yes"


def yes(holds: object) -> str:
    return "yes" if holds else "no"


def listed(words: Any) -> str:
    return ", ".join(f"`{word}`" for word in words) or "none"


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def sharded(whole: torch.Tensor) -> DTensor:
    """Its rows divided over the ranks."""
    return distribute_tensor(whole, mesh(), [Shard(0)])


def pending() -> DTensor:
    """A tensor of ones, of which each rank has one term of a sum."""
    return DTensor.from_local(torch.full((4, 4), 1 / RANKS), mesh(), [Partial()])


def placement(tensor: DTensor) -> str:
    return f"`{tensor.placements[0]}`"


# FSDP2


class NotedReduction:
    """A reduce-scatter of ``fully_shard`` that notes in which type it is asked to sum."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **others: Any) -> None:
        self.dtypes.append(input_tensor.dtype)
        dist.reduce_scatter_tensor(output_tensor, input_tensor, others["op"], others["group"])


def summed_in(**policy: torch.dtype) -> str:
    model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh(), mp_policy=MixedPrecisionPolicy(**policy))
    model.set_custom_reduce_scatter(reduction := NotedReduction())
    model(numbers(4, 4)).float().sum().backward()
    return listed(str(dtype).removeprefix("torch.") for dtype in reduction.dtypes)


@question(
    "FSDP2",
    "`param_dtype=bfloat16` without `reduce_dtype`: gradients are summed in",
    "`bfloat16` on each version: `zero` always says the type. Say another by `reduce=fp32`.",
)
def fsdp_sums_in() -> str:
    return summed_in(param_dtype=torch.bfloat16)


@question(
    "FSDP2",
    "the same with `reduce_dtype=float32`",
    "the same on each version",
)
def fsdp_sums_as_told() -> str:
    return summed_in(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@question(
    "FSDP2",
    "fields of `MixedPrecisionPolicy`",
    "`FullyShardedDataParallelPlugin` may set the first three.",
)
def fsdp_policy() -> str:
    return listed(field.name for field in dataclasses.fields(MixedPrecisionPolicy))


@question(
    "FSDP2",
    "a sharded module can finalize its backward later, or keep its gathered weights",
    "Do not ask for it on a prepared model.",
)
def fsdp_finalizes() -> str:
    asked = ("finalize_backward", "set_manual_backward_finalization", "set_keep_unsharded_storage")
    return listed(name for name in asked if hasattr(FSDPModule, name))


# DTensor


@question(
    "DTensor",
    "`x.sum().item()` of a sharded tensor is the whole sum",
    "yes, on each version",
)
def dtensor_item() -> str:
    return yes(sharded(torch.ones(4, 4)).sum().item() == 16)


@question(
    "DTensor",
    "gradient of `mse_loss` of a sharded tensor, divided by the right one",
    "1, on each version. So for `smooth_l1_loss`, `huber_loss` and other losses",
)
def dtensor_gradient_of_mean() -> str:
    whole, part = numbers(4, 4).requires_grad_(), sharded(numbers(4, 4)).requires_grad_()
    for one in (whole, part):
        F.mse_loss(one, torch.zeros_like(one)).backward()
    return f"{float((part.grad.full_tensor() / whole.grad).mean()):.0f}"


@question(
    "DTensor",
    "`mse_loss` of a tensor of 5 rows on 2 ranks is the mean over all elements",
    "yes, on each version",
)
def dtensor_uneven_mean() -> str:
    found = F.mse_loss(part := sharded(numbers(5, 4)), torch.zeros_like(part))
    return yes(torch.allclose(found.full_tensor(), numbers(5, 4).square().mean()))


def cross_entropy_is_right(rows: int, ignored: int) -> bool:
    """Of a batch sharded by rows, of which the first ``ignored`` do not count."""
    logits, labels = numbers(rows, 4), torch.arange(rows) % 4
    labels[:ignored] = -100
    whole = DTensor.from_local(labels, mesh(), [Replicate()])
    return torch.allclose(
        F.cross_entropy(sharded(logits), whole).full_tensor(), F.cross_entropy(logits, labels)
    )


@question(
    "DTensor",
    "`cross_entropy` of sharded rows, some of them with `ignore_index`, is the mean over the others",
    "Models return plain tensors. Say the number of tokens: `backward(loss, weight=...)`.",
)
def dtensor_ignored_rows() -> str:
    return yes(cross_entropy_is_right(6, 1))


@question("DTensor", "`cross_entropy` of 5 rows on 2 ranks", "as above")
def dtensor_uneven_rows() -> str:
    return is_taken(lambda: cross_entropy_is_right(5, 0))


@question(
    "DTensor",
    "`x[0] = 0.` of a tensor sharded by rows changes it",
    "yes, on each version, without a gradient",
)
def dtensor_set_item() -> str:
    part = sharded(torch.ones(4, 4))

    def set_row() -> None:
        part[0] = 0.0

    taken = is_taken(set_row)
    return yes(part.full_tensor().sum() == 12) if taken == "yes" else taken


@question(
    "DTensor",
    "placement of `x.clone()`, where `x` is a pending sum",
    "A pending sum is what `weight.sum()` gives under `zero`. Read it as a number.",
)
def dtensor_clone() -> str:
    return placement(pending().clone())


@question(
    "DTensor",
    "`x.clone().fill_(3.0)` is 3, where `x` is a pending sum",
    "Do not fill such a tensor. Make a new one.",
)
def dtensor_fill() -> str:
    return yes(pending().clone().fill_(3.0).full_tensor().eq(3).all())


@question(
    "DTensor",
    "`x.clone().add_(1)`, where `x` is a pending sum",
    "Write `x + 1`.",
)
def dtensor_add() -> str:
    return is_taken(lambda: pending().clone().add_(1))


@question("DTensor", "`redistribute` from `Shard` to `Partial`", "not used")
def dtensor_to_partial() -> str:
    return is_taken(lambda: sharded(numbers(4, 4)).redistribute(placements=[Partial()]))


# Pipelining


class Counting(nn.Module):
    """A stage that counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.inner(x)


@question(
    "pipelining",
    "forwards that a buffer counts in a first step of 4 micro-batches, where torch finds the shapes itself",
    "`pp` tells torch the shapes, and a buffer changes as on one process.",
)
def pipelining_forwards() -> str:
    module, rank = Counting(), dist.get_rank()
    stage = pipelining.PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.mse_loss)
    schedule.step(*([numbers(8, 4)] if rank == 0 else []), target=numbers(8, 4))
    return f"{int(module.forwards)}"


@question(
    "pipelining",
    "new arguments of a schedule's `step`",
    "`pp` cuts batches itself, and finalizes gradients in each step.",
)
def pipelining_step() -> str:
    asked = ("arg_mbs", "kwarg_mbs", "target_mbs", "finalize_gradients")
    known = inspect.signature(pipelining.ScheduleGPipe.step).parameters
    return listed(name for name in asked if name in known)


# DCP


@question(
    "DCP",
    "values of a tensor's properties in `.metadata`",
    "`lockstep checkpoint import-pickle` reads those of each version.",
)
def dcp_properties() -> str:
    return str(len(TensorProperties().__getstate__()))


@question(
    "DCP",
    "reads the `.metadata` of torch 2.15",
    "Checkpoints of `save_state` have no such file. Each version loads those of the others.",
)
def dcp_reads_newer() -> str:
    written = (*TensorProperties().__getstate__()[:5], (4, 1))
    return is_taken(lambda: TensorProperties().__setstate__(written))


# torchrun


@question(
    "torchrun",
    "new options",
    "`lockstep launch` has `--log-dir`, and its own [completion](how-to/shell-completion.md).",
)
def torchrun_options() -> str:
    asked = ("--log-line-prefix-template", "--print-completion")
    return listed(name for name in asked if name in re.findall(r"--[\w-]+", get_args_parser().format_help()))


# Optimizers


def muon_momentum_error(dtype: torch.dtype, *, nesterov: bool) -> float:
    """The distance of Muon's momentum from its formula after two steps, relative to its norm."""
    weight = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    optimizer = torch.optim.Muon([weight], momentum=0.5, nesterov=nesterov)
    expected = torch.zeros(4, 4)
    for step in (1, 2):
        weight.grad = (8 * step * numbers(4, 4)).to(dtype)
        expected = 0.5 * expected + 0.5 * weight.grad.float()
        optimizer.step()
    found = optimizer.state[weight]["momentum_buffer"].float()
    return float((found - expected).norm() / expected.norm())


@question(
    "optimizers",
    "`Muon(nesterov=False)` keeps the momentum of bfloat16 weights",
    "As in torch, on one rank and on many: before 2.15, use `nesterov=True` or weights in float32.",
)
def muon_without_nesterov() -> str:
    return yes(muon_momentum_error(torch.bfloat16, nesterov=False) < 0.05)


@question("optimizers", "`Muon(nesterov=True)` keeps it", "as in torch")
def muon_with_nesterov() -> str:
    return yes(muon_momentum_error(torch.bfloat16, nesterov=True) < 0.05)


def make(kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(2, 2))], **options)


@question("optimizers", "`Muon(adjust_lr_fn='spectral_unclamped')`", "as in torch")
def muon_adjusts() -> str:
    return is_taken(lambda: make(torch.optim.Muon, adjust_lr_fn="spectral_unclamped"))


@question("optimizers", "`LBFGS(maximize=True)`", "as in torch")
def lbfgs_maximizes() -> str:
    return is_taken(lambda: make(torch.optim.LBFGS, maximize=True))


@question("optimizers", "`ASGD(lambd=-1)`", "as in torch")
def asgd_negative() -> str:
    return is_taken(lambda: make(torch.optim.ASGD, lambd=-1))


def ask() -> dict[str, str]:
    """What the installed torch answers, in new processes.

    Raises:
        ValueError: the ranks have different answers.
    """
    pool = WorkerPool()
    try:
        first, second = pool.run(answers, RANKS, timeout_s=300)
    finally:
        pool.close()
    if first != second:
        raise ValueError(f"the first rank saw {first}, and the second {second}")
    return dict(first)


def main() -> None:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    runs = {**record, installed(): ask()}
    record = dict(sorted(runs.items(), key=lambda item: tuple(map(int, item[0].split(".")))))
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    for part in PARTS:
        print(table(record, part))


if __name__ == "__main__":
    main()
