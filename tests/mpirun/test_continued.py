"""MPIKV_ON_FAILURE=continue under Open MPI: ranks are killed, and the others go on with the same values.

`--full` makes a hundred random programs with one or two deaths. The number of a case is its seed.
"""

from __future__ import annotations

import pickle
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from continued_pushes import OPERATIONS
from jobs import Job, Mpi, mpirun, start, text
from pushes_apart import Ended, compare

HERE = Path(__file__).parent
SURVIVES = ["--with-ft", "ulfm"]
SPARES_FROM = 100  # seeds with spares
ASYNCHRONOUS = [200, 201, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(202, 250))]
SEEDS = [seed if seed in (0, 1, 2, 3, 100, 101) else pytest.param(seed, marks=pytest.mark.full) for seed in range(150)]


def made(mpi: Mpi, n: int, program: str, *words: Any, **env: str) -> Job:
    """A job that goes on after deaths, once it has ended."""
    env = {"MPIKV_ON_FAILURE": "continue", **env}
    argv = ["python", str(HERE / program), *map(str, words)]
    job = mpirun(n, argv, mpi=mpi, env=env, options=SURVIVES, timeout_s=200)
    assert job.segments_left == []
    return job


def run(mpi: Mpi, n: int, program: str, *words: Any, status: int | None = 0, **env: str) -> str:
    """The output of one that has ended with this status."""
    job = made(mpi, n, program, *words, **env)
    job.check(status)
    return job.output


def logs(folder: Path) -> dict[int, list[str]]:
    """What each worker has written, by its number at the start."""
    return {int(file.name): file.read_text().splitlines() for file in folder.iterdir() if file.name.isdigit()}


def spares_logs(folder: Path) -> dict[int, list[str]]:
    """What each spare has written, by the number of the worker whose place it took."""
    return {int(file.name.partition("-")[0]): file.read_text().splitlines() for file in folder.glob("*-spare")}


class Death:
    """A random job. victims: workers by their numbers, each with the operation in which it dies; and below 0 ranks of
    MPI, of any role, each with the time. last: operation.
    """

    def __init__(self, seed: int, last: int = 59, *, spares: bool = False) -> None:
        dice = random.Random(seed)
        self.n = dice.randint(3, 6)
        servers = dice.choice([0, 0, 0, 1, 2]) if self.n > 3 else 0
        self.workers = self.n - servers
        self.env = {"MPIKV_NUM_SERVERS": str(servers)} if servers else {}
        if dice.random() < 0.5:
            self.env["MPIKV_TEST_HOSTS"] = str(dice.randint(2, 3))
        if not servers and dice.random() < 0.4:
            self.env["MPIKV_ALGORITHM"] = dice.choice(["ring", "owners"])
        if dice.random() < 0.2:
            self.env["MPIKV_SHARED_MEMORY"] = "off"
        if dice.random() < 0.15:
            self.env["MPIKV_PROGRESS"] = "calls"

        def when() -> str:
            return f"{dice.randint(0, last)}+{dice.choice([0, 0, 4 * dice.random(), 30 * dice.random()]):.2f}"

        self.victims = {
            worker: f"{worker}@{when()}"
            for worker in dice.sample(range(self.workers), dice.randint(1, min(2, self.workers - 1)))
        }
        if servers and dice.random() < 0.7:  # in place of one of these, so that a worker is left
            self.victims.pop(next(iter(self.victims)))
            rank = dice.randrange(self.n)
            self.victims[-1 - rank] = f"r{rank}+{dice.choice([30, 300, 1000]) * dice.random():.0f}"
        self.spares = dice.randint(1, 2) if spares else 0
        if self.spares:
            self.env["MPIKV_SPARES"] = str(self.spares)
            if dice.random() < 0.3:  # any rank, at any time
                rank = dice.randrange(self.n + self.spares)
                self.victims[-1 - rank] = f"r{rank}+{dice.choice([30, 300, 1000]) * dice.random():.0f}"
                self.victims.pop(next(iter(self.victims)))
            self.n += self.spares

    def __str__(self) -> str:
        return f"{self.n} ranks, {self.env}, victims {', '.join(self.victims.values())}"


