"""Single arguments of ``TrainingArguments`` that reach Accelerate, each in a few steps, and what they set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cell import CELLS, Result, gpt2, quiet, trained
from trainer_cells import Tokens, arguments, padded
from transformers import Trainer

GIVEN: dict[str, dict[str, Any]] = {
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    "dispatch_and_split": {"accelerator_config": {"dispatch_batches": True, "split_batches": True}},
    "uneven_batches": {"accelerator_config": {"even_batches": False}},
    "unseeded_sampler": {"accelerator_config": {"use_seedable_sampler": False}},
    "non_blocking": {"accelerator_config": {"non_blocking": True}, "dataloader_pin_memory": False},
    "sync_each_batch": {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    "sync_with_dataloader": {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_with_dataloader": False}}},
    "num_steps": {
        "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 3}}, "gradient_accumulation_steps": 1
    },
    "configured_state": {"accelerator_config": {"use_configured_state": True}},
    "data_seed": {"data_seed": 7},
    "drop_last": {"dataloader_drop_last": True},
    "persistent": {
        "dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3,
        "dataloader_in_order": False,
    },
    "persistent_in_order": {
        "dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3,
    },
    "unused": {"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 7, "ddp_broadcast_buffers": False},
    "static_graph": {"ddp_static_graph": True, "gradient_accumulation_steps": 1},
    "backend": {"ddp_backend": "gloo", "ddp_timeout": 77},
    "bf16_eval": {"bf16_full_eval": True},
    "fp16_eval": {"fp16_full_eval": True},
    "compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "neftune": {"neftune_noise_alpha": 5.0},
    "emptied_cache": {"torch_empty_cache_steps": 2},
    "counted_tokens": {"include_num_input_tokens_seen": "all"},
    "counted_unpadded": {"include_num_input_tokens_seen": "non_padding"},
    "local_averages": {"average_tokens_across_devices": False},
    "smoothing": {"label_smoothing_factor": 0.1},
    "eval_accumulation": {"eval_accumulation_steps": 1, "eval_on_start": True},
    "apart": {"eval_do_concat_batches": False},
    "gathered_objects": {"eval_use_gather_object": True},
    "loss_only": {"prediction_loss_only": True},
    "smaller_batches": {"auto_find_batch_size": True},
    "deterministic": {"full_determinism": True},
    "recomputed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "decay": {"weight_decay": 0.1, "optim": "adamw_torch", "lr_scheduler_type": "cosine_with_restarts"},
    "adafactor": {"optim": "adafactor"},
    "on_plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2},
    "sequential": {"train_sampling_strategy": "sequential"},
    "no_clipping": {"max_grad_norm": 0.0},
}  # fmt: skip

LOADER = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "in_order")
REPLICA = ("find_unused_parameters", "broadcast_buffers", "static_graph", "bucket_bytes_cap")


def observed(trainer: Any) -> dict[str, float]:
    """What the arguments have set, as numbers."""
    found: dict[str, float] = {}
    for kind, loader in (("train", trainer.get_train_dataloader()), ("eval", trainer.get_eval_dataloader())):
        found |= {f"{kind}_{name}": float(getattr(loader, name) or 0) for name in LOADER}
        found[f"{kind}_batches"] = len(loader)
        found[f"{kind}_rows"] = sum(batch["input_ids"].shape[0] for batch in loader)
    # Around DDP there, inside of it here.
    model, replicated = trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel
    model = model if isinstance(model, replicated) else getattr(model, "_orig_mod", model)
    if isinstance(model, replicated):
        found |= {name: float(getattr(model, name)) for name in REPLICA}
        group = torch.distributed.distributed_c10d._get_default_group()
        found["limit"] = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    found["compiled"] = float(any(hasattr(part, "_orig_mod") for part in trainer.model_wrapped.modules()))
    found["accumulation"] = trainer.args.gradient_accumulation_steps
    found["seedable"] = float(bool(trainer.accelerator.use_seedable_sampler))
    found["non_blocking"] = float(bool(trainer.accelerator.non_blocking))
    return found


def train(folder: Path, given: dict[str, Any]) -> Result:
    if given.get("accelerator_config", {}).get("use_configured_state"):
        import accelerate

        accelerate.PartialState(cpu=True)
    trainer = quiet(
        Trainer(
            model=gpt2(dropout=0.0),  # where rank 0 reads for all, other masks are drawn
            args=arguments(folder, **{"max_steps": 7, "eval_strategy": "steps", "eval_steps": 5, **given}),
            train_dataset=Tokens(41, 1),
            eval_dataset=Tokens(11, 2),
            data_collator=padded,
        )
    )
    trainer.train()
    trainer.evaluate()
    # Two processes leave out 5 rows altogether, which is refused here.
    predicted = trainer.predict(Tokens(8 if given.get("dataloader_drop_last") else 5, 3))
    logged, weights = trained(trainer)
    values = predicted.predictions
    parts = values if isinstance(values, list) else [] if values is None else [values]
    total = float(sum(abs(part.astype("float64")).sum() for part in parts))
    return [*logged, observed(trainer), {"sum": total, **predicted.metrics}], weights


for name, given in GIVEN.items():
    CELLS[f"argument_{name}"] = lambda folder, given=given: train(folder, given)
