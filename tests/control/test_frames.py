"""Frames against the format's description, and against whoever changes them on their way."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.control import FrameReader, FrameWriter, Secret, decode, encode
from lockstep.errors import ControlError
from tests.control.oracle import frame
from tests.marks import examples
from tests.refusals import expect_refusal

KEY = bytes(range(32))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=2),
    min_size=1,
    max_size=4,
)


def reader() -> FrameReader:
    return FrameReader(Secret(KEY))


@examples(80)
@given(messages=MESSAGES, data=st.data())
def test_what_is_written_is_read_in_whatever_pieces_it_arrives(messages: list[Any], data: Any) -> None:
    writer = FrameWriter(Secret(KEY))
    stream = b"".join(writer.frame(encode(message)) for message in messages)
    expected = b"".join(frame(KEY, i, encode(message)) for i, message in enumerate(messages))
    assert stream == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    one = reader()
    assert [message for piece in pieces for message in one.messages(piece)] == messages


@examples(150)
@given(messages=MESSAGES, data=st.data())
def test_one_changed_byte_is_never_read_as_a_message(messages: list[Any], data: Any) -> None:
    stream = bytearray(b"".join(frame(KEY, i, encode(message)) for i, message in enumerate(messages)))
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] ^= data.draw(st.integers(1, 255))
    got: list[Any] = []
    with contextlib.suppress(ControlError):
        for message in reader().messages(bytes(stream)):
            got.append(message)
    assert got == messages[: len(got)] and len(got) < len(messages)  # those before the change, no other


@examples(120)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_signed_payload_is_a_message_only_if_it_is_an_object(payload: bytes) -> None:
    constants: list[str] = []  # NaN and Infinity as values; names of keys may be anything
    try:
        value = json.loads(payload, parse_constant=constants.append)
        expected = [value] if isinstance(value, dict) and not constants else None
    except ValueError:
        expected = None
    if expected is None:
        with pytest.raises(ControlError):
            list(reader().messages(frame(KEY, 0, payload)))
    else:
        assert list(reader().messages(frame(KEY, 0, payload))) == expected


def test_frames_that_are_repeated_reordered_left_out_or_sent_back_are_refused() -> None:
    first, second = (frame(KEY, i, b'{"n":%d}' % i) for i in range(2))
    assert list(reader().messages(first + second)) == [{"n": 0}, {"n": 1}]
    for stream in (first + first, second + first, second):
        expect_refusal(ControlError, "changed, repeated or reordered", list, reader().messages(stream))
    with pytest.raises(ControlError):  # the key of the other direction
        list(reader().messages(frame(KEY[::-1], 0, b"{}")))


def test_an_oversize_frame_is_refused_before_its_payload_is_there() -> None:
    with pytest.raises(ControlError, match="1048577 bytes"):
        list(reader().messages(struct.pack(">I", 2**20 + 1) + bytes(32)))
    largest = {"a": "x" * (2**20 - len('{"a":""}'))}
    assert list(reader().messages(frame(KEY, 0, encode(largest)))) == [largest]
    with pytest.raises(ControlError):
        encode({"a": largest["a"] + "x"})


@pytest.mark.parametrize(
    "message",
    [
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": b"bytes"},
        {"a": object()},
        {(1, 2): 3},
        ["list"],
        "text",
        None,
    ],
)
def test_only_mappings_of_json_values_are_sent(message: Any) -> None:
    with pytest.raises(ControlError):
        encode(message)


def test_values_nested_without_end_are_refused_both_ways() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ControlError):
        encode({"a": nested})
    for payload in (b'{"a":' + b"[" * 200_000, b'{"a":' + b"9" * 5000 + b"}", b'{"a":NaN}'):
        with pytest.raises(ControlError):
            decode(payload)
