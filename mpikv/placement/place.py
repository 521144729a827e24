"""Where a key lives and which path its gradients take: one pure value, the same on every rank.

`Members` is what all keys of a store have in common: its ranks, their hosts, the settings. `place` makes of it and of
one key the key's `Placement`: the path, the algorithm, the owners, and the bounds of what each of them owns. All of it
follows from what all ranks agreed on at `init`, so that each computes it by itself and nobody asks. Only where servers
own the keys worker 0 chooses, by the bytes that each server holds already, and announces its choice (`announced`).

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

from collections.abc import Sequence

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.placement.algorithms import bounds_of, choose, most_owners
from mpikv.placement.encoding import Wire, bounds_in_steps, encoded_bytes, plain_bytes
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
    room: bool = True,
    load_bytes: Sequence[int] = (),
    wire: Wire | None = None,
    updated: bool = False,
    encoded: bool | None = None,
) -> Placement:
    """Where a key lives and which path its gradients take.

    whole: one owner has all of it, since its optimizer's formula needs the whole value. room: whether the memory that a
    host's workers share has room for it. load_bytes: for servers: what each of them holds already. wire: how its values
    travel encoded; None: they do not. updated: an optimizer serves it, so that it has owners. encoded: whether its
    values go encoded, where that is settled; None: it is settled now.
    """
    if members.path == "servers":
        return on_servers(members, info, whole=whole, load_bytes=load_bytes, wire=wire)
    size = len(members.workers)
    device_path = members.device_path_of(info)
    on_host: Path = members.path if room or not members.shares_memory else "messages"
    if wire is not None and (_encodes(members, info, wire, on_host, updated) if encoded is None else encoded):
        here = device_path == "host" or wire.on_device  # where the key is
        # Else it has its owners: one worker's copy of the sum comes up to the device, not all.
        gathers = here and not updated and wire.gathers(info.n_bytes, size)
        bounds = whole_bounds(info.n_elems, size, info.id % size) if whole else bounds_in_steps(info, size, wire)
        algorithm = "gather" if gathers else "owners"
        if here:
            plain = None if wire.force else _plain_path(members, info, on_host, bounds)
            host = on_host if plain is not None and plain[0] == "staged" else None
            return Placement("encoded", algorithm, tuple(range(size)), bounds, host=host, plain=plain)
        return Placement("staged", algorithm, tuple(range(size)), bounds, host="encoded")
    if device_path == "nccl":
        algorithm = "nccl" if updated else "nccl_allreduce"
    elif members.path == "direct" or device_path == "ipc":
        # A call that does not go the direct path must add in the same order: which path it goes is a matter of time.
        algorithm = "naive"
    else:
        forced = members.config.host_algorithm
        if device_path == "mpi" and forced == "native":  # whose collectives take no device memory
            forced = "auto"
        n_bytes = info.n_elems * sum_dtype(info.dtype).itemsize
        algorithm = choose(n_bytes, size, forced, members.worker_hosts)
        if device_path == "mpi" and forced == "auto" and algorithm == "hierarchical":
            algorithm = "ring"  # in long messages: a GPU is slow to begin each, and MPI copies within a host by itself
    if whole:
        bounds = whole_bounds(info.n_elems, size, info.id % most_owners(algorithm, size))
    elif device_path in {"ipc", "nccl", "mpi"} and algorithm != "hierarchical":
        bounds = _device_bounds(info, most_owners(algorithm, size), size)
    else:
        bounds = bounds_of(algorithm, info.n_elems, members.worker_hosts)
    path: Path = on_host if device_path == "host" else device_path
    if device_path == "ipc" and size == 1:
        path = "messages"  # of which there are none
    return Placement(path, algorithm, tuple(range(size)), bounds, host=on_host if device_path == "staged" else None)


def _device_bounds(info: KeyInfo, owners: int, size: int) -> tuple[int, ...]:
    """Parts that begin at whole cache lines of a GPU, so that it loads and stores by its widest words.

    All have one length but the last ones, which may be empty: NCCL wants one length, and pads these.
    """
    step = max(1, CACHE_LINE_BYTES // info.dtype.itemsize)
    length = -(-info.n_elems // (owners * step)) * step
    core = tuple(min(i * length, info.n_elems) for i in range(owners + 1))
    return core + (info.n_elems,) * (size + 1 - len(core))


def _plain_path(members: Members, info: KeyInfo, on_host: Path, bounds: Sequence[int]) -> tuple[Path, str] | None:
    """The path and the algorithm of an encoded key's rounds as they are; None: the path of encoded ones.

    They are those of a key without compression, but with these bounds. on_host: its path, or what it would be there.
    """
    device_path = members.device_path_of(info)
    if on_host == "native" or device_path == "nccl" or sum_dtype(info.dtype) != info.dtype:
        return None  # it may have no communicator; halves go encoded
    size = len(members.workers)
    algorithm = choose(info.n_bytes, size, members.config.host_algorithm, members.worker_hosts)
    if bounds[most_owners(algorithm, size)] != info.n_elems:
        algorithm = "ring"  # whose ranks may all be owners
    return on_host if device_path == "host" else device_path, algorithm


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


def place_rows(members: Members, info: KeyInfo) -> tuple[int, ...]:
    """What each owner has of a row-sparse key: owner i the rows `[bounds[i], bounds[i+1])`, as many as any other."""
    return even_bounds(info.shape[0], len(members.owners))
