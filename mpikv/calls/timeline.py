"""A timeline of some steps of a store: what this worker does is written to a file, and at its servers likewise."""

from __future__ import annotations

import functools
import json
import os
import socket
import uuid
from collections.abc import Callable
from typing import Any

from mpikv.errors import MpikvError
from mpikv.observe.timeline import TimelineFile, path_of
from mpikv.session.base import Session
from mpikv.session.clocks import PROBES
from mpikv.session.workers import Workers
from mpikv.strategies.base import Strategy

# Calls of a store that are recorded, by their names.
CALLS = (
    *("init", "broadcast", "push", "pull", "pushpull", "push_async", "pull_async", "pushpull_async", "wait_all"),
    *("row_sparse_pull", "set_optimizer", "save_optimizer_states", "load_optimizer_states", "barrier"),
)


class Timeline:
    """What this worker does from now until `end`, the end of a `with` block, or the store's.

    >>> store = kv.create('local')
    >>> with store.timeline('traces') as timeline:
    ...     with store.span('forward'):
    ...         pass
    >>> os.path.exists(timeline.path)
    True
    """

    def __init__(self, store: Any, session: Session, strategy: Strategy, directory: str) -> None:
        if session.recorder.on:
            raise MpikvError("timeline: another timeline of this store is being written; end it first")
        self._store, self._session, self._strategy = store, session, strategy
        store_id = session.activity.store if session.activity is not None else ""
        # In place of a store's own, the same in all of this process.
        of_process = uuid.uuid5(uuid.NAMESPACE_DNS, f"{socket.gethostname()}-{os.getpid()}").hex
        self._about = {"store": store_id or of_process, "type": session.name}
        about = {**self._about, "role": "worker", "number": session.rank, "workers": session.num_workers}
        self.path = path_of(directory, about)
        self._n_servers = 0  # of those that are ranks of their own, and are asked by this worker
        self._file: TimelineFile | None = TimelineFile(self.path, session.recorder, about)
        for name in CALLS:
            setattr(store, name, self._recorded(name, getattr(store, name)))
        session.before_close.append(self._probe)
        session.after_close.append(self.end)
        if isinstance(session, Workers):
            session.clock_probes.begin()
            session.clock_probes.meet()
        try:
            self._at_servers(directory)
            self._probe()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End it, and write what is left. Blocks for the disk. Does nothing the second time."""
        if self._file is None:
            return
        if not self._session.closed:
            self._probe()
            self._at_servers("")
            self._session.before_close.remove(self._probe)
            self._session.after_close.remove(self.end)
        for name in CALLS:
            self._store.__dict__.pop(name, None)
        file, self._file = self._file, None
        file.end()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._session.recorder

        @functools.wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            part = recorder.begin(name)
            try:
                result = call(*args, **kwargs)
            finally:
                part.done("call")
            return result

        return recorded

    # --- servers

    def _at_servers(self, directory: str) -> None:
        """Let servers of their own write theirs, or end them: worker 0 asks them."""
        if self._session.rank == 0 and (directory or self._n_servers):
            request = json.dumps({"directory": directory, "about": self._about}).encode()
            answers = self._strategy.ask_servers(request)
            self._n_servers = len(answers)
            for number, answer in enumerate(answers):
                text = json.loads(answer)["error"]
                if text:
                    raise MpikvError(f"timeline: server {number}: {text}")

    def _probe(self) -> None:
        """Compare clocks: at worker 0 with the servers, at all others with worker 0 in the background."""
        session = self._session
        if isinstance(session, Workers):
            session.clock_probes.again()
        for number in range(self._n_servers):
            for _ in range(PROBES):
                asked_s = session.recorder.now_s()
                (answer,) = self._strategy.ask_servers(b"{}", number)
                session.recorder.add("clock", asked_s, ["server", number, json.loads(answer)["time_ns"]])
