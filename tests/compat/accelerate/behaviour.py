"""What names of Accelerate do, in a script that runs with the installed Accelerate and by alias: one line a case."""

from __future__ import annotations

import tempfile
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import torch
from accelerate import PartialState, hooks
from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import modeling, offload, operations, other
from accelerate.utils.dataclasses import CustomDtype, get_module_class_from_name
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from saying import refused, say
from torch import nn
from torch.utils.data import BatchSampler

warnings.simplefilter("ignore")
PartialState(cpu=True)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(a=nn.Linear(2, 3), norm=nn.BatchNorm1d(3), b=nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    )


# -- hooks


class Adds(hooks.ModelHook):
    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + 1,), kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        return output * 3


x = torch.arange(8.0).reshape(4, 2)
layer = nn.Linear(2, 2)
nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
hooks.add_hook_to_module(layer, Adds())
say("hook", layer(x), type(layer._hf_hook).__name__, hasattr(layer, "_old_forward"), layer.forward.__name__)
hooks.add_hook_to_module(layer, Adds())
say("hook replaced", layer(x))
hooks.add_hook_to_module(layer, Adds(), append=True)
say("hook appended", layer(x), type(layer._hf_hook).__name__)
hooks.remove_hook_from_module(layer)
say("hook removed", layer(x), hasattr(layer, "_hf_hook"), hasattr(layer, "_old_forward"))


class NoGrad(hooks.ModelHook):
    no_grad = True


hooks.add_hook_to_module(layer, NoGrad())
say("no grad", layer(x).requires_grad)
hooks.remove_hook_from_module(layer)

for offloads in (False, True):
    for offload_buffers in (False, True):
        model = small()
        expected = model(x)
        hook = hooks.AlignDevicesHook(
            execution_device="cpu", offload=offloads, offload_buffers=offload_buffers, place_submodules=True
        )
        hooks.add_hook_to_module(model, hook)
        say("align", {name: t.device for name, t in [*model.named_parameters(), *model.named_buffers()]})
        say("align output", torch.equal(model(x), expected), [str(p.device) for p in model.parameters()])
        hooks.remove_hook_from_module(model)
        say("align removed", dict(model.named_parameters()))
for name, kind in (("execution", "attach_execution_device_hook"), ("align", "attach_align_device_hook")):
    model = small()
    expected = model(x)
    getattr(hooks, kind)(model, "cpu", **({"offload": True} if name == "align" else {}))
    say(f"attach {name}", [type(getattr(m, "_hf_hook", None)).__name__ for m in model.modules()])
    say(f"attach {name} output", torch.equal(model(x), expected), [str(p.device) for p in model.parameters()])
    hooks.remove_hook_from_submodules(model)
    say(f"attach {name} removed", [str(p.device) for p in model.parameters()])
for devices, offloads in (
    ({"a": "cpu", "norm": "cpu", "b": "cpu"}, {"a": True, "norm": False, "b": True}),
    ("cpu", True),
    ("cpu", False),
):
    model = small()
    expected = model(x)
    weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
    hooks.attach_align_device_hook_on_blocks(model, devices, offloads, weights_map=weights)
    say("blocks", [type(getattr(m, "_hf_hook", None)).__name__ for m in model.modules()])
    say("blocks output", torch.equal(model(x), expected), [str(p.device) for p in model.parameters()])

# -- tensors of modules

model = small()
modeling.set_module_tensor_to_device(model, "a.weight", "meta")
say("to meta", model.a.weight)
say("no value", refused(lambda: modeling.set_module_tensor_to_device(model, "a.weight", "cpu")))
modeling.set_module_tensor_to_device(model, "a.weight", "cpu", value=torch.ones(3, 2, dtype=torch.float16))
say("with value", model.a.weight, model.a.weight.requires_grad, type(model.a.weight).__name__)
modeling.set_module_tensor_to_device(model, "a.weight", "cpu", value=torch.ones(3, 2), dtype=torch.float16)
say("with type", model.a.weight)
modeling.set_module_tensor_to_device(
    model, "norm.num_batches_tracked", "cpu", value=torch.tensor(3), dtype=torch.float16
)
say("integer buffer", model.norm.num_batches_tracked)
wrong = torch.ones(2, 2)
say(
    "wrong shape",
    refused(lambda: modeling.set_module_tensor_to_device(model, "a.weight", "cpu", value=wrong)),
)
say("wrong name", refused(lambda: modeling.set_module_tensor_to_device(model, "a.wight", "cpu")))
model.register_buffer("passing", torch.ones(1), persistent=False)
for given in (
    {},
    {"include_buffers": False},
    {"recurse": True},
    {"recurse": True, "remove_non_persistent": True},
):
    say("named tensors", given, [name for name, _ in modeling.named_module_tensors(model, **given)])
