"""The server's loop on a transport in slow motion: what waits goes by priority, little is on its way at a time."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from mpikv.engine.running import Running
from mpikv.server import loop
from mpikv.server.core import ServerCore
from mpikv.server.policy import Synchronous
from mpikv.transports import wire
from mpikv.transports.threads import Fabric

PART_ELEMS = 1500  # above what the thread transport copies at once, so that messages wait until they are received
PARTS = 6
N = PART_ELEMS * PARTS
WORKER, SERVER, OTHER = 0, 1, 2


class Slow:
    """Workers on hosts of their own, moved by hand, and a server, which notes what it starts. worker: the first one."""

    def __init__(self, keys: int, part_elems: int = PART_ELEMS, *, other: bool = False) -> None:
        ranks = [WORKER, OTHER] if other else [WORKER]
        fabric = Fabric(3, ("a", "b", "c"))
        self.worker, self.server, self.other = map(fabric.rank, (WORKER, SERVER, OTHER))
        self.started: list[tuple[str, int]] = []
        self.received: dict[int, list[tuple[str, int]]] = {rank: [] for rank in ranks}  # by the sender, as `started`
        self.unfinished: list[object] = []
        self.most = 0
        for call in ("irecv", "isend"):
            self._note(call)
        core = ServerCore([f"worker {rank}" for rank in ranks], Synchronous)
        self.running = Running(loop.serve(self.server, ranks, core), "server")
        for key in range(keys):
            n_elems = part_elems * PARTS
            text = {"key": key, "shape": [n_elems], "dtype": "float32", "begin": 0, "version": 0, "part": part_elems}
            text |= {"whole": False, "codec": "none", "pushers": [], "answers": True}
            payload = wire.with_text(json.dumps(text).encode(), np.full(n_elems, key, np.float32).tobytes())
            self.send(wire.Header(wire.INIT, key), payload)

    def _note(self, call: str) -> None:
        start = getattr(self.server, call)

        def noting(buf, rank, tag):
            request = start(buf, rank, tag)
            if tag != wire.TAG_CONTROL:
                self.unfinished = [*(one for one in self.unfinished if not one.test()), request]
                self.most = max(self.most, len(self.unfinished))
                self.started.append((call, tag))
                if call == "irecv" and tag != wire.TAG_REQUEST:
                    self.received[rank].append((call, tag))
            return request

        setattr(self.server, call, noting)

    def send(self, header: wire.Header, payload=None) -> None:
        self.worker.isend(wire.request(header, payload), SERVER, wire.TAG_REQUEST)
        self.step()

    def questions(self) -> list[dict]:
        """What the server has asked the worker since the last time."""
        found = []
        while (incoming := self.worker.probe(wire.TAG_CONTROL)) is not None:
            data = np.empty(incoming.n_bytes, np.uint8)
            assert incoming.receive(data).test()
            found.append(wire.parse_control(data))
        return found

    def step(self) -> None:
        while self.running.advance():
            pass
        self.running.test()


def order_of(started):
    """(tag, how many in a row)."""
    return [(tag, len([*row])) for tag, row in itertools.groupby(tag for _, tag in started)]


@pytest.fixture
def narrow(monkeypatch):
    """Few bytes are under way at once, too."""
    monkeypatch.setattr(loop, "WINDOW_BYTES", 0)


@pytest.mark.parametrize("priorities", [(0, 5, 9), (0, -5, 3), (0, 10**20, 10**19)])
def test_partitions_are_fetched_by_priority(priorities, narrow):
    slow = Slow(3)
    slow.started.clear()
    tags = (11, 12, 13)
    for key, tag, priority in zip(range(3), tags, priorities, strict=True):
        slow.send(wire.Header(wire.PUSH, key, 0, 0, 1, tag, wire.clamped(priority)))
    # The first push was alone when it came; what of it is on its way stays so.
    first = [(wire.TAG_PAYLOAD + 11, loop.WINDOW)]
    assert order_of(slow.started) == first
    for _ in range(PARTS):
        for tag in tags:
            slow.worker.isend(np.ones(PART_ELEMS, np.float32), SERVER, wire.TAG_PAYLOAD + tag)
        slow.step()
    slow.step()
    later = sorted(zip(priorities, (PARTS - loop.WINDOW, PARTS, PARTS), tags, strict=True), reverse=True)
    expected = [(wire.TAG_PAYLOAD + tag, count) for _, count, tag in later]
    assert order_of(slow.started[loop.WINDOW :]) == expected
    assert slow.most <= loop.WINDOW


def test_all_workers_send_first_what_one_of_them_pushed_first(narrow):
    slow = Slow(2, other=True)
    first, second = wire.TAG_PAYLOAD + 11, wire.TAG_PAYLOAD + 12
    for worker, keys in ((slow.worker, (0, 1)), (slow.other, (1, 0))):
        for key in keys:
            worker.isend(wire.request(wire.Header(wire.PUSH, key, 0, 0, 1, 11 + key)), SERVER, wire.TAG_REQUEST)
            slow.step()
    for tag in (first, second):
        for _ in range(PARTS):
            slow.worker.isend(np.ones(PART_ELEMS, np.float32), SERVER, tag)
            slow.other.isend(np.ones(PART_ELEMS, np.float32), SERVER, tag)
    for _ in range(2 * PARTS):
        slow.step()
    assert order_of(slow.received[WORKER]) == [(first, PARTS), (second, PARTS)]
    # What was under way when it had pushed nothing else stays so.
    assert order_of(slow.received[OTHER]) == [(second, loop.WINDOW), (first, PARTS), (second, PARTS - loop.WINDOW)]


def test_the_server_asks_for_each_short_partition_once_and_in_time(narrow):
    slow = Slow(1)
    slow.send(wire.Header(wire.PUSH, 0, 0, 0, 1, 11))
    asked = {"kind": "fetch", "tag": wire.TAG_PAYLOAD + 11}
    assert slow.questions() == [{**asked, "count": loop.WINDOW}]
    for left in range(PARTS - loop.WINDOW, -loop.WINDOW, -1):
        slow.worker.isend(np.ones(PART_ELEMS, np.float32), SERVER, wire.TAG_PAYLOAD + 11)
        slow.step()
        assert slow.questions() == ([{**asked, "count": 1}] if left > 0 else [])


def test_replies_leave_by_priority(narrow):
    slow = Slow(3)
    slow.started.clear()
    for key, priority in ((0, 0), (1, 1), (2, 2)):
        slow.send(wire.Header(wire.PULL, key, wire.TAG_REPLY + key, 0, 0, 0, priority))
    outs = np.zeros((3, N), np.float32)
    receives = []
    for _ in range(PARTS):
        for key in range(3):
            begin = PART_ELEMS * sum(1 for other, _ in receives if other == key)
            out = outs[key, begin : begin + PART_ELEMS]
            receives.append((key, slow.worker.irecv(out, SERVER, wire.TAG_REPLY + key)))
    for _ in range(3 * PARTS):
        assert all(request.test() or True for _, request in receives)
        slow.step()
    assert all(request.test() for _, request in receives)
    assert (outs == np.arange(3)[:, None]).all()
    tags = [wire.TAG_REPLY + key for key in range(3)]
    assert order_of(slow.started) == [
        (tags[0], loop.WINDOW),
        (tags[2], PARTS),
        (tags[1], PARTS),
        (tags[0], PARTS - loop.WINDOW),
    ]
    assert slow.most <= loop.WINDOW


def test_the_loop_ends_when_the_last_reply_has_left():
    slow = Slow(1)
    slow.send(wire.Header(wire.PULL, 0, wire.TAG_REPLY, 0, 0))
    slow.send(wire.Header(wire.BYE))
    assert not slow.running.done
    out = np.empty(N, np.float32)
    for begin in range(0, N, PART_ELEMS):
        request = slow.worker.irecv(out[begin : begin + PART_ELEMS], SERVER, wire.TAG_REPLY)
        slow.step()
        assert request.test()
        slow.step()
    assert slow.running.done
    assert (out == 0).all()
