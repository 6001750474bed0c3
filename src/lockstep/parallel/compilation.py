"""Which backends of ``torch.compile`` there are."""

from __future__ import annotations

import torch

from lockstep.config.values import plain, suggestion
from lockstep.errors import ConfigError


def check_backend(backend: object) -> None:
    """Raise ConfigError unless this torch has a backend of that name; functions are backends themselves."""
    if backend is None or callable(backend):
        return
    known = sorted(torch.compiler.list_backends(exclude_tags=()))
    if backend not in known:
        raise ConfigError(
            f"dynamo_backend={plain(backend)} is no backend of torch.compile in torch {torch.__version__}."
            f"{suggestion(str(backend), known)} Use one of {', '.join(known)}, or register it first."
        )
