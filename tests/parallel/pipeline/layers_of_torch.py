"""Models made of torch's own Transformer layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D, S, B = 13, 8, 6, 8


def layer(kind: Any, batch_first: bool, **options: Any) -> nn.Module:
    made: nn.Module = kind(D, 2, 16, dropout=0.0, batch_first=batch_first, **options)
    return made


class Encoder(nn.Module):
    """``time_first``: ids are [time, batch]."""

    def __init__(self, time_first: bool = False, nested: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        one = layer(nn.TransformerEncoderLayer, not time_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(one, 4, nn.LayerNorm(D), enable_nested_tensor=nested)  # type: ignore[arg-type]
        self.head = nn.Linear(D, V)

    def forward(
        self, ids: Tensor, labels: Tensor, mask: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        is_causal = None if mask is None else True
        x = self.encoder(self.embed(ids), mask, padding, is_causal=is_causal)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Decoder(nn.Module):
    def __init__(self, time_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.decoder = nn.TransformerDecoder(
            layer(nn.TransformerDecoderLayer, not time_first),  # type: ignore[arg-type]
            4,
            nn.LayerNorm(D),
        )
        self.head = nn.Linear(D, V)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        x = self.decoder(self.embed(ids), memory, mask, tgt_key_padding_mask=padding)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Both(nn.Module):
    def __init__(self, time_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.transformer = nn.Transformer(D, 2, 3, 3, 16, dropout=0.0, batch_first=not time_first)
        self.head = nn.Linear(D, V)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        x = self.transformer(
            self.embed(ids),
            self.embed(targets),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@dataclass
class Case:
    """``says``: words of the refusal, () where it is equal."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    parallel: str = "pp=2 micro_batches=4"
    says: tuple[str, ...] = ()


def _g() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def text(
    time_first: bool = False, mask: bool = False, padding: bool = False, targets: bool = False, time: int = S
) -> Any:
    shape = (time, B) if time_first else (B, time)
    found = {
        "ids": torch.randint(1, V, shape, generator=_g()),
        **({"targets": torch.randint(1, V, shape, generator=_g())} if targets else {}),
        "labels": torch.randint(1, V, shape, generator=_g()).flip(0),
    }
    if mask:
        found["mask"] = nn.Transformer.generate_square_subsequent_mask(S)
    if padding:
        found["padding"] = torch.zeros(B, S).masked_fill(
            torch.arange(S) > 2 + torch.arange(B)[:, None] % 4, -torch.inf
        )
    return found


def with_memory(time_first: bool = False, mask: bool = False) -> Any:
    shape = (5, B, D) if time_first else (B, 5, D)
    return {**text(time_first, mask), "memory": torch.randn(shape, generator=_g())}


TIME_FIRST = "pp=2 micro_batches=4 batch_dims=ids=1,labels=1"
CASES: dict[str, Case] = {
    "encoder": Case(Encoder, text),
    "encoder, masked": Case(Encoder, lambda: text(mask=True)),
    "encoder, padded": Case(lambda: Encoder(nested=False), lambda: text(padding=True)),
    "encoder, time first": Case(lambda: Encoder(True), lambda: text(True), TIME_FIRST),
    "decoder": Case(Decoder, with_memory),
    "decoder, time first": Case(
        lambda: Decoder(True), lambda: with_memory(True, True), f"{TIME_FIRST},memory=1"
    ),
    "both, time first": Case(
        lambda: Both(True), lambda: text(True, True, True, True), f"{TIME_FIRST},targets=1,padding=0"
    ),
    "encoder, time first, not said": Case(
        lambda: Encoder(True), lambda: text(True, time=4), says=("does not compute", "batch_dims=NAME=1")
    ),
}
