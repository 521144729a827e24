"""A worker for tests of deaths: `continued_program.py SEED FOLDER VICTIM@OP[+MS],...`, a random program.

Every worker does what the seed says, with values of its own: the first worker brings 1, the next 2, then 4, and so on,
so that a sum tells who was in it. A victim kills itself in this operation, after so many milliseconds; rank R of MPI,
as rR+MS, so many milliseconds after it has begun to make the store, whatever it does then. Each worker writes into
FOLDER/N, N its number at the start, a line for each value that it has pulled; a spare into FOLDER/N-spare, N the number
of the worker whose place it takes.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import mpikv
from mpikv import kv

OPERATIONS = 60


def victim_of(text: str) -> tuple[int, int, float]:
    who, _, when = text.partition("@")
    operation, _, ms = when.partition("+")
    return int(who), int(operation), float(ms or 0) / 1e3


class Program:
    """store: open. me: this worker's number at the start."""

    def __init__(self, store: mpikv.KVStore, seed: int, log: Any) -> None:
        self.store, self.me, self._log = store, store.session.number, log
        self._dice, self._keys, self._n = random.Random(seed), dict[str, int](), 0
        self._at: dict[str, int] = {}
        self._optimizer: Any = None

    def init(self) -> None:
        key = f"k{len(self._keys)}"
        n = self._dice.choice([1, 7, 1000, 40000])
        self.store.init(key, np.full(n, 0.5))
        self._keys[key] = n

    def _value(self, key: str) -> Any:
        return np.full(self._keys[key], float(1 << self.me))

    def _tell(self, key: str, value: Any) -> None:
        assert (value == value[0]).all()
        self._log.write(f"{self._n} {key} {value[0].hex()} {'sum' if self._optimizer is None else 'weight'}\n")
        self._log.flush()

    def pushpull(self) -> None:
        keys = self._dice.sample([*self._keys], self._dice.randint(1, len(self._keys)))
        outs = [self._value(key) for key in keys]
        self.store.pushpull(keys, outs)
        for key, out in zip(keys, outs, strict=True):
            self._tell(key, out)

    def push_and_pull(self) -> None:
        keys = self._dice.sample([*self._keys], self._dice.randint(1, len(self._keys)))
        for key in keys:
            self.store.push(key, self._value(key))
        self._pause()
        for key in reversed(keys):
            self._tell(key, self.store.pull(key))

    def pushpull_async(self) -> None:
        key = self._dice.choice([*self._keys])
        first = self.store.pushpull_async(key, self._value(key), out=(one := self._value(key)))
        second = self.store.pushpull_async(key, self._value(key), out=(two := self._value(key)))
        self._pause()
        second.wait()
        first.wait()
        self._tell(key, one)
        self._tell(key, two)

    def barrier(self) -> None:
        self.store.barrier()

    def set_optimizer(self) -> None:
        self._optimizer = mpikv.optimizers.create(self._dice.choice(["sgd", "adam"]), learning_rate=0.5)
        self.store.set_optimizer(self._optimizer)

    def set_rate(self) -> None:
        if self._optimizer is not None:
            self._optimizer.learning_rate *= 0.5

    def save(self) -> None:
        if self._optimizer is not None:
            self.store.save_optimizer_states(f"{self._log.name}-states")

    def _give(self) -> bytes:
        optimizer = self._optimizer and (self._optimizer.name, self._optimizer.learning_rate)
        return pickle.dumps([self._n, self._dice.getstate(), self._keys, optimizer])

    def _take(self, data: bytes) -> None:
        self._n, state, self._keys, optimizer = pickle.loads(data)
        self._dice.setstate(state)
        for key, n in self._keys.items():
            self.store.init(key, np.zeros(n))
        if optimizer:
            self._optimizer = mpikv.optimizers.create(optimizer[0], learning_rate=optimizer[1])
            self.store.strategy.follow(self._optimizer, [*self._keys])

    def _pause(self) -> None:
        time.sleep(random.Random(f"{self.me} {self._n}").choice([0, 0, 0.001, 0.003]))

    def run(self, victims: list[tuple[int, int, float]]) -> None:
        kinds = [self.pushpull] * 5 + [self.push_and_pull] * 4 + [self.pushpull_async] * 2
        kinds += [self.barrier, self.set_rate, self.set_optimizer, self.save, self.init]
        session, is_spare = self.store.session, self.store.session.alone
        if is_spare:
            session.take_place(self._give, self._take)
        else:
            self.init()
        first = self._n + is_spare
        for self._n in range(first, OPERATIONS):
            operation = self._dice.choice(kinds)
            for who, when, after_s in victims:
                if (who, when) == (self.me, self._n) and not is_spare:
                    threading.Thread(target=die, args=(after_s,), daemon=True).start()
            self._pause()
            begun_s, generation = time.perf_counter(), self.store.generation
            operation()
            if self.store.generation > generation and self.store.rank == 0:
                print(f"went on after {time.perf_counter() - begun_s:.3f} s", flush=True)
            session.between_steps(self._give, self._take)


def wait_for_spares(store: mpikv.KVStore) -> None:
    """Until one that is coming has come as far as this step, or has died."""
    session = store.session
    while len(session.coming) > store.num_workers and not any(seat.ready for seat in session.now.seats):
        if session.has_news():
            return
        time.sleep(0.01)


def die(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_the_init(after_s: float) -> None:
    # In MPI_Init nobody can go on.
    while not hasattr(mpi := sys.modules.get("mpi4py.MPI"), "Is_initialized") or not mpi.Is_initialized():
        time.sleep(0.001)
    die(after_s)


def arm(given: str) -> None:
    """Let this rank of MPI die at the time that is given for it, if any is."""
    for one in given.split(","):
        rank, _, ms = one.partition("+")
        if rank == f"r{os.environ['OMPI_COMM_WORLD_RANK']}":
            threading.Thread(target=die_after_the_init, args=(float(ms) / 1e3,), daemon=True).start()


def main(seed: str, folder: str, given: str) -> None:
    arm(given)
    store = kv.create("dist_sync")
    name = f"{store.session.number}{'-spare' * store.session.alone}"
    with store, (Path(folder) / name).open("w") as log:
        program = Program(store, int(seed), log)
        program.run([victim_of(one) for one in given.split(",") if one and not one.startswith("r")])
        log.write("end\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
