"""The server's core under every interleaving of several workers' requests."""

from __future__ import annotations

import functools
import json
import random
from itertools import pairwise

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv import optimizers
from mpikv.arrays.reductions import REDUCTIONS
from mpikv.errors import MpikvError
from mpikv.server.core import ServerCore
from mpikv.server.events import Refusal, ServerReply
from mpikv.server.policy import Asynchronous, Synchronous
from mpikv.testing.reference import ReferenceStore
from mpikv.transports import wire

SIZES = (3, 1, 8, 7)
KEYS = range(len(SIZES))
DTYPES = (np.float32, np.float16, np.int8)
PART = 3  # elements: one partition, less than one, several with a short last one


def init_request(key, dtype, value=0, version=0, *, whole=False):
    text = {"key": key, "shape": [SIZES[key]], "dtype": str(np.dtype(dtype)), "begin": 0, "version": version}
    text |= {"part": PART, "whole": whole, "codec": "none", "pushers": [], "answers": True}
    payload = wire.with_text(json.dumps(text).encode(), np.full(SIZES[key], value, dtype).tobytes())
    return wire.Header(wire.INIT, key), payload


def optimizer_request(optimizer, tag=0):
    return wire.Header(wire.OPTIMIZER, 0, tag), cloudpickle.dumps((0, optimizer, []))


class Session:
    """A core; requests reach it as they would by wire, partitions that it fetches and replies take their time.

    pick(n): which of n transfers comes next, where the order is free. Without it nothing takes time.
    """

    def __init__(self, workers, policy, pick=None):
        self.core = ServerCore([f"worker {i}" for i in range(workers)], policy)
        self.replies = {}  # (worker, tag) -> the bytes that have been received
        self._pick = pick
        self.refusals = []
        self._payloads = {}  # (worker, payload tag) -> the worker's array, as bytes that have not been fetched
        self._fetches = {}  # (worker, payload tag) -> partitions asked for, in order
        self._leaving = {}  # (worker, reply tag) -> replies in order, with their bytes at the beginning
        self._tags = 0

    def send(self, worker, header, payload=None):
        """A request with its payload behind it."""
        self.send_all(worker, [(header, payload)])

    def send_all(self, worker, requests):
        self._take(self.core.handle(worker, wire.parse_requests(wire.requests(requests))))
        self.settle() if self._pick is None else self.some()

    def offer(self, worker, header, gradient):
        """A request whose payload is to be fetched."""
        self._tags += 1
        self._payloads[worker, self._tags] = gradient.view(np.uint8)
        self.send(worker, header._replace(payload_tag=self._tags))

    def _take(self, events):
        for event in events:
            if isinstance(event, ServerReply):
                entry = (event, event.data.tobytes())
                self._leaving.setdefault((event.worker, event.tag), []).append(entry)
            elif isinstance(event, Refusal):
                self.refusals.append(event)
            else:
                self._fetches.setdefault((event.push.worker, event.push.tag), []).append(event)

    def some(self):
        """Some of what is under way gets there."""
        while self._transfers() and self._pick(3):
            self._move(self._transfers()[self._pick(len(self._transfers()))])

    def settle(self):
        """Everything gets there."""
        while transfers := self._transfers():
            self._move(transfers[self._pick(len(transfers)) if self._pick else 0])

    def _transfers(self):
        return [(queues, place) for queues in (self._fetches, self._leaving) for place in queues if queues[place]]

    def _move(self, transfer):
        queues, place = transfer
        event, *first_bytes = queues[place].pop(0) if queues is self._leaving else (queues[place].pop(0),)
        if queues is self._leaving:
            assert event.data.tobytes() == first_bytes[0], "a reply changed on its way"
            if event.block is not None:
                event.block.release()
            self.replies[place] = self.replies.get(place, b"") + first_bytes[0]
            return
        array = self.core.target(event)
        data, rest = np.split(self._payloads[place], [array.nbytes])
        assert data.size == array.nbytes
        array.view(np.uint8)[:] = data
        self._payloads[place] = rest
        self._take(self.core.arrived(event, array))

    def values(self, worker, tag):
        return np.frombuffer(self.replies[worker, tag], np.float32)

    def all_fetched(self):
        return not any(payload.size for payload in self._payloads.values())


def gradient(dtype, key, worker, round_):
    numbers = np.random.default_rng([key, worker, round_])
    if np.dtype(dtype).kind == "i":
        return numbers.integers(-9, 9, SIZES[key]).astype(dtype)
    return (numbers.standard_normal(SIZES[key]) * 10.0 ** numbers.integers(-2, 3)).astype(dtype)


