"""Nonsense in each environment variable: a sentence with its name, in a worker, a launch and ``lockstep env``."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

import lockstep
from lockstep.compat import DEEPSPEED_VARIABLES, external_settings
from lockstep.config import (
    OF_WORKERS,
    AcceleratorArguments,
    Options,
    control_endpoint,
    process_environment,
    resolve_options,
    unknown_variables,
)
from lockstep.errors import ConfigError
from lockstep.launch import problems_of_environment
from tests.cli.calling import call
from tests.refusals import expect_refusal

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
CONTROL = {"LOCKSTEP_CONTROL": "127.0.0.1:29501", "LOCKSTEP_CONTROL_SECRET": "ab" * 32}
FSDP, DEEPSPEED = {"ACCELERATE_USE_FSDP": "true"}, {"ACCELERATE_USE_DEEPSPEED": "true"}
NONSENSE = (
    "   ",
    "nonsense!",
    "-7.5x",
    "9" * 400,
    "ünï​cøde",
    "/no/such/path",
    "\x1b[31mred",
    "{",
    "٣",
    "~/none",
    ".",
)

# variable -> what must be there for it to be read
VARIABLES: dict[str, dict[str, str]] = {
    **{name: {} for one in OF_WORKERS.values() for name in one.variables if one.name != "run_dir"},
    "LOCKSTEP_CONFIG_FILE": {},
    "ACCELERATE_USE_FSDP": {},
    "ACCELERATE_USE_DEEPSPEED": {},
    "FSDP_VERSION": FSDP,
    "FSDP_SHARDING_STRATEGY": FSDP,
    "FSDP_BACKWARD_PREFETCH": FSDP,
    "FSDP_OFFLOAD_PARAMS": FSDP,
    "FSDP_STATE_DICT_TYPE": FSDP,
    "FSDP_AUTO_WRAP_POLICY": FSDP,
    "FSDP_ACTIVATION_CHECKPOINTING": FSDP,
    "FSDP_FORWARD_PREFETCH": FSDP,
    "FSDP_RESHARD_AFTER_FORWARD": {**FSDP, "FSDP_VERSION": "2"},
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": DEEPSPEED,
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": DEEPSPEED,
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": DEEPSPEED,
    **dict.fromkeys(
        ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"), PLACE
    ),
    "LOCKSTEP_CONTROL": CONTROL,
    "LOCKSTEP_RESTART": CONTROL,
}
# what a launcher passes on to a process, and a launch of its own does not read
OF_A_PROCESS = {*PLACE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", *CONTROL, "LOCKSTEP_RESTART"}
# any text may be a folder
FREE = {
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "LOCKSTEP_RUN_DIR",
}
# without effect here, whatever they say
WITHOUT_EFFECT = {
    "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in list(os.environ):
        if name.startswith(("LOCKSTEP_", "ACCELERATE_", "FSDP_")) or name in (*PLACE, "OMP_NUM_THREADS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def worker() -> Options:
    """What ``Accelerator()`` reads."""
    found = resolve_options(AcceleratorArguments(), external_settings)
    process_environment()
    control_endpoint()
    return found


def test_the_table_has_every_variable_that_is_read() -> None:
    read = {name for one in OF_WORKERS.values() for name in one.variables} | {*DEEPSPEED_VARIABLES}
    assert read <= {*VARIABLES, *FREE, *WITHOUT_EFFECT}


def test_no_variable_of_our_own_is_said_to_be_unknown() -> None:
    source = Path(lockstep.__file__).parent
    names = {
        name
        for path in source.rglob("*.py")
        for name in re.findall(r"LOCKSTEP_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8"))
    }
    assert len(names) > 15
    assert unknown_variables(dict.fromkeys(names, "x")) == ()


def test_each_variable_of_our_own_is_spelled_in_one_place() -> None:
    source = Path(lockstep.__file__).parent
    # The last one runs without the package.
    places = (
        "config/settings.py",
        "config/sources.py",
        "launch/bare.py",
    )
    spelled: dict[str, list[str]] = {}
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and re.fullmatch(r"LOCKSTEP_[A-Z_]+", str(node.value)):
                spelled.setdefault(path.relative_to(source).as_posix(), []).append(str(node.value))
    assert set(spelled) == set(places)
    ours = [name for place in places[:2] for name in spelled[place]]
    assert sorted(ours) == sorted(set(ours))
    assert {name for place in places[2:] for name in spelled[place]} <= set(spelled["config/sources.py"])


@pytest.mark.parametrize("name", VARIABLES)
def test_nonsense_is_refused_by_the_name_of_its_variable(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for other, value in VARIABLES[name].items():
        monkeypatch.setenv(other, value)
    for value in NONSENSE:
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as caught:
            worker()
        sentence = str(caught.value)
        assert name in sentence, (value, sentence)
        assert len(sentence) < 600 and sentence.rstrip().endswith((".", "?")), sentence
        assert any(name in problem for problem in problems_of_environment()), value
        if name in OF_A_PROCESS:
            continue
        code, out, err = call(capsys, "launch", "--dry-run", "--nproc", "2", "--no-python", "true")
        assert (code, out) == (2, ""), (value, out)
        assert name in err and "Traceback" not in err and "\x1b" not in err, err


@pytest.mark.parametrize("name", VARIABLES)
def test_an_empty_variable_is_one_that_is_not_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = worker()
    monkeypatch.setenv(name, "")
    assert worker() == before


def test_env_shows_what_is_wrong_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_DYNAMO_BACKEND", "induktor")
    monkeypatch.setenv("LOCKSTEP_PARALEL", "zero=3")
    monkeypatch.setenv("LOCKSTEP_SECRET", "ab" * 32)
    code, out, _ = call(capsys, "env", "--no-torch", "--json")
    assert code == 0
    assert "LOCKSTEP_DYNAMO_BACKEND=induktor is no backend of torch.compile. Did you mean 'inductor'?" in out
    assert "LOCKSTEP_PARALEL has no effect" in out and "Did you mean 'LOCKSTEP_PARALLEL'?" in out
    assert "ab" * 32 not in out


def test_a_misspelt_variable_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_PARALEL", "zero=3")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGI", "FULL_SHARD")
    code, _, err = call(capsys, "launch", "--dry-run", "--nproc", "2", "--no-python", "true")
    assert code == 0
    for text in (err, " ".join(worker().config_warnings)):
        assert "LOCKSTEP_PARALEL has no effect" in text
        assert "FSDP_SHARDING_STRATEGI has no effect" in text and "'FSDP_SHARDING_STRATEGY'" in text


@pytest.mark.parametrize("threads", ["many", "0", "-1", "2.5", "99999999"])
def test_a_number_of_threads_that_is_none_is_refused(
    threads: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    code, _, err = call(capsys, "launch", "--dry-run", "--nproc", "2", "--no-python", "true")
    assert code == 2 and f"OMP_NUM_THREADS={threads} is not an integer from 1 to 4096" in err


@pytest.mark.parametrize("address", ["no host!", "10.0.0.300", "a,b", "-x", "h\u00f6st"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    expect_refusal(ConfigError, "MASTER_ADDR", process_environment, {**PLACE, "MASTER_ADDR": address})


# -- LOCKSTEP_CONFIG_FILE --------------------------------------------------------------------------------


def broken_files(folder: Path) -> dict[str, tuple[str, str]]:
    """What the variable says -> (its value, what is wrong)."""
    (folder / "empty.yaml").touch()
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "broken.yaml").write_text("a: [1\n")
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "unknown.yaml").write_text("num_proceses: 2\n")
    (folder / "loop").symlink_to(folder / "loop")
    return {
        "missing": (str(folder / "none.yaml"), "No such file or directory"),
        "relative and missing": ("none.yaml", "No such file or directory"),
        "home and missing": ("~/no-such-file-of-mine.yaml", "No such file or directory"),
        "a home that is not there": ("~nobody_at_all/x.yaml", "No such file or directory"),
        "a folder": (str(folder), "it is a folder"),
        "a loop": ("loop", "symbolic link"),
        "too long": ("x" * 5000, "File name too long"),
        "empty": ("empty.yaml", "the file is empty"),
        "not YAML": ("broken.yaml", "not valid YAML"),
        "not text": ("bytes.yaml", "not UTF-8 text"),
        "a list": ("list.yaml", "the top level must be"),
        "an unknown key": ("unknown.yaml", "'num_proceses' is not a known key"),
    }


CASES = (
    "missing", "relative and missing", "home and missing", "a home that is not there", "a folder", "a loop",
    "too long", "empty", "not YAML", "not text", "a list", "an unknown key",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_file_that_cannot_be_read_is_refused_everywhere(
    case: str, clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value, reason = broken_files(clean)[case]
    monkeypatch.setenv("LOCKSTEP_CONFIG_FILE", value)
    with pytest.raises(ConfigError, match=reason) as caught:
        worker()
    assert str(caught.value).startswith("LOCKSTEP_CONFIG_FILE")
    for dry in (["--dry-run"], []):
        code, out, err = call(capsys, "launch", *dry, "--nproc", "1", "--no-python", "true")
        assert (code, out) == (2, "") and reason in err and "LOCKSTEP_CONFIG_FILE" in err
    assert any(reason in problem for problem in problems_of_environment())


def test_the_named_file_is_read_by_a_launch_and_said_to_be_in_vain_without(
    clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (clean / "run.yaml").write_text("mixed_precision: bf16\nnum_processes: 2\n")
    monkeypatch.setenv("HOME", str(clean))
    for value in ("run.yaml", "~/run.yaml", str(clean / "run.yaml")):
        monkeypatch.setenv("LOCKSTEP_CONFIG_FILE", value)
        code, out, err = call(capsys, "launch", "--dry-run", "--no-python", "true")
        assert code == 0 and out.startswith("2 processes") and "run.yaml" in err
        assert "only `lockstep launch` reads a configuration file" in worker().config_warnings[0]
    monkeypatch.setenv("LOCKSTEP_LAUNCH_ID", "x")  # the launcher has read it
    assert worker().config_warnings == ()


def test_a_default_file_that_cannot_be_read_is_refused(
    clean: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (clean / "none" / "lockstep" / "config.yaml").mkdir(parents=True)
    code, _, err = call(capsys, "launch", "--dry-run", "--no-python", "true")
    assert code == 2 and "config.yaml: cannot read the configuration file: it is a folder" in err


# -- LOCKSTEP_DYNAMO_BACKEND -----------------------------------------------------------------------------


def test_a_backend_of_torch_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("LOCKSTEP_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_BACKEND"):
        monkeypatch.setenv(variable, "AOT_EAGER")
        assert worker().compile_options == {"backend": "aot_eager"}
        code, out, _ = call(capsys, "launch", "--dry-run", "--nproc", "1", "--no-python", "true")
        assert code == 0 and "LOCKSTEP_DYNAMO_BACKEND=aot_eager" in out
        monkeypatch.delenv(variable)


def test_torch_is_asked_for_the_backends_that_code_names() -> None:
    from lockstep import Accelerator
    from lockstep.preparation import check_backend

    expect_refusal(ConfigError, "'inductor'", Accelerator, cpu=True, dynamo_backend="induktor")
    for backend in ("eager", "aot_eager", "inductor", lambda module, inputs: module):
        check_backend(backend)
