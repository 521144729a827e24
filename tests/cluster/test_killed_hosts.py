"""`mpikv launch --restarts` over three hosts of which some crash or are cut off, or processes of which are killed.

The program itself looks whether an example was used twice or left out. Each case is made from its seed alone, which
stands in the name of the test.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from random import Random

import jobs
import pytest
from batch_jobs import HERE
from launching import Command, host_file, launched
from namespaces import Network

pytestmark = pytest.mark.cluster_full
LIMIT_S, LEFT_S = 300, 10
LOST_S = 30  # until the processes of a host that is cut off notice it
FAULTS = ("crash", "cut", "mpirun", "rank")


@pytest.mark.parametrize("seed", range(8))
def test_a_job_goes_on_without_what_was_lost(ssh_hosts: Network, mpi: jobs.Mpi, seed: int) -> None:
    random = Random(seed)
    faults = [FAULTS[seed % len(FAULTS)], *random.sample(FAULTS, random.randint(0, 1))]
    slots, servers = random.randint(1, 2), random.randint(0, 1)
    own_disks, snapshot_s = random.random() < 0.5, random.choice([1e-6, 0.1])
    case = f"{faults}, {slots=}, {servers=}, {own_disks=}, {snapshot_s=}"
    left, file, words = [*ssh_hosts.hosts], ssh_hosts.folder / "enough", list[str]()
    entry = f"{{name}} slots={slots}"
    options = ["-n", 3 * slots - servers, "-s", servers, "-H", host_file(ssh_hosts, entry), "--restarts", len(faults)]
    variables = {"MPIKV_SNAPSHOT_S": str(snapshot_s), **({"TMPDIR": str(ssh_hosts.local)} if own_disks else {})}
    program, before = ["python", str(HERE / "surviving.py"), str(file)], ssh_hosts.snapshot()
    killed = r"was killed by signal 9 \(SIGKILL\)"
    with launched(ssh_hosts, mpi, options, program, timeout_s=LIMIT_S, **variables) as running:
        workers = begun(running, 0, len(left) * slots - servers)
        for number, fault in enumerate(faults, 1):
            time.sleep(random.uniform(0, 2))
            if fault in ("crash", "cut"):
                host = left.pop(random.randrange(1, len(left)))  # not that of the launcher
                getattr(ssh_hosts, fault)(host)
                words.append(f"on {host.name} (went away without a report|{killed})")
            else:
                running.kill(mpirun(running) if fault == "mpirun" else random.choice(workers))
                words.append(f"mpirun {killed}" if fault == "mpirun" else rf"worker \d on h\d {killed}")
            workers = begun(running, number, len(left) * slots - servers)
        file.touch()
    running.result.check(0)
    ssh_hosts.assert_gone(before, LOST_S + LEFT_S if "cut" in faults else LEFT_S)
    said = re.findall("^mpikv launch: .*starting again, .*$", running.result.stderr, re.M)
    assert len(said) == len(faults), f"{case}\n{running.result.output}"
    for line, how in zip(said, words, strict=True):
        assert re.search(f"{how}; starting again", line), f"{case}\n{running.result.output}"
    for host in left:
        assert "snapshots" not in ssh_hosts.run(host, "ls", str(ssh_hosts.local)), case


def begun(running: Command, number: int, workers: int) -> list[int]:
    """Wait until a run has begun, with so many workers, from the state that the launcher has said; their processes."""
    step = "0"
    if number:
        said = running.wait_for(rf"starting again, {number} of \d+, from (?:step (\d+)|the beginning)", LIMIT_S)
        step = said[1] or "0"
    lines = (rf"run {number}: worker {i} of {workers} is h\d (\d+) at step {step}\n" for i in range(workers))
    return [int(running.wait_for(line, LIMIT_S)[1]) for line in lines]


def mpirun(running: Command) -> int:
    """The process that the launcher has started."""
    (found,) = (
        pid for pid in running.processes() if f"\nPPid:\t{running.pid}\n" in jobs.text(Path(f"/proc/{pid}/status"))
    )
    return found
