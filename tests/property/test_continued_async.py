"""Random programs of asynchronous stores whose ranks die at random: each push of a survivor is applied once."""

from __future__ import annotations

import tempfile
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pushes_apart import CODEC, ELEMS, OPS, Op, Worker, compare, lossy
from store_modes import Mode

from mpikv import PeerError, RowSparse, optimizers
from mpikv.codecs import create
from mpikv.server.roles import assign
from mpikv.session.workers import Workers
from mpikv.strategies.continued_pushes import BEGUN
from mpikv.strategies.exchange import Client
from mpikv.testing.ranks import RankError
from mpikv.transports import wire
from mpikv.transports.faulty import Deaths, Faults, PeerGone

MODES = (
    *(Mode("dist_async", 2), Mode("dist_async", 3, memory="off"), Mode("dist_async", 4), Mode("dist_async", 5)),
    *(Mode("dist_async", 3, 2, memory=memory) for memory in ("auto", "off", "long")),
    *(Mode("dist_async", 2, 3), Mode("dist_async", 3, 1), Mode("dist_async", 3, 1, memory="off")),
    *(Mode("dist_async", 4, hosts="aabb"), Mode("dist_async", 3, 2, hosts="aabbc")),
)


class Job(NamedTuple):
    """dying: rank, operation, and in how many calls of its transport, or in how many that send."""

    mode: Mode
    program: list[Op]
    dying: list[tuple[int, int, int, bool]]
    progress: str
    looks: int


@st.composite
def jobs(draw: Any) -> Job:
    mode = draw(st.sampled_from(MODES))
    names = draw(st.lists(st.sampled_from(OPS), min_size=2, max_size=10))
    program = [Op(name, draw(st.integers(0, 9))) for name in names]
    ranks = draw(st.permutations(range(mode.workers + mode.servers)))[: min(2, mode.workers - 1)]
    n, at = draw(st.sampled_from([1, 1, 2, 2, 0])), st.integers(0, len(program))
    dying = [(rank, draw(at), draw(st.integers(1, 40)), draw(st.booleans())) for rank in ranks[:n]]
    if len(dying) == 2 and draw(st.booleans()):  # while the others begin anew
        dying[1] = dying[1][0], dying[0][1], draw(st.integers(20, 150)), draw(st.booleans())
    return Job(mode, program, dying, draw(st.sampled_from(["thread", "calls"])), draw(st.sampled_from([2, 10, 50])))


def check(job: Job, deaths: Deaths) -> None:
    """Run a job, and compare all values in the end with what its workers have pushed."""
    mode, program, dying, progress, looks = job
    armed, servers, lock = set[int](), set[int](), threading.Lock()

    def arm(at: int) -> None:
        with lock:
            for rank, op, calls, sends in dying:
                if op == at and rank not in armed:
                    armed.add(rank)
                    deaths.die_in(rank, calls, sends=sends)

    with tempfile.TemporaryDirectory() as folder:

        def body(store: Any) -> Any:
            if not store.generation:
                servers.update(store.session.members.servers)
            worker = Worker(store, folder, mode.workers)
            worker.begin()
            for worker.at, op in enumerate(program):
                arm(worker.at)
                worker.pause(0)
                worker.run(op)
            arm(len(program))
            return worker.end()

        try:
            results = mode.run_continued(body, deaths, lambda rank: Faults(rank, looks * (rank % 3)), progress=progress)
        except RankError as error:  # both owners of a key have died before it had another one
            lost = [isinstance(one, PeerError) and "all of its owners" in str(one) for one in error.errors.values()]
            if len(dying) < 2 or not all(lost):
                raise
            return
    ended = {i: result for i, result in enumerate(results) if result is not None}
    compare(ended, owners_live=bool(servers) and deaths.dead.isdisjoint(servers))


@settings(max_examples=examples(200))
@given(jobs())
def test_each_push_of_a_survivor_is_applied_once(job: Job) -> None:
    check(job, Deaths())


