"""Each worker's own state in a checkpoint: how it is gathered on worker 0 and given back.

A program may have a state that differs between workers: velocities of their own gradients, or of random number
generators. It passes an object with PyTorch's two methods: `state_dict()`, which returns arrays by name, and
`load_state_dict(state)`. Worker 0 writes the states of all workers, each as an archive (optimizers/archive.py), and a
run with as many workers gives each worker its own back.

Cost: two messages for each worker, and memory on worker 0 for the states of all.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpikv.arrays.as_numpy import HostArray, host_view
from mpikv.common.checks import shown
from mpikv.errors import StatesFileError, UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.optimizers.archive import DTYPES, are_names, read_archive, write_archive

KIND = "mpikv state of a worker"
ERROR = b"!"  # precedes the text of a worker's error; an archive begins with another byte


class WorkerState(Protocol):
    """An object with a worker's own state."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return arrays by name, of any library."""

    def load_state_dict(self, state: dict[str, HostArray]) -> None:
        """Restore a state from NumPy arrays that `state_dict` has returned in another process."""


def check(kept: Any) -> WorkerState | None:
    """Return the argument. Raises TypeError if it is not None and does not have both methods."""
    for name in ("state_dict", "load_state_dict"):
        if kept is not None and not callable(getattr(kept, name, None)):
            raise TypeError(f"worker_state: {shown(kept)} has no method {name}")
    found: WorkerState | None = kept
    return found


def gather(store: KVStore | None, kept: WorkerState | None, call: str) -> list[HostArray]:
    """Return the bytes of every worker's state at worker 0. Returns [] elsewhere, and if no worker has a state.

    Collective, blocks. A worker's error is among the bytes, for `check_all` to raise in a call that all workers share.
    """
    try:
        mine = _to_bytes(kept, call)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other workers wait in this call
        mine = ERROR + str(error).encode()
    found = [mine] if store is None else store.session.gather(call, mine)
    return [np.frombuffer(data, np.uint8) for data in found] if any(found) else []


def check_all(gathered: Sequence[HostArray]) -> None:
    """Raise UnsupportedError if some worker's `state_dict` failed, or returned what cannot be saved. Local."""
    for worker, data in enumerate(gathered):
        if data[:1].tobytes() == ERROR:
            raise UnsupportedError(f"worker {worker}: {data[1:].tobytes().decode()}")


def distribute(store: KVStore | None, kept: WorkerState | None, saved: Sequence[HostArray], path: str) -> None:
    """Give each worker its own state. saved: what `gather` returned, at worker 0. Collective, blocks.

    `saved` has a state for each worker, or is empty. Raises StatesFileError for a damaged state, and what
    `load_state_dict` raises, on this worker.
    """
    archives = [one.tobytes() for one in saved] or [b""] * (1 if store is None else store.num_workers)
    mine = archives[0] if store is None else store.session.scatter("resume", archives)
    if not mine or kept is None:
        return
    header, values = read_archive(io.BytesIO(mine), KIND, path)
    names = header.get("names")
    if not are_names(names) or len(names) != len(values):
        raise StatesFileError(f"{path}: damaged: {shown(names)} for {len(values)} arrays of a worker")
    kept.load_state_dict(dict(zip(names, values, strict=True)))


def _to_bytes(kept: WorkerState | None, call: str) -> bytes:
    if kept is None:
        return b""
    try:
        given = kept.state_dict()
    except Exception as error:
        text = f"{call}: state_dict of worker_state raised {type(error).__name__}: {error}"
        raise UnsupportedError(text) from error
    if not isinstance(given, Mapping):
        raise UnsupportedError(f"{call}: state_dict of worker_state gave {shown(given)}, no arrays by their names")
    if not are_names(list(given)):
        raise UnsupportedError(f"{call}: worker_state has the names {shown(list(given))}; a checkpoint holds str alone")
    state = {name: _on_host(value, f"{call}: {shown(name)} of worker_state") for name, value in given.items()}
    file = io.BytesIO()
    write_archive(file, KIND, {"names": list(state)}, list(state.values()))
    return file.getvalue()


def _on_host(value: Any, what: str) -> HostArray:
    if hasattr(value, "cpu"):  # a tensor, on any device
        value = value.detach().cpu()
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else host_view(value, what)
    if array.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise UnsupportedError(f"{what} has dtype {array.dtype}; a checkpoint holds {names}")
    return array
