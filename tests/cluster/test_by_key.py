"""The bytes of `store.stats(by_key=True)` are those that the interfaces of hosts with shaped links count.

An interface counts whole packets: to the bytes that MPI gives to TCP each adds 66, Ethernet's header (14), IPv4's (20)
and TCP's with time stamps (32); a packet that only acknowledges is these 66. They are taken off, whether the kernel
counts a long segment as one packet or as many. So is what the host's TCP has sent again, up to 1448 bytes each time: on
a busy machine, where two hosts send to a third, that may be 1 % by itself. What is left, and in no ledger, are MPI's
headers, some hundredths of a percent.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import jobs
import pytest
from namespaces import missing, network

pytestmark = pytest.mark.skipif(missing() != "", reason=missing())

RATE_MBIT = 200
N_BYTES, ROUNDS = 4 << 20, 3
HEADERS_BYTES = 14 + 20 + 32
SEGMENT_BYTES = 1500 - 20 - 32
WITHIN = 0.01
PROGRAM = str(Path(__file__).with_name("counted_by_key.py"))
SERVED, DIVIDED = (
    {"MPIKV_NUM_SERVERS": "1", "MPIKV_SERVER_PLACEMENT": "last", "MPIKV_SERVERS_TAKE": share}
    for share in ("all", "0.5")
)


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
@pytest.mark.parametrize("settings", [{}, SERVED, DIVIDED], ids=["three workers", "two workers and a server", "both"])
def test_the_ledgers_have_what_the_interfaces_count(kind: str, settings: dict[str, str]) -> None:
    mpi = jobs.find_mpi(kind)
    if mpi is None:
        pytest.skip(f"no {kind} in any known environment")
    with network(3, RATE_MBIT) as hosts:
        pids = [f"{host.name}={host.pid}" for host in hosts.hosts]
        command = ["python", PROGRAM, str(N_BYTES), str(ROUNDS), *pids]
        options = hosts.options(mpi, 1)
        job = jobs.mpirun(3, command, mpi=hosts.mpi(mpi), options=options, env=settings, timeout_s=120)
    assert (job.status, job.ranks_left) == (0, []), job.output
    lines = [line.split(" ", 1) for line in job.stdout.splitlines()]
    ledgers = [json.loads(text) for what, text in lines if what == "ledger"]
    (carried,) = (json.loads(text) for what, text in lines if what == "carried")
    assert len(ledgers) == 3 - bool(settings)
    sent, received = Counter[str](), Counter[str]()
    for legs in (legs for ledger in ledgers for legs in ledger.values()):
        for link, n_bytes in (pair for links in legs.values() for pair in links.items()):
            source, dest = link.split(" -> ")  # nothing stays within a host
            sent[source] += n_bytes
            received[dest] += n_bytes
    for host, (sent_bytes, sent_packets, received_bytes, received_packets, again) in carried.items():
        told = host, carried, sent, received
        assert min(sent[host], received[host]) >= N_BYTES, told
        carried_bytes = sent_bytes - HEADERS_BYTES * sent_packets - SEGMENT_BYTES * again
        assert sent[host] == pytest.approx(carried_bytes, rel=WITHIN), told
        assert received[host] == pytest.approx(received_bytes - HEADERS_BYTES * received_packets, rel=WITHIN), told
