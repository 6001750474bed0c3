"""URLs of checkpoints: what fsspec opens, and what people may see of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from lockstep.errors import ConfigError

CACHES = ("simplecache", "filecache", "blockcache", "cached")
LOCAL = ("file", "local")
# What stands before "@" is the container here, not a person.
CONTAINER_FIRST = ("abfs", "abfss", "az", "adl")
HIDDEN = "***"
SHORT_NAME = 8
"""Characters of a user name, or of a token in its place, that stand for nothing else in a message."""


@dataclass(frozen=True)
class Url:
    """A directory's URL. Paths in the form of ``shown`` become URLs for fsspec by ``real``."""

    shown: str
    userinfo: str = field(default="", repr=False)

    @property
    def protocol(self) -> str:
        return self.shown.partition("://")[0]

    def real(self, shown: str) -> str:
        """Return the URL, with its credentials, of a path that begins like this one."""
        prefix = f"{self.protocol}://{HIDDEN}@"
        if self.userinfo and shown.startswith(prefix):
            return f"{self.protocol}://{self.userinfo}@{shown.removeprefix(prefix)}"
        return shown

    def without_secrets(self, text: str) -> str:
        """Return ``text`` with the credentials hidden: messages of file systems often name the whole URL.

        A short user name may be a part of any word, so it is hidden only where it stands before a password or a host.
        """
        user, colon, password = self.userinfo.partition(":")
        hidden = {password, *([self.userinfo] if colon else []), *([user] if len(user) >= SHORT_NAME else [])}
        # The longest first: a user's name may be part of the password.
        for secret in sorted({*hidden, *map(unquote, hidden)} - {""}, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        for name in {user, unquote(user)} - {""}:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?=[:@])", HIDDEN, text)
        return text


def parse_url(text: str) -> Url:
    """Return a URL without slashes at its end, and its credentials apart.

    Raises:
        ConfigError: nothing can lie below it, or its credentials are missing or cannot be told from its path.
    """
    protocol, _, rest = text.partition("://")
    authority, slash, path = rest.rstrip("/").partition("/")
    # At the last "@": a password may have others.
    userinfo, at, host = authority.rpartition("@")
    if "?" in rest:
        raise ConfigError(
            f"A {protocol}:// URL has a query after {HIDDEN}?, but the URL of a directory has no query. Pass "
            "such options in fsspec's configuration."
        )
    if userinfo == HIDDEN:
        raise ConfigError(
            f"{protocol}://{authority}{slash}{path} is a URL as messages show it, without its credentials. Pass "
            "the URL with its credentials."
        )
    # A password with a slash would end up in the path, for all to see. Names of S3 may have colons.
    if not at and "@" in path and re.search(r":(?!\d+$)", authority) and protocol not in ("s3", "s3a"):
        raise ConfigError(
            f"The user or password of a {protocol}:// URL has a slash. Write it as %2F, or pass the credentials in "
            "fsspec's configuration."
        )
    if not at or (protocol in CONTAINER_FIRST and ":" not in userinfo):
        return Url(f"{protocol}://{authority}{slash}{path}")
    return Url(f"{protocol}://{HIDDEN}@{host}{slash}{path}", userinfo)


def without_caches(text: str) -> str:
    """Return the URL behind fsspec's caches, which would show what another process has replaced meanwhile.

    Raises:
        ConfigError: something else than a cache stands before "::", such as an archive.
    """
    while "::" in text:
        first, _, rest = text.partition("::")
        protocol = first.partition("://")[0]
        if protocol not in CACHES:
            raise ConfigError(
                f"A URL has {protocol!r} before '::', where only fsspec's caches are possible, because the files "
                "of a checkpoint must be replaceable one by one. Pass only the part after '::', or a name "
                "without '::'."
            )
        text = rest
    return text


def local_path(url: str) -> str | None:
    """Return the path on this machine that a URL names, or None if it names another place."""
    protocol, separator, path = url.partition("://")
    if not separator:
        return url
    return path if protocol in LOCAL else None