@pytest.mark.parametrize("seed", SEEDS)
def test_random_deaths(openmpi: Mpi, seed: int, tmp_path: Path) -> None:
    death = Death(seed, spares=seed >= SPARES_FROM)
    output = run(
        openmpi, death.n, "continued_program.py", seed, tmp_path, ",".join(death.victims.values()), **death.env
    )
    written = logs(tmp_path)
    ended = {worker: log for worker, log in written.items() if log and log[-1] == "end"}
    assert len(ended.keys() - death.victims.keys()) >= death.workers - len(death.victims), f"{death}: {output}"
    assert len({tuple(log) for log in ended.values()}) == 1, f"{death}: survivors have other values"
    survivors, before = sum(1 << worker for worker in ended), (1 << death.workers) - 1
    for line in next(iter(ended.values())):
        if line.endswith(" sum"):
            contributors = int(float.fromhex(line.split()[2]))
            assert survivors & ~contributors == 0, f"{death}: {line} lacks a survivor"
            assert contributors & ~before == 0, f"{death}: {line} has a worker that had gone"
            before = contributors if not death.spares else before
    for number, log in spares_logs(tmp_path).items():
        if log and log[-1] == "end":
            whole = next(iter(ended.values()))
            assert log == whole[len(whole) - len(log) :], f"{death}: a spare for worker {number} has other values"
            sums = [int(float.fromhex(line.split()[2])) for line in log if line.endswith(" sum")]
            assert all(total >> number & 1 for total in sums), f"{death}: worker {number} is missing"


@pytest.mark.parametrize("seed", ASYNCHRONOUS)
def test_random_deaths_of_asynchronous_stores(openmpi: Mpi, seed: int, tmp_path: Path) -> None:
    death = Death(seed, OPERATIONS - 1)
    victims = ",".join(death.victims.values())
    job = made(openmpi, death.n, "continued_pushes.py", seed, tmp_path, victims, **death.env)
    if len(death.victims) == 2 and "all of its owners have died" in job.output:
        job.check(None)
        return
    job.check()
    files = [file for file in tmp_path.iterdir() if file.name.isdigit()]
    assert len(files) >= death.workers - len(death.victims), f"{death}: {job.output}"
    compare({int(file.name): Ended(*pickle.loads(file.read_bytes())) for file in files})


LAST = """
import os
from mpikv import kv
store = kv.create("dist_sync")
if store.rank:
    os.kill(os.getpid(), 9)
store.barrier()
raise ValueError("mine")
"""


def test_an_error_of_the_last_one_is_the_status_of_the_job(openmpi: Mpi) -> None:
    env = {"MPIKV_ON_FAILURE": "continue"}
    job = mpirun(3, ["python", "-c", LAST], mpi=openmpi, env=env, options=SURVIVES)
    assert "ValueError: mine" in job.output
    job.check(1)


def test_ranks_that_are_suspended_are_given_up(openmpi: Mpi, tmp_path: Path) -> None:
    """Worker 0 and a server, while the others meet after a death. Without `mpikv launch`, which does it as well."""
    file = tmp_path / "enough"
    env = {"MPIKV_ON_FAILURE": "continue", "MPIKV_NUM_SERVERS": "1", "MPIKV_TIMEOUT_S": "12"}
    argv = ["python", str(HERE / "going_on.py"), str(file)]
    with start(5, argv, mpi=openmpi, env=env, options=SURVIVES, timeout_s=200) as running:
        workers = [int(running.wait_for(rf"worker {i} of 4 is \S+ (\d+)")[1]) for i in range(4)]
        ranks = [pid for pid in running.processes() if text(Path(f"/proc/{pid}/cmdline")).startswith(openmpi.python)]
        (server,) = set(ranks) - set(workers)
        running.kill_all([workers[0], server], signal.SIGSTOP)
        running.kill(workers[2])
        running.wait_for("mpikv: 3 ranks are gone: 2 go on")
        file.touch()
    job = running.result
    job.check()
    assert job.output.count("ends as one of 2") == 2
    for pid in (workers[0], server):
        assert f"mpikv: process {pid} on " in job.output
    assert job.segments_left == []


