"""Messages and tags."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv.errors import MpikvError
from mpikv.transports import wire


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
