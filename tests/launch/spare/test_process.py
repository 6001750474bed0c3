"""A script that a spare process runs sees what it sees in any other."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import environment_digests
from tests.launch.helpers import alive, wait_until
from tests.launch.spare.starts import LIMIT_S, environment, run_cold, run_warm, spare_of, wait_for

# All that a script could find out about its process before it has done anything, and what it then gets done.
LOOK = '''
"""A script."""
import this
import torch
from torch.utils.data import DataLoader
import atexit, ctypes, inspect, json, locale, logging, multiprocessing, os
import resource, signal, subprocess, sys, threading, warnings
CONSTANT = 1
sys.stdout.write("first line\\n")  # at once, also where nothing is buffered: several processes say it

def stream(file):
    return [file.fileno(), file.isatty(), file.encoding, file.errors, file.newlines, file.line_buffering,
            file.write_through, file.mode, file.name, file.closefd if hasattr(file, "closefd") else None,
            type(file.buffer).__name__]

def value(variable):
    return subprocess.run([sys.executable, "-S", "-c", f"import os; print(os.environ.get({variable!r}))"],
                          capture_output=True, text=True).stdout.strip()

def death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value

class Squares:
    def __len__(self): return 8
    def __getitem__(self, index): return index ** 2, os.environ["RANK"], torch.utils.data.get_worker_info().id

if __name__ == "__main__":
    main = sys.modules["__main__"]
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    status = dict(line.partition(":")[::2] for line in open("/proc/self/status"))
    seen = {
        "environ": dict(os.environ), "getenv": {n: value(n) for n in ("RANK", "MINE", "PYTHONPATH", "LOCKSTEP_SPARE")},
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "flags": repr(sys.flags),
        "command line": open("/proc/self/cmdline").read(), "comm": open("/proc/self/comm").read(),
        "files": sorted(os.listdir("/proc/self/fd")), "inputs": os.readlink("/proc/self/fd/0"),
        "streams": [stream(one) for one in (sys.stdin, sys.stdout, sys.stderr)], "std": [sys.__stdout__ is sys.stdout],
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.getppid()], "children": children,
        "signals": {str(n): str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
        "mask": [status[n] for n in ("SigBlk", "SigIgn", "SigCgt")], "death": death_signal(),
        "main": sorted(main.__dict__), "main is": [main.__name__, main.__file__, main.__doc__, main.__package__,
            getattr(main.__spec__, "name", None), getattr(main.__spec__, "origin", None),
            type(main.__loader__).__name__, main.__builtins__.__name__],
        "stack": [frame.function for frame in inspect.stack()], "threads": [t.name for t in threading.enumerate()],
        "system threads": len(os.listdir("/proc/self/task")), "torch threads": torch.get_num_threads(),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace()],
        "finders": [str(one).split(" at ")[0] for one in sys.meta_path], "path hooks": len(sys.path_hooks),
        "cached": sorted(p for p in sys.path_importer_cache if p.endswith("spare/site")),
        "sitecustomize": "sitecustomize" in sys.modules,
        "filters": [str(one) for one in warnings.filters], "loggers": [logging.root.level, logging.root.handlers],
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT")},
        "schedule": [os.sched_getscheduler(0), os.nice(0), sorted(os.sched_getaffinity(0))],
        "locale": locale.setlocale(locale.LC_ALL), "recursion": sys.getrecursionlimit(), "umask": os.umask(0o22),
        "start": multiprocessing.get_start_method(allow_none=True), "switch": sys.getswitchinterval(),
        "random": [torch.manual_seed(3).initial_seed(), torch.rand(3).tolist()],
        "dtype": str(torch.get_default_dtype()),
        "grad": [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()],
        "score": open("/proc/self/oom_score_adj").read(),
    }
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context=method)
        seen[method] = [[batch[0].tolist(), batch[1], batch[2].tolist()] for batch in loader]
    chld = []
    signal.signal(signal.SIGCHLD, lambda *_: chld.append(1))
    seen["child"] = [subprocess.run(["true"]).returncode, len(chld)]
    json.dump(seen, open(sys.argv[1], "w"), default=str)
    atexit.register(print, "the last line")
    print("second line", flush=True)
    threading.Thread(target=lambda: (threading.main_thread().join(), print("from a thread"))).start()
    raise ValueError("an error of the script")
'''


def look(tmp_path: Path, command: list[str], **more: str) -> tuple[dict[str, Any], dict[str, Any], str, str]:
    """What it sees cold and warm, and what is printed then."""
    first = environment(tmp_path, **more)
    then = {**first, "RANK": "1", "MASTER_PORT": "2", "LOCKSTEP_RESTART": "1"}
    code = run_cold([*command, str(tmp_path / "seen.json")], then, tmp_path / "cold")
    cold = json.loads((tmp_path / "seen.json").read_text())
    assert code == 1
    (tmp_path / "seen.json").unlink()
    assert run_warm([*command, str(tmp_path / "seen.json")], first, then, tmp_path / "warm") == (
        1,
        "warm",
        "",
    )
    warm = json.loads((tmp_path / "seen.json").read_text())
    return cold, warm, (tmp_path / "cold").read_text(), (tmp_path / "warm").read_text()


@pytest.mark.parametrize("kind", ["script", "module", "customized"])
def test_a_script_finds_everything_as_it_is_in_a_new_process(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(LOOK)
    more = {}
    if kind == "customized":  # a machine has one of its own
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text("import os\nos.environ['CUSTOM'] = 'yes'\n")
        more = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])}
    cold, warm, cold_text, warm_text = look(
        tmp_path, ["-m", "train"] if kind == "module" else ["train.py"], **more
    )
    for name in cold:
        assert warm[name] == cold[name], name
    assert cold["environ"]["RANK"] == "1" and cold["sitecustomize"] == (kind == "customized")
    assert warm_text == cold_text
    assert "Beautiful is better than ugly." in cold_text and "ValueError: an error of the script" in cold_text


UNFIT = {
    "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch\n": "train.py line 2 comes before `import torch`",
    "import mine\nimport torch\n": "train.py line 1 comes before `import torch`",
    "print(1)\n": "train.py line 1 comes before `import torch`",
    "import torch\n(\n": "the script cannot be read",
    "import timeit_\nimport torch\n": "train.py line 1 comes before",
    "import torch, no_such_module\n": "train.py line 1 comes before",
    "from os import no_such_name\nimport torch\n": "`from os import no_such_name` fails: ImportError",
}


@pytest.mark.parametrize("source", UNFIT)
def test_what_a_script_does_before_it_imports_torch_is_not_anticipated(source: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "mine.py").write_text("raise SystemExit(9)")
    spare = spare_of([str(tmp_path / "train.py")], environment(tmp_path))
    try:
        assert UNFIT[source] in wait_for(spare, "unfit")
        assert spare.process.wait(LIMIT_S) == 0
    finally:
        spare.end()


@pytest.mark.parametrize("swallowed", [False, True])
def test_no_file_of_the_user_is_run_even_where_it_stands_for_one_of_a_library(
    swallowed: bool, tmp_path: Path
) -> None:
    # torch imports timeit early, and numpy in a `try`
    name = "numpy" if swallowed else "timeit"
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    spare = spare_of([str(tmp_path / "train.py")], environment(tmp_path))
    try:
        assert f"imports {name}, which is {tmp_path / name}.py" in wait_for(spare, "unfit")
        assert not (tmp_path / "ran").exists()
    finally:
        spare.end()


SHOW = "import torch\nimport json, os, sys\n" + (
    "json.dump([sorted({'torch._dynamo', 'lockstep'} & {*sys.modules}), os.environ['OMP_NUM_THREADS'],"
    " torch.get_num_threads(), open('/proc/self/environ').read().split('\\0')], open(sys.argv[1], 'w'))\n"
)


@pytest.mark.parametrize("change", ["a variable", "the script", "a new module", "the imports"])
def test_what_has_changed_meanwhile_is_started_cold(change: str, tmp_path: Path) -> None:
    script, seen = tmp_path / "train.py", tmp_path / "seen.json"
    script.write_text(SHOW)
    first = environment(tmp_path)
    then = {**first, "RANK": "1"}
    spare = spare_of([str(script), str(seen)], first)
    try:
        wait_for(spare, "ready")
        if change == "a variable":
            then["OMP_NUM_THREADS"] = "2"
        elif change == "the script":
            script.write_text("import torch\nSEED = 3\n" + SHOW.partition("\n")[2])  # no import differs
        elif change == "the imports":
            script.write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\n" + SHOW)
        else:
            (tmp_path / "os.py").write_text("")  # is imported before any script
            (tmp_path / "timeit.py").write_text("default_timer = 'mine'")
        assert spare.send({"environment": then})
        why = wait_for(spare, "warm", "cold")
        assert spare.process.wait(LIMIT_S) == 0
    finally:
        spare.end()
    modules, variable, threads, environ = json.loads(seen.read_text())
    if change == "the script":
        assert (spare.state, why) == ("warm", "")
        return
    expected = {
        "a variable": "its libraries read OMP_NUM_THREADS when they are imported",
        "the imports": "the imports at the top of the script have changed",
        "a new module": f"timeit is in {tmp_path} now",
    }
    assert (spare.state, why) == ("cold", expected[change])
    assert modules == []
    assert int(variable) == threads == (1 if change == "a new module" else 2)
    expected_environ = {f"{name}={value}" for name, value in then.items()}
    assert {*environ} - {""} == expected_environ  # nothing is left that marks a spare process


@pytest.mark.parametrize("sets", ["", "TORCH_LOGS", "OMP_NUM_THREADS", "UNRELATED"])
def test_later_imports_are_made_unless_the_script_sets_what_they_read(
    sets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, seen = tmp_path / "train.py", tmp_path / "seen.json"
    script.write_text(SHOW)
    first = environment(tmp_path)
    with monkeypatch.context() as patched:  # what the last process has written down at its first step
        for name in os.environ:
            patched.delenv(name)
        for name, value in {**first, **({sets: "9"} if sets else {})}.items():
            patched.setenv(name, value)
        digests = environment_digests()
    modules = ["torch", "mine", "torch._dynamo", "lockstep", "lockstep.not_there"]
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    Path(first["LOCKSTEP_IMPORTS_FILE"]).write_text(json.dumps({"modules": modules, "environment": digests}))
    assert run_warm([str(script), str(seen)], first, {**first, "RANK": "1"}, tmp_path / "out")[1:] == (
        "warm",
        "",
    )
    found = json.loads(seen.read_text())[0]
    assert ("torch._dynamo" in found) == (sets in ("", "UNRELATED"))
    assert not (tmp_path / "ran").exists()


def test_one_that_nobody_wants_any_more_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    spare = spare_of([str(tmp_path / "train.py")], environment(tmp_path))
    wait_for(spare, "ready")
    shown = Path(f"/proc/{spare.process.pid}/cmdline").read_bytes()
    assert shown.rstrip(b"\0") == b"lockstep-spare\0ready"  # nobody who looks for the script finds it
    spare.close()
    assert spare.process.wait(LIMIT_S) == 0
    assert not (tmp_path / "ran").exists()


def test_a_signal_ends_one_as_it_ends_any_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    spare = spare_of([str(tmp_path / "train.py")], environment(tmp_path))
    os.kill(spare.process.pid, signal.SIGKILL)
    assert spare.process.wait(LIMIT_S) == -signal.SIGKILL
    spare.receive(1.0)
    assert not spare.send({"environment": {}}) and spare.state != "taken"
    spare.end()
    wait_until(lambda: not alive(spare.process.pid), 2.0)
    assert sys.executable
