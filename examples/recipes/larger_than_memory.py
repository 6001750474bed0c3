"""Run a model that is larger than the memory it may have: its blocks are read from disk while others compute.

    python examples/recipes/larger_than_memory.py
    python examples/recipes/larger_than_memory.py --budget 48MB --layers 24
    lockstep launch --nproc 2 examples/recipes/larger_than_memory.py      # each process takes its part of the prompts

A Llama with random weights, written once to a folder, stands for a download. Only `load_checkpoint_and_dispatch`
differs from running it the ordinary way; `generate` and the rest stay what they are. What is read from disk in one pass
is the model less what the budget keeps in memory. Training with weights and optimizer on disk: examples/gpt/offload.py.

For a real model, its class and folder instead of `write_model`:
    python larger_than_memory.py --folder Llama-3.1-70B --budget 48GB --tokens 64
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import PartialState, init_empty_weights, load_checkpoint_and_dispatch
from lockstep.utils import broadcast_object_list, gather_object


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="blocks of the model, 12.6 MB each (12)")
    parser.add_argument("--budget", default="64MB", help="memory for weights (64MB)")
    parser.add_argument("--tokens", type=int, default=4, help="tokens to generate for each prompt (4)")
    parser.add_argument(
        "--folder", type=Path, help="where the model lies, or will (default: a temporary folder)"
    )
    return parser.parse_args()


def write_model(config: LlamaConfig, folder: Path) -> None:
    """The stand-in for a download."""
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="50MB")


def resident_peak() -> int:
    """The most bytes of memory that this process had."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def main(folder: Path, chosen: argparse.Namespace) -> None:
    state = PartialState(cpu=True)
    (folder,) = broadcast_object_list([folder])  # a temporary one is that of rank 0
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1365,
        num_hidden_layers=chosen.layers,
        num_attention_heads=8,
        max_position_embeddings=128,
    )
    with state.main_process_first():
        if not (folder / "config.json").exists():
            write_model(config, folder)

    with init_empty_weights():  # no memory yet
        model = LlamaForCausalLM(config)
    model = load_checkpoint_and_dispatch(
        model,
        folder,
        device_map="auto",
        max_memory={"cpu": chosen.budget},
        no_split_module_classes=model._no_split_modules,
    )
    model.eval()

    prompts = torch.randint(512, (8, 6), generator=torch.Generator().manual_seed(1))
    start, mine = time.perf_counter(), []
    with state.split_between_processes(prompts) as part, torch.no_grad():
        for batch in part.split(4):  # batch by batch
            tokens = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=chosen.tokens,
                do_sample=False,
                pad_token_id=0,
            )
            mine += tokens[:, batch.shape[1] :].tolist()
    taken = time.perf_counter() - start
    for number, tokens in enumerate(gather_object(mine)):
        state.print(f"prompt {number}: {tokens}")

    size = sum(parameter.nbytes for parameter in model.parameters())
    state.print(
        f"model {size / 2**20:.0f} MiB, budget {chosen.budget}, {taken:.1f} s for the prompts of one process"
    )
    state.print(f"peak of the whole process {resident_peak() / 2**20:.0f} MiB, Python and torch included")


if __name__ == "__main__":
    arguments = options()
    if arguments.folder is not None:
        main(arguments.folder, arguments)
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place), arguments)