@pytest.mark.parametrize(("late", "dies"), [(1, 0), (1, 3), (3, 0), (3, 1)])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_death_before_a_survivor_knows_that_all_have_begun(
    monkeypatch: pytest.MonkeyPatch, late: int, dies: int, at: int
) -> None:
    """The others have gone on already, and this worker finds in what they have which of its pushes are in it."""
    deaths, agree, begun, first = Deaths(), Workers.agree, threading.Event(), [True]

    def is_late(session: Workers, topic: str, payload: Any, call: str, **more: Any) -> Any:
        found = agree(session, topic, payload, call, **more)
        if topic == BEGUN and first[0]:
            me = (0, 1, 3)[session.rank]
            if me not in (late, dies):
                begun.set()
            if me != late:
                return found
            assert begun.wait(20)
            first[0] = False
            deaths.die_in(dies, 1)
            raise PeerGone
        return found

    monkeypatch.setattr(Workers, "agree", is_late)
    program = [Op("push all", 0), Op("push", 0), Op("pull", 0), Op("push all", 0)]
    check(Job(Mode("dist_async", 4, memory="off"), program, [(2, at, 1, True)], "thread", 2), deaths)
    assert deaths.dead == {dies, 2}


@pytest.mark.parametrize("rows", [False, True])
def test_what_has_been_pulled_does_not_go_back(monkeypatch: pytest.MonkeyPatch, rows: bool) -> None:
    """A worker dies when the first owner has its push, and the second one has not, and another worker has seen it."""
    deaths, seen, pushes, send = Deaths(), threading.Event(), [0], Client.send

    def dies_between(self: Client, server: int, requests: Any) -> None:
        if self.transport.rank == deaths_of and requests[0][0].kind in (wire.PUSH, wire.ROWS_PUSH):
            pushes[0] += 1
            if pushes[0] == 2:
                assert seen.wait(20)
                deaths.die_in(deaths_of, 1)
        send(self, server, requests)

    def body(store: Any) -> list[float]:
        store.set_optimizer(optimizers.SGD(learning_rate=1.0, lazy_update=True))
        store.init("w", RowSparse([0], np.zeros((1, 1)), (3, 1)) if rows else np.zeros(3))
        ones = RowSparse([0, 1, 2], -np.ones((3, 1)), (3, 1)) if rows else -np.ones(3)

        def value() -> list[float]:
            found = store.row_sparse_pull("w", row_ids=[0, 1, 2]).to_dense() if rows else store.pull("w")
            return found.reshape(-1).tolist()  # type: ignore[no-any-return]

        if store.session.number:
            store.push("w", ones)
        while not any(value()):
            time.sleep(0.001)
        seen.set()
        store.barrier()
        return value()

    mode = Mode("dist_async", 2, 2, memory="off")
    monkeypatch.setattr(Client, "send", dies_between)
    deaths_of = assign(["localhost"] * 4, 2, mode.config().server_placement).workers[1]
    assert mode.run_continued(body, deaths, lambda _: Faults()) == [[1.0] * 3, None]


# --- what codecs have lost

ROUNDS, KEYS = 10, ("v", "w")


@settings(max_examples=examples(60))
@given(st.sampled_from(MODES), st.integers(0, 5), st.integers(0, ROUNDS - 1), st.integers(1, 40), st.booleans())
def test_survivors_push_what_their_codecs_have_lost(mode: Mode, victim: int, at: int, calls: int, sends: bool) -> None:
    victim %= mode.workers + mode.servers
    deaths = Deaths()

    def body(store: Any) -> list[Any]:
        me = store.rank
        store.set_gradient_compression({**CODEC, "force": True})
        store.set_optimizer(optimizers.SGD(learning_rate=1.0))
        store.init(KEYS, [np.zeros(ELEMS, np.float32) for _ in KEYS])
        for round_ in range(ROUNDS):
            if round_ == at and me == victim % mode.workers:
                members = store.session.members
                deaths.die_in([*members.workers, *members.servers][victim], calls, sends=sends)
            store.push(KEYS, [lossy(me, round_, key, victim) for key in KEYS])
        store.barrier()
        return [value.tolist() for value in store.pull(KEYS)]

    results = mode.run_continued(body, deaths, Faults)
    codec, decoded, expected = create(CODEC), np.zeros(ELEMS, np.float32), []
    for key in KEYS:
        total = np.zeros(ELEMS, np.float32)
        for worker in range(mode.workers):
            state = codec.init(ELEMS)
            for round_ in range(ROUNDS):
                codec.decode(codec.encode(lossy(worker, round_, key, victim), state), decoded)
                total -= decoded
        expected.append(total.tolist())
    assert all(result is None or result == expected for result in results)
