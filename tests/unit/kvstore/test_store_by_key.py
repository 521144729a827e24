"""Bytes by key, leg and link: equal to what each path's formula says, and link by link to what was sent.

Totals are over all workers, from `create` to after `close`, when nothing is on its way any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from on_workers import on
from store_modes import FEW_ASYNC, FEW_ON_DEVICE, Mode

from mpikv import kv, optimizers
from mpikv.arrays.row_sparse import RowSparse
from mpikv.calls.keyless import CollectiveCalls
from mpikv.codecs.compression import make
from mpikv.transports.threads import Fabric

each = pytest.mark.parametrize
F32 = np.float32
ROUNDS = 3
HEADER, IDS, LINE = 48, 16, 8  # of a request, of the ids of rows, of a message in a bundle


class Case(NamedTuple):
    """A store and its keys, by their elements. legs: bytes of all workers, by key and leg.

    crossing: of the links, those that its keys' bytes take. config: of the store.
    """

    mode: Mode
    keys: dict[str, int]
    legs: dict[str, dict[str, int]]
    links: set[str]
    config: dict[str, Any] | None = None
    compression: Any = None


def among(workers: int, n: int, extra: int = 0, init: int | None = None) -> dict[str, int]:
    """Of a key of n float32: every algorithm sends each chunk W-1 times in each leg, in all.

    extra: what is sent besides in each leg, in all rounds.
    """
    once = (workers - 1) * 4 * n
    return {
        "init": once if init is None else init,
        "reduce_scatter": ROUNDS * once + extra,
        "allgather": ROUNDS * once + extra,
    }


def served(workers: int, n: int, shards: int = 1, padding: int = 0) -> dict[str, int]:
    """Of a key on servers. padding: of the key's requests among several."""
    return {"push": workers * ROUNDS * (4 * n + shards * HEADER + padding), "pull": workers * ROUNDS * 4 * n}


FP16 = make({"type": "fp16", "pull": "fp16", "force": True})
BOTH = {"a -> b", "b -> a"}
HERE = {"within localhost"}
CASES = {
    "ring": Case(Mode("dist_sync", 3, 0, "ring", "off"), {"w": 300}, {"w": among(3, 300)}, HERE),
    "halving_doubling": Case(
        Mode("dist_sync", 4, 0, "halving_doubling", "off"), {"w": 400}, {"w": among(4, 400)}, HERE
    ),
    "hierarchical": Case(
        Mode("dist_sync", 4, 0, "hierarchical", "off", hosts="aabb"),
        {"w": 400},
        {"w": among(4, 400)},
        BOTH | {"within a", "within b"},
        {"bucket_bytes": 0},
    ),
    "memory in a host": Case(  # of a host's workers each leads a ring over half of the value
        Mode("dist_sync", 4, hosts="aabb"),
        {"w": 40_000},
        {"w": among(2, 40_000, init=160_000)},
        BOTH,
        {"bucket_bytes": 0},
    ),
    "bundles": Case(  # in every leg one message to the other worker; the first value is one message
        Mode("dist_sync", 2, hosts="ab", memory="off"),
        {"v": 10, "w": 30},
        {key: among(2, n, 2 * ROUNDS * LINE, init=4 * n + LINE) for key, n in (("v", 10), ("w", 30))},
        BOTH,
    ),
    "compressed": Case(
        Mode("dist_sync", 2, hosts="ab", memory="off"),
        {"w": 1000},
        {"w": {"reduce_scatter": ROUNDS * 2000, "allgather": ROUNDS * 2000, "init": 4000}},
        BOTH,
        {"bucket_bytes": 0, "algorithm": "ring"},
        FP16,
    ),
    "servers": Case(  # two keys in a message, then one in pieces
        Mode("dist_sync", 2, 1, memory="off", hosts="aab", part_bytes=1 << 16),
        {"u": 3, "v": 5, "w": 40_000},
        {"u": served(2, 3, padding=4), "v": served(2, 5), "w": served(2, 40_000)},
        BOTH,
        {"server_placement": "last", "servers_take": "all"},
    ),
    "servers here": Case(
        Mode("dist_sync", 2, 2, part_bytes=1 << 16),
        {"v": 6, "w": 80_000},
        {"v": served(2, 6), "w": served(2, 80_000, shards=2)},
        {"memory"},
    ),
    "compressed on servers": Case(
        Mode("dist_sync", 2, 1, memory="off", hosts="aab"),
        {"w": 1000},
        {"w": {"push": 2 * ROUNDS * (2000 + HEADER), "pull": 2 * ROUNDS * 2000}},
        BOTH,
        {"server_placement": "last", "servers_take": "all"},
        FP16,
    ),
    "divided": Case(
        Mode("dist_sync", 2, 1, memory="off", hosts="abc", take="0.25"),
        {"w": 1000},
        {"w": {leg: n for leg, n in (among(2, 750) | served(2, 250)).items() if leg != "init"}},
        {f"{one} -> {other}" for one in "abc" for other in "abc" if one != other},
        {"bucket_bytes": 0, "algorithm": "ring"},
    ),
    "a server in each worker": Case(
        Mode("dist_async", 2, 0, memory="off", hosts="ab"),
        {"v": 8, "w": 80_000},
        {"v": served(2, 8, shards=2), "w": served(2, 80_000, shards=2)},
        BOTH | {"within a", "within b"},
    ),
}


