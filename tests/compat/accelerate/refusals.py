"""What bad arguments raise, with the installed Accelerate and by alias: one line a case, with what catches it."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import (
    Accelerator,
    PartialState,
    dispatch_model,
    find_executable_batch_size,
    init_empty_weights,
    load_checkpoint_in_model,
)
from accelerate.data_loader import prepare_data_loader
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    compare_versions,
    find_batch_size,
    operations,
    send_to_device,
    set_module_tensor_to_device,
    str_to_bool,
)
from accelerate.utils.deepspeed import get_active_deepspeed_plugin
from accelerate.utils.modeling import check_device_map, convert_file_size_to_int
from torch import nn
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
accelerator = Accelerator(cpu=True)
KINDS = (
    KeyError, IndexError, ImportError, FileNotFoundError, OSError, NotImplementedError, AttributeError, AssertionError,
    ValueError, TypeError, RuntimeError,
)  # fmt: skip


def case(name: str, call: Any) -> None:
    try:
        call()
        kinds = ["nothing"]
    except Exception as error:
        kinds = [kind.__name__ for kind in KINDS if isinstance(error, kind)] or ["Exception"]
    print(json.dumps([name, kinds]))


model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
case("precision", lambda: Accelerator(cpu=True, mixed_precision="fp7"))
case(
    "steps twice",
    lambda: (
        GradientAccumulationPlugin(num_steps=2)
        and Accelerator(
            cpu=True,
            gradient_accumulation_steps=3,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        )
    ),
)
case("dispatch and workers", lambda: DataLoaderConfiguration(dispatch_batches=True, data_seed="x") and 1 / 0)
case(
    "loader uneven",
    lambda: prepare_data_loader(
        DataLoader(range(8), 3), num_processes=2, process_index=0, split_batches=True
    ),
)
case("rows of nothing", lambda: find_batch_size({}))
case("tensor of a word", lambda: operations.recursively_apply(lambda t: t, "a", error_on_other_type=True))
case("concatenate", lambda: operations.concatenate([1, 2]))
case("gather a word", lambda: accelerator.gather("a"))
case("reduce", lambda: accelerator.reduce("a"))
case("device", lambda: send_to_device(torch.ones(1), "nowhere"))
case("truth", lambda: str_to_bool("perhaps"))
case("compare", lambda: compare_versions("torch", "~", "1"))
case("size", lambda: convert_file_size_to_int("5 bananas"))
case("map misses", lambda: check_device_map(model, {"0": "cpu"}))
case("map misses a part", lambda: dispatch_model(model, {"0": "cpu", "x": "disk"}))
case("disk without a folder", lambda: dispatch_model(nn.Linear(1, 1), {"": "disk"}, force_hooks=True))
case("tensor", lambda: set_module_tensor_to_device(model, "0.nothing", "cpu"))
case("module", lambda: set_module_tensor_to_device(model, "5.weight", "cpu"))
case("shape", lambda: set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(3)))
with init_empty_weights():
    empty = nn.Linear(2, 2)
case("no value", lambda: set_module_tensor_to_device(empty, "weight", "cpu"))
case("checkpoint", lambda: load_checkpoint_in_model(model, "/nowhere/at/all"))
with tempfile.TemporaryDirectory() as folder:
    case("empty folder", lambda: load_checkpoint_in_model(model, folder))
    Path(folder, "bad.json").write_text("{")
    case("state", lambda: accelerator.load_state(str(Path(folder, "missing"))))
case("state of nothing", accelerator.load_state)
case("no plugin", lambda: get_active_deepspeed_plugin(accelerator.state))
case("no batch fits", lambda: find_executable_batch_size(lambda batch_size: 1, starting_batch_size=0)())
case("batch size first", lambda: find_executable_batch_size(lambda batch_size: 1)(2))
case("batch size passed", lambda: find_executable_batch_size(lambda batch_size, a: 1)(2, 3))
case("registered", lambda: accelerator.register_for_checkpointing(3))
case("tracker", lambda: accelerator.get_tracker("none"))
case("tracker name", lambda: Accelerator(cpu=True, log_with="nonsense"))
case("loaded hook", lambda: add_hook_to_module(model, 3))
case("hook", lambda: AlignDevicesHook(nonsense=1))
case("split", lambda: PartialState().split_between_processes(3).__enter__() and 1 / 0)
case("profile", lambda: accelerator.profile(3).__enter__())
case("free memory", lambda: accelerator.prepare(model, device_placement=[True, False]))
case("seed", lambda: accelerator.prepare_scheduler(3))
