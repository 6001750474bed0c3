"""Parts of weights and gradients that a script changes under tp: as in plain torch, or refused before the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel.tensor import problem

Edit = Callable[[Tensor], object]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def first_assigned(t: Tensor) -> None:
    t[0] = 0.0


def doubled_by_index(t: Tensor) -> None:
    t[1:] *= 2


def copy_changed(t: Tensor) -> None:
    t[1:].clone().mul_(0)


def put_back(t: Tensor) -> None:
    kept = t.data if isinstance(t, nn.Parameter) else t.clone()
    t.data = t.data * 2
    t.data = kept


EQUAL: dict[str, Edit] = {
    "put back": put_back,
    "all of it": lambda t: t.mul_(0.5),
    "assigned": first_assigned,
    "a clone": copy_changed,
    "a sign": lambda t: t.neg_(),
    "clamped": lambda t: t.clamp_(-0.01, 0.01),
}
REFUSED: dict[str, Edit] = {
    "multiplied by index": doubled_by_index,
    "rows": lambda t: t[1:].mul_(0),
    "a row": lambda t: t[0].zero_(),
    "narrow": lambda t: t.narrow(0, 0, 2).fill_(1.0),
    "chunk": lambda t: t.chunk(3)[0].neg_(),
    "view": lambda t: t.view(-1)[:3].zero_(),
    "flatten": lambda t: t.flatten()[t.abs().argmax()].zero_(),
    "reshape": lambda t: t.reshape(-1)[1].clamp_(0, 0),
    "ravel": lambda t: t.ravel()[:5].add_(1),
    "index twice": lambda t: t[1:][1:].mul_(0),
}


def edited(edit: Edit, of: str, prepare: Callable[..., Any], backward: Callable[[Tensor], None]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    backward(model(x).square().mean())
    with torch.no_grad():
        for parameter in model.parameters():
            edit(parameter if of == "weight" else parameter.grad)
    optimizer.step()
    return {name: problem.whole(p.detach()) for name, p in model.named_parameters()}


def outcomes(names: list[str]) -> dict[str, str]:
    torch.set_num_threads(1)
    found = {}
    for name in names:
        edit = (EQUAL | REFUSED)[name]
        for of in ("weight", "gradient"):
            expected = edited(edit, of, lambda *given: given, lambda loss: loss.backward())
            accelerator = Accelerator(cpu=True, parallel="tp=2", verify="off")
            try:
                got = edited(edit, of, accelerator.prepare, accelerator.backward)
                apart = max((got[key] - value).abs().max().item() for key, value in expected.items())
                said = "equal" if apart < 1e-5 else f"off by {apart:.2g}"
            except UsageError as error:
                said = str(error)
            finally:
                accelerator.free_memory()
            found[f"{name} of a {of}"] = said
    return found


def test_changes_of_a_whole_tensor_and_of_assigned_parts_are_plain_torchs(run_distributed: Any) -> None:
    for found in run_distributed(outcomes, 2, list(EQUAL)):
        assert {name: said for name, said in found.items() if said != "equal"} == {}


def test_changes_of_a_copied_part_are_refused_before_the_step(run_distributed: Any) -> None:
    for found in run_distributed(outcomes, 2, list(REFUSED)):
        assert {n: s for n, s in found.items() if "The part is a copy" not in s} == {}
