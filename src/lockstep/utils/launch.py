"""Names that scripts import from ``accelerate.utils.launch``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from lockstep.config.sources import export_environment, inherited_environment
from lockstep.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS

__all__ = ["DEEPSPEED_MULTINODE_LAUNCHERS", "PrepareForLaunch", "env_var_path_add", "setup_fp8_env"]


def env_var_path_add(env_var_name: str, path_to_add: Any) -> str:
    """The value of a variable such as ``PYTHONPATH`` with one folder more behind; the variable stays as it is."""
    folders = inherited_environment().get(env_var_name, "").split(":")
    return ":".join([*filter(None, folders), str(path_to_add)])


def setup_fp8_env(args: Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """``current_env`` with what the options ``fp8_*`` of a command say, as ``ACCELERATE_FP8_*``."""
    for name, value in vars(args).items():
        if not name.startswith("fp8_") or value is None:
            continue
        if name == "fp8_override_linear_precision":
            for part, one in zip(("FPROP", "DGRAD", "WGRAD"), value, strict=True):
                current_env[f"ACCELERATE_FP8_OVERRIDE_{part}"] = str(one)
        else:
            current_env[f"ACCELERATE_{name.upper()}"] = str(value)
    return current_env


class PrepareForLaunch:
    """A function for ``torch.multiprocessing``'s ``spawn`` or ``start_processes``: its first argument is the rank.

    Args:
        launcher: What to call, with the other arguments.
        distributed_type: Of the run; ranks are set in the environment unless it is ``"NO"``.
        debug: The processes meet at the file ``ACCELERATE_DEBUG_RDV_FILE``, which does not exist here; refused.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False
    ) -> None:
        if debug:
            raise ValueError(
                "debug=True is not available. Use debug_launcher, which starts processes on CPUs."
            )
        self.launcher = launcher
        self.distributed_type = str(distributed_type)

    def __call__(self, index: int, *args: Any) -> None:
        if self.distributed_type != "NO":
            per_node = int(inherited_environment().get("NPROC", 1))
            node = int(inherited_environment().get("NODE_RANK", 0))
            export_environment({"LOCAL_RANK": str(index), "RANK": str(per_node * node + index)})
        export_environment({"FORK_LAUNCHED": "1"})
        self.launcher(*args)
