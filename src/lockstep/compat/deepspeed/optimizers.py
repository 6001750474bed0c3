"""Optimizers that a DeepSpeed JSON describes, and what stands for them and for schedulers in a script until then."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

from lockstep.comm.tree import Kwargs
from lockstep.compat.deepspeed.lr_schedule_params import refuse_unknown
from lockstep.config.readers import OptimizerConfig, Placeholder
from lockstep.config.values import parse_bool, repr_short, suggestion
from lockstep.errors import ConfigError

AUTO = "auto"

_OWN_CODE = "build one in the script and drop the section 'optimizer'"

# Optimizers of DeepSpeed that torch does not have, or has with another meaning: what to use instead.
_INSTEAD = {
    "lamb": f"torch has no LAMB. Use AdamW, or {_OWN_CODE}.",
    "lion": f"torch has no Lion. Use AdamW, or {_OWN_CODE}.",
    "onebitadam": "it compresses communication. Use AdamW, and quantized_gradients in parallel=...",
    "zerooneadam": "it compresses communication. Use AdamW, and quantized_gradients in parallel=...",
    "onebitlamb": f"it compresses LAMB's communication. Use AdamW, or {_OWN_CODE}.",
    "muadam": f"it belongs to the package 'mup'. Use Adam, or {_OWN_CODE}.",
    "muadamw": f"it belongs to the package 'mup'. Use AdamW, or {_OWN_CODE}.",
    "musgd": f"it belongs to the package 'mup'. Use SGD, or {_OWN_CODE}.",
    "muon": "it trains matrices by Muon and all else by Adam. Build torch.optim.Muon and torch.optim.AdamW in the "
    "script, each for its own parameters, and drop the section 'optimizer'.",
}

# What DeepSpeed's Adam takes beyond torch's, the only value that means here what it means there, and the way out.
_ADAM_SWITCHES = {
    "bias_correction": (True, "Remove it: torch's Adam always corrects its bias."),
    "fp32_optimizer_states": (True, "Remove it: the state has the dtype of the parameters it belongs to."),
    "set_grad_none": (True, "Remove it, and call optimizer.zero_grad(set_to_none=False)."),
}


class DummyOptim(Placeholder):
    """Stands for the optimizer that a DeepSpeed JSON describes, until ``prepare`` builds that one.

    Args:
        params: Parameters of any shape, or parameter groups, as for any torch optimizer. A group keeps the values
            that it sets itself.
        lr: The learning rate, if the file has none or ``"auto"``.
        weight_decay: The weight decay, if the file has none or ``"auto"``.
        kwargs: Other arguments of the optimizer, such as ``betas`` and ``eps``, if the file has none or ``"auto"``.

    Raises:
        ConfigError: ``prepare`` raises it if the file describes no optimizer, or one that torch does not have.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import DeepSpeedPlugin, DummyOptim

        described = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}}
        plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 2}, "optimizer": described})
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.01))
        assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer.param_groups[0]["weight_decay"] == 0.1
        ```
    """

    def __init__(self, params: ParamsT, lr: float = 0.001, weight_decay: float = 0, **kwargs: object) -> None:
        self.params = list(params) if isinstance(params, Iterator) else params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler(Placeholder):
    """Stands for the learning rate schedule that a DeepSpeed JSON describes, until ``prepare`` builds that one.

    Args:
        optimizer: The ``DummyOptim``, or a torch optimizer.
        total_num_steps: The length of the schedule in steps, if the file has none or ``"auto"``.
        warmup_num_steps: The number of steps in which the learning rate rises, if the file has ``"auto"``.
        lr_scheduler_callable: A function optimizer -> scheduler, for files without a section ``scheduler``.
        kwargs: Other parameters of the schedule, if the file does not have them.

    Raises:
        ConfigError: ``prepare`` raises it if neither the file nor ``lr_scheduler_callable`` describes a schedule.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

        config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(config))
        model = torch.nn.Linear(4, 1)
        optimizer = DummyOptim(model.parameters())
        scheduler = DummyScheduler(optimizer, warmup_num_steps=10)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        assert scheduler.get_last_lr()[0] < 0.01  # it warms up
        ```
    """

    def __init__(
        self,
        optimizer: Optimizer | DummyOptim,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], LRScheduler] | None = None,
        **kwargs: object,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


def build_optimizer(config: OptimizerConfig | None, dummy: DummyOptim) -> Optimizer:
    """Return the optimizer of the file, over the parameters of ``dummy``. Values in the file win.

    ``Adam`` decays weights as AdamW does unless ``adam_w_mode`` is false, which is DeepSpeed's rule.

    Raises:
        ConfigError: no section in the file; an optimizer that torch lacks; an unknown, missing or
            unusable parameter.
    """
    if config is None:
        raise ConfigError(
            "prepare got a DummyOptim, but the configuration has no section 'optimizer'. Add one to the DeepSpeed "
            "JSON, or pass a torch optimizer."
        )
    kind, params = optimizer_class(config)
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if name != "params"
    }
    given = dummy.kwargs | _rates(dummy, known)
    values = filled(params, given, given, "optimizer", "DummyOptim")
    refuse_unknown(values, known, f"optimizer of type {config.type}")
    values = {name: _checked(value, known[name], name) for name, value in values.items()}
    try:
        return kind(dummy.params, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"torch refuses the optimizer of type {config.type} with {repr_short(values, 200)}: {error}. Change the "
            "parameters in the section 'optimizer', or those of DummyOptim."
        ) from error


def filled(
    params: Mapping[str, object],
    absent: Mapping[str, object],
    auto: Mapping[str, object],
    section: str,
    placeholder: str,
) -> Kwargs:
    """Return the file's ``params``, with ``auto`` for values that are ``"auto"``, and ``absent`` for missing ones.

    Raises:
        ConfigError: a value is ``"auto"`` and there is none to take.
    """
    values = dict(absent)
    for name, value in params.items():
        is_auto = isinstance(value, str) and value == AUTO
        if is_auto and name not in auto:
            raise ConfigError(
                f"{section}.params.{name} is 'auto', but {placeholder} gives no {name}. Pass {placeholder}(..., "
                f"{name}=...), or write a value into the file."
            )
        values[name] = auto[name] if is_auto else value
    return values


def optimizer_class(config: OptimizerConfig) -> tuple[type[Optimizer], dict[str, object]]:
    """Return the class of torch that a file describes, and its arguments.

    Raises:
        ConfigError: torch has none, or an argument is one that only DeepSpeed has.
    """
    name = config.type.lower()
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name in _INSTEAD and (name == "muon" or name not in classes):
        raise ConfigError(f"The optimizer {config.type} is not available: {_INSTEAD[name]}")
    if name not in classes:
        names = sorted(value.__name__ for value in classes.values())
        raise ConfigError(
            f"The optimizer {repr_short(config.type)} is not known.{suggestion(name, names)} Use one of "
            f"{', '.join(names)}."
        )
    if "max_grad_norm" in config.params:
        raise ConfigError(
            "optimizer.params.max_grad_norm is not a parameter of an optimizer. Write gradient_clipping at the top of "
            "the file."
        )
    if name in ("adam", "adamw"):
        return _adam(config)
    return classes[name], config.params


def _adam(config: OptimizerConfig) -> tuple[type[Optimizer], dict[str, object]]:
    params = dict(config.params)
    for name, (same, instead) in _ADAM_SWITCHES.items():
        if name in params and parse_bool(params.pop(name), f"optimizer.params.{name}") != same:
            raise ConfigError(f"optimizer.params.{name}={config.params[name]} is not available. {instead}")
    # torch_adam is only checked: the optimizer is always torch's.
    parse_bool(params.pop("torch_adam", True), "optimizer.params.torch_adam")
    decoupled = parse_bool(params.pop("adam_w_mode", True), "optimizer.params.adam_w_mode")
    if config.type.lower() == "adamw" and not decoupled:
        raise ConfigError(
            "The optimizer of type AdamW has adam_w_mode=false, which contradicts its name. Write the type "
            "Adam, or remove adam_w_mode."
        )
    return torch.optim.AdamW if decoupled else torch.optim.Adam, params


def _rates(dummy: DummyOptim, known: Mapping[str, object]) -> dict[str, object]:
    rates = {"lr": dummy.lr, "weight_decay": dummy.weight_decay}
    # Not every optimizer decays weights. Zero asks for nothing; any other value is refused by its name.
    return {name: value for name, value in rates.items() if name in known or value}


def _checked(value: Any, default: object, name: str) -> object:
    """Return ``value`` if it is of the same sort as the parameter's default; lists become tuples."""
    if isinstance(default, bool):
        return parse_bool(value, f"optimizer.params.{name}")
    if isinstance(default, tuple):
        right = isinstance(value, (list, tuple)) and len(value) == len(default)
        if not right or not all(item is None or _is_number(item) for item in value):
            raise ConfigError(
                f"optimizer.params.{name} is {repr_short(value)}, but must be {len(default)} numbers. Write them as "
                f"{list(default)}."
            )
        return tuple(value)
    if isinstance(default, (int, float)) and not _is_number(value):
        raise ConfigError(
            f"optimizer.params.{name} is {repr_short(value)}, which is not a finite number. Write it as a number, "
            "without quotes."
        )
    return value


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
