"""The four models of RLHF, and how each is placed.

policy     is trained      writes the answers
value      is trained      says how much reward is still to come (PPO)
reference  is frozen       the policy as it was: how far has it gone?
reward     is frozen       says how good an answer is
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from options import SMALL, Options
from task import EOS, LONGEST_PROMPT, PAD, VOCABULARY, KnownReward
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
)

from lockstep import Accelerator
from lockstep.big_modeling import cpu_offload, disk_offload


def small_config(name: str, answer_length: int) -> Any:
    """Of a model that trains in seconds. The GPT-2 has tied embeddings."""
    ids = {"pad_token_id": PAD, "bos_token_id": EOS, "eos_token_id": EOS}
    length = LONGEST_PROMPT + answer_length
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": length}
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(vocab_size=VOCABULARY, **sizes, **no_dropout, **ids)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=length, **sizes, **ids)


@dataclass
class Models:
    """`value` is None under grpo. `accelerator` is the policy's, which also gathers, prints and saves."""

    policy: nn.Module
    reference: nn.Module
    reward: nn.Module
    value: nn.Module | None
    accelerator: Accelerator
    optimizer: Any
    value_accelerator: Accelerator | None = None
    value_optimizer: Any = None


def build(options: Options, task: Any) -> dict[str, nn.Module]:
    """The models by their names, whole and on the CPU."""
    torch.manual_seed(options.seed)
    with_value, length = options.algorithm == "ppo", options.answer_length
    made: dict[str, nn.Module] = {}
    if options.model in SMALL:
        config = small_config(options.model, length)
        made["policy"] = AutoModelForCausalLM.from_config(config)
        if with_value:
            made["value"] = AutoModelForTokenClassification.from_config(one_label(config))
        made["reward"] = KnownReward(length)
    else:
        made["policy"] = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        if with_value:
            made["value"] = AutoModelForTokenClassification.from_pretrained(
                options.model, num_labels=1, dtype=torch.float32
            )
        made["reward"] = AutoModelForSequenceClassification.from_pretrained(
            options.reward_model, num_labels=1
        )
        made["reward"].config.pad_token_id = task.pad
    made["reference"] = copy.deepcopy(made["policy"])
    # Answers are drawn from the model itself, not from what its own configuration makes of it (top_k, penalties).
    policy: Any = made["policy"]
    policy.generation_config = GenerationConfig(pad_token_id=task.pad, eos_token_id=task.eos)
    for model in made.values():
        model.eval()  # no dropout: an answer has the same probability in the rollout and in training
    return made


def one_label(config: Any) -> Any:
    """The configuration of a model that says one number of each token."""
    changed = copy.deepcopy(config)
    changed.num_labels = 1
    return changed


def place(options: Options, task: Any) -> Models:
    """Build the models, whole on each process, and spread each as asked."""
    made = build(options, task)
    models: dict[str, Any] = {
        "reward": place_frozen(made["reward"], options.reward_parallel),
        "reference": place_frozen(made["reference"], options.reference_parallel),
        "value": None,
    }
    rate = options.learning_rate
    if "value" in made:  # what the run measures is written by the policy's accelerator alone
        placed = place_trained(made["value"], options.value_parallel, rate, run_dir="no")
        models |= dict(zip(("value_accelerator", "value", "value_optimizer"), placed, strict=True))
    placed = place_trained(made["policy"], options.policy_parallel, rate)
    models |= dict(zip(("accelerator", "policy", "optimizer"), placed, strict=True))
    return Models(**models)


def place_trained(model: nn.Module, parallel: str, learning_rate: float, **options: Any) -> Any:
    """(accelerator, model, optimizer). Each trained model has an Accelerator: its own strategy and its own steps."""
    accelerator = Accelerator(parallel=parallel, **options)
    # Where a gradient is nothing but rounding, as that of the first KL term, Adam would make steps of any sign of it.
    # With a larger eps, which PPO usually has, it makes nearly none.
    optimizer = torch.optim.AdamW(
        model.parameters(), learning_rate, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0
    )
    return accelerator, *accelerator.prepare(model, optimizer)


def place_frozen(model: nn.Module, parallel: str) -> nn.Module:
    """Sharded as `parallel` says; or whole, and brought to the device block by block: "stream=cpu", "stream=FOLDER"."""
    model.requires_grad_(False)
    if not parallel.startswith("stream="):
        prepared: nn.Module = Accelerator(parallel=parallel, run_dir="no").prepare(model)
        return prepared
    accelerator, place = Accelerator(run_dir="no"), parallel.removeprefix("stream=")
    if place == "cpu":
        return cpu_offload(model, execution_device=accelerator.device)
    return disk_offload(
        model, f"{place}/rank{accelerator.process_index}", execution_device=accelerator.device
    )
