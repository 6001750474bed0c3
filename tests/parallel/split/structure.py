"""Embeddings, arguments, what lies between blocks, and how blocks are held, shared and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.nn import MixtureOfExperts
from lockstep.nn import load_balance_loss as balance
from lockstep.nn import router_z_loss as router_z
from tests.parallel.split.host import (
    HIDDEN,
    VOCABULARY,
    WIDTH,
    Block,
    Fragment,
    cross_entropy,
    mean_loss,
    through,
)

LENGTH = 12


def parameter(name: str, *shape: int) -> Callable[[Any], None]:
    return lambda m: m.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.2))


def module(name: str, make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda m: m.add_module(name, make())


# Embeddings ---------------------------------------------------------------------------------------


def with_class_token(m: Any, ids: Tensor, **given: Any) -> Tensor:
    return torch.cat([m.cls.expand(len(ids), -1, -1), m.embed(ids)], 1)


def class_loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x[:, 0]), y[:, 0])


def after_prompt(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(m, x[:, m.prompt.shape[0] :], y)


def with_prompt(m: Any, ids: Tensor, **given: Any) -> Tensor:
    return torch.cat([m.prompt.expand(len(ids), -1, -1), m.embed(ids)], 1)


def tie(m: Any) -> None:
    m.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    m.head.weight = m.embed.weight


def in_place_embedding(m: Any, ids: Tensor, **given: Any) -> Tensor:
    x = m.embed(ids)
    x[:, 0] = m.cls
    x.masked_fill_((ids == 3)[..., None], 0.0)
    return x


def limited_embedding(m: Any) -> None:
    m.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)


def one_hot(m: Any, ids: Tensor, **given: Any) -> Tensor:
    return F.one_hot(ids, VOCABULARY).float() @ m.embed.weight


class Scaled(nn.Module):
    """An MLP behind a function that keeps a parameter of the model."""

    def __init__(self, mlp: nn.Module, scale: nn.Parameter) -> None:
        super().__init__()
        self.mlp, self.function = mlp, lambda x: x * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.function(x))


def scaled_by_a_closure(m: Any) -> None:
    m.shared = nn.Parameter(torch.ones(WIDTH))
    for block in m.blocks:
        block.mlp = Scaled(block.mlp, m.shared)


def in_a_list(m: Any) -> None:
    m.shared = nn.Parameter(torch.ones(WIDTH))
    m.kept = [m.shared]


def around_old_forwards(m: Any) -> None:
    for block in m.blocks:
        block.attn.forward = lambda x, old=block.attn.forward: 0.5 * old(x)


def one_forward_around(m: Any) -> None:
    old = m.blocks[1].forward
    m.blocks[1].forward = lambda x: old(x) + 0.1 * x


# Between blocks -----------------------------------------------------------------------------------


def scalar_mix(m: Any, x: Tensor) -> Tensor:
    found = [x]
    for block in m.blocks:
        found.append(block(found[-1]))
    return torch.einsum("l,lbsd->bsd", m.mix.softmax(0), torch.stack(found))


def unet(m: Any, x: Tensor) -> Tensor:
    half, kept = len(m.blocks) // 2, []
    for block in m.blocks[:half]:
        x = block(x)
        kept.append(x)
    for block in m.blocks[half:]:
        x = block(x + kept.pop())
    return x


def dense(m: Any, x: Tensor) -> Tensor:
    found = [x]
    for block in m.blocks:
        found.append(block(torch.stack(found).mean(0)))
    return found[-1]


def deep_supervision(m: Any, ids: Tensor, labels: Tensor) -> Tensor:
    x, losses = m.embed(ids), []
    for block in m.blocks:
        x = block(x)
        losses.append(mean_loss(m, m.norm(x), labels))
    return torch.stack(losses).mean()


def early_exit(m: Any, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = block(x)
        if x.abs().mean() > 100:
            break
    return x


def scaled_by_depth(m: Any, x: Tensor) -> Tensor:
    for index, block in enumerate(m.blocks):
        x = x + (block(x) - x) / (index + 1) ** 0.5
    return x


def listed_scale(m: Any, x: Tensor) -> Tensor:
    for index, block in enumerate(m.blocks):
        x = block(x) + m.levels[index]
    return x


def halved(m: Any, x: Tensor) -> Tensor:
    """Half as long between the second and third block."""
    x = m.blocks[1](m.blocks[0](x))
    x = x.unflatten(1, (-1, 2)).mean(2)
    x = m.blocks[3](m.blocks[2](x))
    return x.repeat_interleave(2, 1)


def twice(m: Any, x: Tensor) -> Tensor:
    return through(m, through(m, x))


def backwards(m: Any, x: Tensor) -> Tensor:
    for block in reversed(m.blocks):
        x = block(x)
    return x


def checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    def body(m: Any, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    return body


def in_eval(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = m.blocks[0](x)
    for block in m.blocks[1:]:
        x = block(x)
    return x


def detached_middle(m: Any, x: Tensor) -> Tensor:
    for index, block in enumerate(m.blocks):
        x = block(x.detach() if index == 2 else x)
    return x


def of_first_weight(m: Any, x: Tensor) -> Tensor:
    p = next(m.blocks.parameters())
    return through(m, x.to(p.device, m.blocks[0].attn.q.weight.dtype)) / len(m.blocks)


def skipping(m: Any, x: Tensor) -> Tensor:
    for index, block in enumerate(m.blocks):
        if index != 1:
            x = block(x)
    return x


class Pair(NamedTuple):
    x: Tensor
    aux: Tensor


class Wrapped(nn.Module):
    """A block in another calling convention."""

    def __init__(self, block: Block, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.function = block, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.inner, *args, **kwargs)


def wrapped(function: Callable[..., Any], body: Any, **more: Any) -> Fragment:
    return Fragment(block=lambda block: Wrapped(block, function), body=body, **more)


def first_of_tuple(m: Any, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = block(x)[0]
    return x


def of_dictionary(m: Any, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = block({"x": x})["x"]
    return x


def carried(m: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """The auxiliary loss goes through the blocks."""
    x, aux = m.embed(ids), torch.zeros(())
    for block in m.blocks:
        x, aux = block(x, aux)
    return mean_loss(m, m.norm(x), labels) + 0.01 * aux


def collected(m: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Auxiliary losses that blocks return are added up beside them."""
    x, aux = m.embed(ids), []
    for block in m.blocks:
        x, one = block(x)
        aux.append(one)
    return mean_loss(m, m.norm(x), labels) + 0.01 * torch.stack(aux).sum()


