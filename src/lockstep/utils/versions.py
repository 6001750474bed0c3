"""Names that scripts import from ``accelerate.utils.versions``."""

from lockstep.runtime.available import compare_versions, is_torch_version

__all__ = ["compare_versions", "is_torch_version"]
