"""Where a key lives and which way its gradients go: one pure value, the same on every rank.

`Members` is what all keys of a store have in common: its ranks, their hosts, the settings. `place` makes of it and of
one key the key's `Placement`: the path, the algorithm, the owners, and the bounds of what each of them owns. All of it
follows from what all ranks agreed on at `init`, so that each computes it by itself and nobody asks. Only where servers
own the keys worker 0 chooses, by the bytes that each server holds already, and tells the others its choice (`told`).

The paths:

- `direct`: all workers are on one host, and add in memory that they share: in one call where all make the same one,
  else key by key.
- `hosted`: workers are on several hosts, several of them on some: each host adds in its memory, and messages go
  between hosts alone.
- `messages`: the workers own the keys and send messages, also within a host.
- `native`: the workers own the keys, and MPI's own collectives move them.
- `encoded`: the workers own the keys, and each sends its piece of a value straight to the piece's owner, as the key's
  codec encodes it. The owner decodes the pieces, adds them in the order of the workers and sends the new piece to all
  (algorithm `owners`). Or each worker sends all of its values to all others, who all decode and add them (`gather`).
  Keys with compression go it where that is fewer bytes over the links between hosts (`Wire`), or where it is forced;
  keys of half precision, whose "codec" is to send them as they are, in place of `messages`.
- `servers`: server ranks own the keys, or, in an asynchronous store without any, servers inside the workers.

Keys whose arrays are in GPUs' memory go the path that the workers settled on for them (device_paths.py), whose owners
have parts of whole cache lines:

- `ipc`: workers of one host add in each other's device memory.
- `nccl`: by NCCL's collectives, which add in an order of their own.
- `mpi`: as `messages`, of device memory.
- `staged`: as one of the paths above, `Placement.host`, which values are copied to and from.

Cost: one pass over the ranks. Input and output: none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.config import Config
from mpikv.placement.keys import KeyInfo, ShardPlan, even_bounds, plan_of_bounds, whole_bounds
from mpikv.placement.topology import topology

Path = Literal["direct", "hosted", "messages", "native", "encoded", "servers", "ipc", "mpi", "nccl", "staged"]
DevicePath = Literal["ipc", "nccl", "mpi", "staged", "host"]  # "host": no key is in device memory
EVENLY = -1  # told in place of a key's only owner: the key is cut evenly over all servers


class AlgorithmRow(NamedTuple):
    """Up to `max_ranks` ranks and up to `max_bytes` bytes on the wire: `algorithm`. None: no limit."""

    max_ranks: int | None
    max_bytes: int | None
    algorithm: str


# The first row that fits. Few ranks: the direct algorithm has the fewest steps, is as fast as the others up to some
# megabytes, and adds in the order of the ranks, so that the bits are those of a server; beyond, its scratch memory of a
# whole buffer counts. Many ranks: short messages cost their steps, long ones their bytes. Measured with
# scripts/compare_algorithms.py; see docs/adr/0003-allreduce-table.md.
TABLE = (
    AlgorithmRow(4, 4 << 20, "naive"),
    AlgorithmRow(None, 64 << 10, "halving_doubling"),
    AlgorithmRow(None, None, "ring"),
)

# One rank on each of several hosts. The ring keeps both directions of a link busy all the time; the others have long
# messages, which Open MPI sends over TCP only once the receiver's consent has come back through a full socket. Measured
# with scripts/bench_links.py.
ACROSS = (
    AlgorithmRow(4, 32 << 10, "naive"),
    AlgorithmRow(None, 32 << 10, "halving_doubling"),
    AlgorithmRow(None, None, "ring"),
)


def choose(n_bytes: int, size: int, forced: str = "auto", hosts: Sequence[str] = ()) -> str:
    """The name of the algorithm for `n_bytes` bytes over `size` ranks. hosts: of each rank, where it is known."""
    if forced != "auto":
        return forced
    n_hosts = len(set(hosts))
    if n_hosts > 1 and n_hosts < size:
        return "hierarchical"
    for row in ACROSS if n_hosts > 1 else TABLE:
        if (row.max_ranks is None or size <= row.max_ranks) and (row.max_bytes is None or n_bytes <= row.max_bytes):
            return row.algorithm
    raise AssertionError("the last row of the table fits everything")


def most_owners(algorithm: str, size: int) -> int:
    """How many ranks, from 0 on, may own a part.

    Halving and doubling runs between as many ranks as the largest power of two has; the others own nothing.
    """
    return 1 << (size.bit_length() - 1) if algorithm == "halving_doubling" else size


def bounds_of(algorithm: str, n_elems: int, hosts: Sequence[str]) -> tuple[int, ...]:
    """What each rank owns: rank i owns `[bounds[i], bounds[i+1])`. hosts: of each rank.

    The hierarchical algorithm gives every host the same share and cuts it evenly over the host's ranks, so that all
    links carry the same; the others give every rank the same.
    """
    size = len(hosts)
    if algorithm != "hierarchical":
        core = even_bounds(n_elems, most_owners(algorithm, size))
        return core + (n_elems,) * (size + 1 - len(core))
    members, lengths = topology(hosts).hosts, [0] * size
    shares = even_bounds(n_elems, len(members))
    for i, ranks in enumerate(members):
        cuts = even_bounds(shares[i + 1] - shares[i], len(ranks))
        for place, rank in enumerate(ranks):
            lengths[rank] = cuts[place + 1] - cuts[place]
    return tuple(accumulate(lengths, initial=0))


CACHE_LINE_BYTES = 128  # of NVIDIA's GPUs


@dataclass(frozen=True)
class Members:
    """The ranks of a store and its settings, alike on every rank.

    hosts: of each rank of the transport. workers, servers: ranks of it, not always all. memory: whether the ranks of
    each host can share memory, as far as known. device_path: of keys in device memory. device_reasons: why it is
    none of the better ones: pairs of a path and a sentence.
    """

    hosts: tuple[str, ...]
    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()
    synchronous: bool = True
    config: Config = Config()  # noqa: RUF009 - immutable
    memory: bool = True
    device_path: DevicePath = "host"
    device_reasons: tuple[tuple[str, str], ...] = ()

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that own the keys; a placement counts them from 0."""
        return self.servers or self.workers

    @cached_property
    def worker_hosts(self) -> tuple[str, ...]:
        """The host of each worker."""
        return tuple(self.hosts[rank] for rank in self.workers)

    def only(self, workers: Sequence[int]) -> Members:
        """The store with some of these workers alone, in this order; without servers.

        workers: ranks of the transport. ValueError where they are none of this store's workers, or some come twice.
        """
        if self.servers or not workers or len(set(workers)) < len(workers) or not set(workers) <= set(self.workers):
            raise ValueError(f"workers {list(workers)} of a store whose workers are {list(self.workers)}")
        return replace(self, workers=tuple(workers))

    @property
    def links(self) -> bool:
        """Whether the ranks are on several hosts, so that values travel over links."""
        return len({self.hosts[rank] for rank in (*self.workers, *self.servers)}) > 1

    @property
    def _on_servers(self) -> bool:
        return bool(self.servers) or not self.synchronous

    @cached_property
    def shares_memory(self) -> bool:
        """Whether ranks of one host use memory that they share, where a host has several ranks."""
        wanted = self.config.shared_memory == "auto" and (self._on_servers or self.config.host_algorithm == "auto")
        hosts = [self.hosts[rank] for rank in (*self.workers, *self.servers)]
        return wanted and self.memory and len(set(hosts)) < len(hosts)

    @cached_property
    def path(self) -> Path:
        """The path of every key, as long as the memory has room for it."""
        if self._on_servers:
            return "servers"
        if not self.shares_memory:
            return "native" if self.config.algorithm == "native" else "messages"
        return "direct" if len(set(self.worker_hosts)) == 1 else "hosted"

    def device_path_of(self, info: KeyInfo) -> DevicePath:
        """The path of a key in device memory; `host` for any other."""
        return self.device_path if info.space == "device" else "host"