@st.composite
def programs(draw, workers):
    """Each worker pushes each key equally often, in its own order, with pulls anywhere and some short keys in lists."""
    rounds = [draw(st.integers(0, 4)) for _ in KEYS]
    result = []
    for _ in range(workers):
        pushes = [key for key in KEYS for _ in range(rounds[key])]
        mine = []
        for key in draw(st.permutations(pushes)):
            call = draw(st.sampled_from(["push", "push", "pushpull", "pushpull"]))
            before = mine[-1][1] if mine and mine[-1][0] == "pushpull" else []
            if (
                call == "pushpull"
                and before
                and key not in before
                and max(SIZES[one] for one in (*before, key)) <= PART
            ):
                before.append(key)
            else:
                mine.append((call, [key]))
            if draw(st.booleans()):
                mine.append(("pull", [draw(st.sampled_from(KEYS))]))
        result.append(mine)
    return result


def interleaved(draw, programs):
    """(worker, its next call), each worker's calls in its order."""
    positions = [0] * len(programs)
    while left := [w for w, program in enumerate(programs) if positions[w] < len(program)]:
        worker = draw(st.sampled_from(left)) if len(left) > 1 else left[0]
        yield worker, programs[worker][positions[worker]]
        positions[worker] += 1


def post(session, worker, requests):
    """A push of one partition brings its gradient along, a longer one, which is alone, lets it be fetched."""
    header, value = requests[0]
    if value is not None and value.size > PART:
        session.offer(worker, header, value)
    else:
        session.send_all(worker, requests)


KINDS = {"push": wire.PUSH, "pull": wire.PULL, "pushpull": wire.PUSHPULL}


@settings(max_examples=60)
@given(st.integers(1, 4).flatmap(programs), st.sampled_from(DTYPES), st.booleans(), st.data())
def test_synchronous(programs, dtype, late, data):
    """Bits of sums in the order of the workers; a pull sees the version after its worker's last push, no other.

    It is answered once, a list with all its values, and where nothing takes time as soon as all of them are there.
    """
    workers = len(programs)
    session = Session(workers, Synchronous, (lambda n: data.draw(st.integers(0, n - 1))) if late else None)
    reference = ReferenceStore(workers)
    for key in KEYS:
        reference.init(key, np.zeros(SIZES[key], dtype))
    # The first value is worker 0's message: before its own requests, anywhere among the others'.
    calls = [[("init", [key]) for key in KEYS] + programs[0], *programs[1:]]
    pushed = np.zeros((workers, len(SIZES)), int)
    pushed[0] = -1
    expected = {}
    for tag, (worker, (call, keys)) in enumerate(interleaved(data.draw, calls)):
        requests = []
        for key in keys:
            pushed[worker, key] += call != "pull"
            value = None
            if "push" in call:
                value = gradient(dtype, key, worker, pushed[worker, key])
                reference.push(worker, key, [value])
            if call != "init":
                requests.append((wire.Header(KINDS[call], key, tag, 0, int(pushed[worker, key])), value))
        if call == "init":
            session.send(worker, *init_request(keys[0], dtype))
            continue
        post(session, worker, requests)
        if call != "push":
            expected[worker, tag] = [(key, pushed[worker, key]) for key in keys]
        there = pushed.min(axis=0)
        answered = {place for place, some in expected.items() if all(version <= there[key] for key, version in some)}
        assert late or set(session.replies) == answered
    session.settle()
    assert set(session.replies) == set(expected)
    assert session.all_fetched()
    for place, some in expected.items():
        assert session.replies[place] == b"".join(reference._versions[key][version].tobytes() for key, version in some)


