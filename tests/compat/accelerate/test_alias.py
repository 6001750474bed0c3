"""``import accelerate`` by alias: what it finds, what it refuses, and how scripts get it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.command import LOCKSTEP
from tests.compat.processes import ALONE


def run(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=ALONE,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def results(done: subprocess.CompletedProcess[str]) -> list[Any]:
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


INSTALLED = """
import importlib, importlib.metadata, importlib.util, json, sys
from lockstep.compat.accelerate import MODULES, VERSION, NotOffered, install, names_in

assert "torch" not in sys.modules
install()
finders = len(sys.meta_path)
install()
assert len(sys.meta_path) == finders
import accelerate
import accelerate.utils.tqdm
import lockstep
from accelerate.utils import tqdm
from accelerate.data_loader import *

same = accelerate.Accelerator is lockstep.Accelerator
print(json.dumps(["same", same, callable(tqdm), callable(accelerate.utils.tqdm)]))
print(json.dumps(["all", skip_first_batches is lockstep.skip_first_batches]))
version = importlib.metadata.version("accelerate")
home = importlib.metadata.metadata("accelerate")["Home-page"]
print(json.dumps(["version", version == accelerate.__version__ == VERSION, "huggingface" in home]))
print(json.dumps(["found", importlib.util.find_spec("accelerate") is not None,
                  importlib.util.find_spec("accelerate.utils.modeling") is not None,
                  importlib.util.find_spec("accelerate.nothing") is None]))
print(json.dumps(["distributions", importlib.metadata.packages_distributions()["accelerate"][0]]))
missing = []
for module in MODULES:
    for name in names_in(module):
        if not hasattr(importlib.import_module(module), name):
            missing.append(f"{module}.{name}")
print(json.dumps(["missing", missing]))
answers = []
for module, known in MODULES.items():
    for name, one in known.items():
        if isinstance(one, NotOffered):
            loaded = importlib.import_module(module)
            try:
                importlib.import_module(module).__getattr__(name)
                answers.append("there")
            except AttributeError as error:
                answers.append(one.reason in str(error))
            try:
                exec(f"from {module} import {name}")
                answers.append("imported")
            except ImportError as error:
                answers.append(one.reason in str(error))
            answers.append(not hasattr(loaded, name))
print(json.dumps(["left out", all(answer is True for answer in answers)]))
try:
    accelerate.nonsense
except AttributeError as error:
    print(json.dumps(["unknown", str(error)]))
try:
    from accelerate.hooks import nonsense
except ImportError:
    print(json.dumps(["unknown name", True]))
try:
    import accelerate.nonsense
except ModuleNotFoundError:
    print(json.dumps(["unknown module", True]))
"""


def test_it_finds_what_is_offered_and_says_why_the_rest_is_not() -> None:
    assert results(run("-c", INSTALLED)) == [
        ["same", True, True, True],
        ["all", True],
        ["version", True, True],
        ["found", True, True, True],
        ["distributions", "accelerate"],
        ["missing", []],
        ["left out", True],
        ["unknown", "module 'accelerate' has no attribute 'nonsense'"],
        ["unknown name", True],
        ["unknown module", True],
    ]


def test_it_is_refused_where_accelerate_itself_was_imported(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("")
    done = run(
        "-c",
        "import sys; sys.path.insert(0, '.'); import accelerate\n"
        "from lockstep.compat.accelerate import install; install()",
        folder=tmp_path,
    )
    assert done.returncode == 1
    assert "Accelerate itself was imported before (from " in done.stderr
    assert "lockstep launch --as-accelerate" in done.stderr


SCRIPT = """
import json, sys
import accelerate
import beside

accelerator = accelerate.Accelerator(cpu=True)
line = json.dumps([__name__, accelerate.__version__ > "1.", str(accelerator.distributed_type), sys.argv[1:],
                   beside.HERE])
print(line)

# Utilities for tests are those of the installed Accelerate.
from accelerate.test_utils import RegressionModel, path_in_accelerate_package
from accelerate.test_utils.training import RegressionDataset

model = accelerator.prepare(RegressionModel())
others = {name for name, module in sys.modules.items() if name.startswith("accelerate")
          and type(module).__name__ != "AliasModule" and not name.startswith("accelerate.test_utils")}
print(json.dumps([float(model(RegressionDataset(length=4)[0]["x"])), sorted(others),
                  path_in_accelerate_package("test_utils", "scripts", "test_ops.py").is_file()]))
"""


def test_scripts_and_modules_run_as_by_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("HERE = 1\n")
    lockstep = (*LOCKSTEP[1:], "launch", "--cpu", "--nproc", "1", "--as-accelerate")
    for words, argument in (
        (("-m", "lockstep.compat.accelerate", "train.py"), "--a"),
        ((*lockstep, "-m", "train"), "b"),
    ):
        ran, utilities = results(run(*words, argument, folder=tmp_path))
        assert ran == ["__main__", True, "DistributedType.NO", [argument], 1]
        assert utilities == [0.0, [], True]
    wrong = run("-m", "lockstep.compat.accelerate")
    assert (wrong.returncode, "usage:" in wrong.stderr) == (1, True)
