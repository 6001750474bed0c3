"""What it costs to find how a model is split: CPU time of rank 0, in seconds.

    python benchmarks/derivation.py               # 2 processes
    python benchmarks/derivation.py --quick

A GPT-2 and a Llama of transformers are prepared and trained for some steps, without the first batch's proof. Shown are
the time of ``prepare`` beyond that of a data-parallel model, and that of the first step beyond a later one's, whose
sum is the cost. CPU time, so that other work on the machine counts little; the first round, which imports, is left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import common

LINES = ("tp=2", "pp=2", "cp=2", "ddp")
MODELS = ("GPT-2", "Llama")


def options() -> argparse.Namespace:
    return common.parse_for_models(__doc__, "derivation", width=32, layers=24, rounds=5)


def model_of(name: str, chosen: argparse.Namespace) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 128,
        "hidden_size": chosen.width,
        "num_hidden_layers": chosen.layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    if name == "GPT-2":
        return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0))
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=3 * chosen.width))


def once(name: str, line: str, chosen: argparse.Namespace) -> tuple[float, float]:
    """Seconds of ``prepare``, and of the first step beyond a later one."""
    import torch

    from lockstep import Accelerator

    accelerator = Accelerator(cpu=True, parallel=line if line == "ddp" else f"{line} verify=off")
    model = model_of(name, chosen)
    start = time.process_time()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    prepared = time.process_time() - start
    tokens = torch.randint(128, (8, 16), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        accelerator.wait_for_everyone()
        start = time.process_time()
        accelerator.backward(model(tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    first = step()
    later = common.summary([step() for _ in range(5)]).median
    accelerator.free_memory()
    return prepared, first - later


def work(chosen: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(chosen.rounds + 1):
        for name in MODELS:
            for line in LINES:
                both = once(name, line, chosen)
                if number:
                    found.setdefault(f"{name}, {line}", []).append(both)
    common.write_found(found, chosen)


def main() -> None:
    chosen = options()
    if chosen.worker:
        work(chosen)
        return
    report = common.Report("derivation", "What it costs to find how a model is split")
    found = common.found_by_workers(__file__, common.arguments_of(chosen, "rounds", "width", "layers"), 2)
    results: dict[str, Any] = {}
    rows = []
    for name in MODELS:
        plain = found[f"{name}, ddp"]
        for line in LINES[:-1]:
            pairs = list(zip(found[f"{name}, {line}"], plain, strict=True))
            prepare = common.summary([split[0] - other[0] for split, other in pairs])
            first = common.summary([split[1] - other[1] for split, other in pairs])
            total = common.summary([sum(split) - sum(other) for split, other in pairs])
            results[f"{name}, {line}"] = {
                "prepare_s": prepare.to_dict(),
                "first_step_s": first.to_dict(),
                "total_s": total.to_dict(),
            }
            rows.append([name, line, f"{prepare.median:.2f} s", f"{first.median:.2f} s", total.show(2)])
    report.finish(
        ["model", "split", "prepare", "first step", "both, in s (quartiles)"],
        rows,
        results,
        {"processes": 2, "width": chosen.width, "layers": chosen.layers, "rounds": chosen.rounds},
        chosen.output,
    )


if __name__ == "__main__":
    sys.exit(main())
