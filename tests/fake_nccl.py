"""NCCL for CuPy without GPUs (fake_cupy.py): `cupy.cuda.nccl`, by its own names; tests/contract compares them.

Ranks are threads, each with a process of one machine and a GPU of its own. A call is work of the rank's stream. It is
done when all ranks of the communicator have made it and their streams have come to it; no stream goes further before
(`Gate`). All ranks must make the same calls in the same order, else CallOrderError. Sums are added in an order of its
own. What a call may leave as it likes is full of 0xFF. `Machine.nccl_failed` is what `check_async_error` finds.

It is an attribute of a process's `cuda`; CuPy's, which `import cupy` does not bring, must be imported by itself.
"""

# ruff: noqa: N802, PLR0917 - CuPy's names and parameters
from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np

VERSION = 22707
ID_BYTES = 128
WAIT_S = 30.0  # for the ranks of a new communicator; NCCL itself waits for ever
NAMES = ["INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16"]
DTYPES = [np.dtype(ml_dtypes.bfloat16 if name == "BFLOAT16" else name.lower()) for name in NAMES]
OPS = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}
INVALID_USAGE, REMOTE_ERROR = 5, 6


class CallOrderError(AssertionError):
    """Ranks of a communicator make different calls."""


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL_ERROR {status}: of the fake")
        self.status = status


class _Call(dict):
    """One call of all ranks. what: name, dtype, operator, root. By rank: what it sends, where to, clock, gate."""

    def __init__(self, size: int, what: tuple[Any, ...]) -> None:
        self.size, self.what = size, what

    def arrive(self, rank: int, part: tuple[Any, ...]) -> None:
        self[rank] = part
        if len(self) == self.size:
            sends, receives, clocks, gates = zip(*(self[one] for one in range(self.size)), strict=True)
            with np.errstate(all="ignore"):
                self._run([one.copy() for one in sends], sends, receives)
            for gate in gates:
                gate.open({stream: max(one.get(stream, 0) for one in clocks) for one in clocks for stream in one})

    def _run(self, values: list[np.ndarray], sends: Any, receives: Any) -> None:
        name, _, op, root = self.what
        found = np.concatenate(values) if name == "allGather" else values[-1 if root is None else root]
        if op is not None:
            found = values[-1]
            for one in values[:-1]:
                found = list(OPS.values())[op](found, one)
        for rank, (sent, received) in enumerate(zip(sends, receives, strict=True)):
            if name == "reduceScatter" and np.may_share_memory(sent, received):
                sent.view(np.uint8)[...] = 0xFF
            if received.size:
                received[...] = np.split(found, self.size)[rank] if name == "reduceScatter" else found


def of(process: Any) -> Any:
    machine = process.machine

    class NcclCommunicator:
        def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
            if not isinstance(commId, bytes):
                raise TypeError(f"Argument 'commId' has incorrect type (expected bytes, got {type(commId).__name__})")
            if len(commId) != ID_BYTES:
                raise ValueError(f"commId length {len(commId)} != {ID_BYTES}.")
            self._size, self._rank, self._n_calls, self._over = ndev, rank, 0, False
            self._open: list[Any] = []
            with machine.lock:
                new = SimpleNamespace(calls=[], gpus={}, come=threading.Condition(machine.lock))
                group = self._group = machine.nccl.setdefault(commId, new)
                group.gpus[rank] = process.visible[process.local.device]
                group.come.notify_all()
                if not group.come.wait_for(lambda: len(group.gpus) == ndev, WAIT_S):
                    raise NcclError(REMOTE_ERROR)
                if len(set(group.gpus.values())) < ndev:
                    raise NcclError(INVALID_USAGE)  # two ranks on one GPU

        def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
            self._put(("allReduce", datatype, op, None), sendbuf, count, recvbuf, count, stream)

        def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> Any:
            what = "reduceScatter", datatype, op, None
            self._put(what, sendbuf, recvcount * self._size, recvbuf, recvcount, stream)

        def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
            self._put(("allGather", datatype, None, None), sendbuf, count, recvbuf, count * self._size, stream)

        def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
            sent = count if self._rank == root else 0
            self._put(("broadcast", datatype, None, root), sendbuff, sent, recvbuff, count, stream)

        def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> Any:
            received = count if self._rank == root else 0
            self._put(("reduce", datatype, op, root), sendbuf, count, recvbuf, received, stream)

        def check_async_error(self) -> None:
            if machine.nccl_failed:
                raise NcclError(machine.nccl_failed)

        def abort(self) -> None:
            with machine.lock:
                self._over = True
                for gate, received in self._open:
                    if not gate.is_open:
                        received.view(np.uint8)[...] = 0xFF
                        gate.open({})

        def destroy(self) -> None:
            assert self._over or all(gate.is_open for gate, _ in self._open), "destroyed with calls under way"
            self._over = True

        def _put(self, what: Any, send: int, n_sent: int, receive: int, n_received: int, ptr: int) -> None:
            if self._over:
                raise NcclError(INVALID_USAGE)
            dtype, what_of_all = DTYPES[what[1]], (*what, max(n_sent, n_received))
            sent, received = (
                fake_cupy.at(address, n * dtype.itemsize).view(dtype) if n else np.empty(0, dtype)
                for address, n in ((send, n_sent), (receive, n_received))
            )
            with machine.lock:
                if self._n_calls == len(self._group.calls):
                    self._group.calls.append((what_of_all, _Call(self._size, what)))
                first, call = self._group.calls[self._n_calls]
                if what_of_all != first:
                    raise CallOrderError(
                        f"call {self._n_calls} of rank {self._rank} is {what_of_all}, that of another {first}"
                    )
                self._n_calls += 1
                stream, gate = process.streams[ptr or 1], fake_cupy.Gate()
                machine.work(stream, f"{what[0]} of NCCL", [(sent, False), (received, True)])
                machine.counts["nccl"] += 1
                machine.counts["nccl_bytes"] += (
                    max(n_sent, n_received) * dtype.itemsize * (1 + (what[0] == "allReduce"))
                )
                part, before = (sent, received, dict(stream.clock), gate), stream.behind
                stream.behind = [*before, gate]
                self._open = [*(one for one in self._open if not one[0].is_open), (gate, received)]
                gate.then(before, lambda: call.arrive(self._rank, part))

    def get_unique_id() -> bytes:
        with machine.lock:
            machine.counts["nccl_ids"] += 1
            return int(machine.counts["nccl_ids"]).to_bytes(ID_BYTES, "little")

    return SimpleNamespace(
        available=True,
        get_version=lambda: VERSION,
        get_unique_id=get_unique_id,
        NcclCommunicator=NcclCommunicator,
        NcclError=NcclError,
        **{f"NCCL_{name}": i for names in (NAMES, OPS) for i, name in enumerate(names)},
    )