@settings(max_examples=50)
@given(st.integers(1, 3).flatmap(programs), st.booleans(), st.data())
def test_asynchronous(programs, late, data):
    """A pull sees all earlier pushes of its worker, of all workers where nothing takes time; the end is their sum."""
    workers = len(programs)
    session = Session(workers, Asynchronous, (lambda n: data.draw(st.integers(0, n - 1))) if late else None)
    session.send(0, *optimizer_request(optimizers.create("test"), tag=999))
    session.settle()
    for key in KEYS:
        session.send(0, *init_request(key, np.float32))
    # Powers of 8 tell who has been added how often: below 2^24 a float32 holds their sums exactly.
    own = np.zeros((workers, len(SIZES)))
    pulls = {}
    for tag, (worker, (call, keys)) in enumerate(interleaved(data.draw, programs)):
        requests = []
        for key in keys:
            value = None
            if call != "pull":
                own[worker, key] += 8.0**worker
                value = np.full(SIZES[key], 8.0**worker, np.float32)
            requests.append((wire.Header(KINDS[call], key, tag), value))
        post(session, worker, requests)
        if call != "push":
            sizes = [SIZES[key] for key in keys]
            pulls[worker, tag] = np.repeat(own[worker, keys], sizes)
            assert late or (session.values(worker, tag) == np.repeat(own[:, keys].sum(axis=0), sizes)).all()
    session.settle()
    for (worker, tag), mine in pulls.items():
        assert (session.values(worker, tag) // 8.0**worker % 8 == mine / 8.0**worker).all()
    for key in KEYS:
        session.send(0, wire.Header(wire.PULL, key, 5000 + key))
    session.settle()
    for key in KEYS:
        assert (session.values(0, 5000 + key) == own[:, key].sum()).all()


@settings(max_examples=20)
@given(
    st.integers(1, 3), st.lists(st.sampled_from(["sgd", "lamb", "adam"]), min_size=1, max_size=4), st.integers(0, 999)
)
def test_an_optimizer_waits_for_what_was_pushed_before(workers, names, seed):
    """Every worker pushes, flushes, then worker 0 sets another optimizer; the bits are those without any delay.

    Where the optimizer needs keys whole and the last one did not, or the other way round, worker 0 sends their values.
    """

    def run(pick):
        session = Session(workers, Synchronous, pick)
        for key in KEYS:
            session.send(0, *init_request(key, np.float32, value=1))
        tag = 0
        for round_, (last, name) in enumerate(pairwise(["sgd", *names]), 1):
            for worker in range(workers):
                for key in KEYS:
                    header = wire.Header(wire.PUSH, key, 0, 0, round_)
                    post(session, worker, [(header, gradient(np.float32, key, worker, round_))])
                tag += 1
                session.send(worker, wire.Header(wire.FLUSH, 0, tag))
            while len(session.replies) < tag:
                session.some()
            for key in KEYS if "lamb" in (last, name) and last != name else ():
                session.send(0, wire.Header(wire.PULL, key, 4000, 0, round_))
                session.settle()
                value = np.frombuffer(session.replies.pop((0, 4000)), np.float32)
                session.send(0, wire.Header(wire.REMOVE, key))
                session.send(0, *init_request(key, np.float32, value, round_, whole=name == "lamb"))
            tag += 1
            session.send(0, *optimizer_request(optimizers.create(name, learning_rate=0.1), tag))
            session.settle()
        for key in KEYS:
            session.send(0, wire.Header(wire.PULL, key, 5000 + key, 0, len(names)))
        session.settle()
        return [session.replies[0, 5000 + key] for key in KEYS]

    assert run(random.Random(seed).randrange) == run(None)


@settings(max_examples=20)
@given(st.integers(2, 4), st.integers(1, 5), st.data())
def test_each_round_is_made_with_its_attributes(workers, rounds, data):
    """Each worker sends new attributes ahead of its push; whatever the order, round i is made at rate i, with the
    factor that workers agreed on: who has another one has scaled its gradient."""
    session = Session(workers, Synchronous)
    factors = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=workers, max_size=workers))
    session.send(0, *init_request(0, np.float32))
    session.send(0, *optimizer_request(optimizers.create("sgd", learning_rate=1.0), tag=999))
    optimizer = optimizers.create("sgd", learning_rate=1.0)
    programs = [[(step, i) for i in range(1, rounds + 1) for step in ("rate", "push")] for _ in range(workers)]
    for worker, (step, i) in interleaved(data.draw, programs):
        if step == "rate":
            optimizer.learning_rate = 2.0**i
            text = json.dumps([0, optimizer.attributes()]).encode()
            session.send(worker, wire.Header(wire.ATTRIBUTES, attributes_id=i), text)
        else:
            session.send(worker, wire.Header(wire.PUSH, 0, 0, i, i), np.full(3, factors[worker], np.float32))
    session.send(0, wire.Header(wire.PULL, 0, 1, 0, rounds))
    assert session.values(0, 1).tolist() == [-sum(factors) * (2.0 ** (rounds + 1) - 2)] * 3


