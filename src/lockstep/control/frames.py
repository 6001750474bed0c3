"""Frames: ``length (4 bytes) | MAC (32 bytes) | JSON object``; a stream of them cannot be changed unseen.

The MAC (HMAC-SHA256) covers the number of the frame and its payload, under a key of one direction of one
session, so that a frame that is changed, repeated, left out, reordered or sent back is refused. Frames
are authentic, not encrypted.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from lockstep.control.secret import Secret
from lockstep.errors import LinkError

MAX_PAYLOAD_BYTES = 1024 * 1024
MAC_BYTES = 32
LENGTH = struct.Struct(">I")
NUMBER = struct.Struct(">Q")
HEADER_BYTES = LENGTH.size + MAC_BYTES


def encode(message: Mapping[str, Any]) -> bytes:
    """The payload of a message.

    Raises:
        LinkError: the message is not a mapping of JSON values, or larger than 1 MiB.
    """
    if not isinstance(message, Mapping):
        raise LinkError(f"A message is a mapping, not {type(message).__name__}. Put the value under a key.")
    try:
        payload = json.dumps(dict(message), allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise LinkError(
            f"The message is not made of JSON values: {type(error).__name__}. Change it."
        ) from None
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise LinkError(
            f"The message has {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}. Send less, or several messages."
        )
    return payload


def decode(payload: bytes) -> dict[str, Any]:
    """The message of a payload.

    Raises:
        LinkError: the payload is not one JSON object.
    """
    try:
        message = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, thousands of digits, nested too deep
        message = None
    if not isinstance(message, dict):
        raise LinkError("A frame does not hold a JSON object. Use one version of Lockstep everywhere.")
    return message


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


class FrameWriter:
    """Makes the frames of one direction, in order."""

    def __init__(self, key: Secret) -> None:
        self._key = key
        self._number = 0

    def frame(self, payload: bytes) -> bytes:
        """The next frame, around a payload of :func:`encode`."""
        # The number is signed and not sent: both ends count, so that a frame fits in one place of the stream only.
        mac = self._key.sign(NUMBER.pack(self._number) + payload)
        self._number += 1
        return LENGTH.pack(len(payload)) + mac + payload


class FrameReader:
    """Takes the bytes of one direction, in order, and gives messages."""

    def __init__(self, key: Secret) -> None:
        self._key = key
        self._number = 0
        self._received = bytearray()

    def messages(self, received: bytes) -> Iterator[dict[str, object]]:
        """The messages that are complete with these bytes; the rest waits for the next call.

        Raises:
            LinkError: a frame is oversize, not authentic, out of order, or not a JSON object. The reader
                is of no use afterwards.
        """
        self._received += received
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            # The length is not authentic yet: without a bound, someone in between could have this side wait for 4 GiB.
            if length > MAX_PAYLOAD_BYTES:
                raise LinkError(
                    f"A frame of {length} bytes was announced, more than {MAX_PAYLOAD_BYTES}. Reconnect."
                )
            end = HEADER_BYTES + length
            if len(self._received) < end:
                return
            mac = bytes(self._received[LENGTH.size : HEADER_BYTES])
            payload = bytes(self._received[HEADER_BYTES:end])
            del self._received[:end]
            # In constant time, and before the payload is parsed: JSON of strangers is never read.
            if not hmac.compare_digest(mac, self._key.sign(NUMBER.pack(self._number) + payload)):
                raise LinkError("A frame was changed, repeated or reordered on its way. Reconnect.")
            self._number += 1
            yield decode(payload)
