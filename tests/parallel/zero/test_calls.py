"""A sharded model is used in other ways than by calling it."""

from __future__ import annotations

import pytest

from parallel.zero import calls, weight_losses
from tests.marks import needs_a_restart


@pytest.mark.parametrize("stage", [1, 3])
def test_methods_and_inner_modules_compute_and_train_as_the_whole_model_does(
    run_distributed, stage: int
) -> None:
    assert run_distributed(calls.problems, 2, stage) == [[]] * 2


@needs_a_restart
def test_what_computes_without_a_tensor_is_refused_with_what_to_call(run_distributed) -> None:
    for numel, refused, raised, right in run_distributed(calls.others, 2):
        assert (numel, raised, right) == (True, "on purpose", True)
        assert "register_fsdp_forward_method(model, 'draw')" in refused


def test_a_part_of_a_block_that_is_used_by_itself_is_refused_with_what_to_do(run_distributed) -> None:
    for said in run_distributed(calls.inside_of_a_block, 2):
        assert len(said) == 3
        for sentence in said:
            assert (
                "of which each rank has a part, was combined with a plain tensor of shape (2, 8)" in sentence
            )
            assert "Call the block or the model" in sentence and "GatheredParameters" in sentence


def test_a_loss_of_weights_and_its_gradient_are_those_of_the_whole_weights(run_distributed) -> None:
    assert run_distributed(weight_losses.wrong, 2, 3) == [[]] * 2
