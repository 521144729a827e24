"""Random programs whose ranks die at random: all that are left have what the reference store has.

All workers run the same program. Each brings a power of two of its own, so that a sum tells who was in it, and an
update with that sum, too: numbers are such that nothing is rounded. A model plays the program on the reference store
for each set of workers that may have been in a round, and keeps those that explain what the survivors have seen. In
every one of them all survivors are in all rounds, and nobody comes back who was missing in an earlier one.
"""

from __future__ import annotations

import copy
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pushes_apart import CODEC, ELEMS, lossy
from store_modes import ADDING, HYBRID, MESSAGES, ONE_HOST, SERVERS, THREE_HOSTS, TWO_HOSTS, Mode

from mpikv import RowSparse, kv, optimizers
from mpikv.codecs import create
from mpikv.testing.reference import ReferenceStore
from mpikv.transports.faulty import Deaths, Faults

MODES = (
    *(ONE_HOST, Mode("dist_sync", 4), Mode("dist_sync", 5), MESSAGES, TWO_HOSTS, THREE_HOSTS),
    *(Mode("dist_sync", 5, hosts="aabbc"), Mode("dist_sync", 3, 0, "owners", memory="off")),
    *(mode for mode in SERVERS if (mode.workers, mode.servers) in ((2, 1), (3, 2))),
    *(HYBRID[0], HYBRID[2], ADDING[0], ADDING[3]),
)
SIZES = 1, 7, 3000  # elements of a key
PARTS = (
    *(["pushpull"], ["push and pull"], ["async"], ["barrier"], ["init"], ["init in two orders", "pushpull"]),
    *(["optimizer", "pushpull"], ["momentum", "async"], ["push", "momentum", "pull", "pushpull"]),
    *(["push", "rate", "pull"], ["push", "rate", "push", "rate", "pushpull"], ["rate", "async"]),
    *(["save", "pushpull", "load", "pushpull"], ["save", "push", "load", "async"], ["push", "save", "pull", "load"]),
)
RATE = 0.5
Contributors = frozenset[int]


class Op(NamedTuple):
    """An operation of the program, and the keys that it is about."""

    name: str
    keys: tuple[int, ...] = ()


class Dying(NamedTuple):
    """A rank dies in so many calls of its transport, or in so many that send, from when the first worker comes to an
    operation.
    """

    rank: int
    op: int
    calls: int
    sends: bool = False


@st.composite
def programs(draw) -> list[Op]:
    """A few parts, each a series of operations. Keys are numbered; those of an `init` are new."""
    names = ["init"]
    for part in draw(st.lists(st.sampled_from(PARTS), min_size=2, max_size=4)):
        if "momentum" not in names and ("rate" in part or "save" in part):
            names.append("momentum")
        names += part
    ops, n_keys = [], 0
    for name in names:
        keys: tuple[int, ...] = ()
        if name.startswith("init"):
            keys = tuple(range(n_keys, n_keys + 1 + ("two" in name)))
            n_keys += len(keys)
        elif "pu" in name or name == "async":
            keys = tuple(draw(st.lists(st.integers(0, n_keys - 1), min_size=1, max_size=2, unique=True)))
        ops.append(Op(name, keys))
    return ops


class Job(NamedTuple):
    """stop: the worker that asks all to stop, and before which operation. looks: see `Faults.most_looks`."""

    mode: Mode
    program: list[Op]
    dying: list[Dying]
    stop: tuple[int, int]
    progress: str
    looks: int


@st.composite
def jobs(draw) -> Job:
    mode, program = draw(st.sampled_from(MODES)), draw(programs())
    ranks = draw(st.permutations(range(mode.workers + mode.servers)))[: mode.workers - 1]  # one worker is left
    at = draw(st.one_of(st.integers(0, len(program)), st.integers(1, len(program))))  # at the last place is `close`
    calls = st.one_of(
        st.builds(Dying, st.just(0), st.just(at), st.integers(1, 12), st.just(True)),
        st.builds(Dying, st.just(0), st.just(at), st.integers(1, 60)),
    )
    dying = [draw(calls)._replace(rank=rank) for rank in ranks[: draw(st.sampled_from([1, 1, 1, 2, 2, 0]))]]
    stop = draw(st.integers(0, mode.workers - 1)), draw(st.integers(0, 3 * len(program)))  # most ask never
    progress, looks = draw(st.sampled_from(["thread", "thread", "calls"])), draw(st.sampled_from([2, 10, 50]))
    return Job(mode, program, dying, stop, progress, looks)


# --- the program, on a worker


