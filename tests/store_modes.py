"""The modes that the tests of the store run through, on thread ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import codecs_of_tests
import ml_dtypes
import numpy as np
import pytest
from device_store import DeviceStore
from fake_cupy import Machine
from fake_gpus import DeviceFabric, gpus_of, one_gpu, spaces_of

from mpikv.codecs.compression import KeyCompression, make
from mpikv.config import Config
from mpikv.create import spec
from mpikv.create.assembly import local_store
from mpikv.hostmemory import rings
from mpikv.placement import cut, members, owners
from mpikv.testing.continued import spawn_continued
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores
from mpikv.transports import memory as through_memory
from mpikv.transports.faulty import Deaths, Faults, FaultyFabric
from mpikv.transports.threads import Fabric

DTYPES = tuple(
    np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)
)
BOUND = 8  # elements from which on a key is cut over all servers


@contextlib.contextmanager
def long_messages() -> Iterator[None]:
    """Let each message through memory be a long one, by reference or announced and cut, in rings that are soon full."""
    with (
        mock.patch.multiple(through_memory, REFERENCE_BYTES=8, LONGEST_BYTES=24, LEAST_SLOT_BYTES=64),
        mock.patch.multiple(rings, RING_BYTES=1024),
    ):
        yield


class Mode(NamedTuple):
    """A store: its name, its workers and servers, the algorithm without servers, and how it gets to servers.

    memory: `auto`, `off` (only messages), or `long` (as `auto`, with `long_messages`). device: the path of keys in
    device memory, where the test's arrays are on fake GPUs; "" for arrays of NumPy. codec: of codecs_of_tests, by which
    all values travel, also within a host. hosts: of each rank, one letter each; "": all on one. part_bytes: of the
    partitions in which long values go to servers. take: the servers' share of each key; they are the last ranks then.
    """

    name: str
    workers: int
    servers: int = 0
    algorithm: str = "auto"
    memory: str = "auto"
    device: str = ""
    codec: str = ""
    hosts: str = ""
    part_bytes: int = 1 << 20
    take: str = ""

    @property
    def synchronous(self) -> bool:
        return "async" not in self.name

    @property
    def _hosts(self) -> list[str] | None:
        """The first worker's host has the name that it has where there is one host."""
        return ["localhost" if letter == "a" else letter for letter in self.hosts] or None

    def config(self, **changes: Any) -> Config:
        memory = "off" if self.memory == "off" else "auto"
        divided = {"servers_take": self.take, "server_placement": "last"} if self.take else {}
        fields = {
            "algorithm": self.algorithm,
            "shared_memory": memory,
            "bigarray_bound_elems": BOUND,
            "partition_bytes": self.part_bytes,
            "timeout_s": TEST_TIMEOUT_S,
            "device_path": self.device or "auto",
            **divided,
            **changes,
        }
        return Config(**fields)

    def run(
        self,
        body: Callable[[Any], Any],
        *,
        late: bool = False,
        fabric: Fabric | None = None,
        compression: KeyCompression | None = None,
        **changes: Any,
    ) -> list[Any]:
        """`body(store)` on every worker; the results in worker order.

        late: what comes to one worker is later than what comes to another, and messages overtake each other.
        """
        if not self.name.startswith("dist"):
            return [self._run_alone(body)]
        size = self.workers + self.servers
        gpus = gpus_of(Machine(), size) if self.device else None

        def on_worker(store: Any) -> Any:
            return body(store if gpus is None else DeviceStore(store, gpus[store.session.transport.rank].cupy))

        if late:
            faults = (Faults(seed=rank, most_looks=30 * rank) for rank in range(size))
            fabric = FaultyFabric(size, list(faults).__getitem__, self._hosts)
        if self.device == "mpi" and gpus is not None:
            fabric = DeviceFabric(Fabric(size) if fabric is None else fabric)
        if self.codec:
            compression = make({"type": self.codec, "force": True})
        with self._small():
            return spawn_stores(
                self.name,
                self.workers,
                on_worker,
                num_servers=self.servers,
                config=self.config(**changes),
                hosts=self._hosts,
                fabric=fabric,
                gpus=gpus,
                compression=compression,
            )

    @contextlib.contextmanager
    def _small(self) -> Iterator[None]:
        """Let small keys go the ways of large ones."""
        with (
            long_messages() if self.memory == "long" else contextlib.nullcontext(),
            mock.patch.object(members, "ADDED_BYTES", 1),
            mock.patch.dict(cut.SHORT_BYTES, ring=16, hosted=16),  # between hosts keys go both ways
            mock.patch.object(owners, "CUT_BYTES", 32),
        ):
            yield

    def run_continued(
        self, body: Callable[[Any], Any], deaths: Deaths, faults: Callable[[int], Faults], **changes: Any
    ) -> list[Any]:
        """`body(store)` on every worker, of which some may die; the results as of `spawn_continued`."""
        with self._small():
            return spawn_continued(
                self.name,
                self.workers,
                body,
                num_servers=self.servers,
                config=self.config(**changes),
                hosts=self._hosts,
                deaths=deaths,
                faults=faults,
            )

    def _run_alone(self, body: Callable[[Any], Any]) -> Any:
        from mpikv import kv

        if not self.device:
            with kv.create(self.name) as store:
                return body(store)
        cupy, gpu = one_gpu()
        with local_store(self.name, spec.parse(self.name), spaces=spaces_of(gpu)) as store:
            return body(DeviceStore(store, cupy))


