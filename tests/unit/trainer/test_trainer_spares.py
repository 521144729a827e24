"""Trainings whose workers die, and spares that take their places, over thread ranks."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_modes import MESSAGES, Mode

import mpikv
from mpikv import kv
from mpikv.calls.keyless import CollectiveCalls
from mpikv.data import DataLoader, SplitSampler
from mpikv.errors import ConfigError, UnsupportedError
from mpikv.testing.continued import spawn_continued
from mpikv.transports.faulty import Deaths, Faults

EXAMPLES, BATCH, DIES_IN = 90, 2, 4
END_AT = 10  # a multiple of so many steps, when there are as many workers again
KINDS = "trainer", "own updates", "examples", "snapshots", "anew"


class Training:
    """kind: who counts steps; with 'own updates' the workers update, with 'examples' they tell how many they have; with
    'anew' each epoch has a sampler of its own, and one of the same examples was made before.
    """

    def __init__(self, store: Any, kind: str) -> None:
        self.store, self.kind, self.weight = store, kind, mpikv.Parameter(np.zeros(2))
        self.sampler: Any = SplitSampler.for_store(EXAMPLES, store, seed=3)
        self.snapshots: Any = None
        if kind == "snapshots":
            self.loader = DataLoader(np.arange(EXAMPLES), BATCH, sampler=self.sampler)
            self.snapshots = mpikv.Snapshots(store, {"weight": self.weight.data, "loader": self.loader})
            store.init("g", np.zeros(2))
            self.snapshots.resume()
        else:
            own = False if kind == "own updates" else None
            self.trainer = mpikv.Trainer([self.weight], "adam", {"learning_rate": 0.1}, store, update_on_kvstore=own)
            self.trainer.resume()
            self.loader = DataLoader(np.arange(EXAMPLES), BATCH, sampler=self.sampler)
        self.counts: Any = self.snapshots or self.trainer
        self.epoch = int(self.counts.examples // EXAMPLES)

    def load_anew(self) -> None:
        self.sampler = SplitSampler.for_store(EXAMPLES, self.store, seed=3)
        self.loader = DataLoader(np.arange(EXAMPLES), BATCH, sampler=self.sampler)

    def step(self, batch: Any) -> None:
        gradient = batch.mean() + self.weight.data
        if self.kind == "snapshots":
            self.store.pushpull("g", gradient)
            self.weight.data -= 0.1 * gradient
            self.snapshots.step()
            return
        self.weight.grad[...] = gradient
        if self.kind == "examples":
            self.trainer.step(examples=len(batch))
        else:
            self.trainer.step()  # which does not count examples: the sampler knows which epoch it is


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [Mode("dist_sync", 4), MESSAGES._replace(workers=4)], ids=["memory", "messages"])
@pytest.mark.parametrize("dead", [0, 2])
def test_a_training_has_as_many_workers_again(kind: str, mode: Mode, dead: int) -> None:
    deaths, lock, used = Deaths(), threading.Lock(), Counter[tuple[int, int]]()

    def body(store: Any) -> tuple[int, int, int, list[float], float]:
        is_spare, training = store.session.alone, Training(store, kind)
        while True:
            if kind == "anew":
                training.load_anew()
            training.loader.set_epoch(training.epoch)
            for batch in training.loader:
                steps = training.counts.steps
                if steps > DIES_IN and steps % END_AT == 0 and store.num_workers == 3:
                    weights, examples = training.weight.data.tolist(), training.counts.examples
                    return store.rank, store.session.number, steps, weights, examples
                if store.session.number == dead and not is_spare and training.counts.steps == DIES_IN:
                    deaths.die_in(dead, calls=1)
                    store.barrier()
                training.step(batch)
                with lock:
                    used.update((training.epoch, int(i)) for i in batch)
            training.epoch += 1
            if training.counts.examples:
                training.counts.examples = training.epoch * EXAMPLES

    found = mode.run_continued(body, deaths, lambda _: Faults(), spares=1)
    assert found[dead] is None
    results = [one for one in found if one is not None]
    assert sorted(rank for rank, *_ in results) == [0, 1, 2]
    assert all(rank == number for rank, number, *_ in results), "workers have their ranks again"
    (_,) = {(steps, tuple(weights), examples) for _, _, steps, weights, examples in results}
    assert max(used.values()) == 1, "no example is used twice in an epoch"


@pytest.mark.parametrize("pushes", [False, True])
def test_sums_are_divided_by_the_examples_of_those_who_are_there(pushes: bool) -> None:
    """Also in the step in which one dies, and where a gradient is pushed for the batch of the step before."""
    deaths = Deaths()

    def body(store: Any) -> list[float]:
        weight = mpikv.Parameter(np.zeros(2))
        trainer = mpikv.Trainer([weight], "sgd", {"learning_rate": 0.5}, store)
        for step in range(6):
            weight.grad[...] = 8.0  # over 4 examples
            if pushes:
                trainer.push_grad(weight, None if step else 4 * store.num_workers)
            if step == 3 and store.session.number == 1:
                deaths.die_in(1, calls=1)
                store.barrier()
            trainer.step(batch_size=4 * store.num_workers)
        return weight.data.tolist()  # type: ignore[no-any-return]

    first, dead, last = MESSAGES._replace(workers=3).run_continued(body, deaths, lambda _: Faults())
    assert dead is None
    assert first == last == [-6.0, -6.0]


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_asynchronous_training_goes_on(servers: int, victim: int, tmp_path: Path) -> None:
    """Each step of a survivor is in the weights once, and each of them has all rows that have changed. Worker 0, who
    may be another one by then, takes snapshots alone.
    """
    deaths = Deaths()

    def body(store: Any) -> tuple[list[float], list[float]]:
        weight, table = mpikv.Parameter(np.zeros(2)), mpikv.Parameter(np.zeros((3, 1)), sparse=True)
        trainer = mpikv.Trainer([weight, table], "sgd", {"learning_rate": 1.0, "lazy_update": True}, store)
        for step in range(6):
            if step == 3 and store.session.number == victim:
                members = store.session.members
                deaths.die_in(members.workers[victim], calls=1)
            weight.grad[...] = 4.0
            table.grad = mpikv.RowSparse([store.session.number], np.full((1, 1), 4.0), (3, 1))
            trainer.step(batch_size=4)
        store.barrier()
        weight.grad[...] = 0.0
        table.grad = mpikv.RowSparse([0], np.zeros((1, 1)), (3, 1))
        trainer.step(batch_size=4)
        return weight.data.tolist(), table.data[:, 0].tolist()

    settings: Any = {"snapshot_dir": str(tmp_path), "snapshot_s": 1e-6}
    found = Mode("dist_async", 3, servers).run_continued(body, deaths, lambda _: Faults(), **settings)
    assert found.pop(victim) is None
    assert found[0] == found[1]
    weights, rows = found[0]
    n = -rows.pop(victim)
    assert n in (2.0, 3.0, 4.0), "it has died in its third step, or its fourth"
    assert rows == [-6.0, -6.0]
    assert weights in ([-12.0 - n] * 2 for n in (2.0, 3.0, 4.0))
    assert max(int(file.name.split("-")[1]) for file in tmp_path.iterdir()) == 7


def test_a_spare_that_nobody_needs_ends() -> None:
    def body(store: Any) -> int:
        store.init("w", np.zeros(2))
        store.pushpull("w", np.ones(2))
        return store.num_workers  # type: ignore[no-any-return]

    assert spawn_continued("dist_sync", 4, body, config=mpikv.Config(spares=2, timeout_s=20)) == [2, 2, None, None]


def test_a_spare_takes_its_place_before_the_first_step() -> None:
    deaths, told = Deaths(), list[str]()

    def body(store: Any) -> None:
        trainer = mpikv.Trainer([mpikv.Parameter(np.zeros(2))], "sgd", kvstore=store)
        if store.session.alone:
            for call in (trainer.step, lambda: store.push("trainer0/0", np.ones(2))):
                with pytest.raises(ConfigError, match="takes a worker's place in resume") as raised:
                    call()
                told.append(str(raised.value))
            calls, mine = CollectiveCalls(store), np.array([7.0])
            made = [*calls.broadcast([mine]), *calls.allreduce([mine], "mean"), calls.allgather(mine)]
            assert [one.tolist() for one in made] == [[7.0], [7.0], [7.0, 7.0]]
        elif store.session.number == 1:
            deaths.die_in(1, calls=1)
        store.barrier()

    spawn_continued("dist_sync", 3, body, config=mpikv.Config(spares=1, timeout_s=20), deaths=deaths)
    assert len(told) == 2


def test_what_refuses_spares() -> None:
    mt, torch = pytest.importorskip("mpikv.torch"), pytest.importorskip("torch")

    def body(store: Any) -> None:
        net = torch.nn.Linear(2, 1)
        mpikv.Snapshots(store, {"net": net}).resume()
        with pytest.raises(UnsupportedError, match="DistributedModel: with spares"):
            mt.DistributedModel(net, store)
        with pytest.raises(UnsupportedError, match="LocalUpdates takes no spares"):
            mpikv.LocalUpdates(net, store, every=2, optimizer="sgd")

    spawn_continued("dist_sync", 3, body, config=mpikv.Config(spares=1, timeout_s=20))


def test_settings() -> None:
    with pytest.raises(ConfigError, match="2 spares among 2 ranks leave no worker"):
        spawn_continued("dist_sync", 2, lambda _: None, config=mpikv.Config(spares=2))
    with pytest.raises(ConfigError, match="set MPIKV_ON_FAILURE=continue, too"):
        kv.create("dist_sync", config=mpikv.Config(spares=1))
