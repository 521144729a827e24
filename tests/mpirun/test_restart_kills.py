"""`mpikv launch --restarts` under attack: any process of a job is killed at any moment, and the job ends well.

A synchronous one ends with the bits of a run that nobody has killed. A random case is made of its seed alone, which
stands in the name of the test: `-k "random_kills and mpich-17"` makes it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from jobs import Job, Mpi, Running, text
from test_launch import launched, parent

from mpikv.commands.launch.processes import JOB, segments

PROGRAM = str(Path(__file__).with_name("killed_program.py"))
LIMIT_S = 240
POLL_S = 0.002
LEVELS = {"process above": 1, "process of mpirun's": 2, "daemon": 3}  # above a rank; Open MPI's daemon here is mpirun
VICTIMS = ("worker", "server", "several", "mpirun", *LEVELS)
# With how many seconds may pass after it
MOMENTS = {"start": 1.0, "resume": 0.05, "step": 0.5, "snapshot": 0.0, "close": 0.05}


class Training(NamedTuple):
    """What is trained, and how. hosts: pretended ones. take: what servers take of long keys."""

    way: str
    workers: int
    servers: int
    hosts: int = 0
    store: str = "dist_sync"
    codec: str = ""
    take: str = "auto"

    @property
    def env(self) -> dict[str, str]:
        cut = {"MPIKV_BIGARRAY_BOUND": "1000", "MPIKV_SERVERS_TAKE": self.take, "MPIKV_SERVER_PLACEMENT": "last"}
        return {**cut, "MPIKV_TEST_HOSTS": str(self.hosts), "MPIKV_TIMEOUT_S": "120"}

    def words(self, folder: Path, kills: int = 0) -> list[str]:
        given = {"way": self.way, "store": self.store, "codec": self.codec, "kills": kills, "folder": str(folder)}
        return ["-n", str(self.workers), "-s", str(self.servers), "python", PROGRAM, json.dumps(given)]


TRAININGS = [
    Training("trainer", 2, 0),
    Training("trainer", 4, 0, 2),
    Training("trainer", 3, 1),
    Training("trainer", 3, 2, 4, take="0.4"),
    Training("trainer", 3, 0, 3, codec="2bit"),
    Training("trainer", 2, 1, store="dist_async"),
    Training("trainer", 3, 0, store="dist_async"),
    Training("clipping", 3, 0, 2),
    Training("local", 2, 0),
    Training("local", 3, 1, 2, codec="int8"),
    Training("snapshots", 5, 0, 3),
    Training("snapshots", 2, 1, 2),
]


class Kill(NamedTuple):
    """victims: the ranks that are killed together, or below the process `of` that is killed."""

    of: str
    victims: list[str]
    moment: str
    after_s: float

    @property
    def words(self) -> str:
        """How the launcher says it, as a regular expression."""
        if self.moment == "start":  # a rank that has not reported yet
            return ""
        names = "|".join(victim.replace("-", " ") for victim in self.victims)
        killed = r"was killed by signal 9 \(SIGKILL\); "
        others = {"mpirun": f"mpirun {killed}", **dict.fromkeys(LEVELS, ".*; ")}  # these end the others, who may say so
        return others.get(self.of, rf"({names}) on \S+ {killed}")


class Case(NamedTuple):
    training: Training
    snapshot_s: float
    load: bool  # beside it
    kills: list[Kill]  # of a run each


def a_kill(random: Random, training: Training, of: str) -> Kill:
    workers = [f"worker-{i}" for i in range(training.workers)]
    servers = [f"server-{i}" for i in range(training.servers)] or workers
    among = {"worker": workers, "server": servers}.get(of, [*{*workers, *servers}])
    victims = random.sample(sorted(among), random.randint(2, len(among)) if of == "several" else 1)
    moment = random.choice([*MOMENTS])
    return Kill(of, victims, moment, random.uniform(0, MOMENTS[moment]))


def case_of(seed: int) -> Case:
    random = Random(seed)
    training, kinds = random.choice(TRAININGS), [VICTIMS[seed % len(VICTIMS)]]
    kinds += random.choices(VICTIMS, k=random.random() < 0.4)
    kills = [a_kill(random, training, of) for of in kinds]
    return Case(training, random.choice([1e-6, 0.05, 0.3]), random.random() < 0.3, kills)


class Attack:
    """What happens to a job under way. folder: its own. ranks: how many it has."""

    def __init__(self, running: Running, folder: Path, ranks: int) -> None:
        self._running, self._folder, self._ranks = running, folder, ranks
        self._runs: list[str] = []  # the numbers of those that were killed
        self.shared: set[str] = set()  # files of shared memory of runs of which some rank was left

    def kill(self, kill: Kill) -> None:
        """Kill the run under way, at its moment."""
        run = len(self._runs)
        if kill.moment != "start":
            reached = kill.moment if kill.moment in ("resume", "close") else r"(step \d+|close)"
            self._running.wait_for(rf"run {run} at {reached}\n", LIMIT_S)
        self._wait_until(lambda: self._find(kill)[1])
        number, pids = self._find(kill)
        if kill.moment == "snapshot":
            self._wait_until(lambda: self._is_written() or f"run {run} at close\n" in self._running._text["stdout"])
        time.sleep(kill.after_s)
        if kill.moment != "start" and len(kill.victims) < self._ranks:  # else nobody may be left who knows their names
            self.shared |= segments(self._running.processes())
        self._running.kill_all(pids)
        self._runs.append(number)
        (self._folder / f"killed-{run}").touch()

    def _is_written(self) -> bool:
        return any(self._folder.glob("mpikv-*-snapshots/.mpikv-*.tmp"))

    def _find(self, kill: Kill) -> tuple[str, list[int]]:
        """The number of the run under way, and what of it is to be killed: none where not all are there yet."""
        number, names = "", dict[int, str]()
        for pid in self._running.processes():
            found = re.search(rf"\0{JOB}=(\w+)/([\w-]+)\0", text(Path(f"/proc/{pid}/environ")))
            if found and found[1] not in self._runs:
                number, names[pid] = found[1], found[2]
        if kill.of == "mpirun":
            pids = [pid for pid in names if parent(pid) == self._running._process.pid]
        else:
            pids = [pid for pid, name in names.items() if name in kill.victims and names.get(parent(pid)) != name]
            for _ in range(LEVELS.get(kill.of, 0)):
                pids = [parent(pid) for pid in pids]
        pids = [pid for pid in pids if pid in names]
        return number, pids if len(pids) == len(kill.victims) else []

    def _wait_until(self, reached: Callable[[], object]) -> None:
        until = time.monotonic() + LIMIT_S
        while not reached():
            assert self._running._process.poll() is None, self._running._text
            assert time.monotonic() < until, self._running._text
            time.sleep(POLL_S)


@contextlib.contextmanager
def load(busy: bool) -> Iterator[None]:
    """Two processes that compute beside what is tested, where it is so."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * busy)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def attacked(mpi: Mpi, case: Case, folder: Path) -> Job:
    """The job of a case, which has ended well and left nothing; how it has gone on is what the launcher has said."""
    training = case.training
    env = {**training.env, "MPIKV_SNAPSHOT_S": str(case.snapshot_s), "TMPDIR": str(folder)}
    words = ["--restarts", str(len(case.kills)), *training.words(folder, len(case.kills))]
    with load(case.load), launched(mpi, *words, env=env, limit_s=LIMIT_S) as running:
        attack = Attack(running, folder, training.workers + training.servers)
        for kill in case.kills:
            attack.kill(kill)
        running._process.wait(LIMIT_S)
        shared = [*filter(os.path.exists, attack.shared)]
    job, said = running.result, f"{case}\n{running.result.output}"
    job.check()
    assert list(folder.glob("mpikv-*")) == [], said
    assert shared == [], said
    first, *runs = re.split(r"starting again, \d+ of \d+, ", job.stderr)
    assert len(runs) == len(case.kills), said
    for kill, ended in zip(case.kills, (first, *runs), strict=False):
        assert re.search(rf"^mpikv launch: .*{kill.words}\Z", ended, re.M), f"{kill}\n{said}"
    promised, found = (re.search(rf"{from_} step (\d+)", runs[-1]) for from_ in ("^from", r"mpikv: goes on from"))
    assert (promised and promised[1]) == (found and found[1]), said
    return job


