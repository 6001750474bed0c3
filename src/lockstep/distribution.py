"""The name under which pip knows this package; the import name and the command are ``lockstep``."""

from __future__ import annotations

DISTRIBUTION = "lockstep-torch"


def install_command(extra: str) -> str:
    """Return the line that installs the optional packages ``extra``."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
