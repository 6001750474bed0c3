"""Training that is interrupted between two micro-batches of a window, and goes on from what was saved there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep import Accelerator, DistributedDataParallelKwargs, GradientAccumulationPlugin
from lockstep.preparation import AccumulationState
from parallel import zero_problem as problem
from parallel.small_groups import groups_in_stage_3

MICRO_BATCHES, ACCUMULATION, LEARNING_RATE = 9, 3, 0.05
STOPS = (4, 5)  # one and two micro-batches into the second window


@dataclass(frozen=True)
class Setup:
    """How a run is set up.

    ``weighted``: some tokens are masked, and losses come with the number of the others. ``by_hand``: windows without
    ``accumulate``; ``no_sync``: all but the last micro-batch of these within ``accelerator.no_sync``.
    """

    parallel: str = "auto"
    precision: str = "no"
    weighted: bool = False
    accumulation: int = ACCUMULATION
    by_hand: bool = False
    no_sync: bool = False
    each_batch: bool = False
    ddp: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        words = [self.parallel, self.precision, *(name for name, _ in self.ddp)]
        words += [name for name in ("weighted", "by_hand", "no_sync", "each_batch") if getattr(self, name)]
        return "-".join(words).replace(" ", "-")


@dataclass
class Saved:
    """Whole tensors of a checkpoint in memory: each rank's weights with its buffers, loss scale, and window."""

    weights: list[dict[str, torch.Tensor]]
    scaler: dict[str, Any]
    windows: list[dict[str, Any]]
    position: int


class Run:
    """One training run on this rank; ``go`` steps through micro-batches."""

    def __init__(
        self, setup: Setup, make_model: Callable[[], nn.Module] = problem.make_model, loss_of: Any = None
    ) -> None:
        torch.set_num_threads(1)
        self.setup = setup
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=setup.precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=1 if setup.by_hand else setup.accumulation, sync_each_batch=setup.each_batch
            ),
            parallel=setup.parallel,
            kwargs_handlers=[DistributedDataParallelKwargs(**dict(setup.ddp))],
        )
        self.plain = make_model()
        optimizer = torch.optim.SGD([p for p in self.plain.parameters() if p.requires_grad], lr=LEARNING_RATE)
        with groups_in_stage_3(setup.parallel, problem.PAIR_BYTES):
            self.model, self.optimizer = self.accelerator.prepare(self.plain, optimizer)
        self.window = window_of(self.accelerator)
        self.position = 0
        self.own_losses: list[torch.Tensor] = []
        self.loss_of = loss_of or token_loss

    def go(self, until: int, clears_first: bool = False) -> None:
        """Train up to a micro-batch. ``clears_first``: gradients are cleared before a window, not after it."""
        run = self.accelerator
        for number in range(self.position, until):
            if clears_first and number % ACCUMULATION == 0:
                self.optimizer.zero_grad()
            if self.setup.by_hand:
                last = (number + 1) % ACCUMULATION == 0
                no_sync = self.setup.no_sync and not last
                with run.no_sync(self.model) if no_sync else nullcontext():
                    loss, _ = self.loss_of(self, number)
                    run.backward(loss / ACCUMULATION)
                if last:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            else:
                with run.accumulate(self.model):
                    loss, count = self.loss_of(self, number)
                    run.backward(loss, weight=count if self.setup.weighted else None)
                    self.optimizer.step()
                    if not clears_first:
                        self.optimizer.zero_grad()
            self.own_losses.append(loss.detach())
        self.position = until

    def save(self) -> Saved:
        """On every rank; the same everywhere."""
        windows = from_all_ranks(portable(self.window.state_dict()), self.accelerator)
        scaler = self.accelerator._scaler
        return Saved(
            weights=from_all_ranks(portable(self.plain.state_dict()), self.accelerator),
            scaler={} if scaler is None else dict(scaler.state_dict()),
            windows=windows,
            position=self.position,
        )

    def load(self, saved: Saved) -> None:
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.plain.load_state_dict(saved.weights[rank if len(saved.weights) == ranks else 0])
        if self.accelerator._scaler is not None:
            self.accelerator._scaler.load_state_dict(saved.scaler)
        self.window.load_state_dicts(saved.windows, rank)
        self.position = saved.position
        self.own_losses = []

    def losses(self) -> list[float]:
        """Of the micro-batches since the start, or since loading: their means over the ranks."""
        return self.accelerator.reduce(torch.stack(self.own_losses), "mean").tolist()

    def parameters(self) -> dict[str, torch.Tensor]:
        return portable(dict(self.plain.state_dict()))

    def own_parameters(self) -> dict[str, torch.Tensor]:
        """Of sharded ones, what this rank holds."""
        state = self.plain.state_dict()
        return {
            name: (value.to_local() if hasattr(value, "to_local") else value).detach().clone()
            for name, value in state.items()
        }


