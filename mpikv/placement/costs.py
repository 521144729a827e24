"""What machines and links cost, and how long an exchange takes on them: the one cost model.

`mpikv plan` predicts with it, and stores cut keys between workers and servers by it (cut.py).

    link      a message of n bytes takes n + headers bytes of its sender's link out and of its receiver's link in
    latency   from the start of a message at its sender to the start of its arrival
    core      each rank has one. It pays for each message that it sends or receives, for each of their bytes (MPI and
              the kernel copy them), and for each byte added or copied

`ring_s`: with the cost model of Hockney a message of m bytes takes a + m b, and m bytes are added in m c. A ring of h
hosts takes 2 (h-1) steps, one after another, each of a + s b + s/2 c, where s is n/p bytes of p workers or a segment of
that; several workers of a host add before and copy afterwards, which takes 2 messages' time for each.

a is the latency (three times that of a message which is announced first) and the work of two cores for a message; b is
the link's and two cores' time for a byte.

`servers_s`: a pipeline. Values come over the links into the servers, their cores add them, and answers leave over their
links out. The longest of these binds. The other direction of a link goes on beside it, but for a window of partitions
of each worker, and the cores but for that of one worker.

Headers on Ethernet: of each packet of `mtu` bytes 52 are IP's and TCP's with time stamps; 14 more are Ethernet's; and
an acknowledgement of 66 bytes goes back for every few packets. One for four gives the bytes that interfaces counted in
docs/performance.md.

While every host sends to several others a link waits for the turns of the other ends. What is left of it then
(`Link.to_all`) is the middle of what plain sockets reached with 3 and 4 hosts and 1 to 16 MiB (`python
scripts/bench_links.py --mib 1,4,16 --mtu 9000 --turns 9`, the rows "to all"). Where a switch drops packets it is less.

Sources: ring: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), section 3; the other terms: Thakur,
Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19 (2005), sections 3 and 4; level by level: Cho, Finkler,
Kung and Hunter, BlueConnect, SysML (2019); the longest of what is under way together: as in Bailey's and Williams'
roofline, CACM 52 (2009). RFC 9293 (TCP), RFC 7323 (time stamps), IEEE 802.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

IP_TCP_BYTES = 52
ETHERNET_BYTES = 14
ACKNOWLEDGEMENT_BYTES = 66
PACKETS_PER_ACKNOWLEDGEMENT = 4
TO_ALL_SHARE = 0.86
MESSAGE_BYTES = 64  # MPI's own header of a message, about, in both libraries
EAGER_BYTES = 64 << 10  # Open MPI sends as much over TCP at once, header included; a longer message is announced first
# How much longer a link takes with both directions busy. So chosen that the steps with servers in
# tests/fixtures/plan_measured.md are met: 4 % in the middle, 12 % at most.
BOTH_DIRECTIONS = 1.04


@dataclass(frozen=True)
class Link:
    """The link of every host: so many bytes per second out, and at the same time as many in."""

    bytes_per_s: float
    latency_s: float
    mtu_bytes: int = 1500

    def wire_bytes(self, n_bytes: int) -> float:
        n_bytes += MESSAGE_BYTES
        packets = math.ceil(n_bytes / (self.mtu_bytes - IP_TCP_BYTES))
        headers = IP_TCP_BYTES + ETHERNET_BYTES + ACKNOWLEDGEMENT_BYTES / PACKETS_PER_ACKNOWLEDGEMENT
        return n_bytes + packets * headers

    def time_s(self, n_bytes: int) -> float:
        return self.wire_bytes(n_bytes) / self.bytes_per_s

    def first_byte_s(self, n_bytes: float) -> float:
        """When the first byte of a message of `n_bytes` is there: three latencies later if it is announced."""
        return self.latency_s * (3 if n_bytes > EAGER_BYTES else 1)

    def to_all(self) -> Link:
        """What this link is where every host sends to several others at the same time."""
        return replace(self, bytes_per_s=TO_ALL_SHARE * self.bytes_per_s)


@dataclass(frozen=True)
class Costs:
    """What work costs a rank's core, in seconds. The defaults were measured with `mpikv plan --calibrate`.

    message_s: to send a message, and as much to receive it, from Python to the kernel. byte_s: of each byte sent or
    received. add_byte_s, copy_byte_s: of each byte added or copied.
    """

    message_s: float = 10e-6
    byte_s: float = 0.16e-9
    add_byte_s: float = 0.12e-9
    copy_byte_s: float = 0.075e-9


def ring_s(n_bytes: int, workers: int, link: Link, costs: Costs, *, hosts: int, segment_bytes: int) -> float:
    """The time of one key round the ring when nothing else is under way and no link is full."""
    segment = min(n_bytes / workers, segment_bytes)
    cores_s = segment * (2 * costs.byte_s + costs.add_byte_s / 2)
    step_s = link.first_byte_s(segment) + link.time_s(int(segment)) + cores_s + 2 * costs.message_s
    return 2 * (hosts - 1) * step_s + (2 * costs.message_s * (workers // hosts) if hosts < workers else 0.0)


def exchange_s(n_bytes: int, workers: int, servers: int, link: Link, costs: Costs) -> float:
    """The time of one key's push and pull when nothing else is under way and no link is full.

    It lies on `servers` servers in equal parts; each of them has a message of every worker, and answers it.
    """
    part_bytes = n_bytes // servers
    each_s = 2 * costs.message_s + part_bytes * (2 * costs.byte_s + costs.add_byte_s)
    return 2 * link.first_byte_s(min(part_bytes, EAGER_BYTES)) + workers * each_s + 2 * servers * costs.message_s


def servers_s(
    push_s: float,
    answer_s: float,
    link_s: float,
    core_s: float,
    *,
    workers: int,
    window_share: float,
    wait_s: float,
) -> float:
    """The time of a push and a pull of all workers, of the host with most to do.

    push_s, answer_s: for how long all pushes, and all answers, keep its link busy in the direction with more of them.
    link_s: both together, in the direction with more. core_s: of the busiest core. window_share: of what a worker has
    on a server, the part that is under way at a time, at most 1. wait_s: the latencies of a message there and one back.
    """
    push_s, answer_s, link_s = (BOTH_DIRECTIONS * seconds for seconds in (push_s, answer_s, link_s))
    links_s = link_s + window_share * (push_s + answer_s - link_s)
    return wait_s + max(links_s, core_s) + window_share / workers * min(links_s, core_s)
