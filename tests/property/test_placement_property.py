"""Laws of bounds and placements: every element has one owner, and every rank finds the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpikv.collectives.select import ALGORITHMS
from mpikv.config import Config
from mpikv.placement.algorithms import bounds_of, most_owners
from mpikv.placement.keys import KeyInfo, ShardPlan, even_bounds, partitions, plan_of_bounds, whole_bounds
from mpikv.placement.members import Members
from mpikv.placement.on_servers import add_load, as_announced
from mpikv.placement.place import place
from mpikv.server.roles import assign

sizes = st.one_of(st.integers(0, 50), st.integers(0, 2**40))
dtypes = st.sampled_from(["int8", "float16", "float32", "float64"])
parts = st.integers(1, 40)
loads = st.lists(st.integers(0, 10**9), min_size=1, max_size=12)
NAMES = ["auto", *ALGORITHMS, "native"]


@st.composite
def members(draw: st.DrawFn) -> Members:
    hosts = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12))
    roles = assign(hosts, draw(st.integers(0, len(hosts) - 1)) if draw(st.booleans()) else 0)
    config = Config(
        algorithm=draw(st.sampled_from(NAMES)),
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


@given(members(), st.builds(key, st.integers(0, 10**6), sizes, dtypes), st.booleans(), st.booleans(), st.data())
def test_each_element_has_one_owner(store, info, whole, room, data):
    n, n_owners = info.n_elems, len(store.owners)
    held = data.draw(st.lists(st.integers(0, 10**9), min_size=n_owners, max_size=n_owners))
    found = place(store, info, whole=whole, fits=room, load_bytes=held)
    assert (found.bounds[0], found.bounds[-1], len(found.bounds)) == (0, n, len(found.owners) + 1)
    assert list(found.bounds) == sorted(found.bounds)
    check_plan(found.shards, n, n_owners)
    if whole:
        assert len(found.shards) == (n > 0)
    assert (found.algorithm == "") == (found.path == "servers") == (found.partition_elems > 0)


@given(members(), sizes, st.integers(0, 10**6), st.booleans(), st.data())
def test_every_rank_finds_the_same(store, n, number, whole, data):
    """From its own copy of what all know; for servers from what worker 0 announces, which is short."""
    info, n_owners = key(number, n), len(store.owners)
    held = data.draw(st.lists(st.integers(0, 10**9), min_size=n_owners, max_size=n_owners))
    first = place(store, info, whole=whole, load_bytes=held)
    copy = Members(*(getattr(store, name) for name in Members.__dataclass_fields__))
    if first.path == "servers":
        assert len(first.announced()) == 3
        assert as_announced(copy, key(number, n), first.announced()) == first
    else:
        assert place(copy, key(number, n), whole=whole) == first


@given(members(), sizes)
def test_the_path(store, n):
    """What the head of mpikv/placement/place.py says of each."""
    found = place(store, key(0, n), load_bytes=[0] * len(store.owners))
    owned_by_workers = store.synchronous and not store.servers
    automatic = store.config.algorithm == store.config.shared_memory == "auto" and store.memory
    assert found.path == store.path
    assert (found.path == "servers") == (not owned_by_workers)
    several = len(set(store.hosts)) < len(store.hosts)
    assert (found.path in ("direct", "hosted")) == (owned_by_workers and automatic and several)
    if found.path == "direct":
        assert len(set(store.hosts)) == 1
        assert found.algorithm == "naive"
    if found.path == "hosted":
        assert len(set(store.hosts)) > 1
        assert found.algorithm == "hierarchical"
    if owned_by_workers:
        without = place(store, key(0, n), fits=False)
        assert without == found._replace(path="native" if found.path == "native" else "messages")
        assert (found.path == "native") == (found.algorithm == "native")
        if store.config.algorithm != "auto":
            assert found.algorithm == store.config.algorithm
    if found.path == "servers" and store.shares_memory:
        assert several


@given(st.integers(0, 300), st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.sampled_from(NAMES[1:]))
def test_bounds_of_the_algorithms(n, hosts, algorithm):
    """Every rank that may own something owns as much as the others, or every host as much as the other hosts."""
    bounds = bounds_of(algorithm, n, hosts)
    lengths = np.diff(bounds).tolist()
    assert (bounds[0], bounds[-1], len(lengths)) == (0, n, len(hosts))
    owners = most_owners(algorithm, len(hosts))
    assert 1 <= owners <= len(hosts)
    assert not any(lengths[owners:])
    if algorithm == "hierarchical":
        by_host = {host: [n for n, of in zip(lengths, hosts, strict=True) if of == host] for host in hosts}
        assert max(map(sum, by_host.values())) - min(map(sum, by_host.values())) <= 1
        assert all(max(of_host) - min(of_host) <= 1 for of_host in by_host.values())
    else:
        assert max(lengths[:owners]) - min(lengths[:owners]) <= 1


@given(st.lists(st.tuples(st.integers(0, 5000), dtypes), max_size=60), st.integers(1, 6), st.integers(1, 2000))
def test_servers_are_balanced_by_bytes(keys, servers, bound):
    """No server holds more than the lightest one by more than one whole key and a rounding error per cut one."""
    store = Members(("a",) * servers, (), tuple(range(servers)), config=Config(bigarray_bound_elems=bound))
    held = [0] * servers
    rounding = largest = 0
    for number, (n, dtype) in enumerate(keys):
        info = key(number, n, dtype)
        found = place(store, info, load_bytes=held)
        add_load(held, found, info.dtype.itemsize)
        if len(found.shards) == 1:
            largest = max(largest, info.n_bytes)
        rounding += info.dtype.itemsize
    assert sum(held) == sum(n * np.dtype(dtype).itemsize for n, dtype in keys)
    assert max(held) - min(held) <= largest + rounding