def window_of(accelerator: Accelerator) -> AccumulationState:
    prepared = accelerator._preparation
    window = AccumulationState(
        accelerator._accumulation,
        prepared.models.prepared,
        prepared.optimizers.prepared,
        accelerator.meshes.axes,
        accelerator.meshes.gradient_size,
        prepared.gradients.forget,
    )
    window.watch()
    return window


def from_all_ranks(own: Any, accelerator: Accelerator) -> list[Any]:
    if accelerator.num_processes == 1:
        return [own]
    found = [None] * accelerator.num_processes
    dist.all_gather_object(found, own)
    return found


def token_loss(run: Run, number: int) -> tuple[torch.Tensor, int]:
    """Loss of this rank's rows of a global micro-batch, and its number of tokens."""
    tokens, labels = problem.make_batches(MICRO_BATCHES)[number]
    rank, ranks = run.accelerator.process_index, run.accelerator.num_processes
    if run.setup.weighted:
        labels = masked(labels, number)
    tokens, labels = tokens.chunk(ranks)[rank], labels.chunk(ranks)[rank]
    return problem.loss_of(run.model, tokens, labels), int((labels >= 0).sum())


def masked(labels: torch.Tensor, number: int) -> torch.Tensor:
    """Rows with 1 to all labels left, so that micro-batches and ranks have different numbers of them."""
    rows, length = labels.shape
    left = 1 + (torch.arange(rows) ** 2 + number) % length
    return torch.where(torch.arange(length) < left[:, None], labels, -100)


def portable(tree: Any) -> Any:
    """Copies without DTensors, as in a file."""
    if isinstance(tree, dict):
        return {key: portable(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [portable(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return (tree.full_tensor() if hasattr(tree, "full_tensor") else tree).detach().clone()
    return tree


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (dict, list)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(value)


def different(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(actual[name], expected[name])]


def go_on_and_compare(setup: Setup, **options: Any) -> list[str]:
    """What is not bit for bit as in the uninterrupted run, after going on from each stop; on each rank.

    The run that loads is a new one at the first stop, and in the middle of a window of its own at the second.
    """
    run = Run(setup, **options)
    saves, start = [], run.own_parameters()
    for stop in STOPS:
        run.go(stop)
        saves.append(run.save())
        assert any(True for _ in tensors_in([w["models"] for w in saves[-1].windows]))
    run.go(MICRO_BATCHES)
    expected, wrong = run.own_parameters(), []
    assert any(from_all_ranks(different(expected, start), run.accelerator))
    for saved in saves:
        again = Run(setup, **options)
        if saved is not saves[0]:
            again.go(2)
        again.load(saved)
        again.go(MICRO_BATCHES)
        wrong += [f"{saved.position}: {name}" for name in different(again.own_parameters(), expected)]
        if not torch.equal(torch.stack(again.own_losses), torch.stack(run.own_losses[saved.position :])):
            wrong.append(f"{saved.position}: losses")
    return wrong


def save_at(setup: Setup, *stops: int) -> list[Saved]:
    run = Run(setup)
    saves = []
    for stop in stops:
        run.go(stop)
        saves.append(run.save())
    return saves
