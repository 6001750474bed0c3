"""The one table of features, of ``docs/data/features.yaml``, as the README and the site show it."""

from __future__ import annotations

from typing import Any

import yaml

from tests.site.pages import DOCS, ROOT, table, with_block

README = ROOT / "README.md"
COMPARISON = DOCS / "comparison.md"


def load() -> dict[str, Any]:
    return yaml.safe_load((DOCS / "data/features.yaml").read_text(encoding="utf-8"))


def rows_of(group: dict[str, Any], folder: str, peers: dict[str, str]) -> list[list[str]]:
    """The rows of a group; ``folder`` leads from the page to ``docs/``."""
    return [
        [
            row["feature"]
            if row["page"] == "comparison.md"
            else f"[{row['feature']}]({folder}{row['page']})",
            row["state"],
            *(row[peer] for peer in peers),
        ]
        for row in group["rows"]
    ]


def comparison() -> str:
    """All rows, a table for each group."""
    data = load()
    head = ["", "Lockstep", *data["peers"].values()]
    return "\n".join(
        f"### {group['name']}\n\n{table(head, rows_of(group, '', data['peers']))}" for group in data["groups"]
    )


def readme() -> str:
    """The rows that the README shows."""
    data = load()
    chosen = [row for group in data["groups"] for row in group["rows"] if row.get("readme")]
    return table(["", "Lockstep", *data["peers"].values()], rows_of({"rows": chosen}, "docs/", data["peers"]))


def pages() -> dict[str, str]:
    """Path below the root -> text."""
    return {
        "README.md": with_block(README.read_text(encoding="utf-8"), "features", readme()),
        "docs/comparison.md": with_block(COMPARISON.read_text(encoding="utf-8"), "features", comparison()),
    }
