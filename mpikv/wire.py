"""What travels: the tag plan, the fixed header of messages to a server, and control messages.

Tags. One tag each for control messages, requests to servers and optimizer states, a window of reply tags that each
client uses in turn, and above it `TAGS_PER_KEY` tags for each key's collectives, so that two keys never meet in
whatever order ranks push them.

A request to a server is one message: the header below, then the payload's bytes. A reply is the payload alone: the
client named its tag and knows its size. A control message is JSON in UTF-8; control messages are sent at `init`,
barriers, errors and the end, never in a training step.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays import HostArray
from mpikv.errors import MpikvError

VERSION = 1

TAG_CONTROL = 1
TAG_REQUEST = 2
TAG_STATES = 3
TAG_REPLY = 16
REPLY_TAGS = 8192  # replies that one client may wait for at a time; MPI guarantees tags up to 32767 only
TAG_KEYS = TAG_REPLY + REPLY_TAGS
TAGS_PER_KEY = 3  # initial value, reduce-scatter, allgather


def key_tag(key_id: int, use: int) -> int:
    """The tag of a key's collective: use 0 is the initial value, 1 the reduce-scatter, 2 the allgather."""
    return TAG_KEYS + key_id * TAGS_PER_KEY + use


def max_keys(max_tag: int) -> int:
    """How many keys a store may hold, from MPI's largest tag."""
    return (max_tag + 1 - TAG_KEYS) // TAGS_PER_KEY


# Kinds of requests to a server.
INIT = 1  # payload: JSON description, then the shard's values
PUSH = 2  # payload: the shard's gradient
PULL = 3  # answered by the shard's values once `version` rounds are done
PUSHPULL = 4  # both
ATTRIBUTES = 5  # payload: JSON; attributes of the optimizer under the number `attributes_id`
OPTIMIZER = 6  # payload: a pickled optimizer; answered by one byte when it is in place
FLUSH = 7  # answered by one byte when everything this worker sent before has been applied
SAVE = 8  # answered by the states of this server, as bytes
LOAD = 9  # payload: JSON, the keys whose states are replaced, then states as bytes; answered by one byte
REMOVE = 10  # forget the key: it moves to other owners
BYE = 11  # this worker sends nothing any more

# version, kind, reserved, key id, reply tag, attributes id, round, payload bytes: 32 bytes, so that the payload behind
# it is aligned for every dtype.
_HEADER = struct.Struct("<BBHIIIQQ")
HEADER_BYTES = _HEADER.size


class Header(NamedTuple):
    """The fixed part of a request. `round` is the push's round or the version that a pull needs."""

    kind: int
    key_id: int = 0
    reply_tag: int = 0
    attributes_id: int = 0
    round: int = 0


def request(header: Header, payload: HostArray | bytes | None = None) -> HostArray:
    """A request as one contiguous uint8 array: header and a copy of the payload."""
    data = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload
    n_bytes = 0 if data is None else data.nbytes
    message = np.empty(HEADER_BYTES + n_bytes, np.uint8)
    _HEADER.pack_into(message.data, 0, VERSION, header.kind, 0, *header[1:], n_bytes)
    if data is not None and n_bytes:
        message[HEADER_BYTES:] = data.reshape(-1).view(np.uint8)
    return message


def parse_request(message: HostArray) -> tuple[Header, HostArray]:
    """Header and payload (a view of `message`). Raises MpikvError for a message of another version or length."""
    if message.size < HEADER_BYTES:
        raise MpikvError(f"a request of {message.size} bytes is shorter than its header of {HEADER_BYTES}")
    version, kind, _, key_id, reply_tag, attributes_id, round_, length = _HEADER.unpack_from(message.data)
    payload = message[HEADER_BYTES:]
    if version != VERSION:
        raise MpikvError(f"a request in wire version {version}, this rank speaks {VERSION}: ranks run different mpikv")
    if payload.size != length:
        raise MpikvError(f"a request of kind {kind} announces {length} bytes and brought {payload.size}")
    return Header(kind, key_id, reply_tag, attributes_id, round_), payload


def with_text(text: bytes, data: bytes) -> bytes:
    """A payload of two parts: the length of the first (4 bytes, little endian), the first, the second."""
    return struct.pack("<I", len(text)) + text + data


def split_text(payload: HostArray) -> tuple[Any, HostArray]:
    """The inverse of `with_text`: what the JSON says, and the second part as a view of uint8."""
    (length,) = struct.unpack_from("<I", payload.data)
    return json.loads(payload[4 : 4 + length].tobytes()), payload[4 + length :]


def control(message: dict[str, Any]) -> HostArray:
    """A control message as bytes."""
    return np.frombuffer(json.dumps({"version": VERSION, **message}).encode(), np.uint8)


def parse_control(data: HostArray) -> dict[str, Any]:
    """The inverse of `control`. Raises MpikvError when the sender speaks another version."""
    message: dict[str, Any] = json.loads(data.tobytes())
    if message.pop("version", None) != VERSION:
        raise MpikvError("a control message in another wire version: ranks run different versions of mpikv")
    return message
