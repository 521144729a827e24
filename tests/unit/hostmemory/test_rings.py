"""Rings of records between two ranks of a host: what is put comes out, in order, whole, however the ring wraps."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv.hostmemory.rings import (
    LONGEST_BYTES,
    STRIDE_BYTES,
    RingReader,
    RingWriter,
)
from mpikv.hostmemory.segment import HostMemory


def pair():
    memory = HostMemory(0, 2, np.zeros(STRIDE_BYTES, np.uint8))
    return RingWriter(memory, 0), RingReader(memory, 0)


def taken(reader):
    found = []
    reader.take(lambda kind, a, b, c, payload: found.append((kind, a, b, c, bytes(payload))))
    return found


def payload_of(n_bytes, seed):
    return np.random.default_rng([n_bytes, seed]).integers(0, 256, n_bytes, np.uint8).tobytes()


@settings(max_examples=60)
@given(st.lists(st.one_of(st.integers(0, 200), st.integers(0, LONGEST_BYTES), st.none()), max_size=40))
def test_records_of_any_length(lengths):
    """None: the reader takes what is there. A full ring refuses, and takes the same record once there is room."""
    writer, reader = pair()
    sent, found = [], []
    for i, n_bytes in enumerate(lengths):
        if n_bytes is None:
            found += taken(reader)
            continue
        record = (1 + i, i, 2 * i, 3 * i, payload_of(n_bytes, i))
        if not writer.put(*record):
            found += taken(reader)
            assert found == sent
            assert writer.put(*record)
        sent.append(record)
    assert found + taken(reader) == sent


def test_a_handler_that_raises_does_not_see_its_record_again():
    writer, reader = pair()
    for i in range(3):
        writer.put(1, i, 0, 0, None)

    def handle(kind, a, b, c, payload):
        if a == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reader.take(handle)
    assert [record[1] for record in taken(reader)] == [2]


def test_two_threads():
    writer, reader = pair()
    random = np.random.default_rng(1)
    lengths = random.integers(0, 3000, 5000).tolist()

    def write():
        for i, n_bytes in enumerate(lengths):
            while not writer.put(1, i, n_bytes, 0, bytes([i % 256]) * n_bytes):
                pass

    thread = threading.Thread(target=write)
    thread.start()
    found = []
    while len(found) < len(lengths):
        found += taken(reader)
    thread.join()
    assert [(a, b, payload) for _, a, b, _, payload in found] == [
        (i, n_bytes, bytes([i % 256]) * n_bytes) for i, n_bytes in enumerate(lengths)
    ]
