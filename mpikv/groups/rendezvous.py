"""The rendezvous store: keys and values that the ranks of a job exchange before they can form groups. A pure state.

It does what `torch.distributed` calls a store: `set`, `add`, `compare_set`, and reads that wait until a key exists. One
rank keeps it; service.py receives the requests of the others. Values are bytes; `add` keeps numbers as their digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Reply = Callable[[list[bytes]], None]


class RendezvousStore:
    """The keys with their values, and the requests that wait for a key."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[Sequence[str], Reply]] = []

    def handle(self, verb: str, keys: Sequence[str], values: Sequence[bytes], reply: Reply) -> None:
        """Handle one request. `reply` is called with the answer: now, or when the keys that `get` waits for exist.

        Raises ValueError for a request that cannot be answered, and has changed nothing then.
        """
        held = self._values
        if verb == "get":
            self._waiting.append((keys, reply))
            self._answer()
        elif verb == "set":
            held.update(zip(keys, values, strict=True))
            reply([])
            self._answer()
        elif verb == "add":
            before = held.get(keys[0], b"0")
            try:
                held[keys[0]] = b"%d" % (int(before) + int(values[0]))
            except ValueError:
                raise ValueError(f"add to the key {keys[0]!r}: its value is no number, but {before[:40]!r}") from None
            reply([held[keys[0]]])
            self._answer()
        elif verb == "append":
            held[keys[0]] = held.get(keys[0], b"") + values[0]
            reply([])
            self._answer()
        elif verb == "compare_set":
            expected, desired = values
            if held.get(keys[0], b"") == expected:
                held[keys[0]] = desired
            # For a key that does not exist the answer is `expected`, as in PyTorch's stores.
            reply([held.get(keys[0], expected)])
            self._answer()
        elif verb == "check":
            reply([b"1" if all(key in held for key in keys) else b"0"])
        elif verb == "delete":
            reply([b"0" if held.pop(keys[0], None) is None else b"1"])
        elif verb == "count":
            reply([b"%d" % len(held)])
        else:
            raise ValueError(f"no request of this kind: {verb!r}")

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for keys, reply in waiting:
            if all(key in self._values for key in keys):
                reply([self._values[key] for key in keys])
            else:
                self._waiting.append((keys, reply))
