"""What a machine costs: its links, and the work of a core.

    link      a message of n bytes takes n + headers bytes of its sender's link out and of its receiver's link in
    latency   from the start of a message's way out to the start of its way in
    core      each rank has one. It pays for each message that it sends or receives, for each of their bytes (MPI and
              the kernel copy them), and for each byte added or copied. While it works it sees nothing new.

Headers on Ethernet: of each packet of `mtu` bytes 52 are IP's and TCP's with time stamps; 14 more are Ethernet's; and
an acknowledgement of 66 bytes goes back for every few packets. One for four gives the bytes that interfaces counted in
docs/performance.md.

Connections that share a link do not fill it: while every host sends to several others, a link's own turns and those of
the other ends do not fit together, and it waits. What is left of it then (`Link.to_all`) is the middle of what plain
sockets reached with 3 and 4 hosts and 1 to 16 MiB: 83.7 to 92.4 % of the bound (`python scripts/bench_links.py --mib
1,4,16 --mtu 9000 --turns 9`, the rows "to all"). Where a switch drops packets it is less.

Sources: RFC 9293 (TCP), RFC 7323 (time stamps), IEEE 802.3.
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


@dataclass(frozen=True)
class Link:
    """The link of every host: so many bytes per second out, and at the same time as many in."""

    bytes_per_s: float
    latency_s: float
    mtu_bytes: int = 1500

    def wire_bytes(self, n_bytes: int) -> float:
        """Return how many bytes a message of `n_bytes` takes of a link."""
        n_bytes += MESSAGE_BYTES
        packets = math.ceil(n_bytes / (self.mtu_bytes - IP_TCP_BYTES))
        headers = IP_TCP_BYTES + ETHERNET_BYTES + ACKNOWLEDGEMENT_BYTES / PACKETS_PER_ACKNOWLEDGEMENT
        return n_bytes + packets * headers

    def time_s(self, n_bytes: int) -> float:
        """Return how long a message of `n_bytes` keeps a link busy."""
        return self.wire_bytes(n_bytes) / self.bytes_per_s

    def to_all(self) -> Link:
        """Return what this link is where every host sends to several others at the same time."""
        return replace(self, bytes_per_s=TO_ALL_SHARE * self.bytes_per_s)


@dataclass(frozen=True)
class Costs:
    """What work costs a rank's core, in seconds.

    message_s: to send a message, and as much to receive it, from Python to the kernel. byte_s: of each byte sent or
    received. add_byte_s, copy_byte_s: of each byte added or copied. poll_s: one look for messages. nap_s: how much
    longer than asked the kernel lets a process sleep. The defaults were measured with `mpikv plan --calibrate`.
    """

    message_s: float = 10e-6
    byte_s: float = 0.16e-9
    add_byte_s: float = 0.12e-9
    copy_byte_s: float = 0.075e-9
    poll_s: float = 2e-6
    nap_s: float = 60e-6


# Open MPI sends up to 64 KiB over TCP at once, header included; a longer message is announced first.
EAGER_BYTES = 64 << 10
SOCKET_BYTES = 1 << 20  # what the kernel takes before it has been sent: a sender's window, about
LOCAL_LATENCY_S = 2e-6  # between ranks of one host