@pytest.mark.parametrize("case", ["mean", "examples-own", "examples-rows"])
@pytest.mark.parametrize("victims", ["1@9", "0@12+3,2@20+1"])
def test_a_training_goes_on(openmpi: Mpi, case: str, victims: str, tmp_path: Path) -> None:
    """With the mean over who is there, and with no example used twice, or left out but those of the dead."""
    run(openmpi, 4, "continued_trainer.py", tmp_path, case, victims)
    written, dead = logs(tmp_path), {int(one.partition("@")[0]) for one in victims.split(",")}
    ends = {worker: log[-1] for worker, log in written.items() if log[-1].startswith("end ")}
    assert ends.keys() == set(range(4)) - dead
    (end,) = set(ends.values())
    assert end.endswith(f" {len(dead)}")
    used = Counter(line for log in written.values() for line in log if line.startswith("example "))
    assert set(used.values()) == {1}
    # Of each of the dead at most the batch it was at, the two loaded ahead, and what is no full batch for all any more.
    assert sum(used.values()) >= 240 - len(dead) * (3 * 2 + 6), used


@pytest.mark.parametrize("case", ["mean", "examples-own", "mean-rows"])
@pytest.mark.parametrize(("victims", "spares"), [("1@9", 1), ("0@12+3,2@20+1", 2), ("0@9,-0@15", 2)])
def test_a_spare_takes_a_dead_ones_place(openmpi: Mpi, case: str, victims: str, spares: int, tmp_path: Path) -> None:
    """With its states and its part of the data: the number of workers stays."""
    run(openmpi, 3 + spares, "continued_trainer.py", tmp_path, case, victims, MPIKV_SPARES=str(spares))
    written, of_spares = logs(tmp_path), spares_logs(tmp_path)
    ends = [log[-1].split(" [")[:3] for log in (*written.values(), *of_spares.values()) if log[-1].startswith("end ")]
    assert len(ends) == 3, "as many workers end as have begun"
    assert all(end == ends[0] for end in ends)
    used = Counter(line for log in (*written.values(), *of_spares.values()) for line in log if "example" in line)
    assert set(used.values()) == {1}
    # Of each death at most what the dead had in its batch, and in those of the steps until a spare had come.
    assert sum(used.values()) >= 240 - victims.count("@") * 2 * 4, used


@pytest.mark.parametrize("case", ["model", "optimizer"])
@pytest.mark.parametrize("victims", ["1@9", "0@12+3,2@20+1"])
def test_a_model_of_pytorch_goes_on(openmpi: Mpi, case: str, victims: str, tmp_path: Path) -> None:
    """With the mean over who is there. In the step in which worker 0 dies the others keep their own buffers."""
    pytest.importorskip("torch")
    run(openmpi, 4, "continued_torch.py", tmp_path, case, victims)
    dead = {int(one.partition("@")[0]) for one in victims.split(",")}
    first, *others = [log for worker, log in logs(tmp_path).items() if worker not in dead]
    assert len(others) == 3 - len(dead)
    assert first[-1] == f"end {4 - len(dead)} {len(dead)}"
    assert [line.split()[2] for line in first[:-1]] == ["1.0"] * 30
    for other in others:
        differ = [a for a, b in zip(first, other, strict=True) if a != b]
        assert len(differ) <= (case == "model" and 0 in dead), differ


@pytest.mark.parametrize("case", ["model", "optimizer"])
@pytest.mark.parametrize(("victims", "spares"), [("1@9", 1), ("0@12+3,2@20+1", 2), ("0@9,-0@15", 2)])
def test_a_spare_goes_on_with_a_model_of_pytorch(
    openmpi: Mpi, case: str, victims: str, spares: int, tmp_path: Path
) -> None:
    """With the others' weights, states and numbers. In a step in which worker 0 dies they keep their own buffers."""
    pytest.importorskip("torch")
    run(openmpi, 3 + spares, "continued_torch.py", tmp_path, case, victims, MPIKV_SPARES=str(spares))
    ended = [log for log in (*logs(tmp_path).values(), *spares_logs(tmp_path).values()) if log[-1].startswith("end 3 ")]
    assert len(ended) == 3, "as many workers end as have begun"
    first, *others = sorted(ended, key=len, reverse=True)
    assert [line.split()[2] for line in first[:-1]] == ["1.0"] * 30
    for other in others:
        differ = {*other} - {*first}
        assert len(differ) <= (case == "model") * victims.count("0@"), differ
