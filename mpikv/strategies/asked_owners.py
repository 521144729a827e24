"""What a worker asks owners for apart from values, and what its codecs hold: for files of states, and after deaths.

How owners answer is in server/core.py, and what they have kept of earlier generations in server/kept.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mpikv.errors import MpikvError
from mpikv.observe.stall import Waiting
from mpikv.optimizers import archive
from mpikv.optimizers.states import StateRecord, record_of
from mpikv.optimizers.states_file import KIND, StatesFile, records_from_bytes, records_to_bytes
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.base import Pending
from mpikv.spaces.named import HOST
from mpikv.strategies.exchange import wait_for_tags
from mpikv.strategies.owned_keys import OwnedKeys
from mpikv.strategies.states import LOAD, distribute, restored
from mpikv.transports import wire


class AskedOwners(OwnedKeys):
    """The keys with owners, and what these have."""

    # --- states of optimizers

    def _owned(self, server: int) -> list[tuple[KeyInfo, int, int]]:
        """The spans for which a server keeps states: pieces, or whole shards where the optimizer needs them."""
        owned: list[tuple[KeyInfo, int, int]] = []
        for key in self._keys.values():
            for route in key.routes:
                if route.owner == server:
                    pieces = ((route.begin, route.end),) if key.whole else route.pieces
                    owned += [(key.info, begin, end) for begin, end in pieces]
        return [*owned, *self.rows.owned(server)]

    def own_states(self, call: str, *, alone: bool) -> list[StateRecord]:
        """The states of those owners that this worker asks: of its own service, or of some servers. Blocks.

        alone: of all owners.
        """
        if not self.has_owners:
            return []
        first, step = (0, 1) if alone else (self._rank, self._session.num_workers)
        owners = range(first, len(self._servers), step)
        answers = {owner: self._ask(wire.SAVE, [None], call, owner)[0] for owner in owners}
        found = [(owner, record) for owner, answer in answers.items() for record in records_from_bytes(answer)]
        if not self._members.has_seconds:
            return [record for _, record in found]
        return [record for owner, record in found if self._owners_of(self._session.infos[record.key])[0] == owner]

    def send_states(self, file: StatesFile) -> None:
        """Give owners their states of a file. At worker 0 alone; blocks."""
        if not self.has_owners:
            return
        forget = json.dumps([self._session.infos[key].id for key in restored(file)[0]]).encode()
        owned = [self._owned(server) for server in range(len(self._servers))]
        blobs = [wire.with_text(forget, records_to_bytes(distribute(file, shards))) for shards in owned]
        self._ask(wire.LOAD, blobs, LOAD)

    # --- where others go on after a death

    def _owners_of(self, info: KeyInfo) -> list[int]:
        return self.rows.owners_of(info) if info.sparse else [route.owner for route in self._keys[info.id].routes]

    def wait_for_owners(self, info: KeyInfo, call: str) -> None:
        """Wait until all owners of a key have its first value. Blocks."""
        if info.sparse:
            self.rows.wait_for_owners(info, call)
            return
        key = self._keys[info.id]
        for route in key.routes:
            self._pull_uncompressed(key, [], [route])

    def applied(self, infos: Sequence[KeyInfo]) -> list[Pending]:
        """Transfers that end when the owners of these keys have applied all that this worker has pushed until now."""
        self._wait_for_device_calls()
        by_owner = {owner: info for info in infos for owner in self._owners_of(info)}
        wait_for_tags(self._session, self._client, len(by_owner))
        return [
            Pending(
                self._engine.start(self._client.ask(owner, wire.Header(wire.FLUSH), None), "push"),
                Waiting("push", info.key, info.id, owners=(self._labels[owner],)),
            )
            for owner, info in by_owner.items()
        ]

    def counts(self, generation: int, call: str) -> tuple[int, list[list[tuple[Key, list[int], bool]]]]:
        """The last generation that counts, and what each owner held in it: keys, how many pushes of each worker it had
        applied, and whether it was the one that is asked. generation: one that counts. Blocks.
        """
        request = json.dumps([generation, None]).encode()
        answers = [json.loads(answer) for answer in self._ask(wire.KEPT, [request] * len(self._servers), call)]
        last = max(counts for counts, _ in answers)
        return last, [dict(of_owner).get(last, []) for _, of_owner in answers]

    def held(self, generation: int, keys: Mapping[int, Sequence[Key]], call: str) -> dict[Key, dict[str, Any]]:
        """What owners held of keys in a generation (`Held.read` in server/kept.py). keys: by owner. Blocks.

        They forget earlier generations. Raises MpikvError where states cannot be sent.
        """
        requests = [json.dumps([generation, keys.get(owner, ())]).encode() for owner in range(len(self._servers))]
        found = dict[Key, dict[str, Any]]()
        for answer in self._ask(wire.KEPT, requests, call):
            content = archive.from_bytes(answer, KIND, call)
            if error := content.get("error"):
                raise MpikvError(f"{call}: {error}")
            found |= dict(content["keys"])
        return found

    # --- states of codecs

    def codec_states(self, call: str) -> list[StateRecord]:
        self._wait_for_device_calls()  # until all pushes have been sent, and so encoded
        return [
            record_of(key.info, begin, end, state)
            for key in self._keys.values()
            for begin, end, state in key.codec_states()
        ]

    def owed(self, key: Key) -> list[StateRecord]:
        """The states of a key's codec as they are now, in copies. Local."""
        info = self._session.infos.get(key)
        found = None if info is None or info.space != HOST else self._keys.get(info.id)
        if found is None or found.sends_uncompressed:
            return []
        return [
            record_of(found.info, begin, end, {name: value.copy() for name, value in state.items()})
            for begin, end, state in found.codec_states()
        ]

    def take_codec_states(self, parts: Sequence[StateRecord]) -> None:
        pieces: dict[Key, dict[tuple[int, int], Any]] = {}
        for part in parts:
            pieces.setdefault(part.key, {})[part.begin, part.end] = part.state
        self._wait_for_device_calls()
        with self._engine.lock:
            for key in self._keys.values():
                key.take_codec_states(pieces.get(key.info.key, {}))
