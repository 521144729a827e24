"""What the metrics of a worker and of a server are: the numbers of `store.stats()`, and more of the same kind.

A name has its unit, and `_total` where it only grows, as Prometheus asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from mpikv.kvstore import KVStore
from mpikv.observe.metrics import Metric, MetricsFile
from mpikv.server.core import ServerCore
from mpikv.session.continued import ContinuedSession
from mpikv.session.workers import Workers
from mpikv.transports.base import Transport
from mpikv.transports.memory import LocalTransport

# Of `store.stats()`; what is not here is a counter, and its name says enough.
HELP = {
    "messages_sent": "Messages that this rank has sent through MPI",
    "bytes_sent": "Bytes that this rank has sent through MPI",
    "control_messages_sent": "Messages without values, for agreements and reports",
    "failed_looks": "Looks at what other threads and ranks do that ended by an error",
    "direct_calls": "Calls that all workers of the host made together, through shared memory",
    "declined_calls": "Calls for which that was possible, but workers were in different calls",
    "bytes_copied": "Bytes that this worker has copied into and out of shared memory",
    "bytes_added": "Bytes that this worker has added in shared memory",
    "memory_messages": "Messages between a worker and a server of one host, through shared memory",
    "memory_bytes": "Bytes between a worker and a server of one host, through shared memory",
    "encoded_from_bytes": "Bytes of compressed pushes before they were encoded",
    "encoded_bytes": "Bytes of compressed pushes after they were encoded",
    "held_bytes": "Scratch memory of this worker",
    "shared_bytes": "Memory of values that the host shares",
    "row_bytes": "Memory of rows and their states",
    "device_bytes": "Memory on the GPU",
    "generation": "How often the workers have gone on without some of them",
}
GAUGES = {"held_bytes", "shared_bytes", "row_bytes", "device_bytes"}
WAITS = {"waits", "waited_s"}  # that are written call by call


def _single(name: str, help_: str, value: float, *, counter: bool = False) -> Metric:
    return Metric(name, help_, [({}, value)], counter)


def of_worker(store: KVStore) -> list[Metric]:
    """Return the metrics of a worker. Local; from any thread, RuntimeError where keys are being added."""
    session, stats = store.session, store.stats()
    found = [
        _single(name, HELP.get(name, f"{name} of store.stats()"), value, counter=name not in GAUGES)
        for name, value in stats.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in WAITS
    ]
    found.append(_single("keys", "Keys of the store", len(session.infos)))
    if isinstance(session, (Workers, ContinuedSession)):
        rounds = "Rounds of the key that this worker has pushed most"
        found.append(_single("rounds", rounds, session.rounds, counter=True))
        calls = sorted(session.waits.spent.by_call.items())
        for i, name, help_ in (
            (0, "waits", "Calls that have waited"),
            (1, "wait_seconds", "Seconds that calls have waited"),
        ):
            found.append(Metric(name, help_, [({"call": call}, spent[i]) for call, spent in calls], counter=True))
    keys = stats.get("compressed_keys", {})
    if keys:
        encoded = [({"key": key, "codec": one["codec"]}, int(one["travels"] == "encoded")) for key, one in keys.items()]
        found.append(Metric("codec_encoded", "1 where values travel encoded, 0 where they travel as they are", encoded))
    return found


def of_server(core: ServerCore, transport: Transport, links: LocalTransport | None) -> list[Metric]:
    """Return the metrics of a server. Local; from any thread, RuntimeError where keys are being added."""
    counts = {"messages_sent": transport.ledger.messages, "bytes_sent": transport.ledger.bytes}
    if links is not None:
        counts |= {"memory_messages": links.sent_messages, "memory_bytes": links.sent_bytes}
    held_bytes = core.pool.held_bytes + core.rows.held_bytes
    return [
        _single("shards", "Keys of which this server has a part", core.n_keys),
        _single("server_bytes", "Memory of values, of rows, and of gradients that are being added", held_bytes),
        _single("requests", "Requests of workers that have come", core.requests, counter=True),
        *(_single(name, HELP[name], value, counter=True) for name, value in counts.items()),
    ]


@contextlib.contextmanager
def written(folder: str, name: str, number: int, read: Callable[[], list[Metric]]) -> Iterator[None]:
    """Let a server write its metrics during the block; arguments as `start` has them. number: of the server."""
    if not folder:
        yield
        return
    file = MetricsFile(folder, name or f"mpikv-server-{number}", {"server": str(number)}, read)
    try:
        yield
    finally:
        file.close()


def start(store: KVStore, folder: str, name: str = "") -> KVStore:
    """Let a worker write its metrics until the store is closed. folder: "" for none. name: of the file."""
    if folder:
        session = store.session
        name = name or f"mpikv-worker-{store.rank}"
        session.metrics = MetricsFile(folder, name, {"worker": str(store.rank)}, lambda: of_worker(store))
        session.after_close.append(session.metrics.close)
    return store
