"""Broadcasts one worker's parameters, optimizer states and objects to all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from mpikv.arrays.as_numpy import HostArray
from mpikv.errors import PeerError, ShapeMismatch
from mpikv.kvstore import KVStore
from mpikv.torch import buffers
from mpikv.torch.default import calls_of
from mpikv.torch.process_sets import ProcessSet, calls_in, root_in


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0, store: KVStore | None = None
) -> None:
    """Write worker `root_rank`'s values into these tensors on every worker. Collective, blocks.

    params: a `state_dict`, or names with tensors (`named_parameters`); other values are ignored. Raises ShapeMismatch
    on every worker if names, shapes or dtypes differ, and UnsupportedError for tensors that are not dense.

    >>> mt.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), store=kv.create('local'))
    """
    if isinstance(params, torch.nn.Module):
        raise TypeError("broadcast_parameters: give the module's state_dict() or named_parameters()")
    named = sorted(params.items() if isinstance(params, Mapping) else params)
    tensors = [(name, value.data) for name, value in named if isinstance(value, torch.Tensor)]
    calls = calls_of(store)
    buffers.check(calls, [(repr(name), tensor) for name, tensor in tensors], "what broadcast_parameters got")
    buffers.broadcast(calls, [tensor for _, tensor in tensors], root_rank, "parameters")


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    store: KVStore | None = None,
) -> Any:
    """Return worker `root_rank`'s object, which must be picklable; on other workers `obj` is not used.

    Collective, blocks. Raises PeerError on all others where that worker dies meanwhile.

    >>> mt.broadcast_object({'epoch': 3}, store=kv.create('local'))
    {'epoch': 3}
    """
    calls, root = calls_in(process_set, store), root_in(process_set, root_rank)
    session, numbers = calls.store.session, calls.store.session.numbers
    number = numbers[root] if root in range(len(numbers)) else -1  # which `broadcast` refuses
    mine = session.number == number or session.alone
    content = np.frombuffer(cloudpickle.dumps(obj), np.uint8) if mine else np.empty(0, np.uint8)

    def exchange() -> Any:
        found = calls.allgather(np.array([[number, content.size]], np.int64), name)
        if not {*found[:, 0].tolist()} <= {*session.numbers, -1}:
            raise PeerError(f"broadcast_object: worker {root_rank}, whose object it is, has died")
        length = found[:, 1].max()
        return calls.broadcast([content if mine else np.empty(length, np.uint8)], root, name, numbers)[0]

    found = calls.whole(exchange)
    return obj if mine else cloudpickle.loads(found.tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet | None = None, store: KVStore | None = None
) -> list[Any]:
    """Return all workers' objects, which must be picklable, in the order of the workers. Collective, blocks.

    >>> mt.allgather_object({'epoch': 3}, store=kv.create('local'))
    [{'epoch': 3}]
    """
    calls = calls_in(process_set, store)
    content = np.frombuffer(cloudpickle.dumps(obj), np.uint8)

    def exchange() -> list[HostArray]:
        ends = np.cumsum(calls.allgather(np.array([content.size], np.int64), name))
        return np.split(calls.allgather(content, name), ends[:-1])

    return [cloudpickle.loads(one.tobytes()) for one in calls.whole(exchange)]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, store: KVStore | None = None
) -> None:
    """Set the optimizer's state and options (learning rates, ...) to worker `root_rank`'s. Collective, blocks.

    Raises ShapeMismatch on every worker if the optimizers differ in class or numbers of parameters.

    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.5)
    >>> mt.broadcast_optimizer_state(optimizer, store=kv.create('local'))
    """
    calls = calls_of(store)
    kind = type(optimizer).__name__
    counts = [len(group["params"]) for group in optimizer.param_groups]
    calls.agree([f"{kind} of groups of {counts} parameters"], "broadcast_optimizer_state", ShapeMismatch)
    # On the host, since a tensor on a GPU would be unpickled on the same GPU of another host.
    mine = tree_map_only(torch.Tensor, lambda one: one.cpu(), optimizer.state_dict())
    session, numbers = calls.store.session, calls.store.session.numbers
    state = broadcast_object(mine, root_rank, "state of an optimizer", store=calls.store)
    if session.number != numbers[root_rank]:
        optimizer.load_state_dict(state)
