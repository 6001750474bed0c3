"""The secret of a run: what a process must know to be heard by the others."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from lockstep.config.sources import user_config_folder
from lockstep.errors import ConfigError

SECRET_BYTES = 32
MIN_BYTES, MAX_BYTES = 16, 1024
HEXADECIMAL = re.compile(r"(?:[0-9a-fA-F]{2})+")


class Secret:
    """Bytes that never show in a message, a traceback or a pickle; ``hex()`` is the only way out."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = bytes(value)

    @staticmethod
    def from_hex(text: str) -> Secret:
        """Return the secret that ``hex()`` wrote.

        Raises:
            ConfigError: the text is not 32 to 2048 hexadecimal digits. The message does not quote it.
        """
        digits = text.strip()
        if not HEXADECIMAL.fullmatch(digits) or not MIN_BYTES <= len(digits) // 2 <= MAX_BYTES:
            raise ConfigError(
                f"The run's secret has {len(digits)} characters and is not {2 * MIN_BYTES} to {2 * MAX_BYTES} "
                f"hexadecimal digits. Make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
            )
        return Secret(bytes.fromhex(digits))

    def hex(self) -> str:
        """Return the secret as text, for the environment or the standard input of a process of this run."""
        return self._value.hex()

    def sign(self, content: bytes) -> bytes:
        """Sign ``content`` by HMAC-SHA256, 32 bytes."""
        return hmac.digest(self._value, content, hashlib.sha256)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self.sign(b"hash"))

    def __repr__(self) -> str:
        return "<secret>"

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, _memo: object) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("A secret cannot be pickled. Pass its hex() to the process that needs it.")


def new_secret() -> Secret:
    """Return a secret of 256 random bits."""
    return Secret(secrets.token_bytes(SECRET_BYTES))


def derived(secret: Secret, purpose: str) -> Secret:
    """Return the secret for one purpose, from which neither ``secret`` nor that of another purpose can be found."""
    return Secret(secret.sign(b"lockstep purpose: " + purpose.encode()))


def user_secret(path: Path | None = None) -> Secret:
    """Return the secret of this user, in ``lockstep/secret`` of the configuration folder; made at first use.

    Raises:
        ConfigError: the file cannot be made or read, others than its owner can, or it holds no secret.
    """
    if path is None:
        path = user_config_folder() / "secret"
        if not path.is_absolute():
            raise ConfigError(
                "This user has no home directory in which the secret can be kept. Set HOME, or name a file with "
                "--secret-file."
            )
    # Unlike Path.exists, os.path.exists never raises.
    if not os.path.exists(path):
        _write_new(path)
    return read_secret(path)


def read_secret(path: Path) -> Secret:
    """Return the secret in an existing file: hexadecimal digits, readable by its owner alone.

    Raises:
        ConfigError: the file is missing, unreadable, open to others, or holds no secret.
    """
    try:
        # Without O_NONBLOCK a named pipe would wait for its writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a file, so it holds no secret. Name another one.")
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{path} belongs to user {status.st_uid}, who may know the secret. Use a file that belongs to "
                "you."
            )
        if status.st_mode & 0o077:
            raise ConfigError(
                f"{path} can be read or changed by other users (mode {stat.S_IMODE(status.st_mode):03o}), so its "
                f"content is not secret. Delete it, or if no other user has read it: chmod 600 {path}"
            )
        content = os.read(descriptor, 2 * MAX_BYTES + 2)
    finally:
        os.close(descriptor)
    try:
        return Secret.from_hex(content.decode("ascii", "replace"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _write_new(path: Path) -> None:
    """Write a new secret where none is; when several processes do it at once, one of them wins."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(new_secret().hex() + "\n")
                file.flush()
                os.fsync(descriptor)
            with contextlib.suppress(FileExistsError):
                # A link never replaces a file, as a rename does, and is never half there, as a write is.
                os.link(draft, path)
        finally:
            os.unlink(draft)
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(
        f"Cannot use {path} for the run's secret: {reason}. Name another file with --secret-file."
    )
