"""Whole weights for a while, against a model that was never sharded."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lockstep import Accelerator
from lockstep.comm import CommCounter
from lockstep.errors import LockstepError, UsageError
from lockstep.torch_internals import params

VOCABULARY, BLOCKS = 24, 2


def gpt2() -> GPT2LMHeadModel:
    """With tied embeddings."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=BLOCKS,
        n_head=2,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def prepared(parallel: str, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    """(accelerator, the model, its optimizer, the same model whole)."""
    accelerator = Accelerator(cpu=True, parallel=parallel, **options)
    whole = gpt2()
    model = copy.deepcopy(whole)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer, whole


def prompts(rank: int, count: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (count, 3), generator=torch.Generator().manual_seed(rank))


def train_step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    tokens = prompts(9, 4)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()


def generates(parallel: str) -> dict[str, Any]:
    """Ranks generate other numbers of texts, of other lengths, other numbers of times; and train before and after."""
    accelerator, model, optimizer, whole = prepared(parallel)
    rank, right = accelerator.process_index, []
    alone = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(2):
        train_step(accelerator, model, optimizer)
        tokens = prompts(9, 4)
        whole(input_ids=tokens, labels=tokens).loss.backward()
        alone.step()
        alone.zero_grad()
        with CommCounter() as counter, accelerator.summon_full_params(model) as unwrapped:
            before = counter.count()
            for call in range(rank):  # rank 0 never
                ids = prompts(rank, 2 + call)
                ours = unwrapped.generate(ids, max_new_tokens=2 + 3 * rank, do_sample=False)
                theirs = whole.generate(ids, max_new_tokens=2 + 3 * rank, do_sample=False)
                right.append(torch.equal(ours, theirs))
            inside = counter.count() - before
    shardings = accelerator._preparation.models.parallel_of(model).shardings
    records = [group for sharding in shardings for group in sharding.parameter_groups()]
    kept = sum(
        output.untyped_storage().nbytes()
        for group in records
        for param in params(group)
        for output in param.all_gather_outputs
    )
    gathers = [record for record in counter.records if record.payload_bytes > 1000]
    return {
        "right": all(right),
        "calls": len(right),
        "inside": inside,
        "gathered": sum(record.payload_bytes for record in gathers),
        "groups": len(records),
        "bytes": sum(p.nbytes for p in whole.parameters()),
        "kept": kept,
        "in step": getattr(model, "_is_fsdp_managed_module", None),
    }


def between_forward_and_backward(parallel: str) -> bool:
    """Whether the gradient is that of a loop that does not generate in between."""
    gradients = []
    for summons in (False, True):
        accelerator, model, _, _ = prepared(parallel, gradient_accumulation_steps=2)
        for micro_batch in range(2):
            with accelerator.accumulate(model):
                tokens = prompts(micro_batch, 4)
                loss = model(input_ids=tokens, labels=tokens).loss
                if summons:
                    with accelerator.summon_full_params(model) as unwrapped:
                        for _ in range(accelerator.process_index):
                            unwrapped(input_ids=tokens)
                accelerator.backward(loss)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        gradients.append([g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in found])
        accelerator.free_memory()
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)) and len(gradients[0]) > 4


def raises(parallel: str) -> tuple[str, bool]:
    """One rank raises inside; what each rank is told, and whether training goes on."""
    accelerator, model, optimizer, _ = prepared(parallel)
    said = ""
    try:
        with accelerator.summon_full_params(model) as unwrapped:
            unwrapped.generate(prompts(0, 2), max_new_tokens=3)
            if accelerator.process_index == 1:
                raise ValueError("on purpose")
    except (ValueError, LockstepError) as error:
        said = str(error)
    before = copy.deepcopy(accelerator.get_state_dict(model))
    train_step(accelerator, model, optimizer)
    after = accelerator.get_state_dict(model)
    return said, any(not torch.equal(before[name], after[name]) for name in before)


def refusals(parallel: str, folder: str) -> list[str]:
    """What is said of a backward, a step, and of what shards the weights again."""
    accelerator, model, optimizer, _ = prepared(parallel)
    loss = model(input_ids=prompts(0, 2), labels=prompts(0, 2)).loss
    said = []
    attempts = [
        lambda: accelerator.backward(loss),
        optimizer.step,
        lambda: accelerator.get_state_dict(model),
        lambda: accelerator.save_state(folder),
    ]
    for attempt in attempts:
        said.append("")
        with suppress(UsageError):
            with accelerator.summon_full_params(model):
                try:
                    attempt()
                except LockstepError as error:
                    said[-1] = str(error)
                    raise UsageError(str(error)) from error
    with accelerator.summon_full_params(model) as outer, accelerator.summon_full_params(outer) as inner:
        said.append(str(inner is outer and not torch.is_grad_enabled()))
    train_step(accelerator, model, optimizer)
    return said


def strangers() -> list[str]:
    """What is said of a model that was not prepared, of another Accelerator's, and of one that is split."""
    accelerator, model, _, whole = prepared("zero=3")
    said = []
    for other, given in ((accelerator, whole), (Accelerator(cpu=True, parallel="zero=2"), model)):
        try:
            with other.summon_full_params(given):
                pass
        except UsageError as error:
            said.append(str(error))
    return said


def split(parallel: str) -> str:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = accelerator.prepare_model(gpt2(), evaluation_mode=True)
    try:
        with accelerator.summon_full_params(model):
            return "not refused"
    except UsageError as error:
        return str(error)


def changed_by_hand() -> tuple[bool, bool]:
    """A change inside is kept, and one in inference mode does not spoil the next backward."""
    accelerator, model, optimizer, _ = prepared("zero=3")
    with accelerator.summon_full_params(model) as unwrapped:
        unwrapped.transformer.ln_f.weight.mul_(2)
    is_kept = bool((accelerator.get_state_dict(model)["transformer.ln_f.weight"] == 2).all())
    with torch.inference_mode(), accelerator.summon_full_params(model) as unwrapped:
        unwrapped.generate(prompts(0, 2), max_new_tokens=2)
    train_step(accelerator, model, optimizer)
    weight = accelerator.get_state_dict(model)["transformer.ln_f.weight"]
    return is_kept, bool((weight != 2).any())


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift


def buffers_and_bf16() -> tuple[int, list[float], str]:
    """Collectives inside, the buffer of each rank, and the type in which the model computed."""
    accelerator = Accelerator(cpu=True, parallel="zero=3", mixed_precision="bf16")
    model = accelerator.prepare(WithBuffer())
    with torch.no_grad():
        model.shift.fill_(float(accelerator.process_index + 1))
    with CommCounter() as counter, accelerator.summon_full_params(model) as unwrapped:
        before = counter.count()
        for _ in range(accelerator.process_index):
            unwrapped(torch.ones(1, 4))
        inside, shift, dtype = (
            counter.count() - before,
            unwrapped.shift.tolist(),
            unwrapped.linear.weight.dtype,
        )
    return inside, shift, str(dtype)