@settings(max_examples=10)
@given(st.integers(2, 4), st.integers(1, 4), st.booleans(), st.data())
def test_a_round_of_different_attributes_is_refused(workers, last, whole, data):
    """Up to round `last` all is well; there one worker brings another rate. Nothing after it is answered."""
    session = Session(workers, Synchronous)
    session.send(0, *init_request(0, np.float32, whole=whole))
    kind = "lamb" if whole else "sgd"
    session.send(0, *optimizer_request(optimizers.create(kind, learning_rate=1.0), tag=999))
    odd = data.draw(st.integers(0, workers - 1))
    programs = [[(step, i) for i in range(1, last + 2) for step in ("rate", "push")] for _ in range(workers)]
    for worker, (step, i) in interleaved(data.draw, programs):
        optimizer = optimizers.create(kind, learning_rate=3.0 if (worker, i) == (odd, last) else 1.0 / i)
        if step == "rate":
            text = json.dumps([0, optimizer.attributes()]).encode()
            session.send(worker, wire.Header(wire.ATTRIBUTES, attributes_id=i), text)
        else:
            session.send(worker, wire.Header(wire.PUSH, 0, 0, i, i), np.ones(3, np.float32))
    for round_ in range(last + 2):
        session.send(0, wire.Header(wire.PULL, 0, 1 + round_, 0, round_))
    (refusal,) = {event.text for event in session.refusals}
    assert f"round {last}" in refusal
    assert f"worker {odd}: learning_rate=3.0" in refusal
    assert [tag - 1 for _, tag in session.replies if tag < 999] == list(range(last))
    for worker in range(workers):
        session.send(worker, wire.Header(wire.BYE))
    assert session.core.finished


def test_order_requests():
    """FLUSH is answered at once, BYE by the last worker ends the server."""
    session = Session(2, Synchronous)
    session.send(1, wire.Header(wire.FLUSH, 0, 5))
    assert session.replies[1, 5][:1] == b"\0"
    session.send(0, wire.Header(wire.BYE))
    assert not session.core.finished
    session.send(1, wire.Header(wire.BYE))
    assert session.core.finished


def test_what_no_round_needs_is_fetched_at_the_end():
    """A worker that waits until its payloads have left must not wait for ever."""
    session = Session(2, Synchronous)
    session.send(0, *init_request(2, np.float32))
    for round_ in (1, 2):
        session.offer(0, wire.Header(wire.PUSH, 2, 0, 0, round_), np.ones(8, np.float32))
    session.send(0, wire.Header(wire.BYE))
    assert not session.all_fetched()
    session.offer(1, wire.Header(wire.PUSH, 2, 0, 0, 1), np.ones(8, np.float32))
    session.send(1, wire.Header(wire.BYE))
    assert session.all_fetched()
    assert session.core.finished


def test_a_key_that_moves_goes_on_with_its_rounds():
    session = Session(2, Synchronous)
    session.send(1, wire.Header(wire.PUSH, 0, 0, 0, 4), np.ones(3, np.float32))
    session.send(1, wire.Header(wire.PULL, 0, 9, 0, 4))
    session.send(0, *init_request(0, np.float32, value=7, version=3))
    session.send(0, wire.Header(wire.PULL, 0, 8, 0, 3))
    assert set(session.replies) == {(0, 8)}
    assert session.values(0, 8).tolist() == [7] * 3
    session.send(0, wire.Header(wire.PUSH, 0, 0, 0, 4), np.ones(3, np.float32))
    assert session.values(1, 9).tolist() == [2] * 3


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_reductions(op, dtype, workers):
    """Of float16 in float32, in which 2048 + 1 is not 2048."""
    session, found, key = Session(workers, Synchronous), REDUCTIONS[op], 2
    session.send(0, *init_request(key, dtype))
    arrays = [np.float32([worker + 1, 6 - 2 * worker, *[1 if worker else 2048] * 6]) for worker in range(workers)]
    expected = functools.reduce(found.combine, arrays) / (workers if op == "mean" else 1)
    for round_ in (1, 2):
        for worker in reversed(range(workers)):
            header = wire.Header(wire.PUSHPULL, key, 8, 0, round_, op=found.code)
            post(session, worker, [(header, arrays[worker].astype(dtype))])
        assert [session.replies[worker, 8] for worker in range(workers)] == [expected.astype(dtype).tobytes()] * workers
        session.replies.clear()


def test_what_a_server_refuses():
    session = Session(2, Synchronous)
    session.send(0, *init_request(0, np.float32))
    with pytest.raises(MpikvError, match="worker 1"):
        session.send(1, wire.Header(wire.PUSH, 0, 0, 0, 1), np.ones(2, np.float32))
    with pytest.raises(MpikvError, match="unknown kind 200"):
        session.send(1, wire.Header(200))
