"""Key-value caches of transformers' models, which training has no use for."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


def disable_cache(model: nn.Module, why: str) -> None:
    """Turn off ``use_cache`` of every configuration in the model; the log says ``why``."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
            logger.info("use_cache of %s is turned off: %s.", type(module).__name__, why)
