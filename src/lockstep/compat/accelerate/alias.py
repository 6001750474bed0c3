"""``import accelerate`` means this library from ``install()`` on; what it has is in ``interface``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from lockstep.compat.accelerate import interface
from lockstep.compat.accelerate.interface import ROOT, NotOffered, Offered
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import DistributionFinder


# Libraries look for the version, and for the name of a company, to tell Accelerate from packages of the same name.
METADATA = f"""\
Metadata-Version: 2.1
Name: accelerate
Version: {interface.VERSION}
Summary: The interface of Accelerate {interface.VERSION}, offered by Lockstep
Home-page: https://github.com/huggingface/accelerate
"""
FILES = {"METADATA": METADATA, "PKG-INFO": METADATA, "top_level.txt": "accelerate\n"}


class InterfaceDistribution(Distribution):
    """A distribution without files."""

    def read_text(self, filename: str) -> str | None:
        return FILES.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path


TESTS = f"{ROOT}.test_utils"


def install() -> None:
    """Make ``import accelerate``, and all that is below it, give what Lockstep offers under these names from now on.

    It does not matter whether Accelerate is installed. A second call changes nothing.

    Raises:
        UsageError: Accelerate itself was imported before.

    Examples:
        ```python
        from lockstep.compat.accelerate import install

        install()

        import accelerate

        import lockstep

        assert accelerate.Accelerator is lockstep.Accelerator
        ```
    """
    if is_installed():
        return
    others = sorted(name for name in sys.modules if name == ROOT or name.startswith(f"{ROOT}."))
    if others:
        place = getattr(sys.modules[others[0]], "__file__", None)
        raise UsageError(
            f"Accelerate itself was imported before{f' (from {place})' if place else ''}, and one process cannot use "
            "both. Call install() before the first import of accelerate, transformers, trl, peft or diffusers, or "
            "start the script with: lockstep launch --as-accelerate"
        )
    sys.meta_path.insert(0, AliasFinder())


def is_installed() -> bool:
    """Return whether ``import accelerate`` means this library in this process."""
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


class AliasFinder:
    """Finds the modules of ``interface.MODULES``, and the distribution to which they would belong."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != ROOT:
            return None
        if fullname in interface.MODULES:
            # Each is a package, so that `from module import name` asks here for what it does not find.
            return ModuleSpec(fullname, AliasLoader(), origin="lockstep.compat.accelerate", is_package=True)
        if fullname == TESTS or fullname.startswith(f"{TESTS}."):
            return _of_installed_tests(fullname)
        module, _, name = fullname.rpartition(".")
        found = interface.find_imported(module, name) if module in interface.MODULES else None
        if isinstance(found, NotOffered):
            raise ImportError(found.sentence(module, name), name=fullname)
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        if context is not None and context.name not in (None, ROOT):
            return []

        return [InterfaceDistribution()]

    def invalidate_caches(self) -> None:
        """There are none."""


def _installed() -> Path | None:
    """Return the folder of Accelerate itself, if it is installed. Does not import it."""
    spec = PathFinder.find_spec(ROOT)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _of_installed_tests(fullname: str) -> ModuleSpec:
    """Return the spec of a module with Accelerate's utilities for tests: the installed Accelerate's, on the interface
    here."""
    folder = _installed()
    if folder is None:
        raise ModuleNotFoundError(
            f"{fullname} is a module of Accelerate, and Accelerate is not installed. Install it beside Lockstep.",
            name=fullname,
        )
    place = folder.joinpath(*fullname.split(".")[1:])
    if place.is_dir():
        found = spec_from_file_location(
            fullname, place / "__init__.py", submodule_search_locations=[str(place)]
        )
    else:
        found = spec_from_file_location(fullname, place.with_suffix(".py"))
    assert found is not None
    return found


class AliasLoader(Loader):
    """Makes a module whose names are looked up when they are asked for."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AliasModule(spec.name, f"What Lockstep offers of ``{spec.name}``.")

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        # inspect.getfile asks for one; Accelerate's utilities for tests look for their scripts beside it.
        folder = _installed() if module.__name__ == ROOT else None
        module.__file__ = __file__ if folder is None else str(folder / "__init__.py")
        if module.__name__ == ROOT:
            module.__dict__["__version__"] = interface.VERSION


class AliasModule(ModuleType):
    """A module of the interface."""

    def __getattr__(self, name: str) -> object:
        if name == "__all__":
            return list(interface.names_in(self.__name__))
        found = None if name.startswith("__") else interface.find_imported(self.__name__, name)
        if isinstance(found, Offered):
            value = found.load()
            self.__dict__[name] = value
            return value
        if f"{self.__name__}.{name}" in interface.MODULES:
            return import_module(f"{self.__name__}.{name}")
        if isinstance(found, NotOffered):
            raise AttributeError(found.sentence(self.__name__, name), name=name, obj=self)
        raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'", name=name, obj=self)

    def __setattr__(self, name: str, value: object) -> None:
        # An import sets the module as an attribute of its package, where a function may have that name.
        if not (isinstance(value, AliasModule) and isinstance(interface.find(self.__name__, name), Offered)):
            super().__setattr__(name, value)

    def __dir__(self) -> Iterator[str]:
        below = {
            name.rpartition(".")[2] for name in interface.MODULES if name.rpartition(".")[0] == self.__name__
        }
        return iter(sorted({*self.__dict__, *interface.names_in(self.__name__), *below}))
