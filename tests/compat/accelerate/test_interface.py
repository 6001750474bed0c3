"""The table of names against the installed Accelerate: modules, names, arguments, defaults and values of enums."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.compat.accelerate import MODULES, VERSION, NotOffered, Offered, find
from tests.refusals import expect_refusal

DESCRIBE = """
import enum, importlib, inspect, json, pkgutil, types, warnings
warnings.simplefilter("ignore")
import accelerate

def described(value):
    if isinstance(value, enum.EnumMeta):
        return {"values": {name: member.value for name, member in value.__members__.items()}}
    if not callable(value):
        return {}
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {"arguments": [(p.name, p.kind.name, "-" if p.default is p.empty else repr(p.default)) for p in parameters]}

found = {}
names = [m.name for m in pkgutil.walk_packages(accelerate.__path__, "accelerate.", onerror=lambda name: None)]
for name in ["accelerate", *names]:
    if ".test_utils" in name or ".menu" in name:
        continue
    try:
        module = importlib.import_module(name)
    except ImportError:
        continue
    found[name] = {}
    for word in dir(module):
        value = getattr(module, word)
        home = getattr(value, "__module__", None) or ""
        own = home == name or (not home and word.isupper()) or name in ("accelerate", "accelerate.utils")
        if not word.startswith("_") and own and not isinstance(value, types.ModuleType):
            if not home or home.startswith("accelerate"):
                found[name][word] = described(value)