def aux_of(x: Tensor) -> Tensor:
    return x.square().mean()


# How blocks are held ------------------------------------------------------------------------------


def shared_blocks(m: Any) -> None:
    m.blocks = nn.ModuleList([m.blocks[0]] * 4)


def shared_mlp(m: Any) -> None:
    for block in m.blocks:
        block.mlp = m.blocks[0].mlp


def sequential(m: Any) -> None:
    m.blocks = nn.Sequential(*m.blocks)


def dictionary(m: Any) -> None:
    m.blocks = nn.ModuleDict({f"block{i}": block for i, block in enumerate(m.blocks)})


def attributes(m: Any) -> None:
    m.first, m.second, m.third, m.fourth = m.blocks
    del m.blocks


def two_lists(m: Any) -> None:
    m.encoder, m.decoder = m.blocks[:2], m.blocks[2:]
    del m.blocks


def nested(m: Any) -> None:
    m.stages = nn.ModuleList([m.blocks[:2], m.blocks[2:]])
    del m.blocks


# Arguments ----------------------------------------------------------------------------------------


def given(start: Any, make: Callable[[torch.Generator, int], dict[str, Any]], **more: Any) -> Fragment:
    def body(m: Any, x: Tensor, **_: Any) -> Tensor:
        return through(m, x)

    def loss(m: Any, x: Tensor, y: Tensor, **_: Any) -> Tensor:
        return mean_loss(m, x, y)

    return Fragment(start=start, given=make, **{"body": body, "loss": loss, **more})


