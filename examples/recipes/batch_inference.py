r"""Answers many prompts on any number of processes: in order, each exactly once, also after a kill.

    python examples/recipes/batch_inference.py --out runs/answers
    lockstep launch --nproc 2 examples/recipes/batch_inference.py --out runs/answers    # goes on with what is missing

Prompts of similar length form a batch. What is in a batch does not depend on the number of processes, so that the
answers do not either. Each batch is written to a file of its own, which is there whole or not at all. When all are
there, rank 0 puts them together in the order of the prompts: runs/answers/answers.jsonl. All processes need to see
this folder.

For a real model, LlamaForCausalLM.from_pretrained(...) with its tokenizer instead of a new one and bytes:
    lockstep launch --nproc 8 --max-restarts 3 batch_inference.py --prompts prompts.txt --out runs/answers \
        --batch-size 32 --tokens 256
Where it does not fit on one device: examples/recipes/larger_than_memory.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import PartialState
from lockstep.utils import broadcast_object_list

PAD = 256  # after the 256 bytes
ENDS = list(range(32))  # control characters, such as a new line: an answer ends there


def new_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.5,  # without training, small weights would say the same byte again and again
        pad_token_id=PAD,
        eos_token_id=ENDS,
    )
    return LlamaForCausalLM(config).eval()


def batches_of(prompts: list[str], size: int) -> list[list[int]]:
    """The numbers of the prompts of each batch. The longest come first: who ends last then has little left to do."""
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].encode()), i))
    return [order[start : start + size] for start in range(0, len(order), size)]


@torch.no_grad()
def answers(model: nn.Module, prompts: list[str], tokens: int) -> list[str]:
    """What the model says after each prompt, up to its end or so many tokens."""
    rows = [torch.tensor(list(prompt.encode()), device=model.device) for prompt in prompts]
    # Padding stands on the left, so that all prompts end where generation begins.
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side="left")
    generated = model.generate(
        padded, attention_mask=(padded != PAD).long(), max_new_tokens=tokens, do_sample=False
    )
    new = generated[:, padded.shape[1] :].tolist()
    return [
        bytes(token for token in row if token not in (PAD, *ENDS)).decode(errors="replace") for row in new
    ]


def write(path: Path, text: str) -> None:
    """The file is there with the whole text, or it is not there."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompts", type=Path, help="a text file, one prompt a line (default: lines of this program)"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the answers; what is in it is not repeated"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="prompts in a batch (8)")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer (24)")
    args = parser.parse_args()

    state = PartialState()
    text = (args.prompts or Path(__file__)).read_text(encoding="utf-8")
    prompts = [line for line in text.split("\n") if line.strip()]
    batches = batches_of(prompts, args.batch_size)
    model = new_model().to(state.device)
    said = json.dumps([prompts, args.batch_size, args.tokens, model.config.to_json_string()])
    parts = args.out / f"parts-{hashlib.sha256(said.encode()).hexdigest()[:16]}"  # others are of another run
    files = [parts / f"{number:06d}.jsonl" for number in range(len(batches))]
    parts.mkdir(parents=True, exist_ok=True)
    # Rank 0 alone decides: others could see what has been written since.
    (missing,) = broadcast_object_list([[n for n, file in enumerate(files) if not file.exists()]])
    state.print(f"{len(prompts)} prompts in {len(batches)} batches, {len(missing)} of them to do")

    for number in missing[state.process_index :: state.num_processes]:
        chosen = batches[number]
        results = answers(model, [prompts[i] for i in chosen], args.tokens)
        records = [
            {"number": i, "prompt": prompts[i], "answer": a} for i, a in zip(chosen, results, strict=True)
        ]
        write(files[number], "".join(json.dumps(record) + "\n" for record in records))
    state.wait_for_everyone()

    if state.is_main_process:
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        lines.sort(key=lambda line: json.loads(line)["number"])
        write(args.out / "answers.jsonl", "".join(f"{line}\n" for line in lines))
    state.print(f"{len(prompts)} answers are in {args.out / 'answers.jsonl'}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
