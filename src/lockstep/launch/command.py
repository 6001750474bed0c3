"""A program that a backend starts, as ``--dry-run`` shows it: data, never a line for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

SECRET = "<secret>"
"""What stands for a secret wherever something is shown."""


@dataclass(frozen=True)
class Command:
    """One program. ``commands(plan)`` of a backend has ``SECRET`` in the place of each secret.

    ``environment``: what the program gets beside the launcher's own environment. ``stdin``: what is written
    to it. ``title`` says where or what for, such as ``host a, machine 0 of 2``.
    """

    arguments: tuple[str, ...]
    title: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: str | None = None

    def lines(self) -> Iterator[str]:
        """The command for people, in the form that a shell would need."""
        if self.title:
            yield f"{self.title}:"
        yield "  " + shlex.join(self.arguments)
        if self.environment:
            yield "with the environment:"
            yield from (f"  {name}={value}" for name, value in sorted(self.environment.items()))
        if self.stdin is not None:
            yield "with the standard input:"
            yield from ("  " + line for line in self.stdin.splitlines())
