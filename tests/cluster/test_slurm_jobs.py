"""Jobs of a real Slurm with the scripts of scripts/slurm: where ranks run, what they learn, and how jobs end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jobs
import namespaces
import pytest
import slurm as slurm_module
import training
from batch_jobs import WHEREABOUTS, Ended, changed, check_map, looping, said, stopped_together
from needs import find
from slurm import Slurm

SCRIPTS = jobs.ROOT / "scripts" / "slurm"
TWO_NODES = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
full = pytest.mark.cluster_full


class Batch:
    """A submitted script."""

    def __init__(  # noqa: PLR0917 - a job has that many parts
        self,
        slurm: Slurm,
        mpi: jobs.Mpi,
        folder: Path,
        options: Sequence[str],
        program: Sequence[str],
        script: Path = SCRIPTS / "train.sbatch",
        **variables: str,
    ) -> None:
        self._slurm = slurm
        line = ["sbatch", "--parsable", f"--output={folder}/job-%j.out", *options, str(script), *program]
        done = slurm.call(*line, env=training.environment(mpi, folder, **variables), cwd=folder)
        self.number = done.stdout.strip()
        assert self.number.isdigit(), done
        self.out = folder / f"job-{self.number}.out"

    @property
    def state(self) -> str:
        return self._slurm.wait_for(self.number, ".+")["JobState"]  # a busy controller may give no answer

    def running(self) -> bool:
        return self.state not in slurm_module.FINAL.split("|")

    def said(self, pattern: str, times: int = 1) -> list:
        """Wait for so many matches in the output."""
        return said(self.out, pattern, times, running=self.running)

    def ended(self, timeout_s: float = 60) -> Ended:
        """Wait for its end."""
        try:
            job = self._slurm.wait_for(self.number, slurm_module.FINAL, timeout_s)
        except AssertionError as error:
            self._slurm.call("scancel", self.number)
            text = self.out.read_text() if self.out.exists() else ""
            raise AssertionError(f"{error}\n{text}\n{self._slurm.logs()}") from None
        status, signum = map(int, job["ExitCode"].split(":"))
        return Ended(status or signum, self.out.read_text() if self.out.exists() else "")


# ---- where ranks run

PLACEMENTS = {
    # options of sbatch, servers: the hosts of the ranks, of the servers
    "2 nodes": (TWO_NODES, 0, "h1 h1 h2 h2", ""),
    "2 nodes, 2 servers": (["--nodes=2", "--ntasks=6", "--ntasks-per-node=3"], 2, "h1 h1 h1 h2 h2 h2", "h1 h2"),
    "3 nodes, 3 servers": (["--nodes=3", "--ntasks=6", "--ntasks-per-node=2"], 3, "h1 h1 h2 h2 h3 h3", "h1 h2 h3"),
    "1 node": (["--nodes=1", "--ntasks=3"], 1, "h1 h1 h1", "h1"),
    "uneven nodes": (["--nodes=2", "--ntasks=5", "--ntasks-per-node=4"], 1, "h1 h1 h1 h1 h2", "h1"),
}
STARTS = [
    ("openmpi", "train.sbatch"),
    ("mpich", "train.sbatch"),
    ("openmpi", "train-srun.sbatch"),  # and no other MPI: see test_srun_starts_no_mpich
]
SELECTED = ("mpich", "train.sbatch", "2 nodes, 2 servers")


@pytest.mark.parametrize(
    ("kind", "script", "placement"),
    [
        pytest.param(kind, script, placement, marks=[] if (kind, script, placement) == SELECTED else full)
        for kind, script in STARTS
        for placement in PLACEMENTS
    ],
)
def test_ranks_and_servers_in_blocks(slurm: Slurm, kind: str, script: str, placement: str, tmp_path: Path) -> None:
    options, servers, hosts, of_servers = PLACEMENTS[placement]
    if (script, placement) == ("train-srun.sbatch", "uneven nodes"):
        hosts = "h1 h1 h1 h2 h2"  # srun spreads its tasks, mpirun fills the slots of the first node
    copy = changed(SCRIPTS / script, tmp_path, SERVERS=str(servers))
    with slurm.hosts.nothing_left():
        job = Batch(slurm, find(kind), tmp_path, options, WHEREABOUTS, copy).ended()
    assert job.status == 0, job.output
    check_map(job.found, hosts.split(), of_servers.split())


@full
@pytest.mark.parametrize(("kind", "script"), STARTS)
def test_ranks_and_servers_in_turn(slurm: Slurm, kind: str, script: str, tmp_path: Path) -> None:
    copy = changed(SCRIPTS / script, tmp_path, SERVERS="2", DISTRIBUTION="cyclic")
    options = ["--nodes=2", "--ntasks=6", "--ntasks-per-node=3"]
    with slurm.hosts.nothing_left():
        job = Batch(slurm, find(kind), tmp_path, options, WHEREABOUTS, copy).ended()
    assert job.status == 0, job.output
    check_map(job.found, ["h1", "h2"] * 3, ["h1", "h2"])


def test_srun_starts_no_mpich(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm's pmi2 fails now and then; the error names the script that starts MPICH with its own mpirun."""
    with slurm.hosts.nothing_left():
        job = Batch(slurm, find("mpich"), tmp_path, TWO_NODES, WHEREABOUTS, SCRIPTS / "train-srun.sbatch").ended()
    assert job.status == 2
    assert "srun starts Open MPI alone, not MPICH" in job.output
    assert "use train.sbatch" in job.output
    assert "found" not in job.output


