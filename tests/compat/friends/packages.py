"""A package that libraries look for."""

from __future__ import annotations

from pathlib import Path


def deepspeed_package(folder: Path) -> str:
    """A folder of packages with deepspeed, for which transformers looks. There is nothing in it to call."""
    packages = folder / "packages"
    (packages / "deepspeed").mkdir(parents=True)
    (packages / "deepspeed" / "__init__.py").touch()
    (packages / "deepspeed-0.18.2.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.2\n"
    (packages / "deepspeed-0.18.2.dist-info" / "METADATA").write_text(metadata)
    return str(packages)
