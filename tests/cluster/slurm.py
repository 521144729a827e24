"""A real Slurm on the hosts of `namespaces.network`: slurmctld and munged on the first, slurmd on each.

    with network(3) as hosts, slurm(hosts, cpus=4) as cluster:
        number = cluster.call("sbatch", "--parsable", "--nodes=2", "train.sbatch").stdout.strip()
        cluster.wait_for(number, "COMPLETED")  # `sbatch --wait` looks ever less often

Everything is below a folder of the network, and every host has ports of its own, so several such clusters do not meet.
The daemons run in the foreground, below the test, and are killed at the end of the block.

Why the configuration is as it is: `config_overrides` lets a node have more CPUs than the machine; `linuxproc` and
`task/none` need no cgroups; a `TmpFS` for each node, since the nodes share /tmp and their PMIx plugins would make the
same folder in it; the shortest `cred_expire`, since a job that was requeued waits until its credentials have expired;
`MinJobAge` keeps ended jobs visible, for there is no accounting.

Needs the packages slurmctld, slurmd, slurm-client, munge, and for `srun --mpi=pmix` libpmix2 and libpmix-dev (Slurm's
plugin loads the library by a name that only the latter has).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from namespaces import Network
from sshd import SEARCH

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
READY_S = 40.0
FINAL = "COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY"  # states of ended jobs
CONFIGURATION = """\
ClusterName=mpikvtest
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/log/slurmd.%n
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
TmpFS={folder}/tmp/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
InactiveLimit=0
KillWait=5
MinJobAge=3600
SlurmdTimeout=20
MailProg=/bin/true
NodeName={names} CPUs={cpus} RealMemory=2000 State=UNKNOWN
PartitionName=test Nodes={names} Default=YES MaxTime=30 State=UP OverSubscribe=NO
"""


def missing() -> str:
    """Why there can be no Slurm here; "" where there can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=SEARCH) is None]
    return f"Slurm needs {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client munge)" if absent else ""


class Slurm:
    """A running cluster. env: what its commands need in their environment."""

    def __init__(self, hosts: Network, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(
        self, *command: str, env: Mapping[str, str] | None = None, timeout_s: float = 60, cwd: Path | str = "/"
    ) -> subprocess.CompletedProcess[str]:
        """Run one of its commands on the first host, whatever its status."""
        return self.hosts.call(self.hosts[0], *command, env={**self.env, **(env or {})}, timeout_s=timeout_s, cwd=cwd)

    def submit(self, words: Sequence[str], folder: Path, env: Mapping[str, str], _named: Sequence[str]) -> str:
        """Submit a script, whose job writes its output to `folder`/job-NUMBER.out. The number."""
        done = self.call("sbatch", "--parsable", f"--output={folder}/job-%j.out", *words, env=env, cwd=folder)
        assert done.stdout.strip().isdigit(), done
        return done.stdout.strip()

    def running(self, number: str) -> bool:
        return self.wait_for(number, ".+")["JobState"] not in FINAL.split("|")  # a busy controller may give no answer

    def wait_for_end(self, number: str, timeout_s: float) -> None:
        self.wait_for(number, FINAL, timeout_s)

    def notify(self, number: str) -> None:
        self.call("scancel", "--batch", "--signal=USR1", number)

    def cancel(self, number: str) -> None:
        self.call("scancel", number)

    def status(self, number: str, _output: str) -> int:
        """How a job has ended: its status or the number of a signal, and never 0 where it has not ended well."""
        job = self.job(number)
        status, signum = map(int, job["ExitCode"].split(":"))
        return status or signum or int(job["JobState"] != "COMPLETED")

    def job(self, number: int | str) -> dict[str, str]:
        shown = self.call("scontrol", "--oneliner", "show", "job", str(number)).stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait_for(self, number: int | str, states: str, timeout_s: float = 30) -> dict[str, str]:
        deadline = time.monotonic() + timeout_s
        while not re.fullmatch(states, (job := self.job(number)).get("JobState", "")):
            assert time.monotonic() < deadline, f"job {number} is not {states} after {timeout_s:g} s: {job}"
            time.sleep(0.1)
        return job

    def logs(self) -> str:
        files = sorted((self.folder / "log").iterdir())
        return "\n".join(f"--- {file.name}\n" + "\n".join(file.read_text().splitlines()[-15:]) for file in files)


@contextlib.contextmanager
def slurm(hosts: Network, cpus: int = 4) -> Iterator[Slurm]:
    """A cluster of all hosts with so many CPUs each, until the end of the block."""
    folder = hosts.folder / "slurm"
    for name in (
        "munge",
        "state",
        "log",
        *(f"{kind}/{host.name}" for kind in ("spool", "tmp") for host in hosts.hosts),
    ):
        (folder / name).mkdir(parents=True)
    names = ",".join(host.name for host in hosts.hosts)
    text = CONFIGURATION.format(first=hosts[0].name, folder=folder, names=names, cpus=cpus)
    (folder / "slurm.conf").write_text(text)
    cluster = Slurm(hosts, folder)
    with contextlib.ExitStack() as stack:
        _munged(stack, hosts, folder / "munge")
        _daemon(stack, hosts, 0, "slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf"), log=folder / "log" / "ctld")
        for i, host in enumerate(hosts.hosts):
            command = ("slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", host.name)
            _daemon(stack, hosts, i, *command, log=folder / "log" / f"{host.name}.output")
        deadline = time.monotonic() + READY_S
        while cluster.call("sinfo", "-h", "-N", "-o", "%T").stdout.split() != ["idle"] * len(hosts):
            if time.monotonic() > deadline:
                raise RuntimeError(f"Slurm did not come up within {READY_S:g} s\n{cluster.logs()}")
            time.sleep(0.1)
        yield cluster


def _munged(stack: contextlib.ExitStack, hosts: Network, folder: Path) -> None:
    """Start munged with a key of its own. All hosts share its socket, which is a file."""
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
    # --force: it refuses a folder below one that others may write to, as /tmp is.
    command = ("munged", "--foreground", "--force", *files, f"--socket={folder / 'socket'}")
    daemon = _daemon(stack, hosts, 0, *command, log=folder / "output")
    deadline = time.monotonic() + READY_S
    while not (folder / "socket").exists():
        if time.monotonic() > deadline or daemon.poll() is not None:
            raise RuntimeError(f"munged did not start:\n{(folder / 'output').read_text()}")
        time.sleep(0.02)


def _daemon(
    stack: contextlib.ExitStack, hosts: Network, host: int, program: str, *arguments: str, log: Path
) -> subprocess.Popen[str]:
    path = shutil.which(program, path=SEARCH)
    assert path is not None, missing()
    daemon = hosts.start(hosts[host], path, *arguments, log=log)
    stack.callback(lambda: (daemon.kill(), daemon.wait()))
    return daemon
