"""Which ranks own a key and which path its gradients take: one pure value, the same on every rank.

`Members` is what all keys of a store have in common: its ranks, their hosts, the settings. From it and from one key
`place` computes the key's `Placement`. All of that depends only on what the ranks agreed on at `init`, so each rank
computes it by itself without a message. Only where servers own the keys worker 0 chooses, by the bytes that each
server holds already, and announces its choice.

The paths (strategies/paths.py has them):

- `direct`: all workers are on one host, and add in memory that they share.
- `hosted`: several workers on some hosts: each host adds in its memory, and messages are sent only between hosts.
- `divided`: the same for a key of which servers own the rest: one worker of each host sends them the host's sum of it.
- `messages`: the workers own the keys and send messages, also within a host.
- `native`: MPI's own collectives add and distribute the keys.
- `encoded`: each worker sends its values of a shard, encoded, straight to the shard's owner (`owners`), or all of its
  values to all others (`gather`). Keys with compression take this path where it sends fewer bytes over the links
  between hosts (`Wire`), or where it is forced. Keys of half precision take it in place of `messages`.
- `servers`: server ranks own the keys, or, in an asynchronous store without any, servers inside the workers.

Keys whose arrays are in GPUs' memory take the path that the workers settled on for them (device_paths.py), where shards
are whole cache lines: `nccl` (in an order of its own), `mpi` (as `messages`), or `host`: values are copied to the host,
take one of the paths above (`Placement.host`) there, and are copied back.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.placement.algorithms import bounds_of, choose, most_owners
from mpikv.placement.encoding import Wire, bounds_in_steps, encoded_bytes, uncompressed_bytes
from mpikv.placement.keys import KeyInfo, even_bounds, whole_bounds
from mpikv.placement.members import Members, Path
from mpikv.placement.on_servers import on_servers
from mpikv.placement.placement import Placement

CACHE_LINE_BYTES = 128  # of NVIDIA's GPUs


def place(
    members: Members,
    info: KeyInfo,
    *,
    whole: bool = False,
    fits: bool = True,
    load_bytes: Sequence[int] = (),
    wire: Wire | None = None,
    updated: bool = False,
    encoded: bool | None = None,
    begin: int = 0,
    end: int | None = None,
) -> Placement:
    """Which ranks own a key and which path its gradients take.

    whole: one owner has all of it, since its optimizer's formula needs the whole value. fits: whether the memory that a
    host's workers share has space for it. load_bytes: what each server holds already. wire: how its values are sent
    encoded; None: never. updated: whether owners update it with an optimizer. encoded: whether its values are sent
    encoded, where that is decided already. begin: the first element of servers. end: where the servers' elements begin,
    of a key of which workers add on their hosts what servers get.
    """
    if members.path == "servers":
        return on_servers(members, info, whole=whole, load_bytes=load_bytes, wire=wire, begin=begin)
    size = len(members.workers)
    if end is not None:
        algorithm = choose(end * info.dtype.itemsize, size, members.config.host_algorithm, members.worker_hosts)
        return Placement("divided", algorithm, tuple(range(size)), bounds_of(algorithm, end, members.worker_hosts))
    device_path = members.device_path_of(info)
    on_host: Path = members.path if fits or not members.shares_memory else "messages"
    if wire is not None and (_encodes(members, info, wire, on_host, updated) if encoded is None else encoded):
        here = device_path == "none" or wire.on_device  # where the key is
        # Else it has owners, so that of the sum each worker copies only its own shard to its device, not all shards.
        gathers = here and not updated and wire.gathers(info.n_bytes, size)
        bounds = whole_bounds(info.n_elems, size, info.id % size) if whole else bounds_in_steps(info, size, wire)
        algorithm = "gather" if gathers else "owners"
        if here:
            uncompressed = None if wire.force else _uncompressed_path(members, info, on_host, bounds)
            host = on_host if uncompressed is not None and uncompressed[0] == "host" else None
            return Placement(
                "encoded", algorithm, tuple(range(size)), bounds, host=host, uncompressed_path=uncompressed
            )
        return Placement("host", algorithm, tuple(range(size)), bounds, host="encoded")
    if device_path == "nccl":
        # Halves are added in float32, which an allreduce would send both ways; a gathered sum goes back as halves.
        halves = sum_dtype(info.dtype) != info.dtype
        algorithm = "nccl" if updated or halves else "nccl_allreduce"
    elif members.path == "direct":
        # A call that does not take the direct path must add in the same order: the path depends on the ranks' timing.
        algorithm = "naive"
    else:
        forced = members.config.host_algorithm
        if device_path == "mpi" and forced == "native":  # the algorithm's calls take no device memory
            forced = "auto"
        n_bytes = info.n_elems * sum_dtype(info.dtype).itemsize
        algorithm = choose(n_bytes, size, forced, members.worker_hosts)
        if device_path == "mpi" and forced == "auto" and algorithm == "hierarchical":
            algorithm = "ring"  # its messages are long: a GPU is slow to begin each; within a host MPI itself copies
    if whole:
        bounds = whole_bounds(info.n_elems, size, info.id % most_owners(algorithm, size))
    elif device_path in {"nccl", "mpi"} and algorithm != "hierarchical":
        bounds = _device_bounds(info, most_owners(algorithm, size), size)
    else:
        bounds = bounds_of(algorithm, info.n_elems, members.worker_hosts)
    path: Path = on_host if device_path == "none" else device_path
    if device_path == "host" and size == 1:
        path = "messages"  # of which a single worker sends none: the value stays on its GPU
    return Placement(path, algorithm, tuple(range(size)), bounds, host=on_host if path == "host" else None)


def _device_bounds(info: KeyInfo, owners: int, size: int) -> tuple[int, ...]:
    """Bounds of shards that begin at whole cache lines of a GPU, so that it loads and stores its widest words.

    All have the same length except the last ones, which may be shorter or empty: NCCL needs equal lengths, so there
    these are padded.
    """
    step = max(1, CACHE_LINE_BYTES // info.dtype.itemsize)
    length = -(-info.n_elems // (owners * step)) * step
    core = tuple(min(i * length, info.n_elems) for i in range(owners + 1))
    return core + (info.n_elems,) * (size + 1 - len(core))


def _uncompressed_path(
    members: Members, info: KeyInfo, on_host: Path, bounds: Sequence[int]
) -> tuple[Path, str] | None:
    """The path and the algorithm of an encoded key's rounds without a codec; None: the path of encoded rounds.

    They are those of a key without compression, but with these bounds. on_host: its path on the host.
    """
    device_path = members.device_path_of(info)
    if on_host == "native" or device_path == "nccl" or sum_dtype(info.dtype) != info.dtype:
        return None  # there may be no communicator for `native`; half precision is always sent on the encoded path
    size = len(members.workers)
    algorithm = choose(info.n_bytes, size, members.config.host_algorithm, members.worker_hosts)
    if bounds[most_owners(algorithm, size)] != info.n_elems:
        algorithm = "ring"  # all of its ranks may be owners
    return on_host if device_path == "none" else device_path, algorithm


def _encodes(members: Members, info: KeyInfo, wire: Wire, on_host: Path, updated: bool) -> bool:
    """Whether a key's values are sent encoded. on_host: the path that they would take on the host otherwise."""
    fewer = encoded_bytes(members, info, wire, updated=updated) < uncompressed_bytes(members, info)
    if not wire.codec and not wire.back:
        halves = sum_dtype(info.dtype) != info.dtype and len(members.workers) > 1
        on_the_host = members.device_path_of(info) in ("none", "host")
        by_messages = on_host == "messages" and members.config.algorithm == "auto"
        return halves and on_the_host and by_messages and (fewer or len(set(members.worker_hosts)) == 1)
    if info.space == "device" and wire.back and not wire.on_device:
        return False  # the owner would have exact values on the host, but it updates those on the device
    return wire.force or fewer


def place_rows(members: Members, info: KeyInfo) -> tuple[int, ...]:
    """The bounds of each owner's rows of a row-sparse key: owner i owns the rows `[bounds[i], bounds[i+1])`."""
    return even_bounds(info.shape[0], len(members.owners))
