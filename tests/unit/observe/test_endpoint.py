"""The socket on which a process is asked what it does."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from store_modes import Mode

from mpikv.create.offered import StoreOffer
from mpikv.observe import endpoint
from mpikv.observe.endpoint import HERE, OWN, WORKERS, ask, endpoints, name_of

PID, UID = os.getpid(), os.geteuid()
LIMIT_S = 60.0


class Offer:
    def __init__(self, *, broken: bool = False) -> None:
        self._broken = broken

    def answer(self, *, whole: bool) -> dict[str, Any]:
        if self._broken:
            raise RuntimeError("in an answer")
        return {"kind": "test", "doing": "", "whole": whole}


@pytest.fixture
def offered() -> Iterator[None]:
    with OWN.offered(Offer()):
        yield


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "mpikv-endpoint"]


def test_it_is_there_while_something_is_offered() -> None:
    one, other = Offer(), Offer(broken=True)
    for offer in (one, other):
        OWN.offer(offer)
    assert endpoints()[PID] == UID
    answer = ask(PID, UID, WORKERS, LIMIT_S)
    assert (answer["pid"], answer["host"]) == (PID, socket.gethostname())
    assert answer["offers"] == [
        {"kind": "test", "doing": "", "whole": True},
        {"kind": "error", "doing": "RuntimeError: in an answer"},
    ]
    OWN.withdraw(other)
    assert ask(PID, UID, HERE, LIMIT_S)["offers"] == [{"kind": "test", "doing": "", "whole": False}]
    OWN.withdraw(one)
    assert PID not in endpoints()
    assert threads() == []
    with pytest.raises(ConnectionRefusedError):
        ask(PID, UID, HERE, LIMIT_S)
    OWN.withdraw(one)  # does nothing


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("sent", [None, b"", b"\n", b"workers of all lands\n", b"\xff" * 1000, b"here"])
def test_clients_do_no_harm(sent: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: it sends nothing and stays, until its time is over."""
    monkeypatch.setattr(endpoint, "QUESTION_S", 0.1 if sent is None else LIMIT_S)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(name_of(PID, UID))
        if sent is not None:
            client.sendall(sent)
            client.close()  # without a look at what is answered
        else:
            client.settimeout(LIMIT_S)
            assert client.recv(1) == b""
            monkeypatch.setattr(endpoint, "QUESTION_S", LIMIT_S)
        assert ask(PID, UID, HERE, LIMIT_S)["pid"] == PID


@pytest.mark.usefixtures("offered")
def test_other_users_are_told_nothing_and_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_user_of", lambda connection: UID + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        ask(PID, UID, HERE, LIMIT_S)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(LIMIT_S)
        client.connect(name_of(PID, UID))
        with contextlib.suppress(ConnectionError):  # where it was closed before the question, or with that unread
            client.sendall(b"here\n")
            assert client.recv(1) == b""


@pytest.mark.usefixtures("offered")
def test_too_many_open_files_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[bool] = []
    accept = socket.socket.accept

    def accept_later(self: socket.socket) -> Any:
        if not failed:
            failed.append(True)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    monkeypatch.setattr(endpoint, "AGAIN_S", 0.0)
    monkeypatch.setattr(socket.socket, "accept", accept_later)
    assert ask(PID, UID, HERE, LIMIT_S)["pid"] == PID  # by the call of `accept` that was under way before
    assert ask(PID, UID, HERE, LIMIT_S)["pid"] == PID
    assert failed


def test_a_name_that_somebody_else_has() -> None:
    """Then there is no answer; and a name of another user for this process is none."""
    with socket.socket(socket.AF_UNIX) as foreign, OWN.offered(Offer()):
        foreign.bind(name_of(PID, UID + 1))
        assert endpoints()[PID] == UID
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(name_of(PID, UID))
        with OWN.offered(Offer()):
            assert threads() == []


@pytest.mark.usefixtures("offered")
def test_a_forked_child_has_none() -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if OWN._socket is None and not OWN._offers else 1
        finally:
            os._exit(status)  # an error must not have the child go on with the tests
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(PID, UID, HERE, LIMIT_S)["pid"] == PID


@pytest.mark.parametrize("progress", ["thread", "calls"])
def test_a_store_tells_of_all_its_workers(progress: str) -> None:
    """While they wait for each other; with `calls`, and once it is being closed, of its own alone."""
    said: dict[str, Any] = {}

    def offers() -> list[Any]:
        return sorted(ask(PID, UID, WORKERS, LIMIT_S)["offers"], key=lambda one: one["kind"])

    def body(store: Any) -> None:
        store.init("w", np.zeros(3, np.float32))
        store.pull("w")  # the server serves
        if store.rank == 1:
            offer = StoreOffer(store.session)
            with OWN.offered(offer):
                server, said["open"] = offers()
                offer.closing()
                _, said["closing"] = offers()
            assert server["doing"] == "server 0 of 1, for 3 workers"
        store.barrier()

    Mode("dist_sync", 3, servers=1).run(body, progress=progress)
    found = said["open"]
    whose = {"kind": "store", "store": "", "type": "dist_sync", "worker": 1, "workers": 3, "servers": 1}
    assert {**whose, "host": "localhost"}.items() <= found.items()
    assert "; at test_endpoint.py:" in found["doing"]
    rows = [(row["rank"], row["alive"]) for row in found["rows"] or ()]
    assert rows == ([(0, True), (1, True), (2, True)] if progress == "thread" else [])
    assert said["closing"]["rows"] is None
