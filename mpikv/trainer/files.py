"""The files of a Trainer: optimizer states, and checkpoints, which it also writes by itself when the workers stop.

Every step of a trainer reads its store's `stop_requested`. When the workers have agreed to stop, and `MPIKV_STOP_FILE`
names a file, the trainer saves a checkpoint there and ends the program with status 0, on all workers; `resume` of the
next run continues from it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from mpikv.arrays import as_numpy
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.common.files import place_of
from mpikv.errors import MpikvError
from mpikv.kvstore import KVStore
from mpikv.observe.stall import say
from mpikv.optimizers import archive, states_file
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import InMemory, Place
from mpikv.strategies import codec_states
from mpikv.strategies.states import (
    LOAD,
    SAVE,
    SNAPSHOT,
    archived,
    join_shares,
    load_file,
    opened,
    save_shares,
    share_of,
)
from mpikv.trainer import checkpoint
from mpikv.trainer.generations import Generations
from mpikv.trainer.parameter import data_written, divide, list_data
from mpikv.trainer.torch_parameter import TorchBuffer
from mpikv.trainer.weights import TrainedWeights

KIND_FOR_SPARES, ANOTHER = "mpikv trainer for a spare", "another worker's state"


class TrainerFiles(TrainedWeights):
    """The calls of a Trainer that write and read files."""

    _worker_state: checkpoint.WorkerState | None
    _examples: float = 0
    _begun = False  # whether this object has made a step
    _stopped = False
    _snapshots: Generations | None = None

    # --- states

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Write the optimizer's states for this trainer's parameters into one file.

        If the store makes the updates the call is collective, and worker 0 writes. Otherwise it is local, and all
        workers would write the same: call it on one of them. With gradient compression each worker has codec states of
        its own: then it is collective, too, and worker 0 writes. On an error an existing file does not change.

        >>> trainer = mpikv.Trainer([mpikv.Parameter(np.ones(2))], 'adam')
        >>> trainer.save_states('states')
        >>> trainer.load_states('states')
        """
        path = checks.path("fname", fname)
        together = self._updater is not None or codec_states.compresses(self._session, self._trained.values())
        self._save_states(path, together=together)

    def _save_states(self, place: Place, *, together: bool) -> None:
        """Write the states. together: collective, and worker 0 writes."""
        owner, talks = self._updater or self._local, self._session if together else self._local.session
        save_shares(talks, owner.session, place, partial(self._states_share, SAVE, alone=not together))

    def _states_share(self, call: str, *, alone: bool, of_weights: Collection[str] | None = None) -> dict[str, Any]:
        """This worker's share of the states. alone: of all. of_weights: whose, if every worker has all states."""
        present = {key for name, key in self._trained.items() if not self._is_frozen(name)}
        owner, own, of_codecs = self._updater or self._local, present, list[StateRecord]()
        if not alone:
            of_codecs = codec_states.own(self._session, self._strategy, call, [*self._trained.values()])
            if self._updater is None and of_weights is not None:
                own = {self._keys[name] for name in of_weights}
            elif self._updater is None and self._session.rank:
                own = set()
        return share_of(owner.session, owner.strategy, call, keys=present, own=own, of_codecs=of_codecs, alone=alone)

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Read a file of `save_states`, with any number of workers, servers and devices.

        Collective as `save_states` is. The trainer that reads must correspond to the one that wrote: the first, second,
        ... of its store, with the same names. Raises StatesFileError or OSError, on every worker; nothing is changed
        then. Example: see `save_states`.
        """
        self._load_states(checks.path("fname", fname))

    def _load_states(self, place: Place) -> None:
        owner = self._local if self._updater is None else self._updater
        of_codecs = load_file(owner.session, owner.strategy, place)
        if self._updater is None:
            codec_states.spread(self._session, self._strategy, LOAD, of_codecs)

    # --- checkpoints

    def _data(self) -> dict[str, Any]:
        return {name: list_data(parameter)[0] for name, parameter in self._params.items()}

    @property
    def steps(self) -> int:
        """The number of steps made, including those of earlier runs that it has resumed. `save` saves it.

        May be set, to the same number on every worker, if the first weights come from a checkpoint of another kind.
        """
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = checks.whole("steps", steps)

    @property
    def examples(self) -> float:
        """The number of examples that these steps have used: the sum of the `batch_size` arguments of `step`.

        `save` saves it. It is an int if every `batch_size` was a whole number. If that is the number of examples of all
        workers, the position in the data follows from it, for any number of workers: `epoch, start =
        divmod(trainer.examples, n)`, and `SplitSampler.set_epoch(epoch, start)`. May be set, as `steps`.
        """
        return self._examples

    @examples.setter
    def examples(self, examples: float) -> None:
        self._examples = _whole_or_float(examples)

    def save(self, fname: str | os.PathLike[str]) -> None:
        """Write weights, optimizer states and the numbers of steps and examples into one file.

        `resume` reads the file. Collective, blocks. Worker 0 writes, including every worker's `worker_state`; of
        parameters that are not trained it writes its own values. In an asynchronous store the weights include all
        pushes that any worker has made before, and the numbers are worker 0's. Raises OSError, also if `fname` is no
        regular file, and UnsupportedError, on every worker; an existing file does not change then.

        >>> trainer = mpikv.Trainer([mpikv.Parameter(np.ones(2))], 'sgd')
        >>> trainer.step()
        >>> trainer.save('checkpoint')
        >>> mpikv.Trainer([weight := mpikv.Parameter(np.zeros(2))], 'sgd').resume('checkpoint')
        1
        >>> weight.data
        array([1., 1.])
        """
        path = checks.path("fname", fname)
        self._finish_waiting()
        self._session.decide("save", lambda: place_of(path))
        if self._asynchronous:
            self._session.barrier()
            self.pull_weights()

        def write(gathered: Sequence[bytes]) -> None:
            shares = [opened(worker, data) for worker, data in enumerate(gathered)]
            archive.save(path, checkpoint.KIND, self._of_shares(shares))

        self._session.at_first("save", lambda: archived(self._share)[0], write)

    def resume(self, fname: str | os.PathLike[str] | None = None) -> int:
        """Continue from a file of `save`: read weights, states and attributes; return the number of steps.

        fname: by default the name in `MPIKV_STOP_FILE`. If there is no such file, or no name, nothing changes, and the
        call returns 0. To be called before the first step. Any number of workers, servers and devices may read. Each
        worker's `worker_state` is restored if there are as many workers; else none is, and worker 0 prints that.
        Collective, blocks; worker 0 reads (with update_on_kvstore=False all workers do). Raises StatesFileError on
        every worker for a file that is damaged or of another model; nothing is changed then.

        >>> mpikv.Trainer([mpikv.Parameter(np.ones(2))], 'sgd').resume('no-such-file')
        0
        """
        if self._begun:
            raise MpikvError("resume after a step: it comes before the first one")
        self._session.resumed = True
        if self._session.alone:
            self._session.take_place(self._give, self._take)
            return self._steps
        path = self._session.stop_file if fname is None else checks.path("fname", fname)
        shares = self._snapshots.read() if self._snapshots is not None and fname is None else None
        if not path and shares is None:
            return 0
        found: dict[str, Any] = {}

        def look() -> list[float] | None:
            if path and os.path.exists(path):
                if fname is None and (owner := os.stat(path).st_uid) not in (os.geteuid(), 0):
                    say(f"mpikv: warning: {path} (MPIKV_STOP_FILE), from which this run goes on, is of user {owner}")
                found.update(checkpoint.read(path, self._data()))
            if shares and (not found or shares[0]["steps"] > found["steps"]):
                found.update(self._of_shares(shares))
                checkpoint.check(found, SNAPSHOT, self._data())
                say(f"mpikv: goes on from step {found['steps']}, of the last snapshot")
            return [found["steps"], found["examples"], *found["agreed"]] if found else None

        progress = self._session.decide("resume", look)
        if progress is None:
            return 0
        if self._updater is None and shares is not None:
            sent = archive.to_bytes(checkpoint.KIND, found) if self._session.rank == 0 else b""
            found = archive.from_bytes(
                self._session.scatter("resume", [sent] * self._session.num_workers), checkpoint.KIND, SNAPSHOT
            )
        elif self._updater is None and not found and look() is None:
            raise MpikvError(f"resume: worker 0 read {path}, and there is no such file on this worker's host")
        states = InMemory(path or SNAPSHOT, found)
        self._load_states(states)  # fails before anything is changed if they are of another optimizer
        self._restore_weights(found.get("weights", self._data()))
        self._load_states(states)  # once more, since restoring the weights has removed them
        checkpoint.give_kept(self._session, self._worker_state, found.get("workers", ()), str(states))
        self._steps, self._examples, *agreed = progress
        self._resume_factor(agreed)
        return self._steps

    def _restore_weights(self, weights: Mapping[str, Any]) -> None:
        """Copy weights to the owners and into the parameters. Worker 0's are used if several workers have read them."""
        if self._store is None:
            self._write(weights)
        else:
            self._distribute(self._store, list(self._trained), weights, updated=self._updater is not None)
            fixed = [name for name in self._params if name not in self._trained]
            self._distribute(self._store, fixed, weights, updated=self._asynchronous)

    def _write(self, weights: Mapping[str, Any]) -> None:
        """Write weights into this worker's parameters. Local."""
        for name, parameter in self._params.items():
            for replica in list_data(parameter):
                as_numpy.write(replica, weights[name], f"parameter {shown(name)}")
            data_written(parameter)

    def _distribute(self, store: KVStore, names: Sequence[str], weights: Mapping[str, Any], *, updated: bool) -> None:
        """Copy worker 0's weights to the owners and into all workers' parameters. updated: whether the store has them
        updated.
        """
        if names:
            outs = [list_data(self._params[name]) for name in names]
            optimizer = self._optimizer if updated else None
            keys = [self._keys[name] for name in names]
            checkpoint.distribute(store, keys, [weights[name] for name in names], outs, optimizer)
            for name in names:
                data_written(self._params[name])

    def sync_buffers(self) -> None:
        """Copy worker 0's buffers of the module to every worker, for example before an evaluation by all of them.

        Collective, blocks. Does nothing if the trainer was not given a module, or if there is no store.
        """
        if self._store is not None:
            names = [name for name, parameter in self._params.items() if isinstance(parameter, TorchBuffer)]
            values = {name: list_data(self._params[name])[0] for name in names}
            self._distribute(self._store, names, values, updated=self._asynchronous)

    # --- snapshots

    def _begin_snapshots(self) -> None:
        """Take snapshots from now on, where there is a place for them."""
        session = self._session
        if session.snapshot_dir and self._store is not None:
            share = partial(self._share, alone=self._asynchronous)
            self._snapshots = Generations(session, share, session.snapshot_s, session.snapshot_dir)

    def _after_step(self) -> None:
        self._take_snapshot_if_due()
        if self._session.between_steps(self._give, self._take) and self._snapshots is not None:
            self._snapshots.join()

    def _follow_others(self) -> None:
        self.pull_weights()

    def _take_snapshot_if_due(self) -> None:
        """Count a step of the training for snapshots. Collective where one is taken."""
        if self._snapshots is None:
            return
        if self._session.namespaces > 1:
            if self._session.rank == 0:
                say("mpikv: warning: several trainers share the store: no snapshots are taken of them")
            self._snapshots = None
            return
        self._snapshots.step(self._steps)

    def _share(self, *, alone: bool = False) -> dict[str, Any]:
        """This worker's share of a checkpoint. Collective.

        What is not trained is in worker 0's. alone: all of it, as far as one worker of an asynchronous store knows it.
        """
        session, data = self._session, self._data()
        self._finish_waiting()
        if alone:
            self._follow_others()
        described = checkpoint.described({name: data[name] for name in self._trained})
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in described.items()}
        parts = divide(sizes, 1 if alone else min(session.num_workers, len(sizes)))
        place = 0 if alone else session.rank
        mine = parts[place] if place < len(parts) else []
        if place == 0:
            mine += data.keys() - sizes.keys()
        return {
            **self._states_share(SNAPSHOT, alone=alone, of_weights=mine),
            "steps": self._steps,
            "examples": self._examples,
            "agreed": list(self._agreed_factor()),
            "weights": {name: as_numpy.host_view(data[name], f"parameter {shown(name)}") for name in mine},
            "kept": None if alone else checkpoint.state_of(self._worker_state),
        }

    def _of_shares(self, shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The content of a checkpoint, of all workers' shares. Local. Raises StatesFileError for what is of others."""
        owner = self._updater or self._local
        kept = [share["kept"] for share in shares]
        return {
            **{name: shares[0][name] for name in ("steps", "examples", "agreed")},
            **join_shares(owner.session, shares, SNAPSHOT),
            "weights": {name: value for share in shares for name, value in share["weights"].items()},
            "workers": kept if any(one is not None for one in kept) else [],
        }

    # --- spares

    def _give(self) -> bytes:
        """What a new worker goes on from: a checkpoint of this worker's, who has everything. Local."""
        ids = [] if self._snapshots is None else self._snapshots.ids
        content = self._of_shares([self._share(alone=True)])
        return archive.to_bytes(KIND_FOR_SPARES, {"checkpoint": content, "snapshots": ids})

    def _take(self, data: bytes) -> None:
        """Go on from that. The store has its values and states from others, and this trainer all else. Local."""
        content = archive.from_bytes(data, KIND_FOR_SPARES, ANOTHER)
        found = content["checkpoint"]
        checkpoint.check(found, ANOTHER, self._data())
        states = InMemory(ANOTHER, found)
        if self._updater is None:
            load_file(self._local.session, self._local.strategy, states)
        else:
            for _, config in states_file.load_states(states).meta["configs"]:
                self._optimizer.set_attributes(config["attributes"])
        if self._updater is not None or self._workers_update:
            self._strategy.follow(self._optimizer, [*self._trained.values()])
        self._write(found["weights"])
        self._steps, self._examples, self._factor_open = found["steps"], found["examples"], False
        if self._snapshots is not None:
            self._snapshots.join(content["snapshots"])

    # --- stopping

    @property
    def stop_requested(self) -> bool:
        """Whether all workers stop after the last step. Then save what you need, and leave the training loop.

        Every step reads `stop_requested` of the store, so that a program does not have to read that one. Local.
        """
        return self._stopped

    def _count_step(self, batch_size: float) -> None:
        """Count a step; save a checkpoint and end the program if the workers have agreed to stop."""
        self._steps += 1
        self._examples += batch_size if type(batch_size) is int else _whole_or_float(batch_size)
        self._begun = True
        if self._store is None or not self._store.stop_requested or self._stopped:
            self._after_step()
            return
        self._stopped = True
        session, path = self._session, self._session.stop_file
        if not path:
            return
        if session.namespaces > 1:
            if session.rank == 0 and not session.unsaved_warned:
                session.unsaved_warned = True
                print(
                    f"mpikv: {path} (MPIKV_STOP_FILE) is not written, as several trainers share the store: "
                    "the program has to look at stop_requested and save",
                    flush=True,
                )
            return
        self.save(path)
        if session.rank == 0:
            print(f"mpikv: stopped after step {self._steps}: weights and optimizer states are in {path}", flush=True)
        raise SystemExit(0)


def _whole_or_float(number: float) -> float:
    """Return a number of examples for JSON: an int if it is a whole number."""
    checked = checks.number("examples", number, 0.0)
    return int(number) if checked.is_integer() else checked