def ran(case: Case) -> tuple[Fabric, list[Any]]:
    """The ledgers of all workers after rounds of all keys, and what their messages went over."""
    mode = case.mode
    fabric = Fabric(mode.workers + mode.servers, list(mode.hosts) or None)

    def body(store: Any) -> Any:
        if not mode.synchronous:
            store.set_optimizer(optimizers.create("test"))
        store.init([*case.keys], [np.zeros(n, F32) for n in case.keys.values()])
        store.barrier()
        for _ in range(ROUNDS):
            store.pushpull([*case.keys], [np.ones(n, F32) for n in case.keys.values()])
        return store

    stores = mode.run(body, fabric=fabric, compression=case.compression, **(case.config or {}))
    return fabric, [store.stats(by_key=True) for store in stores]


def totals(found: Sequence[Any]) -> dict[Any, dict[str, Counter[str]]]:
    """Of all workers."""
    legs: dict[Any, dict[str, Counter[str]]] = {}
    for stats in found:
        for key, of_key in stats["by_key"].items():
            for leg, links in of_key.items():
                legs.setdefault(key, {}).setdefault(leg, Counter()).update(links)
    return legs


def by_link(fabric: Fabric) -> Counter[str]:
    """What has been sent between hosts and within them."""
    found: Counter[str] = Counter()
    for (source, dest), n_bytes in fabric.bytes_between.items():
        one, other = fabric.hosts[source], fabric.hosts[dest]
        found[f"within {one}" if one == other else f"{one} -> {other}"] += n_bytes
    return found


def check_sums(fabric: Fabric, found: Sequence[Any]) -> None:
    """Each byte that was sent is in one ledger, and where no servers answer in that of its sender."""
    links: Counter[str] = Counter()
    for legs in totals(found).values():
        for of_leg in legs.values():
            links.update(of_leg)
    in_memory = links.pop("memory", 0)
    assert links == by_link(fabric)
    if fabric.size == len(found):  # servers that are ranks of their own do not say what they have sent
        assert in_memory == sum(stats.get("memory_bytes", 0) for stats in found)
    for stats in found:
        counted = sum(n for legs in stats["by_key"].values() for links in legs.values() for n in links.values())
        if not any("pull" in legs for legs in stats["by_key"].values()):
            assert counted == stats["bytes_sent"]


@each("name", [*CASES])
def test_every_byte_is_of_a_key_and_a_leg(name: str) -> None:
    case = CASES[name]
    fabric, found = ran(case)
    check_sums(fabric, found)
    legs = totals(found)
    for key, expected in case.legs.items():
        counted = {leg: sum(links.values()) for leg, links in legs[key].items()}
        assert {leg: counted[leg] for leg in expected} == expected
        assert set(counted) == {"init", *expected}
        rounds = [links for leg, links in legs[key].items() if leg != "init"]
        assert set().union(*rounds) == case.links
    assert set(legs) == {*case.keys, None}
    assert ("bundles" in legs[None]) == (name == "bundles")


