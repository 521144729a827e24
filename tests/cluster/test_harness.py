"""The clusters that the other tests run on: what a test may rely on, and that nothing outlives it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grid_engine as grid_engine_module
import namespaces
import pytest
import slurm as slurm_module
import sshd as sshd_module
from namespaces import Host, Network, network
from needs import need
from slurm import Slurm

full = pytest.mark.cluster_full
HOLD = Path(__file__).with_name("hold_everything.py")


# ---- hosts


def start(hosts: Network, host: Host, *command: str) -> subprocess.Popen[str]:
    """A command on a host, no longer on its way there."""
    process = hosts.start(host, *command)
    wait_until(lambda: " ".join(command) in hosts.processes(host).values())
    return process


@contextlib.contextmanager
def running(hosts: Network, host: Host, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A command on a host that the end of the block ends, also where the block fails."""
    process = start(hosts, host, *command)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_what_is_left_behind_is_named_and_killed(hosts: Network) -> None:
    with running(hosts, hosts[1], "sleep", "600.1") as before:
        with pytest.raises(AssertionError, match=r"h3: \d+ sleep 600\.2") as raised, hosts.nothing_left(0.3):
            left = start(hosts, hosts[2], "sleep", "600.2")
        assert "600.1" not in str(raised.value)
        left.communicate(timeout=10)
        assert before.poll() is None
    with hosts.nothing_left(5):
        hosts.start(hosts[0], "sleep", "0.2")


def test_each_host_has_a_disk_of_its_own(hosts: Network) -> None:
    hosts.run(hosts[0], "sh", "-c", f"echo here > {hosts.local}/file")
    assert hosts.run(hosts[0], "ls", str(hosts.local)) == "file\n"
    assert hosts.run(hosts[1], "ls", str(hosts.local)) == ""
    assert list(hosts.local.iterdir()) == []
    with pytest.raises(RuntimeError, match="ls /nowhere on h2: ls: cannot access"):
        hosts.run(hosts[1], "ls", "/nowhere")


# ---- nothing outlives a test


@contextlib.contextmanager
def held(*programs: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that holds a network with these on it; and all processes that belong to the network."""
    command = [sys.executable, str(HOLD), *programs]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, start_new_session=True) as holder:
        try:
            assert holder.stdout is not None
            words = holder.stdout.readline().split()
            assert words[:1] == ["holds"]
            sleeper = int(holder.stdout.readline())
            # It has to enter the host first.
            wait_until(lambda: sleeper in namespaces._processes_in(int(words[3])))
            inside = [pid for host in words[2:] for pid in namespaces._processes_in(int(host))]
            assert len(inside) >= 3 + len(programs)
            yield holder, inside
        finally:
            holder.kill()


@pytest.mark.parametrize(
    "signum",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=full), pytest.param(signal.SIGINT, marks=full)],
    ids=lambda signum: signum.name,
)
def test_nothing_outlives_whoever_made_it(signum: signal.Signals) -> None:
    need(namespaces.missing(), sshd_module.missing(), slurm_module.missing(), grid_engine_module.missing())
    with held("sshd", "slurm", "grid_engine") as (holder, inside):
        holder.send_signal(signum)
        holder.wait(20)
        wait_until(lambda: not any(alive(pid) for pid in inside))


@full
def test_two_at_once_do_not_meet(slurm: Slurm) -> None:
    with network(1) as others, slurm_module.slurm(others, cpus=1) as other:
        assert other.call("sinfo", "-h", "-N", "-o", "%N").stdout.split() == ["h1"]
        assert slurm.call("sinfo", "-h", "-N", "-o", "%N").stdout.split() == ["h1", "h2", "h3"]
        with slurm.hosts.nothing_left(), other.hosts.nothing_left():
            mine = slurm.call("sbatch", "--parsable", "-o/dev/null", "--wrap", "sleep 600").stdout.strip()
            slurm.wait_for(mine, "RUNNING")
            assert other.call("squeue", "-h").stdout == ""
            assert other.call("srun", "-N1", "hostname").stdout == "h1\n"
            slurm.call("scancel", mine)
            slurm.wait_for(mine, "CANCELLED")


def alive(pid: int) -> bool:
    return namespaces._command_line(pid) != ""


def wait_until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
