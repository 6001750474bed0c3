"""Fine-tunes a Llama by LoRA, its frozen base divided over the processes; saves the adapter, and merges it.

    lockstep launch --nproc 2 examples/recipes/lora.py --out runs/lora

Only the adapter has gradients and an optimizer. With "zero=3" each process keeps its part of the base, too, so the base
may be larger than one device. A run that was interrupted goes on with the same command and `--resume`.

For a real model: `AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")` in `make_base`, and an adapter
without `lm_head`, which is there because the small base knows nothing yet.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from data import text_windows
from lockstep import Accelerator, NoCheckpointError, ProjectConfiguration
from lockstep.utils import set_seed

LENGTH = 48  # bytes of a window


def make_base() -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def make_adapted() -> PeftModel:
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=layers, task_type="CAUSAL_LM")
    return get_peft_model(make_base(), config)


def row_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """[rows]: the mean loss of the bytes of each window [rows, length]."""
    logits = model(input_ids=windows).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/lora"), help="folder of adapter and merged model"
    )
    parser.add_argument("--parallel", default="zero=3", help="how the model is spread")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="windows per step, over all processes")
    parser.add_argument("--windows", type=int, default=2000, help="windows of an epoch")
    parser.add_argument(
        "--resume", action="store_true", help="go on where the last checkpoint in --out was saved"
    )
    args = parser.parse_args()

    accelerator = Accelerator(
        parallel=args.parallel,
        split_batches=True,
        project_config=ProjectConfiguration(args.out, automatic_checkpoint_naming=True, total_limit=1),
    )
    model = make_adapted()
    training, held_out = text_windows(LENGTH, args.windows, args.windows // 8)
    train = DataLoader(training, args.batch_size, shuffle=True)
    validation = DataLoader(held_out, args.batch_size)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(f"{sum(map(torch.numel, trained)):,} of {total:,} parameters are trained")
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    model, optimizer, train, validation = accelerator.prepare(model, optimizer, train, validation)
    if args.resume:
        try:
            accelerator.load_state()
        except NoCheckpointError:
            accelerator.print(f"no checkpoint in {args.out} yet: starting at the first epoch")

    for epoch in range(train.epoch, args.epochs):
        model.train()
        for windows in train:
            losses = row_losses(model, windows)
            accelerator.backward(losses, weight=accelerator.sample_weights())
            accelerator.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        with torch.no_grad():
            results = [accelerator.gather_for_metrics(row_losses(model, windows)) for windows in validation]
        accelerator.print(f"epoch {epoch + 1}: loss {torch.cat(results).double().mean():.6f}")
        accelerator.save_state()

    # All processes gather the whole weights; the first saves those of the adapter, without lm_head's own.
    weights = accelerator.get_state_dict(model)
    model.save_pretrained(
        args.out / "adapter",
        state_dict=weights,
        save_embedding_layers=False,
        is_main_process=accelerator.is_main_process,
    )
    if accelerator.is_main_process:
        # This process has the whole model now. Merge elsewhere if it does not fit here.
        merged = PeftModel.from_pretrained(make_base(), args.out / "adapter").merge_and_unload()
        merged.save_pretrained(args.out / "merged")
        with torch.no_grad():
            losses = torch.cat([row_losses(merged.eval(), windows) for windows in DataLoader(held_out, 64)])
        accelerator.print(f"merged: loss {losses.double().mean():.6f} of a plain LlamaForCausalLM")
    accelerator.end_training()


if __name__ == "__main__":
    main()
