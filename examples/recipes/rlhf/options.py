"""What a run can be asked for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

SMALL = ("llama", "gpt2")  # models that are made here, for the small task


@dataclass(frozen=True)
class Options:
    algorithm: str = "ppo"
    model: str = "llama"
    reward_model: str | None = None
    prompts: str | None = None
    policy_parallel: str = "zero=3"
    value_parallel: str = "zero=2"
    reference_parallel: str = "zero=3"
    reward_parallel: str = "zero=3"
    iterations: int = 25
    prompts_per_iteration: int = 32
    group: int = 1
    answer_length: int = 6
    temperature: float = 1.0
    epochs: int = 2
    minibatches: int = 2
    micro_batch: int = 16
    generation_batch: int = 32
    learning_rate: float = 5e-3
    clip: float = 0.2
    kl_weight: float = 0.02
    gamma: float = 1.0
    lam: float = 0.95
    max_norm: float = 1.0
    seed: int = 0
    out: str | None = None
    save_every: int = 0
    stop_at: int = 0
    resume: bool = False


HELP = {
    "algorithm": "ppo (with a value model) or grpo (with a group of answers to each prompt)",
    "model": "llama or gpt2 (small ones that learn the small task), or the folder or name of a real one",
    "reward_model": "folder or name of a sequence classifier with the same tokenizer",
    "prompts": "a file with a prompt in each line, for a real model",
    "policy_parallel": "how the policy is spread",
    "value_parallel": "how the value model is spread (ppo)",
    "reference_parallel": 'how the frozen reference is spread; or "stream=cpu", "stream=FOLDER": block by block',
    "reward_parallel": "the same of the reward model",
    "iterations": "rollouts, each with its training",
    "prompts_per_iteration": "over all processes",
    "group": "answers to each prompt; at least 2 for grpo",
    "answer_length": "tokens at most",
    "temperature": "of sampling",
    "epochs": "how often each rollout is trained on",
    "minibatches": "optimizer steps in an epoch",
    "micro_batch": "rows of a process in a forward and backward; changes memory, not numbers",
    "generation_batch": "rows of a process that are generated together",
    "learning_rate": "of AdamW, for the policy and for the value model",
    "clip": "how far a probability's ratio counts (epsilon)",
    "kl_weight": "of the distance to the reference (beta)",
    "gamma": "discount (ppo)",
    "lam": "of generalised advantage estimation (ppo)",
    "max_norm": "gradients are clipped to this norm",
    "seed": "of weights, prompts, answers and order",
    "out": "folder for checkpoints",
    "save_every": "save at every so many boundaries; a boundary follows each rollout and each epoch",
    "stop_at": "end after so many boundaries",
    "resume": "go on from the newest checkpoint in --out, if there is one",
}

EXAMPLES = """examples:
  python examples/recipes/rlhf/train.py
  lockstep launch --nproc 4 examples/recipes/rlhf/train.py --algorithm grpo --group 8 --prompts-per-iteration 8
  lockstep launch --nproc 2 examples/recipes/rlhf/train.py --model gpt2 --reference-parallel stream=cpu
  lockstep launch --nproc 2 --mixed-precision bf16 examples/recipes/rlhf/train.py --out runs/rlhf --save-every 4
"""


def parse(arguments: list[str] | None = None) -> Options:
    """Options from a command line; `parser.error` for what cannot be."""
    parser = argparse.ArgumentParser(
        description="Trains a policy by reinforcement learning: PPO or GRPO, on one process or many.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in fields(Options):
        flag, text = "--" + field.name.replace("_", "-"), HELP[field.name]
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        else:
            kind = str if field.default is None else type(field.default)
            parser.add_argument(flag, type=kind, default=field.default, help=f"{text} ({field.default})")
    options = Options(**vars(parser.parse_args(arguments)))
    problem = problem_of(options)
    if problem:
        parser.error(problem)
    return options


def problem_of(options: Options) -> str:
    """What is wrong with these options, and what to do; empty: nothing."""
    rows = options.prompts_per_iteration * options.group
    positive = (
        "iterations",
        "prompts_per_iteration",
        "group",
        "answer_length",
        "epochs",
        "minibatches",
        "micro_batch",
    )
    for name in (*positive, "generation_batch", "temperature"):
        if getattr(options, name) <= 0:
            return f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be above 0."
    if options.algorithm not in ("ppo", "grpo"):
        return f"--algorithm is {options.algorithm}, but must be ppo or grpo."
    if options.algorithm == "grpo" and options.group < 2:
        return "--algorithm grpo compares the answers to one prompt, but --group is 1. Use 2 or more."
    if rows % options.minibatches:
        return f"{rows} rows are not divided by --minibatches {options.minibatches}. Choose a divisor."
    if options.model not in SMALL and not (options.reward_model and options.prompts):
        return f"--model {options.model} needs --reward-model and --prompts: the small task is for llama and gpt2."
    if (options.save_every or options.resume) and options.out is None:
        return "--save-every and --resume need a folder. Add --out FOLDER."
    return ""
