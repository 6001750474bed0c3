"""Trainer, TRL, PEFT, sentence-transformers and diffusers, unmodified, by alias against the installed Accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.friends.compare import difference
from tests.compat.friends.packages import deepspeed_package
from tests.compat.friends.runs import MOST, end, far, start

ALONE = """
    trainer/plain trainer/saved trainer/resumed trainer/lora trainer/t5 trl/sft trl/grpo embedding/ranking
    diffusion/unconditional diffusion/unconditional_resumed
"""
ALONE_AGAIN = """
    trainer/epochs trainer/bf16 trainer/best trainer/workers trainer/by_length trainer/by_length_dropout
    trainer/recompute trainer/ia3 trainer/prompt trainer/classification trl/sft_lora trl/dpo trl/dpo_lora trl/kto
    trl/reward trl/rloo embedding/cached_ranking embedding/similarity
"""
ARGUMENTS = "gathered_objects num_steps"
ARGUMENTS_AGAIN = """
    split_batches dispatch_batches dispatch_and_split uneven_batches unseeded_sampler non_blocking sync_each_batch
    sync_with_dataloader configured_state data_seed drop_last persistent persistent_in_order unused static_graph
    bf16_eval fp16_eval compile neftune emptied_cache counted_tokens counted_unpadded local_averages smoothing
    eval_accumulation apart loss_only smaller_batches deterministic recomputed decay adafactor on_plateau sequential
    no_clipping
"""
ARGUMENTS_ALONE = {
    "uneven_batches": "ranks with fewer batches are waited for: for ever there, until the watch ends the run here",
    "persistent": "batches that overtake each other are refused on several processes",
    "unseeded_sampler": "several processes of Accelerate draw another order than one does; here they draw that of one",
}
"""Arguments that are compared on one process only, and why."""
ARGUMENTS_TOGETHER = " ".join(
    name for name in f"{ARGUMENTS} {ARGUMENTS_AGAIN} backend".split() if name not in ARGUMENTS_ALONE
)
EXPERIMENTAL = "orpo cpo tpo online_dpo gkd distillation sdft gmpo a2po sdpo"

ALONE += " ".join(f" argument/argument_{name}" for name in ARGUMENTS.split())
ALONE_AGAIN += " ".join(f" argument/argument_{name}" for name in ARGUMENTS_AGAIN.split())
ALONE_AGAIN += " ".join(f" experimental/{name}" for name in EXPERIMENTAL.split())
TOGETHER = "trainer/kept trainer/taken_up"
"""On two processes under DDP, with Accelerate as well."""
TOGETHER_AGAIN = """
    trainer/plain trainer/kept trainer/taken_up trainer/epochs trainer/workers trainer/by_length
    trainer/by_length_dropout trainer/best trainer/saved trainer/resumed trainer/recompute trainer/lora trainer/ia3
    trainer/prompt trainer/t5 trainer/classification trl/sft trl/sft_lora trl/dpo trl/dpo_lora trl/kto trl/reward
    trl/grpo trl/rloo embedding/ranking embedding/cached_ranking embedding/similarity diffusion/unconditional
"""
# Of two numbers near zero: tpo.
EXPERIMENTAL_SHARDED = " ".join(f"experimental/{name}" for name in EXPERIMENTAL.split() if name != "tpo")
SHARDED = "trainer/kept/zero=3 trainer/taken_up/zero=3"
EVERY_STAGE = " ".join(
    f"{word}/zero={stage}"
    for stage in (1, 2, 3)
    for word in f"{TOGETHER_AGAIN} {EXPERIMENTAL_SHARDED}".split()
)
TOGETHER_AGAIN += " ".join(f" argument/argument_{name}" for name in ARGUMENTS_TOGETHER.split())
TOGETHER_AGAIN += " ".join(f" experimental/{name}" for name in EXPERIMENTAL.split())
BY_ARGUMENTS = "fsdp_full_shard last_fsdp deepspeed_2 deepspeed_3"
"""Sharded by ``fsdp=`` and ``deepspeed=`` of ``TrainingArguments``, which there train by DDP."""
BY_ARGUMENTS_AGAIN = f"""
    {BY_ARGUMENTS} fsdp_shard_grad_op fsdp_reshard fsdp_offload fsdp_by_size fsdp_no_wrap fsdp_recompute fsdp_version_1
    fsdp_version_1_grad fsdp_sharded_states deepspeed_none deepspeed_1 deepspeed_2_offload deepspeed_3_offload
"""
RESUMED = "sharded/last_taken_up_deepspeed sharded/last_taken_up_fsdp/zero=3"


@pytest.fixture(autouse=True)
def libraries() -> None:
    for name in ("accelerate", "transformers", "trl", "peft", "diffusers", "sentence_transformers"):
        pytest.importorskip(name)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words", [ALONE, pytest.param(ALONE_AGAIN, marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_one_process_trains_bit_for_bit_as_with_accelerate(words: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    end(start(words, here, True, 1), start(words, there, False, 1))
    # Accelerate's loaders begin the epoch anew, in another order, where ours continue.
    assert far(words.replace("diffusion/unconditional_resumed", ""), here, there, "alone") == []
    if "unconditional_resumed" in words:
        assert far("diffusion/unconditional_resumed", here, here, "alone") == []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("together", "sharded", "by_arguments"),
    [
        (TOGETHER, SHARDED, BY_ARGUMENTS),
        pytest.param(TOGETHER_AGAIN, EVERY_STAGE, BY_ARGUMENTS_AGAIN, marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_two_processes_and_shards_train_as_with_accelerate_and_resume_on_one(
    together: str, sharded: str, by_arguments: str, tmp_path: Path
) -> None:
    here, there, alone = tmp_path / "here", tmp_path / "there", tmp_path / "alone"
    package = deepspeed_package(tmp_path)
    words = " ".join([together, sharded, *(f"sharded/{word}" for word in by_arguments.split())])
    whole = "sharded/whole sharded/whole_last"
    # There the last cell of diffusers leaves the group, which gloo does not always find again.
    end(start(words, here, True, 2, packages=package), start(f"{whole} {together}", there, False, 2))
    assert far(together, here, there, "ddp") == []
    assert far(sharded, here, there, "zero") == []
    for word in by_arguments.split():
        far_from_whole = difference(
            here / word, there / ("whole_last" if word.startswith("last") else "whole")
        )
        assert max(far_from_whole) <= MOST["zero"], word
    # One process goes on from two, with as many samples in a step: twice the windows.
    again = {"CELLS_FROM": str(here), "CELLS_WINDOW": "4"}
    end(start(f"trainer/taken_up/zero=3 {RESUMED}", alone, True, 1, packages=package, **again))
    # Means over other evaluation batches differ, weights do not.
    for word in f"trainer/taken_up/zero=3 {RESUMED}".split():
        name = word.partition("/")[2].replace("/", "-")
        other = "taken_up" if word.startswith("trainer") else "whole_last"
        assert difference(alone / name, there / other)[1] <= MOST["zero"], word
