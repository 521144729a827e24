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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import daemons
from namespaces import Network, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
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
    return daemons.missing("Slurm", PROGRAMS, "slurmctld slurmd slurm-client munge")


class Slurm(daemons.Cluster):
    def submit(self, words: Sequence[str], folder: Path, env: Mapping[str, str], _named: Sequence[str]) -> str:
        """Submit a script, whose job writes its output to `folder`/job-NUMBER.out. The number."""
        output = f"--output={folder}/job-%j.out"
        return self.submit_by("sbatch", "--parsable", output, *words, env=env, folder=folder)

    def running(self, number: str) -> bool:
        self.wait_for(number, ".+")  # a busy controller may give no answer
        return self.job(number).get("JobState") not in FINAL.split("|")

    def wait_for_end(self, number: str, timeout_s: float) -> None:
        self.wait_for(number, FINAL, timeout_s)

    def notify(self, number: str) -> None:
        self.call("scancel", "--batch", "--signal=USR1", number)

    remind = notify  # as it does before a time limit

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

    def wait_for(self, number: int | str, states: str, timeout_s: float = 30) -> None:
        wait_until(
            lambda: re.fullmatch(states, self.job(number).get("JobState", "")),
            lambda: f"job {number} is not {states}: {self.job(number)}",
            timeout_s,
        )

    def logs(self) -> str:
        return daemons.last_lines(sorted((self.folder / "log").iterdir()))


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
    cluster = Slurm(hosts, folder, {"SLURM_CONF": str(folder / "slurm.conf")})
    with contextlib.ExitStack() as stack:
        _munged(stack, hosts, folder / "munge")
        command = ("slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf"))
        daemons.start(stack, hosts, 0, *command, log=folder / "log" / "ctld")
        for i, host in enumerate(hosts.hosts):
            command = ("slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", host.name)
            daemons.start(stack, hosts, i, *command, log=folder / "log" / f"{host.name}.output")
        wait_until(
            lambda: cluster.call("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * len(hosts),
            lambda: f"Slurm did not come up\n{cluster.logs()}",
        )
        yield cluster


def _munged(stack: contextlib.ExitStack, hosts: Network, folder: Path) -> None:
    """Start munged with a key of its own. All hosts share its socket, which is a file."""
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
    # --force: it refuses a folder below one that others may write to, as /tmp is.
    command = ("munged", "--foreground", "--force", *files, f"--socket={folder / 'socket'}")
    daemons.start(stack, hosts, 0, *command, log=folder / "output")
    wait_until((folder / "socket").exists, lambda: f"munged did not start:\n{(folder / 'output').read_text()}")
