"""Snapshots: when they are taken, on which disks, which one is read, and objects of any kind in them.

That a Trainer goes on from them with the same bits in every mode is in test_trainer_resume.py.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from store_modes import ONE_HOST, TWO_HOSTS, Mode

import mpikv
from mpikv import ConfigError, LocalUpdates, Parameter, Snapshots, StatesFileError, Trainer, UnsupportedError
from mpikv.common.snapshot_names import ShareName, in_folder, parse, whole
from mpikv.data import DataLoader, SplitSampler
from mpikv.errors import MpikvError
from mpikv.optimizers import archive
from mpikv.testing.ranks import RankError
from mpikv.trainer import generations
from mpikv.trainer.cadence import Cadence
from mpikv.trainer.generations import Generations

# --- when


@given(st.floats(1e-3, 5), st.floats(1e-3, 5), st.integers(1, 400), st.integers(0, 2**32))
def test_snapshots_come_in_time_and_workers_ask_seldom(step_s, later_s, change, seed):
    """Also where steps become slower or faster after some."""
    every_s, now = 30.0, 0.0
    random = np.random.default_rng(seed)
    workers = [Cadence(every_s, now), Cadence(every_s, 0.0)]
    taken, asked = [0.0], 0
    for step in range(600):
        mean_s = step_s if step < change else later_s
        now += mean_s * random.uniform(0.9, 1.1)
        asks = [worker.ask() for worker in workers]
        assert len(set(asks)) == 1
        if asks[0]:
            asked += 1
            due, ask_in = workers[0].decide(now)
            for worker, at in zip(workers, (now, -1.0), strict=True):
                worker.decided(due, ask_in, at)
            if due:
                taken.append(now)
    slower = max(1.0, later_s / step_s)
    for before, after in itertools.pairwise(taken):
        assert every_s - 5.5 <= after - before <= every_s * slower + 3 * max(step_s, later_s)
    assert asked <= 600 * min(1.0, 1 / (every_s / max(step_s, later_s) / 8)) + 12 * len(taken) + 40


# --- names


def test_names_say_what_belongs_together():
    share = ShareName(40, "0123456789abcdef", 1, 3)
    assert parse(str(share)) == share
    assert [parse(name) for name in ("x", ".mpikv-1.tmp", f"{share}.tmp", "step-1-xyz-0-of-1.snapshot")] == [None] * 4
    of_40 = [share._replace(worker=worker) for worker in range(3)]
    of_50 = [ShareName(50, "f" * 16, worker, 2) for worker in (0, 1)]
    assert whole([*of_40, *of_50]) == [of_50[0], of_40[0]]
    assert whole([*of_40, of_50[1]]) == [of_40[0]]
    assert whole([of_40[0], of_40[2], share._replace(snapshot="a" * 16)]) == []


# --- on which disks


FOUR = Mode("dist_sync", 4, hosts="aabc")


def taken(folders: Path, mode: Mode, steps: int, shares=lambda store: {"of": store.rank}, **changes) -> list:
    """What each worker has read, None where there was nothing, before it took snapshots of some steps.

    folders: has one for each host.
    """

    def body(store):
        host = store.session.hosts[store.rank]
        one = Generations(store.session, lambda: shares(store), 1e-6, str(folders / host))
        found = one.read()
        for step in range(1, steps + 1):
            one.step(step)
        if steps:
            one.finish()
        return None if found is None else [share["of"] for share in found]

    return mode.run(body, **changes)


def test_the_loss_of_one_host_loses_no_share(tmp_path):
    """Each share lies on its own host and on the next one; of two generations each folder has as many."""
    assert taken(tmp_path, FOUR, 3) == [None] * 4
    hosts = {"localhost": {0, 1, 3}, "b": {2, 0, 1}, "c": {3, 2}}
    for host, workers in hosts.items():
        there = in_folder(str(tmp_path / host))
        assert {(one.step, one.worker) for one in there} == {(step, worker) for step in (2, 3) for worker in workers}
    for lost in hosts:
        copied = tmp_path / f"without {lost}"
        shutil.copytree(tmp_path, copied, ignore=lambda *_, lost=lost: [lost, "without*"])
        assert taken(copied, FOUR, 0) == [[0, 1, 2, 3], [], [], []]
        found = taken(copied, Mode("dist_sync", 2), 0)  # on the first host alone, whose disk is not enough
        assert found == [None] * 2


def test_what_is_damaged_is_passed_over(tmp_path, capfd):
    """First the other copy is read, and where there is none, the snapshot before."""
    taken(tmp_path, FOUR, 3)
    damaged = [one for host in ("localhost", "b") for one in (tmp_path / host).iterdir() if "3" in one.name[5:13]]
    damaged = [one for one in damaged if parse(one.name).worker == 0]
    assert len(damaged) == 2
    warnings = 0
    for count, file in zip((2, 1), damaged, strict=True):  # workers whose disk it is
        file.write_bytes(file.read_bytes()[:-3])
        (tmp_path / "c" / ".mpikv-0123.tmp").touch()  # of a writer that was killed
        assert taken(tmp_path, FOUR, 0) == [[0, 1, 2, 3], [], [], []]
        warnings += count
        assert capfd.readouterr().err.count("mpikv: warning: a share of a snapshot cannot be used") == warnings
        assert not (tmp_path / "c" / ".mpikv-0123.tmp").exists()


def test_a_full_disk_leaves_the_snapshot_before(tmp_path, monkeypatch, capfd):
    real, full = generations.replacing, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def replacing(path):
        if parse(os.path.basename(path))[:3:2] in ((2, 1), (3, 1)):
            raise full
        return real(path)

    monkeypatch.setattr(generations, "replacing", replacing)

    def body(store):
        one = Generations(store.session, lambda: {"of": store.rank}, 1e-6, str(tmp_path))
        for step in range(1, 4):
            one.step(step)
        with pytest.raises(OSError, match=r"worker 1 could not write its share of a snapshot: .*No space left"):
            one.finish()

    ONE_HOST.run(body)
    assert [one.step for one in whole(in_folder(str(tmp_path)))] == [1]
    assert capfd.readouterr().err.count("could not write its share") == 1  # not for every snapshot


def test_a_share_that_cannot_be_made_is_told_to_all(tmp_path):
    def share(store):
        return {"of": 0, **({"wrong": np.ones(2, complex)} if store.rank == 1 else {})}

    def body(store):
        one = Generations(store.session, lambda: share(store), 1e-6, str(tmp_path))
        with pytest.raises(UnsupportedError, match=r"worker 1: wrong has dtype complex128"):
            one.step(1)

    ONE_HOST.run(body)
    assert os.listdir(tmp_path) == []


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"MPIKV_SNAPSHOT_DIR='.*file': File exists"):
        Trainer([Parameter(np.ones(2))], "sgd", kvstore=mpikv.kv.create("local", config=config(tmp_path / "file")))


def config(folder: Path) -> mpikv.Config:
    return mpikv.Config(snapshot_dir=str(folder), snapshot_s=1e-6)


# --- trainers


def test_a_program_that_begins_anew_is_told_of_the_snapshot(tmp_path, capfd):
    for resumes, told in ((False, 0), (True, 0), (False, 1)):
        trainer = Trainer([Parameter(np.ones(2))], "sgd", kvstore=mpikv.kv.create("local", config=config(tmp_path)))
        assert not resumes or trainer.resume() == 1
        trainer.step(1)
        trainer.kvstore.close()
        assert capfd.readouterr().err.count("this program begins anew: call resume() before the first step") == told


def test_no_training_is_told_of_its_own_snapshot(tmp_path, capfd):
    """Also one that counts rounds, and takes several before its first one has ended."""

    def body(store):
        one = Generations(store.session, lambda: {"of": store.rank}, 1e-6, str(tmp_path))
        for _ in range(2):
            one.step(0)
            one.finish()

    ONE_HOST.run(body)
    assert "begins anew" not in capfd.readouterr().err


def test_of_a_stop_file_and_a_snapshot_the_later_one_counts(tmp_path):
    stop_file = tmp_path / "stop"
    settings = config(tmp_path / "snapshots").with_(stop_file=str(stop_file))

    def run(steps: int, *, save: bool = False) -> int:
        with mpikv.kv.create("local", config=settings) as store:
            trainer = Trainer([Parameter(np.ones(2))], "sgd", kvstore=store)
            begun = trainer.resume()
            for _ in range(steps):
                trainer.step(1)
            if save:
                trainer.steps += 5
                trainer.save(stop_file)
            return begun

    assert [run(2), run(1, save=True), run(1), run(0)] == [0, 2, 8, 9]


def test_several_trainers_of_a_store_are_not_saved(tmp_path, capfd):
    with mpikv.kv.create("local", config=config(tmp_path)) as store:
        for trainer in [Trainer([Parameter(np.ones(2))], "sgd", kvstore=store) for _ in range(2)]:
            trainer.step(1)
    assert os.listdir(tmp_path) == []
    assert "several trainers share the store" in capfd.readouterr().err


@pytest.mark.parametrize("delay", [0, 1])
def test_local_updates_go_on_in_the_middle_of_a_round(delay, tmp_path):
    def run(first: int, last: int, **changes):
        def body(store):
            params = {"w": Parameter(np.zeros(3)), "v": Parameter(np.zeros(2))}
            own = Trainer(params, "adam", {"learning_rate": 0.1}, kvstore=None)
            local = LocalUpdates(params, store, every=4, outer="nesterov", optimizer=own, delay=delay)
            assert local.resume() == first // 4
            assert own.steps == first
            for step in range(first, last):
                for i, one in enumerate(params.values()):
                    one.grad[...] = np.sin(step + i + store.rank)
                own.step(1)
                local.step()
            return [one.data.tobytes() for one in params.values()]

        return ONE_HOST.run(body, **changes)

    saved = {"snapshot_dir": str(tmp_path), "snapshot_s": 1e-6}
    run(0, 6, **saved)
    assert run(6, 11, **saved) == run(0, 11)


# --- objects of any kind


class Counting:
    """An object with a state of its own on every worker."""

    def __init__(self, state) -> None:
        self.state = state

    def state_dict(self):
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state) -> None:
        self.state = state


SEEDED = threading.Lock()  # PyTorch's generator is one of all threads


def module_and_optimizer(seed: int):
    with SEEDED:
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    return module, torch.optim.AdamW(module.parameters(), lr=0.01, betas=(0.8, 0.9))


def test_a_module_its_optimizer_and_arrays_go_on_bit_for_bit(tmp_path):
    """What is equal on all workers is written once; statistics of batches, and what workers count, by each."""

    def run(first: int, last: int):
        def body(store):
            module, optimizer = module_and_optimizer(first)
            weights, own = np.zeros(1000, np.float32), Counting({"numbers": (store.rank, None), 7: [np.ones(2)]})
            objects = {"module": module, "optimizer": optimizer, "weights": weights, "own": own}
            snapshots = Snapshots(store, objects, folder=str(tmp_path))
            assert (snapshots.resume(), snapshots.examples) == (first, first * 8)
            if first:
                assert own.state["numbers"] == (store.rank, None)
                assert own.state[7][0].tolist() == [1, 1]
            for step in range(first, last):
                x = torch.from_numpy(np.random.default_rng([step, store.rank]).standard_normal((4, 5)).astype("f4"))
                optimizer.zero_grad()
                module(x).square().mean().backward()
                for i, one in enumerate(module.parameters()):
                    store.init(str(i), np.zeros(one.shape, np.float32)) if step == first else None
                    store.pushpull(str(i), one.grad.numpy())
                optimizer.step()
                weights += step
                snapshots.step(examples=8)
            if last == 3:
                snapshots.save()
            return [one.numpy().tobytes() for one in module.state_dict().values()], weights.tobytes()

        return TWO_HOSTS.run(body)

    whole_run = run(0, 5)
    shutil.rmtree(tmp_path)
    run(0, 3)
    sizes = Counter({one.worker: os.stat(tmp_path / str(one)).st_size for one in in_folder(str(tmp_path))})
    assert max(sizes.values()) < 0.8 * sum(sizes.values())
    assert [stats for stats, _ in run(3, 5)] == [stats for stats, _ in whole_run]


@pytest.mark.parametrize("last", ["drop", "uneven"])
@pytest.mark.parametrize(("before", "after"), [(3, 3), (3, 2), (2, 5)])
def test_no_example_of_an_epoch_is_used_twice_or_left_out(before, after, last, tmp_path):
    """With another number of workers; but for those at the end that do not divide, which 'drop' leaves out."""
    length, size = 61, 4

    def body(store, stop):
        loader = DataLoader(np.arange(length), size, sampler=SplitSampler.for_store(length, store, seed=3, last=last))
        snapshots = Snapshots(store, {"loader": loader}, folder=str(tmp_path))
        snapshots.resume()
        loader.set_epoch(2)
        used = []
        for batch in loader:
            used += batch.tolist()
            snapshots.step()
            if snapshots.steps == stop:
                snapshots.save()
                break
        return used

    first = [*itertools.chain(*Mode("dist_sync", before).run(lambda store: body(store, 3)))]
    second = [*itertools.chain(*Mode("dist_sync", after).run(lambda store: body(store, -1)))]
    counts = Counter(first + second)
    assert len(first) == before * 3 * size
    assert set(counts.values()) == {1}
    assert length - len(counts) <= (after - 1 if last == "drop" else 0)


def test_other_numbers_of_workers_take_the_states_in_turn(tmp_path):
    def body(store):
        own = Counting({"rank": store.rank, "array": np.full(3, store.rank), "all": np.arange(9)})
        snapshots = Snapshots(store, {"own": own}, folder=str(tmp_path))
        if snapshots.resume() == 0:
            snapshots.step()
            snapshots.save()
        return own.state["rank"], own.state["array"].tolist(), own.state["all"].tolist()

    Mode("dist_sync", 2).run(body)
    of = [(rank, [rank] * 3, list(range(9))) for rank in (0, 1)]
    assert Mode("dist_sync", 3).run(body) == [of[0], of[1], of[0]]
    assert Mode("local", 1).run(body) == of[:1]


ARRAYS = st.builds(lambda n, kind: np.arange(n).astype(kind), st.integers(0, 3), st.sampled_from(["f4", "i8", "?"]))
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | ARRAYS | ARRAYS.map(torch.from_numpy)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.integers(0, 3) | st.sampled_from(["tuple", "array", "a/b"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def seen(value):
    """A value with its types, to be compared."""
    if isinstance(value, dict):
        return dict, [(seen(key), seen(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [seen(one) for one in value]
    if isinstance(value, torch.Tensor):
        return torch.Tensor, seen(value.numpy())
    return (value.dtype, value.tolist()) if isinstance(value, np.ndarray) else (type(value), value)


@given(STATES)
def test_states_come_back_as_they_were(state):
    assert seen(archive.from_bytes(archive.to_bytes("x", {"state": state}), "x", "x")["state"]) == seen(state)


@pytest.mark.parametrize("wrong", [RuntimeError("no state"), {"a": object()}, {"a": np.ones(2, complex)}])
def test_a_state_that_cannot_be_saved_is_told_to_all(wrong, tmp_path):
    def body(store):
        own = Counting(wrong if store.rank else {})
        snapshots = Snapshots(store, {"own": own}, every_s=1e-6, folder=str(tmp_path))
        with pytest.raises(UnsupportedError, match="worker 1: "):
            snapshots.step()

    ONE_HOST.run(body)


def test_wrong_calls(tmp_path):
    store, array = mpikv.kv.create("local"), np.zeros(2)
    with pytest.raises(TypeError, match="Snapshots: store is a store"):
        Snapshots("local", {})
    with pytest.raises(TypeError, match=r"objects\['a'\] is an array, or something with state_dict"):
        Snapshots(store, {"a": 3})
    nowhere = Snapshots(store, {"a": array})
    nowhere.step()
    with pytest.raises(MpikvError, match="resume after a step"):
        nowhere.resume()
    with pytest.raises(ConfigError, match="there is no folder; set MPIKV_SNAPSHOT_DIR"):
        nowhere.save()
    with pytest.raises(RankError, match="Snapshots need a synchronous store"):
        Mode("dist_async", 1).run(lambda store: Snapshots(store, {}))
    Snapshots(store, {"a": array}, folder=str(tmp_path)).save()
    for objects, text in (({"b": array}, r"is of the objects \['a'\], not of \['b'\]"), ({"a": np.zeros(3)}, "shape")):
        with pytest.raises(StatesFileError, match=text):
            Snapshots(store, objects, folder=str(tmp_path)).resume()
