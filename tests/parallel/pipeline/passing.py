"""Fragments in which more than one stream passes between blocks; plain torch is the oracle."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.pipeline.fragments import Fragment, attribute, ce


def ends(model: Any, x: Tensor, labels: Tensor, aux: Any = 0.0, weight: float = 0.1) -> Tensor:
    return ce(model, model.norm(x), labels) + weight * aux


def added(make: Any) -> Any:
    """Blocks return (x, aux), and the forward adds the second up."""

    def forward(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        x, total = model.embed(ids), 0.0
        for block in model.blocks:
            x = block(x)
            total = total + make(block, x)
        return ends(model, x, labels, total)

    return forward


def returned(make: Any, reduction: Any = sum, **more: Any) -> Fragment:
    """Blocks return (x, make(x)); the second is added up in the forward around them."""

    def forward(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        x, found = model.embed(ids), []
        for block in model.blocks:
            x, aux = block(x)
            found.append(aux)
        return ends(model, x, labels, reduction(found))

    return Fragment(forward=forward, after=lambda block, x, *args: (x, make(block, x)), **more)


def in_place(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    x, total = model.embed(ids), torch.zeros(())
    for block in model.blocks:
        x, aux = block(x)
        total += aux
    return ends(model, x, labels, total)


def through(start: Any) -> Any:
    def forward(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        x, aux = model.embed(ids), start
        for block in model.blocks:
            x, aux = block(x, aux)
        return ends(model, x, labels, aux)

    return forward


def cache(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    x = model.embed(ids)
    kept = torch.zeros_like(x)
    for block in model.blocks:
        x, kept = block(x, kept)
    return ce(model, model.norm(x + kept), labels)


def keeps(block: Any, x: Tensor, kept: Tensor) -> Any:
    return x, kept * 0.5 + x.tanh()


def supervised(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    x, losses = model.embed(ids), []
    for block in model.blocks:
        x = block(x)
        losses.append(x)
    return sum(ce(model, model.norm(one), labels) for one in losses) / len(losses)


def unet(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    x, skips = model.embed(ids), list[Tensor]()
    half = len(model.blocks) // 2
    for block in model.blocks[:half]:
        skips.append(x)
        x = block(x)
    for block in model.blocks[half:]:
        x = block(x + skips.pop())
    return ce(model, model.norm(x), labels)


def hidden_states(model: Any, ids: Tensor, labels: Tensor) -> Any:
    x, states = model.embed(ids), []
    for block in model.blocks:
        x = block(x)
        states.append(x)
    return model.head(model.norm(x)), states


def of_states(output: Any, labels: Tensor) -> Tensor:
    z, states = output
    return F.cross_entropy(z.flatten(0, 1), labels.flatten()) + 0.01 * sum(x.square().mean() for x in states)


def sparsity(block: Any, x: Tensor, *args: Any) -> Tensor:
    block.sparsity = x.abs().mean()
    return x


def of_attributes(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    x = model.embed(ids)
    for block in model.blocks:
        x = block(x)
    return ends(model, x, labels, sum(block.sparsity for block in model.blocks))


def mean(block: Any, x: Tensor) -> Tensor:
    return x.square().mean()


def total(block: Any, x: Tensor) -> Tensor:
    return 1e-3 * x.square().sum()


def balance(block: Any, x: Tensor) -> Tensor:
    """As of a router: not linear in the rows."""
    share = x.softmax(-1).mean((0, 1))
    return (share * share).sum()


def statistics(block: Any, x: Tensor) -> Tensor:
    return x.mean((0, 1))


def mixes_rows(block: Any, x: Tensor, *args: Any) -> Any:
    return x - 0.5 * x.mean(0, keepdim=True), x.square().mean()


def loss_is_a_sum(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    x, found = model.embed(ids), 0.0
    for block in model.blocks:
        x, aux = block(x)
        found = found + aux
    return ce(model, model.norm(x), labels, reduction="sum") + found


def through_list(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    x, found = model.embed(ids), []
    for block in model.blocks:
        x, aux = block(x)
        found.append(aux)
    return ends(model, x, labels, sum(found), 1.0)


def adds(block: Any, x: Tensor, aux: Any, *args: Any) -> Any:
    return x, aux + x.square().mean()


def set_keyword(model: Any, kwargs: dict[str, Any], step: int) -> None:
    kwargs.update({"total": True} if step else {})


def of_keyword(model: Any, x: Tensor, labels: Tensor, total: bool = False) -> Tensor:
    return ce(model, x, labels, reduction="sum" if total else "mean")


def set_block(model: Any, kwargs: dict[str, Any], step: int) -> None:
    for block in model.blocks:
        block.sums = step > 0


def of_block(block: Any, x: Tensor, *args: Any) -> Any:
    return x, 0.01 * (x.square().sum() if block.sums else x.square().mean())


def set_gain(model: Any, kwargs: dict[str, Any], step: int) -> None:
    kwargs["gain"] = torch.tensor(0.0 if step == 0 else 3.0)


def later(end: Any) -> Fragment:
    """A part of the loss that is inactive on the first batch, for want of values, and active on the second one."""

    def total(model: Any, x: Tensor, labels: Tensor, gain: Tensor) -> Tensor:
        return ce(model, x, labels) + 0.01 * end(x * gain)

    return Fragment(total, script=set_gain, steps=3, words="loss=whole")


def of_blocks_later(make: Any, **more: Any) -> Fragment:
    """The same of an auxiliary loss that blocks return."""

    def forward(model: Any, ids: Tensor, labels: Tensor, gain: Tensor) -> Any:
        x, total = model.embed(ids), 0.0
        for block in model.blocks:
            x, aux = block(x, gain)
            total = total + aux
        return ce(model, model.norm(x), labels) + 0.01 * total

    return Fragment(
        forward=forward,
        after=lambda block, x, gain: (x, make(x * gain)),
        script=set_gain,
        steps=3,
        **more,
    )


def over(x: Tensor) -> Tensor:
    return F.relu(x - 1)


PASSING: dict[str, Fragment] = {
    "a sum of blocks, zero at first": of_blocks_later(
        lambda x: over(x).sum(), words="verify=every:1", says=("in training call 2",)
    ),
    "a hinge that is a sum, inactive at first": later(lambda x: over(x).sum()),
    "means added up": Fragment(forward=added(mean), fast=True),
    "means of blocks": returned(mean),
    "sums of blocks": returned(total, says=("does not compute", "without the others")),
    "sums of blocks, all of it": Fragment(
        forward=loss_is_a_sum, after=lambda b, x, *a: (x, total(b, x)), words="loss=sum"
    ),
    "squared statistics of blocks": returned(
        statistics, lambda found: sum(found).square().sum(), words="loss=whole"
    ),
    "balance of blocks": returned(balance, says=("does not compute",)),
    "a tensor through blocks": Fragment(forward=through(torch.zeros(())), after=adds),
    "a cache through blocks": Fragment(forward=cache, after=keeps, fast=True),
    "deep supervision": Fragment(forward=supervised, padded=True, words="loss=whole"),
    "long skips": Fragment(forward=unet, fast=True),
    "states outside": Fragment(forward=hidden_states, outside=of_states),
    "notes": Fragment(forward=of_attributes, hook=sparsity, fast=True),
    "reduction by a keyword": Fragment(of_keyword, script=set_keyword, steps=3, words="loss=whole"),
    "attribute of blocks that is set": Fragment(
        forward=through_list,
        after=of_block,
        block=attribute("sums", False),
        script=set_block,
        steps=3,
        words="verify=every:1",
        says=("in training call 2",),
    ),
    "rows are mixed": Fragment(
        forward=in_place, after=mixes_rows, says=("does not compute", "without the others")
    ),
}
