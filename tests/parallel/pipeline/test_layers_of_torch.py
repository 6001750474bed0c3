"""torch's own Transformer layers and vision models under pp=2: plain torch's numbers, or refused by name."""

from __future__ import annotations

import contextlib
import io
import traceback
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.errors import LockstepError
from tests.frozen.verdicts import hold
from tests.parallel.pipeline.layers_of_torch import CASES, Case

TOLERANCE = 2e-5
FAST = ("both, time first",)


def trained(
    model: nn.Module, prepared: Any, case: Case, backward: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    loss = prepared(**case.batch())
    backward(loss)
    return loss.item(), {
        n: p.grad for n, p in model.named_parameters() if not p.is_meta and p.grad is not None
    }


def seeded(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make().train()


def outcome(case: Case) -> tuple[str, str]:
    """Whether this rank has plain torch's numbers, refuses, or crashes."""
    torch.set_num_threads(1)
    plain = seeded(case)
    loss, wanted = trained(plain, plain, case, lambda one: one.backward())
    accelerator = Accelerator(cpu=True, parallel=case.parallel)
    try:
        model = accelerator.prepare(seeded(case))
        with contextlib.redirect_stderr(io.StringIO()):
            got = trained(model.module, model, case, accelerator.backward)
    except LockstepError as error:
        return "refused", str(error)
    except Exception:
        return "crashed", traceback.format_exc()
    finally:
        accelerator.free_memory()
    largest = max(gradient.norm().item() for gradient in wanted.values())
    apart = max(
        ((got[1][n] - wanted[n]).norm() / max(wanted[n].norm().item(), 1e-2 * largest)).item() for n in got[1]
    )
    if abs(got[0] - loss) < TOLERANCE and apart < TOLERANCE:
        return "equal", ""
    return "differs", f"loss {got[0]} instead of {loss}, gradients by {apart}"


def outcomes(names: list[str]) -> dict[str, tuple[str, str]]:
    return {name: outcome(CASES[name]) for name in names}


def check(ranks: list[dict[str, tuple[str, str]]]) -> None:
    hold("pipeline, layers of torch", ranks)
    wrong = {
        name: (word, text)
        for results in ranks
        for name, (word, text) in results.items()
        if word != ("refused" if CASES[name].says else "equal")
        or any(part not in text for part in CASES[name].says)
    }
    assert wrong == {}


def test_some_layers_are_right_or_refused(run_distributed: Any) -> None:
    check(run_distributed(outcomes, 2, list(FAST), timeout_s=120))


@pytest.mark.exhaustive
def test_all_other_layers_are_right_or_refused(run_distributed: Any) -> None:
    check(run_distributed(outcomes, 2, [name for name in CASES if name not in FAST], timeout_s=300))
