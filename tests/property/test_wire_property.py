"""Messages to servers and between workers: what is written is read, what is damaged is refused; and tags."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.errors import MpikvError
from mpikv.transports import wire

number = st.integers(0, 2**32 - 1)
priority = st.integers(-(2**63), 2**63 - 1)
headers = st.builds(
    wire.Header,
    st.integers(1, 255),
    number,
    number,
    number,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**16 - 1),
    priority,
    st.integers(0, 255),
    st.integers(0, 255),
)


@given(st.lists(st.tuples(headers, st.binary(max_size=100)), min_size=1, max_size=8))
def test_requests_come_back(requests):
    """Several in a message, and one, which has a function of its own."""
    found = wire.parse_requests(wire.requests(requests))
    assert [(header, payload.tobytes()) for header, payload in found] == requests
    (header, payload), (one, rest) = requests[0], wire.parse_requests(wire.request(*requests[0]))[0]
    assert (one, rest.tobytes()) == (header, payload)
    assert all(
        payload.ctypes.data % wire.ALIGN_BYTES == found[0][1].ctypes.data % wire.ALIGN_BYTES for _, payload in found
    )


@given(st.integers(-(10**30), 10**30))
def test_any_priority_fits_a_header(priority):
    header = wire.Header(wire.PUSH, priority=wire.clamped(priority))
    assert wire.parse_requests(wire.request(header))[0][0] == header
    assert wire.clamped(priority) == priority or abs(priority) >= 2**63 - 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text().filter(lambda name: name != "version"), json_values, max_size=5))
def test_control_messages_come_back(message):
    assert wire.parse_control(wire.control(message)) == message


@given(json_values, st.binary(max_size=60))
def test_texts_with_data_come_back(value, data):
    text, rest = wire.split_text(np.frombuffer(wire.with_text(json.dumps(value).encode(), data), np.uint8))
    assert text == value
    assert rest.tobytes() == data


@given(st.integers(0, 2**31 - 1))
def test_tags_stay_below_the_largest(max_tag):
    keys = wire.max_keys(max_tag)
    if keys > 0:
        assert wire.key_tag(keys - 1, wire.TAGS_PER_KEY - 1) <= max_tag
    assert wire.key_tag(max(keys, 0), wire.TAGS_PER_KEY - 1) > max_tag


# --- what is damaged


def test_tags_of_different_uses_differ():
    fixed = [wire.TAG_CONTROL, wire.TAG_REQUEST, wire.TAG_STATES]
    replies = range(wire.TAG_REPLY, wire.TAG_REPLY + wire.REPLY_TAGS)
    keys = [wire.key_tag(key_id, use) for key_id in range(50) for use in range(wire.TAGS_PER_KEY)]
    everything = [*fixed, *replies, *keys]
    assert len(set(everything)) == len(everything)
    assert min(everything) > 0


def test_damaged_requests():
    good = wire.request(wire.Header(wire.PUSH, 7), np.ones(3, np.float32))
    for size in (0, 1, wire.HEADER_BYTES - 1):
        with pytest.raises(MpikvError, match="shorter than its header"):
            wire.parse_requests(good[:size].copy())
    for message in (good[:-1], np.concatenate([good, good[:1]])):
        with pytest.raises(MpikvError, match=r"announces 12 bytes and brought 1[13]"):
            wire.parse_requests(message.copy())
    other = good.copy()
    other[0] = wire.VERSION + 1
    with pytest.raises(MpikvError, match="version"):
        wire.parse_requests(other)


def test_a_control_message_of_another_version():
    now = f'"version": {wire.VERSION}'.encode()
    old = wire.control({"kind": "x"}).tobytes().replace(now, f'"version": {wire.VERSION - 1}'.encode())
    with pytest.raises(MpikvError, match="version"):
        wire.parse_control(np.frombuffer(old, np.uint8))
