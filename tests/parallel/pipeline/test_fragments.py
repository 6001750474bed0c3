"""Each fragment of a model under pp=2 gives plain torch's numbers, or is refused by name."""

from __future__ import annotations

import contextlib
import functools
import io
import traceback
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.errors import LockstepError
from lockstep.parallel.pipeline import PipelineOptions
from tests.frozen.verdicts import hold
from tests.parallel.pipeline import architectures, fragments
from tests.parallel.pipeline.passing import PASSING
from tests.parallel.pipeline.scenarios import pipeline

FRAGMENTS = {**fragments.FRAGMENTS, **PASSING}
TOLERANCE = 2e-5


@functools.cache
def expected(name: str) -> Any:
    return fragments.trained(fragments.seeded(FRAGMENTS[name]), FRAGMENTS[name])


def outcome(name: str) -> tuple[str, str]:
    """Whether this rank has plain torch's numbers, refuses, or crashes."""
    fragment = FRAGMENTS[name]
    accelerator = Accelerator(cpu=True, parallel=f"pp=2 micro_batches=4 blocks=Block {fragment.words}")
    try:
        model: Any = accelerator.prepare(fragments.seeded(fragment))
        with contextlib.redirect_stderr(io.StringIO()):
            got = fragments.trained(model, fragment, accelerator.backward)
    except LockstepError as error:
        return "refused", str(error)
    except Exception:
        return "crashed", traceback.format_exc()
    finally:
        accelerator.free_memory()
    wanted = expected(name)
    for mine, theirs in zip(got[0], wanted[0], strict=True):
        if abs(mine - theirs) > TOLERANCE * max(1, abs(theirs)):
            return "differs", f"loss {got[0]} instead of {wanted[0]}"
    largest = max(g.norm().item() for g in wanted[1].values())
    for part, what in ((1, "gradient"), (2, "buffer")):
        for key, mine in got[part].items():
            apart = (mine - wanted[part][key]).double().norm().item()
            if apart > TOLERANCE * max(wanted[part][key].double().norm().item(), 1e-2 * largest):
                return "differs", f"{what} of {key} by {apart}"
    return "equal", ""


def outcomes(names: list[str]) -> dict[str, tuple[str, str]]:
    torch.manual_seed(0)
    return {name: outcome(name) for name in names}


def architecture(name: str) -> tuple[str, str]:
    """Whether one training call has plain torch's loss and gradients, is refused, or crashes."""
    plain, batch = architectures.build(name), architectures.batch(name)
    expected = plain(**batch).loss
    expected.backward()
    wanted = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
    largest = max(gradient.norm().item() for gradient in wanted.values())
    try:
        options = PipelineOptions(micro_batches=4, loss_reduction="whole")  # labels are padded
        model: nn.Module = pipeline(architectures.build(name), options)
        loss = model(**batch).loss
        loss.backward()
    except LockstepError as error:
        return "refused", str(error)
    except Exception:
        return "crashed", traceback.format_exc()
    apart = max(
        ((p.grad - wanted[key]).norm() / max(wanted[key].norm().item(), 1e-2 * largest)).item()
        for key, p in model.held_parameters()
        if p.grad is not None
    )
    if abs(loss.item() - expected.item()) < TOLERANCE and apart < TOLERANCE:
        return "equal", ""
    return "differs", f"loss {loss.item()} instead of {expected.item()}, gradients off by {apart}"


def each_architecture(names: list[str]) -> dict[str, tuple[str, str]]:
    return {name: architecture(name) for name in names}


def late_failure() -> str:
    """What a rank says when a block of the last stage fails in the second step, and its rank goes."""
    return failure_of(
        fragments.Fragment(block=fragments.attribute("calls", 0), hook=fragments.fails_later, at=(3,))
    )


def failure_in_backward() -> str:
    """The same where the backward of that block fails, of a loss that the loop computes."""
    return failure_of(
        fragments.Fragment(
            lambda m, x, y: m.head(x),
            outside=lambda z, y: z.square().mean(),
            hook=fragments.fails_backward,
            at=(3,),
        )
    )


def failure_of(fragment: fragments.Fragment) -> str:
    model: nn.Module = pipeline(fragments.seeded(fragment), PipelineOptions(micro_batches=4), ("Block",))
    try:
        fragments.trained(model, fragment)
    except Exception as error:
        if not isinstance(error, LockstepError):
            torch.distributed.destroy_process_group()
        return f"{type(error).__name__}: {error} {getattr(error, 'caused_by_rank', None)}"
    return "nothing"


def check(run_distributed: Any, names: list[str]) -> None:
    ranks = run_distributed(outcomes, 2, names, timeout_s=900)
    hold("pipeline, pp=2", ranks)
    for results in ranks:
        wrong = {}
        for name, (word, text) in results.items():
            says = FRAGMENTS[name].says
            if word != ("refused" if says else "equal") or any(part not in text for part in says):
                wrong[name] = (word, text)
        assert wrong == {}


def test_what_people_write_is_right_or_refused(run_distributed: Any) -> None:
    check(run_distributed, [name for name, fragment in FRAGMENTS.items() if fragment.fast])


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_everything_else_that_people_write_is_right_or_refused(run_distributed: Any) -> None:
    check(run_distributed, [name for name, fragment in FRAGMENTS.items() if not fragment.fast])


def test_experts_of_transformers_in_full_precision_are_right(run_distributed: Any) -> None:
    name = "MixtralForCausalLM"
    assert run_distributed(each_architecture, 2, [name], timeout_s=120) == [{name: ("equal", "")}] * 2


@pytest.mark.exhaustive
def test_architectures_of_transformers_are_right(run_distributed: Any) -> None:
    names = [*architectures.EQUAL, *architectures.FURTHER]
    assert len(names) >= 45 and len(names) - len(architectures.REFUSED) >= 38
    ranks = run_distributed(each_architecture, 2, names, timeout_s=500)
    hold("pipeline, architectures", ranks)
    for results in ranks:
        for name, said in architectures.REFUSED.items():
            assert [part for part in said if part not in results[name][1]] == [], results[name]
        others = {name: word for name, (word, _) in results.items() if word != "equal"}
        assert others == dict.fromkeys(architectures.REFUSED, "refused"), results


def test_a_rank_that_fails_is_named_on_the_others(run_distributed: Any) -> None:
    first, second = run_distributed(late_failure, 2, timeout_s=60)
    assert "Rank 1 failed in the forward of Model with ValueError: no more than one call." in first
    assert first.startswith("UsageError") and first.endswith(" 1")
    assert second.startswith("RuntimeError")


def test_a_rank_that_fails_in_a_backward_outside_is_named_on_the_others(run_distributed: Any) -> None:
    first, second = run_distributed(failure_in_backward, 2, timeout_s=60)
    assert "Rank 1 failed in the backward of Model with ValueError: no gradient." in first
    assert first.startswith("UsageError") and first.endswith(" 1")
    assert second.startswith(("ValueError", "RuntimeError"))
