r"""Trains on sequences that are divided over the ranks: each keeps the activations of its part of the positions alone.

    python examples/recipes/long_context.py
    lockstep launch --nproc 2 examples/recipes/long_context.py
    lockstep launch --nproc 4 examples/recipes/long_context.py --parallel "zero=3 cp=2 cp_method=ulysses"

Attention is the only part of a block in which positions see each other. There keys and values travel round the ranks
(ring attention), or heads are exchanged for positions (Ulysses). The loss is that of one process. The memory that the
blocks take for backward is divided by the number of ranks.

For a real model, LlamaForCausalLM.from_pretrained(...) instead of a new one:
    lockstep launch --nproc 8 --mixed-precision bf16 long_context.py \
        --parallel "zero=3 cp=8 activation=full" --length 131072
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import Accelerator, PartialState
from lockstep.utils import set_seed


def sequences(length: int) -> Tensor:
    """The source of `argparse` as bytes, [sequences, length]: text that every machine has."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    return text[: len(text) // length * length].view(-1, length)


def new_model(layers: int, length: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@contextmanager
def kept_for_backward(model: nn.Module) -> Iterator[dict[int, int]]:
    """After the block, the bytes of each tensor that autograd keeps of it, without the model's weights."""
    saved: list[Tensor] = []
    kept: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        yield kept
    # Of sharded weights autograd keeps those that are still gathered.
    weights = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    not_counted = {weight.untyped_storage().data_ptr() for weight in weights}
    for storage in (tensor.untyped_storage() for tensor in saved):
        if storage.data_ptr() not in not_counted:
            kept[storage.data_ptr()] = storage.nbytes()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parallel", help="how the model is spread (default: cp=N on N processes)")
    parser.add_argument("--length", type=int, default=512, help="positions of a sequence (512)")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model (2)")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences, over all processes (2)")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    processes = PartialState().num_processes
    parallel = args.parallel or (f"cp={processes}" if processes > 1 else None)
    accelerator = Accelerator(parallel=parallel, split_batches=True)
    set_seed(0)
    model = new_model(args.layers, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(sequences(args.length), args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, tokens in zip(range(1, args.steps + 1), loader, strict=False):
        with kept_for_backward(model) as kept:
            loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"step {step}: loss {mean:.5f}")
    # The first step proves the split, with the whole model; the others keep no more than this.
    accelerator.print(f"each process kept {sum(kept.values())} bytes for the last backward")
    accelerator.end_training()


if __name__ == "__main__":
    main()