def mode_id(mode: Mode) -> str:
    found = f"{mode.name}-{mode.workers}w{mode.servers}s-{mode.algorithm}-{mode.memory}"
    parts = "" if mode.part_bytes == 1 << 20 else str(mode.part_bytes)
    kind = "" if type(mode) is Mode else type(mode).__name__
    return "-".join([found, *filter(None, (mode.device, kind, mode.codec, mode.hosts, parts, mode.take))])


def modes(*several: Mode) -> pytest.MarkDecorator:
    """The test is given each of these as its `mode`."""
    return pytest.mark.parametrize("mode", several, ids=mode_id)


def every_way(*modes: Mode) -> tuple[Mode, ...]:
    """Modes with servers, through memory, by messages, and with long messages."""
    return tuple(mode._replace(memory=memory) for memory in ("auto", "off", "long") for mode in modes)


LOCAL = (Mode("local", 1), Mode("device", 1))
ALGORITHMS = ("auto", "ring", "owners")
ALLREDUCE = (Mode("dist_sync", 1), *(Mode("dist_sync", w, 0, a) for w in (2, 3, 5) for a in ALGORITHMS))
SERVERS = every_way(*(Mode("dist_sync", w, s) for w, s in ((1, 1), (2, 1), (3, 2), (4, 3))))
# Keys are divided between workers, who have memory for it or not, and servers, on hosts of their own or not; in the
# modes ADDING workers of a host add before one of them asks the servers.
HYBRID = (
    Mode("dist_sync", 3, 2, take="0.4"),
    Mode("dist_sync", 3, 1, memory="off", take="0.7"),
    Mode("dist_sync", 3, 2, hosts="abcde", take="0.3"),
    Mode("dist_sync", 4, 2, hosts="aabbcc", take="0.6"),
    Mode("dist_sync", 3, 1, hosts="aaab", take="0.5"),
    Mode("dist_sync", 3, 2, hosts="aabcc", take="0.6"),
    Mode("dist_sync", 3, 2, hosts="aabcd", take="1"),
    Mode("dist_sync", 3, 1, hosts="aaab", take="auto"),
)
ADDING = HYBRID[5], HYBRID[6], HYBRID[7], HYBRID[3]
ASYNC = every_way(*(Mode("dist_async", w, s) for w, s in ((1, 0), (2, 0), (3, 1), (3, 3))))
SYNC = LOCAL + ALLREDUCE + SERVERS + HYBRID
# Of training, whose workers are on one host or several, have servers, or are alone.
ONE_HOST, MESSAGES, SERVED = Mode("dist_sync", 2), Mode("dist_sync", 3, memory="off"), Mode("dist_sync", 2, 1)
TWO_HOSTS, THREE_HOSTS = Mode("dist_sync", 3, hosts="aab"), Mode("dist_sync", 3, hosts="abc")
SENDING = (MESSAGES, TWO_HOSTS, SERVED)
TRAINING = (ONE_HOST, Mode("dist_sync", 3), *SENDING, Mode("dist_sync", 1), HYBRID[2])
# One of each kind, for tests of what all modes share.
FEW_ON_DEVICE = (
    Mode("dist_sync", 3, device="host"),  # over memory that the workers share
    Mode("dist_sync", 3, 0, "ring", device="host"),
    Mode("dist_sync", 3, 0, "ring", device="mpi"),
    Mode("dist_sync", 3, 2, device="host"),
    Mode("dist_sync", 3, 2, memory="off", device="host"),
)
FEW_DIST_SYNC = (
    *(Mode("dist_sync", 3, 0, "ring"), Mode("dist_sync", 3, 0, "owners"), *every_way(Mode("dist_sync", 3, 2))),
    *HYBRID[:2],
    *ADDING[:2],
    Mode("dist_sync", 3, codec=codecs_of_tests.Reversed.name),
    *(FEW_ON_DEVICE[0], FEW_ON_DEVICE[2], FEW_ON_DEVICE[4]),
)
FEW_ASYNC = (
    *every_way(Mode("dist_async", 2, 0), Mode("dist_async", 3, 2)),
    Mode("dist_async", 2, 0, device="host"),
    Mode("dist_async", 3, 2, memory="off", device="host"),
)
FEW = (Mode("local", 1), *FEW_DIST_SYNC, *FEW_ASYNC, Mode("local", 1, device="gpu"))
# For what depends on the mode a little: alone, in memory, in a ring, on servers, divided, on a GPU, without rounds.
SYNC_KINDS = (ONE_HOST, FEW_DIST_SYNC[0], FEW_DIST_SYNC[4], HYBRID[0], ADDING[0], FEW_ON_DEVICE[1])
ASYNC_KINDS = (FEW_ASYNC[0], FEW_ASYNC[3])
KINDS = (Mode("local", 1), *SYNC_KINDS, *ASYNC_KINDS)
