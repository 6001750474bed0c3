"""Answers of the policy, and what the models say of them.

The rows (prompts, or answers) of an iteration are numbered over all processes. Row 5 is drawn with the random numbers
of row 5, whichever process has it. So one process and many write the same answers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor

from lockstep import Accelerator

if TYPE_CHECKING:
    from models import Models
    from options import Options


@dataclass
class Rollout:
    """All rows of an iteration; every process has all of them, which are small, and trains on its own.

    Shapes: [rows, width] for `tokens` (prompt, padded on the left, and answer, padded on the right) and `mask` (1: no
    padding); [rows, answer length] for `is_answer`, `logprobs` (of the policy), `reference` (of the frozen one) and
    `values`; [rows] for `rewards`.
    """

    tokens: Tensor
    mask: Tensor
    is_answer: Tensor
    logprobs: Tensor
    reference: Tensor
    values: Tensor
    rewards: Tensor

    def state_dict(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def shares(rows: Tensor, accelerator: Accelerator, micro_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows, which of them count) of each micro-batch of this process: as many micro-batches on all processes.

    `rows` [n] are dealt out in their order. Where they run out the first row fills up and does not count: a sharded
    model is called equally often on all processes.
    """
    ranks = accelerator.num_processes
    each = -(-len(rows) // ranks)
    filled = torch.cat([rows, rows[:1].expand(each * ranks - len(rows))])
    counts = torch.arange(each * ranks) < len(rows)
    own = slice(accelerator.process_index * each, (accelerator.process_index + 1) * each)
    yield from zip(filled[own].split(micro_batch), counts[own].split(micro_batch), strict=True)


class SampleByRow(LogitsProcessor):
    """Makes greedy decoding sample: the largest of logits / temperature + Gumbel noise is a draw from their softmax.

    The noise of a row comes from the row's own generator. Source: Maddison, Tarlow and Minka, A* Sampling, 2014.
    """

    def __init__(self, seed: int, iteration: int, rows: Tensor, temperature: float) -> None:
        self.iteration, self.temperature = iteration, temperature
        self.generators = [row_generator(seed, iteration, row) for row in rows.tolist()]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = torch.stack([torch.rand(scores.shape[1], generator=one) for one in self.generators])
        noise = -(-uniform.clamp(min=1e-20).log()).log()
        return scores / self.temperature + noise.to(scores.device)


def row_generator(seed: int, iteration: int, row: int) -> torch.Generator:
    """The random numbers of one row."""
    digest = hashlib.blake2b(f"{seed} {iteration} {row}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def padded(prompts: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask [rows, width], padded on the left, so that all answers begin in one column."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def generate(
    models: Models, prompts: Tensor, mask: Tensor, task: Any, options: Options, iteration: int
) -> Tensor:
    """Answers [rows, answer length] to prompts and their mask [rows, width].

    The weights are gathered once for all tokens of all rows. Inside of `summon_full_params` nothing is sent, so that a
    process stops when its own rows have ended, and one without rows does nothing.
    """
    accelerator, device, length = models.accelerator, models.accelerator.device, options.answer_length
    config = GenerationConfig(
        max_new_tokens=length,
        do_sample=False,
        use_cache=True,
        pad_token_id=task.pad,
        eos_token_id=task.eos,
    )
    answers = []
    with accelerator.summon_full_params(models.policy) as whole:
        for rows, counts in shares(torch.arange(len(prompts)), accelerator, options.generation_batch):
            made = torch.full((len(rows), length), task.pad, device=device)
            own = rows[counts]
            if len(own):
                sampler = SampleByRow(options.seed, iteration, own, options.temperature)
                text = whole.generate(
                    input_ids=prompts[own].to(device),
                    attention_mask=mask[own].to(device),
                    generation_config=config,
                    logits_processor=[sampler],
                )
                answer = text[:, prompts.shape[1] :]
                made[: len(own), : answer.shape[1]] = answer
            answers.append(made)
    return accelerator.gather(torch.cat(answers))[: len(prompts)].cpu()


def for_all_rows(
    accelerator: Accelerator, count: int, micro_batch: int, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """`function(rows)` of all rows [count, ...], computed by all processes, each its own, and known to all."""
    with torch.no_grad():
        parts = [function(rows) for rows, _ in shares(torch.arange(count), accelerator, micro_batch)]
    return accelerator.gather(torch.cat(parts))[:count].cpu()


def inputs(rollout: Rollout, rows: Tensor, device: torch.device) -> dict[str, Tensor]:
    """What a model is called with. Positions count what is no padding, as they do in generation."""
    mask = rollout.mask[rows].to(device)
    return {
        "input_ids": rollout.tokens[rows].to(device),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }


def logprobs_of(
    model: nn.Module, rollout: Rollout, rows: Tensor, device: torch.device, temperature: float
) -> Tensor:
    """Log-probabilities [rows, answer length] of the answers' tokens; 0 behind their end."""
    length = rollout.is_answer.shape[1]
    logits = model(**inputs(rollout, rows, device), use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
    answers = rollout.tokens[rows, -length:].to(device)
    found = (logits.float() / temperature).log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)
    return found * rollout.is_answer[rows].to(device)


def values_of(model: nn.Module, rollout: Rollout, rows: Tensor, device: torch.device) -> Tensor:
    """Values [rows, answer length]: before each token of the answer, the reward still to come."""
    length = rollout.is_answer.shape[1]
    logits = model(**inputs(rollout, rows, device), use_cache=False).logits
    return logits[:, -length - 1 : -1, 0].float()


def collect(
    models: Models, prompts: list[list[int]], task: Any, options: Options, iteration: int
) -> tuple[Rollout, float]:
    """The rollout of an iteration, and the seconds that generation took. Every process passes the same prompts."""
    accelerator, device, count = models.accelerator, models.accelerator.device, len(prompts)
    ids, mask = padded(prompts, task.pad)
    began = time.perf_counter()
    answers = generate(models, ids, mask, task, options, iteration)
    seconds = time.perf_counter() - began

    ends = (answers == task.eos).long()
    is_answer = ends.cumsum(1) - ends == 0  # the token that ends an answer belongs to it
    nothing = torch.zeros_like(is_answer, dtype=torch.float32)
    rollout = Rollout(
        tokens=torch.cat([ids, answers], 1),
        mask=torch.cat([mask, is_answer], 1),
        is_answer=is_answer,
        logprobs=nothing,
        reference=nothing,
        values=nothing,
        rewards=nothing[:, 0],
    )

    def rewards(rows: Tensor) -> Tensor:
        return models.reward(**inputs(rollout, rows, device)).logits[:, 0].float()

    for_rows = partial(for_all_rows, accelerator, count, options.micro_batch)
    temperature = options.temperature
    rollout.logprobs = for_rows(lambda rows: logprobs_of(models.policy, rollout, rows, device, temperature))
    rollout.reference = for_rows(
        lambda rows: logprobs_of(models.reference, rollout, rows, device, temperature)
    )
    rollout.rewards = for_rows(rewards)
    if models.value is not None:
        rollout.values = for_rows(lambda rows: values_of(models.value, rollout, rows, device))
    return rollout, seconds
