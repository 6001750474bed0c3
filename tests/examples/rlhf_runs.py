"""What ranks do in the tests of the RLHF recipe, and the same in plain torch, in one process."""

from __future__ import annotations

import copy
import importlib
import io
import math
import os
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lockstep import Accelerator, GradScalerKwargs
from lockstep.comm import CommCounter

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPE = EXAMPLES / "recipes" / "rlhf"
MODULES = ("train", "models", "options", "rollout", "learn", "checkpoints", "task", "ppo", "grpo")
LOADED: dict[str, Any] = {}
PPO = {"iterations": 2, "prompts_per_iteration": 8, "micro_batch": 3, "generation_batch": 3}
GRPO = {**PPO, "algorithm": "grpo", "model": "gpt2", "group": 4, "prompts_per_iteration": 3}  # 12 rows


def recipe(name: str) -> Any:
    """A module of the recipe, which other tests do not see: theirs have the same names."""
    others = {known: sys.modules.pop(known) for known in MODULES if known in sys.modules}
    sys.modules.update(LOADED)
    sys.path.insert(0, str(RECIPE))
    try:
        return importlib.import_module(name)
    finally:
        LOADED.update({known: sys.modules.pop(known) for known in MODULES if known in sys.modules})
        sys.modules.update(others)
        sys.path.remove(str(RECIPE))


def options(**changes: Any) -> Any:
    return recipe("options").Options(**changes)


def run(**changes: Any) -> list[dict[str, float]]:
    """The history of a run, without what is only about time."""
    with redirect_stdout(io.StringIO()):
        history = recipe("train").train(options(**changes))
    return [{name: value for name, value in now.items() if "/s" not in name} for now in history]


