"""What transformers expects beside and in the weights of its models. Imports nothing of it that is not there yet."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.state import place_of
from lockstep.errors import CheckpointError


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``from_pretrained`` of the model's class can load its weights: a model of transformers, no adapters."""
    bases = ((base.__module__, base.__name__) for base in type(model).__mro__)
    return ("transformers.modeling_utils", "PreTrainedModel") in bases and not getattr(
        model, "_hf_peft_config_loaded", False
    )


def configurations(model: Any) -> dict[str, bytes]:
    """The files that ``save_pretrained`` writes beside the weights, by name: none for other models.

    Raises:
        CheckpointError: transformers refuses to write them.
    """
    if not is_pretrained(model):
        return {}
    config = copy.deepcopy(model.config)
    # FSDP gives the model a class of its own.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # before 4.56
    setattr(config, name, str(model.dtype).removeprefix("torch."))
    try:
        with TemporaryDirectory() as folder:
            if getattr(model, "_auto_class", None) is not None:  # its code lies beside it
                from transformers.dynamic_module_utils import custom_object_save

                custom_object_save(model, folder, config=config)
            config.save_pretrained(folder)
            if model.can_generate() and getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"The configuration of {type(model).__name__} could not be written: {error} Mend model.config or "
            "model.generation_config."
        ) from error


def named_to_save(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names under which to save a model's tensors, one for each that several names share.

    Of tied weights it is the one that the model ties the others to, where it says so, else the first; what the model
    does not want to be saved is left out.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = [re.compile(pattern) for pattern in _tied_patterns(model)]
    kept: dict[Any, str] = {}
    for name, tensor in tensors.items():
        place = place_of(tensor) if tensor.numel() else name
        if name not in ignored and (place not in kept or (_any(tied, kept[place]) and not _any(tied, name))):
            kept[place] = name
    chosen = set(kept.values())
    return [name for name in tensors if name in chosen]


def _tied_patterns(model: nn.Module) -> list[str]:
    """Expressions for the names that transformers makes from others when it loads: keys of a dict, before 5 a list."""
    found: list[str] = []
    for prefix, module in model.named_modules():
        patterns = getattr(module, "_tied_weights_keys", None)
        if isinstance(patterns, (list, tuple, dict)):
            found += [f"{prefix}.{pattern}" if prefix else pattern for pattern in patterns]
    return found


def _any(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)
