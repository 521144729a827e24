"""Which keys travel together: plans as pure values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.placement import buckets

SIZES = st.lists(st.integers(0, 50), max_size=40)


@given(SIZES, st.data())
def test_every_key_is_in_one_bucket_and_none_is_too_large(sizes: list[int], data: st.DataObject) -> None:
    dtypes = data.draw(st.lists(st.sampled_from(["float32", "float16"]), min_size=len(sizes), max_size=len(sizes)))
    plan = buckets.plan(sizes, dtypes, limit_bytes=30)
    assert sorted(i for group in plan for i in group) == list(range(len(sizes)))
    for group in plan:
        assert group == sorted(group)
        assert len({dtypes[i] for i in group}) == 1
        assert len(group) == 1 or sum(sizes[i] for i in group) <= 30


def test_the_first_bucket_is_small_and_large_arrays_go_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BYTES", 8)
    sizes = [4, 4, 4, 4, 4, 100, 4, 4, 20, 4]
    assert buckets.plan(sizes, ["f"] * 10, limit_bytes=16) == [[0, 1], [5], [2, 3, 4, 6], [8], [7, 9]]
    assert buckets.plan([], []) == []


def test_buckets_on_gpus_are_longer() -> None:
    """What is there, of a kind of its own, does not lengthen those in host memory."""
    on_gpu = [False, *[False, True] * 40]
    plan = buckets.plan([2 << 20] * 81, ["GPU" if one else "host" for one in on_gpu], on_gpu=on_gpu)
    assert [len(group) for group in plan if on_gpu[group[0]]] == [12, 12, 12, 4]
    assert {len(group) for group in plan[1:] if not on_gpu[group[0]]} == {2}