say("sizes", modeling.calculate_maximum_sizes(small()), modeling.compute_module_sizes(small()))
say(
    "bytes",
    [modeling.dtype_byte_size(t) for t in (torch.float32, torch.bfloat16, torch.int8, CustomDtype.INT4)],
)
say("file size", [modeling.convert_file_size_to_int(size) for size in ("1GB", "2MiB", 5, "3KB")])
for device_map in (
    {"a": 0, "b.c": 0, "b.d": 0},
    {"a": 0, "b.c": 1, "b.d": 1},
    {"a": "cpu", "b.c.x": 1, "b.c.y": 1, "b.d": 0, "e": 0},
    {"": 0},
):
    say("clean map", modeling.clean_device_map(dict(device_map)))
tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
modeling.set_module_tensor_to_device(tied, "1.weight", "meta")
modeling.retie_parameters(tied, [["0.weight", "1.weight"]])
say("retied", tied[0].weight is tied[1].weight)
say("class", get_module_class_from_name(model, "BatchNorm1d"), get_module_class_from_name(model, "Conv9d"))

# -- weights in files

with tempfile.TemporaryDirectory() as folder:
    index: dict[str, Any] = {}
    values = {
        "w": torch.arange(6.0).reshape(2, 3),
        "h": torch.ones(2, dtype=torch.bfloat16),
        "s": torch.tensor(2.5),
    }
    for name, value in values.items():
        index = offload.offload_weight(value, name, folder, index)
    offload.save_offload_index(index, folder)
    into = nn.Module()
    for name, value in values.items():
        into.register_parameter(name, nn.Parameter(torch.zeros_like(value)))
    modeling.load_offloaded_weights(into, index, folder)
    say("offloaded", dict(into.named_parameters()))

# -- nested data

Pair = namedtuple("Pair", "left right")
nested = {"a": torch.ones(2, 3), "b": [torch.zeros(4), Pair(torch.ones(1), 5)]}
say("device", operations.find_device([1, {"a": torch.ones(1)}]))
say("batch size", operations.find_batch_size(data=nested))
say("concatenated", operations.concatenate(data=[{"a": torch.ones(1)}, {"a": torch.zeros(2)}]))
say("sent", operations.send_to_device(tensor={"a": torch.ones(1)}, device="cpu"))
say("fp32", operations.convert_outputs_to_fp32(lambda: {"a": torch.ones(1, dtype=torch.float16)})())
say("lists", operations.listify(data=nested["a"]))

# -- loaders

sampler = SeedableRandomSampler(range(7), data_seed=5)
say("seedable", list(sampler), list(sampler))
sampler.set_epoch(0)
say("seedable again", list(sampler))
skipped = SkipBatchSampler(BatchSampler(range(7), 2, False), 2)
say("skipped", list(skipped), len(skipped), skipped.total_length)
# -- the rest

say("convert bytes", [other.convert_bytes(size) for size in (1, 1024, 123456789, 5 * 1024**5)])
say("bottom up", [type(m).__name__ for m in other.get_module_children_bottom_up(small())])
say("bottom up names", [name for name, _ in other.get_module_children_bottom_up(small(), return_fqns=True)])
say(
    "blocks of models",
    other.has_repeated_blocks(small()),
    other.is_repeated_blocks(nn.ModuleList([layer, layer])),
)
config = HfDeepSpeedConfig(
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "x": {"y": False}}
)
say(
    "deepspeed",
    config.is_zero3(),
    config.is_zero2(),
    config.is_offload(),
    config.get_value("x.y"),
    config.is_false("x.y"),
)
say(
    "deepspeed none",
    config.get_value("x.z", 4),
    config.is_true("a.b"),
    refused(lambda: config.del_config_sub_tree("a", True)),
)
axes = ParallelismConfig(dp_shard_size=2, tp_size=2)
say(
    "axes",
    axes.total_size,
    axes.data_parallel_size,
    axes.non_data_parallel_size,
    axes.tp_enabled,
    axes.cp_enabled,
)
say("axes names", axes.active_mesh_dims, axes.dp_dim_names, axes.fsdp_dim_names, axes.non_dp_dim_names)
