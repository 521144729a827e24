"""Jobs of a real Slurm and a real Grid Engine with the scripts of this repository: where ranks run, what they learn,
and how jobs end.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grid_engine as grid_engine_module
import jobs
import namespaces
import pytest
import slurm as slurm_module
import training
from batch_jobs import WHEREABOUTS, Batch, changed, check_map, looping, stopped_together, wait_for_snapshot
from grid_engine import GridEngine
from launching import run
from needs import find
from slurm import Slurm

SCRIPTS = jobs.ROOT / "scripts"
full = pytest.mark.cluster_full


class Start(NamedTuple):
    """Whose job, with which MPI, by which script."""

    system: str
    kind: str
    script: Path

    @property
    def is_slurm(self) -> bool:
        return self.system == "slurm"

    @property
    def mpi(self) -> jobs.Mpi:
        return find(self.kind)

    def options(self, ranks: int = 4) -> list[str]:
        """For so many ranks on two hosts; Grid Engine's have two slots each."""
        if self.is_slurm:
            return ["--nodes=2", f"--ntasks={ranks}", f"--ntasks-per-node={ranks // 2}"]
        return ["-pe", "mpi", str(ranks)]


STARTS = {
    "slurm openmpi": Start("slurm", "openmpi", SCRIPTS / "slurm" / "train.sbatch"),
    "slurm mpich": Start("slurm", "mpich", SCRIPTS / "slurm" / "train.sbatch"),
    "slurm srun": Start("slurm", "openmpi", SCRIPTS / "slurm" / "train-srun.sbatch"),
    "grid_engine openmpi": Start("grid_engine", "openmpi", SCRIPTS / "sge" / "train.sh"),
    "grid_engine mpich": Start("grid_engine", "mpich", SCRIPTS / "sge" / "train.sh"),
}


def on_all(*selected: str, of: str = "", but: str = "") -> pytest.MarkDecorator:
    """Run a test with each start but one, or those of one system; but for the selected ones with --cluster alone."""
    found = [
        pytest.param(one, id=name, marks=[] if name in selected else full)
        for name, one in STARTS.items()
        if name != but
    ]
    return pytest.mark.parametrize("start", [one for one in found if str(one.id).startswith(of)])


@pytest.fixture
def cluster(start: Start, request: pytest.FixtureRequest) -> Slurm | GridEngine:
    found: Slurm | GridEngine = request.getfixturevalue(start.system)
    return found


@contextlib.contextmanager
def own_cluster(start: Start) -> Iterator[Slurm | GridEngine]:
    with namespaces.network(3) as hosts, contextlib.ExitStack() as stack:
        made = slurm_module.slurm(hosts) if start.is_slurm else grid_engine_module.grid_engine(hosts, slots=2)
        yield stack.enter_context(made)


# ---- where ranks run

PLACEMENTS = {
    # options of sbatch, servers: the hosts of the ranks, of the servers
    "2 nodes": (STARTS["slurm mpich"].options(4), 0, "h1 h1 h2 h2", ""),
    "2 nodes, 2 servers": (STARTS["slurm mpich"].options(6), 2, "h1 h1 h1 h2 h2 h2", "h1 h2"),
    "3 nodes, 3 servers": (["--nodes=3", "--ntasks=6", "--ntasks-per-node=2"], 3, "h1 h1 h2 h2 h3 h3", "h1 h2 h3"),
    "1 node": (["--nodes=1", "--ntasks=3"], 1, "h1 h1 h1", "h1"),
    "uneven nodes": (["--nodes=2", "--ntasks=5", "--ntasks-per-node=4"], 1, "h1 h1 h1 h1 h2", "h1"),
    "cyclic": (STARTS["slurm mpich"].options(6), 2, "h1 h2 h1 h2 h1 h2", "h1 h2"),
}
SELECTED = ("slurm mpich", "2 nodes, 2 servers")


@pytest.mark.parametrize(
    ("start", "placement"),
    [
        pytest.param(start, placement, marks=[] if (name, placement) == SELECTED else full)
        for name, start in STARTS.items()
        for placement in PLACEMENTS
        if start.is_slurm
    ],
)
def test_ranks_and_servers_in_slurm(cluster: Slurm, start: Start, placement: str, tmp_path: Path) -> None:
    options, servers, hosts, of_servers = PLACEMENTS[placement]
    if (start, placement) == (STARTS["slurm srun"], "uneven nodes"):
        hosts = "h1 h1 h1 h2 h2"  # srun spreads its tasks, mpirun fills the slots of the first node
    distribution = "cyclic" if placement == "cyclic" else "block"
    copy = changed(start.script, tmp_path, SERVERS=str(servers), DISTRIBUTION=distribution)
    with cluster.hosts.nothing_left():
        job = Batch(cluster, start.mpi, tmp_path, options, WHEREABOUTS, copy).ended()
    assert job.status == 0, job.output
    check_map(job.found, hosts.split(), of_servers.split())


