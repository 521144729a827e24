"""Horovod's process sets: some of the workers of the default store, for calls among them alone.

A set is a store of its workers. So its calls and gradients meet no others', and everything that holds for a store holds
for it: limits, errors, shared memory. `add_process_set` makes it; the default store closes it when it is closed itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpikv import kv
from mpikv.calls.keyless import CollectiveCalls
from mpikv.kvstore import KVStore
from mpikv.session.workers import Workers
from mpikv.torch import default


class ProcessSet:
    """Some workers of the default store, by their numbers in it. process_set_id: None while it is not added.

    >>> mt.init(kv.create('local'))
    >>> one = mt.add_process_set(mt.ProcessSet([0]))
    >>> one.ranks, one.size(), one.rank(), one.included(), mt.allreduce(torch.ones(1), process_set=one)
    ([0], 1, 0, True, tensor([1.]))
    >>> one.close()  # as remove_process_set does on each worker
    >>> mt.shutdown()
    """

    process_set_id: int | None = None
    store: KVStore | None = None  # of its workers, on each of them

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = sorted(set(ranks))
        if not all(type(rank) is int and rank >= 0 for rank in self._ranks or [-1]):
            raise ValueError(f"a process set is made of workers' numbers, such as [0, 2]; got {ranks!r}")

    @property
    def ranks(self) -> list[int]:
        """The workers in ascending order."""
        return self._ranks

    def size(self) -> int | None:
        """Return how many workers it has; None while it is not added. Local."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this worker's number in it; None while it is not added, and on a worker that is not in it. Local."""
        return self.ranks.index(default.rank()) if self.process_set_id is not None and self.included() else None

    def included(self) -> bool:
        """Return whether this worker is in it. Local."""
        return default.rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def close(self) -> None:
        """Close its store; it is not added any more. Collective over its workers, blocks."""
        store, self.store, self.process_set_id = self.store, None, None
        if store is not None:
            store.close()


class _AllWorkers(ProcessSet):
    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """All workers of the default store, whichever it is."""
        return list(range(default.size()))


global_process_set = _AllWorkers([0])


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make the store of some workers, and return their set. Collective over all workers of the default store, blocks.

    Raises ValueError for a set that is added already or has other ranks than workers, ConfigError on every worker if
    they bring different ranks.

    >>> mt.init(kv.create('local'))
    >>> added = mt.add_process_set([0])
    >>> added.process_set_id, mt.remove_process_set(added), mt.remove_process_set(added)
    (1, True, False)
    >>> mt.shutdown()
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    calls = default.calls_of(None)
    store = calls.store
    if made.process_set_id is not None or made.ranks[-1] >= store.num_workers:
        raise ValueError(f"add_process_set: {made} is added already, or has others than {store.num_workers} workers")
    calls.agree([f"ranks {made.ranks}"], "add_process_set")
    if made.included():
        made.store = _part(store, made.ranks)
    made.process_set_id = default.next_process_set()
    store.session.before_close.insert(0, made.close)  # the last one first, as at the interpreter's exit
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close the store of a set. Collective over all workers of the default store, blocks.

    Returns False for one that is not added, and for `global_process_set`, which stay as they are. Example: see
    `add_process_set`.
    """
    if not process_set.process_set_id:
        return False
    calls = default.calls_of(None)
    calls.agree([repr(process_set)], "remove_process_set")
    calls.store.session.before_close.remove(process_set.close)
    process_set.close()
    return True


def calls_in(process_set: ProcessSet | None = None, store: KVStore | None = None) -> CollectiveCalls:
    """Return the collective calls among the workers of a set or a store; of neither: of the default store.

    Raises ValueError for both, for a set that is not added, and on a worker that is not in it.
    """
    if process_set is None or process_set is global_process_set:
        return default.calls_of(store)
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set is a ProcessSet, not {type(process_set).__name__} (a store is given as store=)")
    if store is not None:
        raise ValueError(f"give a store or a process set, not both: {store}, {process_set}")
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not added: call add_process_set on all workers")
    if process_set.store is None:
        raise ValueError(f"worker {default.rank()} is not in {process_set}")
    return CollectiveCalls(process_set.store)


def root_in(process_set: ProcessSet | None, root_rank: int) -> int:
    """Return the number, among the workers of a set, of a worker of the default store."""
    if process_set is None or process_set is global_process_set:
        return root_rank
    if root_rank not in process_set.ranks:
        raise ValueError(f"root {root_rank!r} is not in {process_set}")
    return process_set.ranks.index(root_rank)


def _part(store: KVStore, ranks: list[int]) -> KVStore:
    """Make a store of these workers of another one. Collective over them; all of them are about to call it."""
    session = store.session
    session.check_all_stay("process sets need")
    if not isinstance(session, Workers):
        return kv.create(store.type)
    transport: Any = session.transport
    group = transport.comm.Get_group()
    chosen = group.Incl([session.members.workers[rank] for rank in ranks])
    part = transport.comm.Create_group(chosen)
    # Signals, stop files and what is written go by the default store.
    config = session.members.config.with_(num_servers=0, stop_signals="", stop_file="", timeline="", metrics="")
    made = kv.create(store.type, comm=part, config=config)
    for one in (part, chosen, group):
        one.Free()
    return made
