"""What people write with mixtures of experts: as in one process with all rows, or refused by name before a step."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from lockstep import Accelerator
from lockstep.errors import UsageError
from parallel.expert.fragments import CELLS, Result, plainly, split
from parallel.tensor.architectures import make_model
from tests.frozen.verdicts import hold
from tests.verify.cells import Messages

FAST = (
    "two of a dictionary",
    "called twice, balanced",
    "tied modules",
    "tied weights",
    "lora in experts",
    "own router",
    "ignored tokens",
    "gradient penalty",
    "batch norm",
    "accumulated, clipped",
    "own experts",
    "weight used elsewhere",
    "on one rank",
    "in another order",
)


def run(names: list[str], verify: str) -> list[tuple[Result | str, str]]:
    """Of each cell the result or refusal, and what was said of the first batch."""
    messages = Messages()
    logger = logging.getLogger("lockstep.verify")
    logger.addHandler(messages)
    found = []
    for name in names:
        messages.texts.clear()
        found.append((split(CELLS[name], verify), " ".join(messages.texts)))
    logger.removeHandler(messages)
    return found


def apart(result: Result, name: str) -> float:
    """The larger of the losses' and the weights' relative differences, by norm, from one process's."""
    expected = plainly(CELLS[name])
    assert result.weights.keys() == expected.weights.keys()
    losses = [abs(a - b) / abs(b) for a, b in zip(result.losses, expected.losses, strict=True)]
    weights = [
        ((result.weights[n].double() - w.double()).norm() / w.double().norm()).item()
        for n, w in expected.weights.items()
    ]
    return max(*losses, *weights)


@pytest.mark.parametrize("verify", ["first_step", pytest.param("off", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, id="fast"),
        pytest.param(
            tuple(name for name in CELLS if name not in FAST), id="all", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_fragment_equals_one_process_or_is_refused(run_distributed: Any, names: Any, verify: str) -> None:
    wrong = []
    verdicts: list[dict[str, tuple[str, str]]] = []
    for rank, found in enumerate(run_distributed(run, 2, list(names), verify, timeout_s=300)):
        verdicts.append({})
        for name, (result, said) in zip(names, found, strict=True):
            verdicts[rank][name] = ("refused", result) if isinstance(result, str) else ("equal", "")
            refused = CELLS[name].refused
            if refused or isinstance(result, str):
                if not refused or not isinstance(result, str) or not re.search(refused, result):
                    wrong.append(f"{name} on rank {rank} is not refused as it should be: {result}")
                continue
            if (difference := apart(result, name)) > CELLS[name].tolerance:
                verdicts[rank][name] = ("differs", str(difference))
                wrong.append(f"{name} on rank {rank} is off by {difference:.2g}")
            if verify != "off" and rank == 0 and "was verified on the first batch: outputs" not in said:
                wrong.append(f"{name} was not verified: {said}")
    hold(f"expert, ep=2 verify={verify}", verdicts)
    assert not wrong, "\n".join(wrong)


MODELS = ("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")


def of_transformers() -> list[str]:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, parallel="ep=2")
    said = []
    for name in MODELS:
        with pytest.raises(UsageError) as caught:
            accelerator.prepare(make_model(name))
        said.append(str(caught.value))
    return said


def test_experts_of_transformers_are_refused_with_what_to_do(run_distributed: Any) -> None:
    for messages in run_distributed(of_transformers, 2):
        for name, message in zip(MODELS, messages, strict=True):
            experts = name.replace("ForCausalLM", "Experts")
            assert re.search(
                rf"{name} has no MixtureOfExperts .*mlp.experts', a {experts}, is none.*zero=3 instead of ep",
                message,
            )
