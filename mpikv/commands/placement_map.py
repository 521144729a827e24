"""The map of a job: for each rank its host, role, local rank, device, and what it would hold of a network's values.

It shows what a `dist_sync` store would make of these ranks with the settings in force, and comes from the same
functions: roles and placements are the store's own. The keys of a network count as initialised one by one in the order
of its layers; a `Trainer` puts small ones into buckets and cuts those, which moves some bytes between the owners.

A device is the CUDA device that a rank uses (runtime/device_choice.py) of those that it may see; servers compute on the
processor. Devices are counted by the driver, without importing an array library. All but `visible_gpus` is pure. Cost:
one pass over keys and owners.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from mpikv.codecs.compression import wire_of
from mpikv.commands import models
from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.placement.cut import cut_of
from mpikv.placement.keys import KeyInfo, Shard, ShardPlan
from mpikv.placement.links import expected
from mpikv.placement.members import Members
from mpikv.placement.on_servers import add_load
from mpikv.placement.place import place
from mpikv.placement.topology import Topology, topology
from mpikv.runtime import cuda_driver, device_choice
from mpikv.server.roles import Roles

LONG = 64  # ranks from which on equal hosts share lines
MOST_RANGES = 4  # of rank numbers in one cell
DTYPE = np.dtype("float32")
ITEM_BYTES = DTYPE.itemsize
TITLES = ("rank", "host", "role", "local rank", "device", "shards held")


class Gpus(NamedTuple):
    """What a rank sees: the number of its CUDA devices, its CUDA_VISIBLE_DEVICES, and its MPIKV_LOCAL_DEVICE."""

    number: int
    visible: str
    setting: int | str = device_choice.AUTO


class OwnerLoad(NamedTuple):
    """What an owner holds of a network: whole keys, keys of which it has a part, bytes."""

    whole: int
    parts: int
    n_bytes: int


class Line(NamedTuple):
    """What the map says of one rank."""

    rank: int
    host: str
    role: str  # "worker" or "server"
    number: int  # among the workers or the servers
    local_rank: int
    device: str
    held: str
    held_bytes: int = 0  # of a network


def visible_gpus(environ: Mapping[str, str], setting: int | str = device_choice.AUTO) -> Gpus:
    """Ask the driver for the CUDA devices of this process; 0 where there is none. Takes no memory on a device."""
    return Gpus(len(cuda_driver.ask().names), environ.get("CUDA_VISIBLE_DEVICES", ""), setting)


def device(gpus: Gpus, local_rank: int) -> str:
    """Name the device that a rank uses: `gpu:1`, with its name in CUDA_VISIBLE_DEVICES; `cpu`; or why there is none."""
    try:
        index = device_choice.choose(gpus.setting, local_rank, gpus.number)
    except ConfigError:
        return f"gpu:{gpus.setting} is missing"
    if index is None:
        return "cpu"
    names = [name.strip() for name in gpus.visible.split(",") if name.strip()]
    return f"gpu:{index} (visible: {names[index]})" if index < len(names) else f"gpu:{index}"


def plans(model: str, roles: Roles, hosts: Sequence[str], config: Config) -> list[tuple[int, ShardPlan]]:
    """Return elements and shards of each key of a network. Owners are ranks."""
    members = Members(tuple(hosts), roles.workers, roles.servers, config=config, link=expected(config.link))
    load_bytes = [0] * len(members.owners)
    found = []
    for number, shape in enumerate(models.shapes(model)):
        info, shards = KeyInfo(number, number, tuple(shape), DTYPE), list[Shard]()
        cut = cut_of(members, info, wire_of(info), whole=False)
        if cut:
            of_workers = place(members.ring, info._replace(shape=(cut,)))
            shards += [shard._replace(owner=members.workers[shard.owner]) for shard in of_workers.shards]
        if cut < info.n_elems:
            placement = place(members, info, load_bytes=load_bytes, begin=cut)
            add_load(load_bytes, placement, ITEM_BYTES)
            shards += [shard._replace(owner=members.owners[shard.owner]) for shard in placement.shards]
        found.append((info.n_elems, tuple(shards)))
    return found


def holdings(keys: Sequence[tuple[int, ShardPlan]], ranks: int) -> list[OwnerLoad]:
    """Return what each rank holds of these keys."""
    held = [OwnerLoad(0, 0, 0)] * ranks
    for n_elems, plan in keys:
        for owner, begin, end in plan:
            whole, parts, n_bytes = held[owner]
            entire = end - begin == n_elems
            held[owner] = OwnerLoad(whole + entire, parts + (not entire), n_bytes + (end - begin) * ITEM_BYTES)
    return held


def lines(hosts: Sequence[str], gpus: Sequence[Gpus], roles: Roles, config: Config, model: str = "") -> list[Line]:
    """Make a line for each rank. hosts, gpus: of each rank; model: one of `models.NAMES`, or "" for shares alone."""
    members = Members(tuple(hosts), roles.workers, roles.servers, config=config, link=expected(config.link))
    if model:
        keys = plans(model, roles, hosts, config)
        total_bytes = ITEM_BYTES * sum(n for n, _ in keys)
        held = {
            rank: (_held(one, len(keys), total_bytes), one.n_bytes)
            for rank, one in enumerate(holdings(keys, len(hosts)))
            if one.n_bytes or rank in members.owners
        }
    else:
        of_owners = _share(len(members.owners), "what servers take" if members.divides else "the values")
        held = dict.fromkeys(members.owners, (of_owners, 0))
        if members.divides:
            held |= dict.fromkeys(roles.workers, (_share(len(roles.workers), "what servers do not take"), 0))
    numbers = {rank: ("server", i) for i, rank in enumerate(roles.servers)}
    numbers.update({rank: ("worker", i) for i, rank in enumerate(roles.workers)})
    found: Topology = topology(hosts)
    return [
        Line(
            rank,
            host,
            *numbers[rank],
            found.local_rank[rank],
            "cpu" if numbers[rank][0] == "server" else device(gpus[rank], found.local_rank[rank]),
            *held.get(rank, ("none", 0)),
        )
        for rank, host in enumerate(hosts)
    ]


def _share(owners: int, values: str) -> str:
    if owners > 1:
        return f"1/{owners} of {values}"
    return f"all {values.removeprefix('the ').replace('what', 'that')}"


def table(found: Sequence[Line], *, every_rank: bool = False) -> list[str]:
    """Return the map as lines of text, titles first. Over `LONG` ranks equal hosts share lines, unless `every_rank`."""
    cells: list[tuple[str, ...]]
    if every_rank or len(found) <= LONG:
        cells = [
            (str(one.rank), one.host, f"{one.role} {one.number}", str(one.local_rank), one.device, one.held)
            for one in found
        ]
    else:
        cells = list(_shortened(found))
    rows = [TITLES, *cells]
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shortened(found: Sequence[Line]) -> Iterator[tuple[str, ...]]:
    """Make one line for the ranks of neighbouring hosts that have the same role and device at the same local ranks."""
    by_host: dict[str, list[Line]] = {}
    for one in found:
        by_host.setdefault(one.host, []).append(one)

    def kinds(of_host: list[Line]) -> list[tuple[str, str]]:
        return [(one.role, _kind(one.device)) for one in of_host]

    for _, group in groupby(by_host.values(), key=kinds):
        equal = list(group)
        first, last = equal[0][0].host, equal[-1][0].host
        host = first if len(equal) == 1 else f"{first} ... {last} ({len(equal)} hosts)"
        for (role, kind), places in groupby(range(len(equal[0])), key=lambda place: kinds(equal[0])[place]):
            of_kind = list(places)
            members = [of_host[place] for of_host in equal for place in of_kind]
            devices = list(dict.fromkeys(one.device for one in members))
            yield (
                _short([one.rank for one in members]),
                host,
                f"{role} {_short([one.number for one in members])}",
                _short(of_kind),
                devices[0] if len(devices) == 1 else f"{kind} by local rank",
                _common(members),
            )


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _common(members: Sequence[Line]) -> str:
    """Return what several ranks hold."""
    first = members[0].held
    if all(one.held == first for one in members):
        return first if first == "none" or len(members) == 1 else f"{first} each"
    amounts = [one.held_bytes for one in members]
    return f"{min(amounts)} to {max(amounts)} bytes each"


def _short(numbers: Sequence[int]) -> str:
    parts = ranges(sorted(numbers)).split(", ")
    return ", ".join(parts if len(parts) <= MOST_RANGES else [*parts[: MOST_RANGES - 1], "...", parts[-1]])


def _held(held: OwnerLoad, n_keys: int, total_bytes: int) -> str:
    parts = []
    if held.whole:
        parts.append(f"{held.whole} of {n_keys} keys")
    if held.parts:
        parts.append(f"parts of {held.parts}" + ("" if held.whole else f" of {n_keys} keys"))
    share = 100 * held.n_bytes / total_bytes
    return f"{', '.join(parts)}: {held.n_bytes} bytes ({share:.1f} %)" if parts else "none"


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers in short: `0-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
