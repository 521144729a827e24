"""Programs of asynchronous stores that tell which of their pushes were applied, for tests of deaths.

Each push has an element of its own, or a row, in which it leaves the learning rate that it was made under. So a value
says of every push whether it was applied, how often, and with which rate. And all count in one key, whose optimizer has
a state: so its value tells whether all states were there for all updates.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpikv import RowSparse, kv, optimizers

OPS = (
    "push",
    "push",
    "push all",
    "pushpull",
    "async",
    "pull",
    "barrier",
    "init",
    "rate",
    "save",
    "rows",
    "count",
    "count",
)
OPS += ("optimizer",)
PUSHES = 60  # of a worker and key, at most
LONG = 3000
CODEC: dict[str, Any] = {"type": "2bit", "threshold": 1.0}
ELEMS = 50


class Op(NamedTuple):
    name: str
    key: int


class Worker:
    """expected: of each key, by the element or row of each of this worker's pushes, the rate that it was made under."""

    def __init__(self, store: Any, folder: str, n_workers: int) -> None:
        self.store, self.me, self.n_workers, self.n = store, store.session.number, n_workers, n_workers * PUSHES
        self.folder = Path(folder)
        self.optimizer = optimizers.SGD(learning_rate=1.0, lazy_update=True)
        self.expected: dict[str, dict[int, float]] = {}
        self.seen: dict[str, set[int]] = {}
        self.at = self.counted = 0

    def begin(self) -> None:
        self.store.set_optimizer(self.optimizer)
        self.store.init("count", np.zeros(1))
        self.store.strategy.set_optimizer(optimizers.AdaGrad(learning_rate=1.0), ["count"])
        self.init()

    def init(self) -> None:
        i = len(self.expected) // 2
        new = [f"d{i}", f"r{i}"]
        for key in new[:: -1 if self.me % 2 else 1]:
            first = RowSparse([0], np.zeros((1, 2)), (self.n, 2)) if key[0] == "r" else np.zeros(self.long(i))
            self.store.init(key, first)
        self.expected |= {key: {} for key in new}

    def long(self, i: int) -> int:
        return LONG if i % 2 else self.n

    def brought(self, key: str) -> Any:
        """A push of a key."""
        at = self.me * PUSHES + len(self.expected[key])
        self.expected[key][at] = self.optimizer.learning_rate
        if key[0] == "r":
            return RowSparse([at], np.full((1, 2), -1.0), (self.n, 2))
        value = np.zeros(self.long(int(key[1:])))
        value[at] = -1.0
        return value

    def check(self, key: str, value: Any) -> None:
        """A pull has all of this worker's pushes."""
        value = value[:, 0] if key[0] == "r" else value
        mine = self.expected[key]
        assert [value[at] for at in mine] == [*mine.values()], f"worker {self.me}, operation {self.at}, key {key}"

    def pause(self, what: int) -> None:
        time.sleep(random.Random(f"{self.me} {self.at} {what}").choice([0, 0, 0, 0.001, 0.002]))

    def pull(self, key: str) -> Any:
        value = (
            self.store.row_sparse_pull(key, row_ids=np.arange(self.n)).to_dense()
            if key[0] == "r"
            else self.store.pull(key)
        )
        self.check(key, value)
        pushes = value[:, 0] if key[0] == "r" else value
        self.seen.setdefault(key, set()).update(np.flatnonzero(pushes).tolist())
        return value

    def run(self, op: Op) -> None:
        store, n = self.store, len(self.expected) // 2
        dense, rows = f"d{op.key % n}", f"r{op.key % n}"
        if op.name == "push":
            store.push(dense, self.brought(dense))
        elif op.name == "push all":
            keys = [f"d{i}" for i in range(n)]
            store.push(keys, [self.brought(key) for key in keys])
        elif op.name == "pushpull":
            value = self.brought(dense)
            store.pushpull(dense, value)
            self.check(dense, value)
        elif op.name == "async":
            outs = [np.zeros(self.long(op.key % n)) for _ in range(2)]
            requests = [store.pushpull_async(dense, self.brought(dense), out=out) for out in outs]
            self.pause(1)
            for request in requests[::-1]:
                request.wait()
            self.check(dense, outs[1])
        elif op.name == "rows":
            store.push(rows, self.brought(rows))
            self.pause(1)
            self.pull(rows)
        elif op.name == "pull":
            for key in (rows, dense):
                self.pull(key)
        elif op.name == "rate":
            self.optimizer.learning_rate *= 0.5
        elif op.name == "optimizer":
            self.optimizer = optimizers.SGD(learning_rate=1.0, lazy_update=True)
            store.set_optimizer(self.optimizer)
        elif op.name == "save":
            store.save_optimizer_states(self.folder / "states")
        elif op.name == "barrier":
            store.barrier()
        elif op.name == "count":
            self.counted += 1
            store.push("count", np.ones(1))
        else:
            self.init()

    def end(self) -> Ended:
        """What this worker has pushed, and all values when all have pushed all."""
        self.store.barrier()
        count = float(self.store.pull("count")[0])
        values = {key: self.pull(key) for key in self.expected}
        return Ended(self.n_workers, self.expected, values, self.counted, count, self.seen)


class Ended(NamedTuple):
    """What a worker has pushed, and what it has seen when all had pushed all. seen: pushes of all, at any time."""

    n_workers: int
    expected: dict[str, dict[int, float]]
    values: dict[str, Any]
    counted: int
    count: float
    seen: dict[str, set[int]]


def compare(ended: Mapping[int, Ended], *, owners_live: bool = False) -> None:
    """Raise AssertionError where survivors, by their numbers at the start, have not what they should have: the pushes
    of survivors once, and of each of the dead, who do the same, those until some time.

    owners_live: no owner has died, so that nothing that was seen is gone.
    """
    first, *others = ended.values()
    dead = set(range(first.n_workers)) - ended.keys()
    for key, value in first.values.items():
        assert all((value == other.values[key]).all() for other in others), f"key {key}: survivors have other values"
        pushed = value[:, 0] if key[0] == "r" else value
        for i, one in ended.items():
            mine = np.zeros(PUSHES)
            mine[: len(one.expected[key])] = [*one.expected[key].values()]
            assert (pushed[i * PUSHES : (i + 1) * PUSHES] == mine).all(), f"key {key}: pushes of worker {i}"
        if owners_live:
            assert all(one.seen[key] <= {*np.flatnonzero(pushed).tolist()} for one in ended.values()), f"key {key}"
        rates = [*first.expected[key].values()]
        for i in dead:
            found = pushed[i * PUSHES : i * PUSHES + len(rates)]
            n = np.count_nonzero(found)
            assert found.tolist() == [*rates[:n], *[0.0] * (len(rates) - n)], f"key {key}: pushes of the dead {i}"
    with kv.create("local") as store:
        store.set_optimizer(optimizers.AdaGrad(learning_rate=1.0))
        store.init("count", np.zeros(1))
        counts = [0.0]
        for _ in range(first.n_workers * first.counted):
            store.push("count", np.ones(1))
            counts.append(float(store.pull("count")[0]))
    assert first.count in counts[len(ended) * first.counted :], f"{first.count} is no count of {first.counted} each"
    assert all(other.count == first.count for other in others)


def lossy(worker: int, round_: int, key: str, victim: int) -> Any:
    """ELEMS elements that CODEC sends none of whole. The victim brings zeros, so that it does not matter which of its
    pushes were made.
    """
    step = 7 * np.arange(ELEMS) + 3 * worker + 5 * round_ + ord(key)
    return (step % 11 - 5).astype(np.float32) * (worker != victim) / 8