# Pieces of a value, unless they are long. Each costs a server some 0.1 ms for each worker. And a short message waits
# where it is sent to until it is asked for: MPI looks through all that wait, each time, so that thousands take minutes.
MOST_PARTS = 64
SHORT_PART_BYTES = 1 << 16  # from here on what a piece costs is little beside its bytes


class Wire(NamedTuple):
    """How a key's values travel where they travel encoded.

    push_bytes, pull_bytes: of all elements, as a worker sends them, and as owners send them back. codec: whether the
    first are encoded by a codec. back: whether the second are. force: the user wants it at all costs. on_device:
    whether a GPU can encode and decode both. step: parts of owners, and what travels in one piece, begin at multiples
    of so many elements, where there are that many.
    """

    push_bytes: int
    pull_bytes: int
    codec: bool = False
    back: bool = False
    force: bool = False
    on_device: bool = False
    step: int = 1

    def gathers(self, n_bytes: int, size: int) -> bool:
        """Whether `size` workers send fewer bytes, or as many in half the messages, where each sends all to all others.

        n_bytes: of the value as owners would send it back. For what leaves a worker both ways differ by one factor,
        the share that its host's workers have in all, so that this holds for each link, too.
        """
        return not self.back and size * self.push_bytes <= self.push_bytes + n_bytes


