"""Bytes by key: equal to what each path's formula says, and in all to what was sent.

Totals are over all workers, from `create` to after `close`, when nothing is on its way any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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

F32 = np.float32
ROUNDS = 3
HEADER, IDS = 48, 16  # of a request, of the ids of rows
FP16 = make({"type": "fp16", "pull": "fp16", "force": True})


class Case(NamedTuple):
    """A store, its keys by their elements, and the bytes that all workers send of each in the rounds."""

    mode: Mode
    keys: dict[str, int]
    sent: dict[str, int]
    config: dict[str, Any]
    compression: Any = None


def among(workers: int, n: int, extra: int = 0) -> int:
    """Of a key of n float32: every algorithm sends each chunk W-1 times there and W-1 times back, in all."""
    return 2 * ROUNDS * ((workers - 1) * 4 * n + extra)


def served(workers: int, n: int, shards: int = 1, padding: int = 0, width: int = 4) -> int:
    """Of a key on servers. padding: of the key's requests among several. width: bytes of an element."""
    return workers * ROUNDS * (2 * width * n + shards * HEADER + padding)


def sync(workers: int, hosts: str = "", servers: int = 0, **more: Any) -> Mode:
    return Mode("dist_sync", workers, servers, hosts=hosts, **more)


LAST = {"server_placement": "last", "servers_take": "all"}
CASES = {
    "ring": Case(sync(3, algorithm="ring", memory="off"), {"w": 300}, {"w": among(3, 300)}, {}),
    # Of a host's workers each leads a ring over half of the value.
    "memory in a host": Case(sync(4, "aabb"), {"w": 40_000}, {"w": among(2, 40_000)}, {}),
    # Each worker has half of it, which it sends to nobody.
    "compressed": Case(sync(2, "ab"), {"w": 1000}, {"w": served(2, 500, width=2)}, {}, FP16),
    "servers": Case(  # two keys in a message, then one in pieces
        sync(2, "aab", 1, memory="off", part_bytes=1 << 16),
        {"u": 3, "v": 5, "w": 40_000},
        {"u": served(2, 3, padding=4), "v": served(2, 5), "w": served(2, 40_000)},
        LAST,
    ),
    "servers here": Case(
        sync(2, servers=2, part_bytes=1 << 16),
        {"v": 6, "w": 80_000},
        {"v": served(2, 6), "w": served(2, 80_000, shards=2)},
        {},
    ),
    "compressed on servers": Case(  # in one piece and in several
        sync(2, "aab", 1, memory="off", part_bytes=1 << 16),
        {"v": 1000, "w": 80_000},
        {"v": served(2, 1000, width=2), "w": served(2, 80_000, width=2)},
        LAST,
        FP16,
    ),
    "divided": Case(
        sync(2, "abc", 1, memory="off", take="0.25"), {"w": 1000}, {"w": among(2, 750) + served(2, 250)}, {}
    ),
    "a server in each worker": Case(
        Mode("dist_async", 2, 0, memory="off", hosts="ab"),
        {"v": 8, "w": 80_000},
        {"v": served(2, 4), "w": served(2, 40_000)},  # of the shard of the other one
        {},
    ),
}


def counts(store: Any) -> Counter[Any]:
    return Counter(store.stats(by_key=True)["by_key"])


def sent_in_rounds(mode: Mode, init: Callable[[Any], object], step: Callable[[Any], object], **more: Any) -> Counter:
    """Bytes by key of all workers without those of `init`; each byte that was sent is in one worker's ledger."""
    fabric = Fabric(mode.workers + mode.servers, list(mode.hosts) or None)

    def body(store: Any) -> tuple[Any, Counter[Any]]:
        if not mode.synchronous:
            store.set_optimizer(optimizers.create("test"))
        init(store)
        store.barrier()
        before = counts(store)
        for _ in range(ROUNDS):
            step(store)
        return store, before

    found = mode.run(body, fabric=fabric, **more)
    in_all = sum(counts(store).total() for store, _ in found)
    in_memory = sum(store.stats().get("memory_bytes", 0) for store, _ in found)
    if not (mode.servers and in_memory):  # servers that are ranks of their own do not say what they have sent there
        assert in_all == sum(fabric.bytes_between.values()) + in_memory
    return sum((counts(store) - before for store, before in found), Counter())


@pytest.mark.parametrize("name", [*CASES])
def test_every_byte_is_of_a_key(name: str) -> None:
    case = CASES[name]

    def init(store: Any) -> None:
        store.init([*case.keys], [np.zeros(n, F32) for n in case.keys.values()])

    def step(store: Any) -> None:
        store.pushpull([*case.keys], [np.ones(n, F32) for n in case.keys.values()])

    found = sent_in_rounds(case.mode, init, step, compression=case.compression, **case.config)
    del found[None]
    assert found == case.sent


APART = sync(2, "ab", memory="off"), sync(2, "aabb", 2, memory="off")


@on(*FEW_ON_DEVICE, *FEW_ASYNC, *APART)
def test_nothing_is_counted_twice_or_not_at_all(mode: Mode, tmp_path: Any) -> None:
    """Keys on GPUs, some of whose values no message carries, rows, and what belongs to no key: sums and states."""

    def init(store: Any) -> None:
        if mode.synchronous:
            CollectiveCalls(store).allreduce([np.ones(5, F32)])
        store.init(["v", "w", "rows"], [np.zeros(5, F32), np.zeros(40_000, F32), RowSparse.zeros((1000, 4))])
        store.set_optimizer(optimizers.create("sgd", momentum=0.9))
        store.pushpull("v", np.ones(5, F32))
        store.save_optimizer_states(tmp_path / "states")

    def step(store: Any) -> None:
        store.pushpull(["v", "w"], [np.ones(5, F32), np.ones(40_000, F32)])
        ids = np.array([3, 500 + store.rank])  # a row of each owner
        store.push("rows", RowSparse(ids, np.ones((2, 4), F32), (1000, 4)))
        store.row_sparse_pull("rows", row_ids=ids)

    found = sent_in_rounds(mode, init, step, server_placement="last")
    if mode in APART:  # without servers to the other worker; an id is padded to 16, a row
        assert found["rows"] == mode.workers * (mode.servers or 1) * ROUNDS * 2 * (HEADER + IDS + 16 + 16)


def test_asking() -> None:
    with kv.create("local") as store:
        before = store.stats()
        assert store.stats(by_key=True) == before | {"by_key": {}}
        assert "by_key" not in store.stats(by_key=False)
        for wrong in (1, None, "yes"):
            with pytest.raises(TypeError, match="by_key is True or False"):
                store.stats(by_key=wrong)
