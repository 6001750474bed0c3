"""Every generated page with its text."""

from __future__ import annotations

from tests import checkpoint_formats, migration_tables, settings_table
from tests.site import commands, features, names, recipes, schema
from tests.site.pages import DOCS, table, with_block


def pages() -> dict[str, str]:
    """Path below the root -> text."""
    environment = (DOCS / "reference/environment.md").read_text(encoding="utf-8")
    configuration = (DOCS / "reference/configuration.md").read_text(encoding="utf-8")
    migration = migration_tables.PAGE.read_text(encoding="utf-8")
    importing = checkpoint_formats.PAGE.read_text(encoding="utf-8")
    formats = table(checkpoint_formats.HEAD, checkpoint_formats.rows())
    return {
        **features.pages(),
        "docs/reference/commands.md": commands.page(),
        "docs/reference/names.md": names.page(),
        "docs/reference/configuration.md": settings_table.BLOCK.sub(
            lambda _: settings_table.table(), configuration
        ),
        "docs/migrating-from-accelerate.md": migration_tables.written(migration),
        "docs/importing-checkpoints.md": with_block(importing, "formats", formats),
        "docs/recipes.md": recipes.page(),
        "docs/reference/environment.md": with_block(environment, "variables", schema.variables()),
        "docs/reference/config.schema.json": schema.text(),
    }
