"""``LocalSGD`` under the module name that scripts import from ``accelerate``."""

from lockstep.parallel.asynchronous.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
