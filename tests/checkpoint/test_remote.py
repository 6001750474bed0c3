"""Checkpoints at URLs: where nothing can be renamed, the manifest is what makes a checkpoint."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from blake3 import blake3
from torch import nn

from checkpoint import object_store
from checkpoint.object_store import FailsAt, Killed, KilledAt, ObjectStore, failing, keys
from lockstep import Accelerator, ProjectConfiguration
from lockstep.checkpoint.store import LocalStore, parse_url, store_for
from lockstep.errors import CheckpointError, ConfigError, LockstepError, NoCheckpointError, UsageError
from tests.refusals import expect_refusal


class Run:
    """A run of one number, so that a checkpoint tells which save it is of."""

    def __init__(self, project: str | None = None, **settings: Any) -> None:
        configuration = ProjectConfiguration(
            project, automatic_checkpoint_naming=project is not None, **settings
        )
        self.accelerator = Accelerator(cpu=True, project_config=configuration)
        self.model = nn.Linear(1, 1)
        self.accelerator.prepare(self.model)

    @property
    def number(self) -> float:
        return self.model.weight.item()

    def save(self, number: float, url: str | None = None, **options: Any) -> str:
        self.model.weight.data.fill_(number)
        return self.accelerator.save_state(url, **options)

    def load(self, url: str | None = None) -> float:
        self.model.weight.data.fill_(-1)
        self.accelerator.load_state(url)
        return self.number


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket.objects"


@pytest.fixture(autouse=True)
def temporary(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Where this process makes copies; empty at the end, whatever happened."""
    if "run_distributed" in request.fixturenames:  # the pool's workers have temporary files of their own
        yield tmp_path
        return
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert os.listdir(folder) == []


# Saving and loading -------------------------------------------------------------------------------------


def test_memory_holds_checkpoints_and_ends_of_urls_do_not_matter() -> None:
    run = Run()
    assert run.save(1, "memory://saved/state//") == "memory://saved/state"
    run.save(2, "memory://saved/state")
    assert run.load("simplecache::memory://saved/state") == 2
    names = fsspec.filesystem("memory").find("/saved/state")
    assert {len(name.split("/")) for name in names} == {4, 5}  # the manifest, and files in one folder


def test_a_replaced_checkpoint_leaves_one_manifest_and_the_files_it_names(bucket: Path) -> None:
    run = Run()
    for number in range(3):
        run.save(number, f"objects://{bucket}/state", blocking=number != 1)
    manifest = json.loads(object_store.place_of(f"{bucket}/state/manifest.json").read_bytes())["manifest"]
    names = [f"state/{manifest['folder']}/{name}" for name in manifest["files"]]
    assert keys(bucket) == sorted([*names, "state/manifest.json"])
    for name, entry in manifest["files"].items():
        content = object_store.place_of(f"{bucket}/state/{manifest['folder']}/{name}").read_bytes()
        assert (len(content), blake3(content).hexdigest()) == (entry["size"], entry["blake3"])
    assert run.load(f"objects://{bucket}/state") == 2


def numbered(project: str) -> tuple[list[str], float, int]:
    run = Run(project, total_limit=2)
    names = [run.save(number) for number in range(4)]
    number = run.load()
    return names, number, run.accelerator.save_iteration


@pytest.mark.parametrize("world_size", [2])
def test_numbered_checkpoints_of_a_remote_project_are_kept_up_to_the_limit(
    run_distributed, bucket: Path, world_size: int
) -> None:
    project = f"objects://{bucket}/project"
    names = [f"{project}/checkpoints/checkpoint_{number}" for number in range(4)]
    assert run_distributed(numbered, world_size, project + "/") == [(names, 3, 4)] * world_size
    assert {key.split("/")[2] for key in keys(bucket)} == {"checkpoint_2", "checkpoint_3", ".owner.json"}


def test_a_project_in_memory_names_its_checkpoints() -> None:
    names, number, _ = numbered("memory://project")
    assert (names[-1], number) == ("memory://project/checkpoints/checkpoint_3", 3)


