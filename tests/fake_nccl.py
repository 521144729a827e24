"""NCCL without GPUs: its calls are work of fake GPUs, which waits in each rank's stream for that of all others.

All ranks must make the same calls in the same order, else CallOrderError. A rank's call is done when the streams of all
have come to it; then all of it is done at once. The GPUs of the ranks are views of one machine (`FakeGpus.view`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpikv.errors import MpikvError
from mpikv.testing.fake_gpu import FakeGpu


class CallOrderError(AssertionError):
    """Ranks of a communicator make different calls."""


class Network:
    """What the ranks of a test have in common. missing: ranks that are introduced and then make no call."""

    def __init__(self, gpus: Sequence[FakeGpu]) -> None:
        self.gpus = gpus
        self.lock = threading.Lock()
        self.arrived = threading.Barrier(len(gpus))
        self.calls: list[_Call] = []
        self.aborted: set[int] = set()
        self.destroyed: set[int] = set()
        self.ids = 0

    def of(self, rank: int) -> FakeNccl:
        return FakeNccl(self, rank)


class _Call:
    """One call of all ranks. what: how each of them makes it."""

    def __init__(self, network: Network, what: tuple) -> None:
        self.network, self.what = network, what
        self.views: dict[int, np.ndarray] = {}
        self.gates: dict[int, _Gate] = {}
        self.done = False

    @property
    def ready(self) -> bool:
        """Whether the streams of all ranks have come so far."""
        gates = self.gates.values()
        return self.done or (len(gates) == len(self.network.gpus) and all(gate.at_head for gate in gates))

    def run(self) -> None:
        """What the call does on all ranks. What is undefined afterwards is NaN, or -1."""
        if self.done:
            return
        self.done = True
        name, bounds, *rest = self.what
        p = len(self.views)
        parts = [slice(*pair) for pair in pairwise(bounds)]
        if name == "all_gather":
            chunks = [self.views[rank][parts[rank]].copy() for rank in range(p)]
            for view in self.views.values():
                view[:] = np.concatenate(chunks)
            return
        total = self.views[p - 1].copy()  # in an order of its own
        for rank in range(p - 1):
            total = rest[1](total, self.views[rank])
        for rank, view in self.views.items():
            view.view(np.uint8)[:] = 0xFF
            view[parts[rank]] = total[parts[rank]]


class _Gate:
    """A rank's part of a call, as its stream has it: work that may be done only when `ran`."""

    def __init__(self, call: _Call, stream: Any, comm: FakeComm) -> None:
        self._call, self._stream, self._comm = call, stream, comm

    @property
    def at_head(self) -> bool:
        return bool(self._stream.items) and self._stream.items[0] is self

    @property
    def ran(self) -> bool:
        return self._comm.is_aborted or self._call.ready

    def __call__(self) -> None:
        if not self._comm.is_aborted:
            self._call.run()


class FakeNccl:
    """See `Nccl`. error: what its calls raise; init_error: what `init` does."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank
        self.error: MpikvError | None = None
        self.init_error: MpikvError | None = None
        self.number = "21805"

    def version(self) -> str:
        if self.error is not None:
            raise self.error
        return self.number

    def unique_id(self) -> bytes:
        if self.error is not None:
            raise self.error
        self.network.ids += 1
        return bytes([self.network.ids]) * 128

    def init(self, size: int, unique_id: bytes, rank: int) -> FakeComm:
        if self.init_error is not None:
            raise self.init_error
        assert (size, unique_id, rank) == (len(self.network.gpus), bytes([self.network.ids]) * 128, self.rank)
        self.network.arrived.wait(30)
        return FakeComm(self.network, rank)


class FakeComm:
    """See `NcclComm`. n_calls: how many this rank has made. fails: what `check` raises."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank
        self.n_calls = 0
        self.fails: MpikvError | None = None

    @property
    def is_aborted(self) -> bool:
        return self.rank in self.network.aborted

    def reduce_scatter(self, address: int, bounds: Sequence[int], dtype: Any, how: np.ufunc, stream: int) -> None:
        self._put(("reduce_scatter", tuple(bounds), dtype, how), address, dtype, stream)

    def all_gather(self, address: int, bounds: Sequence[int], itemsize: int, stream: int) -> None:
        dtype = np.dtype((np.void, itemsize)) if itemsize not in (1, 2, 4, 8) else np.dtype(f"u{itemsize}")
        self._put(("all_gather", tuple(bounds), itemsize), address, dtype, stream)

    def _put(self, what: tuple, address: int, dtype: Any, stream: int) -> None:
        network, gpu = self.network, self.network.gpus[self.rank]
        assert not self.is_aborted
        assert self.rank not in network.destroyed
        with gpu._work.lock:  # that of all of them: they are of one machine
            if self.n_calls == len(network.calls):
                network.calls.append(_Call(network, what))
            call = network.calls[self.n_calls]
            if call.what != what:
                raise CallOrderError(f"call {self.n_calls} of rank {self.rank} is {what}, that of another {call.what}")
            self.n_calls += 1
            found = gpu.process.stream(stream, gpu.number)
            view, use = gpu.process.array((address, (dtype.itemsize,)), (what[1][-1],), dtype, writes=True)
            call.views[self.rank] = view
            gate = call.gates[self.rank] = _Gate(call, found, self)
            gpu._work.put(found, f"{what[0]} of NCCL", [use], gate)

    def check(self) -> None:
        if self.fails is not None:
            raise self.fails

    def abort(self) -> None:
        self.network.aborted.add(self.rank)

    def destroy(self) -> None:
        self.network.destroyed.add(self.rank)
