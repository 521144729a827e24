"""Snapshots of objects that no Trainer holds: modules and optimizers of PyTorch, loaders, arrays, and one's own.

What objects' `state_dict()` gives is taken apart into arrays and JSON (optimizers/archive.py). Arrays that are equal on
all workers, such as weights, are written once over all of them, divided by their bytes; what differs is written by each
worker. When a snapshot is read, worker 0 has all of it for a moment, and sends each worker its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.arrays import as_numpy
from mpikv.arrays.as_numpy import HostArray
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.errors import ConfigError, MpikvError, UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.observe.stall import say
from mpikv.optimizers import archive
from mpikv.trainer.generations import CALL, Generations
from mpikv.trainer.parameter import divide

KIND = "mpikv objects"


class Snapshots:
    """Saves objects every so many seconds, and gives them back where the job is started again.

    For training loops without a `Trainer` or `LocalUpdates`, which do this by themselves where MPIKV_SNAPSHOT_DIR is
    set, as `mpikv launch --restarts` sets it. store: `dist_sync` or `local`. objects: by names; each is an array, which
    is written into, or has `state_dict()` and `load_state_dict(state)`, as modules and optimizers of PyTorch and
    `mpikv.data.DataLoader` do. States are dicts, lists and tuples of arrays, tensors, numbers, texts and None.

    every_s: from one snapshot to the next, in seconds; by default MPIKV_SNAPSHOT_S, 30. folder: on each host's own
    disk, or a shared one; by default MPIKV_SNAPSHOT_DIR. Without either, nothing is saved, and `resume` returns 0.

    steps: how many were made; examples: how many all workers have used in them. Local. Raises TypeError and ValueError
    for wrong arguments, ConfigError for a folder that cannot be used, UnsupportedError for an asynchronous store.

    >>> weights = np.zeros(2)
    >>> snapshots = mpikv.Snapshots(kv.create('local'), {'weights': weights}, folder='snapshots')
    >>> for _ in range(snapshots.resume(), 3):
    ...     weights += 1.0
    ...     snapshots.step(examples=8)
    >>> snapshots.save()
    >>> again = np.zeros(2)
    >>> snapshots = mpikv.Snapshots(kv.create('local'), {'weights': again}, folder='snapshots')
    >>> snapshots.resume(), snapshots.steps, snapshots.examples, again.tolist()
    (3, 3, 24, [3.0, 3.0])
    """

    def __init__(
        self, store: KVStore, objects: Mapping[str, Any], every_s: float | None = None, *, folder: str | None = None
    ) -> None:
        if not isinstance(store, KVStore):
            raise checks.wrong("Snapshots: store", "a store, as kv.create makes one", store)
        if "async" in store.type:
            raise UnsupportedError("Snapshots need a synchronous store, in which all workers make the same steps")
        self._session, self._objects = store.session, checks.options("objects", objects)
        for name, one in self._objects.items():
            if not _methods(one) and not as_numpy.is_space_array(one):
                raise checks.wrong(f"objects[{name!r}]", "an array, or something with state_dict, load_state_dict", one)
        seconds = self._session.snapshot_s if every_s is None else checks.number("every_s", every_s, 0.0)
        place = self._session.snapshot_dir if folder is None else checks.path("folder", folder)
        self._generations = Generations(self._session, self._share, seconds, place) if place else None
        self.steps: int = 0
        self.examples: float = 0

    def step(self, examples: float = 0) -> None:
        """Count a step, and take a snapshot if it is time. Call it after each step, on all workers.

        examples: how many all workers together have used in it. Collective where a snapshot is taken: blocks until the
        objects are copied. Raises UnsupportedError, on every worker, for a state that cannot be saved.
        """
        self.steps += 1
        self.examples += examples
        if self._generations is not None:
            self._generations.step(self.steps)
        if self._session.between_steps(self._give, self._take) and self._generations is not None:
            self._generations.join()

    def save(self) -> None:
        """Take a snapshot now. Collective, blocks until it is on the disks. Raises what `step` does, and OSError."""
        if self._generations is None:
            raise ConfigError("Snapshots.save: there is no folder; set MPIKV_SNAPSHOT_DIR, or give one")
        self._generations.take(self.steps)
        self._generations.finish()

    def resume(self) -> int:
        """Give the objects back what the newest snapshot has of them; returns the number of steps, 0 for none.

        To be called before the first step. Collective, blocks. With as many workers as before each has its own states.
        With another number, worker w has those of worker w modulo the number that there were: what was equal on all
        stays so, as weights and the state of a `DataLoader` with a `SplitSampler`, which goes on with the examples that
        nobody has had. Raises MpikvError after a step, StatesFileError for a snapshot of other objects.
        """
        if self.steps:
            raise MpikvError("resume after a step: it comes before the first one")
        self._session.resumed = True
        if self._session.alone:
            self._session.take_place(self._give, self._take)
            return self.steps
        shares = None if self._generations is None else self._generations.read()
        if shares is None:
            return 0
        parts = None
        if self._session.rank == 0:
            common = {name: array for share in shares for name, array in share["common"].items()}
            whole = [archive.to_bytes(KIND, {**share, "common": common}) for share in shares]
            parts = [whole[worker % len(whole)] for worker in range(self._session.num_workers)]
            say(f"mpikv: goes on from step {shares[0]['steps']}, of the last snapshot")
        found = archive.from_bytes(self._session.scatter(CALL, parts), KIND, "a snapshot")
        self._restore(found)
        return self.steps

    def _restore(self, found: Mapping[str, Any]) -> None:
        """Give the objects back what a share with all common arrays has of them. Local."""
        states = archive.together(found["states"], {**found["common"], **found["own"]}, "the snapshot")
        if states.keys() != self._objects.keys():
            archive.damaged("the snapshot", f"is of the objects {shown([*states])}, not of {shown([*self._objects])}")
        for name, one in self._objects.items():
            state = states[name]
            if methods := _methods(one):
                methods[1](state)
            elif one.shape == state.shape:
                as_numpy.write(one, state, f"objects[{name!r}]")
            else:
                archive.damaged("the snapshot", f"array {shown(name)} has shape {state.shape} there, {one.shape} here")
        self.steps, self.examples = found["steps"], found["examples"]

    # --- spares

    def _give(self) -> bytes:
        """What a new worker goes on from: all that this one would save. Local."""
        text, arrays = self._states()
        ids = [] if self._generations is None else self._generations.ids
        content = {"steps": self.steps, "examples": self.examples, "states": text, "common": arrays, "own": {}}
        return archive.to_bytes(KIND, {**content, "snapshots": ids})

    def _take(self, data: bytes) -> None:
        found = archive.from_bytes(data, KIND, "another worker's state")
        self._restore(found)
        if self._generations is not None:
            self._generations.join(found["snapshots"])

    # --- shares

    def _states(self) -> tuple[str, dict[str, HostArray]]:
        states = {name: found[0]() if (found := _methods(one)) else one for name, one in self._objects.items()}
        return archive.apart(states)

    def _share(self) -> dict[str, Any]:
        """This worker's share of all objects. Collective."""
        text, arrays, error = "", dict[str, HostArray](), ""
        try:
            text, arrays = self._states()
        except Exception as raised:  # noqa: BLE001 - of the user's objects; the others wait
            error = f"{type(raised).__name__}: {raised}"
        mine = {name: _digest(array) for name, array in arrays.items()}
        gathered = self._session.gather(CALL, json.dumps([error, mine]).encode())
        common = self._session.decide(CALL, lambda: _common([json.loads(one) for one in gathered]))
        sizes = {name: arrays[name].nbytes for name in common}
        parts = divide(sizes, min(len(sizes), self._session.num_workers)) if sizes else []
        written = parts[self._session.rank] if self._session.rank < len(parts) else []
        return {
            "steps": self.steps,
            "examples": self.examples,
            "states": text,
            "common": {name: arrays[name] for name in written},
            "own": {name: array for name, array in arrays.items() if name not in sizes},
        }


def _methods(one: Any) -> list[Callable[..., Any]]:
    """What gives an object's state and what takes it back; [] for an object without a state."""
    for names in (("state_dict", "load_state_dict"), ("state", "load_state")):  # PyTorch's, and DataLoader's
        if all(callable(getattr(one, name, None)) for name in names):
            return [getattr(one, name) for name in names]
    return []


def _digest(array: HostArray) -> str:
    digest = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _common(listed: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """The arrays that are equal on all workers. Raises UnsupportedError where a worker has none to show."""
    for worker, (error, _) in enumerate(listed):
        if error:
            raise UnsupportedError(f"snapshot: worker {worker}: {error}")
    first, *others = (digests for _, digests in listed)
    return [name for name, digest in first.items() if all(other.get(name) == digest for other in others)]
