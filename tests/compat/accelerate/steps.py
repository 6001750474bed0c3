"""Parts of Accelerate that scripts use by themselves, with the installed one and by alias: one line a case."""

from __future__ import annotations

import json
import os
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.estimate import estimate_command_parser, estimate_training_usage
from accelerate.commands.launch import clean_option
from accelerate.commands.merge import merge_command_parser
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2, to_fsdp2_command, to_fsdp2_command_parser
from accelerate.commands.utils import CustomArgumentParser
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.inference import find_pippy_batch_size, generate_device_map, pippy_forward
from accelerate.optimizer import patch_optimizer_step
from accelerate.state import AcceleratorState, GradientState, PartialState, ThreadLocalSharedDict
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    compute_module_sizes,
    load,
)
from accelerate.utils.bnb import get_keys_to_not_convert
from accelerate.utils.dataclasses import BaseEnum, EnumWithContains, PrecisionType
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, fsdp2_switch_optimizer_parameters
from accelerate.utils.launch import env_var_path_add, setup_fp8_env
from accelerate.utils.modeling import fallback_allocate, get_module_size_with_ties
from accelerate.utils.operations import GatheredParameters, gather_tensor_shape
from accelerate.utils.other import TORCH_SAFE_GLOBALS
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

warnings.simplefilter("ignore")
accelerator = Accelerator(cpu=True)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def say(name: str, *values: Any) -> None:
    print(json.dumps([name, plain(values)]))


def refused(call: Any) -> str:
    try:
        call()
    except Exception as error:
        kinds = (KeyError, ImportError, ValueError, TypeError, RuntimeError)
        return next((kind.__name__ for kind in kinds if isinstance(error, kind)), "Exception")
    return "nothing"


# -- loaders that scripts construct

state = accelerator.gradient_state
for name, loader in (
    ("shard", DataLoaderShard(list(range(10)), batch_size=4)),
    ("shard skips", DataLoaderShard(list(range(10)), batch_size=4, skip_batches=1)),
    ("shard sized", DataLoaderShard(list(range(8)), batch_size=4, _drop_last=True, device="cpu")),
    ("dispatcher", DataLoaderDispatcher(list(range(10)), batch_size=4)),
    ("dispatcher split", DataLoaderDispatcher(list(range(10)), batch_size=4, split_batches=True)),
    ("skipped", skip_first_batches(DataLoaderShard(list(range(10)), batch_size=4), 2)),
):
    for _ in range(2):
        seen = []
        for batch in loader:
            seen.append([batch, loader.end_of_dataloader, state.end_of_dataloader, state.in_dataloader])
            seen.append(state.active_dataloader is loader)
        say(name, seen, state.in_dataloader)
    say(name, isinstance(loader, DataLoader), loader.num_workers)
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
say("skip", list(SkipDataLoader(list(range(10)), batch_size=4, skip_batches=2)))
shard = DataLoaderShard(list(range(10)), batch_size=4)
say("shard remainder", [(state.remainder, loader.total_dataset_length) for _ in shard for loader in [shard]])
say("shard sizes", shard.total_batch_size, len(shard), shard.total_dataset_length, type(shard.dataset))
sampler = BatchSamplerShard(BatchSampler(range(10), 2, False), 2, 1)
say(
    "shard of a shard",
    list(DataLoaderShard(list(range(10)), batch_sampler=sampler)),
    DataLoaderShard(range(4), batch_sampler=sampler).total_batch_size,
)
ours = prepare_data_loader(DataLoader(list(range(6)), batch_size=2))
say("isinstance", isinstance(ours, DataLoaderShard), isinstance(ours, DataLoaderDispatcher))
say("isinstance", isinstance(shard, DataLoaderShard), isinstance(shard, DataLoaderDispatcher))
say("no shard", isinstance(DataLoader([1]), DataLoaderShard))
adapter = DataLoaderAdapter(list(range(4)), batch_size=2)
say("adapter", len(adapter), isinstance(adapter, DataLoader), type(adapter.base_dataloader).__name__)
shard.set_sampler(RandomSampler(range(10)))
say("sampler", type(shard.get_sampler()).__name__)


class Own(DataLoaderStateMixin):
    def __init__(self) -> None:
        self.gradient_state = GradientState()
        self.dataset, self.total_batch_size, self._drop_last = list(range(7)), 4, False


own = Own()
own.begin()
say("mixin", state.in_dataloader, state.active_dataloader is own, own.remainder, state.end_of_dataloader)
own.end_of_dataloader = True
say("metrics cut", accelerator.gather_for_metrics(torch.arange(5)), state.end_of_dataloader)
say("metrics cut objects", accelerator.gather_for_metrics(["a", "b", "c", "d"]))
own.end()
say("mixin", state.in_dataloader, accelerator.gather_for_metrics(torch.arange(5)))

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