def to_blocks(
    change: Callable[..., Tensor], make: Callable[[torch.Generator, int], dict[str, Any]]
) -> Fragment:
    """Each block gets the arguments too, and ``change`` its input."""

    def call(block: Block, x: Tensor, **more: Any) -> Tensor:
        return block(change(x, **more))

    def start(m: Any, ids: Tensor, **_: Any) -> Tensor:
        return m.embed(ids)

    def body(m: Any, x: Tensor, **more: Any) -> Tensor:
        return through(m, x, **more)

    def loss(m: Any, x: Tensor, y: Tensor, **_: Any) -> Tensor:
        return mean_loss(m, x, y)

    return Fragment(block=lambda b: Wrapped(b, call), start=start, body=body, loss=loss, given=make)


def two_inputs(m: Any, ids: Tensor, labels: Tensor, other: Tensor) -> Tensor:
    """Both through the same blocks, one after the other."""
    a, b = (m.norm(through(m, m.embed(t))).mean(1) for t in (ids, other))
    return F.cosine_embedding_loss(a, b, torch.ones(len(a))) + F.cross_entropy(m.head(a), labels[:, 0])


def packed_rows(m: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """One long row of all."""
    x = through(m, m.embed(ids.reshape(1, -1)))
    return mean_loss(m, m.norm(x), labels.reshape(1, -1))


def sorted_rows(m: Any, ids: Tensor, labels: Tensor) -> Tensor:
    order = ids.sum(1).argsort()
    return mean_loss(m, m.norm(through(m, m.embed(ids[order]))), labels[order])


def time_first(m: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Blocks that want [batch, length] get it, all else is time first."""
    x = m.embed(ids.t())
    x = through(m, x.transpose(0, 1)).transpose(0, 1)
    return F.cross_entropy(m.head(m.norm(x)).flatten(0, 1), labels.t().flatten())


def reported(m: Any, ids: Tensor, labels: Tensor, name: str, flags: Any) -> Tensor:
    assert name == "train" and flags["scale"] == 2
    return mean_loss(m, m.norm(through(m, m.embed(ids) * flags["scale"])), labels)


def no_labels(m: Any, ids: Tensor, labels: Tensor, extra: Tensor | None = None) -> Tensor:
    assert extra is None
    return mean_loss(m, m.norm(through(m, m.embed(ids))), labels)


def mixture(loss: Any, **options: Any) -> Fragment:
    return Fragment(
        mlp=lambda: MixtureOfExperts(WIDTH, HIDDEN, num_experts=4, **options), loss=loss, together=True
    )


def rows_of(*shape: int) -> Callable[[torch.Generator, int], dict[str, Any]]:
    return lambda g, rows: {"c": torch.randn(rows, *shape, generator=g)}


def fixed(*shape: int) -> Callable[[torch.Generator, int], dict[str, Any]]:
    return lambda g, rows: {"c": torch.linspace(0, 1, torch.Size(shape).numel()).view(shape)}


STRUCTURE: dict[str, Fragment] = {
    # embeddings
    "positions as a parameter": Fragment(
        build=parameter("pos", 1, 16, WIDTH), start=lambda m, ids: m.embed(ids) + m.pos[:, : ids.shape[1]]
    ),
    "class token": Fragment(
        build=parameter("cls", 1, 1, WIDTH), start=with_class_token, loss=class_loss, length=11
    ),
    "class token of odd length": Fragment(
        build=parameter("cls", 1, 1, WIDTH), start=with_class_token, loss=class_loss
    ),
    "prompt": Fragment(build=parameter("prompt", 4, WIDTH), start=with_prompt, loss=after_prompt),
    "tied head": Fragment(build=tie),
    "in place": Fragment(build=parameter("cls", WIDTH), start=in_place_embedding),
    "largest norm": Fragment(build=limited_embedding),
    "one-hot": Fragment(start=one_hot),
    # between blocks
    "scalar mix": Fragment(build=parameter("mix", 5), body=scalar_mix),
    "u-net": Fragment(body=unet),
    "dense": Fragment(body=dense),
    "deep supervision": Fragment(forward=deep_supervision),
    "early exit": Fragment(body=early_exit),
    "scaled by depth": Fragment(body=scaled_by_depth),
    "rows of a parameter between blocks": Fragment(build=parameter("levels", 4, WIDTH), body=listed_scale),
    "half as long": Fragment(body=halved),
    "blocks in reverse": Fragment(body=backwards),
    "checkpointed blocks": Fragment(body=checkpointed(False)),
    "reentrant checkpoints": Fragment(body=checkpointed(True)),
    "first block without gradients": Fragment(body=in_eval),
    "detached in the middle": Fragment(body=detached_middle),
    "attributes of the first weight": Fragment(body=of_first_weight),
    "one block left out": Fragment(body=skipping),
    "a parameter in a closure": Fragment(build=scaled_by_a_closure),
    "a parameter in a list": Fragment(build=in_a_list, body=lambda m, x: through(m, x) * m.kept[0]),
    "forwards around those before": Fragment(build=around_old_forwards),
    "a block's forward around the one before": Fragment(build=one_forward_around),
    # what blocks take and give
    "a tuple of one": wrapped(lambda block, x: (block(x),), first_of_tuple),
    "a dictionary": wrapped(lambda block, d: {"x": block(d["x"])}, of_dictionary),
    "an auxiliary loss through blocks": Fragment(
        block=lambda b: Wrapped(b, lambda block, x, aux: ((y := block(x)), aux + aux_of(y))), forward=carried
    ),
    "auxiliary losses beside blocks": Fragment(
        block=lambda b: Wrapped(b, lambda block, x: ((y := block(x)), aux_of(y))), forward=collected
    ),
    # how blocks are held
    "one block for all": Fragment(build=shared_blocks),
    "one MLP for all": Fragment(build=shared_mlp),
    "sequential": Fragment(build=sequential, body=lambda m, x: m.blocks(x)),
    "dictionary": Fragment(
        build=dictionary, body=lambda m, x: [x := block(x) for block in m.blocks.values()][-1]
    ),
    "attributes": Fragment(build=attributes, body=lambda m, x: m.fourth(m.third(m.second(m.first(x))))),
    "two lists": Fragment(
        build=two_lists, body=lambda m, x: [x := block(x) for block in (*m.encoder, *m.decoder)][-1]
    ),
    # arguments
    "a vector of each row": given(lambda m, ids, c: m.embed(ids) + c[:, None], rows_of(WIDTH)),
    "features of positions": given(lambda m, ids, c: m.embed(ids) + c, fixed(LENGTH, WIDTH)),
    "types of tokens": given(
        lambda m, ids, c: m.embed(ids) + m.embed(c),
        lambda g, rows: {"c": torch.randint(0, 2, (rows, LENGTH), generator=g)},
    ),
    "a scalar": given(lambda m, ids, c: m.embed(ids) * c, lambda g, rows: {"c": torch.tensor(0.5)}),
    "features as many as rows": given(lambda m, ids, c: m.embed(ids) * (1 + c), fixed(WIDTH), rows=16),
    "rows as many as the length": given(lambda m, ids, c: m.embed(ids) + c[:, None], rows_of(WIDTH), rows=12),
    "classes as many as rows": Fragment(
        loss=lambda m, x, y, c: cross_entropy(m, x, y % 8, weight=F.pad(c, (0, VOCABULARY - 8), value=1.0)),
        body=lambda m, x, c: through(m, x),
        start=lambda m, ids, c: m.embed(ids),
        given=fixed(8),
    ),
    "a vector of each row to blocks": to_blocks(lambda x, c: x + c[:, None], rows_of(WIDTH)),
    "positions to blocks": to_blocks(lambda x, c: x + c, fixed(LENGTH, WIDTH)),
    "two batches, one after the other": Fragment(
        forward=two_inputs,
        given=lambda g, rows: {"other": torch.randint(0, VOCABULARY, (rows, LENGTH), generator=g)},
    ),
    "all rows in one": Fragment(forward=packed_rows),
    "sorted rows": Fragment(forward=sorted_rows),
    "time first": Fragment(forward=time_first),
    "a text and a mapping": Fragment(
        forward=reported, given=lambda g, rows: {"name": "train", "flags": {"scale": 2}}
    ),
    "an argument that is None": Fragment(forward=no_labels, given=lambda g, rows: {"extra": None}),
    # the library's mixture of experts
    "mixture": mixture(None),
    "mixture with both losses": mixture(
        lambda m, x, y: mean_loss(m, x, y) + 0.1 * balance(m) + 0.01 * router_z(m)
    ),
    "mixture with capacity": mixture(None, capacity_factor=1.0),
}
