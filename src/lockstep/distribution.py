"""The name under which pip knows this package; the import name and the command are ``lockstep``."""

from __future__ import annotations

DISTRIBUTION = "lockstep-torch"
