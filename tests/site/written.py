"""Every generated page with its text."""

from __future__ import annotations

from tests.site import commands, features, names, schema
from tests.site.pages import DOCS, with_block


def pages() -> dict[str, str]:
    """Path below the root -> text."""
    environment = (DOCS / "reference/environment.md").read_text(encoding="utf-8")
    return {
        **features.pages(),
        "docs/reference/commands.md": commands.page(),
        "docs/reference/names.md": names.page(),
        "docs/reference/environment.md": with_block(environment, "variables", schema.variables()),
        "docs/reference/config.schema.json": schema.text(),
    }