class Shares:
    shared = ThreadLocalSharedDict()


Shares().shared["a"] = 1
say("shared", Shares().shared, Shares.shared)

# -- checkpoints


def trained() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


for safe in (True, False):
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, scheduler = trained()
        saved = save_accelerator_state(
            folder, [model.state_dict(), {}], [optimizer], [scheduler], [], 0, 7, safe_serialization=safe
        )
        say("saved", sorted(os.listdir(folder)), str(saved) == folder)
        drawn = (torch.rand(1).item(), random.random(), float(np.random.rand()))
        other = trained()
        for group in other[1].param_groups:
            group["lr"] = 9.0
        with torch.no_grad():
            other[0].weight.zero_()
        override = load_accelerator_state(folder, [other[0]], [other[1]], [other[2]], [], 0)
        say("loaded", override, other[0].weight, other[1].param_groups[0]["lr"], other[2].get_last_lr())
        say("drawn", drawn == (torch.rand(1).item(), random.random(), float(np.random.rand())))
        states = load(Path(folder) / "random_states_0.pkl")
        say("states", sorted(states), type(states["numpy_random_seed"][1]).__name__)
        say(
            "location", refused(lambda: load_accelerator_state(folder, [], [], [], [], 0, map_location="gpu"))
        )
with tempfile.TemporaryDirectory() as folder:
    model, optimizer, scheduler = trained()
    save_custom_state(scheduler, folder, 2)
    scheduler.last_epoch = 5
    load_custom_state(scheduler, folder, 2)
    say("custom", os.listdir(folder), scheduler.last_epoch)
say("safe", np.ndarray in TORCH_SAFE_GLOBALS, np.dtype in TORCH_SAFE_GLOBALS)

# -- steps inside of others


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))


model = small()
parts: Any = list(model.named_children())
sizes = compute_module_sizes(model)
for limit in (1000, 300, 200, 80, 10, "x"):
    name, part, rest = fallback_allocate(list(parts), sizes, limit)
    say("fallback", limit, name, type(part).__name__, [other for other, _ in rest])
say("undivided", fallback_allocate(list(parts), sizes, 40, ["Sequential"])[0])
ties = get_module_size_with_ties(["1.0.weight"], 5, sizes, parts)
say(
    "with ties",
    ties[0],
    ties[1],
    [type(one).__name__ for one in ties[2]],
    get_module_size_with_ties([], 5, sizes, []),
)
say("device map", generate_device_map(model, 1))
deep_model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
for count in (2, 3, 4):
    # Theirs ends with parts on the disk, which no process has.
    placed = generate_device_map(deep_model, count).items()
    say("device maps", {name: count - 1 if device == "disk" else device for name, device in placed})
say(
    "rows",
    find_pippy_batch_size([1, torch.ones(3, 2)], {}),
    find_pippy_batch_size(None, {"a": torch.ones(2)}),
)
say("rows", find_pippy_batch_size((), {"a": 1}))
say("alone", pippy_forward(lambda x: x + 1, 2, False, torch.ones(2)))


class Stepped:
    _accelerate_step_called = False


stepped: Any = Stepped()
say("patched", patch_optimizer_step(stepped, lambda a: a + 1)(2), stepped._accelerate_step_called)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
new = [nn.Parameter(torch.ones(1)) for _ in model.parameters()]
mapping = {old.data_ptr(): one for old, one in zip(model.parameters(), new, strict=True)}


class Address:
    def __init__(self, address: int) -> None:
        self.data_ptr = address


for group in optimizer.param_groups:
    group["params"] = [Address(one.data_ptr()) for one in group["params"]]
say("missing", refused(lambda: fsdp2_switch_optimizer_parameters(optimizer, {})))
fsdp2_switch_optimizer_parameters(optimizer, mapping)
say("switched", all(a is b for a, b in zip(optimizer.param_groups[0]["params"], new, strict=True)))
with GatheredParameters(list(model.parameters()), modifier_rank=0):
    say("whole", [list(one.shape) for one in model.parameters()])
say("shape of one", gather_tensor_shape(torch.ones(2, 5)))


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


class Args:
    fp8_format, fp8_margin, fp8_override_linear_precision, other = "E4M3", None, (True, False, False), 1


args = Args()
args.__dict__.update({name: value for name, value in vars(Args).items() if not name.startswith("_")})
say("fp8", setup_fp8_env(args, {"A": "1"}))


class Headed(nn.Module):
    base_model_prefix = "body"

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.body, self.mid, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        if tied:
            self.head.weight = self.body.weight


