"""A sharded model shows its whole weights for a while, and no rank waits for another inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.zero import summon


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ("zero=1", 2),
        ("zero=3 blocks=GPT2Block", 2),
        ("ddp", 2),
        ("zero=3 blocks=GPT2Block quantized_weights", 2),
    ],
)
def test_ranks_generate_as_often_and_as_long_as_they_like(run_distributed, parallel: str, ranks: int) -> None:
    results = run_distributed(summon.generates, ranks, parallel)
    is_sharded = parallel.startswith("zero")
    for rank, result in enumerate(results):
        assert result["right"] or "quantized" in parallel
        assert (result["calls"], result["inside"]) == (2 * rank, 0)
        if "quantized" not in parallel:
            assert result["gathered"] == (result["bytes"] if is_sharded else 0)
        by_block = summon.BLOCKS + 1 if "blocks" in parallel else 1  # small models are one group
        assert result["groups"] == (by_block if is_sharded else 0)
        assert result["kept"] == 0  # freed
        assert result["in step"] is (True if is_sharded else None)


@pytest.mark.parametrize("parallel", ["zero=2", "zero=3", "ddp"])
def test_a_pending_backward_and_an_open_window_are_not_disturbed(run_distributed, parallel: str) -> None:
    assert run_distributed(summon.between_forward_and_backward, 2, parallel) == [True, True]


@pytest.mark.parametrize("parallel", ["zero=3", "ddp"])
def test_an_exception_of_one_rank_is_raised_on_all_and_training_goes_on(
    run_distributed, parallel: str
) -> None:
    (other, went_on), (own, also) = run_distributed(summon.raises, 2, parallel)
    assert own == "on purpose" and "rank 1" in other.lower() and "on purpose" in other
    assert went_on and also


@pytest.mark.parametrize("parallel", ["zero=3", "ddp"])
def test_what_would_shard_or_send_inside_is_refused(run_distributed, parallel: str, tmp_path: Path) -> None:
    for backward, step, state_dict, save, nested in run_distributed(
        summon.refusals, 2, parallel, str(tmp_path / "saved")
    ):
        assert backward.startswith("backward was called inside summon_full_params")
        if parallel == "ddp":  # weights may be saved
            assert step.startswith("An optimizer steps inside summon_full_params")
            assert (state_dict, save) == ("", "")
        else:
            for said in (step, state_dict, save):
                assert "stay whole inside summon_full_params" in said
        assert nested == "True"


def test_a_model_of_another_accelerator_is_refused(run_distributed) -> None:
    for unprepared, elsewhere in run_distributed(summon.strangers, 2):
        assert "GPT2LMHeadModel, which was not prepared. Pass the model" in unprepared
        assert "GPT2LMHeadModel, which was not prepared by this Accelerator" in elsewhere


@pytest.mark.parametrize("parallel", ["tp=2", "pp=2"])
def test_a_model_whose_forward_is_split_is_refused(run_distributed, parallel: str) -> None:
    for said in run_distributed(summon.split, 2, parallel):
        assert f"but under {parallel[:2]} no rank computes with the whole GPT2LMHeadModel" in said


def test_changes_inside_are_kept_and_inference_mode_leaves_nothing_behind(run_distributed) -> None:
    assert run_distributed(summon.changed_by_hand, 2) == [(True, True)] * 2


def test_buffers_are_sent_once_and_weights_have_the_type_of_the_computation(run_distributed) -> None:
    assert run_distributed(summon.buffers_and_bf16, 2) == [(0, [1.0] * 4, "torch.bfloat16")] * 2
