"""The plugin that describes FSDP to ``Accelerator``, in our settings. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.config.enums import Activation
from lockstep.config.parallel import Parallel
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded, in the words of PyTorch's FSDP and of Accelerate's class of this name.

    ``parallel="zero=3"`` is the short form. The engine is torch's ``fully_shard``, whichever version is named. A
    field that is None asks for nothing. Where a field has no effect, another value than FSDP's usual one gives a
    warning.

    Args:
        fsdp_version: 1 or 2. Both shard in the same way.
        sharding_strategy: ``"FULL_SHARD"`` (stage 3 of ZeRO, also the default), ``"SHARD_GRAD_OP"`` (stage 2),
            ``"NO_SHARD"``, ``"HYBRID_SHARD"`` or ``"HYBRID_SHARD_ZERO2"``. The last two keep a whole model on each
            machine. torch's ``ShardingStrategy`` and its numbers mean the same.
        reshard_after_forward: FSDP 2's word for it. True is stage 3, False is stage 2.
        backward_prefetch: No effect: backward always gathers one block ahead.
        mixed_precision_policy: ``"bf16"`` or ``"fp16"``, a mapping with ``param_dtype`` and ``reduce_dtype``, or
            torch's ``MixedPrecisionPolicy``. ``param_dtype`` becomes ``mixed_precision``. ``reduce_dtype`` is the
            type in which gradients are averaged.
        auto_wrap_policy: A policy of ``torch.distributed.fsdp.wrap`` decides which modules are sharded one by one.
            Names of policies have no effect, because blocks are found by the model's structure.
        cpu_offload: True, or torch's object for it: parameters, gradients and optimizer state are kept in host
            memory.
        ignored_modules: Refused: all parameters are sharded.
        state_dict_type: ``"FULL_STATE_DICT"`` or ``"SHARDED_STATE_DICT"``: how ``save_fsdp_model`` writes. It has no
            effect on ``save_state``, whose files any number of processes can read.
        state_dict_config: No effect; ``set_state_dict_type`` fills it in.
        optim_state_dict_config: No effect; ``set_state_dict_type`` fills it in.
        limit_all_gathers: No effect: torch's engine limits them.
        use_orig_params: No effect: the optimizer always sees the original parameters.
        param_init_fn: Refused. Use ``accelerator.prepare_model(model, init_weights=...)``.
        sync_module_states: No effect: all ranks always begin with the weights of rank 0.
        forward_prefetch: Gather the next block's parameters before the current block runs.
        activation_checkpointing: Compute the activations of blocks again in backward (``activation=full``).
        activation_checkpointing_offload: Keep the inputs of these blocks in host memory (``activation=offload``).
        cpu_ram_efficient_loading: No effect. Build the model on the meta device instead.
        transformer_cls_names_to_wrap: Names of the classes of modules that are sharded one by one (``blocks``).
        min_num_params: No effect on ``prepare``. ``set_auto_wrap_policy`` hands it to torch's policy by size.

    Raises:
        ConfigError: ``Accelerator`` raises it where a field is refused, or where two fields contradict each other.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
        accelerator = Accelerator(fsdp_plugin=plugin)
        assert accelerator.parallel.zero == 3
        ```
    """

    fsdp_version: int | None = None
    sharding_strategy: object = None
    reshard_after_forward: object = None
    backward_prefetch: object = None
    mixed_precision_policy: object = None
    auto_wrap_policy: object = None
    cpu_offload: object = None
    ignored_modules: object = None
    state_dict_type: object = None
    state_dict_config: object = None
    optim_state_dict_config: object = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: object = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def set_state_dict_type(self, state_dict_type: object = None) -> None:
        """Set how states are saved, together with torch's objects that describe it.

        Args:
            state_dict_type: ``"FULL_STATE_DICT"``, ``"SHARDED_STATE_DICT"``, or torch's ``StateDictType``. None: the
                type that the field has, or else ``"SHARDED_STATE_DICT"``.

        Raises:
            ValueError: the name is unknown, or it is ``LOCAL_STATE_DICT``, which nothing here can load.

        Examples:
            ```python
            from lockstep.utils import FullyShardedDataParallelPlugin

            plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
            plugin.set_state_dict_type("FULL_STATE_DICT")
            assert "FULL" in str(plugin.state_dict_type)
            ```
        """
        from torch.distributed import fsdp

        given = self.state_dict_type if state_dict_type is None else state_dict_type
        word = str(getattr(given, "name", given or "SHARDED_STATE_DICT")).upper()
        word = fsdp.StateDictType(int(word)).name if word.isdigit() else word
        if word not in STATES:
            raise ConfigError(
                f"state_dict_type is {given!r}, but must be one of {', '.join(STATES)}. Use one of them."
            )
        kinds = STATES[word]
        options = {"offload_to_cpu": True, **({"rank0_only": True} if word == "FULL_STATE_DICT" else {})}
        self.state_dict_type = fsdp.StateDictType[word]
        self.state_dict_config = getattr(fsdp, kinds[0])(**options)
        self.optim_state_dict_config = getattr(fsdp, kinds[1])(**options)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Replace the name of a policy, or torch's function for it, by one that knows the classes of ``model``.

        Call it before the ``Accelerator`` is made. ``prepare`` reads the policy of that moment.

        Raises:
            ValueError: ``model`` has no class of a name in ``transformer_cls_names_to_wrap``.

        Examples:
            ```python
            import torch
            from lockstep.utils import FullyShardedDataParallelPlugin

            names = ["TransformerEncoderLayer"]
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=names
            )
            plugin.set_auto_wrap_policy(torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), 2))
            assert callable(plugin.auto_wrap_policy)
            ```
        """
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        policy: object = self.auto_wrap_policy
        if isinstance(policy, str):
            known = {
                "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
                "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
            }
            policy = known.get(policy.upper())
        if policy is transformer_auto_wrap_policy:
            names = self.transformer_cls_names_to_wrap
            self.transformer_cls_names_to_wrap = names = list(
                getattr(model, "_no_split_modules", None) or () if names is None else names
            )
            classes = {type(module).__name__: type(module) for module in model.modules()}
            missing = [name for name in names if name not in classes]
            if missing:
                raise ConfigError(
                    f"{type(model).__name__} has no module of the class {missing[0]}. Check the name."
                )
            policy = partial(policy, transformer_layer_cls={classes[name] for name in names})
        elif policy is size_based_auto_wrap_policy:
            policy = partial(policy, min_num_params=self.min_num_params) if self.min_num_params else None
        self.auto_wrap_policy = policy

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set ``mixed_precision_policy`` to torch's object for a type. A policy that exists already stays as it is.

        Args:
            mixed_precision: ``"fp16"``, ``"bf16"``, ``"fp32"`` or such a ``torch.dtype``. ``"fp8"`` means bfloat16.
            buffer_autocast: With ``fsdp_version=1``, keep buffers in float32.
            override: Replace a policy that exists already.

        Raises:
            ValueError: the type is unknown, or a mapping in ``mixed_precision_policy`` lacks a field of torch's
                policy.

        Examples:
            ```python
            import torch
            from lockstep.utils import FullyShardedDataParallelPlugin

            plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
            plugin.set_mixed_precision("bf16")
            assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
            ```
        """
        import torch

        types = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        dtype = types.get(mixed_precision, mixed_precision)
        if not isinstance(mixed_precision, Mapping) and dtype not in types.values():
            raise ConfigError(
                f"mixed_precision is {mixed_precision!r}, but must be one of {', '.join(types)}, or one of these "
                "as a torch.dtype. Use one of them."
            )
        kind, last = _policy_kind(self.fsdp_version)
        fields = ("param_dtype", "reduce_dtype", last)
        policy = self.mixed_precision_policy
        if override or policy is None:
            values = [dtype, dtype, torch.float32 if buffer_autocast and last == "buffer_dtype" else dtype]
            self.mixed_precision_policy = kind(**dict(zip(fields, values, strict=True)))
        elif isinstance(policy, Mapping):
            if set(policy) < set(fields) or any(value not in types.values() for value in policy.values()):
                raise ConfigError(
                    f"mixed_precision_policy is {dict(policy)}, but must have {', '.join(fields)}, each a "
                    f"torch.dtype of {', '.join(types)}. Pass these keys."
                )
            self.mixed_precision_policy = kind(**policy)


