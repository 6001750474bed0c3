"""Each kind of input, given to what reads it: (accepted, what is wrong with that)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from lockstep.cli import run_lockstep
from lockstep.compat.accelerate import load
from lockstep.compat.deepspeed import from_deepspeed
from lockstep.config import (
    read_hostfile,
)
from lockstep.utils import Parallel
from tests.config.fuzzing.judge import (
    complaint_about_output,
    differs,
    nonsense_in_line,
    nonsense_in_settings,
)
from tests.config.fuzzing.lines import WORDS
from tests.config.fuzzing.pools import Input, split

SECRET = "5ec7e7" * 12
NAMES = {"cpu": "use_cpu"}

Verdict = tuple[bool, "str | None"]


def _yaml(given: Input) -> Verdict:
    loaded = load("in.yaml")
    settings = loaded.config.model_dump(mode="json")
    wrong = nonsense_in_settings(settings) or differs(given, settings) or _lost(given, loaded, settings)
    return True, wrong


def _lost(given: Input, loaded: Any, settings: dict[str, Any]) -> str | None:
    """A key of the file that neither became a setting nor is named in a warning, though it asks for something."""
    raw = yaml.safe_load(given.content.decode("utf-8-sig"))
    warned = " ".join(loaded.warnings)
    line = settings.get("parallel") or ""
    for name, meaning in given.means.items():
        key, _, section = name.partition(" in ")
        if meaning == "warned":
            if key not in warned:
                return f"{key} has no effect, and nobody said so"
        elif section and key in ("zero", "activation") and f"{key}={meaning}" not in line.split():
            return f"{key}={meaning} is not in {line!r}"
        elif section and meaning is True and key not in line.split():
            return f"{key} is not in {line!r}"
        elif section and key in settings and settings[key] != meaning:
            return f"{key} is {settings[key]!r}, not {meaning!r}"
    for key, value in raw.items():
        if key in settings and value is not None and settings[key] is None:
            return f"{key}: {value!r} was dropped"
        if key not in settings and key not in KNOWN:
            return f"the key {key!r} was accepted"
        if key in settings and type(value) is int and type(settings[key]) is int and settings[key] != value:
            octal_or_clock = ":" in given.content.decode() or "0" in str(given.content)
            if not octal_or_clock:
                return f"{key}: {value} became {settings[key]}"
    return None


# of Accelerate's file, from its documentation
KNOWN = set(
    split(
        "compute_environment | distributed_type | downcast_bf16 | main_training_function | same_network",
        "tpu_env | tpu_name | tpu_zone | tpu_vm | tpu_use_cluster | tpu_use_sudo | commands | command_file",
        "use_mps_device | ipex_config | megatron_lm_config | fp8_config | dynamo_config | fsdp_config",
        "deepspeed_config | parallelism_config | mpirun_config",
    )
)


def _deepspeed(given: Input) -> Verdict:
    asked = {name: said.value for name, said in from_deepspeed("in.json").settings.items()}
    for name, meaning in given.means.items():
        if name and name not in asked:
            return True, f"{name}={meaning!r} was lost"
    return True, differs(given, asked)


def _hostfile(given: Input) -> Verdict:
    found = {host.name: host.slots for host in read_hostfile("hosts")}
    return True, None if given.wrong or found == given.means["hosts"] else f"{found} were read"


def _parallel(given: Input) -> Verdict:
    found = Parallel.parse(given.argv[0])
    if Parallel.parse(str(found)) != found:
        return True, f"{str(found)!r} is read as something else"
    values = {name: getattr(found, name) for name in WORDS}
    return True, nonsense_in_line(given.argv[0]) or differs(given, values)


def read_command(given: Input) -> Verdict:
    Path("out.yaml").unlink(missing_ok=True)
    with nothing_started() if given.kind == "lockstep launch" else nullcontext():
        code, out, err = run(given.argv)
    accepted = code == 0
    wrong = "the secret was printed" if SECRET in out + err else complaint_about_output(code, out, err)
    if wrong is None and accepted and not given.wrong and given.kind in PRINTED:
        wrong = PRINTED[given.kind](given, out)
    return accepted, wrong


@contextmanager
def nothing_started() -> Iterator[None]:
    """A process that is started inside is a failure, except for the question which mpirun there is."""

    def refuse(*arguments: Any, **_options: Any) -> Any:
        if arguments == (["mpirun", "--version"],):
            raise FileNotFoundError("mpirun")
        raise AssertionError(f"a process was started: {arguments!r:.200}")

    names = split("fork | forkpty | posix_spawn | posix_spawnp | execv | execve | execvp | execvpe | system")
    with ExitStack() as stack:
        stack.enter_context(patch("subprocess.Popen", refuse))
        for name in names:
            stack.enter_context(patch(f"os.{name}", refuse))
        yield


def run(argv: list[str]) -> tuple[Any, str, str]:
    """Exit code, standard output and standard error of ``lockstep`` with these arguments, in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            run_lockstep(argv)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


def _written(given: Input, _out: str) -> str | None:
    if not Path("out.yaml").exists():
        return None if given.argv[4] != "out.yaml" else "nothing was written"
    settings = yaml.safe_load(Path("out.yaml").read_text())
    return nonsense_in_settings(settings) or differs(given, settings, NAMES)


def _launched(given: Input, out: str) -> str | None:
    """The end of a plan has ``name value origin`` in each line."""
    if "--k8s" in given.argv:
        return None if "apiVersion" in out else "no manifest was printed"
    table = out.partition("from the configuration:")[2]
    found = {words[0]: words[1] for line in table.splitlines() if len(words := line.split()) >= 3}
    if not found:
        return "no plan was printed"
    means = dict(given.means)
    if "nproc" in means:
        machines = means.get("num_machines", str(found.get("hosts", "")).count(",") + 1)
        means["num_processes"] = means.pop("nproc") * machines
    for name, value in means.items():
        shown = found.get(NAMES.get(name, name))
        if isinstance(value, float) and shown is not None and float(shown) == value:
            continue
        if type(value) in (int, float, str) and name in ALWAYS_SHOWN and shown != str(value):
            return f"{name} is {shown}, but was said to be {value}"
    return None


ALWAYS_SHOWN = split(
    "num_processes | num_machines | min_machines | main_process_ip | main_process_port | hosts | k8s",
    "max_restarts | hang_timeout | grace | rdzv_backend | interface | gradient_accumulation_steps",
    "gradient_clipping",
)

READERS: dict[str, Callable[[Input], Verdict]] = {
    "YAML": _yaml,
    "Accelerate's YAML": _yaml,
    "damaged YAML": _yaml,
    "hostile YAML": _yaml,
    "DeepSpeed JSON": _deepspeed,
    "damaged JSON": _deepspeed,
    "hostfile": _hostfile,
    "parallel": _parallel,
}
PRINTED: dict[str, Callable[[Input, str], str | None]] = {
    "lockstep config": _written,
    "lockstep launch": _launched,
}
