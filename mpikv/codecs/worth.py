"""Whether encoding the values of a key is worth its time: decided once, when the key is initialised.

What is compared are the seconds of a round in both forms, by the links' rates (placement/links.py) and what codec and
messages cost a core (placement/costs.py). The bytes of the busiest link and the work of a worker's core are added up: a
core that encodes does not compute. A key is encoded where that is faster by more than `MARGIN`.

With servers pushes and answers go in opposite directions of the same links: the longer of the two counts, and `APART`
of the shorter one, for what each waits for the other.
"""

from __future__ import annotations

from typing import NamedTuple

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.codecs.compression import of_text, wire_of
from mpikv.codecs.identity import IDENTITY
from mpikv.codecs.speed import FREE, Speed, quick_speed_of
from mpikv.placement.costs import Costs
from mpikv.placement.cut import link_s, seconds, servers_share
from mpikv.placement.encoding import Wire, encoded_bytes, uncompressed_bytes
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members

MARGIN = 1.03
# ResNet-18 on 3 workers and a server, 200 Mbit/s: 6637 ms as it is, 5760 with pushes of 2 bits and answers as they are
# (tests/fixtures/plan_measured.md).
APART = 0.15
# What an encoded element costs a core beside its codec and its messages: new memory for sums, and copies. ResNet-18 on
# 2 hosts whose links are memory: 2 to 2.8 ns more than without, for all codecs alike (`python
# scripts/bench_compression.py --rates 0 --mtu 9000 --hosts 2 --turns 30 --warm-up 3`, with 'force').
HANDLING_S = 2.3e-9


class Worth(NamedTuple):
    """The seconds of a round in both forms."""

    encoded_s: float
    plain_s: float

    @property
    def encodes(self) -> bool:
        """Whether encoded rounds are faster, and not only by noise."""
        return self.encoded_s * MARGIN < self.plain_s


def worth_of(members: Members, info: KeyInfo, *, updated: bool) -> Worth | None:
    """Compare both forms of a key's rounds; None: nothing to decide. updated: whether owners update it."""
    travels, wire = of_text(info.codec), wire_of(info)
    if travels.uncompressed or travels.force or not info.n_elems:
        return None
    on_device = info.space == "device" and wire.on_device
    push, back = (FREE if on_device else quick_speed_of(codec, info.n_elems) for codec in (travels.push, travels.pull))
    if not members.workers_own:
        found = _with_servers(members, info, wire, push, back)
        if members.divides and (share := servers_share(members, info.n_bytes)) < 1.0:
            found = found._replace(plain_s=min(found.plain_s, seconds(members, info.n_bytes, share)))
        return found
    return _among_workers(members, info, wire, push, back, updated=updated)


def _among_workers(members: Members, info: KeyInfo, wire: Wire, push: Speed, back: Speed, *, updated: bool) -> Worth:
    costs, rate, n, workers = Costs(), min(members.link_bytes_per_s), info.n_elems, len(members.workers)
    per_host = workers / len(set(members.worker_hosts))
    sent, sent_plain = encoded_bytes(members, info, wire, updated=updated), uncompressed_bytes(members, info)
    if not updated and wire.gathers(info.n_bytes, workers):
        encoded_core_s = n * (HANDLING_S + push.encode_s + workers * push.add_s)
    else:
        encoded_core_s = n * (HANDLING_S + push.encode_s + push.add_s + back.encode_s / workers + back.decode_s)
    plain_core_s = n * sum_dtype(info.dtype).itemsize * costs.add_byte_s
    return Worth(
        sent / rate + 2 * sent / per_host * costs.byte_s + encoded_core_s,
        sent_plain / rate + 2 * sent_plain / per_host * costs.byte_s + plain_core_s,
    )


def _with_servers(members: Members, info: KeyInfo, wire: Wire, push: Speed, back: Speed) -> Worth:
    costs, workers, servers = Costs(), len(members.workers), len(members.owners)
    added = members.is_added_on_hosts(info._replace(codec=IDENTITY.name))  # as it would be without a codec
    hosts = len(members.speakers) if added else workers

    def round_s(push_bytes: float, answer_bytes: float, pushers: int, core_s: float) -> float:
        both = max(push_bytes, answer_bytes) + APART * min(push_bytes, answer_bytes)
        of_server_s = pushers / servers * (push_bytes + answer_bytes) * costs.byte_s
        return link_s(members, 1.0, added=pushers < workers) * both + max(of_server_s, core_s)

    n = info.n_elems
    of_worker_s = n * (HANDLING_S + push.encode_s + back.decode_s)
    of_server_s = n / servers * (workers * push.add_s + back.encode_s)
    added_s = n / servers * hosts * sum_dtype(info.dtype).itemsize * costs.add_byte_s
    return Worth(
        round_s(wire.push_bytes, wire.pull_bytes, workers, max(of_worker_s, of_server_s)),
        round_s(info.n_bytes, info.n_bytes, hosts, added_s),
    )
