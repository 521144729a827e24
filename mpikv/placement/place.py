"""Which workers own which shards of a key that goes round their ring, and which path its gradients take.

`Members` is what all keys of a store have in common: its ranks, their hosts, the settings. From it and from one key
`place` computes the key's `Placement`. All of that depends only on what the ranks agreed on at `init`, so each rank
computes it by itself without a message. Whether a key has other owners is in cut.py, and who they are in owners.py.

docs/architecture.md has a table of the paths, and `PATHS` in strategies/ring_keys.py has their code. Keys whose arrays
are in GPUs' memory take the path that the workers settled on for them (device_paths.py), where shards are whole cache
lines; by `host` values are copied to the host, take another path there (`Placement.host`), and are copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.placement.keys import KeyInfo, Shard, ShardPlan, even_bounds, plan_of_bounds, whole_bounds
from mpikv.placement.members import Members, Path
from mpikv.placement.placement import Placement
from mpikv.placement.topology import topology

CACHE_LINE_BYTES = 128  # of NVIDIA's GPUs


def place(
    members: Members,
    info: KeyInfo,
    *,
    whole: bool = False,
    fits: bool = True,
    updated: bool = False,
    end: int | None = None,
) -> Placement:
    """Which workers own a key that goes round their ring, and which path its gradients take.

    whole: one owner has all of it, since its optimizer's formula needs the whole value. fits: whether the memory that a
    host's workers share has space for it. updated: whether owners update it with an optimizer. end: where the servers'
    elements begin, of a key that is divided.
    """
    size, hosts = len(members.workers), members.worker_hosts
    workers = tuple(range(size))
    if end is not None:
        return Placement("divided", workers, host_bounds(end, hosts) if fits else even_bounds(end, size))
    device_path = members.device_path_of(info)
    on_host: Path = members.path if fits or not members.shares_memory else "ring"
    path: Path = on_host if device_path == "none" else device_path
    if device_path == "host" and size == 1:
        path = "ring"  # of which a single worker has no other one: the value stays on its GPU
    if whole:
        bounds = whole_bounds(info.n_elems, size, info.id % size)
    elif path in ("nccl", "mpi"):
        bounds = _device_bounds(info, size)
    elif "hosted" in (path, on_host):
        bounds = host_bounds(info.n_elems, hosts)
    else:
        bounds = even_bounds(info.n_elems, size)
    # Halves are added in float32, which an allreduce of NCCL would send both ways; a gathered sum goes back as halves.
    replicated = path == "nccl" and not updated and sum_dtype(info.dtype) == info.dtype
    return Placement(path, workers, bounds, host=on_host if path == "host" else None, replicated=replicated)


def host_bounds(n_elems: int, hosts: Sequence[str]) -> tuple[int, ...]:
    """The bounds of a key that is cut evenly over the hosts, so that all links carry equally many bytes, and then over
    the ranks of each host. hosts: of each rank.
    """
    found, lengths = topology(hosts).hosts, [0] * len(hosts)
    of_hosts = even_bounds(n_elems, len(found))
    for i, ranks in enumerate(found):
        cuts = even_bounds(of_hosts[i + 1] - of_hosts[i], len(ranks))
        for local_rank, rank in enumerate(ranks):
            lengths[rank] = cuts[local_rank + 1] - cuts[local_rank]
    return tuple(accumulate(lengths, initial=0))


def _device_bounds(info: KeyInfo, size: int) -> tuple[int, ...]:
    """Bounds of shards that begin at whole cache lines of a GPU, so that it loads and stores its widest words.

    All have the same length except the last ones, which may be shorter or empty: NCCL needs equal lengths, so there
    these are padded.
    """
    step = max(1, CACHE_LINE_BYTES // info.dtype.itemsize)
    length = -(-info.n_elems // (size * step)) * step
    return tuple(min(i * length, info.n_elems) for i in range(size + 1))


def place_rows(members: Members, info: KeyInfo) -> ShardPlan:
    """The rows `[begin, end)` of each owner of a row-sparse key. Where it has a second one, both have all rows."""
    if members.has_seconds and info.shape[0]:
        return tuple(Shard(owner, 0, info.shape[0]) for owner in members.owners_from(info.id % members.n_first))
    return plan_of_bounds(even_bounds(info.shape[0], len(members.owners)))
