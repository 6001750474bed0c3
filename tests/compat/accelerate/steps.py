"""Parts of Accelerate that scripts use by themselves, with the installed one and by alias: one line a case."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
)
from accelerate.utils.dataclasses import BaseEnum, EnumWithContains, PrecisionType
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from saying import refused, say
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
accelerator = Accelerator(cpu=True)


state = accelerator.gradient_state
say("run", str(accelerator.distributed_type), f"{accelerator.distributed_type}", accelerator.state.backend)
rows = DataLoader(list(range(8)), batch_size=2)
rows, model, optimizer = accelerator.prepare(rows, nn.Linear(2, 2), torch.optim.SGD([torch.zeros(2)]))
say(
    "attributes",
    accelerator.fp8_recipe_handler,
    accelerator.has_fp8_handler,
    accelerator.fp8_enabled,
    accelerator.has_lomo_optimizer,
)
say(
    "more attributes",
    accelerator.log_with,
    accelerator.should_save_model,
    accelerator.verify_device_map(model),
    accelerator.state.device_mesh,
)
say(
    "of objects", rows.use_stateful_dataloader, rows.skip_batches, len(rows.base_dataloader), optimizer.scaler
)
say("amp", accelerator.native_amp, accelerator.state.device_mesh)
ours = prepare_data_loader(DataLoader(list(range(6)), batch_size=2))
say("prepared", len(ours), [batch.tolist() for batch in ours])

# -- states

state.sync_gradients = False
say("sync", accelerator.sync_gradients, GradientState().sync_gradients, isinstance(state, GradientState))
state._set_sync_gradients(True)
state.plugin_kwargs.update({"num_steps": 3})
say("steps", accelerator.gradient_accumulation_steps, state.num_steps, state.plugin_kwargs["num_steps"])
accelerator.gradient_accumulation_steps = 1
say(
    "steps",
    state.num_steps,
    isinstance(accelerator.state, AcceleratorState),
    isinstance(PartialState(), PartialState),
)


class Mode(BaseEnum):
    A = "a"


say(
    "enums",
    "a" in Mode,
    "b" in Mode,
    Mode.A in Mode,
    "bf16" in PrecisionType,
    isinstance(Mode, EnumWithContains),
)


# -- plugins

layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
for policy, options in (
    ("transformer_based_wrap", {"transformer_cls_names_to_wrap": ["TransformerEncoderLayer"]}),
    ("size_based_wrap", {"min_num_params": 500}),
    ("no_wrap", {}),
):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy, **options)
    chosen = fsdp2_prepare_auto_wrap_policy(plugin, layers)
    say(
        "policy",
        policy,
        None if chosen is None else [name for name, one in layers.named_modules() if chosen(one)],
    )
    plugin.set_auto_wrap_policy(layers)
    made: Any = plugin.auto_wrap_policy
    known = {None: None, transformer_auto_wrap_policy: "transformer", size_based_auto_wrap_policy: "size"}
    say(
        "wraps",
        policy,
        known[getattr(made, "func", made) if made != "no_wrap" else None],
        getattr(made, "keywords", None),
    )
plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
for word in ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "full_state_dict", "3"):
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type(word)
    say("states", plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config)
say("local", refused(lambda: plugin.set_state_dict_type("LOCAL_STATE_DICT")))
for precision in ("bf16", "fp16", torch.float32):
    plugin.set_mixed_precision(precision, override=True)
    say("precision", plugin.mixed_precision_policy)
plugin.set_mixed_precision("fp16")
say("kept", plugin.mixed_precision_policy, refused(lambda: plugin.set_mixed_precision("int3")))
plugin.mixed_precision_policy = {"param_dtype": torch.float32}
say("policy of words", refused(lambda: plugin.set_mixed_precision("bf16")))

deep = DeepSpeedPlugin(
    hf_ds_config={
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "x": "auto"},
    }
)
say("auto", deep.is_auto("train_batch_size"), deep.is_auto("zero_optimization.stage"), deep.is_auto("a.b"))
say("value", deep.get_value("zero_optimization.stage"), deep.get_value("a", 4), deep.hf_ds_config.is_zero3())
deep.fill_match("train_batch_size", train_batch_size=8)
say(
    "filled",
    deep.deepspeed_config["train_batch_size"],
    refused(lambda: deep.fill_match("zero_optimization.x")),
)
found: list[str] = []
deep.fill_match("gradient_accumulation_steps", found, gradient_accumulation_steps=4)
say("mismatch", len(found))
deep.set_mixed_precision("bf16")
say(
    "types",
    deep.deepspeed_config["bf16"],
    deep.deepspeed_config["fp16"],
    refused(lambda: deep.set_mixed_precision("fp16")),
)
say("select", refused(deep.select), deep.zero_stage)
