"""The server's core under every interleaving of several workers' requests."""

from __future__ import annotations

import json

import cloudpickle
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv import optimizers, wire
from mpikv.server.core import ServerCore
from mpikv.server.policy import Asynchronous, Synchronous
from mpikv.testing.reference import ReferenceStore

SIZES = (3, 1, 8)
KEYS = range(len(SIZES))
DTYPES = (np.float32, np.float16, np.int8)


def init_request(key, dtype, value=0, version=0):
    text = {"key": key, "shape": [SIZES[key]], "dtype": str(np.dtype(dtype)), "begin": 0, "version": version}
    payload = wire.with_text(json.dumps(text).encode(), np.full(SIZES[key], value, dtype).tobytes())
    return wire.Header(wire.INIT, key), payload


def optimizer_request(optimizer, tag=0):
    return wire.Header(wire.OPTIMIZER, 0, tag), cloudpickle.dumps((0, optimizer, []))


class Session:
    """A core, and requests that reach it as they would by wire; every reply is kept with the bytes it had at first."""

    def __init__(self, workers, policy):
        self.core = ServerCore([f"worker {i}" for i in range(workers)], policy)
        self.replies = {}

    def send(self, worker, header, payload=None):
        parsed = wire.parse_request(wire.request(header, payload))
        for reply in self.core.handle(worker, *parsed):
            place = (reply.worker, reply.tag)
            assert place not in self.replies, "answered twice"
            self.replies[place] = (reply.data, reply.data.tobytes())

    def check_replies_never_changed(self):
        for data, first_bytes in self.replies.values():
            assert data.tobytes() == first_bytes


def gradient(dtype, key, worker, round_):
    numbers = np.random.default_rng([key, worker, round_])
    if np.dtype(dtype).kind == "i":
        return numbers.integers(-9, 9, SIZES[key]).astype(dtype)
    return (numbers.standard_normal(SIZES[key]) * 10.0 ** numbers.integers(-2, 3)).astype(dtype)


@st.composite
def programs(draw, workers):
    """Each worker pushes each key equally often, in an order of its own, with pulls anywhere."""
    rounds = [draw(st.integers(0, 4)) for _ in KEYS]
    result = []
    for _ in range(workers):
        pushes = [key for key in KEYS for _ in range(rounds[key])]
        mine = []
        for key in draw(st.permutations(pushes)):
            mine.append((draw(st.sampled_from(["push", "push", "pushpull"])), key))
            if draw(st.booleans()):
                mine.append(("pull", draw(st.sampled_from(KEYS))))
        result.append(mine)
    return result


def interleaved(draw, programs):
    """(worker, its next call), each worker's calls in its order."""
    positions = [0] * len(programs)
    while left := [w for w, program in enumerate(programs) if positions[w] < len(program)]:
        worker = draw(st.sampled_from(left)) if len(left) > 1 else left[0]
        yield worker, programs[worker][positions[worker]]
        positions[worker] += 1


KINDS = {"push": wire.PUSH, "pull": wire.PULL, "pushpull": wire.PUSHPULL}


@settings(max_examples=150)
@given(st.integers(1, 4).flatmap(programs), st.sampled_from(DTYPES), st.data())
def test_synchronous(programs, dtype, data):
    """Bits of sums in the order of the workers; a pull sees the version after its worker's last push, no other."""
    workers = len(programs)
    session = Session(workers, Synchronous)
    reference = ReferenceStore(workers)
    for key in KEYS:
        reference.init(key, np.zeros(SIZES[key], dtype))
    # The first value is worker 0's message: before its own requests, anywhere among the others'.
    calls = [[("init", key) for key in KEYS] + programs[0], *programs[1:]]
    pushed = [[0] * len(SIZES) for _ in range(workers)]
    expected = {}
    for tag, (worker, (call, key)) in enumerate(interleaved(data.draw, calls)):
        if call == "init":
            session.send(worker, *init_request(key, dtype))
            continue
        value = None
        if call != "pull":
            pushed[worker][key] += 1
            value = gradient(dtype, key, worker, pushed[worker][key])
            reference.push(worker, key, [value])
        session.send(worker, wire.Header(KINDS[call], key, tag, 0, pushed[worker][key]), value)
        if call != "push":
            expected[worker, tag] = (key, pushed[worker][key])
    assert set(session.replies) == set(expected)
    session.check_replies_never_changed()
    for place, (key, version) in expected.items():
        assert session.replies[place][1] == reference._versions[key][version].tobytes()


