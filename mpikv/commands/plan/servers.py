"""A step of a store of several workers: what each host's link and each core has to do, and how long that takes.

Keys have owners, which are servers or in the workers, or they go round the ring of the workers (`ring.py`), or both.
The store's own client is run once on a transport that counts (`counting.py`), which gives the messages that one worker
exchanges with each server, to the byte. All workers do the same at the same time, so a server does as many times that
as there are workers, or hosts of workers who add before one of them asks. `costs.servers_s` makes a time of it; the
step takes as long as the slowest host.

With overlap a key is pushed when its gradient is there, and pulled after the computing: keys go through the links one
after the other, each in its share of the time.

Each key of a synchronous store is cut where the store cuts it (placement/cut.py). The ring's part and the owners' part
are under way at the same time: the step takes as long as the slower of the two, but no less than the links and the core
of a worker, which both use, are busy for both.

Not in it: the optimizer's own arithmetic; the short messages in which servers ask for pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpikv.codecs import compression as compressions
from mpikv.codecs.compression import Codecs, KeyCompression
from mpikv.codecs.identity import IDENTITY
from mpikv.commands.plan import ring
from mpikv.commands.plan.counting import Counting
from mpikv.commands.plan.step import DTYPE, ITEM_BYTES, PlannedStep, Speeds, StepSettings, Workload
from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.placement.costs import Costs, Link, servers_s
from mpikv.placement.cut import cut_of
from mpikv.placement.links import LinkRates
from mpikv.placement.members import Members
from mpikv.placement.owners import add_load, partition_bytes, place_at_owners
from mpikv.server.loop import WINDOW
from mpikv.strategies.client_key import ClientKey
from mpikv.strategies.exchange import Client, InPlace, Item
from mpikv.transports import wire

Array = np.ndarray[tuple[int], np.dtype[np.float64]]


class Loads(NamedTuple):
    """What one worker has with each server, (servers,).

    push_s, answer_s: for how long its messages there and back keep a link busy. core_s: the server's core, without
    codecs and additions. elems: values of its keys that live there.
    """

    push_s: Array
    answer_s: Array
    core_s: Array
    elems: Array


def predict(workload: Workload, workers: int, link: Link, costs: Costs, settings: StepSettings) -> PlannedStep:
    """Predict one step."""
    members = members_of(workers, link, settings)
    infos = list(workload.infos(settings.compression)) if settings.synchronous else []
    cuts = [cut_of(members, info, compressions.wire_of(info)) for info in infos]
    if infos and all(cut == info.n_elems for cut, info in zip(cuts, infos, strict=True)):
        return ring.predict(workload, workers, link, costs, settings)
    to_all = not settings.servers and settings.synchronous and len(set(members.worker_hosts)) > 2
    rest = _by_servers(workload, workers, link.to_all() if to_all else link, costs, settings)
    if not any(cuts):
        return rest
    shapes = tuple(info.shape if cut == info.n_elems else (cut,) for cut, info in zip(cuts, infos, strict=True))
    first = ring.predict(Workload(workload.name, shapes), workers, link, costs, settings)
    busy_s = dict(rest.busy_s)
    for what, seconds in first.busy_s.items():
        busy_s[f"worker {what}"] = busy_s.get(f"worker {what}", 0.0) + seconds
    overlapped_s = None
    if first.overlapped_s is not None and rest.overlapped_s is not None:
        begin_s = min(workload.ready_s(settings.compute_s))
        overlapped_s = max(first.overlapped_s, rest.overlapped_s, begin_s + max(busy_s.values()))
    return PlannedStep(
        f"servers and {first.mode}, sync" if settings.servers else "allreduce ring+owners",
        max(first.exchange_s, rest.exchange_s, *busy_s.values()),
        overlapped_s,
        first.messages + rest.messages,
        first.sent_bytes + rest.sent_bytes,
        busy_s,
    )


def members_of(workers: int, link: Link, settings: StepSettings) -> Members:
    """Return the ranks: workers in blocks on their hosts, servers on hosts of their own."""
    servers = settings.servers
    on = [f"s{i // settings.per_host}" for i in range(servers)]
    return Members(
        (*ring.hosts_of(workers, settings.per_host), *on),
        tuple(range(workers)),
        tuple(range(workers, workers + servers)),
        settings.synchronous,
        Config(servers_take=settings.take),
        link=LinkRates(link.bytes_per_s, link.latency_s),
    )


def keys_of(workload: Workload, members: Members, compression: KeyCompression, codecs: Codecs) -> list[ClientKey]:
    """Return what servers have of the keys, and how it travels. codecs: makes their codecs, of a text."""
    loads, keys = [0] * len(members.owners), []
    for info in workload.infos(compression):
        travels = compressions.wire_of(info)
        begin = cut_of(members, info, travels)
        if begin and begin == info.n_elems:
            continue
        placement = place_at_owners(members, info, travels, load_bytes=loads, begin=begin)
        add_load(loads, placement, ITEM_BYTES)
        if placement.replicated:  # until its trainer sets the optimizer
            placement = place_at_owners(members, info, travels, updated=True)
        keys.append(ClientKey(info, placement, codecs))
        keys[-1].pushed = 1
    return keys


def _adds(members: Members, compression: KeyCompression) -> bool:
    """Whether the workers of a host add before one of them asks the servers. Taken to be so for short keys, too."""
    return members.adds_on_hosts and compression.push == IDENTITY == compression.pull


def counted(
    workload: Workload, members: Members, compression: KeyCompression, speeds: Speeds
) -> tuple[Counting, list[ClientKey]]:
    """Count what one worker sends, receives, encodes and decodes in one step. It is the last rank.

    Raises ConfigError where there are more servers than a worker can talk to at a time.
    """
    servers = len(members.owners)
    transport = Counting(servers, ("server",) * servers + ("worker",))

    def codecs(text: str) -> KeyCompression:
        travels = compressions.of_text(text)
        push, pull = (
            codec if codec == IDENTITY else transport.priced(codec, speeds) for codec in (travels.push, travels.pull)
        )
        return KeyCompression(push, pull, travels.force)

    keys = keys_of(workload, members, compression, codecs)
    longest = max((key.info.n_elems for key in keys), default=0)
    total, value = np.empty(longest, DTYPE), np.empty(longest, DTYPE)  # one for all keys: nobody looks at the values
    items = []
    for key in keys:
        n, flags = key.info.n_elems, wire.UNCOMPRESSED_ANSWER if key.answers_uncompressed else 0
        items.append(Item(key, total[:n], InPlace(value[:n]), key.routes, key.pushed, flags=flags))
    client = Client(transport, range(servers))
    calls = [items]
    if _adds(members, compression):
        alone = [members.is_added_on_hosts(item.key.info) for item in items]
        calls = [[item] for item, by_itself in zip(items, alone, strict=True) if by_itself]
        calls.append([item for item, by_itself in zip(items, alone, strict=True) if not by_itself])
    try:
        for call in calls:
            for request in client.exchange(wire.PUSHPULL, call, 0):
                client.send_all_offered()
                request.test()
    except IndexError:  # every tag waits for an answer
        many = f"{servers} servers: a step would need more than {wire.REPLY_TAGS} messages at a time"
        raise ConfigError(f"{many}, which is too many for a worker") from None
    return transport, keys


def loads_of(one: Counting, keys: Sequence[ClientKey], servers: int, link: Link, costs: Costs) -> Loads:
    """Return what was counted, by server."""
    found = Loads(*(np.zeros(servers) for _ in range(4)))
    for messages, link_s in ((one.sent, found.push_s), (one.received, found.answer_s)):
        for server, n_bytes in messages:
            link_s[server] += link.time_s(n_bytes)
            found.core_s[server] += costs.message_s + n_bytes * costs.byte_s
    for route in (route for key in keys for route in key.routes):
        found.elems[route.owner] += route.end - route.begin
    return found


def _by_servers(workload: Workload, workers: int, link: Link, costs: Costs, settings: StepSettings) -> PlannedStep:
    servers, compute_s = settings.servers, settings.compute_s
    members = members_of(workers, link, settings)
    one, keys = counted(workload, members, settings.compression, settings.speeds_of(workload))
    # Of each worker on their way to a server at a time.
    window_elems = WINDOW * partition_bytes(members) // ITEM_BYTES
    loads = loads_of(one, keys, servers or workers, link, costs)
    workers_on = Counter(members.worker_hosts)
    if _adds(members, settings.compression):
        workers_on = Counter(dict.fromkeys(workers_on, 1))
    pushers = workers_on.total()
    of_server = _coding_s(settings, pushers, costs)
    answered = pushers if servers else pushers - 1  # what a worker sends itself is no message
    worker_s, server_s = one.core_s(costs), float((answered * loads.core_s + of_server * loads.elems).max(initial=0.0))
    if not servers:
        worker_s -= float(loads.core_s.min())
    if pushers < workers:  # the first of a host adds the others' values, who then copy the result
        worker_s += settings.per_host * ITEM_BYTES * loads.elems.sum() * (costs.add_byte_s + costs.copy_byte_s)
    core_s = max(worker_s, server_s) if servers else worker_s + server_s
    wait_s = sum(link.first_byte_s(max((n for _, n in some), default=0)) for some in (one.sent, one.received))
    exchange_s, busy_s = 0.0, dict[str, float]()
    servers_on: dict[str, list[int]] = {host: [] for host in members.hosts}
    for server, rank in enumerate(members.owners):
        servers_on[members.hosts[rank]].append(server)
    for host, here in servers_on.items():
        others = pushers - workers_on[host]
        push_s, answer_s = ((float(each[here].sum()), float(each.sum() - each[here].sum())) for each in loads[:2])
        pushes_in_s, pushes_out_s = others * push_s[0], workers_on[host] * push_s[1]
        answers_out_s, answers_in_s = others * answer_s[0], workers_on[host] * answer_s[1]
        out_s, into_s = pushes_out_s + answers_out_s, pushes_in_s + answers_in_s
        elems = float((loads.elems[here] if here else loads.elems).sum())
        its_s = servers_s(
            max(pushes_in_s, pushes_out_s),
            max(answers_in_s, answers_out_s),
            max(into_s, out_s),
            core_s,
            workers=pushers,
            window_share=min(1.0, window_elems * (len(here) or servers) / max(1.0, elems)),
            wait_s=wait_s,
        )
        exchange_s = max(exchange_s, its_s)
        role = "server" if servers and here else "worker"
        for what, seconds in (("link out", out_s), ("link in", into_s)):
            busy_s[f"{role} {what}"] = max(busy_s.get(f"{role} {what}", 0.0), seconds)
    busy_s |= {"worker core": worker_s, "server core": server_s} if servers else {"worker core": core_s}
    overlapped_s = None
    if compute_s:
        server = int(np.argmax(loads.push_s + loads.answer_s))
        stages_s = [max(core_s, pushers * float(each[server])) for each in loads[:2]]
        one_by_one_s = _overlapped_s(
            keys, server, workload.ready_s(compute_s), compute_s, stages_s, window_elems=window_elems
        )
        overlapped_s = min(compute_s + exchange_s, max(exchange_s, one_by_one_s))
    mode = ("servers, " if servers else "in workers, ") + ("sync" if settings.synchronous else "async")
    mode = "allreduce owners" if members.workers_own else mode
    messages, sent_bytes = (len(one.sent), one.sent_bytes) if servers else _most_of(one, workers)
    return PlannedStep(mode, exchange_s, overlapped_s, messages, sent_bytes, busy_s)


def _most_of(one: Counting, workers: int) -> tuple[int, int]:
    """Return the messages and bytes of the worker with most, each of which also answers all others."""
    beside = np.zeros((workers, 2), int)
    for sign, messages in ((-1, one.sent), (workers - 1, one.received)):  # it sends nothing to itself
        for owner, n_bytes in messages:
            beside[owner] += (sign, sign * n_bytes)
    messages, n_bytes = max(beside.tolist())
    return len(one.sent) + messages, one.sent_bytes + n_bytes


def _coding_s(settings: StepSettings, workers: int, costs: Costs) -> float:
    """Return a server's work for each element: to add or to decode all pushes, and to encode the answers."""
    travels, speeds = settings.compression, settings.speeds
    adds = workers - 1 if settings.synchronous else workers  # the first push of a round becomes its sum
    if travels.push == IDENTITY:
        element_s = adds * ITEM_BYTES * costs.add_byte_s
    else:
        push = speeds[travels.push]
        element_s = push.decode_s + adds * push.add_s if settings.synchronous else adds * push.decode_s
    if travels.pull != IDENTITY:
        element_s += speeds[travels.pull].encode_s * (1 if settings.synchronous else workers)
    return element_s


def _overlapped_s(
    keys: Sequence[ClientKey],
    server: int,
    ready_s: Sequence[float],
    compute_s: float,
    stages_s: Sequence[float],
    *,
    window_elems: int,
) -> float:
    """Return the time of a step that pushes each key when its gradient is there, and pulls all after the computing.

    server: the one with most to do. stages_s: for how long its keys are on their way to it, and back. window_elems: of
    a worker on their way to a server at a time.
    """
    elems = [sum(route.end - route.begin for route in key.routes if route.owner == server) for key in keys]
    of_all, in_s, out_s = max(1, sum(elems)), 0.0, compute_s
    for key, its_elems in reversed(list(zip(keys, elems, strict=True))):
        in_s = max(in_s, ready_s[key.info.id]) + its_elems / of_all * stages_s[0]
        last_s = min(its_elems, window_elems) / of_all * stages_s[1]  # what can leave only when all is there
        out_s = max(out_s + its_elems / of_all * stages_s[1], in_s + last_s)
    return out_s
