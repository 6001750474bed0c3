"""Names that scripts import from ``accelerate.launchers``."""

from lockstep.launch.functions import debug_launcher, notebook_launcher
from lockstep.runtime.run_state import PartialState

__all__ = ["check_launch", "debug_launcher", "notebook_launcher"]


def check_launch() -> None:
    """Join the run and return. Start it with a launcher to see whether processes can reach each other.

    Examples:
        ```python
        from lockstep import debug_launcher
        from lockstep.launchers import check_launch

        debug_launcher(check_launch, num_processes=2)  # two processes can meet
        ```
    """
    PartialState()
