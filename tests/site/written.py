"""Every generated page with its text."""

from __future__ import annotations

import re

from tests import checkpoint_formats, migration_tables, settings_table
from tests.site import commands, examples, features, names, schema
from tests.site.pages import DOCS, ROOT, table, with_block


def pages() -> dict[str, str]:
    """Path below the root -> text."""
    environment = (DOCS / "reference/environment.md").read_text(encoding="utf-8")
    configuration = (DOCS / "reference/configuration.md").read_text(encoding="utf-8")
    migration = migration_tables.PAGE.read_text(encoding="utf-8")
    importing = checkpoint_formats.PAGE.read_text(encoding="utf-8")
    formats = table(checkpoint_formats.HEAD, checkpoint_formats.rows())
    return {
        **features.pages(),
        **names.pages(),
        **examples.pages(),
        "mkdocs.yml": with_navigation((ROOT / "mkdocs.yml").read_text(encoding="utf-8")),
        "docs/changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "]("),
        "docs/reference/commands.md": commands.page(),
        "docs/reference/configuration.md": settings_table.BLOCK.sub(
            lambda _: settings_table.table(), configuration
        ),
        "docs/migrating-from-accelerate.md": migration_tables.written(migration),
        "docs/importing-checkpoints.md": with_block(importing, "formats", formats),
        "docs/reference/environment.md": with_block(environment, "variables", schema.variables()),
        "docs/reference/config.schema.json": schema.text(),
    }


def with_navigation(text: str) -> str:
    """The configuration of the site with the pages of names and of examples in its navigation."""
    for block, lines in {"names": names.navigation(), "examples": examples.navigation()}.items():
        place = re.compile(rf"(?<=# {block}\n)(?: +- .*\n)*(?= +# end of {block}\n)")
        text, found = place.subn(lambda _, lines=lines: lines, text)
        assert found == 1, block
    return text
