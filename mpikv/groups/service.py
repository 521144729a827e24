"""What ranks ask and tell each other beside the calls of their groups, by control messages (session/messages.py).

One rank keeps the rendezvous store: keys and values that ranks exchange before they can form groups, as PyTorch's
stores are. Two messages have no answer: that a rank leaves, and that a call of a group has failed on it. Answers that
nobody waits for any more are dropped.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Any

from mpikv.engine.operation import Predicate, Steps
from mpikv.session.messages import ControlMessages, Message

STORE_RANK = 0  # the rank that keeps the rendezvous store
Reply = Callable[[list[bytes]], None]


class RendezvousStore:
    """The keys with their values, and the requests that wait for a key. `add` keeps numbers as their digits."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[Sequence[str], Reply]] = []

    def handle(self, verb: str, keys: Sequence[str], values: Sequence[bytes], reply: Reply) -> None:
        """Handle one request; `reply` gets the answer now, or when what `get` waits for is there. Raises ValueError for
        a request that cannot be answered, and has changed nothing then.
        """
        held, answer = self._values, list[bytes]()
        if verb == "get":
            self._waiting.append((keys, reply))
        elif verb == "set":
            held.update(zip(keys, values, strict=True))
        elif verb == "add":
            before = held.get(keys[0], b"0")
            try:
                held[keys[0]] = b"%d" % (int(before) + int(values[0]))
            except ValueError:
                raise ValueError(f"add to the key {keys[0]!r}: its value is no number, but {before[:40]!r}") from None
            answer = [held[keys[0]]]
        elif verb == "append":
            held[keys[0]] = held.get(keys[0], b"") + values[0]
        elif verb == "compare_set":
            expected, desired = values
            if held.get(keys[0], b"") == expected:
                held[keys[0]] = desired
            # For a key that does not exist the answer is `expected`, as in PyTorch's stores.
            answer = [held.get(keys[0], expected)]
        elif verb == "check":
            answer = [b"1" if all(key in held for key in keys) else b"0"]
        elif verb == "delete":
            answer = [b"0" if held.pop(keys[0], None) is None else b"1"]
        elif verb == "count":
            answer = [b"%d" % len(held)]
        else:
            raise ValueError(f"no request of this kind: {verb!r}")
        if verb != "get":
            reply(answer)
        waiting, self._waiting = self._waiting, []
        for wanted, waiter in waiting:
            if all(key in held for key in wanted):
                waiter([held[key] for key in wanted])
            else:
                self._waiting.append((wanted, waiter))


class Service:
    """One rank's side. failed: called when a call has failed on another rank, with rank, group, call and text."""

    def __init__(self, messages: ControlMessages, failed: Callable[[int, int, int, str], None]) -> None:
        self._messages, self._failed = messages, failed
        self._store = RendezvousStore()
        self._number = 0
        self._answers: dict[int, Message | None] = {}  # to the requests under way, by their number
        # At STORE_RANK: the ranks that have left, each with how many calls of each group it has made.
        self.left: dict[int, dict[int, int]] = {}
        messages.acts |= {
            "store": self._on_store,
            "answer": self._on_answer,
            "leave": lambda source, message: self.left.update({source: dict(message["calls"])}),
            "failed": lambda source, message: self._failed(source, *message["what"]),
        }

    # --- answering

    def _on_store(self, source: int, message: Message) -> None:
        def reply(values: list[bytes]) -> None:
            self._reply(source, message, values=_as_text(values))

        try:
            self._store.handle(message["verb"], message["keys"], [b64decode(one) for one in message["values"]], reply)
        except ValueError as error:  # a mistake of the rank that asks, which raises it there
            self._reply(source, message, error=str(error))

    def _reply(self, source: int, request: Message, **answer: Any) -> None:
        self._messages.send_to(source, {"kind": "answer", "number": request["number"], **answer})

    def _on_answer(self, _source: int, message: Message) -> None:
        if message["number"] in self._answers:
            self._answers[message["number"]] = message

    def report_failure(self, ranks: Sequence[int], group: int, call: int, text: str) -> None:
        """Report to these ranks that a call of a group has failed here. Local; the caller holds the engine's lock."""
        for rank in ranks:
            self._messages.send(rank, {"kind": "failed", "what": [group, call, text]})

    # --- asking

    def ask(self, verb: str, keys: Sequence[str] = (), values: Sequence[bytes] = ()) -> Steps[list[bytes]]:
        """Send a request to the rendezvous store, and return its answer."""
        self._number = number = self._number + 1
        self._answers[number] = None
        request = {"kind": "store", "number": number, "verb": verb, "keys": list(keys), "values": _as_text(values)}
        self._messages.send_to(STORE_RANK, request)
        try:
            yield Predicate(lambda: self._answers[number] is not None)
            answer = self._answers[number]
        finally:
            del self._answers[number]
        assert answer is not None
        if "error" in answer:
            raise ValueError(answer["error"])
        return [b64decode(one) for one in answer["values"]]

    def leave(self, calls: dict[int, int]) -> Steps[None]:
        """Report to STORE_RANK that this rank leaves. calls: how many calls of each group it has made."""
        self._messages.send_to(STORE_RANK, {"kind": "leave", "calls": list(calls.items())})
        yield Predicate(self._messages.sent)


def _as_text(values: Sequence[bytes]) -> list[str]:
    return [b64encode(value).decode() for value in values]