def weights(job: Job) -> list[str]:
    return re.findall(r"weights (\w+)", job.output)[-1:]


Undisturbed = Callable[[Mpi, Training], list[str]]


@pytest.fixture(scope="session")
def undisturbed() -> Undisturbed:
    """The weights of a training that nobody kills."""
    known: dict[tuple[str, Training], list[str]] = {}

    def found(mpi: Mpi, training: Training) -> list[str]:
        if (mpi.kind, training) not in known:
            with launched(mpi, *training.words(Path("/")), env=training.env, limit_s=LIMIT_S) as running:
                pass
            running.result.check()
            known[mpi.kind, training] = weights(running.result)
        return known[mpi.kind, training]

    return found


def test_each_kind_of_process_is_killed(mpi: Mpi, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """One after another, each in a run of its own."""
    training = Training("trainer", 2, 1)
    victims = {"server": ["server-0"], "several": ["server-0", "worker-0"]}
    kills = [Kill(of, victims.get(of, ["worker-1"]), "step", 0.0) for of in VICTIMS[:-2]]
    assert weights(attacked(mpi, Case(training, 1e-6, False, kills), tmp_path)) == undisturbed(mpi, training)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.full) for seed in range(50)])
def test_random_kills(mpi: Mpi, seed: int, tmp_path: Path, undisturbed: Undisturbed) -> None:
    case = case_of(seed)
    assert weights(attacked(mpi, case, tmp_path)) == undisturbed(mpi, case.training)
