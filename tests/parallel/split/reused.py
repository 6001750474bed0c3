"""Fragments of other tests, in the common host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.nn import MixtureOfExperts
from tests.parallel.context import test_fragments as mixing
from tests.parallel.pipeline import fragments as pipeline
from tests.parallel.split.host import Fragment
from tests.parallel.tensor import fragments as tensor


class FlatBlock(pipeline.Block):
    """Attention and MLP in one module."""

    def __init__(self, fragment: pipeline.Fragment, is_special: bool, experts: bool) -> None:
        super().__init__(fragment.block if is_special else None, fragment.hook if is_special else None)
        self.qkv = nn.Linear(pipeline.D, 3 * pipeline.D)
        if experts:
            self.experts = MixtureOfExperts(pipeline.D, 2 * pipeline.D, num_experts=4)

    def forward(self, x: Tensor, *args: Any) -> Any:
        if self.hook is not None:
            x = self.hook(self, x, *args)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return x + self.experts(x) if hasattr(self, "experts") else x


class FlatModel(pipeline.Model):
    def __init__(self, fragment: pipeline.Fragment, experts: bool) -> None:
        super().__init__(fragment)
        self.blocks = nn.ModuleList(FlatBlock(fragment, i in fragment.at, experts) for i in range(4))
        if fragment.root is not None:
            fragment.root(self)


def _of_pipeline(fragment: pipeline.Fragment) -> Fragment:
    return Fragment(
        model=lambda experts: FlatModel(fragment, experts),
        outside=fragment.outside,
        given=lambda generator, rows: fragment.kwargs,
        rows=pipeline.B,
        length=pipeline.L,
        vocabulary=pipeline.V,
        padded=fragment.padded,
        options={"pp": fragment.words},
    )


def _of_tensor(fragment: tensor.Fragment) -> Fragment:
    make = fragment.make
    if isinstance(make(), (tensor.Attention, tensor.BiasArgument)):
        return Fragment(attention=make, rows=4, length=8)
    return Fragment(mlp=make, rows=4, length=8)


def _of_context(function: Callable[[Any, Tensor], Tensor]) -> Fragment:
    def make() -> nn.Module:
        return tensor.Whole(lambda m, x: function(m, x), linear=nn.Linear(mixing.WIDTH, mixing.WIDTH))

    return Fragment(mlp=make, at=(1,), rows=8, length=mixing.LENGTH)


def _between(function: Callable[[Tensor], Tensor]) -> Fragment:
    def body(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = function(block(x))
        return x

    return Fragment(body=body, rows=8, length=16)


OF_PIPELINES_ALONE = ("time first", "sum by the number of items", "positions of another length")

REUSED: dict[str, Fragment] = {
    **{f"layer: {name}": _of_tensor(fragment) for name, fragment in tensor.FRAGMENTS.items()},
    **{
        f"model: {name}": _of_pipeline(fragment)
        for name, fragment in pipeline.FRAGMENTS.items()
        if "said" not in name and name not in OF_PIPELINES_ALONE
    },
    **{f"block: {name}": _of_context(f) for name, f in {**mixing.RIGHT, **mixing.MIXING}.items()},
    **{f"between: {name}": _between(function) for name, function in mixing.BETWEEN.items()},
}
