"""Requests that any rank may send to any other at any time, answered by the other's progress engine.

There are two kinds: requests to the rank that keeps the rendezvous store (rendezvous.py), and `status`, by which a rank
that waits for long asks the others how far they are. A request is one message: a line of JSON with the request's
number, from which the tag of the answer follows, then the values. An answer has the same form. Answers that no call
waits for any more are recognised by their number and dropped. Two messages have no answer: that a rank leaves, and that
a call of a group has failed on it.

Cost: two messages per request; one probe per step of the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Operation, Predicate, Steps
from mpikv.groups.rendezvous import RendezvousStore
from mpikv.transports.base import Arrival, Transport

SERVICE_TAG = 0
REPLY_TAGS = range(2, 1024)  # 1 is that of control messages (session/messages.py)
STORE_RANK = 0  # the rank that keeps the rendezvous store
LEAVE, FAILED = "leave", "failed"

Status = Callable[[dict[str, Any]], dict[str, Any] | None]


def _packed(header: dict[str, Any], values: Sequence[bytes]) -> HostArray:
    line = json.dumps({**header, "lengths": [len(value) for value in values]}).encode() + b"\n"
    return np.frombuffer(line + b"".join(values), np.uint8)


def _unpacked(message: HostArray) -> tuple[dict[str, Any], list[bytes]]:
    line, _, rest = message.tobytes().partition(b"\n")
    header, values, at = json.loads(line), [], 0
    for length in header["lengths"]:
        values.append(rest[at : at + length])
        at += length
    return header, values


class Service:
    """One rank's side. status: called to answer `status` requests.

    failed: called when another rank reports that a call has failed there, with rank, group, call and text.
    """

    def __init__(self, transport: Transport, status: Status, failed: Callable[[int, int, int, str], None]) -> None:
        self._transport, self._status, self._failed = transport, status, failed
        self.store = RendezvousStore()
        self._number = 0
        self._sends: list[Operation] = []
        # At STORE_RANK: the ranks that have left, each with how many calls of each group it has made.
        self.left: dict[int, dict[int, int]] = {}

    # --- answering

    def serve(self) -> Steps[None]:
        """Answer requests, for ever. To be run as a service of the engine."""
        while True:
            arrival = Arrival(self._transport, SERVICE_TAG)
            yield arrival
            message: HostArray = np.empty(arrival.incoming.n_bytes, np.uint8)
            yield arrival.incoming.receive(message)
            self._handle(arrival.incoming.source, *_unpacked(message))

    def _handle(self, source: int, header: dict[str, Any], values: list[bytes]) -> None:
        verb, number = header["verb"], header["number"]

        def reply(answer: list[bytes], **more: str) -> None:
            self._send({"number": number, **more}, answer, source, REPLY_TAGS[number % len(REPLY_TAGS)])

        if verb == "status":
            reply([json.dumps(self._status(header["about"])).encode()])
        elif verb == LEAVE:
            self.left[source] = dict(header["calls"])
        elif verb == FAILED:
            self._failed(source, header["group"], header["call"], header["text"])
        else:
            try:
                self.store.handle(verb, header["keys"], values, reply)
            except ValueError as error:  # a mistake of the rank that asks, which raises it there
                reply([], error=str(error))

    def _send(self, header: dict[str, Any], values: Sequence[bytes], rank: int, tag: int) -> None:
        self._sends = [send for send in self._sends if not send.test()]
        self._sends.append(self._transport.isend(_packed(header, values), rank, tag))

    def report_failure(self, ranks: Sequence[int], group: int, call: int, text: str) -> None:
        """Report to these ranks that a call of a group has failed here. Local; the caller holds the engine's lock."""
        for rank in ranks:
            header = {"verb": FAILED, "number": 0, "group": group, "call": call, "text": text}
            self._send(header, (), rank, SERVICE_TAG)

    # --- asking

    def ask(self, verb: str, keys: Sequence[str] = (), values: Sequence[bytes] = ()) -> Steps[list[bytes]]:
        """Send a request to the rendezvous store, and return its answer."""
        if self._transport.rank != STORE_RANK:
            return (yield from self._request(STORE_RANK, {"verb": verb, "keys": list(keys)}, values))
        answers: list[list[bytes]] = []
        self.store.handle(verb, keys, values, answers.append)
        if not answers:
            yield Predicate(lambda: bool(answers))
        return answers[0]

    def ask_status(self, rank: int, about: dict[str, Any], limit_s: float) -> Steps[dict[str, Any] | None]:
        """Return the status of `rank` (`CallWatch.status`); None if it has not answered within `limit_s`."""
        answer = yield from self._request(rank, {"verb": "status", "about": about}, (), limit_s)
        return json.loads(answer[0]) if answer else None

    def leave(self, calls: dict[int, int]) -> Steps[None]:
        """Report to STORE_RANK that this rank leaves. calls: how many calls of each group it has made."""
        if self._transport.rank == STORE_RANK:
            self.left[STORE_RANK] = calls
        else:
            header = {"verb": LEAVE, "number": 0, "calls": list(calls.items())}
            yield self._transport.isend(_packed(header, ()), STORE_RANK, SERVICE_TAG)

    def _request(
        self, rank: int, header: dict[str, Any], values: Sequence[bytes], limit_s: float | None = None
    ) -> Steps[list[bytes]]:
        self._number = number = self._number + 1
        request = self._transport.isend(_packed({**header, "number": number}, values), rank, SERVICE_TAG)
        now_s = self._transport.clock.now_s
        deadline_s = None if limit_s is None else now_s() + limit_s
        while True:
            arrival = Arrival(self._transport, REPLY_TAGS[number % len(REPLY_TAGS)])
            yield Predicate(lambda: arrival.test() or (deadline_s is not None and now_s() > deadline_s))  # noqa: B023
            if arrival.incoming is None:
                return []
            message: HostArray = np.empty(arrival.incoming.n_bytes, np.uint8)
            yield arrival.incoming.receive(message)
            answer, found = _unpacked(message)
            if answer["number"] == number:
                yield request
                if "error" in answer:
                    raise ValueError(answer["error"])
                return found
