"""Partitions: every example once, equal lengths where promised, the same order on every part, whatever the sizes."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.data import SplitSampler, split_data

lengths = st.integers(0, 200)
parts = st.integers(1, 20)
seeds = st.integers(0, 2**70)
lasts = st.sampled_from(["uneven", "drop", "wrap"])


def all_parts(length: int, num_parts: int, epoch: int, **options: object) -> list[list[int]]:
    result = []
    for part in range(num_parts):
        sampler = SplitSampler(length, num_parts, part, **options)
        sampler.set_epoch(epoch)
        indices = list(sampler)
        assert len(indices) == len(sampler)
        assert indices == list(sampler)
        result.append(indices)
    return result


options = st.fixed_dictionaries({"seed": seeds, "shuffle": st.booleans(), "last": lasts})


@given(lengths, parts, st.integers(0, 1000), options)
def test_parts_of_an_epoch(length: int, num_parts: int, epoch: int, options: dict[str, Any]) -> None:
    """Each example is in one part; or those beyond equal lengths in none, or as few as make them equal twice."""
    split = all_parts(length, num_parts, epoch, **options)
    together, lengths = list(chain(*split)), [len(part) for part in split]
    if options["last"] == "uneven":
        assert sorted(together) == list(range(length))
        assert lengths == [len(part) for part in np.array_split(np.arange(length), num_parts)]
    elif options["last"] == "drop":
        assert set(lengths) == {length // num_parts}
        sampler = SplitSampler(length, num_parts, num_parts - 1, **options)
        sampler.set_epoch(epoch)
        assert sorted([*together, *sampler.left.tolist()]) == list(range(length))
    else:
        assert set(lengths) == {-(-length // num_parts)}
        counts = np.bincount(np.array(together, dtype=int), minlength=length)
        assert length == 0 or 1 <= counts.min() <= counts.max() <= counts.min() + 1


@given(lengths, parts, st.integers(1, 16), seeds, st.sampled_from(["uneven", "drop"]))
def test_a_step_of_all_parts_is_a_step_of_one_process(
    length: int, num_parts: int, batch: int, seed: int, last: str
) -> None:
    (alone,) = all_parts(length, 1, 3, seed=seed)
    split = all_parts(length, num_parts, 3, seed=seed, last=last)
    large = batch * num_parts
    for step in range(-(-length // large) if last == "uneven" else length // large):
        together = list(chain(*(part[step * batch : (step + 1) * batch] for part in split)))
        assert sorted(together) == sorted(alone[step * large : (step + 1) * large])


@given(lengths, parts, st.data(), seeds, lasts)
def test_the_rest_of_an_epoch(length: int, after: int, data: st.DataObject, seed: int, last: str) -> None:
    """What parts have had of an epoch and what other parts get of the rest is the epoch, in its order."""
    start = data.draw(st.integers(0, length))
    whole = SplitSampler(length, seed=seed)
    whole.set_epoch(3)
    order = list(whole)
    parts = [SplitSampler(length, after, part, seed=seed, last=last) for part in range(after)]
    for part in parts:
        part.set_epoch(3, start)
        assert len(list(part)) == len(part)
    places = [index for step in zip_longest(*parts) for index in step if index is not None]
    rest = order[start:]
    wanted = {"uneven": len(rest), "drop": len(rest) // after * after, "wrap": -(-len(rest) // after) * after}[last]
    assert places == [rest[i % len(rest)] for i in range(wanted)]
    with pytest.raises(ValueError, match="start must be at most"):
        whole.set_epoch(3, length + 1)
    assert list(whole) == order


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 2))
def test_split_data_is_array_split(size: int, num_slice: int, axis: int) -> None:
    shape = [2, 3, 4]
    shape[axis] = size
    data = np.arange(np.prod(shape)).reshape(shape)
    expected = np.array_split(data, num_slice, axis=axis)
    for batch_axis in (axis, axis - 3):
        got = split_data(data, num_slice, batch_axis, even_split=False)
        assert len(got) == len(expected)
        assert all(np.array_equal(a, b) and a.shape == b.shape for a, b in zip(got, expected, strict=True))