class Placement(NamedTuple):
    """One key's. Part i of its flat value, `[bounds[i], bounds[i+1])`, belongs to `owners[i]`; it may be empty.

    owners: numbers among the servers, or among the workers where they own the keys. algorithm: how workers add, "" for
    servers. part_elems: the most elements that travel to or from a server in one piece; 0 for workers. plain: of an
    `encoded` one the path and the algorithm of rounds whose values travel as they are; None: its own. host: of a
    `staged` one, and of one whose rounds as they are go so, the path on the host.
    """

    path: Path
    algorithm: str
    owners: tuple[int, ...]
    bounds: tuple[int, ...]
    part_elems: int = 0
    host: Path | None = None
    plain: tuple[Path, str] | None = None

    @property
    def as_it_is(self) -> Placement | None:
        """That of rounds whose values travel as they are, with the same owners and bounds; None: this one."""
        return None if self.plain is None else self._replace(path=self.plain[0], algorithm=self.plain[1], plain=None)

    @property
    def shards(self) -> ShardPlan:
        """The parts that are not empty."""
        return tuple(shard._replace(owner=self.owners[shard.owner]) for shard in plan_of_bounds(self.bounds))

    def told(self) -> list[int]:
        """What worker 0 tells the others of a key on servers, whatever their number: its only owner, and part_elems."""
        return [self.owners[0] if len(self.owners) == 1 else EVENLY, self.part_elems]


