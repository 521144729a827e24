"""Laws of bounds and placements: every element has one owner, and every rank finds the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.codecs.compression import make, wire_of
from mpikv.config import ALGORITHMS, Config
from mpikv.placement.keys import KeyInfo, ShardPlan, even_bounds, partitions, plan_of_bounds, whole_bounds
from mpikv.placement.members import Members
from mpikv.placement.owners import CUT_BYTES, add_load, as_announced, place_at_owners
from mpikv.placement.place import host_bounds, place
from mpikv.placement.placement import Placement
from mpikv.server.roles import assign

sizes = st.one_of(st.integers(0, 50), st.integers(0, 2**40))
dtypes = st.sampled_from(["int8", "float16", "float32", "float64"])
parts = st.integers(1, 40)
loads = st.lists(st.integers(0, 10**9), min_size=1, max_size=12)
CODECS = ("none", '{"type": "2bit"}', '{"type": "int8", "block": 8}', '{"type": "none", "pull": "fp16"}')


@st.composite
def members(draw: st.DrawFn) -> Members:
    hosts = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12))
    roles = assign(hosts, draw(st.integers(0, len(hosts) - 1)) if draw(st.booleans()) else 0)
    config = Config(
        algorithm=draw(st.sampled_from(ALGORITHMS)),
        shared_memory=draw(st.sampled_from(["auto", "off"])),
        bigarray_bound_elems=draw(st.integers(1, 10**6)),
        partition_bytes=draw(st.integers(1, 1 << 21)),
    )
    return Members(tuple(hosts), roles.workers, roles.servers, draw(st.booleans()), config, draw(st.booleans()))


def key(number: int, n_elems: int, dtype: str = "float32") -> KeyInfo:
    return KeyInfo(number, number, (n_elems,), np.dtype(dtype))


def check_plan(plan: ShardPlan, n_elems: int, owners: int) -> None:
    """Covers [0, n) exactly, in order, without empty shards, by owners that exist."""
    position = 0
    for owner, begin, end in plan:
        assert begin == position < end
        assert 0 <= owner < owners
        position = end
    assert position == n_elems


@given(sizes, parts)
def test_even_bounds(n, count):
    bounds = even_bounds(n, count)
    lengths = np.diff(bounds).tolist()
    assert (bounds[0], bounds[-1], len(lengths)) == (0, n, count)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1
    assert lengths[-1] >= 0
    check_plan(plan_of_bounds(bounds), n, count)


@given(sizes, parts, st.data())
def test_whole_bounds(n, count, data):
    owner = data.draw(st.integers(0, count - 1))
    plan = plan_of_bounds(whole_bounds(n, count, owner))
    check_plan(plan, n, count)
    assert {shard.owner for shard in plan} == ({owner} if n else set())


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 60))
def test_partitions(begin, n, length):
    found = partitions(begin, begin + n, length)
    assert [at for part in found for at in range(*part)] == list(range(begin, begin + n))
    assert all(0 < end - first <= length for first, end in found)
    assert len(found) == -(-n // length)


@given(members(), st.builds(key, st.integers(0, 10**6), sizes, dtypes), st.booleans(), st.booleans())
def test_each_element_is_one_worker_s(store, info, whole, room):
    """Every rank finds the same, from its own copy of what all know."""
    found = place(store.ring, info, whole=whole, fits=room)
    assert (found.bounds[0], found.bounds[-1], len(found.bounds)) == (0, info.n_elems, len(store.workers) + 1)
    assert list(found.bounds) == sorted(found.bounds)
    assert found.partition_elems == 0
    check_plan(found.shards, info.n_elems, len(store.workers))
    if whole:
        assert len(found.shards) == (info.n_elems > 0)
    assert place(copy_of(store.ring), info, whole=whole, fits=room) == found


@given(members(), st.builds(key, st.integers(0, 10**6), sizes, dtypes), st.sampled_from(CODECS), st.data())
def test_each_element_has_one_owner_or_all_owners_have_all(store, info, codec, data):
    """And every rank finds the same from what worker 0 announces, which is short."""
    info, n_owners = info._replace(codec=codec), len(store.owners)
    n, wire, begin = info.n_elems, wire_of(info), data.draw(st.integers(0, info.n_elems))
    updated = data.draw(st.booleans())
    whole = updated and data.draw(st.booleans())
    held = data.draw(st.lists(st.integers(0, 10**9), min_size=n_owners, max_size=n_owners))
    found = place_at_owners(store, info, wire, whole=whole, updated=updated, load_bytes=held, begin=begin)
    assert (found.path, found.partition_elems > 0) == ("owners", True)
    if found.replicated:
        assert not updated
        assert store.workers_own
        assert found.shards == tuple((owner, begin, n) for owner in range(n_owners))
    else:
        assert [owner for owner, *_ in found.shards] == sorted({owner for owner, *_ in found.shards})
        check_plan([(owner, first - begin, last - begin) for owner, first, last in found.shards], n - begin, n_owners)
        cuts = [first - begin for _, first, _ in found.shards]
        assert all(cut % wire.step == 0 for cut in cuts)
    if whole or (store.workers_own and (n - begin) * info.dtype.itemsize < CUT_BYTES and updated):
        assert len(found.owners) == 1
    assert len(found.announced()) == 3
    assert as_announced(copy_of(store), info, found.announced(), wire) == found


def copy_of(store):
    return Members(*(getattr(store, name) for name in Members.__dataclass_fields__))


ROWS = ((100, 7), (3, 1000), (64, 3, 3, 3), (1, 1 << 20), (2, 1 << 19), (1 << 20, 1))


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("servers", [0, 1, 3])
def test_rows_of_powersgd_are_not_cut_unless_nothing_would_be_saved(shape: tuple[int, ...], servers: int) -> None:
    """As for few long rows, of which one owner would have all in one message."""
    config, workers = Config(bigarray_bound_elems=10, partition_bytes=1 << 11), (0, 1, 2, 3)
    store = Members(tuple("abcdefg"[: 4 + servers]), workers, tuple(range(4, 4 + servers)), config=config)

    def placed(shape: tuple[int, ...]) -> Placement:
        codec = make({"type": "powersgd", "force": True}).for_shape(shape)
        info = KeyInfo("w", 0, shape, np.dtype(np.float32), codec.text)
        found = place_at_owners(store, info, wire_of(info), updated=True)
        assert as_announced(store, info, found.announced(), wire_of(info)) == found
        return found

    found, row = placed(shape), math.prod(shape[1:])
    if min(shape[0], row) > 2:
        assert all(cut % row == 0 for cut in (*found.bounds, found.partition_elems))
    else:
        assert found == placed((math.prod(shape),))
        assert len(found.shards) == (servers or 4)


@given(st.integers(0, 300), st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_bounds_of_hosts(n, hosts):
    """Every host owns as much as the others, and of a host every rank."""
    bounds = host_bounds(n, hosts)
    lengths = np.diff(bounds).tolist()
    assert (bounds[0], bounds[-1], len(lengths)) == (0, n, len(hosts))
    by_host = {host: [n for n, of in zip(lengths, hosts, strict=True) if of == host] for host in hosts}
    assert max(map(sum, by_host.values())) - min(map(sum, by_host.values())) <= 1
    assert all(max(of_host) - min(of_host) <= 1 for of_host in by_host.values())


@given(st.lists(st.tuples(st.integers(0, 5000), dtypes), max_size=60), st.integers(1, 6), st.integers(1, 2000))
def test_servers_are_balanced_by_bytes(keys, servers, bound):
    """No server holds more than the lightest one by more than one whole key and a rounding error per cut one."""
    store = Members(("a",) * servers, (), tuple(range(servers)), config=Config(bigarray_bound_elems=bound))
    held = [0] * servers
    rounding = largest = 0
    for number, (n, dtype) in enumerate(keys):
        info = key(number, n, dtype)
        found = place_at_owners(store, info, wire_of(info), load_bytes=held)
        add_load(held, found, info.dtype.itemsize)
        if len(found.shards) == 1:
            largest = max(largest, info.n_bytes)
        rounding += info.dtype.itemsize
    assert sum(held) == sum(n * np.dtype(dtype).itemsize for n, dtype in keys)
    assert max(held) - min(held) <= largest + rounding
