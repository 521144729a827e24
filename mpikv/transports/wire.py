"""What travels: the tag plan, the fixed header of messages to a server, and control messages.

Tags. One tag each for control messages, requests to servers and optimizer states, some for control messages among
workers that go on without others, two for calls without keys (groups/workers.py), a window of
reply tags and one of payload tags that each client uses in turn. Above them are
`TAGS_PER_KEY` tags for each key's collectives, so that two keys never meet in whatever order ranks push them.

A message of a collective is values alone, but for the trailers of collectives/labelled.py.

A message to a server is one request or several, each the header below and then its payload's bytes. A large payload
does not stand behind its header: it waits at the client, cut into partitions, under a tag that the header names, until
the server fetches it, straight from the array that it is in. Over links the server asks for short partitions when it
can receive them, by {"kind": "fetch", "tag": ..., "count": ...} (strategies/offered_pieces.py). A reply is the payload
alone, in the same partitions: the client named its tag and knows its size. The answers to several pulls of one message
under one tag are one message.

A control message is JSON in UTF-8. Such messages are sent at `init`, barriers, errors and the end, and in a training
step for partitions alone, but for a trainer's first one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.errors import MpikvError

VERSION = 11

TAG_MEETING = 0  # before there are stores
TAG_CONTROL = 1
TAG_REQUEST = 2
TAG_STATES = 3
TAG_NOTHING = 12  # of no message
TAG_CALLS = 13  # and the next one
TAG_REPLY = 15
REPLY_TAGS = 4096  # replies that one client may wait for at a time; MPI guarantees tags up to 32767 only
TAG_PAYLOAD = TAG_REPLY + REPLY_TAGS
PAYLOAD_TAGS = 4096  # payloads that one client may hold for servers at a time
TAG_KEYS = TAG_PAYLOAD + PAYLOAD_TAGS
TAGS_PER_KEY = 4  # initial value, reduce-scatter, allgather, both of them in one


def key_tag(key_id: int, use: int) -> int:
    """The tag of a key's collective.

    use: 0 is the initial value, then times of rounds; 1 adds, 2 brings the result, 3 does both (adasum).
    """
    return TAG_KEYS + key_id * TAGS_PER_KEY + use


def key_of(tag: int) -> int:
    """The number of the key whose collective has this tag."""
    return (tag - TAG_KEYS) // TAGS_PER_KEY


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
# Of row-sparse keys. Ids of rows are written as row_ids.py does, counted from the first row that the owner has.
ROWS_INIT = 12  # payload: JSON description, then ids and rows
ROWS_PUSH = 13  # payload: ids and rows, maybe none: it is this worker's push of the round all the same
ROWS_PULL = 14  # payload: ids; answered by their rows once `round` rounds are done
ROWS_CHANGED = 15  # answered, once `round` rounds are done, by ids and rows: what changed since this worker's last one
TIMELINE = 16  # payload: JSON (server/timeline.py); answered by JSON
REFUSE = 17  # the workers of a host have pushed a round under different labels, and nothing of it comes
ROWS_THERE = 18  # as ROWS_CHANGED: all rows that exist
KEPT = 19  # payload: JSON (server/kept.py); answered by what this owner held before a rank died
ROWS = (ROWS_INIT, ROWS_PUSH, ROWS_PULL, ROWS_CHANGED, ROWS_THERE)

# version, kind, payload tag, key id, reply tag, attributes id, round, payload bytes, priority, reduction, flags, and 6
# bytes more: 48 bytes, so that the payload behind it is aligned for every dtype.
_HEADER = struct.Struct("<BBHIIIQQqBB6x")
HEADER_BYTES = _HEADER.size
ALIGN_BYTES = 16  # of each request in a message of several

PRIORITY_LIMIT = 2**63 - 1

UNCOMPRESSED_ANSWER, UNCOMPRESSED_PUSH = 1, 2
LOOPBACK_ANSWER, LOOPBACK_PUSH = 4, 8  # within the process, in device memory (transports/loopback.py)


class Header(NamedTuple):
    """The fixed part of a request. `round` is the push's round or the version that a pull needs.

    payload_tag: where the client holds the payload; 0: it stands behind the header. op: the code of the reduction of a
    push (reductions.py). flags: what travels as it is, whatever the key's codec, and what is handed over: the sum of
    UNCOMPRESSED_ANSWER, UNCOMPRESSED_PUSH, LOOPBACK_ANSWER and LOOPBACK_PUSH.
    """

    kind: int
    key_id: int = 0
    reply_tag: int = 0
    attributes_id: int = 0
    round: int = 0
    payload_tag: int = 0
    priority: int = 0
    op: int = 0
    flags: int = 0


Payload = HostArray | bytes | None


def request(header: Header, payload: Payload = None) -> HostArray:
    """A request as one contiguous uint8 array: header and a copy of the payload."""
    length = length_of(payload)
    message = np.empty(HEADER_BYTES + length, np.uint8)
    _put(message, 0, header, payload, length)
    return message


def requests(items: Sequence[tuple[Header, Payload]]) -> HostArray:
    """Several requests as one message."""
    lengths = [length_of(payload) for _, payload in items]
    message = np.empty(sum(map(padded, lengths[:-1])) + HEADER_BYTES + lengths[-1], np.uint8)
    at = 0
    for (header, payload), length in zip(items, lengths, strict=True):
        _put(message, at, header, payload, length)
        at += padded(length)
    return message


def _put(message: HostArray, at: int, header: Header, payload: Payload, length: int) -> None:
    kind, key_id, reply_tag, attributes_id, round_, payload_tag, priority, op, flags = header
    fields = (VERSION, kind, payload_tag, key_id, reply_tag, attributes_id, round_, length, priority, op, flags)
    _HEADER.pack_into(message.data, at, *fields)
    if payload is not None and length:
        data = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload.reshape(-1).view(np.uint8)
        message[at + HEADER_BYTES : at + HEADER_BYTES + length] = data


def length_of(payload: Payload) -> int:
    """The bytes of a payload."""
    return 0 if payload is None else len(payload) if isinstance(payload, bytes) else payload.nbytes


def padded(length: int) -> int:
    """The bytes that a request with a payload of this length has in a message of several, but for the last one's."""
    return HEADER_BYTES + -(-length // ALIGN_BYTES) * ALIGN_BYTES


def clamped(priority: int) -> int:
    """A priority as the header holds it."""
    return max(-PRIORITY_LIMIT, min(PRIORITY_LIMIT, int(priority)))


def parse_requests(message: HostArray) -> list[tuple[Header, HostArray]]:
    """Headers and payloads (views of `message`). Raises MpikvError for a message of another version or length."""
    found: list[tuple[Header, HostArray]] = []
    at, size = 0, message.size
    while True:
        if size - at < HEADER_BYTES:
            raise MpikvError(f"a request of {size - at} bytes is shorter than its header of {HEADER_BYTES}")
        fields = _HEADER.unpack_from(message.data, at)
        version, kind, payload_tag, key_id, reply_tag, attributes_id, round_, length, priority, op, flags = fields
        if version != VERSION:
            raise MpikvError(
                f"a request in wire version {version}, this rank speaks {VERSION}: ranks run different mpikv"
            )
        payload = message[at + HEADER_BYTES : at + HEADER_BYTES + length]
        end = at + padded(length)
        if payload.size != length or (end > size and at + HEADER_BYTES + length != size):
            brought = size - at - HEADER_BYTES
            raise MpikvError(f"a request of kind {kind} announces {length} bytes and brought {brought}")
        header = Header(kind, key_id, reply_tag, attributes_id, round_, payload_tag, priority, op, flags)
        found.append((header, payload))
        if end >= size:
            return found
        at = end


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
