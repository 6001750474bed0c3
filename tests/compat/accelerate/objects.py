"""What objects of Accelerate do, in a script that runs with the installed Accelerate and by alias: one line a case."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.hooks import attach_align_device_hook, remove_hook_from_module
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class
from accelerate.utils import (
    ProjectConfiguration,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
    extract_model_from_parallel,
    has_offloaded_params,
    pad_across_processes,
    patch_environment,
    save,
)
from accelerate.utils.operations import convert_outputs_to_fp32
from saying import say
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

PartialState(cpu=True)


class Heard(logging.Handler):
    """Collects what any logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


heard = Heard()
logging.getLogger().addHandler(heard)


def caught(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        kinds = (AttributeError, ValueError, TypeError, RuntimeError, Exception)
        return next(kind.__name__ for kind in kinds if isinstance(error, kind)), str(error)
    return "nothing", ""


def warned(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [one.category.__name__ for one in seen if "rototype" not in str(one.message)]


# -- states that come before an Accelerator

say("gradient state alone", GradientState().sync_gradients, GradientState().num_steps)

# -- loaders


class Numbered(BatchSampler):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
numbered = Numbered(range(16), 4, False)
loader = accelerator.prepare_data_loader(DataLoader(list(range(16)), batch_sampler=numbered))
loader.set_epoch(3)
say("epoch is told at once", numbered.epoch, loader.gradient_state.sync_gradients)
for dispatched in (True, False):
    config = DataLoaderConfiguration(dispatch_batches=dispatched)
    prepared = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(list(range(4))))
    say("rows", [batch.tolist() for batch in prepared])

# -- options and helpers

for sizes in ((2, 1, 1, 1), (1, 4, 1, 2), (2, 2, 2, 2), (1, 2, 2, 1)):
    axes = ParallelismConfig(
        dp_replicate_size=sizes[0], dp_shard_size=sizes[1], tp_size=sizes[2], cp_size=sizes[3]
    )
    say("mesh", *axes._get_mesh())
kind, text = caught(lambda: TorchContextParallelConfig(cp_comm_strategy="ring"))
say("strategy", kind, "Invalid cp_comm_strategy: ring" in text)
with patch_environment(
    ACCELERATE_DYNAMO_BACKEND="aot_eager",
    ACCELERATE_DYNAMO_MODE="reduce-overhead",
    ACCELERATE_DYNAMO_USE_DYNAMIC="true",
):
    plugin = TorchDynamoPlugin()
    say("compiled as launched", plugin.to_kwargs(), TorchDynamoPlugin(backend="eager").to_kwargs())


module = nn.Linear(2, 2)
offloaded = [has_offloaded_params(module)]
for offload in (False, True):
    attach_align_device_hook(module, execution_device="cpu", offload=offload)
    offloaded.append(has_offloaded_params(module))
    remove_hook_from_module(module)
say("offloaded", offloaded)

wrapped = nn.Linear(2, 2)
wrapped._original_forward = wrapped.forward  # type: ignore[assignment]
wrapped.forward = convert_outputs_to_fp32(wrapped.forward)  # type: ignore[method-assign]
plain = extract_model_from_parallel(wrapped, keep_fp32_wrapper=False)
say(
    "forward is put back",
    plain is wrapped,
    hasattr(plain, "_original_forward"),
)

nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(1)])
say("nested", warned(lambda: pad_across_processes(nested)))

tied = nn.ModuleList([nn.Linear(2, 2)] * 2)
with tempfile.TemporaryDirectory() as folder:
    before = len(heard.said)
    save(tied.state_dict(), f"{folder}/model.safetensors", safe_serialization=True)
    say("shared", len(heard.said) - before, "Removed shared tensor" in heard.said[-1])

# -- checkpoints

kind, text = caught(lambda: accelerator.register_for_checkpointing(torch.ones(1), [2], nn.Linear(1, 1)))
say("registered", kind, [f"Item at index {index}" in text for index in range(3)])
with tempfile.TemporaryDirectory() as folder:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    saving = Accelerator(cpu=True, project_config=project)
    saving.prepare(nn.Linear(2, 2))
    for _ in range(4):
        saving.save_state()
    kept = sorted(path.name for path in Path(folder, "checkpoints").iterdir() if path.name[0] != ".")
    say("kept", kept)

# -- trackers


class Mine(GeneralTracker):
    name = "mine"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}

    @property
    def tracker(self) -> Any:
        return self

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.values.update(values)


register_tracker_class(Mine)
tracking = Accelerator(cpu=True, log_with="mine")
tracking.init_trackers("project")
tracking.log({"loss": 1.0})
say("tracker", "mine" in LOGGER_TYPE_TO_CLASS, tracking.get_tracker("mine").values)
say("tracker again", warned(lambda: register_tracker_class(type("Other", (Mine,), {}))))
kind, text = caught(lambda: Accelerator(cpu=True, log_with="tensorboard"))
say("directory", kind, "Logging with `tensorboard` requires a `logging_dir`" in text)

# -- a state that was reset

AcceleratorState._reset_state()
kind, text = caught(lambda: accelerator.prepare(nn.Linear(1, 1)))
say("reset", kind, "This happens if `AcceleratorState._reset_state()`" in text)
say("state alone", caught(AcceleratorState)[0])