@full
@pytest.mark.parametrize(
    ("kind", "script", "environment", "slots", "expected"),
    [
        ("openmpi", "train.sh", "mpi", 4, [2, 2]),
        ("mpich", "train.sh", "mpi", 4, [2, 2]),
        ("openmpi", "train.sh", "mpi_rr", 4, [2, 1, 1]),
        ("mpich", "train.sh", "mpi_rr", 4, [2, 1, 1]),
        ("openmpi", "train-servers.sh", "mpi_rr", 6, [2, 2, 2]),
        ("mpich", "train-servers.sh", "mpi", 4, [2, 2]),
        ("mpich", "train-servers.sh", "mpi_rr", 6, [2, 2, 2]),
        ("mpich", "train.sh", "mpi_one", 2, [2]),
    ],
)
def test_ranks_and_servers_in_grid_engine(  # noqa: PLR0917
    grid_engine: GridEngine, kind: str, script: str, environment: str, slots: int, expected: list[int], tmp_path: Path
) -> None:
    with grid_engine.hosts.nothing_left():
        options = ["-pe", environment, str(slots)]
        job = Batch(grid_engine, find(kind), tmp_path, options, WHEREABOUTS, SCRIPTS / "sge" / script).ended()
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
    ("start", "servers"),
    [
        pytest.param(start, servers, marks=[] if (name, servers) == ("slurm srun", 0) else full)
        for name, start in STARTS.items()
        for servers in (0, 2)
    ],
)
def test_training_finds_the_same_weights(  # noqa: PLR0917 - fixtures
    cluster: Slurm | GridEngine,
    start: Start,
    servers: int,
    images: Path,
    learned: Callable[..., training.Weights],
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights.npz"
    copy = changed(start.script, tmp_path, SERVERS=str(servers))
    program = training.command(images, weights)
    with cluster.hosts.nothing_left():
        batch = Batch(cluster, start.mpi, tmp_path, start.options(4 + servers), program, copy, **training.SAME_BITS)
        job = batch.ended()
    assert job.status == 0, job.output
    training.assert_same_bits(training.read(weights), learned(4))


# ---- faults: the job ends, says why, and leaves nothing on any node


@on_all()
@pytest.mark.parametrize(
    ("case", "said_so"),
    [
        ("raises", r"\[rank 1 of 4 on \w+\] RuntimeError: boom on one worker"),
        ("exits", r"\[rank 1 of 4 on \w+\] sys\.exit\(3\)"),
        ("forever", ""),
    ],
)
def test_a_rank_that_fails_or_is_killed_ends_the_job(
    cluster: Slurm | GridEngine, start: Start, case: str, said_so: str, tmp_path: Path
) -> None:
    with cluster.hosts.nothing_left():
        batch = Batch(cluster, start.mpi, tmp_path, start.options(), looping(case), start.script)
        if said_so:
            batch.said(said_so)
        else:
            ranks = batch.workers()
            assert ranks["3"][2] != ranks["0"][2]  # on another host than mpirun
            cluster.hosts.run(cluster.hosts[0], "kill", "-9", ranks["3"][3])  # process numbers are shared
        job = batch.ended(30)
    assert job.status > 0, job.output


@on_all()
def test_a_cancelled_job_leaves_nothing(cluster: Slurm | GridEngine, start: Start, tmp_path: Path) -> None:
    """Grid Engine kills its process group on every host, here without notice; MPICH's ranks on the first host are in
    another one, and end by the store's time limit.
    """
    script = tmp_path / start.script.name
    script.write_text(start.script.read_text().replace("#$ -notify\n", ""))
    with cluster.hosts.nothing_left(10 if start.is_slurm else 30):
        program = looping("forever")
        batch = Batch(cluster, start.mpi, tmp_path, start.options(), program, script, MPIKV_TIMEOUT_S="10")
        batch.workers()
        cluster.call("scancel" if start.is_slurm else "qdel", batch.number)
        cluster.wait_for_end(batch.number, 30)


@on_all()
def test_a_crashed_host_ends_the_job(start: Start, tmp_path: Path) -> None:
    with own_cluster(start) as cluster, cluster.hosts.nothing_left():
        more = ["--no-requeue"] if start.is_slurm else ["-q", "all.q@h2,all.q@h3"]  # the master is on h1
        batch = Batch(cluster, start.mpi, tmp_path, [*start.options(), *more], looping("forever"), start.script)
        host = batch.workers()["3"][2]
        cluster.hosts.crash(next(one for one in cluster.hosts.hosts if one.name == host))
        if start.is_slurm:
            assert batch.ended(100).status > 0, batch.output
        else:  # which waits for the host
            batch.said("ends with status")
            assert cluster.status(batch.number, batch.output) > 0, batch.output


@on_all(of="slurm")
@pytest.mark.timeout(300)
def test_a_node_whose_cable_is_cut_ends_the_job(start: Start, tmp_path: Path) -> None:
    """Its ranks end by the store's time limit; Slurm's own process there when it can report that again."""
    with own_cluster(start) as cluster:
        hosts, before = cluster.hosts, cluster.hosts.snapshot()
        options = [*start.options(), "--no-requeue"]
        batch = Batch(cluster, start.mpi, tmp_path, options, looping("forever"), start.script, MPIKV_TIMEOUT_S="10")
        batch.workers()
        hosts.cut(hosts[1])
        assert batch.ended(100).status > 0, batch.output
        hosts.mend(hosts[1])
        hosts.assert_gone(before, 60)


# ---- restarts

AGAIN = ["python", str(jobs.ROOT / "tests" / "mpirun" / "restarts_program.py")]
EACH_STEP = {"MPIKV_SNAPSHOT_S": "0.000001", **training.SAME_BITS}
STARTED_AGAIN = r"worker 3 on \w+ was killed by signal 9 \(SIGKILL\); starting again, 1 of 2, from step (\d+)"


def undisturbed(workers: int) -> str:
    """What worker 0 of so many prints of the weights that it has found on one machine."""
    job = jobs.mpirun(workers, [*AGAIN, "none"], env=EACH_STEP)
    job.check()
    return job.stdout.splitlines()[-1]


@on_all("slurm mpich", but="slurm srun")
@pytest.mark.parametrize("servers", [0, pytest.param(2, marks=full)])
def test_a_killed_worker_costs_a_restart_in_the_same_job(
    cluster: Slurm | GridEngine, start: Start, servers: int, tmp_path: Path
) -> None:
    copy = changed(start.script, tmp_path, RESTARTS="2", SERVERS=str(servers))
    with cluster.hosts.nothing_left():
        program = [*AGAIN, "kill"]
        job = Batch(cluster, start.mpi, tmp_path, start.options(4 + servers), program, copy, **EACH_STEP).ended(120)
    assert job.status == 0, job.output
    (step,) = re.findall(STARTED_AGAIN, job.output)
    assert re.findall(r"begins with step (\d+)", job.output) == ["0", step]
    assert undisturbed(4) in job.output


@full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["slurm mpich", "grid_engine openmpi", "grid_engine mpich"])
def test_a_job_that_is_started_again_requeues_itself(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A worker is killed when the job has just been asked to stop, and another time when it goes on."""
    start = STARTS[name]
    cluster: Slurm | GridEngine = request.getfixturevalue(start.system)
    copy = changed(start.script, tmp_path, RESTARTS="2", REQUEUE="yes")
    options = [*start.options(), *(["--requeue"] if start.is_slurm else [])]
    variables = {**EACH_STEP, "MPIKV_STOP_FILE": str(tmp_path / "states")}
    with cluster.hosts.nothing_left():
        batch = Batch(cluster, start.mpi, tmp_path, options, [*AGAIN, "requeue"], copy, **variables)
        batch.said("begins with step 0")
        cluster.remind(batch.number)
        output = batch.ended(300).output
        if found := re.search(r"goes on as job (\d+)", output):
            batch.follow(found[1])
            output += batch.ended(120).output
    assert cluster.status(batch.number, output) == 0, output
    (stopped,) = re.findall(r"stopped after step (\d+): weights", output)
    first, second = re.findall(STARTED_AGAIN, output)
    assert re.findall(r"begins with step (\d+)", output) == ["0", first, stopped, second]
    assert int(stopped) == int(first) + 1
    assert undisturbed(4) in output


@on_all(but="slurm srun")
@pytest.mark.timeout(400)
def test_a_job_goes_on_without_a_host_that_has_crashed(start: Start, tmp_path: Path) -> None:
    """With --no-kill Slurm lets the job have its other nodes. Grid Engine ends it when the host is back."""
    program = ["python", str(Path(__file__).with_name("surviving.py")), str(tmp_path / "enough")]
    copy = changed(start.script, tmp_path, RESTARTS="1")
    if start.is_slurm:
        workers, options = 3, ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--no-kill"]
    else:
        workers, options = 4, [*start.options(), "-q", "all.q@h2,all.q@h3"]  # the master is on h1
    with own_cluster(start) as cluster, cluster.hosts.nothing_left():
        hosts, folder = cluster.hosts, cluster.hosts.local / "snapshots"
        variables = {"MPIKV_SNAPSHOT_DIR": str(folder), "MPIKV_SNAPSHOT_S": "0.1"}
        batch = Batch(cluster, start.mpi, tmp_path, options, program, copy, **variables)
        begun = batch.said(rf"worker (\d) of {workers} is (\w+) \d+ at step 0", workers)
        there = {match[1]: host for match in begun for host in hosts.hosts if host.name == match[2]}
        lost = there[str(workers - 1)]
        wait_for_snapshot(hosts, [host for host in there.values() if host != lost], folder)
        hosts.crash(lost)
        (again,) = batch.said(r"starting again, 1 of 1, from step (\d+)", timeout_s=120)
        batch.said(rf"worker \d of 2 is \w+ \d+ at step {again[1]}", 2, timeout_s=120)
        (tmp_path / "enough").touch()
        batch.said("ends with status 0", timeout_s=120)


# ---- what others can read

INSIDE = """#!/bin/bash
#$ -S /bin/bash -cwd -j y -v PATH,PYTHONPATH,VIRTUAL_ENV
export PATH=$VIRTUAL_ENV/bin:$PATH
COLOUR=$(cat colour) exec python -m mpikv launch -n 4 -s 0 --env COLOUR "$@"
"""


@pytest.mark.parametrize(
    "way", ["submit", pytest.param("submit --restarts 1", marks=full), pytest.param("launch", marks=full)]
)
@pytest.mark.parametrize("kind", ["openmpi", pytest.param("mpich", marks=full)])
def test_values_of_env_are_nowhere_to_be_read(grid_engine: GridEngine, kind: str, way: str, tmp_path: Path) -> None:
    """Not in Grid Engine's files and in no command line, nor is the launcher's secret. launch: inside of a job."""
    value, program = os.urandom(16).hex(), ["python", str(Path(__file__).with_name("readable.py"))]
    program.append(str(grid_engine.folder))
    with grid_engine.hosts.nothing_left():
        if way != "launch":
            words = ["submit", "sge", *way.split()[1:], "-n", 4, "--env", "COLOUR", "--wait", "--", *program]
            output = run(grid_engine.hosts, find(kind), words, timeout_s=100, COLOUR=value, **grid_engine.env).output
        else:
            (tmp_path / "colour").write_text(value)
            (tmp_path / "inside").write_text(INSIDE)
            batch = Batch(grid_engine, find(kind), tmp_path, ["-pe", "mpi", "4"], program, tmp_path / "inside")
            output = batch.ended().output
    assert sorted(re.findall(r"worker (\d) has 32 bytes", output)) == ["0", "1", "2", "3"], output
    assert "readable: []" in output
    assert value not in output


# ---- signals


@on_all("slurm openmpi", "grid_engine mpich")
def test_a_notice_stops_all_after_the_same_step(cluster: Slurm | GridEngine, start: Start, tmp_path: Path) -> None:
    with cluster.hosts.nothing_left():
        batch = Batch(cluster, start.mpi, tmp_path, start.options(), looping("forever"), start.script)
        batch.workers()
        cluster.notify(batch.number)
        job = batch.ended()
    assert job.status == 0, job.output
    assert stopped_together(job.output, 4) > 5


@on_all(but="slurm srun")
def test_a_notice_stops_ranks_that_would_be_started_again(
    cluster: Slurm | GridEngine, start: Start, tmp_path: Path
) -> None:
    script = changed(start.script, tmp_path, RESTARTS="1")
    test_a_notice_stops_all_after_the_same_step(cluster, start._replace(script=script), tmp_path)


@full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["slurm mpich", "grid_engine openmpi", "grid_engine mpich"])
def test_a_job_near_its_limit_saves_requeues_itself_and_goes_on(
    name: str,
    images: Path,
    learned: Callable[..., training.Weights],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """With Slurm's real limit of one minute, the shortest that it has; its notice may come up to a minute early."""
    start = STARTS[name]
    cluster: Slurm | GridEngine = request.getfixturevalue(start.system)
    weights, steps = tmp_path / "weights.npz", 60
    copy = changed(start.script, tmp_path, REQUEUE="yes", **({} if start.is_slurm else {"STOP_AFTER": "40"}))
    program = ["python", str(Path(__file__).with_name("until_asked.py"))]
    program += training.command(images, weights, steps=steps)[1:]
    options = start.options() + (["--time=1", "--signal=B:USR1@48", "--requeue"] if start.is_slurm else [])
    variables = {**training.SAME_BITS, "MPIKV_STOP_FILE": str(tmp_path / "states")}
    with cluster.hosts.nothing_left():
        batch = Batch(cluster, start.mpi, tmp_path, options, program, copy, **variables)
        job = batch.ended(240)
        assert "signal USR1: the ranks are asked to stop after this step" in job.output
        assert re.search("status 0 and goes (back into the queue|on as job)", job.output), job.output
        while found := re.search(r"ends with status 0 and goes on as job (\d+)", job.output):
            batch.follow(found[1])
            job = batch.ended(150)
    assert job.status == 0, job.output
    training.assert_same_bits(training.read(weights), learned(4, steps=steps))