# ---- training


@pytest.mark.parametrize(
    ("kind", "script", "servers"),
    [
        pytest.param(*one, servers, marks=[] if (*one, servers) == ("openmpi", "train-srun.sbatch", 0) else full)
        for one in STARTS
        for servers in (0, 2)
    ],
)
def test_training_on_two_nodes_finds_the_same_weights(  # noqa: PLR0917 - fixtures
    slurm: Slurm,
    kind: str,
    script: str,
    servers: int,
    images: Path,
    learned: Callable[..., training.Weights],
    tmp_path: Path,
) -> None:
    weights, ranks = tmp_path / "weights.npz", 4 + servers
    copy = changed(SCRIPTS / script, tmp_path, SERVERS=str(servers))
    options = ["--nodes=2", f"--ntasks={ranks}", f"--ntasks-per-node={ranks // 2}"]
    program = training.command(images, weights)
    with slurm.hosts.nothing_left():
        job = Batch(slurm, find(kind), tmp_path, options, program, copy, **training.SAME_BITS).ended()
    assert job.status == 0, job.output
    training.assert_same_bits(training.read(weights), learned(4))


# ---- faults: the job ends, says why, and leaves nothing on any node


@pytest.mark.parametrize(
    ("kind", "script", "case", "said_so"),
    [
        pytest.param(kind, script, case, text, marks=full)
        for kind, script in STARTS
        for case, text in (
            ("raises", r"\[rank 1 of 4 on h1\] RuntimeError: boom on one worker"),
            ("exits", r"\[rank 1 of 4 on h1\] sys\.exit\(3\)"),
        )
    ],
)
def test_a_failing_rank_ends_the_job(  # noqa: PLR0917
    slurm: Slurm, kind: str, script: str, case: str, said_so: str, tmp_path: Path
) -> None:
    with slurm.hosts.nothing_left():
        batch = Batch(slurm, find(kind), tmp_path, TWO_NODES, looping(case), SCRIPTS / script)
        batch.said(said_so)
        job = batch.ended(30)
    assert job.status != 0, job.output
    assert batch.state == "FAILED"


@full
@pytest.mark.parametrize(("kind", "script"), STARTS)
def test_a_killed_rank_ends_the_job(slurm: Slurm, kind: str, script: str, tmp_path: Path) -> None:
    with slurm.hosts.nothing_left():
        batch = Batch(slurm, find(kind), tmp_path, TWO_NODES, looping("forever"), SCRIPTS / script)
        ranks = {match[1]: match for match in batch.said(r"worker (\d) of 4 is (\w+) (\d+)", 4)}
        slurm.hosts.run(slurm.hosts[1], "kill", "-9", ranks["3"][3])
        job = batch.ended(30)
    assert ranks["3"][2] == "h2"
    assert job.status != 0, job.output
    assert batch.state == "FAILED"


