"""Loads the model that train.py saved and continues a prompt: needs torch and safetensors, no Accelerator.

    python examples/gpt/sample.py runs/demo --prompt "def "

The model's class, its config and a safetensors file are all it takes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file

from model import GPT, GPTConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--length", type=int, default=400, help="bytes to generate")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    model = GPT(GPTConfig(**json.loads((args.folder / "config.json").read_text()))).eval()
    model.load_state_dict(load_file(args.folder / "model.safetensors"))
    text = model.generate(args.prompt.encode(), args.length, args.temperature, args.seed)
    print(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
