"""A real Grid Engine on the hosts of `namespaces.network`: qmaster on the first, execd on each.

    with network(3) as hosts, grid_engine(hosts, slots=2) as cluster:
        done = cluster.call("qsub", "-sync", "y", "-pe", "mpi", "4", "train.sh")

One queue, all.q, with so many slots on each host, and three parallel environments that differ in how they place
processes: mpi fills hosts up, mpi_rr deals them out in turn, mpi_one wants all on one host. The cell lies below a
folder of the network, the ports are those of the hosts, so several such clusters do not meet and the machine's own cell
is not touched.

Why the configuration is as it is: classic spooling needs no database; `min_uid 0` lets root submit; the scheduler looks
every second and after every submission and end, since by default a job waits up to 15 s. SGE_ND keeps the daemons in
the foreground, below the test, where they are killed at the end of the block.

Needs the packages gridengine-master, gridengine-exec and gridengine-client.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import daemons
from namespaces import Network, wait_until

GROUPS = 100
PROGRAMS = ("sge_qmaster", "sge_execd", "qsub", "qconf")
LIBRARY = Path("/usr/lib/gridengine")
DATA = Path("/usr/share/gridengine")
PLACEMENTS = {"mpi": "$fill_up", "mpi_rr": "$round_robin", "mpi_one": "$pe_slots"}
BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {common};{spool}/qmaster
binary_path /usr/sbin
qmaster_spool_dir {spool}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
SCHEDULER = {
    "schedule_interval": "0:0:1",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
    "load_adjustment_decay_time": "0:0:0",
    "job_load_adjustments": "NONE",
}
HOST = """\
hostname {name}
load_scaling NONE
complex_values NONE
user_lists NONE
xuser_lists NONE
projects NONE
xprojects NONE
usage_scaling NONE
report_variables NONE
"""
PARALLEL = """\
pe_name {name}
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule {rule}
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""


def missing() -> str:
    """Why there can be no Grid Engine here; "" where there can."""
    return daemons.missing("Grid Engine", PROGRAMS, "gridengine-master gridengine-exec gridengine-client")


class GridEngine(daemons.Cluster):
    def run(self, *command: str) -> str:
        """Run one of its commands on the first host; what it printed. Raises RuntimeError."""
        return self.hosts.run(self.hosts[0], *command, env=self.env)

    def submit(self, words: Sequence[str], folder: Path, env: Mapping[str, str], named: Sequence[str]) -> str:
        """Submit a script, whose job writes its output to `folder`/job-NUMBER.out, with these variables. The number."""
        names = ",".join(name for name in env if name in named or name.startswith("OMPI_"))
        given = ["-v", names] if names else []
        output = ("-o", f"{folder}/job-$JOB_ID.out")
        return self.submit_by("qsub", "-terse", *output, *given, *words, env=env, folder=folder)

    def running(self, number: str) -> bool:
        return self.state(number) != ""

    def wait_for_end(self, number: str, timeout_s: float) -> None:
        self.wait_for(number, "", timeout_s)

    def notify(self, number: str) -> None:
        """Do what it does before it ends a job: here it ends it, too."""
        self.call("qdel", number)

    def remind(self, number: str) -> None:
        """Do what the script's own clock does: signal its shell."""
        for host in self.hosts.hosts:
            for pid, line in self.hosts.processes(host).items():
                if re.search(rf"/job_scripts/{number}( |$)", line):
                    os.kill(pid, signal.SIGUSR1)

    def cancel(self, number: str) -> None:
        self.call("qdel", "-f", number)

    def status(self, _number: str, output: str) -> int:
        """What the script has said, -1 if it came to no end by itself. Open MPI prints bytes 0."""
        found = re.findall(r"^\0*mpikv: job \d+ ends with status (\d+)", output, re.M)
        return int(found[-1]) if found else -1

    def state(self, number: int | str) -> str:
        """A job's state in `qstat`: qw (waits), r (runs), hqw, Rq, ...; "" when it is gone."""
        shown: list[subprocess.CompletedProcess[str]] = []

        def answered() -> bool:  # not where the master is busy, which is no end of a job
            shown.append(self.call("qstat", "-u", "*"))
            return shown[-1].returncode == 0

        wait_until(answered, lambda: str(shown[-1]))
        lines = (line.split() for line in shown[-1].stdout.splitlines())
        return next((fields[4] for fields in lines if fields[:1] == [str(number)]), "")

    def wait_for(self, number: int | str, states: str, timeout_s: float = 30) -> None:
        """Wait until a job's state matches; "" is the end."""
        wait_until(
            lambda: re.fullmatch(states, self.state(number)),
            lambda: f"job {number} is {self.state(number)!r}, not {states!r}",
            timeout_s,
        )

    def logs(self) -> str:
        return daemons.last_lines(
            [*sorted((self.folder / "spool").rglob("messages")), *sorted(self.folder.glob("*.output"))]
        )


