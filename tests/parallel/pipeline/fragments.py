"""What people write in losses, heads, with arguments, buffers and attributes; plain torch is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D, L, B = 17, 8, 8, 8  # the sequence is as long as the batch
Forward = Callable[..., Any]


class Block(nn.Module):
    def __init__(
        self,
        extra: Callable[[nn.Module], None] | None = None,
        hook: Forward | None = None,
        after: Forward | None = None,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mix = nn.Linear(D, D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)
        self.hook, self.after = hook, after
        if extra is not None:
            extra(self)

    def forward(self, x: Tensor, *args: Any) -> Any:
        if self.hook is not None:
            x = self.hook(self, x, *args)
        h = self.norm(x)
        scores = (h @ self.mix(h).transpose(1, 2) / D).softmax(-1)
        x = x + scores @ h
        x = x + self.down(F.gelu(self.up(x)))
        return x if self.after is None else self.after(self, x, *args)


class Model(nn.Module):
    """Embedding, four blocks, norm and head; ``between`` is called after each block, ``end`` makes the output."""

    def __init__(self, fragment: Fragment) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(
            Block(
                fragment.block if i in fragment.at else None,
                fragment.hook if i in fragment.at else None,
                fragment.after if i in fragment.at else None,
            )
            for i in range(4)
        )
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)
        self.fragment = [fragment]
        if fragment.root is not None:
            fragment.root(self)

    def forward(self, ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        fragment = self.fragment[0]
        if fragment.forward is not None:
            return fragment.forward(self, ids, labels, **kwargs)
        return fragment.end(self, run(self, self.embed(ids)), labels, **kwargs)


def run(model: Any, x: Tensor, *args: Any) -> Tensor:
    for block in model.blocks:
        x = block(x, *args)
    return model.norm(x)


def ce(model: Any, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten(), **options)


def mean_loss(model: Any, x: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return ce(model, x, labels)


@dataclass
class Fragment:
    """``end``: from the last norm to the output; ``says``: words of the refusal, () where it is equal."""

    end: Forward = mean_loss
    says: tuple[str, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    forward: Forward | None = None
    block: Callable[[Any], None] | None = None
    root: Callable[[Any], None] | None = None
    hook: Forward | None = None
    after: Forward | None = None  # what a block returns
    at: tuple[int, ...] = (0, 1, 2, 3)
    words: str = ""  # for ``parallel``
    outside: Callable[[Any, Tensor], Tensor] | None = None
    padded: bool = False
    script: Callable[[Any, dict[str, Any], int], None] | None = None  # what it sets before each step
    first: str = ""  # the keyword argument that comes before the others
    fast: bool = False
    steps: int = 2


def contrastive(model: Any, x: Tensor, labels: Tensor, **_: Any) -> Tensor:
    z = F.normalize(x.mean(1), dim=-1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(z.shape[0]))


def with_positions(model: Any, ids: Tensor, labels: Tensor, pos: Tensor) -> Tensor:
    x = model.embed(ids) + (pos[None, :, None] if pos.ndim == 1 else pos)
    return ce(model, run(model, x), labels)


def with_mask(model: Any, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return ce(model, run(model, model.embed(ids) * mask[:, :, None]), labels)


def bank(model: Any, x: Tensor, labels: Tensor, bank: Tensor) -> Tensor:
    return -(x.mean(1) @ bank.T).log_softmax(-1)[:, :2].mean()


def count(block: Any, x: Tensor, *args: Any) -> Tensor:
    block.calls += 1
    return x * (1 + 0.1 * block.calls)


def buffer_count(block: Any, x: Tensor, *args: Any) -> Tensor:
    block.n += 1
    return x * (1 + 0.1 * block.n)


def ema_of_weights(block: Any, x: Tensor, *args: Any) -> Tensor:
    with torch.no_grad():
        block.n.mul_(0.9).add_(0.1 * block.mix.weight.norm())
    return x / (1 + block.n)


def ema_of_rows(block: Any, x: Tensor, *args: Any) -> Tensor:
    with torch.no_grad():
        block.n.mul_(0.9).add_(0.1 * x.abs().mean())
    return x / (1 + block.n)


def buffer(block: Any) -> None:
    block.register_buffer("n", torch.zeros(()))


def attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda block: setattr(block, name, value)


def root_count(model: Any, x: Tensor, labels: Tensor, **_: Any) -> Tensor:
    model.calls += 1
    return ce(model, x, labels) * (1 + 0.1 * model.calls)


def notes(block: Any, x: Tensor, *args: Any) -> Tensor:
    block.noted = x.detach().abs().mean()
    return x


def collected_by_hook(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """As transformers collects the logits of routers: out of the blocks, past what they return."""
    inner: list[Tensor] = []
    hooks = [block.up.register_forward_hook(lambda *given: inner.append(given[2])) for block in model.blocks]
    loss = ce(model, run(model, model.embed(ids)), labels)
    for hook in hooks:
        hook.remove()
    return loss + 0.1 * torch.cat([one.to(loss.device) for one in inner]).square().mean()


def as_dict(model: Any, x: Tensor, labels: Tensor, **_: Any) -> Any:
    loss = ce(model, x, labels, reduction="sum") / B
    return {"loss": loss, "aux": x.square().sum().detach()}


def attribute_of_block(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    x = model.embed(ids)
    for block in model.blocks:
        if block.norm.eps > 0 and block.up.out_features == 2 * D and block.mix.weight.shape[0] == D:
            x = block(x)
    return ce(model, model.norm(x), labels)


def flag_on_block(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    x = model.embed(ids)
    for index, block in enumerate(model.blocks):
        block.depth = index
        x = block(x)
    return ce(model, model.norm(x), labels)


def uses_flag(block: Any, x: Tensor, *args: Any) -> Tensor:
    return x * (1 + 0.1 * block.depth)


def fails_later(block: Any, x: Tensor, *args: Any) -> Tensor:
    block.calls += 1
    if block.calls > 1:
        raise ValueError("no more than one call")
    return x


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no gradient")


def fails_backward(block: Any, x: Tensor, *args: Any) -> Tensor:
    failed: Tensor = FailsBackward.apply(x)
    return failed


def batch_norm(block: Any) -> None:
    block.bn = nn.BatchNorm1d(D)


def normed(block: Any, x: Tensor, *args: Any) -> Tensor:
    return block.bn(x.transpose(1, 2)).transpose(1, 2)


def time_major(model: Any, ids: Tensor, labels: Tensor, cond: Tensor) -> Tensor:
    return ce(model, run(model, model.embed(ids) + cond.transpose(0, 1)), labels)


def _g(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


POSITIONS = torch.linspace(0, 1, L)
MASK = (torch.rand(B, L, generator=_g()) > 0.2).float()
BANK = torch.randn(B, D, generator=_g())
AT = (2,)

FRAGMENTS: dict[str, Fragment] = {
    # losses
    "mean": Fragment(),
    "sum": Fragment(lambda m, x, y: ce(m, x, y, reduction="sum"), words="loss=sum"),
    "sum, not said": Fragment(lambda m, x, y: ce(m, x, y, reduction="sum"), says=("1/4 of it", "loss=sum")),
    "sum by the number of items": Fragment(
        lambda m, x, y, num_items_in_batch: ce(m, x, y, reduction="sum") / num_items_in_batch,
        kwargs={"num_items_in_batch": torch.tensor(37)},
        padded=True,
        fast=True,
    ),
    "padded": Fragment(padded=True, words="loss=whole", fast=True),
    "padded, not said": Fragment(padded=True, says=("unpadded tokens", "loss=whole"), fast=True),
    "weights of classes": Fragment(
        lambda m, x, y, w: ce(m, x, y, weight=w), kwargs={"w": torch.linspace(1, 2, V)}, words="loss=whole"
    ),
    "smoothed": Fragment(lambda m, x, y: ce(m, x, y, label_smoothing=0.1), padded=True, words="loss=whole"),
    "contrastive": Fragment(contrastive, words="loss=whole"),
    "contrastive, not said": Fragment(contrastive, says=("does not compute", "loss=whole")),
    "mean and a term of weights": Fragment(lambda m, x, y: ce(m, x, y) + 1e-2 * m.head.weight.square().sum()),
    "in a dict": Fragment(as_dict, words="loss=sum"),
    "outside, mean": Fragment(
        lambda m, x, y: m.head(x),
        outside=lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
        padded=True,
    ),
    "outside, with a number": Fragment(
        lambda m, x, y: (m.head(x), x.square().mean()),
        outside=lambda z, y: F.cross_entropy(z[0].flatten(0, 1), y.flatten()) + 0.1 * z[1],
        fast=True,
    ),
    # arguments
    "positions": Fragment(forward=with_positions, kwargs={"pos": POSITIONS}, words="batch_dims=pos=none"),
    "positions, not said": Fragment(
        forward=with_positions, kwargs={"pos": POSITIONS}, says=("batch_dims=NAME=none",), fast=True
    ),
    "positions of another length": Fragment(
        forward=lambda m, ids, labels, pos: with_positions(m, ids, labels, pos[:, :L]),
        kwargs={"pos": torch.linspace(0, 1, 2 * L)[None]},
    ),
    "mask": Fragment(forward=with_mask, kwargs={"mask": MASK}),
    "uneven weights as long as the batch": Fragment(
        lambda m, x, y, w: F.cross_entropy(m.head(x)[..., :B].flatten(0, 1), y.flatten() % B, weight=w),
        kwargs={"w": torch.linspace(1, 2, B)},
        words="batch_dims=w=none loss=whole",
    ),
    "positions of another length first": Fragment(
        forward=lambda m, ids, labels, pos: with_positions(m, ids, labels, pos[:L]),
        kwargs={"pos": torch.linspace(0, 1, 2 * L)},
        first="pos",
        words="batch_dims=ids=0,labels=0",
    ),
    "a bank": Fragment(bank, ("does not compute", "batch_dims=NAME=none"), {"bank": BANK}),
    "time first": Fragment(
        forward=time_major,
        kwargs={"cond": torch.randn(L, B, D, generator=_g())},
        words="batch_dims=ids=0,labels=0,cond=1",
    ),
    "a mapping": Fragment(
        forward=lambda m, ids, labels, extra: with_mask(m, ids, labels, extra["mask"] * extra["pos"]),
        kwargs={"extra": {"mask": MASK, "pos": POSITIONS[None]}},
    ),
    # buffers and attributes
    "counter": Fragment(block=attribute("calls", 0), hook=count, at=AT),
    "counter as a buffer": Fragment(block=buffer, hook=buffer_count, at=AT, fast=True),
    "average of weights": Fragment(block=buffer, hook=ema_of_weights),
    "average of rows": Fragment(
        block=buffer, hook=ema_of_rows, at=AT, says=("buffer", "'blocks.2.n'"), fast=True
    ),
    "counter of the model": Fragment(root_count, root=attribute("calls", 0)),
    "collected by hooks": Fragment(
        forward=collected_by_hook, says=("neither returns it nor keeps", "output_router_logits"), fast=True
    ),
    "batch norm": Fragment(block=batch_norm, hook=normed, at=AT, says=("'blocks.2.bn'", "GroupNorm")),
    "attributes of blocks": Fragment(forward=attribute_of_block, fast=True),
    "flag on blocks": Fragment(forward=flag_on_block, block=attribute("depth", 0), hook=uses_flag),
}


def batches(fragment: Fragment) -> list[tuple[Tensor, Tensor]]:
    generator = _g(1)
    found = []
    for step in range(fragment.steps):
        ids = torch.randint(0, V, (B, L), generator=generator)
        labels = torch.randint(0, V, (B, L), generator=generator)
        if fragment.padded and step:  # the first batch has no padding
            for row in range(B):
                labels[row, : row % 5] = -100
        found.append((ids, labels))
    return found


def trained(
    model: nn.Module, fragment: Fragment, backward: Callable[[Tensor], object] = Tensor.backward
) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Loss of each step, gradients of the last one, and buffers afterwards."""
    values = []
    kwargs = dict(fragment.kwargs)
    for step, (ids, labels) in enumerate(batches(fragment)):
        model.zero_grad()
        if fragment.script is not None:
            fragment.script(model, kwargs, step)
        given = {"ids": ids, "labels": labels, **kwargs}
        if fragment.first:
            output = model(**{fragment.first: given.pop(fragment.first)}, **given)
        else:
            output = model(ids, labels, **kwargs)
        if fragment.outside is not None:
            loss = fragment.outside(output, labels)
        elif isinstance(output, dict):
            loss = output["loss"]
        else:
            loss = output[0] if isinstance(output, tuple) else output
        backward(loss)
        values.append(loss.item())
    gradients = {
        name: p.grad.clone() for name, p in model.named_parameters() if not p.is_meta and p.grad is not None
    }
    return values, gradients, {name: b.clone() for name, b in model.named_buffers()}


def seeded(fragment: Fragment) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(fragment)
