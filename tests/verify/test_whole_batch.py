"""What a check says of the ranks' batches as one: against plain torch's gradients of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.testing import compare_parity

ROWS, RANKS = 8, 2
CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 5.0])


# name -> the loss of outputs (rows, 3) and labels (rows,)
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": partial(F.cross_entropy, reduction="sum"),
    "class weights": partial(F.cross_entropy, weight=CLASS_WEIGHTS),
    "batch norm": F.cross_entropy,
    "dropout": F.cross_entropy,
    "strings": F.cross_entropy,
}


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer, list[object], Callable[..., Tensor]]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 6), nn.Tanh()]
    layers += {"batch norm": [nn.BatchNorm1d(6)], "dropout": [nn.Dropout(0.5)]}.get(name, [])
    model = nn.Sequential(*layers, nn.Linear(6, 3))
    batches = [(torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,)), name) for _ in range(RANKS)]
    if name == "strings":
        batches = [(*batch[:2], str(number)) for number, batch in enumerate(batches)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), list(batches), partial(loss_of, name)


def loss_of(name: str, model: nn.Module, batch: tuple[Tensor, Tensor, str]) -> Tensor:
    return LOSSES[name](model(batch[0]), batch[1])


def farthest(name: str) -> tuple[str, float]:
    """By plain torch: the mean of the ranks' gradients, by name, and the largest distance of the whole batch's."""

    def gradients(batches: list[tuple[Tensor, Tensor, str]]) -> dict[str, Tensor]:
        model = make(name)[0]
        for batch in batches:
            (loss_of(name, model, batch) / len(batches)).backward()
        return {
            key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None
        }

    batches: list[tuple[Tensor, Tensor, str]] = make(name)[2]  # type: ignore[assignment]
    features, labels, _ = zip(*batches, strict=True)
    in_turn, whole = gradients(batches), gradients([(torch.cat(features), torch.cat(labels), name)])
    apart = {key: float((whole[key] - one).norm() / one.norm()) for key, one in in_turn.items()}
    return max(apart.items(), key=lambda pair: pair[1])


@pytest.mark.parametrize("name", LOSSES)
def test_the_report_says_whether_one_batch_of_all_rows_has_the_same_gradients(name: str) -> None:
    report = compare_parity(partial(make, name), nproc=RANKS, steps=1)
    assert report.agrees
    (note,) = (note for note in report.verdict.notes if "in turn" in note)
    if name in ("dropout", "strings"):
        why = {"dropout": "random numbers are drawn", "strings": "they cannot be joined"}[name]
        assert f"was not compared, as {why}" in note or f"was not compared: {why}" in note
        return
    _, apart = farthest(name)
    assert ("has the same gradients" in note) == (apart < 1e-5)
    assert ("not a mean over rows" in note) == (apart > 1e-3)