def place(
    members: Members,
    info: KeyInfo,
    *,
    whole: bool = False,
    room: bool = True,
    load_bytes: Sequence[int] = (),
    wire: Wire | None = None,
    updated: bool = False,
    encoded: bool | None = None,
) -> Placement:
    """Where a key lives and which way it goes.

    whole: one owner has all of it, since its optimizer's formula needs the whole value. room: whether the memory that a
    host's workers share has room for it. load_bytes: for servers: what each of them holds already. wire: how its values
    travel encoded; None: they do not. updated: an optimizer serves it, so that it has owners. encoded: whether its
    values go encoded, where that is settled; None: it is settled now.
    """
    if members.path == "servers":
        return _on_servers(members, info, whole=whole, load_bytes=load_bytes, wire=wire)
    size = len(members.workers)
    way = members.device_path_of(info)
    on_host: Path = members.path if room or not members.shares_memory else "messages"
    if wire is not None and (_encodes(members, info, wire, on_host, updated) if encoded is None else encoded):
        here = way == "host" or wire.on_device  # where the key is
        # Else it has its owners: one worker's copy of the sum comes up to the device, not all.
        gathers = here and not updated and wire.gathers(info.n_bytes, size)
        bounds = whole_bounds(info.n_elems, size, info.id % size) if whole else _in_steps(info, size, wire)
        algorithm = "gather" if gathers else "owners"
        if here:
            plain = None if wire.force else _plain_way(members, info, on_host, bounds)
            host = on_host if plain is not None and plain[0] == "staged" else None
            return Placement("encoded", algorithm, tuple(range(size)), bounds, host=host, plain=plain)
        return Placement("staged", algorithm, tuple(range(size)), bounds, host="encoded")
    if way == "nccl":
        algorithm = "nccl" if updated else "nccl_allreduce"
    elif members.path == "direct" or way == "ipc":
        # A call that does not go the direct way must add in the same order: it is a matter of time which way it goes.
        algorithm = "naive"
    else:
        forced = members.config.host_algorithm
        if way == "mpi" and forced == "native":  # whose collectives take no device memory
            forced = "auto"
        n_bytes = info.n_elems * sum_dtype(info.dtype).itemsize
        algorithm = choose(n_bytes, size, forced, members.worker_hosts)
        if way == "mpi" and forced == "auto" and algorithm == "hierarchical":
            algorithm = "ring"  # in long messages: a GPU is slow to begin each, and MPI copies within a host by itself
    if whole:
        bounds = whole_bounds(info.n_elems, size, info.id % most_owners(algorithm, size))
    elif way in {"ipc", "nccl", "mpi"} and algorithm != "hierarchical":
        bounds = _device_bounds(info, most_owners(algorithm, size), size)
    else:
        bounds = bounds_of(algorithm, info.n_elems, members.worker_hosts)
    path: Path = on_host if way == "host" else way
    if way == "ipc" and size == 1:
        path = "messages"  # of which there are none
    return Placement(path, algorithm, tuple(range(size)), bounds, host=on_host if way == "staged" else None)


