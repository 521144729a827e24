"""Ranks as threads, each with a GPU of the fake CuPy, and what sends between them from its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
from fake_cupy import Machine

from mpikv.engine.operation import Operation, Waiter, Waking, wakes
from mpikv.placement import place
from mpikv.placement.keys import even_bounds
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.gpu import Gpu
from mpikv.spaces.named import Spaces
from mpikv.transports.base import Transport
from mpikv.transports.threads import Fabric


def gpu_of(process: Any, number: int = 0) -> Gpu:
    return Gpu(number, process, has_context=lambda one: one in process.contexts)


def gpus_of(machine: Machine, n: int) -> list[Gpu]:
    """One for each of n ranks, which are processes of their own: as many GPUs as there are, by turns."""
    return [gpu_of(machine.process((rank % machine.n_gpus,))) for rank in range(n)]


def one_gpu(**settings: Any) -> tuple[Any, Gpu]:
    process = Machine(**settings).process()
    return process, gpu_of(process)


def spaces_of(gpu: Gpu) -> Spaces:
    return Spaces(device=DeviceSpace(gpu))


def cut_as_on_the_host() -> AbstractContextManager[Any]:
    """Keys of the path `mpi` are cut at the elements at which the host's are, so that a ring adds both in one order."""
    return mock.patch.object(place, "_device_bounds", lambda info, size: even_bounds(info.n_elems, size))


class DeviceTransport:
    """One rank of `inner`, which also takes arrays of the fake CuPy, as a CUDA-aware MPI takes those of CuPy.

    A message's array is read or written at any time from the call until the request is done: so nothing may be under
    way on it when the message begins, nor, where it is received, when it has come.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def isend(self, buf: Any, dest: int, tag: int) -> Operation:
        return self._begin(self._inner.isend, buf, dest, tag, writes=False)

    def irecv(self, buf: Any, source: int, tag: int, room_bytes: int = 0) -> Operation:
        return self._begin(self._inner.irecv, buf, source, tag, room_bytes, writes=True)

    def _begin(self, call: Callable[..., Operation], buf: Any, *rest: int, writes: bool) -> Operation:
        if isinstance(buf, np.ndarray):
            return call(buf, *rest)
        buf.process.machine.host_access(buf, writes=writes)
        return _Checked(call(buf._values.reshape(-1).view(np.uint8), *rest), buf, writes=writes)


class _Checked(Waking):
    def __init__(self, request: Operation, buf: Any, *, writes: bool) -> None:
        self._request, self._buf, self._writes = request, buf, writes

    def test(self) -> bool:
        if not self._request.test():
            return False
        if self._buf is not None and self._writes:
            self._buf.process.machine.host_access(self._buf, writes=True)
        self._buf = None
        return True

    def wakes(self, waiter: Waiter) -> bool:
        return wakes(self._request, waiter)


class DeviceFabric(Fabric):
    """Thread ranks over `fabric` whose transports take such arrays."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric.size, fabric.hosts, fabric.clock)
        self._fabric = fabric

    def rank(self, rank: int) -> Transport:
        transport: Any = DeviceTransport(self._fabric.rank(rank))
        return transport


def same(first: Sequence[Any], others: Sequence[Sequence[Any]]) -> bool:
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for one in others for a, b in zip(first, one, strict=True)
    )