def test_a_save_elsewhere_removes_no_numbered_checkpoint(bucket: Path, tmp_path: Path) -> None:
    run = Run(f"objects://{bucket}/project", total_limit=1)
    run.save(0)
    run.save(1, str(tmp_path / "local"))
    run.save(2, "memory://elsewhere")
    assert run.load() == 0


def test_a_background_save_that_fails_is_raised_by_the_next_call(bucket: Path) -> None:
    run = Run()
    run.save(0, f"objects://{bucket}/state")
    with failing(FailsAt(20, "before")):
        run.save(1, f"objects://{bucket}/state", blocking=False)
        expect_refusal(CheckpointError, "no answer", run.accelerator.wait_for_checkpoint)
    assert run.load(f"objects://{bucket}/state") == 0


# Damage -------------------------------------------------------------------------------------------------


def damage(bucket: Path, ending: str, kind: str) -> str:
    """Damage the one object whose key ends so; its key."""
    (key,) = [key for key in keys(bucket) if key.endswith(ending)]
    place = object_store.place_of(f"{bucket}/{key}")
    content = place.read_bytes()
    if kind == "flipped":
        place.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif kind == "shorter":
        place.write_bytes(content[:-1])
    elif kind == "missing":
        place.unlink()
    else:
        object_store.put(f"{bucket}/{key}.copy", content)
    return key


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("flipped", "It holds .*weight"),
        ("shorter", "bytes instead of"),
        ("missing", "lacks"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_the_message_names_the_file(
    bucket: Path, caplog: pytest.LogCaptureFixture, kind: str, words: str
) -> None:
    run = Run(f"objects://{bucket}/project")
    run.save(0)
    run.save(1)
    (newest,) = {key.split("/files-")[1][:15] for key in keys(bucket) if "checkpoint_1/files" in key}
    damage(bucket, f"files-{newest}/model-00000.safetensors", kind)
    with caplog.at_level(logging.WARNING):
        assert run.load() == 0
    assert "model-00000.safetensors" in caplog.text
    with pytest.raises(CheckpointError, match=words):
        run.load(f"objects://{bucket}/project/checkpoints/checkpoint_1")
    assert run.number == -1


def test_what_else_lies_there_is_not_mixed_with_a_checkpoint(bucket: Path) -> None:
    object_store.put(f"{bucket}/data/rows.csv", b"1")
    for directory in ("data", "data/rows.csv"):
        expect_refusal(UsageError, "rows.csv", Run().save, 0, f"objects://{bucket}/{directory}")
    assert keys(bucket) == ["data/rows.csv"]
    with pytest.raises(NoCheckpointError):
        Run().load(f"objects://{bucket}/nothing")
    with pytest.raises(CheckpointError, match="cannot reach"):
        Run().save(0, f"objects://{bucket.parent}/no/bucket.objects/state")


def error_of(call: Callable[[], Any]) -> str | None:
    """What the CheckpointError of ``call`` says, if it raises one."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return None


def test_a_checkpoint_that_was_copied_there_is_loaded_and_removed_like_others(
    bucket: Path, tmp_path: Path
) -> None:
    local = Path(Run().save(0, str(tmp_path / "local")))
    store, path = store_for(f"objects://{bucket}/project/checkpoints/checkpoint_0")
    for _ in range(2):
        store.remove(path)
        assert keys(bucket) == []
        for file in local.iterdir():
            object_store.put(f"{bucket}/project/checkpoints/checkpoint_0/{file.name}", file.read_bytes())
    run = Run(f"objects://{bucket}/project", total_limit=1)
    assert run.load() == 0
    other = f"objects://{bucket}/project/checkpoints/checkpoint_0"
    expect_refusal(UsageError, "did not write there", run.save, 1, other)
    run.save(1)
    assert {key.split("/")[2] for key in keys(bucket)} == {"checkpoint_1", ".owner.json"}


# Ends and failures at any point -------------------------------------------------------------------------


def faults(
    kind: type[KilledAt] | type[FailsAt], when: str, least: int
) -> Iterator[tuple[int, KilledAt | FailsAt]]:
    """A fault at each point in turn, until what is done with it comes to its end before that."""
    for point in itertools.count(1):
        fault = kind(point, when)
        yield point, fault
        if fault.seen < point:
            assert point > least
            return


@pytest.mark.parametrize(
    ("protocol", "when", "is_damaged", "changes"),
    [
        ("objects", "after", False, 14),
        ("objects", "before", True, 14),
        ("plain", "half", False, 3),
    ],
)
def test_a_process_killed_in_any_change_of_a_replaced_checkpoint_leaves_the_old_or_the_new(
    tmp_path: Path, protocol: str, when: str, is_damaged: bool, changes: int
) -> None:
    """Also where the process before was killed while it put a manifest, so that the one before that is recovered."""
    for point, fault in faults(KilledAt, when, changes):
        bucket = tmp_path / f"{point}.objects"
        url = f"{protocol}://{bucket}/state"
        Run().save(0, url)
        Run().save(1, url)
        if is_damaged:
            with failing(KilledAt(3, "half")), suppress(Killed):
                Run().save(9, url.replace("objects:", "plain:"))
        with failing(fault), suppress(Killed):
            Run().save(2, url)
        assert Run().load(url) in (1, 2), point
        Run().save(3, url)
        assert Run().load(url) == 3, point
        assert len({key.split("/")[1] for key in keys(bucket)}) == 2, (point, keys(bucket))


def test_a_process_killed_in_any_change_of_a_numbered_save_leaves_the_last_or_the_one_before(
    tmp_path: Path,
) -> None:
    for point, fault in faults(KilledAt, "before", 12):
        bucket = tmp_path / f"{point}.objects"
        project = f"objects://{bucket}/project"
        run = Run(project, total_limit=1)
        run.save(0)
        run.save(1)
        with failing(fault), suppress(Killed):
            run.save(2)
        resumed = Run(project, total_limit=1)
        number = resumed.load()
        assert number in (1, 2), point
        assert resumed.save(3).endswith(f"/checkpoint_{number + 1:.0f}"), point
        resumed.save(4)
        assert Run(project).load() == 4
        places = {"/".join(key.split("/")[2:4]) for key in keys(bucket)}
        assert len(places) == 3, (point, places)  # the owner, the manifest and the folder of the last


def test_a_request_without_an_answer_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    for point, fault in faults(FailsAt, "after", 40):
        url = f"objects://{tmp_path}/{point}.objects/state"
        run = Run()
        run.save(1, url)
        with failing(fault):
            message = error_of(lambda: run.save(2, url))  # noqa: B023  (called at once)
        assert message is None or (url in message and "no answer" in message), point
        assert run.load(url) in (1, 2), point
        run.save(3, url)
        assert Run().load(url) == 3, point


@pytest.mark.parametrize("kind", [KilledAt, FailsAt])
def test_a_first_save_that_ends_anywhere_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path, kind: type[KilledAt] | type[FailsAt]
) -> None:
    outcomes = set()
    for point, fault in faults(kind, "after", 4):
        bucket = tmp_path / f"{point}.objects"
        url = f"objects://{bucket}/state"
        with failing(fault), suppress(Killed, CheckpointError):
            Run().save(1, url)
        try:
            outcomes.add(Run().load(url))
        except NoCheckpointError:
            outcomes.add(None)
            Run().save(2, url)
            assert Run().load(url) == 2, point
            assert len({key.split("/")[1] for key in keys(bucket)}) == 2, (point, keys(bucket))
    assert outcomes == {1, None}


def test_a_place_that_does_not_answer_is_no_reason_to_load_an_older_checkpoint(bucket: Path) -> None:
    run = Run(f"objects://{bucket}/project")
    run.save(0)
    run.save(1)
    for point, fault in faults(FailsAt, "before", 15):
        with failing(fault):
            message = error_of(run.load)
        assert run.number in (-1, 1), point
        if message is not None:
            assert "Rank 0 cannot reach" in message, point
            assert "Check the name" in message, point
    assert message is None
    assert run.number == 1


def unreachable_for_one(url: str) -> str:
    run = Run()
    run.save(1, url)
    fault = FailsAt(3, "before") if run.accelerator.process_index == 1 else (lambda when, what: None)
    run.accelerator.wait_for_everyone()
    with failing(fault), pytest.raises(LockstepError) as raised:
        run.load(url)
    assert run.number == -1
    return str(raised.value)


def test_what_one_rank_cannot_reach_is_an_error_on_all(run_distributed, bucket: Path) -> None:
    for message in run_distributed(unreachable_for_one, 2, f"objects://{bucket}/state"):
        assert "Rank 1 cannot reach" in message


# Two runs, two machines ---------------------------------------------------------------------------------


def test_the_run_that_came_last_writes_and_the_other_is_told(bucket: Path) -> None:
    project = f"objects://{bucket}/project"
    first = Run(project)
    first.save(0)
    second = Run(project)
    second.load()
    second.save(1)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()}"):
        first.save(2)
    second.save(3)
    second.accelerator.end_training()
    expect_refusal(CheckpointError, "has ended", first.save, 4)
    assert Run(project).load() == 3


def test_a_run_that_is_overtaken_while_it_writes_publishes_nothing(bucket: Path) -> None:
    url = f"objects://{bucket}/state"
    Run().save(1, url)

    def overtake(when: str, what: str) -> None:
        if (when, what.split()[0]) == ("before", "part"):
            record = {"run": "other", "process": 7, "host": "elsewhere", "since": "now"}
            object_store.put(f"{bucket}/state/.owner.json", json.dumps(record).encode())

    with failing(overtake), pytest.raises(CheckpointError, match="process 7 on elsewhere"):
        Run().save(2, url)
    assert Run().load(url) == 1
    assert json.loads(object_store.place_of(f"{bucket}/state/.owner.json").read_bytes())["run"] == "other"


def on_a_machine_each(url: str) -> tuple[float, str, int, str]:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    run = Run()
    run.save(5, url)
    seen: list[tuple[str, int]] = []
    run.accelerator.register_load_state_pre_hook(
        lambda models, folder: seen.append((folder, os.stat(folder).st_mode & 0o777))
    )
    number = run.load(url)
    with pytest.raises(LockstepError) as raised:
        Run(url + "s", save_on_each_node=True).save(0)
    assert not os.path.exists(seen[0][0])
    return number, *seen[0], str(raised.value)


def test_each_machine_has_a_copy_of_its_own_that_only_its_user_can_open(
    run_distributed, bucket: Path
) -> None:
    results = run_distributed(on_a_machine_each, 2, f"objects://{bucket}/state")
    assert [result[0] for result in results] == [5, 5]
    assert results[0][1] != results[1][1]
    assert {result[2] for result in results} == {0o700}
    for result in results:
        assert "is one place for all of them" in result[3]


def test_a_copy_is_made_where_temporary_files_go_and_needs_room_there(
    bucket: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.save(1, f"objects://{bucket}/state")
    seen: list[str] = []
    run.accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(folder))
    run.load(f"objects://{bucket}/state")
    assert Path(seen[0]).parent == temporary
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match=f"{temporary}.*TMPDIR"):
        run.load(f"objects://{bucket}/state")


def test_an_upload_and_a_download_hold_some_megabytes_at_a_time(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, root = store_for(f"objects://{bucket}/large")
    part = bytes(range(256)) * (1 << 14)
    monkeypatch.setattr(ObjectStore, "largest_part", 0)
    record = store.write(f"{root}/file", [part[:-1], part * 10, memoryview(part)])
    content = part[:-1] + part * 11
    assert (record.size, record.blake3) == (len(content), blake3(content).hexdigest())
    assert ObjectStore.largest_part <= 20 << 20
    blocks = [bytes(block) for block in store.blocks(f"{root}/file")]
    assert b"".join(blocks) == content
    assert max(map(len, blocks)) <= 16 << 20


# URLs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memoryy://x", "Did you mean 'memory'"),
        ("s3://bucket/state", "Install s3fs"),
        (Path("s3://bucket/state"), "pathlib"),
        ("zip://x::memory://y.zip", "'zip' before '::'"),
        ("memory://x?key=secret", "query"),
        ("ftp://***@host/x", "as messages show it, without its credentials"),
        ("ftp://user:pa/secret@host/x", "%2F"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_what_to_do(url: Any, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Run().save(0, url)
    assert words in str(raised.value)
    assert "secret" not in str(raised.value)


def test_local_urls_are_local_paths(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/state/", f"simplecache::local://{tmp_path}/state", tmp_path / "state"):
        store, path = store_for(url)
        assert isinstance(store, LocalStore)
        assert path == str(tmp_path / "state")


class Guarded(ObjectStore):
    """Needs a user and a password, and tells everybody."""

    protocol = "guarded"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = super()._strip_protocol(path)
        return "/" + path.partition("@")[2].partition("/")[2] if "@" in path else path

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {"login": path.removeprefix("guarded://").partition("@")[0]}

    def __init__(self, login: str, **options: Any) -> None:
        super().__init__(**options)
        if login != "me:pass%20word":
            raise ConnectionError(f"guarded://{login}@host refused pass word")


def test_credentials_open_a_url_and_are_shown_nowhere(bucket: Path) -> None:
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    url = f"guarded://me:pass%20word@host{bucket}/state"
    shown = f"guarded://***@host{bucket}/state"
    run = Run()
    assert run.save(1, url) == shown
    assert run.load(url) == 1
    for key in keys(bucket):
        assert b"pass%20word" not in object_store.place_of(f"{bucket}/{key}").read_bytes()

    def tell(when: str, what: str) -> None:
        if what.startswith("complete"):
            raise OSError(f"{url}: cannot write with 'pass word'")

    with failing(tell), pytest.raises(CheckpointError) as raised:
        run.save(2, url)
    assert_hidden(raised.value, shown)
    with pytest.raises(CheckpointError, match="Rank 0 cannot reach") as raised:
        run.load(url.replace("me:", "you:"))
    assert_hidden(raised.value, shown)


def assert_hidden(error: BaseException, shown: str) -> None:
    text = "".join(traceback.format_exception(error))
    assert shown in text
    assert "pass%20word" not in text
    assert "pass word" not in text.replace("# pass word", "")


@pytest.mark.parametrize(
    ("credentials", "text", "shown"),
    [
        (
            "a:pass",
            "a at a@host: a:pass@host was not a bad path",
            "a at ***@host: ***@host was not a bad path",
        ),
        ("al", "sftp://al@host/all: normal", "sftp://***@host/all: normal"),
        ("al", "/home/al/al.txt of al@host", "/home/al/al.txt of ***@host"),
        ("e:p%40ss", "e:p@ss, e:p%40ss, p@ss; here: p%40ss", "***, ***, ***; here: ***"),
        ("data:pass", "no data at data:pass@host/data", "no data at ***@host/data"),
        ("AKIA0123:pass", "the key AKIA0123 does not exist", "the key *** does not exist"),
        ("tokentoken", "xtokentoken%40host", "x***%40host"),
        ("me:me", "me:me@host: home", "***@host: ho***"),
        ("me:", "me:@host: me", "***@host: me"),
        (":pass", "pass at :pass@host", "*** at ***@host"),
    ],
)
def test_a_short_name_is_hidden_in_urls_alone(credentials: str, text: str, shown: str) -> None:
    assert parse_url(f"sftp://{credentials}@host/path").without_secrets(text) == shown


LOCAL_ONLY = """
import sys
sys.modules["fsspec"] = None
from lockstep.checkpoint.store import store_for
from lockstep.checkpoint import load_checkpoint, save_checkpoint
store_for(sys.argv[1])
"""


def test_a_local_path_needs_no_fsspec(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LOCAL_ONLY, str(tmp_path)], check=True, timeout=60)
