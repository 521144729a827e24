"""A rank of the soak: `soak_program.py TYPE FOLDER STEPS WARM_UP [RANK@STEP,...]`, so many steps of one call each.

After the warm-up, and in the end, each process writes down what it holds, a server too: it does so at SIGUSR1, which
worker 0 sends to all while no worker calls anything. Each of the given ranks is killed in its step, by another one,
wherever it is then.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from holdings import holdings
from mpi4py import MPI

import mpikv
from mpikv import kv, optimizers
from mpikv.common.files import replacing
from mpikv.observe import endpoint

NEW_KEY, BARRIER, SAVE = 2000, 100, 10_000  # steps from one to the next
WAITS, LONGEST_S = 0.01, 0.002  # of the steps so many begin with a wait, which is at most so long
LIMIT_S = 60.0


class Notes:
    """What each process holds, in files `RANK-TIME`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._times = folder, 0
        self.processes: dict[int, int] = dict(enumerate(MPI.COMM_WORLD.allgather(os.getpid())))
        signal.signal(signal.SIGUSR1, self._write)

    def _write(self, *_: Any) -> None:
        with replacing(str(self._folder / f"{MPI.COMM_WORLD.rank}-{self._times}")) as file:
            file.write(json.dumps(holdings()).encode())
        self._times += 1

    def take(self, store: kv.KVStore) -> None:
        store.barrier()
        if store.rank == 0:
            files = [self._folder / f"{rank}-{self._times}" for rank in self.processes]
            for process in self.processes.values():
                os.kill(process, signal.SIGUSR1)
            limit = time.monotonic() + LIMIT_S
            while not all(file.exists() for file in files):
                assert time.monotonic() < limit
                time.sleep(0.01)
            (offer,) = endpoint.OWN.told(whole=True)["offers"]
            assert len(offer["rows"]) == store.num_workers
        store.barrier()

    def kill(self, victim: int) -> None:
        """Let the first of the other ranks kill this one."""
        process = self.processes.pop(victim)
        if MPI.COMM_WORLD.rank == min(self.processes):
            os.kill(process, signal.SIGKILL)


def main(kind: str, folder: Path, steps: int, warm_up: int, deaths: str = "") -> None:
    notes = Notes(folder)
    victims = {int(step): int(rank) for rank, step in (one.split("@") for one in deaths.split(",") if one)}
    with kv.create(kind) as store:
        store.set_optimizer(optimizers.SGD(learning_rate=1.0))
        value, out, tiny, tiny_out = np.ones(50), np.zeros(50), np.ones(1), np.zeros(1)
        store.init("w", value)
        weight = mpikv.Parameter(np.zeros(50))
        trainer = mpikv.Trainer([weight], "adam", kvstore=store)
        pushed, chance = {"w": 0}, random.Random(store.rank)
        least = most = 0  # contributions to "w": of each round from those that were there after it, and before it
        for step in range(steps):
            if step in victims:
                notes.kill(victims[step])
            n_before = store.num_workers
            if step % NEW_KEY == 0:
                newest = str(step)
                store.init(newest, tiny)
                pushed[newest] = 0
            if chance.random() < WAITS:
                time.sleep(chance.random() * LONGEST_S)
            call = step % 5
            if call == 0:
                store.pushpull("w", value, out)
            elif call == 1:
                store.push("w", value)
                store.pull("w", out)
            elif call == 2:
                store.pushpull_async(["w", newest], [value, tiny], [out, tiny_out]).wait()
            elif call == 3:
                store.push(newest, tiny)
            else:
                weight.grad[...] = 1.0
                trainer.step(store.num_workers)
            pushed["w"] += call in (0, 1, 2)
            pushed[newest] += call in (2, 3)
            if call in (0, 1, 2):
                least, most = least + store.num_workers, most + n_before
            if (step + 1) % BARRIER == 0:
                store.barrier()
            if (step + 1) % SAVE == 0:
                store.save_optimizer_states(folder / "states")
            if step + 1 in (warm_up, steps):
                notes.take(store)
        for key, times in pushed.items():
            of_key = out if key == "w" else tiny_out
            store.pull(key, of_key)
            assert (of_key == of_key[0]).all(), (key, times, of_key)
            assert victims or of_key[0] == 1.0 - times * store.num_workers, (key, times, of_key)
        store.pull("w", out)
        if not store.session.synchronous:  # then the others have been in other steps
            least = most = pushed["w"] * store.num_workers
            most += pushed["w"] * len(victims)
        assert least <= 1.0 - out[0] <= most, (least, most, out)
        assert not store.session.synchronous or most <= least + len(victims), (least, most)
        if store.rank == 0:
            print(f"the trainer has made {trainer.steps} steps")
    assert endpoint.OWN.told(whole=True)["offers"] == []


main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
