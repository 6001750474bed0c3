"""Names that scripts import from ``accelerate.utils.fsdp_utils``: states of sharded models in files.

The files are those of ``torch.save`` (whole states) or of ``torch.distributed.checkpoint`` (sharded ones), as other
libraries look for them. ``Accelerator.save_state`` writes neither: its own format is checked when it is read.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lockstep.checkpoint.weights.model import save_object
from lockstep.errors import CheckpointError, ConfigError, UsageError
from lockstep.parallel.parallel_model import unwrap
from lockstep.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from lockstep.utils.dataclasses import get_module_class_from_name
from lockstep.utils.modeling import is_peft_model

if TYPE_CHECKING:
    from lockstep.accelerator import Accelerator

__all__ = [
    "FSDP_MODEL_NAME",
    "OPTIMIZER_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_NAME",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "get_parameters_from_modules",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]


def _is_whole(fsdp_plugin: object) -> bool:
    """Return whether states are to be saved whole, not in shards. Raises UsageError for a kind that there is not."""
    kind = getattr(fsdp_plugin, "state_dict_type", None)
    word = str(getattr(kind, "name", kind) or "FULL_STATE_DICT").upper()
    if word not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        raise UsageError(
            f"state_dict_type={word} is not supported for saving. Use FULL_STATE_DICT or SHARDED_STATE_DICT."
        )
    return word == "FULL_STATE_DICT"


def save_fsdp_model(
    fsdp_plugin: object,
    accelerator: object,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the state of a model to a folder, as Accelerate's FSDP does. Call it on every rank.

    With ``FULL_STATE_DICT``, rank 0 writes ``pytorch_model_fsdp.bin``. With ``SHARDED_STATE_DICT``, all ranks write
    ``pytorch_model_fsdp_0/``, by ``torch.distributed.checkpoint``. ``accelerator.save_state`` writes a format of its
    own.

    Args:
        fsdp_plugin: A ``FullyShardedDataParallelPlugin``, whose ``state_dict_type`` chooses the format.
        accelerator: The ``Accelerator``.
        model: The prepared model.
        output_dir: The folder. It is made if it does not exist.
        model_index: The number in the name, from the second model on.
        adapter_only: Write only the adapters of a peft model.
        use_dcp: Accepted, without effect.

    Raises:
        UsageError: ``state_dict_type`` is ``LOCAL_STATE_DICT``.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import FullyShardedDataParallelPlugin, load_fsdp_model, save_fsdp_model

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        save_fsdp_model(plugin, accelerator, model, "fsdp_model")  # fsdp_model/pytorch_model_fsdp.bin
        load_fsdp_model(plugin, accelerator, model, "fsdp_model")
        ```
    """
    whole = _is_whole(fsdp_plugin)
    state = _model_state(model, whole, adapter_only)
    _StatePaths(accelerator, output_dir, "model", FSDP_MODEL_NAME, model_index).save(state, whole)


