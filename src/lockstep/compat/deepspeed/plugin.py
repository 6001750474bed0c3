"""The plugin that describes DeepSpeed to ``Accelerator``, in our settings. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.compat.deepspeed.hf_config import HfDeepSpeedConfig
from lockstep.config.files import JsonObject
from lockstep.errors import ConfigError


@dataclass
class DeepSpeedPlugin:
    """A DeepSpeed configuration, or its most used settings one by one.

    The engine is torch's ``fully_shard``, not DeepSpeed, so that the package deepspeed is not needed. After
    construction, ``deepspeed_config`` is the configuration as a mapping. A field and a key of the configuration may
    not contradict each other. A field that is None asks for nothing.

    Args:
        hf_ds_config: The path of a JSON file, a mapping, or transformers' ``HfDeepSpeedConfig``. None or ``"none"``:
            the other fields are the configuration.
        gradient_accumulation_steps: The number of micro-batches in one optimizer step.
        gradient_clipping: Gradients are scaled to at most this 2-norm before each step.
        zero_stage: The stage of ZeRO, 0 to 3. None: that of the configuration, or 2 if there is no configuration.
        is_train_batch_min: Accepted, without effect.
        offload_optimizer_device: ``"cpu"`` or ``"nvme"``: where optimizer state is kept. ``"none"``: on the device.
        offload_param_device: The same for parameters and gradients.
        offload_optimizer_nvme_path: The folder that ``offload_optimizer_device="nvme"`` needs.
        offload_param_nvme_path: The folder that ``offload_param_device="nvme"`` needs.
        zero3_init_flag: No effect on models; a warning says so. Build the model on the meta device instead.
        zero3_save_16bit_model: No effect: ``save_model`` always writes whole weights.
        transformer_moe_cls_names: Accepted, without effect: experts are sharded as other blocks are.
        enable_msamp: Refused: MS-AMP is not supported. Use ``mixed_precision="fp8"``.
        msamp_opt_level: Accepted, without effect.

    Raises:
        ConfigError: ``hf_ds_config`` is neither a path nor a mapping, or the file cannot be read. ``Accelerator``
            raises it where a field is refused, or where fields and configuration contradict each other.

    Examples:
        ```python
        from lockstep.utils import DeepSpeedPlugin

        plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"})
        assert plugin.zero_stage == 3
        assert plugin.get_value("zero_optimization.stage") == 3
        assert plugin.is_auto("train_micro_batch_size_per_gpu")
        plugin.fill_match("train_micro_batch_size_per_gpu", train_micro_batch_size_per_gpu=8)
        assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 8
        ```
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    deepspeed_config: JsonObject = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = getattr(self.hf_ds_config, "config", self.hf_ds_config)
        self._source = (
            str(given) if isinstance(given, (str, Path)) and given != "none" else "deepspeed_plugin"
        )
        if given is None or given == "none":
            self.zero_stage = 2 if self.zero_stage is None else self.zero_stage
            given = {"zero_optimization": {"stage": self.zero_stage}}
        elif not isinstance(given, (str, Path, Mapping)):
            raise ConfigError(
                f"hf_ds_config is of type {type(given).__name__}. Give the path of a JSON file, or a mapping."
            )
        known = hasattr(self.hf_ds_config, "find_config_node")
        self.hf_ds_config = self.hf_ds_config if known else HfDeepSpeedConfig(given)
        self.deepspeed_config = self.hf_ds_config.config
        zero = self.deepspeed_config.get("zero_optimization")
        if self.zero_stage is None and isinstance(zero, Mapping):
            self.zero_stage = zero.get("stage")

    # -- the configuration, key by key -------------------------------------------------------------------

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return the value of a key, such as ``zero_optimization.stage``.

        Args:
            ds_key_long: The key, with the names of its sections before it, separated by dots.
            default: What is returned if the configuration does not have the key.
        """
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the key ``ds_key_long`` is ``"auto"``, so that the script gives its value."""
        return bool(self.get_value(ds_key_long) == "auto")

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: object
    ) -> None:
        """Give one key that is ``"auto"`` its value.

        Args:
            ds_key_long: The key, such as ``zero_optimization.stage``. Nothing happens if its section does not exist.
            mismatches: A list. With ``must_match``, a sentence is added to it if the key has another value than in
                ``kwargs``.
            must_match: Whether to compare the value of the key with that in ``kwargs``.
            kwargs: Values by whole names of keys: ``**{"zero_optimization.stage": 3}``.

        Raises:
            ValueError: the key is ``"auto"``, and ``kwargs`` has no value for it.

        Examples:
            ```python
            from lockstep.utils import DeepSpeedPlugin

            plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"})
            plugin.fill_match("gradient_clipping", gradient_clipping=1.0)
            assert plugin.get_value("gradient_clipping") == 1.0
            ```
        """
        section, key = self.hf_ds_config.find_config_node(ds_key_long)
        if section is None:
            return
        configured = section.get(key)
        if configured == "auto":
            if ds_key_long not in kwargs:
                raise ConfigError(
                    f"{ds_key_long} is 'auto', but no argument gives its value. Pass the value, or write it into "
                    "the configuration."
                )
            section[key] = kwargs[ds_key_long]
        elif (
            must_match
            and configured is not None
            and kwargs.get(ds_key_long, configured) != configured
            and mismatches is not None
        ):
            mismatches.append(
                f"{ds_key_long} is {configured} in the configuration, but {kwargs[ds_key_long]} was passed"
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write the precision into the sections ``fp16`` and ``bf16`` of the configuration.

        A section that the configuration has already keeps its value of ``enabled``, unless that is ``"auto"``.

        Args:
            mixed_precision: ``"fp16"``, ``"bf16"`` or ``"no"``.

        Raises:
            ValueError: the configuration enables the other type.

        Examples:
            ```python
            from lockstep.utils import DeepSpeedPlugin

            plugin = DeepSpeedPlugin(zero_stage=2)
            plugin.set_mixed_precision("bf16")
            assert plugin.get_value("bf16.enabled") is True
            ```
        """
        config = self.deepspeed_config
        other = {"fp16": "bf16", "bf16": "fp16"}.get(mixed_precision)
        section = config.get(other) if other else None
        if isinstance(section, Mapping) and str(section.get("enabled", False)).lower() == "true":
            raise ConfigError(
                f"mixed_precision={mixed_precision!r}, but {other} is enabled in the configuration. Use one of them."
            )
        if mixed_precision == "fp16":
            config.setdefault("fp16", {"enabled": True, "auto_cast": True})
        for name in ("fp16", "bf16"):
            config.setdefault(name, {"enabled": name == mixed_precision})
            enabled: dict[str, object] = {f"{name}.enabled": name == mixed_precision}
            self.fill_match(f"{name}.enabled", None, False, **enabled)

    # -- what belongs to DeepSpeed's engine ----------------------------------------------------------------

    @property
    def selected(self) -> bool:
        """Always True: a run has one plugin."""
        return True

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Refuse, as Accelerate's plugin does: ``accelerator.state.select_deepspeed_plugin(name)`` selects one of
        several plugins.

        Raises:
            ValueError: always.

        Examples:
            ```python
            from lockstep.utils import DeepSpeedPlugin

            plugin = DeepSpeedPlugin(zero_stage=2)
            assert plugin.selected
            try:
                plugin.select()  # there is nothing to choose from
                raise AssertionError("it was selected")
            except ValueError as error:
                print(error)
            ```
        """
        if not _from_accelerator_state:
            raise ConfigError(
                "A DeepSpeed plugin cannot select itself. Call accelerator.state.select_deepspeed_plugin(name)."
            )

    def is_zero3_init_enabled(self) -> bool:
        """Return ``zero3_init_flag`` as a truth value.

        It decides nothing here. A model on the meta device gets its values shard by shard when it is prepared.

        Examples:
            ```python
            from lockstep.utils import DeepSpeedPlugin

            plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
            assert plugin.is_zero3_init_enabled()
            ```
        """
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Set ``zero3_init_flag`` to ``enable`` inside of the block. Afterwards it has its value from before.

        Examples:
            ```python
            from lockstep.utils import DeepSpeedPlugin

            plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
            with plugin.zero3_init_context_manager(enable=False):
                assert not plugin.is_zero3_init_enabled()
            ```
        """
        before, self.zero3_init_flag = self.zero3_init_flag, enable
        try:
            yield
        finally:
            self.zero3_init_flag = before
