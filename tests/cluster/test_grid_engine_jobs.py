"""Jobs of a real Grid Engine with the scripts of scripts/sge: where ranks run, what they learn, and how jobs end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import grid_engine as grid_engine_module
import jobs
import namespaces
import pytest
import training
from batch_jobs import WHEREABOUTS, Ended, changed, check_map, looping, said, stopped_together
from grid_engine import GridEngine
from launching import run
from needs import find

SCRIPTS = jobs.ROOT / "scripts" / "sge"
ENDED = re.compile(r"^\0*mpikv: job \d+ ends with status (\d+)", re.M)  # Open MPI prints bytes 0
full = pytest.mark.cluster_full


class Batch:
    """A submitted script. options: of qsub."""

    def __init__(  # noqa: PLR0917 - a job has that many parts
        self,
        cluster: GridEngine,
        mpi: jobs.Mpi,
        folder: Path,
        options: Sequence[str],
        program: Sequence[str],
        script: Path = SCRIPTS / "train.sh",
        **variables: str,
    ) -> None:
        self._cluster = cluster
        env = training.environment(mpi, folder, **variables)
        named = ",".join(name for name in env if name in variables or name.startswith("OMPI_"))
        given = ["-v", named] if named else []
        line = ["qsub", "-terse", "-o", f"{folder}/job-$JOB_ID.out", *given, *options, str(script), *program]
        done = cluster.call(*line, env=env, cwd=folder)
        assert done.stdout.strip().isdigit(), done
        self._folder = folder
        self.follow(done.stdout.strip())

    def follow(self, number: str) -> None:
        """Go on with another job: a copy that this one has left."""
        self.number = number
        self.out = self._folder / f"job-{number}.out"

    def running(self) -> bool:
        return self._cluster.state(self.number) != ""

    def said(self, pattern: str, times: int = 1) -> list:
        """Wait for so many matches in the output."""
        return said(self.out, pattern, times, running=self.running)

    def ended(self, timeout_s: float = 60) -> Ended:
        """Wait for its end. Its status is the one that its script has said, -1 if it came to no end by itself."""
        try:
            self._cluster.wait_for(self.number, "", timeout_s)
        except AssertionError as error:
            self._cluster.call("qdel", "-f", self.number)
            text = self.out.read_text() if self.out.exists() else ""
            raise AssertionError(f"{error}\n{text}\n{self._cluster.logs()}") from None
        text = self.out.read_text() if self.out.exists() else ""
        found = ENDED.findall(text)
        return Ended(int(found[-1]) if found else -1, text)


# ---- where ranks run


@pytest.mark.parametrize(
    ("kind", "script", "environment", "slots", "expected"),
    [
        pytest.param("openmpi", "train.sh", "mpi", 4, [2, 2], marks=full),
        pytest.param("mpich", "train.sh", "mpi", 4, [2, 2], marks=full),
        pytest.param("openmpi", "train.sh", "mpi_rr", 4, [2, 1, 1], marks=full),
        pytest.param("mpich", "train.sh", "mpi_rr", 4, [2, 1, 1], marks=full),
        pytest.param("openmpi", "train-servers.sh", "mpi_rr", 6, [2, 2, 2], marks=full),
        pytest.param("mpich", "train-servers.sh", "mpi", 4, [2, 2], marks=full),
        pytest.param("mpich", "train-servers.sh", "mpi_rr", 6, [2, 2, 2], marks=full),
        pytest.param("mpich", "train.sh", "mpi_one", 2, [2], marks=full),
    ],
)
def test_ranks_and_servers(  # noqa: PLR0917
    grid_engine: GridEngine, kind: str, script: str, environment: str, slots: int, expected: list[int], tmp_path: Path
) -> None:
    with grid_engine.hosts.nothing_left():
        options = ["-pe", environment, str(slots)]
        job = Batch(grid_engine, find(kind), tmp_path, options, WHEREABOUTS, SCRIPTS / script).ended()
    assert job.status == 0, job.output
    hosts: list[str] = job.found["hosts"]  # type: ignore[assignment]
    given = dict.fromkeys(hosts)  # Grid Engine's choice, in its order
    assert hosts == [host for host in given for _ in range(hosts.count(host))]  # in blocks
    assert sorted((hosts.count(host) for host in given), reverse=True) == expected
    servers = 2 if script == "train-servers.sh" else 0
    # One on each of two hosts; with three equal ones rank 0's, the first, is taxed last.
    of_servers = list(given)[-servers:] if servers else []
    check_map(job.found, hosts, of_servers)


# ---- training


@pytest.mark.parametrize(
    ("kind", "environment", "servers"),
    [
        pytest.param(kind, environment, servers, marks=[] if (kind, servers) == ("openmpi", 2) else full)
        for kind in ("openmpi", "mpich")
        for environment, servers in (("mpi", 0), ("mpi_rr", 2))
    ],
)
def test_training_finds_the_same_weights(  # noqa: PLR0917
    grid_engine: GridEngine,
    kind: str,
    environment: str,
    servers: int,
    images: Path,
    learned: Callable[..., training.Weights],
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights.npz"
    copy = changed(SCRIPTS / "train.sh", tmp_path, SERVERS=str(servers))
    options = ["-pe", environment, str(4 + servers)]
    with grid_engine.hosts.nothing_left():
        program = training.command(images, weights)
        job = Batch(grid_engine, find(kind), tmp_path, options, program, copy, **training.SAME_BITS).ended()
    assert job.status == 0, job.output
    training.assert_same_bits(training.read(weights), learned(4))


# ---- faults


@full
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_a_killed_rank_ends_the_job(grid_engine: GridEngine, kind: str, tmp_path: Path) -> None:
    with grid_engine.hosts.nothing_left():
        batch = Batch(grid_engine, find(kind), tmp_path, ["-pe", "mpi", "4"], looping("forever"))
        ranks = {match[1]: match for match in batch.said(r"worker (\d) of 4 is (\w+) (\d+)", 4)}
        grid_engine.hosts.run(grid_engine.hosts[0], "kill", "-9", ranks["3"][3])  # process numbers are shared
        job = batch.ended(30)
    assert ranks["3"][2] != ranks["0"][2]  # on another host than mpirun
    assert job.status > 0, job.output


@full
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_a_deleted_job_leaves_nothing(grid_engine: GridEngine, kind: str, tmp_path: Path) -> None:
    """Without notice, so killed at once: Grid Engine kills its process group on every host.

    MPICH's ranks on the first host are in another one; they end by the store's time limit.
    """
    with grid_engine.hosts.nothing_left(30):
        text = (SCRIPTS / "train.sh").read_text().replace("#$ -notify\n", "")
        script = tmp_path / "train.sh"
        script.write_text(text)
        program = looping("forever")
        batch = Batch(grid_engine, find(kind), tmp_path, ["-pe", "mpi", "4"], program, script, MPIKV_TIMEOUT_S="10")
        batch.said(r"worker \d of 4 is", 4)
        grid_engine.call("qdel", batch.number)
        grid_engine.wait_for(batch.number, "")


@full
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_a_crashed_host_ends_the_job(kind: str, tmp_path: Path) -> None:
    with namespaces.network(3) as hosts, grid_engine_module.grid_engine(hosts, slots=2) as cluster:
        with hosts.nothing_left():
            options = ["-pe", "mpi", "4", "-q", "all.q@h2,all.q@h3"]  # the master is on h1
            batch = Batch(cluster, find(kind), tmp_path, options, looping("forever"))
            ranks = {match[1]: match[2] for match in batch.said(r"worker (\d) of 4 is (\w+) \d+", 4)}
            hosts.crash(next(host for host in hosts.hosts if host.name == ranks["3"]))
            batch.said("ends with status")
        assert ENDED.findall(batch.out.read_text())[-1] != "0"


# ---- what others can read

INSIDE = """#!/bin/bash
#$ -S /bin/bash -cwd -j y -v PATH,PYTHONPATH,VIRTUAL_ENV
export PATH=$VIRTUAL_ENV/bin:$PATH
COLOUR=$(cat colour) exec python -m mpikv launch -n 4 -s 0 --env COLOUR "$@"
"""


@pytest.mark.parametrize("way", ["submit", "launch"])
@pytest.mark.parametrize("kind", ["openmpi", pytest.param("mpich", marks=full)])
def test_values_of_env_are_nowhere_to_be_read(grid_engine: GridEngine, kind: str, way: str, tmp_path: Path) -> None:
    """Not in Grid Engine's files and in no command line, nor is the launcher's secret. launch: inside of a job."""
    value, program = os.urandom(16).hex(), ["python", str(Path(__file__).with_name("readable.py"))]
    program.append(str(grid_engine.folder))
    with grid_engine.hosts.nothing_left():
        if way == "submit":
            words = ["submit", "sge", "-n", 4, "--env", "COLOUR", "--wait", "--", *program]
            job = run(grid_engine.hosts, find(kind), words, timeout_s=100, COLOUR=value, **grid_engine.env)
            output = job.output
        else:
            (tmp_path / "colour").write_text(value)
            (tmp_path / "inside").write_text(INSIDE)
            batch = Batch(grid_engine, find(kind), tmp_path, ["-pe", "mpi", "4"], program, tmp_path / "inside")
            output = batch.ended().output
    assert sorted(re.findall(r"worker (\d) has 32 bytes", output)) == ["0", "1", "2", "3"], output
    assert "readable: []" in output
    assert value not in output


# ---- signals


@pytest.mark.parametrize("kind", [pytest.param("openmpi", marks=full), "mpich"])
def test_a_deleted_job_with_notice_stops_after_the_same_step(
    grid_engine: GridEngine, kind: str, tmp_path: Path
) -> None:
    with grid_engine.hosts.nothing_left():
        batch = Batch(grid_engine, find(kind), tmp_path, ["-pe", "mpi", "4"], looping("forever"))
        batch.said(r"worker \d of 4 is", 4)
        grid_engine.call("qdel", batch.number)
        job = batch.ended()
    assert job.status == 0, job.output
    assert stopped_together(job.output, 4) > 5


@full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_a_job_near_its_limit_saves_requeues_itself_and_goes_on(
    grid_engine: GridEngine, kind: str, images: Path, learned: Callable[..., training.Weights], tmp_path: Path
) -> None:
    weights, states, steps = tmp_path / "weights.npz", tmp_path / "states", 60
    copy = changed(SCRIPTS / "train.sh", tmp_path, REQUEUE="yes", STOP_AFTER="40")
    slow = ["python", str(Path(__file__).with_name("slowly.py")), "1"]
    program = [*slow, *training.command(images, weights, steps=steps)[1:]]
    variables = {**training.SAME_BITS, "MPIKV_STOP_FILE": str(states)}
    with grid_engine.hosts.nothing_left():
        batch = Batch(grid_engine, find(kind), tmp_path, ["-pe", "mpi", "4"], program, copy, **variables)
        job, copies = batch.ended(150), 0
        while found := re.search(r"ends with status 0 and goes on as job (\d+)", job.output):
            assert "signal USR1: the ranks are asked to stop after this step" in job.output
            batch.follow(found[1])
            job, copies = batch.ended(150), copies + 1
    assert job.status == 0, job.output
    assert copies >= 1
    training.assert_same_bits(training.read(weights), learned(4, steps=steps))