def run_in(precision: str, **changes: Any) -> list[dict[str, float]]:
    """The same with ``--mixed-precision`` of the launch.

    In fp16 with a loss scale at which nothing overflows: a rank's loss is a mean over fewer rows, so that with the
    usual first scale of 65536 several ranks skip more of the first steps than one.
    """
    os.environ["LOCKSTEP_MIXED_PRECISION"] = precision
    scaled = partial(Accelerator, kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    try:
        with mock.patch.object(
            recipe("models"), "Accelerator", scaled if precision == "fp16" else Accelerator
        ):
            return run(**changes)
    finally:
        del os.environ["LOCKSTEP_MIXED_PRECISION"]


# Generation -------------------------------------------------------------------------------------------


def generates(count: int, ends_at_once: tuple[int, ...] = (), **changes: Any) -> dict[str, Any]:
    """The answers to `count` prompts, what was sent for them, and what each forward of this rank got.

    `ends_at_once`: rows whose first token is the end.
    """
    rollout, given = recipe("rollout"), options(generation_batch=2, **changes)
    task = recipe("task").SmallTask(given.seed)
    models = recipe("models").place(given, task)
    prompts = task.prompts(0, count)
    ids, mask = rollout.padded(prompts, task.pad)

    class EndsAtOnce(rollout.SampleByRow):
        def __init__(self, seed: int, iteration: int, rows: Tensor, temperature: float) -> None:
            super().__init__(seed, iteration, rows, temperature)
            self.ended = torch.tensor([row in ends_at_once for row in rows.tolist()])

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores = super().__call__(input_ids, scores)
            scores[self.ended, task.eos] = math.inf
            return scores

    widths: list[int] = []
    hook = models.policy.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    sampler, rollout.SampleByRow = rollout.SampleByRow, EndsAtOnce if ends_at_once else rollout.SampleByRow
    try:
        with CommCounter() as counter:
            answers = rollout.generate(models, ids, mask, task, given, iteration=0)
    finally:
        rollout.SampleByRow = sampler
        hook.remove()
    weights = [record for record in counter.records if record.payload_bytes > 2000]
    plain, ranks = recipe("models").build(given, task)["policy"], models.accelerator.num_processes

    def padded_rows(rows: int) -> int:
        """Each process has as many rows of a weight, of which the last ones may be padding."""
        return -(-rows // ranks) * ranks

    return {
        "answers": answers,
        "widths": widths,
        "prompt width": ids.shape[1],
        "gathered": sum(record.payload_bytes for record in weights),
        "bytes": sum(padded_rows(len(p)) * p[0].nbytes for p in plain.parameters()),
        "mask": mask,
    }


def answers_by_hand(
    count: int, ends_at_once: tuple[int, ...] = (), **changes: Any
) -> tuple[Tensor, list[int]]:
    """The same in plain torch: row by row without padding, each token from the whole text, without a cache.

    Also how many tokens each answer has.
    """
    rollout, given = recipe("rollout"), options(**changes)
    task = recipe("task").SmallTask(given.seed)
    policy = recipe("models").build(given, task)["policy"]
    answers, lengths = torch.full((count, given.answer_length), task.pad), [given.answer_length] * count
    for row, prompt in enumerate(task.prompts(0, count)):
        text, generator = list(prompt), rollout.row_generator(given.seed, 0, row)
        for place in range(given.answer_length):
            with torch.no_grad():
                probabilities = (policy(torch.tensor([text])).logits[0, -1] / given.temperature).softmax(-1)
            # The first of several exponential clocks that run at these rates.
            times = -torch.rand(len(probabilities), generator=generator).log() / probabilities
            token = task.eos if row in ends_at_once else int(times.argmin())
            answers[row, place] = token
            text.append(token)
            if token == task.eos:
                lengths[row] = place + 1
                break
    return answers, lengths


# Training ---------------------------------------------------------------------------------------------


def trains_once(**changes: Any) -> dict[str, Any]:
    """A rollout, the weights before and after training on it, and the losses of each epoch."""
    given = options(**changes)
    task = recipe("task").SmallTask(given.seed)
    models = recipe("models").place(given, task)
    prompts = [prompt for prompt in task.prompts(0, given.prompts_per_iteration) for _ in range(given.group)]
    rollout, _ = recipe("rollout").collect(models, prompts, task, given, 0)
    losses = [recipe("learn").train_epoch(models, rollout, given, 0, epoch) for epoch in range(given.epochs)]
    found: dict[str, Any] = {"rollout": rollout.state_dict(), "losses": losses}
    found["policy"] = copy.deepcopy(models.accelerator.get_state_dict(models.policy))
    if models.value is not None:
        found["value"] = copy.deepcopy(models.value_accelerator.get_state_dict(models.value))
    return found


def trained_by_hand(rollout: dict[str, Tensor], **changes: Any) -> dict[str, Any]:
    """The same from that rollout: plain models, one batch, each formula written out token by token."""
    given = options(**changes)
    made = recipe("models").build(given, recipe("task").SmallTask(given.seed))
    count, length = rollout["is_answer"].shape
    texts = [
        (rollout["tokens"][row][rollout["mask"][row].bool()], int(rollout["is_answer"][row].sum()))
        for row in range(count)
    ]

    def outputs(name: str, row: int) -> Tensor:
        """Log-probabilities or values of one answer's tokens, from its text without padding."""
        text, answer = texts[row]
        logits = made[name](text[None]).logits[0]
        if name == "value":
            return logits[-answer - 1 : -1, 0]
        chosen = (logits[:-1] / given.temperature).log_softmax(-1).gather(1, text[1:, None])
        return chosen[-answer:, 0]

    with torch.no_grad():
        names = ["policy", "reference", *(["value"] if "value" in made else [])]
        old = {name: [outputs(name, row) for row in range(count)] for name in names}
    targets = [{"policy": old["policy"][row], "reference": old["reference"][row]} for row in range(count)]
    if given.algorithm == "ppo":
        flat = []
        for row, target in enumerate(targets):
            score, values = rollout["rewards"][row].item(), old["value"][row].tolist()
            ratios = (target["policy"] - target["reference"]).tolist()
            rewards = [-given.kl_weight * ratio for ratio in ratios]
            rewards[-1] += score
            deltas = [
                reward + given.gamma * later - value
                for reward, value, later in zip(rewards, values, [*values[1:], 0.0], strict=True)
            ]
            weights = [(given.gamma * given.lam) ** steps for steps in range(length)]
            advantages = [
                sum(w * d for w, d in zip(weights, deltas[place:], strict=False))
                for place in range(len(deltas))
            ]
            target["advantage"] = torch.tensor(advantages)
            target["return"] = target["advantage"] + old["value"][row]
            flat += advantages
        mean = sum(flat) / len(flat)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in flat) / len(flat))
        for target in targets:
            target["advantage"] = (target["advantage"] - mean) / deviation
    else:
        for start in range(0, count, given.group):
            scores = rollout["rewards"][start : start + given.group].tolist()
            mean = sum(scores) / given.group
            deviation = math.sqrt(sum((x - mean) ** 2 for x in scores) / (given.group - 1))
            for row, score in enumerate(scores, start):
                value = (score - mean) / (deviation + 1e-4)
                targets[row]["advantage"] = torch.full_like(old["policy"][row], value)

    def policy_terms(row: int) -> Tensor:
        now, target = outputs("policy", row), targets[row]
        terms = []
        for p, before, reference, a in zip(
            now, target["policy"], target["reference"], target["advantage"], strict=True
        ):
            ratio = torch.exp(p - before)
            bounded = min(max(ratio, torch.tensor(1 - given.clip)), torch.tensor(1 + given.clip))
            term = -min(ratio * a, bounded * a)
            if given.algorithm == "grpo":
                term = term + given.kl_weight * (torch.exp(reference - p) - (reference - p) - 1)
            terms.append(term)
        return torch.stack(terms)

    def value_terms(row: int) -> Tensor:
        terms = []
        for v, before, target in zip(
            outputs("value", row), old["value"][row], targets[row]["return"], strict=True
        ):
            bounded = min(max(v, before - given.clip), before + given.clip)
            terms.append(max((v - target) ** 2, (bounded - target) ** 2) / 2)
        return torch.stack(terms)

    optimizers = {
        name: torch.optim.AdamW(
            made[name].parameters(), given.learning_rate, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0
        )
        for name in ("policy", *(["value"] if "value" in made else []))
    }
    losses = []
    for epoch in range(given.epochs):
        order = torch.randperm(count, generator=recipe("rollout").row_generator(given.seed, 0, -1 - epoch))
        found: dict[str, list[float]] = {name: [] for name in optimizers}
        for rows in order.split(count // given.minibatches):
            for name, terms_of in (("policy", policy_terms), ("value", value_terms)):
                if name not in optimizers:
                    continue
                terms = [terms_of(row) for row in rows.tolist()]
                by_answer = given.algorithm == "grpo"
                loss = torch.stack([t.mean() for t in terms]).mean() if by_answer else torch.cat(terms).mean()
                optimizers[name].zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(made[name].parameters(), given.max_norm)
                optimizers[name].step()
                found[name].append(loss.item())
        losses.append({f"{name} loss": sum(values) / len(values) for name, values in found.items()})
    return {"losses": losses, "old": old, **{name: made[name].state_dict() for name in optimizers}}


# Real models, and what goes wrong ---------------------------------------------------------------------

WORDS = ["<pad>", "<eos>", "<unk>", "red", "green", "blue", "one", "two", "three"]


def save_models(folder: Path) -> dict[str, str]:
    """Folders as of real models, and a file of prompts; as options."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, bos_token_id=None, eos_token_id=1, **sizes)
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    lines = ["red green", "one", "two three blue one", "blue", "green green green"]
    (folder / "prompts.txt").write_text("\n".join(lines), encoding="utf-8")
    return {
        "model": str(folder / "policy"),
        "reward_model": str(folder / "reward"),
        "prompts": str(folder / "prompts.txt"),
    }


DISTURBED = """
import json, os, signal, sys
sys.path.insert(0, {recipe!r})
import rollout
from checkpoints import Checkpoints
from options import parse
from train import train

marker, kind, rank = {marker!r}, {kind!r}, int(os.environ["RANK"])

def disturb():
    if rank == 1 and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGTERM)

boundary = Checkpoints.boundary
def disturbed_boundary(self):
    if kind == "terminate" and self.progress.boundary == 3:
        disturb()
    return boundary(self)
Checkpoints.boundary = disturbed_boundary

call = rollout.SampleByRow.__call__
def disturbed_call(self, ids, scores):
    if kind != "terminate" and self.iteration == 1:
        disturb()
    return call(self, ids, scores)
rollout.SampleByRow.__call__ = disturbed_call

history = train(parse())
if rank == 0:
    json.dump(history, open({result!r}, "w"))
"""
"""A run in which something happens to rank 1, once: in the middle of the second generation, or at a boundary."""