say(
    "not converted",
    sorted(set(get_keys_to_not_convert(Headed(True)))),
    get_keys_to_not_convert(Headed(False)),
)
del Headed.base_model_prefix
say("not converted", get_keys_to_not_convert(Headed(False)))

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
    plugin.validate_mixed_precision_policy()
    say("precision", plugin.mixed_precision_policy)
plugin.set_mixed_precision("fp16")
say("kept", plugin.mixed_precision_policy, refused(lambda: plugin.set_mixed_precision("int3")))
plugin.mixed_precision_policy = {"param_dtype": torch.float32}
say("policy of words", refused(lambda: plugin.set_mixed_precision("bf16")))
say("policy of words", refused(plugin.validate_mixed_precision_policy))
plugin.cpu_offload = True
plugin.set_cpu_offload()
plugin.validate_cpu_offload()
say("offload", type(plugin.cpu_offload).__name__)
plugin.cpu_offload = 3
say("offload", refused(plugin.validate_cpu_offload))

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
everything = {"zero_optimization.x": 1, "train_batch_size": 8}
say("process", refused(lambda: deep.deepspeed_config_process(gradient_accumulation_steps=4, **everything)))
deep.deepspeed_config_process(gradient_accumulation_steps=2, **everything)
say("process", deep.deepspeed_config["zero_optimization"]["x"])
say("lax", deep.deepspeed_config_process(must_match=False, gradient_accumulation_steps=4, **everything))
deep.set_mixed_precision("bf16")
say(
    "types",
    deep.deepspeed_config["bf16"],
    deep.deepspeed_config["fp16"],
    refused(lambda: deep.set_mixed_precision("fp16")),
)
say("select", refused(deep.select), deep.zero_stage)

# -- commands


def parsed(parser: Any, *words: str) -> dict[str, Any]:
    return {name: value for name, value in vars(parser.parse_args(words)).items() if name != "nondefault"}


say(
    "merge",
    parsed(merge_command_parser(), "a", "b"),
    parsed(merge_command_parser(), "a", "b", "--unsafe-serialization"),
)
say(
    "estimate",
    parsed(estimate_command_parser(), "m", "--dtypes", "float32", "int8", "--library_name", "timm"),
)
say("to fsdp2", parsed(to_fsdp2_command_parser(), "--config-file", "a", "--overwrite"))
both = CustomArgumentParser()
both.add_argument("--some_word", default=1, type=int)
both.add_argument_group("of them").add_argument("--other_word", action="store_true")
found_words: Any = both.parse_args(["--some-word", "3", "--other-word"])
say("both", found_words.some_word, found_words.other_word, sorted(found_words.nondefault))
say("both", parsed(both))
for option in ("--a-b", "a", "--fp8-backend=te"):
    say("option", clean_option(option))
for kind in ("float32", "bfloat16", "int8"):
    say("training", sorted(estimate_training_usage(1000, kind).items()))
for sections in (
    {},
    {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_use_orig_params": True,
        "fsdp_offload_params": False,
        "fsdp_auto_wrap_policy": "NO_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    },
    {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_forward_prefetch": True, "some_unknown_key": 5},
):
    say(
        "converted",
        sorted(
            convert_config_to_fsdp2({"mixed_precision": "no", "fsdp_config": sections})["fsdp_config"].items()
        ),
    )
os.environ["FOLDERS"] = "a::b"
say("path", env_var_path_add("FOLDERS", "c"), env_var_path_add("NO_FOLDERS", "c"))
with tempfile.TemporaryDirectory() as folder:
    written = ClusterConfig("LOCAL_MACHINE", "MULTI_CPU", "bf16", True, False, num_processes=2)
    written.to_yaml_file(f"{folder}/a.yaml")
    again = ClusterConfig.from_yaml_file(f"{folder}/a.yaml")
    say(
        "config",
        again.to_dict(),
        again == written,
        refused(lambda: ClusterConfig("NOWHERE", "NO", "no", True, False)),
    )
    known = load_config_from_file(f"{folder}/a.yaml")
    say("config read", isinstance(known, ClusterConfig), known.to_dict())
    for words in (
        ["--config_file", f"{folder}/none.yaml", "--output_file", f"{folder}/b.yaml"],
        ["--config_file", f"{folder}/a.yaml", "--output_file", f"{folder}/a.yaml"],
        ["--config_file", f"{folder}/a.yaml"],
    ):
        try:
            to_fsdp2_command(to_fsdp2_command_parser().parse_args(words))
        except (FileNotFoundError, FileExistsError, ValueError) as error:
            kinds = (FileNotFoundError, FileExistsError, ValueError)
            say("to fsdp2", next(kind.__name__ for kind in kinds if isinstance(error, kind)))
