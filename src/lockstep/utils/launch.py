"""Names that scripts import from ``accelerate.utils.launch``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from lockstep.config.sources import export_environment, inherited_environment
from lockstep.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS

__all__ = ["DEEPSPEED_MULTINODE_LAUNCHERS", "PrepareForLaunch", "env_var_path_add", "setup_fp8_env"]


def env_var_path_add(env_var_name: str, path_to_add: object) -> str:
    """Return the value of a variable such as ``PYTHONPATH`` with one more folder at its end. The variable is not
    changed.

    Args:
        env_var_name: The name of the variable.
        path_to_add: The folder.

    Examples:
        ```python
        import os
        from lockstep.utils import env_var_path_add, patch_environment

        with patch_environment(pythonpath="first"):
            assert env_var_path_add("PYTHONPATH", "second") == "first:second"
            assert os.environ["PYTHONPATH"] == "first"
        ```
    """
    folders = inherited_environment().get(env_var_name, "").split(":")
    return ":".join([*filter(None, folders), str(path_to_add)])


def setup_fp8_env(args: Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the options ``fp8_*`` of a command to an environment, as variables ``ACCELERATE_FP8_*``, and return it.

    Args:
        args: The parsed options.
        current_env: Name -> value; changed in place.

    Examples:
        ```python
        from argparse import Namespace
        from lockstep.utils import setup_fp8_env

        environment = setup_fp8_env(Namespace(fp8_format="HYBRID", num_processes=2), {})
        assert environment == {"ACCELERATE_FP8_FORMAT": "HYBRID"}
        ```
    """
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
    """A function for torch.multiprocessing's ``spawn`` or ``start_processes``, which pass the number of the process
    first.

    Args:
        launcher: The function that it calls, with the other arguments.
        distributed_type: Unless it is ``"NO"``, the variables ``RANK`` and ``LOCAL_RANK`` are set before the call.
        debug: True is refused. ``debug_launcher`` starts processes on CPUs.

    Raises:
        ValueError: ``debug`` is True.

    Examples:
        ```python
        from torch.multiprocessing import start_processes
        from lockstep.utils import PrepareForLaunch

        def show(text: str) -> None:
            print(text)

        start_processes(PrepareForLaunch(show), args=("hello",), nprocs=2, start_method="fork")
        ```
    """

    def __init__(
        self, launcher: Callable[..., object], distributed_type: str = "NO", debug: bool = False
    ) -> None:
        if debug:
            raise ValueError(
                "debug=True is not available. Use debug_launcher, which starts processes on CPUs."
            )
        self.launcher = launcher
        self.distributed_type = str(distributed_type)

    def __call__(self, index: int, *args: object) -> None:
        if self.distributed_type != "NO":
            per_node = int(inherited_environment().get("NPROC", 1))
            node = int(inherited_environment().get("NODE_RANK", 0))
            export_environment({"LOCAL_RANK": str(index), "RANK": str(per_node * node + index)})
        export_environment({"FORK_LAUNCHED": "1"})
        self.launcher(*args)
