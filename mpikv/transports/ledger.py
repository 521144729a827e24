"""What a rank has sent, counted: all messages and bytes, and in a store the bytes of each key.

A message among workers says by its tag which key it is of. So a transport counts bytes by tag, where a store asks for
it (process groups have a tag for each call). The tags of messages
to servers and of their answers are used in turn, so who makes these messages counts them: a worker counts what it asks
of servers *and* what they answer. Hence each byte of a store is in the ledger of one worker.

Cost: for each message one entry of a dict is changed, some 0.1 µs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from mpikv.transports import wire
from mpikv.transports.wire import TAG_KEYS, TAG_REPLY

NO_TAG = 1 << 62  # above all tags
OF_KEYS = {wire.INIT, wire.REMOVE, wire.ROWS_INIT, wire.PUSH, wire.PUSHPULL, wire.ROWS_PUSH}
OF_KEYS |= {wire.PULL, wire.ROWS_PULL, wire.ROWS_CHANGED, wire.ROWS_THERE}  # all other requests are of no key


class Ledger:
    """The counts of one rank. messages: all that its transport has sent. by_tag: their bytes, by tag.

    by_request: bytes of requests to servers and of their answers, by kind and the number of the key. tags_from: tags
    from here on are counted each by itself, as those below TAG_REPLY are; the others together.

    A transport counts a message in its `isend`, since a call from there would cost more than the counting:
    `ledger.messages += 1` and `ledger.by_tag[tag if tag < TAG_REPLY or tag >= ledger.tags_from else TAG_REPLY]`.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.by_tag: defaultdict[int, int] = defaultdict(int)
        self.by_request: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.tags_from = NO_TAG

    @property
    def bytes(self) -> int:
        """The bytes of all messages."""
        return sum(self.by_tag.copy().values())

    def ask_together(self, requests: Sequence[tuple[wire.Header, wire.Payload]], n_bytes: int) -> None:
        """Count a message of several requests. n_bytes: its length."""
        for header, payload in requests[:-1]:
            size = wire.padded(wire.length_of(payload))
            self.by_request[header.kind, header.key_id] += size
            n_bytes -= size
        header = requests[-1][0]
        self.by_request[header.kind, header.key_id] += n_bytes

    def by_key(self) -> Counter[int | None]:
        """Return the bytes by the numbers of keys, and under None what is no key's."""
        found: Counter[int | None] = Counter()
        for tag, n_bytes in self.by_tag.items():
            if tag not in (wire.TAG_REQUEST, TAG_REPLY):  # which stand in `by_request`
                found[wire.key_of(tag) if tag >= TAG_KEYS else None] += n_bytes
        for (kind, key_id), n_bytes in self.by_request.items():
            found[key_id if kind in OF_KEYS else None] += n_bytes
        return found
