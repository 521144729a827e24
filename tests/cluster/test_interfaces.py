"""MPIKV_INTERFACE on hosts with a second network: one that leads nowhere, and one that works.

Every host has eth0, which connects the hosts. `nowhere` has an address, of the same network on every host, but its
cable ends in the air. What a library then does by itself is seen first, so that the other tests could fail.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
from namespaces import Network, missing, network
from needs import need

PROGRAM = str(Path(__file__).with_name("counted.py"))
N_BYTES = 4 << 20
# With two workers each sends half of the values twice, and worker 0 the initial value. What another interface may have
# carried: searching for addresses, and the daemons' own messages.
LEAST, MOST = N_BYTES, 64 << 10
TIMEOUT_S = 25  # for a job that is expected to hang; others take two seconds
# The libraries, and what makes MPICH take its other network layer
KINDS = {"openmpi": {}, "mpich over UCX": {}, "mpich over libfabric": {"MPIR_CVAR_CH4_NETMOD": "ofi"}}


def over(*selected: str) -> pytest.MarkDecorator:
    """Run a test with each of them, but for the selected ones with --cluster alone."""
    found = [pytest.param(kind, marks=[] if kind in selected else pytest.mark.cluster_full) for kind in KINDS]
    return pytest.mark.parametrize("kind", found)


@pytest.fixture
def pair() -> Iterator[Network]:
    need(missing())
    with network(2) as hosts:
        yield hosts


def nowhere(hosts: Network) -> None:
    """Give every host an interface of a network that does not connect them."""
    for i, host in enumerate(hosts.hosts):
        hosts.run(host, "ip", "link", "add", "nowhere", "type", "veth", "peer", "name", "air")
        hosts.run(host, "ip", "address", "add", f"10.99.0.{i + 1}/24", "dev", "nowhere")
        for end in ("nowhere", "air"):
            hosts.run(host, "ip", "link", "set", end, "up")


def second(hosts: Network) -> None:
    one, other = hosts.hosts
    hosts.run(one, "ip", "link", "add", "net1", "type", "veth", "peer", "name", "net1", "netns", str(other.pid))
    for i, host in enumerate(hosts.hosts):
        hosts.run(host, "ip", "address", "add", f"10.88.0.{i + 1}/24", "dev", "net1")
        hosts.run(host, "ip", "link", "set", "net1", "up")
    for host in hosts.hosts:
        hosts.wait_up(host, "net1")


def run(hosts: Network, kind: str, command: list[str], timeout_s: float = 60, **env: str) -> jobs.Job:
    mpi = jobs.find_mpi(kind.partition(" ")[0])
    if mpi is None:
        pytest.skip(f"no {kind} in any known environment")
    options = hosts.options(mpi, 1)
    if mpi.kind == "openmpi":
        assert options[-3:] == ["--mca", "btl_tcp_if_include", "eth0"]  # what is to be tested here
        del options[-3:]
    with hosts.nothing_left():
        return jobs.mpirun(
            2, command, env={**KINDS[kind], **env}, mpi=hosts.mpi(mpi), options=options, timeout_s=timeout_s
        )


def carried(hosts: Network, kind: str, **env: str) -> dict[str, int]:
    job = run(hosts, kind, ["python", PROGRAM, str(N_BYTES)], **env)
    job.check()
    found = re.search(r"carried (\{.*\})", job.stdout)
    assert found is not None, job.output
    return json.loads(found[1])


@over()
def test_by_themselves_the_libraries_fail(pair: Network, kind: str) -> None:
    nowhere(pair)
    job = run(pair, kind, ["python", PROGRAM, str(N_BYTES)], TIMEOUT_S)
    assert job.timed_out or job.status != 0
    assert "carried" not in job.stdout


@over("openmpi", "mpich over libfabric")
def test_an_interface(pair: Network, kind: str) -> None:
    nowhere(pair)
    sent = carried(pair, kind, MPIKV_INTERFACE="eth0")
    assert sent["eth0"] >= LEAST
    assert sent["nowhere"] <= MOST


@over("mpich over UCX")
def test_one_of_two_that_work(pair: Network, kind: str) -> None:
    second(pair)
    for value, used, other in (("eth0", "eth0", "net1"), ("10.88.0.0/16", "net1", "eth0")):
        sent = carried(pair, kind, MPIKV_INTERFACE=value)
        assert sent[used] >= LEAST
        assert sent[other] <= MOST


INFO = ["python", "-m", "mpikv", "info"]


@over("mpich over UCX")
@pytest.mark.parametrize("command", [["python", PROGRAM, "1000"], pytest.param(INFO, marks=pytest.mark.cluster_full)])
def test_a_host_that_does_not_have_it(pair: Network, kind: str, command: list[str]) -> None:
    """The first host has it: then the other one speaks, in a program and in `mpikv info`."""
    pair.run(pair[0], "ip", "link", "add", "only1", "type", "veth", "peer", "name", "air")
    pair.run(pair[0], "ip", "address", "add", "10.99.0.1/24", "dev", "only1")
    for end in ("only1", "air"):
        pair.run(pair[0], "ip", "link", "set", end, "up")
    job = run(pair, kind, command, MPIKV_INTERFACE="only1")
    job.check(None)
    assert "MPIKV_INTERFACE=only1: h2 has no such interface" in job.output
    assert "eth0 (10.77.0.2/24" in job.output