@full
@pytest.mark.parametrize(("kind", "script"), STARTS)
def test_a_cancelled_job_leaves_nothing(slurm: Slurm, kind: str, script: str, tmp_path: Path) -> None:
    with slurm.hosts.nothing_left():
        batch = Batch(slurm, find(kind), tmp_path, TWO_NODES, looping("forever"), SCRIPTS / script)
        batch.said(r"worker \d of 4 is", 4)
        slurm.call("scancel", batch.number)
        slurm.wait_for(batch.number, "CANCELLED")


@full
@pytest.mark.parametrize(("kind", "script"), STARTS)
def test_a_crashed_node_ends_the_job(kind: str, script: str, tmp_path: Path) -> None:
    with namespaces.network(3) as hosts, slurm_module.slurm(hosts) as slurm:
        with hosts.nothing_left():
            batch = Batch(
                slurm, find(kind), tmp_path, [*TWO_NODES, "--no-requeue"], looping("forever"), SCRIPTS / script
            )
            batch.said(r"worker \d of 4 is", 4)
            hosts.crash(hosts[1])
            batch.ended(100)
        assert batch.state in ("FAILED", "NODE_FAIL"), batch.out.read_text()


@full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "script"), STARTS)
def test_a_node_whose_cable_is_cut_ends_the_job(kind: str, script: str, tmp_path: Path) -> None:
    """Its ranks end by the store's time limit; Slurm's own process there when it can report that again."""
    with namespaces.network(3) as hosts, slurm_module.slurm(hosts) as slurm:
        before = hosts.snapshot()
        options = [*TWO_NODES, "--no-requeue"]
        batch = Batch(slurm, find(kind), tmp_path, options, looping("forever"), SCRIPTS / script, MPIKV_TIMEOUT_S="10")
        batch.said(r"worker \d of 4 is", 4)
        hosts.cut(hosts[1])
        batch.ended(100)
        assert batch.state in ("FAILED", "NODE_FAIL"), batch.out.read_text()
        hosts.mend(hosts[1])
        hosts.assert_gone(before, 60)


# ---- signals


@pytest.mark.parametrize(
    ("kind", "script"),
    [pytest.param(*one, marks=[] if one == ("openmpi", "train.sbatch") else full) for one in STARTS],
)
def test_the_time_limits_signal_stops_all_after_the_same_step(
    slurm: Slurm, kind: str, script: str, tmp_path: Path
) -> None:
    with slurm.hosts.nothing_left():
        batch = Batch(slurm, find(kind), tmp_path, TWO_NODES, looping("forever"), SCRIPTS / script)
        batch.said(r"worker \d of 4 is", 4)
        slurm.call("scancel", "--batch", "--signal=USR1", batch.number)  # what Slurm does before the limit
        job = batch.ended()
    assert (job.status, batch.state) == (0, "COMPLETED"), job.output
    assert stopped_together(job.output, 4) > 5


@full
@pytest.mark.timeout(300)
def test_a_job_near_its_limit_saves_requeues_itself_and_goes_on(
    slurm: Slurm, images: Path, learned: Callable[..., training.Weights], tmp_path: Path
) -> None:
    """With the real limit of one minute, the shortest that Slurm has; its notice may come up to a minute early."""
    weights, states, steps = tmp_path / "weights.npz", tmp_path / "states", 60
    copy = changed(SCRIPTS / "train.sbatch", tmp_path, REQUEUE="yes")
    slow = ["python", str(Path(__file__).with_name("slowly.py")), "0.25"]
    program = [*slow, *training.command(images, weights, steps=steps)[1:]]
    options = [*TWO_NODES, "--time=1", "--signal=B:USR1@48", "--requeue"]
    variables = {**training.SAME_BITS, "MPIKV_STOP_FILE": str(states)}
    with slurm.hosts.nothing_left():
        batch = Batch(slurm, find("mpich"), tmp_path, options, program, copy, **variables)
        job = batch.ended(240)
    assert (job.status, batch.state) == (0, "COMPLETED"), job.output
    assert "signal USR1: the ranks are asked to stop after this step" in job.output
    assert "goes back into the queue" in job.output
    assert int(slurm.job(batch.number)["Restarts"]) >= 1
    training.assert_same_bits(training.read(weights), learned(4, steps=steps))