STATES = {
    "FULL_STATE_DICT": ("FullStateDictConfig", "FullOptimStateDictConfig"),
    "SHARDED_STATE_DICT": ("ShardedStateDictConfig", "ShardedOptimStateDictConfig"),
}


def _policy_kind(version: int | None) -> tuple[Any, str]:
    """Return torch's class of policies for a version of FSDP, and the last of its types."""
    from torch.distributed import fsdp

    return (
        (fsdp.MixedPrecision, "buffer_dtype") if version == 1 else (fsdp.MixedPrecisionPolicy, "output_dtype")
    )


def resolved_plugin(plugin: object, parallel: Parallel) -> Any:
    """Return the plugin with what it does not say itself filled in as a run has it; without one a new one.

    Other libraries read it: the version, how states are saved, whether parameters are given up after forward.
    """
    known = FullyShardedDataParallelPlugin() if plugin is None else plugin
    is_whole = parallel.zero == 3
    given = {
        "fsdp_version": 2,
        "sharding_strategy": "FULL_SHARD" if is_whole else "SHARD_GRAD_OP",
        "reshard_after_forward": is_whole,
        "state_dict_type": "FULL_STATE_DICT",
        "cpu_offload": parallel.offloads_params,
        "activation_checkpointing": parallel.activation is not Activation.NONE,
        "cpu_ram_efficient_loading": False,
    }
    for name, value in given.items():
        if getattr(known, name, None) is None or name == "fsdp_version":
            setattr(known, name, value)
    return known
