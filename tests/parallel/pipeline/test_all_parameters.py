"""Loops over all parameters of a pipelined model give plain torch's numbers, or are refused on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel.pipeline import all_parameters
from parallel.pipeline.all_parameters import EQUAL, REFUSED, Run

TOLERANCE = 1e-5


def trained(name: str) -> dict[str, torch.Tensor]:
    """What the loop leaves in plain torch."""
    model = all_parameters.new()
    run = Run(
        model,
        list(model.parameters()),
        lambda one: one,
        lambda loss: loss.backward(),
        nn.utils.clip_grad_norm_,
    )
    EQUAL[name](run)
    return {key: p.detach() for key, p in model.named_parameters()}


def outcome(name: str, parallel: str) -> str:
    accelerator = Accelerator(cpu=True, parallel=parallel, verify="off")
    model = all_parameters.new()
    listed = list(model.parameters())
    prepared = accelerator.prepare(model)
    run = Run(prepared, listed, accelerator.prepare, accelerator.backward, accelerator.clip_grad_norm_)
    try:
        (EQUAL | REFUSED)[name](run)
        if name in REFUSED:
            return "ran"
        found = accelerator.get_state_dict(prepared)
    except UsageError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        accelerator.free_memory()
    wanted = trained(name)
    # Rank 0 has all of it.
    assert found.keys() == wanted.keys() or not accelerator.is_main_process
    off = max(((value - wanted[key]).abs().max().item() for key, value in found.items()), default=0.0)
    return "equal" if off < TOLERANCE else f"off by {off:.1e}"


def outcomes(names: list[str], parallel: str) -> dict[str, str]:
    torch.set_num_threads(1)
    return {name: outcome(name, parallel) for name in names}


@pytest.mark.filterwarnings("ignore:The loss is computed outside the model")
@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ("pp=2", 2),
        pytest.param("pp=4", 4, marks=pytest.mark.exhaustive),
        pytest.param("pp=2 zero=3", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_what_pairs_parameters_gives_plain_torchs_numbers_and_numbers_of_all_are_refused(
    run_distributed: Any, parallel: str, ranks: int
) -> None:
    refused = [] if "zero" in parallel else list(REFUSED)
    for found in run_distributed(outcomes, ranks, [*EQUAL, *refused], parallel, timeout_s=240):
        assert {name: said for name, said in found.items() if name in EQUAL and said != "equal"} == {}
        assert {name: found[name] for name in refused if not found[name].startswith("refused: ")} == {}


def test_one_process_lists_its_own_parameters() -> None:
    for name in EQUAL:
        assert trained(name)
