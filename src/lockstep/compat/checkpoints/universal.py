"""DeepSpeed's universal form: ``zero/<parameter>/fp32.pt``, ``exp_avg.pt`` and so on, each one whole tensor.

``ds_to_universal.py`` writes it, with ``zero/optimizer_state.pt`` for the groups of the optimizer.
"""

from __future__ import annotations

import re

import torch

from lockstep.compat.checkpoints.reader import ForeignReader

_WEIGHT = "fp32"
_GROUPS = "optimizer_state.pt"
# Other keys tell how tensor ranks cut or padded it.
_PLAIN = {"param", "cat_dim"}


def is_universal(reader: ForeignReader, folder: str) -> bool:
    """Whether the tag in ``folder`` has been made universal."""
    return bool(_files(reader, folder))


def read_universal(
    reader: ForeignReader, folder: str, shapes: object
) -> tuple[dict[str, torch.Tensor], dict[str, object], dict[str, object]]:
    """Weights, the optimizer's state by name, and what else was common to all ranks' optimizers.

    ``shapes`` is ``param_shapes`` of the model's file: the names of each group.

    Raises:
        CheckpointError: a tensor was cut over tensor ranks, or the groups do not fit the names.
    """
    files = _files(reader, folder)
    weights: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, object]] = {}
    for (name, key), value in zip(files, reader.read_all(list(files.values())), strict=True):
        whole = value.get("param") if isinstance(value, dict) and value.keys() <= _PLAIN else value
        if not isinstance(whole, torch.Tensor):
            raise reader.broken(
                files[name, key], "it is not one whole tensor; it may be of a model cut over tensor ranks"
            )
        if key == _WEIGHT:
            weights[name] = whole
        else:
            states.setdefault(name, {})[key] = whole
    common_file = f"{folder}/zero/{_GROUPS}".lstrip("/")
    common = reader.read(common_file)
    groups = common.get("param_groups") if isinstance(common, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise reader.broken(common_file, "it has no 'param_groups'")
    named = [list(group) for group in shapes] if isinstance(shapes, list) else []
    # With one group of the optimizer, the model's file may still list several.
    if len(groups) == 1:
        named = [[name for group in named for name in group]]
    members = {name for group in named for name in group}
    if len(named) != len(groups) or not states.keys() <= members <= weights.keys():
        raise reader.broken(
            common_file, f"its {len(groups)} groups do not fit the {len(named)} of the model's file"
        )
    with_names = [group | {"params": names} for group, names in zip(groups, named, strict=True)]
    return weights, {"state": states, "param_groups": with_names}, common


def _files(reader: ForeignReader, folder: str) -> dict[tuple[str, str], str]:
    """The file of each parameter and key."""
    prefix = f"{re.escape(folder)}/" if folder else ""
    found = reader.source.matching(rf"{prefix}zero/([^/]+)/(\w+)\.pt")
    return {(name, key): file for (name, key), file in found.items()}
