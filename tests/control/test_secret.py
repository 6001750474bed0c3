"""Secrets: where they are kept, who may read them, and where they never show."""

from __future__ import annotations

import copy
import hmac
import os
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import lockstep
from lockstep.control import Client, Secret, Server, derived, new_secret, read_secret, user_secret
from lockstep.errors import ConfigError, ControlError
from tests.control.oracle import Echo, serving

HEX = re.compile(r"[0-9a-f]{64}")


def test_a_secret_is_256_random_bits_and_travels_as_hex() -> None:
    made = {new_secret().hex() for _ in range(50)}
    assert len(made) == 50 and all(HEX.fullmatch(text) for text in made)
    for text in made:
        assert Secret.from_hex(text + "\n").hex() == text
        assert Secret.from_hex(text) == Secret(bytes.fromhex(text)) != new_secret()


def test_derived_secrets_depend_on_purpose_and_secret() -> None:
    secret = Secret(bytes(32))
    expected = hmac.new(bytes(32), b"lockstep purpose: watch", "sha256").hexdigest()
    assert derived(secret, "watch").hex() == expected
    assert len({derived(one, purpose) for one in (secret, Secret(b"1" * 32)) for purpose in ("a", "b")}) == 4


@pytest.mark.parametrize(
    "text", ["", "ab" * 15, "ab" * 1025, "abc" * 11, "zz" * 32, "٣" * 64, "ab " * 32, "0x" + "ab" * 32]
)
def test_what_is_no_secret_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Secret.from_hex(text)
    assert text == "" or text not in "".join(traceback.format_exception(caught.value))


SOURCE = Path(lockstep.__file__).parent


def test_a_secret_shows_nowhere() -> None:
    secret = new_secret()
    forms = [secret.hex(), repr(secret.sign(b"")), repr(bytes.fromhex(secret.hex()))[2:-1]]

    def hides(text: str) -> bool:
        return not any(form in text for form in forms)

    assert str(secret) == repr(secret) == f"{secret}" == "<secret>"
    assert copy.deepcopy(secret) is secret and copy.copy(secret) is secret
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError):
            pickle.dumps(secret, protocol)
    with serving(Echo(), secret) as server:
        for wrong in (
            lambda: Client(server.address, new_secret(), 2),
            lambda: Server(secret, *server.address),
            lambda: Client(server.address, secret, 2).send({"a": object()}),
        ):
            with pytest.raises((ControlError, ConfigError)) as caught:
                wrong()
            shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
            ours = [frame for frame in shown.stack if Path(frame.filename).is_relative_to(SOURCE)]
            assert ours and hides(str(shown) + repr([frame.locals for frame in ours]))
        assert hides(repr(vars(server)))
    assert hides(Path("/proc/self/cmdline").read_text())


def test_the_user_secret_is_made_once_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    old = os.umask(0)
    try:
        secret = user_secret()
    finally:
        os.umask(old)
    file = tmp_path / "config" / "lockstep" / "secret"
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert file.read_text() == secret.hex() + "\n"
    assert user_secret() == user_secret(file) == read_secret(file) == secret
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620, 0o777])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    secret = user_secret(file)
    file.chmod(mode)
    for read in (user_secret, read_secret):
        with pytest.raises(ConfigError, match=f"mode {mode:03o}") as caught:
            read(file)
        assert secret.hex() not in str(caught.value)


def test_what_is_not_a_secret_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "long").touch(0o600)
    (tmp_path / "long").write_bytes(os.urandom(10_000))
    for name in ("pipe", "empty", "long", ".", "empty/below", "nul\0"):
        with pytest.raises(ConfigError):
            user_secret(tmp_path / name)
    with pytest.raises(ConfigError):
        read_secret(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_of_many_processes_that_make_it_at_once_all_get_the_same(tmp_path: Path) -> None:
    file = tmp_path / "new" / "secret"
    script = (
        "import sys, pathlib; from lockstep.control import user_secret; print('ready', flush=True); sys.stdin.read(1);"
        "print(user_secret(pathlib.Path(sys.argv[1])).hex())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    results = {process.communicate(timeout=30)[0] for process in processes}
    assert results == {file.read_text()} and [one.name for one in file.parent.iterdir()] == ["secret"]