def _device_bounds(info: KeyInfo, owners: int, size: int) -> tuple[int, ...]:
    """Parts that begin at whole cache lines of a GPU, so that it loads and stores by its widest words.

    All have one length but the last ones, which may be empty: NCCL wants one length, and pads these.
    """
    step = max(1, CACHE_LINE_BYTES // info.dtype.itemsize)
    length = -(-info.n_elems // (owners * step)) * step
    core = tuple(min(i * length, info.n_elems) for i in range(owners + 1))
    return core + (info.n_elems,) * (size + 1 - len(core))


def _plain_way(members: Members, info: KeyInfo, on_host: Path, bounds: Sequence[int]) -> tuple[Path, str] | None:
    """The path and the algorithm of an encoded key's rounds as they are; None: the path of encoded ones.

    They are those of a key without compression, but with these bounds. on_host: its path, or what it would be there.
    """
    way = members.device_path_of(info)
    if on_host == "native" or way == "nccl" or sum_dtype(info.dtype) != info.dtype:
        return None  # it may have no communicator; halves go encoded
    size = len(members.workers)
    algorithm = choose(info.n_bytes, size, members.config.host_algorithm, members.worker_hosts)
    if bounds[most_owners(algorithm, size)] != info.n_elems:
        algorithm = "ring"  # whose ranks may all be owners
    return on_host if way == "host" else way, algorithm


def _encodes(members: Members, info: KeyInfo, wire: Wire, on_host: Path, updated: bool) -> bool:
    """Whether a key's values go encoded. on_host: the path that they would go on the host else."""
    fewer = encoded_bytes(members, info, wire, updated=updated) < plain_bytes(members, info)
    if not wire.codec and not wire.back:
        halves = sum_dtype(info.dtype) != info.dtype and len(members.workers) > 1
        staged = info.space != "device" or members.device_path == "staged"
        by_messages = on_host == "messages" and members.config.algorithm == "auto"
        return halves and staged and by_messages and (fewer or len(set(members.worker_hosts)) == 1)
    if info.space == "device" and wire.back and not wire.on_device:
        return False  # the owner's exact values would be on the host, and it updates those on the device
    return wire.force or fewer


def encoded_bytes(members: Members, info: KeyInfo, wire: Wire, *, updated: bool) -> float:
    """What the busiest host sends to other hosts in a round whose values go encoded, cut evenly over the workers."""
    size, n_bytes = len(members.workers), info.n_bytes
    gathers = not updated and wire.gathers(n_bytes, size)
    each = wire.push_bytes if gathers else (wire.push_bytes + wire.pull_bytes) / size
    return max(n * (size - n) * each for n in Counter(members.worker_hosts).values())


def plain_bytes(members: Members, info: KeyInfo) -> float:
    """What each host sends to other hosts in a round whose values go as they are: sums that way, the result back."""
    n_hosts = len(set(members.worker_hosts))
    return (n_hosts - 1) / n_hosts * info.n_elems * (sum_dtype(info.dtype).itemsize + info.dtype.itemsize)


def place_rows(members: Members, info: KeyInfo) -> tuple[int, ...]:
    """What each owner has of a row-sparse key: owner i the rows `[bounds[i], bounds[i+1])`, as many as any other."""
    return even_bounds(info.shape[0], len(members.owners))


def _in_steps(info: KeyInfo, parts: int, wire: Wire | None) -> tuple[int, ...]:
    """`even_bounds`, at multiples of the step in which values travel."""
    step = 1 if wire is None else wire.step
    return tuple(min(step * bound, info.n_elems) for bound in even_bounds(-(-info.n_elems // step), parts))


def _on_servers(
    members: Members, info: KeyInfo, *, whole: bool, load_bytes: Sequence[int], wire: Wire | None
) -> Placement:
    """A key below the bound goes whole to the server with the fewest bytes, a larger one is cut evenly over all."""
    n_servers = len(members.owners)
    part_elems = _part_elems(members, info, 1 if wire is None else wire.step)
    if n_servers == 1 or whole or info.n_elems < members.config.bigarray_bound_elems:
        return on_server(info, least_loaded(load_bytes), part_elems)
    return _evenly(info, n_servers, part_elems, wire)


def _part_elems(members: Members, info: KeyInfo, step: int) -> int:
    """As many as are asked for, or more where the value would travel in more than MOST_PARTS short pieces; in steps."""
    item_bytes = info.dtype.itemsize
    least = min(-(-info.n_elems // MOST_PARTS), SHORT_PART_BYTES // item_bytes)
    most = max(1, least, members.config.partition_bytes // item_bytes)
    return max(1, most // step) * step


def _evenly(info: KeyInfo, n_servers: int, part_elems: int, wire: Wire | None) -> Placement:
    bounds = _in_steps(info, n_servers, wire)
    return Placement("servers", "", tuple(range(n_servers)), bounds, part_elems)


def on_server(info: KeyInfo, server: int, part_elems: int) -> Placement:
    """A key that lives with one server alone."""
    return Placement("servers", "", (server,), (0, info.n_elems), part_elems)


def as_told(members: Members, info: KeyInfo, told: Sequence[int], wire: Wire | None = None) -> Placement:
    """The placement that worker 0 has told (`Placement.told`). wire: see `place`."""
    server, part_elems = told
    if server != EVENLY:
        return on_server(info, server, part_elems)
    return _evenly(info, len(members.owners), part_elems, wire)


def least_loaded(load_bytes: Sequence[int]) -> int:
    """The owner that holds the fewest bytes; the first of several."""
    return min(range(len(load_bytes)), key=lambda owner: (load_bytes[owner], owner))


def add_load(load_bytes: list[int], placement: Placement, itemsize_bytes: int) -> None:
    """Count what a key adds to its owners, in place."""
    for owner, begin, end in placement.shards:
        load_bytes[owner] += (end - begin) * itemsize_bytes
