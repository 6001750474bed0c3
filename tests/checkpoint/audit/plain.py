"""The oracle: the same training by plain torch in one process, which never stops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from checkpoint.audit.loaders import sample
from checkpoint.audit.model import MAX_NORM, make_model, make_optimizer
from checkpoint.audit.trials import Trial


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one global micro-batch. ``world``: of the ranks that train on it, for the schedule."""

    epoch: int
    samples: list[int]
    world: int


def train(trial: Trial, batches: list[MicroBatch]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The mean loss of each micro-batch, and the parameters after the last."""
    torch.set_num_threads(1)
    model = make_model(trial.seed, is_random=False)
    optimizer, schedule = make_optimizer(trial.optimizer, model)
    means: list[float] = []
    window: list[torch.Tensor] = []
    for i, batch in enumerate(batches):
        rows = [sample(number, noise=False) for number in batch.samples]
        features, labels = torch.stack([row[1] for row in rows]), torch.tensor([row[2] for row in rows])
        window.append(F.cross_entropy(model(features), labels, reduction="none"))
        means.append(window[-1].mean().item())
        ends_epoch = i + 1 == len(batches) or batches[i + 1].epoch != batch.epoch
        if len(window) < trial.accumulation and not ends_epoch:
            continue
        parts = [losses.mean() for losses in window] if trial.kind.even else [torch.cat(window).mean()]
        torch.stack(parts).mean().backward()
        if trial.clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        # A schedule counts the batches of single processes.
        for _ in range(1 if trial.kind.splits else batch.world):
            schedule.step()
        optimizer.zero_grad()
        window = []
    return means, {name: parameter.detach() for name, parameter in model.named_parameters()}


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor, norm-wise."""
    assert actual.keys() == expected.keys()
    return max(
        ((actual[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)).item()
        for name in expected
    )
