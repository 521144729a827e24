"""The physical limits of an exchange of arrays on GPUs. Pure.

p ranks on h hosts sum a value of S bytes, with one copy of the value per rank; g ranks share a GPU, the one with most.

    latency   ceil(log2 p) * l + w       l: one way of a ping-pong of 8 bytes, as in limits.py; w: a copy of 8 bytes on
                                         the GPU, begun and waited for. No result is there without one piece of work on
                                         the GPU that was begun after all others are known to be there.
    device    g S / c                    every rank's array is read once and written once: 2 g S bytes cross the memory
                                         of the GPU, as in a copy of g S bytes. c: bytes copied per second by one
                                         process that has the GPU for itself.
    pinned    min(S/d + S/u, 2 S/b)      through host memory each array goes down once and comes up once. d, u: the
                                         rates of copies to and from page-locked memory, each alone; b: of both at
                                         once, the bytes of both counted; all with every rank at work.
    link      2 S (h-1)/h  / B           as in limits.py

An exchange that stays on the GPUs of a host is bound by the largest of latency, device and link; one that goes through
host memory by the largest of latency, pinned and link. The sum itself, on the host or on the device, is not in it.
Between several GPUs of a host the links between them may bind before their memory does; these are not measured.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mpikv.commands.bench.limits import Limit, ring_bound_s


class DeviceRates(NamedTuple):
    """What was measured. latency_s: one way between ranks. wait_s: the shortest piece of work. link: None on one host.

    Bytes per second: copy on the device; down to page-locked host memory and up from it, each alone, and both at once.
    """

    latency_s: float
    wait_s: float
    copy_bytes_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    both_bytes_per_s: float
    link_bytes_per_s: float | None = None


class Ranks(NamedTuple):
    """How many there are, on the GPU with most of them, and on how many hosts."""

    ranks: int
    per_gpu: int
    hosts: int


def device_limit(n_bytes: int, among: Ranks, rates: DeviceRates) -> Limit:
    """Return the limit for `n_bytes` in one array or in several, where they stay on the GPUs of each host."""
    return _largest(Limit(among.per_gpu * n_bytes / rates.copy_bytes_per_s, "device"), n_bytes, among, rates)


def staged_limit(n_bytes: int, among: Ranks, rates: DeviceRates) -> Limit:
    """Return the limit where each array goes down to page-locked host memory and comes up from there."""
    one_by_one_s = n_bytes / rates.down_bytes_per_s + n_bytes / rates.up_bytes_per_s
    at_once_s = 2 * n_bytes / rates.both_bytes_per_s
    return _largest(Limit(min(one_by_one_s, at_once_s), "pinned"), n_bytes, among, rates)


def _largest(moved: Limit, n_bytes: int, among: Ranks, rates: DeviceRates) -> Limit:
    if among.ranks < 2:
        return Limit(0.0, "latency")
    found = [Limit(math.ceil(math.log2(among.ranks)) * rates.latency_s + rates.wait_s, "latency"), moved]
    if among.hosts > 1 and rates.link_bytes_per_s:
        found.append(Limit(ring_bound_s(n_bytes, among.hosts, rates.link_bytes_per_s), "link"))
    return max(found)