@on(*FEW_ON_DEVICE, *FEW_ASYNC, Mode("dist_async", 2, memory="off", device="host"))
def test_nothing_is_counted_twice_or_not_at_all(mode: Mode) -> None:
    """Keys on GPUs, too, some of whose values no message carries."""
    check_sums(*ran(Case(mode, {"v": 5, "w": 40_000}, {}, set())))


@on(Mode("dist_sync", 2, memory="off", hosts="ab"), Mode("dist_sync", 2, 2, memory="off", hosts="aabb"))
def test_rows(mode: Mode) -> None:
    fabric = Fabric(mode.workers + mode.servers, list(mode.hosts))

    def body(store: Any) -> Any:
        store.init("rows", RowSparse.zeros((1000, 4)))
        for _ in range(ROUNDS):
            ids = np.array([3, 500 + store.rank])  # a row of each owner
            store.push("rows", RowSparse(ids, np.ones((2, 4), F32), (1000, 4)))
            store.row_sparse_pull("rows", row_ids=ids)
        return store

    found = [store.stats(by_key=True) for store in mode.run(body, fabric=fabric, server_placement="last")]
    check_sums(fabric, found)
    legs = totals(found)["rows"]
    asked = HEADER + IDS + 16  # one id of 4 bytes, padded
    times = mode.workers * 2 * ROUNDS
    assert {leg: sum(links.values()) for leg, links in legs.items() if leg != "init"} == {
        "push": times * (asked + 16),
        "pull": times * (asked + 16),
    }


def test_keys_of_a_bucket_share_its_bytes() -> None:
    """By their lengths; no byte gets lost where that leaves a rest."""
    fabric = Fabric(2, "ab")
    keys = {"u": 3, "v": 5, "w": 92}

    def body(store: Any) -> Any:
        store.init([*keys], [np.zeros(n, F32) for n in keys.values()])
        assert store.strategy.bucket([*keys])
        for _ in range(ROUNDS):
            store.pushpull([*keys], [np.ones(n, F32) for n in keys.values()])
        return store

    mode = Mode("dist_sync", 2, hosts="ab", memory="off")
    found = [store.stats(by_key=True) for store in mode.run(body, fabric=fabric, bucket_bytes=0)]
    check_sums(fabric, found)
    inits = {key: sum(legs["init"].values()) for key, legs in totals(found).items() if key is not None}
    assert inits == {key: 4 * n for key, n in keys.items()}
    for stats in found:
        sent = {key: legs["reduce_scatter"] for key, legs in stats["by_key"].items() if key is not None}
        whole = ROUNDS * 200
        shares = [whole * end // 100 for end in (0, 3, 8, 100)]
        (link,) = sent["u"]
        assert sent == {key: {link: b - a} for key, (a, b) in zip(keys, pairwise(shares), strict=True)}


@on(Mode("dist_sync", 2, memory="off"), Mode("dist_sync", 2, 1, memory="off"))
def test_what_belongs_to_no_key(mode: Mode, tmp_path: Any) -> None:
    fabric = Fabric(mode.workers + mode.servers)

    def body(store: Any) -> Any:
        CollectiveCalls(store).allreduce([np.ones(5, F32)])
        store.set_optimizer(optimizers.create("sgd", momentum=0.9))
        store.init("w", np.zeros(4, F32))
        store.pushpull("w", np.ones(4, F32))
        store.save_optimizer_states(tmp_path / "states")
        return store

    found = [store.stats(by_key=True) for store in mode.run(body, fabric=fabric)]
    check_sums(fabric, found)
    assert set(totals(found)[None]) == {"control", "calls", "states"}


def test_asking() -> None:
    with kv.create("local") as store:
        before = store.stats()
        assert store.stats(by_key=True) == before | {"by_key": {}}
        assert "by_key" not in store.stats(by_key=False)
        for wrong in (1, None, "yes"):
            with pytest.raises(TypeError, match="by_key is True or False"):
                store.stats(by_key=wrong)
