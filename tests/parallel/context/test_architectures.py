"""Architectures of transformers: each, with its sequence split, equals itself in one process, or says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Accelerator, DistributedDataParallelKwargs
from lockstep.errors import UsageError
from parallel.context.comparing import fast_and_all, verdicts, what_is_wrong
from parallel.tensor.architectures import ARCHITECTURES, difference, make_batch, make_model
from tests.frozen.verdicts import hold

BY_THE_PROOF = r"with parallel='cp=2"
OF_A_CHUNK = r"mask (is )?\[1, 4, 4, 4\]"
REFUSED = {
    "Gemma2ForCausalLM": BY_THE_PROOF,
    "GPTJForCausalLM": BY_THE_PROOF,
    "DebertaV2ForMaskedLM": BY_THE_PROOF,
    "MPNetForMaskedLM": BY_THE_PROOF,
    "BloomForCausalLM": BY_THE_PROOF,
    "DogeForCausalLM": BY_THE_PROOF,
    "MambaForCausalLM": "called F.scaled_dot_product_attention",
    "Qwen3NextForCausalLM": BY_THE_PROOF,
    "T5ForConditionalGeneration": OF_A_CHUNK,
    "MT5ForConditionalGeneration": OF_A_CHUNK,
}
REFUSED_BY_RING = {
    "BeitForImageClassification": r"a mask, but with cp_method=ring .* or use cp_method=ulysses"
}
FAST = (
    "BartForConditionalGeneration",
    "FalconForCausalLM",
    "MambaForCausalLM",
)


def run(name: str, model: nn.Module, backward: Any = None) -> tuple[float, dict[str, Tensor]]:
    loss = model(**make_batch(name)).loss
    (backward or Tensor.backward)(loss)
    inner = getattr(model, "module", model)
    return loss.item(), {n: p.grad.clone() for n, p in inner.named_parameters() if p.grad is not None}


def split(method: str, names: list[str]) -> list[Any]:
    """Of each architecture the message that refuses it, or the loss and all gradients."""
    torch.set_num_threads(1)
    found: list[Any] = []
    for name in names:
        # Masks that a vision model may draw.
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(cpu=True, parallel=f"cp=2 cp_method={method}", kwargs_handlers=[unused])
        model = accelerator.prepare(make_model(name))
        try:
            found.append(run(name, model, accelerator.backward))
        except UsageError as error:
            found.append(str(error))
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("names", fast_and_all(FAST, ARCHITECTURES))
def test_each_architecture_equals_itself_or_says_why_not(run_distributed, method: str, names: Any) -> None:
    refused = REFUSED | (REFUSED_BY_RING if method == "ring" else {})
    expected = {name: run(name, make_model(name)) for name in names if name not in refused}
    ranks = [
        verdicts(dict(zip(names, found, strict=True)), expected, difference, 1e-4, 1e-3)
        for found in run_distributed(split, 2, method, list(names), timeout_s=240)
    ]
    hold(f"context, architectures {method}", ranks)
    wrong = [one for said in ranks for one in what_is_wrong(said, refused)]
    assert not wrong, "\n".join(wrong)


def test_at_least_45_architectures_are_tried_and_most_are_equal() -> None:
    assert len(ARCHITECTURES) >= 45
    assert len(REFUSED | REFUSED_BY_RING) <= 11