print(json.dumps([accelerate.__version__, found]))
"""

NAMES = Path(__file__).parents[3] / "docs" / "data" / "accelerate_names.yaml"

# What is public by its spelling alone.
LEFTOVERS = {"TYPE_CHECKING"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, Any]]]:
    pytest.importorskip("accelerate")
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE],
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path_factory.mktemp("beside"),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    version, found = json.loads(done.stdout.splitlines()[-1])
    return version, {
        module: {name: said for name, said in names.items() if name not in LEFTOVERS}
        for module, names in found.items()
    }


def test_every_public_name_is_offered_or_has_a_reason(
    installed: tuple[str, dict[str, dict[str, Any]]],
) -> None:
    version, modules = installed
    if version.split(".")[:2] != VERSION.split(".")[:2]:
        pytest.skip(f"Accelerate {version} is installed; the interface is that of {VERSION}")
    unknown = [
        f"{module}.{name}"
        for module, names in modules.items()
        for name in names
        if find(module, name) is None
    ]
    libraries = [f"{module}.{name}" for module, name in IMPORTED if not _is_offered(module, name)]
    assert (unknown, libraries) == ([], [])


def test_a_name_that_programs_import_is_offered_or_belongs_to_another_engine() -> None:
    imported = yaml.safe_load(NAMES.read_text(encoding="utf-8"))["names"]
    assert len(imported) > 140
    for name in imported:
        known = [names[name] for names in MODULES.values() if name in names]
        assert known, name
        reasons = [one.reason for one in known if isinstance(one, NotOffered)]
        assert not any(reason.startswith("no program") for reason in reasons), name


def _is_offered(module: str, name: str) -> bool:
    return isinstance(find(module, name), Offered) or f"{module}.{name}" in MODULES


# What transformers 5.23, trl 1.16, peft 0.21, diffusers 0.42 and sentence-transformers 6.2 import.
_IMPORTED = {
    "accelerate": """
        Accelerator FullyShardedDataParallelPlugin ParallelismConfig PartialState cpu_offload cpu_offload_with_hook
        dispatch_model infer_auto_device_map init_empty_weights skip_first_batches big_modeling hooks
    """,
    "accelerate.big_modeling": "check_device_map",
    "accelerate.commands.config": "default_config_file load_config_from_file",
    "accelerate.commands.launch": "launch_command launch_command_parser",
    "accelerate.hooks": """
        AlignDevicesHook CpuOffload ModelHook add_hook_to_module remove_hook_from_module remove_hook_from_submodules
    """,
    "accelerate.logging": "get_logger",
    "accelerate.parallelism_config": "ParallelismConfig",
    "accelerate.state": "AcceleratorState PartialState",
    "accelerate.utils": """
        CustomDtype DataLoaderConfiguration DeepSpeedPlugin DeepSpeedSchedulerWrapper DistributedDataParallelKwargs
        DistributedType DummyOptim DummyScheduler FullyShardedDataParallelPlugin GradientAccumulationPlugin
        TorchDynamoPlugin broadcast_object_list compute_module_sizes extract_model_from_parallel
        find_executable_batch_size gather gather_object get_balanced_memory get_max_memory infer_auto_device_map
        is_mlu_available is_npu_available is_peft_model is_wandb_available is_xpu_available load_fsdp_model
        load_fsdp_optimizer load_offloaded_weights named_module_tensors offload_state_dict offload_weight reduce
        release_memory save_fsdp_model save_fsdp_optimizer save_offload_index send_to_device set_module_tensor_to_device
        set_seed tqdm
    """,
    "accelerate.utils.constants": "FSDP_AUTO_WRAP_POLICY FSDP_SHARDING_STRATEGY",
    "accelerate.utils.dataclasses": "get_module_class_from_name",
    "accelerate.utils.deepspeed": "HfDeepSpeedConfig",
    "accelerate.utils.fsdp_utils": "get_parameters_from_modules",
    "accelerate.utils.imports": "is_bf16_available is_fp8_available is_xpu_available",
    "accelerate.utils.memory": "clear_device_cache release_memory should_reduce_batch_size",
    "accelerate.utils.modeling": "clean_device_map convert_file_size_to_int get_max_layer_size",
    "accelerate.utils.versions": "is_torch_version",
}
IMPORTED = [(module, name) for module, text in _IMPORTED.items() for name in text.split()]

# Arguments or defaults that differ on purpose.
DIFFERENT = {
    "AcceleratedOptimizer": "prepare makes it",
    "AcceleratedScheduler": "prepare makes it",
    "FP8RecipeKwargs": "levels are those of MS-AMP, which is not offered",
    "TERecipeKwargs": "its defaults are those that Accelerate reads from variables",
    "InitProcessGroupKwargs": "the backend follows from the device",
    "notebook_launcher": "a free port, so that two runs do not collide",
    "write_basic_config": "where lockstep config writes",
}


def test_arguments_are_those_of_accelerate(installed: tuple[str, dict[str, dict[str, Any]]]) -> None:
    _, modules = installed
    differing = {}
    for module, names in modules.items():
        for name, said in names.items():
            known = find(module, name)
            if isinstance(known, Offered) and "arguments" in said:
                found = _difference(said["arguments"], known.load())
                if found:
                    differing[name] = found
    unexpected = {name: found for name, found in differing.items() if name not in DIFFERENT}
    assert not unexpected, "\n".join(f"{name}: {found}" for name, found in unexpected.items())
    assert DIFFERENT.keys() <= differing.keys()  # no excuse outlives what it excuses


def _difference(theirs: list[list[str]], ours: Any) -> str:
    """What a call that is right there would find here; empty: nothing."""
    try:
        parameters = list(inspect.signature(ours).parameters.values())
    except (TypeError, ValueError):
        return ""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = {parameter.name: parameter for parameter in parameters}
    for place, (name, kind, default) in enumerate(theirs):
        if kind in ("VAR_POSITIONAL", "VAR_KEYWORD") or name.startswith("_"):
            continue
        parameter = by_name.get(name)
        if parameter is None:
            if takes_any:
                continue
            return f"no argument {name}"
        moved = parameter.kind is parameter.KEYWORD_ONLY or parameters.index(parameter) != place
        if kind == "POSITIONAL_OR_KEYWORD" and moved:
            return f"{name} stands at another place"
        said = "-" if parameter.default is parameter.empty else repr(parameter.default)
        if default != "-" and said != default and " at 0x" not in default and "<factory>" not in default:
            return f"{name}={said} instead of {default}"
    return ""


def test_enums_have_the_values_of_accelerate(installed: tuple[str, dict[str, dict[str, Any]]]) -> None:
    _, modules = installed
    for module, names in modules.items():
        for name, said in names.items():
            known = find(module, name)
            if isinstance(known, Offered) and "values" in said:
                kind = known.load()
                assert isinstance(kind, enum.EnumMeta)
                here = {member: value.value for member, value in kind.__members__.items()}
                assert here.items() >= said["values"].items(), name


def test_reasons_say_what_to_do() -> None:
    for module, names in MODULES.items():
        for name, known in names.items():
            if isinstance(known, NotOffered):
                assert known.reason.endswith(".") and ". " in known.reason, f"{module}.{name}"


def test_lockstep_utils_has_them_as_well() -> None:
    utils = importlib.import_module("lockstep.utils")
    assert utils.convert_bytes(2048) == "2.0 KB"
    expect_refusal(AttributeError, "Megatron-LM", getattr, utils, "MegatronLMPlugin")
    expect_refusal(AttributeError, "'nonsense'", getattr, utils, "nonsense")
    assert "set_module_tensor_to_device" in dir(utils)
    assert Path(importlib.import_module("lockstep.compat.accelerate.names").__file__ or "").exists()
