"""Steps in which a model is sharded by torch's ``fully_shard``, as scripts take them by themselves.

``accelerator.prepare`` does all of it. Names of ``accelerate.utils.fsdp_utils``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.config.enums import Activation
from lockstep.errors import ConfigError, UsageError
from lockstep.model.blocks import find_blocks
from lockstep.parallel.parallel_model import unwrap
from lockstep.parallel.recompute import apply_activation_checkpointing
from lockstep.utils.dataclasses import get_module_class_from_name

if TYPE_CHECKING:
    from lockstep.accelerator import Accelerator

T = TypeVar("T")


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Return a function module -> bool that tells which modules ``auto_wrap_policy`` chooses. None: there is no
    policy.

    Args:
        fsdp2_plugin: A ``FullyShardedDataParallelPlugin``.
        model: The model.

    Raises:
        ValueError: ``model`` has no module of a class in ``transformer_cls_names_to_wrap``.

    Examples:
        ```python
        import torch
        from lockstep.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_auto_wrap_policy

        plugin = FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["TransformerEncoderLayer"]
        )
        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), num_layers=2)
        is_block = fsdp2_prepare_auto_wrap_policy(plugin, model)
        assert is_block(model.layers[0]) and not is_block(model.layers[0].linear1)
        ```
    """
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policy = fsdp2_plugin.auto_wrap_policy
    policy = policy.func if isinstance(policy, functools.partial) else policy
    word = str(policy).upper() if isinstance(policy, str) else ""
    if policy is transformer_auto_wrap_policy or word == "TRANSFORMER_BASED_WRAP":
        names = fsdp2_plugin.transformer_cls_names_to_wrap
        names = getattr(model, "_no_split_modules", None) or () if names is None else names
        found = {name: get_module_class_from_name(model, name) for name in names}
        for name, kind in found.items():
            if kind is None:
                raise ConfigError(
                    f"{type(model).__name__} has no module of the class {name}. Check the name."
                )
        kinds = tuple(kind for kind in found.values() if kind is not None)
        return lambda module: isinstance(module, kinds)
    if policy is size_based_auto_wrap_policy or word == "SIZE_BASED_WRAP":
        least = fsdp2_plugin.min_num_params or 0
        return lambda module: sum(parameter.numel() for parameter in module.parameters()) > least
    return None


def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Let blocks of a model compute their activations again in backward, in place, and return the model.

    ``parallel="activation=full"`` does the same. If the plugin asks for it, it is ``activation=offload``.

    Args:
        accelerator: The ``Accelerator``, whose FSDP plugin chooses the blocks. Without a policy they are found.
        model: The model.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import fsdp2_apply_ac

        accelerator = Accelerator(parallel="zero=3")
        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), num_layers=2)
        fsdp2_apply_ac(accelerator, model)
        model(torch.randn(2, 3, 8)).sum().backward()  # computes activations of blocks again
        ```
    """
    plugin = accelerator.state.fsdp_plugin
    policy = None if plugin is None else fsdp2_prepare_auto_wrap_policy(plugin, model)
    mode = (
        Activation.OFFLOAD if getattr(plugin, "activation_checkpointing_offload", None) else Activation.FULL
    )
    return apply_activation_checkpointing(
        model, mode, find_blocks(model, () if policy is None else lambda name, module: policy(module))
    )


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return the model, sharded as the run asks for. A model that is sharded already is returned as it is.

    Args:
        accelerator: The ``Accelerator``.
        model: The model.

    Raises:
        UsageError: the run does not shard models.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import fsdp2_prepare_model, model_has_dtensor

        accelerator = Accelerator(parallel="zero=3")
        model = fsdp2_prepare_model(accelerator, torch.nn.Linear(4, 1))
        assert model_has_dtensor(model) == (accelerator.num_processes > 1)
        ```
    """
    if isinstance(unwrap(model, keep_compile=False), FSDPModule):
        return model
    if not accelerator.is_fsdp2:
        raise UsageError(
            f"parallel='{accelerator.parallel}' does not shard models. Pass fsdp_plugin or parallel='zero=3' to "
            "Accelerator."
        )
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[int, object]
) -> None:
    """Let an optimizer step other parameters than before.

    Args:
        optimizer: The optimizer.
        mapping: Address (``data_ptr()``) of a parameter of the optimizer -> the parameter that replaces it.

    Raises:
        KeyError: ``mapping`` lacks a parameter of the optimizer. Nothing was changed.

    Examples:
        ```python
        import torch
        from lockstep.utils import fsdp2_switch_optimizer_parameters

        old, new = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([old], lr=0.1)
        fsdp2_switch_optimizer_parameters(optimizer, {old.data_ptr(): new})
        assert optimizer.param_groups[0]["params"][0] is new
        ```
    """
    switched = []
    for group in optimizer.param_groups:
        keys = [one.data_ptr() if callable(one.data_ptr) else one.data_ptr for one in group["params"]]
        if any(key not in mapping for key in keys):
            raise KeyError(
                "mapping has no sharded parameter for one of the parameters of the optimizer. Pass a sharded "
                "parameter for each of them."
            )
        switched.append([mapping[key] for key in keys])
    for group, parameters in zip(optimizer.param_groups, switched, strict=True):
        group["params"] = parameters


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], T], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], T]:
    """Return a function like ``param_init_fn`` that also keeps tied weights tied.

    Args:
        param_init_fn: A function that fills the parameters of one module.
        model: The model with the tied weights.
        device: Ignored: weights stay where ``param_init_fn`` puts them.

    Examples:
        ```python
        import torch
        from lockstep import init_empty_weights
        from lockstep.utils import ensure_weights_retied

        with init_empty_weights():
            model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(10, 4), "head": torch.nn.Linear(4, 10)})
            model["head"].weight = model["embed"].weight
        init = ensure_weights_retied(lambda module: module.to_empty(device="cpu"), model, torch.device("cpu"))
        init(model["embed"]), init(model["head"])
        assert model["head"].weight is model["embed"].weight
        ```
    """
    from lockstep.offload.device_map.placement import find_tied_parameters

    groups = find_tied_parameters(model)
    if not groups:
        return param_init_fn
    holders = {
        name.rpartition(".")[0]: (name.rpartition(".")[2], group) for group in groups for name in group
    }
    path_of = {id(module): path for path, module in model.named_modules(remove_duplicate=False)}
    made: dict[int, nn.Parameter] = {}

    def init(module: nn.Module) -> T:
        result = param_init_fn(module)
        key, group = holders.get(path_of.get(id(module), ""), ("", []))
        if group:
            setattr(module, key, made.setdefault(id(group), getattr(module, key)))
        return result

    return init


def fsdp2_canonicalize_names(named_params: Mapping[str, T]) -> dict[str, T]:
    """Return a mapping with the names of the user's model, without those parts that compiling and recomputing add.

    Args:
        named_params: Name -> parameter.

    Examples:
        ```python
        from lockstep.utils import fsdp2_canonicalize_names

        assert fsdp2_canonicalize_names({"_orig_mod.layers.0.weight": 1}) == {"layers.0.weight": 1}
        ```
    """
    words = r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\."
    return {re.sub(words, "", name): value for name, value in named_params.items()}


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Move some modules to a device, and return all their parameters.

    Args:
        modules: The modules, or a regular expression that matches their whole names. None: there are none.
        model: The model in which names are looked for.
        device: The device.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_parameters_from_modules

        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        assert get_parameters_from_modules("1", model, "cpu") == set(model[1].parameters())
        ```
    """
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    found: set[nn.Parameter] = set()
    for module in modules:
        found.update(module.to(device).parameters())
    return found
