"""Long keys on GPUs whose paths add on the host: which copies are made, and values do not depend on their lengths."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from fake_cupy import Machine
from fake_gpus import gpus_of
from hypothesis import given
from hypothesis import strategies as st

from mpikv.collectives import hierarchical, hosted, ring, segments
from mpikv.collectives.segments import SEGMENT_BYTES, merged
from mpikv.config import Config
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

F4 = np.dtype(np.float32)


@given(st.lists(st.integers(1, 9), max_size=12), st.randoms(use_true_random=False), st.integers(1, 30))
def test_every_span_is_in_one_copy(lengths: list[int], random: Any, most: int) -> None:
    """In any order of spans. No copy is longer than allowed, unless a single span is longer."""
    ends = np.cumsum([0, *lengths]).tolist()
    spans = [(ends[i], ends[i + 1]) for i in range(len(lengths))]
    random.shuffle(spans)
    copies, copy_of = merged(spans, most)
    assert sorted(copies) == sorted(set(copies))
    assert sum(end - begin for begin, end in copies) == sum(lengths)
    for span, i in zip(spans, copy_of, strict=True):
        assert copies[i][0] <= span[0] < span[1] <= copies[i][1]
        assert copies[i][1] - copies[i][0] <= max(most, span[1] - span[0])
    assert [copy_of.index(i) for i in range(len(copies))] == sorted(copy_of.index(i) for i in range(len(copies)))


def test_spans_that_fit_share_one_copy() -> None:
    assert merged([(5, 9), (0, 2), (2, 5)], 9) == ([(0, 9)], [0, 0, 0])
    assert merged([(5, 9), (0, 2), (2, 5)], 7) == ([(2, 9), (0, 2)], [0, 1, 0])
    assert merged([], 7) == ([], [])
    assert SEGMENT_BYTES % 8 == 0


@pytest.mark.parametrize(
    ("hosts", "algorithm"),
    [("aaa", "auto"), ("aaa", "ring"), ("abc", "ring"), ("aab", "auto"), ("aabb", "auto"), ("aab", "hierarchical")],
)
def test_values_do_not_depend_on_the_lengths_of_copies(hosts: str, algorithm: str) -> None:
    n, size = 1003, len(hosts)

    def body(store: Any, put: Any) -> Any:
        store.init("w", put(np.zeros(n, F4)))
        found = []
        for step in range(3):
            store.push("w", put(np.arange(n, dtype=F4) % 97 + store.rank * step))
            store.pull("w", out := put(np.zeros(n, F4)))
            found.append(out.get() if hasattr(out, "get") else out)
        return np.stack(found)

    gpus = gpus_of(Machine(), size)
    config = Config(timeout_s=TEST_TIMEOUT_S, device_path="staged", algorithm=algorithm)
    patches = [mock.patch.object(segments, "SEGMENT_BYTES", 64)]
    patches += [
        mock.patch.object(module, name, 64)
        for module in (ring, hierarchical, hosted)
        for name in ("LINK_SEGMENT_BYTES", "HOST_SEGMENT_BYTES")
        if hasattr(module, name)
    ]
    for patch in patches:
        patch.start()
    try:
        found = spawn_stores(
            "dist_sync", size, lambda s: body(s, gpus[s.rank].cupy.asarray), hosts=hosts, gpus=gpus, config=config
        )
    finally:
        for patch in patches:
            patch.stop()
    expected = np.stack([size * (np.arange(n, dtype=F4) % 97) + step * sum(range(size)) for step in range(3)])
    assert all(np.array_equal(one, expected) for one in found)