class Worker:
    """seen: of each value that this worker has pulled, the operation, the key, and the value."""

    def __init__(self, store: Any, folder: str) -> None:
        self.store, self.me, self.states = store, store.rank, str(Path(folder) / "states")
        self.optimizer: Any = None
        self.seen: list[tuple[int, int, float]] = []
        self.at = 0

    def value(self, key: int, number: float) -> Any:
        return np.full(SIZES[key % len(SIZES)], number)

    def brought(self, keys: Sequence[int]) -> list[Any]:
        return [self.value(key, 2.0**self.me) for key in keys]

    def see(self, keys: Sequence[int], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            assert (value == value[0]).all(), value
            self.seen.append((self.at, key, float(value[0])))

    def pause(self, what: int) -> None:
        time.sleep(random.Random(f"{self.me} {self.at} {what}").choice([0, 0, 0, 0.001, 0.002]))

    def run(self, op: Op) -> None:
        store, keys = self.store, list(op.keys)
        if op.name.startswith("init"):
            for key in reversed(keys) if self.me % 2 else keys:
                store.init(key, self.value(key, self.me + 0.25))
            self.see(keys, store.pull(keys))
        elif op.name == "pushpull":
            values = self.brought(keys)
            store.pushpull(keys, values)
            self.see(keys, values)
        elif op.name == "push":
            store.push(keys, self.brought(keys))
        elif op.name == "pull":
            self.see(keys, store.pull(keys))
        elif op.name == "push and pull":
            for key in keys:
                store.push(key, self.value(key, 2.0**self.me))
            self.pause(1)
            self.see(keys[::-1], store.pull(keys[::-1]))
        elif op.name == "async":
            rounds = [(key, self.value(key, 0.0)) for key in keys for _ in range(2)]
            requests = [store.pushpull_async(key, self.value(key, 2.0**self.me), out=out) for key, out in rounds]
            self.pause(1)
            for request in requests[::-1]:
                request.wait()
            self.see([key for key, _ in rounds], [out for _, out in rounds])
        elif op.name in ("optimizer", "momentum"):
            self.optimizer = optimizers.SGD(learning_rate=RATE, momentum=0.5 * (op.name == "momentum"))
            store.set_optimizer(self.optimizer)
        elif op.name == "rate":
            self.optimizer.learning_rate *= 0.5
        elif op.name == "barrier":
            store.barrier()
        elif op.name == "save":
            store.save_optimizer_states(self.states)
        elif op.name == "load":
            store.load_optimizer_states(self.states)


# --- what its values may be


class Model:
    """The program on the reference store, with one choice of who was in each round.

    left: the workers that may be in a round that is opened now. of_key: those in the last round of each key.
    """

    def __init__(self, n_workers: int) -> None:
        self.left = frozenset(range(n_workers))
        self.of_key: dict[int, Contributors] = {}
        self.store = ReferenceStore(n_workers, update=self._updated)
        self.kind, self.rate, self._key = "", RATE, 0
        self.steps: dict[int, Any] = {}  # of each key, the last step, where there is momentum
        self.saved: dict[int, Any] = {}
        self.saved_keys: Sequence[int] = ()

    def _updated(self, weight: Any, total: Any) -> Any:
        if not self.kind:
            return total
        step = -self.rate * total
        if self.kind == "momentum":
            step += 0.5 * self.steps.get(self._key, 0.0)
            self.steps[self._key] = step
        return weight + step

    def value(self, key: int) -> float:
        return float(self.store.pull(0, key)[0])

    def initialised(self, key: int, value: float, survivors: Contributors, *, of_any: bool) -> Iterator[Model]:
        """The first value is that of worker 0 of some generation: of the first of those that were left.

        of_any: it may be another one's, as keys are initialised in several orders, and a rank has died before worker 0
        had come to this one.
        """
        first = int(value)
        if value == first + 0.25 and first in self.left and (first <= min(survivors) or of_any):
            model = copy.deepcopy(self)
            model.of_key[key] = frozenset(worker for worker in self.left if worker >= first or of_any)
            model.store.init(key, np.array([value]))
            yield model

    def round(self, key: int, survivors: Contributors) -> Iterator[Model]:
        """A round of a key, for each set of workers that may be in it."""
        may = sorted((self.left & self.of_key[key]) - survivors)
        for n in range(len(may) + 1):
            for some in combinations(may, n):
                model = copy.deepcopy(self)
                model._round(key, survivors | set(some))
                yield model

    def _round(self, key: int, workers: Contributors) -> None:
        self.of_key[key], self._key, self.store.num_workers = workers, key, len(workers)
        for i, worker in enumerate(sorted(workers)):  # the first ones have been in all rounds before
            self.store.push(i, key, [np.array([2.0**worker])])

    def sees(self, key: int) -> None:
        """A worker has the value of a key: rounds that are opened from now on are of this generation or later ones."""
        self.left &= self.of_key[key]


def explained(
    program: Sequence[Op],
    n_workers: int,
    survivors: Contributors,
    seen: Sequence[tuple[int, int, float]],
    *,
    loses: bool,
) -> None:
    """Raise AssertionError where there is no model of which survivors can have seen this. loses: whether ranks die."""
    models, found = [Model(n_workers)], iter(seen)

    def filtered(key: int, candidates: Iterator[Model], at: int) -> list[Model]:
        where = next(found)
        assert where[:2] == (at, key)
        kept = [model for model in candidates if model.value(key) == where[2]]
        assert kept, f"operation {at}, {program[at]}: nobody's rounds give {where[2]} to key {key}"
        return kept

    for at, op in enumerate(program):
        rounds = () if op.name == "pull" or not (op.name.startswith("pu") or op.name == "async") else op.keys
        if op.name.startswith("init"):
            first = [value for i, _, value in seen if i == at]
            for key, value in zip(op.keys, first, strict=True):
                model_after = (
                    model.initialised(key, value, survivors, of_any=loses and "two" in op.name) for model in models
                )
                models = [after for some in model_after for after in some]
                assert models, f"operation {at}, {op}: {value} is the first value of key {key}"
        sees = [key for key in op.keys for _ in range(1 + (op.name == "async"))]
        if op.name in ("push", "push and pull"):
            for key in rounds:
                models = [after for model in models for after in model.round(key, survivors)]
        if op.name == "push":
            continue
        for key in sees[::-1] if op.name == "push and pull" else sees:
            again = op.name in ("pushpull", "async")
            candidates = (after for model in models for after in (model.round(key, survivors) if again else [model]))
            models = filtered(key, candidates, at)
        for model in models:
            for key in sees:
                model.sees(key)
            if op.name in ("optimizer", "momentum"):
                model.kind, model.rate, model.steps = op.name, RATE, {}
            elif op.name == "rate":
                model.rate *= 0.5
            elif op.name == "save":
                model.saved, model.saved_keys = dict(model.steps), [*model.of_key]
            elif op.name == "load":
                for key in model.saved_keys:
                    model.steps.pop(key, None)
                model.steps |= model.saved
    assert next(found, None) is None


@settings(max_examples=examples(240))
@given(jobs())
def test_survivors_have_what_the_reference_store_has(job: Job) -> None:
    mode, program, dying, stop, progress, looks = job
    deaths, armed, lock = Deaths(), set[Dying](), threading.Lock()

    def arm(at: int) -> None:
        with lock:
            for one in dying:
                if one.op == at and one not in armed:
                    armed.add(one)
                    deaths.die_in(one.rank, one.calls, sends=one.sends)

    with tempfile.TemporaryDirectory() as folder:

        def body(store: Any) -> tuple[int, list[tuple[int, int, float]]]:
            worker, n = Worker(store, folder), 0
            for worker.at, op in enumerate(program):
                arm(worker.at)
                worker.pause(0)
                if (worker.me, worker.at) == stop:
                    store.request_stop()
                if store.stop_requested:
                    break
                worker.run(op)
                n += 1
            arm(len(program))
            return n, worker.seen

        def faults(rank: int) -> Faults:
            return Faults(rank, looks * (rank % 3))

        results = mode.run_continued(body, deaths, faults, progress=progress)
    survivors = frozenset(i for i, result in enumerate(results) if result is not None)
    n, seen = results[min(survivors)]
    assert all(results[i] == (n, seen) for i in survivors)
    explained(program[:n], mode.workers, survivors, seen, loses=bool(dying))


# --- what codecs have lost

CODED = (
    *(Mode("dist_sync", 3, 0, "owners", memory="off"), Mode("dist_sync", 3, 1), Mode("dist_sync", 4, 2, memory="off")),
    *(Mode("dist_sync", 4, hosts="aabb"), Mode("dist_sync", 3, hosts="abc"), Mode("dist_sync", 3)),
)
ROUNDS, KEYS = 10, ("v", "w")


@settings(max_examples=examples(90))
@given(st.sampled_from(CODED), st.integers(0, 5), st.integers(0, ROUNDS - 1), st.integers(1, 40), st.booleans())
def test_survivors_send_what_their_codecs_have_lost(mode: Mode, victim: int, at: int, calls: int, sends: bool) -> None:
    """Each sum is that of what the codecs of those that are left make of all that these have pushed. at: the round in
    which a worker dies, or a server.
    """
    victim %= mode.workers + mode.servers
    deaths = Deaths()

    def body(store: Any) -> list[Any]:
        me, found = store.rank, []
        store.set_gradient_compression({**CODEC, "force": True})
        store.init(KEYS, [np.zeros(ELEMS, np.float32) for _ in KEYS])
        for round_ in range(ROUNDS):
            if round_ == at and me == victim % mode.workers:
                members = store.session.members
                deaths.die_in([*members.workers, *members.servers][victim], calls, sends=sends)
            outs = [np.zeros(ELEMS, np.float32) for _ in KEYS]
            values = [lossy(me, round_, key, victim) for key in KEYS]
            for request in map(store.pushpull_async, KEYS, values, outs):
                request.wait()
            found.append(outs)
        return found

    results = mode.run_continued(body, deaths, Faults)
    codec, decoded = create(CODEC), np.zeros(ELEMS, np.float32)
    states = {(worker, key): codec.init(ELEMS) for worker in range(mode.workers) for key in KEYS}
    for round_ in range(ROUNDS):
        for i, key in enumerate(KEYS):
            total = np.zeros(ELEMS, np.float32)
            for worker in range(mode.workers):
                codec.decode(codec.encode(lossy(worker, round_, key, victim), states[worker, key]), decoded)
                total += decoded
            assert all(result is None or (result[round_][i] == total).all() for result in results)


# --- rows

TABLES = {"r": (7, 2), "s": (5,)}
OPS = ("push", "push", "pull", "push and pull", "pull", "rate", "save", "load", "changed", "barrier", "init")


def pushed_rows(worker: int, op: int, key: str, victim: int) -> RowSparse:
    """Those of the victim are zero, and others bring them, too: so it does not matter which rounds it was in."""
    n, *rest = TABLES[key[0]]
    ids = {op % n, (op + 3) % n} | (set() if worker == victim else {(op + worker) % n})
    return RowSparse([*ids], np.full((len(ids), *rest), 2.0**worker * (worker != victim)), TABLES[key[0]])


def rows_program(store: Any, ops: Sequence[str], push: Any, folder: str, begins: Any) -> list[Any]:
    """push(store, op, key): makes one of the pushes. begins(op): called before each operation."""
    keys, seen, optimizer = list[str](), [], optimizers.SGD(learning_rate=0.5, momentum=0.5, lazy_update=True)
    store.set_optimizer(optimizer)

    def init() -> None:
        new = [f"{key}{len(keys)}" for key in TABLES]
        for key in new[:: -1 if store.rank % 2 else 1]:
            store.init(key, RowSparse([1, 2], np.ones((2, *TABLES[key[0]][1:])), TABLES[key[0]]))
        keys.extend(new)

    init()
    for op, name in enumerate(ops):
        begins(op)
        if "push" in name:
            for key in keys[:: -1 if store.rank % 2 else 1]:
                push(store, op, key)
        if "pull" in name:
            seen.append([store.row_sparse_pull(key, row_ids=[0, 2, 4]).to_dense().tolist() for key in keys])
        if name == "changed":
            for key in keys:
                pending, finish = store.strategy.rows.changed(store.session.infos[key], 0)
                for one in pending:
                    store.session.wait(one)
                finish()
        elif name == "rate":
            optimizer.learning_rate *= 0.5
        elif name == "barrier":
            store.barrier()
        elif name == "save" or (name == "load" and "save" in ops[:op]):
            getattr(store, f"{name}_optimizer_states")(f"{folder}/states")
        elif name == "init":
            init()
    wholes = [np.zeros(TABLES[key[0]]) for key in keys]
    store.pull(keys, wholes, ignore_sparse=False)
    return [*seen, [whole.tolist() for whole in wholes]]


@settings(max_examples=examples(120))
@given(
    st.sampled_from((*CODED, ONE_HOST, *HYBRID[:1])),
    st.lists(st.sampled_from(OPS), min_size=2, max_size=9),
    st.builds(Dying, st.integers(0, 5), st.integers(0, 8), st.integers(1, 60), st.booleans()),
)
def test_survivors_have_the_rows_of_a_store_of_one_process(mode: Mode, ops: list[str], dying: Dying) -> None:
    victim, at = dying.rank % (mode.workers + mode.servers), dying.op % len(ops)
    deaths = Deaths()
    with tempfile.TemporaryDirectory() as folder:

        def body(store: Any) -> list[Any]:
            me, members = store.rank, store.session.members

            def begins(op: int) -> None:
                if op == at and me == victim % mode.workers:
                    deaths.die_in([*members.workers, *members.servers][victim], dying.calls, sends=dying.sends)

            def push(store: Any, op: int, key: str) -> None:
                store.push(key, pushed_rows(me, op, key, victim))

            return rows_program(store, ops, push, folder, begins)

        results = mode.run_continued(body, deaths, Faults)

    def push_all(store: Any, op: int, key: str) -> None:
        store.push(key, [pushed_rows(worker, op, key, victim) for worker in range(mode.workers)])

    with kv.create("local") as store, tempfile.TemporaryDirectory() as folder:
        expected = rows_program(store, ops, push_all, folder, lambda _op: None)
    assert all(result in (None, expected) for result in results)