@settings(max_examples=100)
@given(st.integers(1, 4).flatmap(programs), st.data())
def test_a_pull_is_not_answered_before_its_version_exists(programs, data):
    workers = len(programs)
    session = Session(workers, Synchronous)
    for key in KEYS:
        session.send(0, *init_request(key, np.float32))
    pushed = np.zeros((workers, len(SIZES)), int)
    waiting = {}
    for tag, (worker, (call, key)) in enumerate(interleaved(data.draw, programs)):
        pushed[worker, key] += call != "pull"
        if call != "pull":
            session.send(
                worker,
                wire.Header(KINDS[call], key, tag, 0, int(pushed[worker, key])),
                np.ones(SIZES[key], np.float32),
            )
        else:
            session.send(worker, wire.Header(wire.PULL, key, tag, 0, int(pushed[worker, key])))
        if call != "push":
            waiting[worker, tag] = (key, pushed[worker, key])
        complete = pushed.min(axis=0)
        assert set(session.replies) == {place for place, (k, version) in waiting.items() if version <= complete[k]}


@settings(max_examples=100)
@given(st.integers(1, 4).flatmap(programs), st.data())
def test_asynchronous(programs, data):
    """With updates that commute: every pull sees all pushes handled before it, and the end is their sum."""
    workers = len(programs)
    session = Session(workers, Asynchronous)
    session.send(0, *optimizer_request(optimizers.create("test"), tag=999))
    total = [np.zeros(size, np.float32) for size in SIZES]
    for key in KEYS:
        session.send(0, *init_request(key, np.float32))
    for tag, (worker, (call, key)) in enumerate(interleaved(data.draw, programs)):
        value = None
        if call != "pull":
            value = np.arange(SIZES[key], dtype=np.float32) + tag + worker
            total[key] += value
        session.send(worker, wire.Header(KINDS[call], key, tag), value)
        if call != "push":
            assert session.replies[worker, tag][1] == total[key].tobytes()
    for key in KEYS:
        session.send(0, wire.Header(wire.PULL, key, 5000 + key))
        assert session.replies[0, 5000 + key][1] == total[key].tobytes()
    session.check_replies_never_changed()


@settings(max_examples=60)
@given(st.integers(2, 4), st.integers(1, 5), st.data())
def test_attributes_of_worker_0_hold_for_the_round(workers, rounds, data):
    """Each worker sends new attributes ahead of its push; whatever the order, round i is made at worker 0's rate i."""
    session = Session(workers, Synchronous)
    session.send(0, *init_request(0, np.float32))
    session.send(0, *optimizer_request(optimizers.create("sgd", learning_rate=1.0), tag=999))
    optimizer = optimizers.create("sgd", learning_rate=1.0)
    programs = [[(step, i) for i in range(1, rounds + 1) for step in ("rate", "push")] for _ in range(workers)]
    for worker, (step, i) in interleaved(data.draw, programs):
        if step == "rate":
            optimizer.learning_rate = 2.0**i if worker == 0 else 1000.0
            text = json.dumps([0, optimizer.attributes()]).encode()
            session.send(worker, wire.Header(wire.ATTRIBUTES, attributes_id=i), text)
        else:
            session.send(worker, wire.Header(wire.PUSH, 0, 0, i, i), np.ones(3, np.float32))
    session.send(0, wire.Header(wire.PULL, 0, 1, 0, rounds))
    value = np.frombuffer(session.replies[0, 1][1], np.float32)
    assert value.tolist() == [-workers * (2.0 ** (rounds + 1) - 2)] * 3


def test_order_requests():
    """FLUSH is answered at once, BYE by the last worker ends the server."""
    session = Session(2, Synchronous)
    session.send(1, wire.Header(wire.FLUSH, 0, 5))
    assert session.replies[1, 5][1][:1] == b"\0"
    session.send(0, wire.Header(wire.BYE))
    assert not session.core.finished
    session.send(1, wire.Header(wire.BYE))
    assert session.core.finished


def test_a_key_that_moves_goes_on_with_its_rounds():
    session = Session(2, Synchronous)
    session.send(1, wire.Header(wire.PUSH, 0, 0, 0, 4), np.ones(3, np.float32))
    session.send(1, wire.Header(wire.PULL, 0, 9, 0, 4))
    session.send(0, *init_request(0, np.float32, value=7, version=3))
    session.send(0, wire.Header(wire.PULL, 0, 8, 0, 3))
    assert set(session.replies) == {(0, 8)}
    assert np.frombuffer(session.replies[0, 8][1], np.float32).tolist() == [7] * 3
    session.send(0, wire.Header(wire.PUSH, 0, 0, 0, 4), np.ones(3, np.float32))
    assert np.frombuffer(session.replies[1, 9][1], np.float32).tolist() == [2] * 3


def test_what_a_server_refuses():
    import pytest

    from mpikv.errors import MpikvError

    session = Session(2, Synchronous)
    session.send(0, *init_request(0, np.float32))
    with pytest.raises(MpikvError, match="worker 1"):
        session.send(1, wire.Header(wire.PUSH, 0, 0, 0, 1), np.ones(2, np.float32))
    with pytest.raises(MpikvError, match="unknown kind 200"):
        session.send(1, wire.Header(200))
