"""Transports that take arrays of fake GPUs, as a CUDA-aware MPI takes those of GPUs.

What a message's array holds is read and written by the host, at any time from the call until the request is done. So a
transport here asks the fake GPU when a message is begun whether work that touches these bytes may still be under way,
which then raises RaceError; and of what has been received again when it has come. When a message has left is not
checked, since a sender may know it sooner than from the request: from an answer that somebody could not have given
without it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpikv.arrays import HostArray
from mpikv.engine.request import Request, Waiter, Waking, wakes
from mpikv.testing.fake_gpu import FakeGpu
from mpikv.transports.base import Transport
from mpikv.transports.threads import Fabric


def host_view(array: Any) -> HostArray:
    """Return the bytes of an array in a fake GPU's memory, which the caller keeps alive, as the host sees them.

    >>> from mpikv.spaces.device import DeviceSpace
    >>> from mpikv.testing.device_transport import host_view
    >>> from mpikv.testing.fake_gpu import FakeGpu
    >>> gpu = FakeGpu()
    >>> array = DeviceSpace(gpu).zeros(2, np.dtype('int16'))
    >>> gpu.synchronize()
    >>> host_view(array).tolist()
    [0, 0, 0, 0]
    """
    if not array.nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.address))


class DeviceTransport:
    """One rank of `inner`, which also takes arrays of a fake GPU.

    view: makes of such an array what `inner` takes; one over MPI takes it as it is.

    >>> from mpikv.spaces.device import DeviceSpace
    >>> from mpikv.testing.device_transport import DeviceTransport
    >>> from mpikv.testing.fake_gpu import FakeGpu
    >>> from mpikv.transports.threads import Fabric
    >>> gpu = FakeGpu()
    >>> transport, space = DeviceTransport(Fabric(1).rank(0), gpu), DeviceSpace(gpu)
    >>> receive = transport.irecv(space.empty(2, np.dtype('int16')), 0, 7)
    >>> send = transport.isend(space.zeros(2, np.dtype('int16')), 0, 7)
    Traceback (most recent call last):
    mpikv.testing.gpu_work.RaceError: the host (...) reads ...
    """

    def __init__(self, inner: Transport, gpu: FakeGpu, view: Callable[[Any], HostArray] = host_view) -> None:
        self._inner, self._gpu, self._view = inner, gpu, view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def isend(self, buf: Any, dest: int, tag: int, room_bytes: int = 0) -> Request:
        """Do what `Transport.isend` does. Example: see the class."""
        if isinstance(buf, np.ndarray):
            return self._inner.isend(buf, dest, tag, room_bytes)
        self._gpu.host_reads(buf.address, buf.nbytes)
        return _Checked(self._inner.isend(self._view(buf), dest, tag, room_bytes), buf, lambda _address, _n_bytes: None)

    def irecv(self, buf: Any, source: int, tag: int, room_bytes: int = 0) -> Request:
        """Do what `Transport.irecv` does. Example: see the class."""
        if isinstance(buf, np.ndarray):
            return self._inner.irecv(buf, source, tag, room_bytes)
        self._gpu.host_writes(buf.address, buf.nbytes)
        return _Checked(self._inner.irecv(self._view(buf), source, tag, room_bytes), buf, self._gpu.host_writes)


class _Checked(Waking):
    """A message's request, which keeps its array alive. check: called once it is done, before anybody knows."""

    def __init__(self, request: Request, buf: Any, check: Callable[[int, int], None]) -> None:
        self._request, self._buf, self._check = request, buf, check

    def test(self) -> bool:
        """Whether it is done."""
        if not self._request.test():
            return False
        if self._buf is not None:
            self._check(self._buf.address, self._buf.nbytes)
            self._buf = None
        return True

    def wakes(self, waiter: Waiter) -> bool:
        """As the request within."""
        return wakes(self._request, waiter)


class DeviceFabric(Fabric):
    """Thread ranks over `fabric`, each with a fake GPU of its own, whose arrays its transport takes.

    >>> from mpikv.testing.device_transport import DeviceFabric
    >>> from mpikv.testing.fake_gpu import FakeGpu
    >>> from mpikv.transports.threads import Fabric
    >>> DeviceFabric(Fabric(2), [FakeGpu(), FakeGpu()]).rank(1).rank
    1
    """

    def __init__(self, fabric: Fabric, gpus: Sequence[FakeGpu]) -> None:
        super().__init__(fabric.size, fabric.hosts, fabric.clock)
        self._fabric, self._gpus = fabric, gpus

    def rank(self, rank: int) -> Transport:
        """Make the transport of one rank.

        >>> from mpikv.testing.device_transport import DeviceFabric
        >>> from mpikv.testing.fake_gpu import FakeGpu
        >>> from mpikv.transports.threads import Fabric
        >>> DeviceFabric(Fabric(1), [FakeGpu()]).rank(0).size
        1
        """
        transport: Any = DeviceTransport(self._fabric.rank(rank), self._gpus[rank])
        return transport  # type: ignore[no-any-return]
