"""What people write between the last block and the number that is trained on."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.split.host import VOCABULARY, WIDTH, Fragment, Function, cross_entropy, mean_loss, through


@dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None


def each(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x).transpose(1, 2), labels, reduction="none")


def shifted(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def z_loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.head(x)
    return F.cross_entropy(z.flatten(0, 1), y.flatten()) + 1e-2 * z.logsumexp(-1).square().mean()


def chunked(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Logits of a part of the sequence at a time."""
    total = x.new_zeros(())
    for part, labels in zip(x.split(4, 1), y.split(4, 1), strict=True):
        total = total + checkpoint(_sum, m, part, labels, use_reentrant=False)
    return total / y.numel()


def _sum(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(m, x, y, reduction="sum")


def dpo(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """The first half of the rows is preferred to the second."""
    good, bad = (-each(m, x, y).sum(1)).chunk(2, dim=0)
    return -F.logsigmoid(0.1 * (good - bad)).mean()


def ppo(m: Any, x: Tensor, y: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (-each(m, x, y) - old).exp()
    a = ((advantage - advantage.mean()) / (advantage.std() + 1e-6))[:, None]
    return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()


def info_nce(m: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = F.normalize(x[:, 0], dim=-1), F.normalize(x[:, -1], dim=-1)
    scores = a @ b.T / 0.2
    at = torch.arange(len(a))
    return (F.cross_entropy(scores, at) + F.cross_entropy(scores.T, at)) / 2


def l2_of_all(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return mean_loss(m, x, y) + 1e-3 * sum(p.square().sum() for p in m.parameters())


def l1_of_blocks(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return mean_loss(m, x, y) + 1e-3 * sum(block.norm1.weight.abs().sum() for block in m.blocks)


def l2_of_split(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return mean_loss(m, x, y) + 1e-2 * m.blocks[-1].mlp.up.weight.square().sum()


def rows_of_head(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Sampled: the label's and one other row of the head."""
    good, bad = m.head.weight[y], m.head.weight[(y + 1) % VOCABULARY]
    return F.softplus(((bad - good) * x).sum(-1)).mean()


def distilled(m: Any, x: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
    z = m.head(x)
    kl = F.kl_div((z / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")
    return 0.5 * F.cross_entropy(z.flatten(0, 1), y.flatten()) + 0.5 * 4 * kl


def self_distilled(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z, t = m.head(x), m.teacher(x.detach()).detach()
    return F.mse_loss(z, t) + mean_loss(m, x, y)


def moving_teacher(m: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        for slow, fast in zip(m.teacher.parameters(), m.head.parameters(), strict=True):
            slow.mul_(0.9).add_(0.1 * fast)
    return self_distilled(m, x, y)


def add_teacher(m: Any) -> None:
    m.teacher = copy.deepcopy(m.head).requires_grad_(False)


def masked_by_lengths(m: Any, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(x.shape[1])[None] < lengths[:, None]
    return (each(m, x, y) * mask).sum() / mask.sum()


def mean_pooled(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x.mean(1)), y[:, 0])


def adaptive(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.adaptive(x.flatten(0, 1), y.flatten()).loss


def add(name: str, make: Any) -> Any:
    return lambda m: setattr(m, name, make())


def robust(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return each(m, x, y).mean(1).logsumexp(0)


def normalised(m: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = mean_loss(m, x, y)
    return loss / loss.detach() + 0.1 * loss


def mixed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Between layers as far apart in the batch."""
    z = m.head(0.7 * x + 0.3 * x.flip(0))
    a, b = (F.cross_entropy(z.flatten(0, 1), t.flatten()) for t in (y, y.flip(0)))
    return 0.7 * a + 0.3 * b


def auxiliary_dictionary(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.head(x)
    loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
    return {"loss": loss, "accuracy": (z.argmax(-1) == y).float().mean().item(), "size": z.shape[0]}


def simple(function: Function, **more: Any) -> Fragment:
    return Fragment(loss=function, **more)


def reduced(**options: Any) -> Function:
    return lambda m, x, y: cross_entropy(m, x, y, **options)


def lengths(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    return {"lengths": torch.randint(3, 13, (rows,), generator=generator)}


def outside(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)


LOSSES: dict[str, Fragment] = {
    "mean": Fragment(),
    "mean of padded": Fragment(padded=True),
    "sum": simple(reduced(reduction="sum")),
    "sum by rows and length": simple(lambda m, x, y: cross_entropy(m, x, y, reduction="sum") / y.numel()),
    "sum by a constant": simple(lambda m, x, y: cross_entropy(m, x, y, reduction="sum") / 96),
    "sum by labels": simple(
        lambda m, x, y: cross_entropy(m, x, y, reduction="sum") / (y != -100).sum(), padded=True
    ),
    "sum by items": simple(
        lambda m, x, y, num_items_in_batch: cross_entropy(m, x, y, reduction="sum") / num_items_in_batch,
        padded=True,
        given=lambda g, rows: {"num_items_in_batch": torch.tensor(80)},
    ),
    "weights of classes": simple(
        lambda m, x, y, w: cross_entropy(m, x, y, weight=w),
        given=lambda g, rows: {"w": torch.linspace(1, 2, VOCABULARY)},
    ),
    "weights of tokens": simple(
        lambda m, x, y, w: (each(m, x, y) * w).sum() / w.sum(),
        given=lambda g, rows: {"w": torch.rand(rows, 12, generator=g)},
    ),
    "weights of rows": simple(
        lambda m, x, y, w: (each(m, x, y).mean(1) * w).mean(),
        given=lambda g, rows: {"w": torch.rand(rows, generator=g)},
    ),
    "shifted": simple(shifted),
    "z-loss": simple(z_loss),
    "in chunks": simple(chunked),
    "preferences": simple(dpo),
    "in-batch negatives": simple(info_nce),
    "l2 of all parameters": simple(l2_of_all),
    "l1 of norms": simple(l1_of_blocks),
    "l2 of a layer": simple(l2_of_split),
    "rows of the head": simple(rows_of_head),
    "teacher's logits": simple(
        distilled, given=lambda g, rows: {"teacher": torch.randn(rows, 12, VOCABULARY, generator=g)}
    ),
    "a frozen head": simple(self_distilled, build=add_teacher),
    "a moving teacher": simple(moving_teacher, build=add_teacher),
    "masked by lengths": simple(masked_by_lengths, given=lengths),
    "mean-pooled": simple(mean_pooled),
    "first token": simple(lambda m, x, y: F.cross_entropy(m.head(x[:, 0]), y[:, 0])),
    "adaptive softmax": simple(
        adaptive, build=add("adaptive", lambda: nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, [8, 20]))
    ),
    "log-sum-exp of rows": simple(robust),
    "flooding": simple(lambda m, x, y: (mean_loss(m, x, y) - 3.0).abs() + 3.0),
    "a number beside logits": simple(lambda m, x, y: ((z := m.head(x)), outside(z, y))[::-1]),
    "an output class": simple(lambda m, x, y: Output(outside(z := m.head(x), y), z)),
    "a dictionary with numbers": simple(auxiliary_dictionary),
    "of each row": simple(lambda m, x, y: each(m, x, y).mean(1), outside=lambda loss, y: loss.mean()),
    "logits alone": simple(lambda m, x, y: m.head(x), outside=outside),
    "logits and a balance": simple(
        lambda m, x, y: (m.head(x), x.square().mean()), outside=lambda z, y: outside(z[0], y) + 0.1 * z[1]
    ),
    "logits time first": simple(
        lambda m, x, y: m.head(x).transpose(0, 1), outside=lambda z, y: outside(z.transpose(0, 1), y)
    ),
    "features and their covariance": simple(
        lambda m, x, y: {"z": m.head(x), "cov": torch.cov(x.flatten(0, 1).T)},
        outside=lambda z, y: outside(z["z"], y) + z["cov"].square().mean(),
    ),
    "detached": simple(lambda m, x, y: mean_loss(m, x, y) * x.detach().abs().mean()),
    "no labels": Fragment(
        forward=lambda m, ids, labels: (
            (m.norm(through(m, m.embed(ids))) @ m.embed.weight.T).logsumexp(-1).mean()
        )
    ),
}
