"""What `mpikv top` is told of the stores of this process, and of the servers in it (observe/endpoint.py)."""

from __future__ import annotations

import threading
from typing import Any

from mpikv.kvstore import KVStore
from mpikv.observe import endpoint
from mpikv.placement.members import Members
from mpikv.session.continued import ContinuedSession
from mpikv.session.questions import describe
from mpikv.session.workers import Workers

STORE, SERVER = "store", "server"  # the kinds


class StoreOffer:
    """A worker's side of an open store."""

    def __init__(self, session: Workers | ContinuedSession) -> None:
        self._session, self._closing = session, False
        self._asking = threading.Lock()

    def answer(self, *, whole: bool) -> dict[str, Any]:
        """This worker, and with `whole` a list of all."""
        session = self._session
        with self._asking:
            asks = session.can_ask and not self._closing
            rows = [row._asdict() for row in session.workers()] if whole and asks else None
        worker = session.members.worker_hosts[session.rank], session.pid
        doing = describe({"doing": session.activity.text(), "where": session.activity.where()})
        whose = {"kind": STORE, "store": session.activity.store, "type": session.name, "worker": session.rank}
        sizes = {"workers": session.num_workers, "servers": len(session.members.servers)}
        return {**whose, "doing": doing, **sizes, "host": worker[0], "asks": asks, "rows": rows}

    def closing(self) -> None:
        """The store is about to be closed: let a question end that is under way, and ask the others no more."""
        with self._asking:
            self._closing = True


class ServerOffer:
    """A server, while it serves. number: which of the servers it is."""

    def __init__(self, members: Members, number: int, store_id: str) -> None:
        sizes = {"workers": len(members.workers), "servers": len(members.servers)}
        doing = f"server {number} of {sizes['servers']}, for {sizes['workers']} worker{'s' * (sizes['workers'] != 1)}"
        self._about = {"kind": SERVER, "store": store_id, "doing": doing, **sizes}

    def answer(self, *, whole: bool) -> dict[str, Any]:
        """That it serves."""
        return self._about


def offer(store: KVStore) -> None:
    """Let other processes of this user on this host ask what the store's workers do, until it is closed."""
    assert isinstance(store.session, (Workers, ContinuedSession))
    told = StoreOffer(store.session)
    endpoint.OWN.offer(told)
    store.session.before_close.append(told.closing)
    store.session.after_close.append(lambda: endpoint.OWN.withdraw(told))
