"""Names that scripts import from ``accelerate.utils.launch``."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.config.sources import export_environment, inherited_environment

__all__ = [
    "PrepareForLaunch",
]


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
