"""The addresses of the project: those of the repository that it is built from. The rest is in pyproject.toml."""

from __future__ import annotations

import re
import subprocess
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def web_address(remote: str) -> str | None:
    """Return the page of a repository by its remote, given as https, ssh or ``git@host:path``; None: a local folder."""
    found = re.fullmatch(
        r"(?:https?://|ssh://)?(?:[^@/]+@)?([\w.-]+\.\w+)(?::\d+/|[:/])(.+?)(?:\.git)?/?", remote
    )
    return f"https://{found[1]}/{found[2]}" if found and not remote.startswith((".", "/")) else None


def origin(root: Path = ROOT) -> str:
    """Return the remote that the clone comes from; "" without one."""
    if not (root / ".git").exists():  # git would look in the folders above
        return ""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def project_urls(root: Path = ROOT) -> dict[str, str]:
    """Return what ``pip show`` and the page of the package link to: in a source distribution what it was made with."""
    said = root / "PKG-INFO"
    if said.exists():
        lines = Parser().parsestr(said.read_text(encoding="utf-8")).get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    address = web_address(origin(root))
    if address is None:
        return {}
    return {
        "Homepage": address,
        "Documentation": f"{address}/tree/main/docs",
        "Source": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
    }


if __name__ == "__main__":
    from setuptools import setup

    setup(project_urls=project_urls())