def load_fsdp_model(
    fsdp_plugin: object,
    accelerator: object,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read what ``save_fsdp_model`` wrote, on any number of ranks. Call it on every rank.

    Args:
        fsdp_plugin: A ``FullyShardedDataParallelPlugin``, whose ``state_dict_type`` is that of the files.
        accelerator: The ``Accelerator``.
        model: The prepared model.
        input_dir: The folder.
        model_index: The number in the name, from the second model on.
        adapter_only: Read only the adapters of a peft model.
        use_dcp: Accepted, without effect.

    Returns:
        The names that the files lack, and those that the model lacks, as ``missing_keys`` and ``unexpected_keys``.

    Raises:
        CheckpointError: the file or folder does not exist.
        UsageError: ``state_dict_type`` is ``LOCAL_STATE_DICT``.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import FullyShardedDataParallelPlugin, load_fsdp_model, save_fsdp_model

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        save_fsdp_model(plugin, accelerator, model, "fsdp_shards")  # fsdp_shards/pytorch_model_fsdp_0/
        assert load_fsdp_model(plugin, accelerator, model, "fsdp_shards").missing_keys == []
        ```
    """
    plain = unwrap(model, keep_compile=False)
    adapters = adapter_only and is_peft_model(plain)
    files = _StatePaths(accelerator, input_dir, "model", FSDP_MODEL_NAME, model_index)
    whole = _is_whole(fsdp_plugin)
    state = files.load(None if whole else _model_state(model, False, adapter_only))
    if adapters:
        state = _with_adapter_names(plain, state)
    return set_model_state_dict(
        plain, state, options=StateDictOptions(full_state_dict=whole, strict=not adapters)
    )


def save_fsdp_optimizer(
    fsdp_plugin: object,
    accelerator: object,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of an optimizer to a folder, by names of parameters. Call it on every rank.

    With ``FULL_STATE_DICT``, rank 0 writes ``optimizer.bin``. With ``SHARDED_STATE_DICT``, all ranks write
    ``optimizer_0/``.

    Args:
        fsdp_plugin: A ``FullyShardedDataParallelPlugin``, whose ``state_dict_type`` chooses the format.
        accelerator: The ``Accelerator``.
        optimizer: The prepared optimizer.
        model: The prepared model whose parameters it steps.
        output_dir: The folder. It is made if it does not exist.
        optimizer_index: The number in the name, from the second optimizer on.
        use_dcp: Accepted, without effect.

    Raises:
        UsageError: ``state_dict_type`` is ``LOCAL_STATE_DICT``.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import FullyShardedDataParallelPlugin, load_fsdp_optimizer, save_fsdp_optimizer

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, "fsdp_optimizer")  # fsdp_optimizer/optimizer.bin
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, "fsdp_optimizer")
        ```
    """
    whole = _is_whole(fsdp_plugin)
    plain, inner = unwrap(model, keep_compile=False), getattr(optimizer, "optimizer", optimizer)
    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
    state = get_optimizer_state_dict(plain, inner, options=options)
    _StatePaths(accelerator, output_dir, "optimizer", OPTIMIZER_NAME, optimizer_index).save(state, whole)


def load_fsdp_optimizer(
    fsdp_plugin: object,
    accelerator: object,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what ``save_fsdp_optimizer`` wrote, on any number of ranks. Call it on every rank.

    Args:
        fsdp_plugin: A ``FullyShardedDataParallelPlugin``, whose ``state_dict_type`` is that of the files.
        accelerator: The ``Accelerator``.
        optimizer: The prepared optimizer.
        model: The prepared model whose parameters it steps.
        input_dir: The folder.
        optimizer_index: The number in the name, from the second optimizer on.
        adapter_only: Accepted, without effect.
        use_dcp: Accepted, without effect.

    Raises:
        CheckpointError: the file or folder does not exist.
        UsageError: ``state_dict_type`` is ``LOCAL_STATE_DICT``.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import FullyShardedDataParallelPlugin, load_fsdp_optimizer, save_fsdp_optimizer

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, "optimizer_shards")  # optimizer_shards/optimizer_0/
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, "optimizer_shards")
        ```
    """
    plain, inner = unwrap(model, keep_compile=False), getattr(optimizer, "optimizer", optimizer)
    files = _StatePaths(accelerator, input_dir, "optimizer", OPTIMIZER_NAME, optimizer_index)
    whole = _is_whole(fsdp_plugin)
    state = files.load(None if whole else get_optimizer_state_dict(plain, inner))
    set_optimizer_state_dict(plain, inner, state, options=StateDictOptions(full_state_dict=whole))


@dataclass
class _StatePaths:
    """Where one state is: ``<name>.bin`` if it is whole, ``<name>_0/`` if it is sharded."""

    accelerator: Any
    folder: str | os.PathLike[str]
    key: str
    name: str
    index: int

    @property
    def _single_file(self) -> Path:
        return Path(self.folder, f"{self.name}_{self.index}.bin" if self.index else f"{self.name}.bin")

    @property
    def _shards(self) -> Path:
        return Path(self.folder, f"{self.name}_{self.index}")

    def save(self, state: dict[str, Any], whole: bool) -> None:
        os.makedirs(self.folder, exist_ok=True)
        if not whole:
            state_dict_saver.save({self.key: state}, checkpoint_id=self._shards, no_dist=not _has_group())
            return
        if self.accelerator.is_main_process:
            save_object(state, self._single_file)
        self.accelerator.wait_for_everyone()

    def load(self, shards: dict[str, Any] | None) -> dict[str, Any]:
        """Return the whole state, or ``shards`` with the values that were saved."""
        self.accelerator.wait_for_everyone()
        if shards is None:
            if not self._single_file.is_file():
                raise CheckpointError(
                    f"There is no file or folder {self._single_file}. Name the directory that "
                    f"save_fsdp_{self.key} wrote."
                )
            state: dict[str, Any] = torch.load(self._single_file, map_location="cpu", weights_only=True)
            return state
        folder = self._shards if self._shards.is_dir() else Path(self.folder)
        if not (folder / ".metadata").is_file():
            raise CheckpointError(
                f"{folder} is no sharded checkpoint (it has no .metadata). Name the folder that was saved."
            )
        state_dict_loader.load({self.key: shards}, checkpoint_id=folder, no_dist=not _has_group())
        return shards


def _model_state(model: nn.Module, whole: bool, adapter_only: bool) -> dict[str, object]:
    plain = unwrap(model, keep_compile=False)
    state = get_model_state_dict(plain, options=StateDictOptions(full_state_dict=whole, cpu_offload=whole))
    if not (adapter_only and is_peft_model(plain)):
        return dict(state)
    from peft import get_peft_model_state_dict

    adapters: dict[str, object] = get_peft_model_state_dict(
        plain, state_dict=state, adapter_name=str(plain.active_adapter), save_embedding_layers=False
    )
    return adapters


def _with_adapter_names(model: Any, state: Mapping[str, object]) -> dict[str, Any]:
    """Return the names under which a model of peft has its adapters: files leave out which of them it is."""
    adapter = model.active_adapter
    names = {
        name.replace(f".{adapter}.", ".").removesuffix(f".{adapter}"): name for name in model.state_dict()
    }
    return {names.get(name, name): value for name, value in state.items()}


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Join the shards of a model into one file of weights. Call it in one process.

    Args:
        checkpoint_dir: A folder that ``save_fsdp_model`` wrote with ``SHARDED_STATE_DICT``, or that ``save_state``
            wrote.
        output_path: The folder of the result. It is made if it does not exist.
        safe_serialization: Write ``model.safetensors``. Otherwise write ``pytorch_model.bin``.
        remove_checkpoint_dir: Remove ``checkpoint_dir`` afterwards.

    Raises:
        ValueError: ``checkpoint_dir`` is no sharded weights, but has folders of them, which the message names; or
            it is to be removed, and ``output_path`` is in it.
        CheckpointError: there are no weights, or they are damaged.

    Examples:
        ```python
        import torch
        from safetensors.torch import load_file
        from lockstep import Accelerator
        from lockstep.utils import merge_fsdp_weights

        accelerator = Accelerator(parallel="zero=3")
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        folder = accelerator.save_state("shards_to_merge")
        if accelerator.is_main_process:
            merge_fsdp_weights(folder, "merged_weights")
            assert load_file("merged_weights/model.safetensors")["weight"].shape == (1, 4)
        ```
    """
    from lockstep.compat.checkpoints.merge import merge_weights

    merge_weights(Path(checkpoint_dir), Path(output_path), safe_serialization, remove_checkpoint_dir)


def fsdp2_load_full_state_dict(
    accelerator: object, model: nn.Module, full_sd: Mapping[str, torch.Tensor], cpu_offload: bool = False
) -> None:
    """Fill a sharded model from a whole state dict. Call it on every rank.

    Args:
        accelerator: Ignored.
        model: The sharded model.
        full_sd: Name -> tensor of the shape of the whole weight. Only that of rank 0 is used.
        cpu_offload: Whether the shards of the model are on the CPU.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import fsdp2_load_full_state_dict

        accelerator = Accelerator(parallel="zero=3")
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        whole = {"weight": torch.ones(1, 4), "bias": torch.zeros(1)}
        fsdp2_load_full_state_dict(accelerator, model, whole)
        assert model(torch.ones(1, 4)).item() == 4
        ```
    """
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=_has_group(), cpu_offload=cpu_offload
    )
    set_model_state_dict(unwrap(model, keep_compile=False), dict(full_sd), options=options)


# -- steps in which a model is sharded; ``accelerator.prepare`` does all of them


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
        from lockstep.utils import fsdp2_prepare_model

        accelerator = Accelerator(parallel="zero=3")
        model = fsdp2_prepare_model(accelerator, torch.nn.Linear(4, 1))
        assert fsdp2_prepare_model(accelerator, model) is model
        ```
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(unwrap(model, keep_compile=False), FSDPModule):
        return model
    if not accelerator.is_fsdp2:
        raise UsageError(
            f"parallel='{accelerator.parallel}' does not shard models. Pass fsdp_plugin or parallel='zero=3' to "
            "Accelerator."
        )
    prepared: nn.Module = accelerator.prepare_model(model)
    return prepared


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