@contextlib.contextmanager
def grid_engine(hosts: Network, slots: int = 4) -> Iterator[GridEngine]:
    """A cluster of all hosts with so many slots each, until the end of the block."""
    folder = hosts.folder / "sge"
    # The client's programs look up what architecture this is, which takes a while, if they are not told.
    ports = {"SGE_QMASTER_PORT": "6444", "SGE_EXECD_PORT": "6445"}
    env = {"SGE_ROOT": str(folder / "root"), "SGE_CELL": "default", "SGE_ARCH": "lx-amd64", **ports}
    cluster = GridEngine(hosts, folder, env)
    _cell(cluster)

    def start(i: int, program: str) -> None:
        log = folder / f"{program}.{hosts[i].name}.output"
        daemons.start(stack, hosts, i, program, env={**env, "SGE_ND": "true"}, log=log)

    def wait(reached: Callable[[], bool], what: str) -> None:
        wait_until(reached, lambda: f"{what} did not come up\n{cluster.logs()}")

    with contextlib.ExitStack() as stack:
        start(0, "sge_qmaster")
        wait(lambda: cluster.call("qconf", "-sconf").returncode == 0, "qmaster")
        _configure(cluster, slots)
        for i in range(len(hosts)):
            start(i, "sge_execd")
        # A host is ready when its queue shows a load and no state (u: nothing heard of it).
        ready = re.compile(r"^all\.q@\w+ +BIP +[\d/]+ +[\d.]+ +\S+ *$", re.M)
        wait(lambda: len(ready.findall(cluster.call("qstat", "-f").stdout)) == len(hosts), "execd")
        yield cluster


def _cell(cluster: GridEngine) -> None:
    folder, spool, common = cluster.folder, cluster.folder / "spool", cluster.folder / "root" / "default" / "common"
    for path in (common, spool / "qmaster" / "job_scripts", spool / "execd"):
        path.mkdir(parents=True)
    for name in ("bin", "lib", "util", "utilbin"):
        (folder / "root" / name).symlink_to(f"/var/lib/gridengine/{name}")
    (common / "act_qmaster").write_text(f"{cluster.hosts[0].name}\n")
    (common / "cluster_name").write_text("mpikvtest\n")
    (common / "bootstrap").write_text(BOOTSTRAP.format(common=common, spool=spool))
    changes = {
        "execd_spool_dir": str(spool / "execd"),
        "mailer": "/bin/true",
        "min_uid": "0",
        "min_gid": "0",
        "enforce_user": "none",
        "load_report_time": "00:00:05",
        # Groups that execd gives to jobs to know their processes by: others than those of another cluster on this
        # machine, whose processes it sees as well.
        "gid_range": f"{_first_group()}-{_first_group() + GROUPS - 1}",
    }
    (folder / "global").write_text(_changed((DATA / "default-configuration").read_text(), changes))
    cluster.run(str(LIBRARY / "spoolinit"), "classic", "libspoolc", f"{common};{spool}/qmaster", "init")
    resources = DATA / "util" / "resources"
    for what in (
        ("configuration", str(folder / "global")),
        ("complexes", str(resources / "centry")),
        ("usersets", str(resources / "usersets")),
        ("managers", "root"),
    ):
        cluster.run(str(LIBRARY / "spooldefaults"), *what)


def _first_group() -> int:
    return 100_000 + os.getpid() * GROUPS


def _configure(cluster: GridEngine, slots: int) -> None:
    """Tell the qmaster its hosts, the parallel environments and the queue."""
    names = [host.name for host in cluster.hosts.hosts]
    for name in names:
        cluster.run("qconf", "-ah", name)
        cluster.run("qconf", "-as", name)
        _add(cluster, "-Ae", HOST.format(name=name))
    _add(cluster, "-Ahgrp", f"group_name @allhosts\nhostlist {' '.join(names)}\n")
    for name, rule in PLACEMENTS.items():
        _add(cluster, "-Ap", PARALLEL.format(name=name, rule=rule))
    queue = {
        "qname": "all.q",
        "hostlist": "@allhosts",
        "slots": str(slots),
        "pe_list": " ".join(PLACEMENTS),
        "shell": "/bin/bash",
        "tmpdir": str(cluster.hosts.local),  # of each host its own: a job's folder in it is removed host by host
        "load_thresholds": "NONE",
        "s_core": "0",  # a rank that is aborted would else be there for as long as its memory takes to be written
        "h_core": "0",
    }
    _add(cluster, "-Aq", _changed(cluster.run("qconf", "-sq"), queue))
    _add(cluster, "-Msconf", _changed(cluster.run("qconf", "-ssconf"), SCHEDULER))


def _changed(text: str, changes: Mapping[str, str]) -> str:
    kept = [line for line in text.splitlines() if line.split()[:1] and line.split()[0] not in changes]
    return "\n".join([*kept, *(f"{name} {value}" for name, value in changes.items())]) + "\n"


def _add(cluster: GridEngine, option: str, text: str) -> None:
    file = cluster.folder / "object"
    file.write_text(text)
    cluster.run("qconf", option, str(file))
