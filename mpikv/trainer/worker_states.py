"""What each worker keeps for itself, on its way between the workers and a checkpoint.

A program may keep something on each worker that is another worker's only by accident: velocities of its own gradients,
the state of its random numbers. It has PyTorch's two methods for that: `state_dict()`, arrays by name, and
`load_state_dict(state)`. Worker 0 writes what all have, each worker's as an archive of its own (optimizers/archive.py),
and a run with as many workers gives each its own back.

Cost: two messages for each worker, and memory on worker 0 for what all of them keep.
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
WRONG = b"!"  # before the text of what is wrong with a worker's; an archive begins in another way


class WorkerState(Protocol):
    """Something that one worker keeps."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return arrays by name, of any library."""

    def load_state_dict(self, state: dict[str, HostArray]) -> None:
        """Take NumPy arrays that `state_dict` has returned in another process."""


def check(kept: Any) -> WorkerState | None:
    """Return it, or None. Raises TypeError for what has not both methods."""
    for name in ("state_dict", "load_state_dict"):
        if kept is not None and not callable(getattr(kept, name, None)):
            raise TypeError(f"worker_state: {shown(kept)} has no method {name}")
    found: WorkerState | None = kept
    return found


def gather(store: KVStore | None, kept: WorkerState | None, call: str) -> list[HostArray]:
    """Return the bytes of every worker's, at worker 0; elsewhere, and where no worker keeps anything, nothing.

    Collective, blocks. What is wrong with one of them `check_all` says, where all workers hear of it.
    """
    try:
        mine = _to_bytes(kept, call)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other workers wait in this call
        mine = WRONG + str(error).encode()
    found = [mine] if store is None else store.session.gather(call, mine)
    return [np.frombuffer(data, np.uint8) for data in found] if any(found) else []


def check_all(gathered: Sequence[HostArray]) -> None:
    """Raise UnsupportedError where some worker's `state_dict` failed, or gave what cannot be saved. Local."""
    for worker, data in enumerate(gathered):
        if data[:1].tobytes() == WRONG:
            raise UnsupportedError(f"worker {worker}: {data[1:].tobytes().decode()}")


def spread(store: KVStore | None, kept: WorkerState | None, saved: Sequence[HostArray], path: str) -> None:
    """Give each worker what it kept. saved: what `gather` returned, at worker 0. Collective, blocks.

    As many workers as there were, or `saved` is empty. Raises StatesFileError for what is damaged, and what
    `load_state_dict` raises, on this worker.
    """
    parts = [one.tobytes() for one in saved] or [b""] * (1 if store is None else store.num_workers)
    mine = parts[0] if store is None else store.session.scatter("resume", parts)
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
    if hasattr(value, "cpu"):  # a tensor, on whatever device
        value = value.detach().cpu()
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else host_view(value, what)
    if array.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise UnsupportedError(f"{what} has dtype {array.dtype}; a checkpoint holds {names}")
    return array
