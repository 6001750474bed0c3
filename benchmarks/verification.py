"""What the first batch's proof of a split costs, in steps.

    python benchmarks/verification.py               # 2 processes
    python benchmarks/verification.py --quick

A Llama is trained under tp, pp and cp. Each round takes the first step with verify=first_step and with verify=off in
turn, in new models, and then some steps. The cost is the difference of the two first steps, over a later step's time.
Beside it stand the bytes of the copy that rank 0 holds meanwhile: the weights and the gradients of the whole model.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import common

LINES = ("tp=2", "pp=2", "cp=2")


def options() -> argparse.Namespace:
    return common.parse_for_models(__doc__, "verification", width=256, layers=8, rounds=7)


def first_call_and_step(line: str, chosen: argparse.Namespace) -> tuple[float, float, int]:
    """Seconds of the first step, and of a later one (median); bytes of the whole model's weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lockstep import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, parallel=line)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=chosen.width,
            intermediate_size=3 * chosen.width,
            num_hidden_layers=chosen.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=256,
        )
    )
    nbytes = sum(p.nbytes for p in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    tokens = torch.randint(512, (8, 128), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        accelerator.wait_for_everyone()
        start = time.perf_counter()
        loss = model(tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.wait_for_everyone()
        return time.perf_counter() - start

    first = step()
    steps = [step() for _ in range(max(chosen.steps // 4, 2))]
    accelerator.free_memory()
    return first, common.summary(steps).median, nbytes


def work(chosen: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {line: [] for line in LINES}
    for number in range(chosen.rounds):
        for line in LINES:
            both: dict[str, tuple[float, float, int]] = {}
            for word in ("first_step", "off") if number % 2 else ("off", "first_step"):
                both[word] = first_call_and_step(f"{line} verify={word}", chosen)
            step = (both["off"][1] + both["first_step"][1]) / 2
            found[line].append(
                {
                    "step_s": step,
                    "extra_s": both["first_step"][0] - both["off"][0],
                    "steps": (both["first_step"][0] - both["off"][0]) / step,
                    "copy_bytes": 2 * both["off"][2],
                }
            )
    common.write_found(found, chosen)


def main() -> None:
    chosen = options()
    if chosen.worker:
        work(chosen)
        return
    report = common.Report("verification", "What the first batch's proof of a split costs")
    found = common.found_by_workers(
        __file__, common.arguments_of(chosen, "rounds", "steps", "width", "layers"), 2
    )
    results = {
        line: {
            "steps": common.summary([one["steps"] for one in rounds]).to_dict(),
            "extra_s": common.summary([one["extra_s"] for one in rounds]).to_dict(),
            "step_s": common.summary([one["step_s"] for one in rounds]).to_dict(),
            "copy_mib": rounds[0]["copy_bytes"] / 2**20,
        }
        for line, rounds in found.items()
    }
    rows = [
        [
            line,
            common.summary([one["steps"] for one in found[line]]).show(2),
            f"{results[line]['step_s']['median']:.3f} s",
            f"{results[line]['copy_mib']:.0f} MiB",
        ]
        for line in found
    ]
    report.finish(
        ["split", "cost in steps (quartiles)", "a step", "copy on rank 0"],
        rows,
        results,
        {"processes": 2, "width": chosen.width, "layers": chosen.layers, "rounds": chosen.rounds},
        chosen.output,
    )


if __name__ == "__main__":
    sys.exit(main())
