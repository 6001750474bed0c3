"""A script in a warm interpreter finds the module, path and arguments of a fresh one, and ends as it would there."""

from __future__ import annotations

from pathlib import Path

from tests.warm_interpreter import WarmInterpreter

SCRIPTS = {
    "place": "import sys, os; print(__name__, sys.argv == [__file__, 'a b'], sys.path[0] == os.getcwd())",
    "names": "import sys; print([name for name in sys.modules if name.startswith('lockstep')])",
    "sets": "import atexit, torch; torch.set_default_dtype(torch.float64); atexit.register(print, 'at exit')",
    "sees": "import torch; print(torch.get_default_dtype())",
    "raises": "raise ValueError('wrong')",
    "exits": "import sys; sys.exit(5)",
    "is ended": "import os; os.kill(os.getpid(), 9)",
    "hangs": "import time; time.sleep(60)",
}


def test_each_script_runs_as_in_an_interpreter_of_its_own(
    warm_interpreter: WarmInterpreter, tmp_path: Path
) -> None:
    found = {}
    for name, text in SCRIPTS.items():
        (tmp_path / name).mkdir()
        script = tmp_path / name / "script.py"
        script.write_text(text)
        code, output = warm_interpreter.run(script, "a b", limit_s=1 if name == "hangs" else 60)
        found[name] = (code, output.strip().splitlines()[-1:])
    assert found == {
        "place": (0, ["__main__ True True"]),
        "names": (0, ["[]"]),
        "sets": (0, ["at exit"]),
        "sees": (0, ["torch.float32"]),
        "raises": (1, ["ValueError: wrong"]),
        "exits": (5, []),
        "is ended": (-9, []),
        "hangs": (-14, []),
    }
