"""What a rank has sent, counted: all messages and bytes, and in a store the bytes by key, leg and link.

A message among workers says by its tag which key and leg it is of. So a transport counts bytes by receiver and tag,
where a store asks for it (process groups have a tag for each call). A bundle (ordered.py) counts as the messages in it.
The tags of messages to servers and of their answers are used in turn, so who makes these messages counts them: a worker
counts what it asks of servers *and* what they answer. Hence each byte of a store is in the ledger of one worker.

Cost: for each message one entry of a dict is changed, some 0.1 µs. Memory: an entry, some 200 bytes, for each key, leg
and rank that this one sends to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from mpikv.transports import wire
from mpikv.transports.wire import TAG_KEYS, TAG_REPLY

Use = tuple[int | None, str]  # what a message is for: the number of its key (None: it is no key's), and its leg
Ends = tuple[int, int]  # the ranks that send and receive it
NO_TAG = 1 << 62  # above all tags
MEMORY: Ends = (-1, -1)  # in their place: it goes through memory that both share

OF_RANKS = ("init", "reduce_scatter", "allgather", "adasum")  # legs, by the use of a key's tag
OF_NO_KEY = {
    wire.TAG_STATES: "states",
    wire.TAG_CALLS: "calls",
    wire.TAG_CALLS + 1: "calls",
    wire.TAG_BUNDLES: "bundles",
}
OF_REQUESTS = {
    **dict.fromkeys((wire.INIT, wire.REMOVE, wire.ROWS_INIT), "init"),
    **dict.fromkeys((wire.PUSH, wire.PUSHPULL, wire.ROWS_PUSH), "push"),
    **dict.fromkeys((wire.PULL, wire.ROWS_PULL, wire.ROWS_CHANGED), "pull"),
}


def use_of_tag(tag: int) -> Use:
    """What a message among workers is for."""
    if tag < TAG_KEYS:
        return None, OF_NO_KEY.get(tag, "control")
    return wire.key_of(tag), OF_RANKS[(tag - TAG_KEYS) % wire.TAGS_PER_KEY]


def use_of_request(kind: int, key_id: int) -> Use:
    """What a request to a server is for."""
    if kind in OF_REQUESTS:
        return key_id, OF_REQUESTS[kind]
    return None, "states" if kind in (wire.SAVE, wire.LOAD) else "control"


class Ledger:
    """The counts of one rank. messages: all that its transport has sent. by_tag: their bytes, by receiver and tag.

    tags_from: tags from here on are counted each by itself, as those below TAG_REPLY are; the others together.
    clients: of servers.

    A transport counts a message in its `isend`, since a call from there would cost more than the counting:
    `ledger.messages += 1` and `ledger.by_tag[dest, tag if tag < TAG_REPLY or tag >= ledger.tags_from else TAG_REPLY]`.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.by_tag: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.tags_from = NO_TAG
        self.clients: list[ClientLedger] = []

    @property
    def bytes(self) -> int:
        """The bytes of all messages."""
        return sum(self.by_tag.copy().values())

    def bundled(self, dest: int, tag: int, n_bytes: int) -> None:
        """Count so many bytes of a bundle, which counts as a message by itself, as those of a message with this tag."""
        self.by_tag[dest, tag] += n_bytes
        self.by_tag[dest, wire.TAG_BUNDLES] -= n_bytes

    def entries(self, rank: int) -> Iterator[tuple[Ends, Use, int]]:
        """All bytes by who sends and receives them and what they are for. rank: this one."""
        for (dest, tag), n_bytes in self.by_tag.items():
            if tag not in (wire.TAG_REQUEST, TAG_REPLY):  # which clients count
                yield (rank, dest), use_of_tag(tag), n_bytes
        for client in self.clients:
            yield from client.entries(rank)


class ClientLedger:
    """The counts of one client: bytes of its requests to servers, and of their answers, by server, kind and key.

    servers: their ranks. through_memory: which of them it reaches through memory.
    """

    def __init__(self, servers: Sequence[int], through_memory: Sequence[bool]) -> None:
        self._servers, self._through_memory = servers, through_memory
        self.asked: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self.answered: defaultdict[tuple[int, int, int], int] = defaultdict(int)

    def ask_together(self, server: int, requests: Sequence[tuple[wire.Header, wire.Payload]], n_bytes: int) -> None:
        """Count a message of several requests. n_bytes: its length."""
        for header, payload in requests[:-1]:
            size = wire.padded(wire.length_of(payload))
            self.asked[server, header.kind, header.key_id] += size
            n_bytes -= size
        header = requests[-1][0]
        self.asked[server, header.kind, header.key_id] += n_bytes

    def told(self, server: int, n_bytes: int) -> None:
        """Count a control message of a server that is a rank of its own. n_bytes: its length."""
        self.answered[server, 0, 0] += n_bytes

    def entries(self, rank: int) -> Iterator[tuple[Ends, Use, int]]:
        """See `Ledger`. What answers a push is a pull."""
        for (server, kind, key_id), n_bytes in self.asked.items():
            yield self._ends(server, (rank, self._servers[server])), use_of_request(kind, key_id), n_bytes
        for (server, kind, key_id), n_bytes in self.answered.items():
            kind_back = wire.PULL if kind == wire.PUSHPULL else kind
            yield self._ends(server, (self._servers[server], rank)), use_of_request(kind_back, key_id), n_bytes

    def _ends(self, server: int, ends: Ends) -> Ends:
        return MEMORY if self._through_memory[server] else ends
