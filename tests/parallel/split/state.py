"""Buffers, attributes and hooks: what a forward keeps, and what others hang on it."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallel.split.host import WIDTH, Block, Fragment, cross_entropy, mean_loss


class Changed(nn.Module):
    """``change`` looks at the block's input and gives another."""

    def __init__(self, block: Block, change: Callable[[Any, Tensor], Tensor], **inner: Any) -> None:
        super().__init__()
        self.block, self.change = block, change
        for name, value in inner.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value.clone())
            else:
                setattr(self, name, copy.deepcopy(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.change(self, x))


def changed(change: Callable[[Any, Tensor], Tensor], at: tuple[int, ...] = (1, 2), **inner: Any) -> Fragment:
    return Fragment(block=lambda block: Changed(block, change, **inner), at=at)


def counted(m: Any, x: Tensor) -> Tensor:
    m.step += 1
    return x * (1 + 0.1 * float(m.step))


def in_dictionary(m: Any, x: Tensor) -> Tensor:
    m.state["calls"] += 1
    return x * (1 + 0.1 * m.state["calls"])


def in_list(m: Any, x: Tensor) -> Tensor:
    m.seen.append(1.0)
    return x * (1 + 0.1 * len(m.seen))


class Meter:
    calls = 0


def in_object(m: Any, x: Tensor) -> Tensor:
    m.meter.calls += 1
    return x * (1 + 0.1 * m.meter.calls)


def chosen(m: Any, x: Tensor) -> Tensor:
    return x * (1 + 0.1 * m.numbers.randrange(4))


def history(m: Any, x: Tensor) -> Tensor:
    m.seen.append(x.detach())
    return x


def recent(m: Any, x: Tensor) -> Tensor:
    m.seen.append(x.shape[1])
    return x * (1 + 0.1 * len(m.seen))


def running_norm(m: Any, x: Tensor) -> Tensor:
    if m.training:
        with torch.no_grad():
            m.mean.lerp_(x.mean((0, 1)), 0.1)
    return x - m.mean


def running_of_weights(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.lerp_(m.block.norm1.weight, 0.1)
    return x - 0.1 * m.mean


def last_mean(m: Any, x: Tensor) -> Tensor:
    """Of the batch before."""
    y = x - 0.1 * m.last
    m.last = x.detach().mean((0, 1))
    return y


def cache_of_positions(m: Any, x: Tensor) -> Tensor:
    if m.cache is None or m.cache.shape[0] != x.shape[1]:
        m.cache = torch.linspace(0, 1, x.shape[1])[:, None]
    return x + 0 * m.cache.sum()


def new_buffer(m: Any, x: Tensor) -> Tensor:
    if "table" not in m._buffers:
        m.register_buffer("table", torch.ones(x.shape[-1]), persistent=False)
    return x * m.table


def loss_state(change: Callable[[Any, Tensor, Tensor], Tensor], **buffers: Any) -> Fragment:
    def build(m: Any) -> None:
        for name, value in buffers.items():
            if isinstance(value, Tensor):
                m.register_buffer(name, value.clone())
            else:
                setattr(m, name, copy.deepcopy(value))

    return Fragment(loss=change, build=build)


def queue(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """MoCo: keys of earlier batches."""
    key = F.normalize(x.mean(1), dim=-1)
    negatives = m.queue.clone()
    with torch.no_grad():
        at = int(m.pointer)
        m.queue[at : at + len(key)] = key
        m.pointer[0] = (at + len(key)) % len(m.queue)
    return mean_loss(m, x, y) + 0.1 * (key @ negatives.T).logsumexp(-1).mean()


def prototypes(m: Any, x: Tensor, y: Tensor) -> Tensor:
    pooled = x.mean(1)
    loss = F.mse_loss(pooled, m.prototypes[y[:, 0]]) + mean_loss(m, x, y)
    with torch.no_grad():
        m.prototypes.index_add_(0, y[:, 0], 0.1 * pooled)
    return loss


def balanced(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Over its running mean."""
    loss = mean_loss(m, x, y)
    m.average.lerp_(loss.detach(), 0.1)
    return loss / m.average.detach()


def metrics(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.head(x)
    m.accuracy = (z.argmax(-1) == y).float().mean()
    m.log.append(float(z.detach().abs().max()))
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def token_counts(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.seen += y.numel()
    return cross_entropy(m, x, y)


def double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def half_input(module: nn.Module, args: Any) -> Any:
    return tuple(a * 0.5 for a in args)


def scaled_gradient(module: nn.Module, gradients: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in gradients)


def normed_gradient(module: nn.Module, gradients: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g / (1 + 100 * g.norm()) for g in gradients)


def on_each(path: str, method: str, hook: Any) -> Fragment:
    def build(m: Any) -> None:
        for block in m.blocks:
            getattr(block.get_submodule(path), method)(hook)

    return Fragment(build=build)


def collect(path: str, weight: float) -> Fragment:
    """A hook notes outputs, which the loss looks at."""

    def build(m: Any) -> None:
        m.noted = []
        for block in m.blocks:
            block.get_submodule(path).register_forward_hook(
                lambda module, args, output: m.noted.append(output)
            )

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        more = sum(t.square().mean() for t in m.noted)
        m.noted.clear()
        return mean_loss(m, x, y) + weight * more

    return Fragment(build=build, loss=loss)


def freeze(*parts: str) -> Fragment:
    def build(m: Any) -> None:
        for part in parts:
            m.get_submodule(part).requires_grad_(False)

    return Fragment(build=build)


def _ignore(value: Any) -> None:
    """For what a lambda does beside its result."""


def normed(m: Any, x: Tensor) -> Tensor:
    return m.bn(x.flatten(0, 1)).view_as(x)


STATE: dict[str, Fragment] = {
    "counter": changed(counted, step=0),
    "counter in a list": changed(in_list, seen=[]),
    "counter in an object": changed(in_object, meter=Meter()),
    "random numbers of its own": changed(chosen, numbers=random.Random(0)),
    "recent lengths": changed(recent, seen=deque(maxlen=2)),
    "running mean": changed(running_norm, mean=torch.zeros(WIDTH)),
    "running mean of weights": changed(running_of_weights, mean=torch.ones(WIDTH)),
    "mean of the last batch": changed(last_mean, last=torch.zeros(WIDTH)),
    "cache of positions": changed(cache_of_positions, cache=None),
    "buffer made late": changed(new_buffer),
    "batch norm of tokens": changed(normed, bn=nn.BatchNorm1d(WIDTH)),
    "queue of keys": loss_state(queue, queue=torch.eye(32, WIDTH), pointer=torch.zeros(1, dtype=torch.long)),
    "running loss": loss_state(balanced, average=torch.ones(())),
    "tokens seen": loss_state(token_counts, seen=0),
    "hook on an MLP's output": on_each("mlp", "register_forward_hook", double_output),
    "hook on an inner layer's input": on_each("mlp.down", "register_forward_pre_hook", half_input),
    "hook on attention's input": on_each("attn", "register_forward_pre_hook", half_input),
    "hook on an MLP's gradient": on_each("mlp", "register_full_backward_hook", scaled_gradient),
    "norm hook on an inner layer": on_each("mlp.down", "register_full_backward_hook", normed_gradient),
    "features by hooks": collect("mlp", 0.1),
    "inner features by hooks": collect("mlp.up", 0.1),
    "frozen embedding": freeze("embed"),
    "frozen blocks": freeze("blocks.0", "blocks.1"),
    "frozen but norms": Fragment(
        build=lambda m: _ignore([p.requires_grad_("norm" in n) for n, p in m.named_parameters()])
    ),
}
