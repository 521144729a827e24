"""A key's placement in words: its path, why it is that one, and its codec. Pure; the same on every rank.

For the log (observe/log.py), and so not made in any call unless somebody listens.
"""

from __future__ import annotations

from mpikv.common.checks import shown
from mpikv.placement.cut import SHORT_BYTES, seconds
from mpikv.placement.encoding import Wire, encoded_bytes, uncompressed_bytes
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.placement import Placement

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(n_bytes: float) -> str:
    """Return bytes with a unit.

    >>> from mpikv.placement.described import size
    >>> size(12), size(4 << 20)
    ('12 B', '4.0 MiB')
    """
    power = 0
    while n_bytes >= 1024 and power < len(UNITS) - 1:
        n_bytes, power = n_bytes / 1024, power + 1
    return f"{n_bytes:.1f} {UNITS[power]}" if power else f"{n_bytes:.0f} B"


def key(info: KeyInfo) -> str:
    return f"key {shown(info.key)} ({size(info.n_bytes)} {info.dtype}{' on a GPU' * (info.space == 'device')})"


def ranks(members: Members) -> str:
    n_hosts = len({members.hosts[rank] for rank in (*members.workers, *members.servers)})
    servers = several(len(members.servers), "server") if members.servers else "no servers"
    return f"{several(len(members.workers), 'worker')} and {servers} on {several(n_hosts, 'host')}"


def several(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def memory(members: Members, problem: str = "") -> str:
    """Say whether ranks of one host use memory that they share, and why not. problem: why they cannot."""
    return "used" if members.shares_memory else f"not used: {_why_no_memory(members, problem)}"


def _why_no_memory(members: Members, problem: str = "") -> str:
    config, everybody = members.config, (*members.workers, *members.servers)
    if len({members.hosts[rank] for rank in everybody}) == len(everybody):
        return "no host has several ranks" if len(everybody) > 1 else "there is one rank"
    if config.shared_memory == "off":
        return "MPIKV_SHARED_MEMORY=off"
    if members.workers_own and config.host_algorithm != "auto":
        return f"MPIKV_ALGORITHM={config.algorithm}"
    return problem or "the ranks of a host cannot share any"


def placement(members: Members, info: KeyInfo, found: Placement, wire: Wire) -> str:
    """Say which path the values of a key take, and why. wire: how they are sent."""
    if found.path == "owners" and not members.workers_own:
        return _on_servers(members, info, found)
    n_hosts = len(set(members.worker_hosts))
    where = f"{several(len(members.workers), 'worker')} on {several(n_hosts, 'host')}"
    return f"path {found.path} over {where}, since {_why(members, info, found, wire)}"


def cut(members: Members, info: KeyInfo, at: int) -> str:
    """Say what servers take of a key, and why. at: the first element that they own."""
    share = f"servers take {1 - at / max(1, info.n_elems):.3f} of it"
    asked = members.config.servers_take
    if asked != "auto":
        return f"{key(info)}: {share}, since MPIKV_SERVERS_TAKE={asked}"
    added = members.is_added_on_hosts(info)
    of_each = ", ".join(
        f"{1e3 * seconds(members, info.n_bytes, part, added=added):.3g} ms {name}"
        for name, part in (("so", 1 - at / max(1, info.n_elems)), ("among the workers alone", 0.0), ("by servers", 1.0))
    )
    return f"{key(info)}: {share}, since a round takes {of_each}, with links {members.link}"


def _on_servers(members: Members, info: KeyInfo, found: Placement) -> str:
    bound = members.config.bigarray_bound_elems
    if found.first_answers:
        first, second = (members.owner_labels[owner] for owner in found.owners)
        return f"all of it on {first}, and for its death on {second}"
    if len(found.owners) > 1:
        return f"cut evenly over {len(found.owners)} servers, since it has {bound} elements or more"
    why = "it is the only one" if len(members.owners) == 1 else "it held the fewest bytes"
    if len(members.owners) > 1 and info.n_elems >= bound:
        why = "its optimizer needs all of it at one place"
    return f"all of it on {members.owner_labels[found.owners[0]]}, since {why}"


def _why(members: Members, info: KeyInfo, found: Placement, wire: Wire) -> str:
    if len(members.workers) == 1:
        return "there is one worker"
    if found.path == "owners":
        return _why_owners(members, info, found, wire)
    if members.device_path_of(info) != "none":
        return f"that is the path of arrays on GPUs in this store{_by_host(found)}"
    if found.path in ("direct", "hosted", "divided"):
        memory_ = f"the workers {'of each host ' * (found.path != 'direct')}share memory"
        return memory_ + ", and one of each host asks the servers" * (found.path == "divided")
    if found.path == "native":
        return "MPIKV_ALGORITHM=native"
    return "the shared memory of a host is full" if members.shares_memory else _why_no_memory(members)


def _by_host(found: Placement) -> str:
    return "" if found.host is None else f", on the host {found.host}"


def _why_owners(members: Members, info: KeyInfo, found: Placement, wire: Wire) -> str:
    if wire.force:
        return "'force' asks for it"
    if not wire.codec and not wire.back:
        if members.config.host_algorithm == "owners":
            return "MPIKV_ALGORITHM=owners"
        short = info.n_bytes < SHORT_BYTES.get(members.path, 0)
        return "it is short" if short else "half precision travels in two bytes"
    encoded = encoded_bytes(members, info, wire, updated=not found.replicated)
    plain = uncompressed_bytes(members, info)
    return f"in a round {size(encoded)} leave a host encoded, and {size(plain)} as they are"


def line(members: Members, info: KeyInfo, found: Placement, wire: Wire) -> str:
    way = f"{key(info)}: {placement(members, info, found, wire)}"
    return f"{way}; {codec(info, found)}"


def rows(members: Members, info: KeyInfo) -> str:
    owners = "worker" if members.workers_own else "server"
    how = (
        "are at each of 2 servers"
        if members.has_seconds
        else f"are cut evenly over {several(len(members.owners), owners)}"
    )
    return f"{key(info)}: row-sparse, its rows {how}"


def codec(info: KeyInfo, found: Placement) -> str:
    if info.codec == "none":
        return "no codec"
    if found.path != "owners":
        return f"codec {info.codec} is not used: it would save no bytes between hosts"
    return f"codec {info.codec} travels encoded"
