"""Which lines of a script are imports that may be made before it begins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.launch.spare import Prologue, read_prologue, target_of

LIBRARIES = {"torch", "numpy", "os", "lockstep"}


def prologue_of(tmp_path: Path, source: str) -> Prologue:
    script = tmp_path / "train.py"
    script.write_text(source)
    return read_prologue([str(script)], LIBRARIES.__contains__)


@pytest.mark.parametrize(
    ("source", "imports", "end"),
    [
        ('"""Text."""\nfrom __future__ import annotations\nimport os, torch\n', ["import os, torch"], ""),
        ("import torch.nn as nn\nfrom torch import *\n", ["import torch.nn as nn", "from torch import *"], ""),
        ("SEED = 1\nSIZES: tuple = (1, -2)\nimport torch\n", ["import torch"], ""),
        ("import os\nif TYPE_CHECKING:\n    import mine\nimport torch\n", ["import os", "import torch"], ""),
        ("import os\nos.environ['A'] = '1'\nimport torch\n", ["import os"], "train.py line 2"),
        ("import os\nimport mine\nimport torch\n", ["import os"], "train.py line 2"),
        ("import os, mine\n", [], "train.py line 1"),
        ("from . import mine\n", [], "train.py line 1"),
        ("import torch\nSEED = torch.seed()\nimport numpy\n", ["import torch"], "train.py line 2"),
        ("import torch\nA = [print()]\nimport numpy\n", ["import torch"], "train.py line 2"),
        ("import torch\nmine.a = 1\nimport numpy\n", ["import torch"], "train.py line 2"),
        ("import torch\ntry:\n    import numpy\nexcept ImportError:\n    pass\n", ["import torch"], "train.py line 2"),
        ("import torch\nif os.TYPE_CHECKING:\n    pass\nelse:\n    print()\n", ["import torch"], "train.py line 2"),
    ],
)  # fmt: skip
def test_it_ends_at_the_first_line_that_does_anything_else(
    source: str, imports: list[str], end: str, tmp_path: Path
) -> None:
    assert prologue_of(tmp_path, source) == Prologue(tuple(imports), end)


def test_a_script_is_run_with_its_own_folder_before_all_others(tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text("")
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "train.py"
    link.symlink_to(tmp_path / "real.py")
    target = target_of([sys.executable, str(link), "--lr", "1"], sys.executable, sys.path)
    assert target is not None
    assert (target.files, target.first_path) == ((str(link),), str(tmp_path))


def test_a_module_is_run_after_the_packages_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ("outer/__init__.py", "outer/inner/__init__.py", "outer/inner/__main__.py", "outer/train.py")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    for file in files:
        (tmp_path / file).write_text("")
    for name, run in {"outer.train": (files[0], files[3]), "outer.inner": files[:3]}.items():
        target = target_of([sys.executable, "-m", name], sys.executable, sys.path)
        assert target is not None
        assert target.files == tuple(str(tmp_path / file) for file in run)
        assert target.first_path == str(tmp_path)


@pytest.mark.parametrize(
    "command", [[], ["bash", "train.sh"], [sys.executable], [sys.executable, "-m"], [sys.executable, "-c", "pass"],
                [sys.executable, "-u", "x.py"], [sys.executable, "missing.py"], [sys.executable, "-m", "missing.one"]]
)  # fmt: skip
def test_other_commands_are_left_alone(command: list[str]) -> None:
    assert target_of(command, sys.executable, sys.path) is None
