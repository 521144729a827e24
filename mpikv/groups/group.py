"""A group of ranks and its collective calls: their order, their paths, their tags and their time limits.

Each call has a number, the same on every rank. A call goes through memory where all ranks are on one host (shared.py),
else by messages (messages.py). The caller moves a call through memory on itself while the other ranks keep up; the rest
of it, and every call by messages, is moved on by the progress engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mpikv.arrays.as_numpy import HostArray
from mpikv.common.digests import digest
from mpikv.engine.engine import Engine
from mpikv.engine.operation import Steps
from mpikv.engine.running import Ended
from mpikv.errors import MpikvError, PeerError, StallError, UnsupportedError
from mpikv.groups.call import DEFAULT, GroupCall, Options, spin
from mpikv.groups.collective import Collective
from mpikv.groups.messages import MessageCalls
from mpikv.groups.shared import MismatchError, SharedCalls
from mpikv.session.stalls import Stalls
from mpikv.transports.base import Group

ALL_LATER = -1  # in place of a call's number: this rank makes no more calls
WINDOW_BITS = 5  # calls under way by messages at the same time: 32
LEAST_BITS = 21  # UCX's tags, the shortest among the usual ones, have 23
MOST_COUNTED = 1 << 16  # pairs of rank and tag; of a program that goes on with new ones no message is counted
REMEMBERED = 64  # calls whose texts are kept, to answer ranks that ask for the text of a call


class GroupTags(NamedTuple):
    """A tag: a bit (`user`) for messages between two ranks, half the rest for the group (`base`), then `low_bits`."""

    low_bits: int
    base: int
    user: int

    @classmethod
    def of(cls, max_tag: int, number: int) -> GroupTags:
        """Return the tags of group `number`, from 1 on."""
        bits = (max_tag + 1).bit_length() - 1
        if bits < LEAST_BITS:
            raise UnsupportedError(f"this MPI has tags up to {max_tag} only; process groups need {2**LEAST_BITS - 1}")
        low_bits = (bits - 1) // 2
        most = (1 << (bits - 1 - low_bits)) - 1
        if number > most:
            raise UnsupportedError(f"more than {most} process groups in one job: this MPI has tags up to {max_tag}")
        return cls(low_bits, number << low_bits, 1 << (bits - 1))

    def of_call(self, number: int, digest_: int) -> int:
        """Return the tag for the messages of call `number`; other calls of that number most probably have others."""
        bits = self.low_bits - WINDOW_BITS
        return self.base | (number % (1 << WINDOW_BITS)) << bits | digest_ % (1 << bits)

    def of_user(self, tag: int) -> int:
        limit = (1 << self.low_bits) - 1
        if not 0 <= tag <= limit:
            raise ValueError(f"tag {tag} of a message: tags are 0 to {limit}")
        return self.user | self.base | tag


class RankGroup:
    """One rank's side of a group.

    group: the ranks, in the group's order. number: of the group in the job, the same on all its ranks. shared: makes
    calls through memory; None: the ranks share none. label: of this rank in errors. stalls: is told of waits. stalled:
    makes the error of a call that has waited too long. report: sends the number of a call that this rank does not make,
    or ALL_LATER, and the reason to the group's other ranks, which wait for it.

    calls: how many collective calls this rank has made. failure: why it makes no more. texts: of its last calls, by
    their number; other threads look one up at any time, and must not go through them.
    """

    def __init__(
        self,
        group: Group,
        number: int,
        engine: Engine,
        *,
        timeout_s: float,
        shared: SharedCalls | None,
        label: str,
        stalls: Stalls,
        stalled: Callable[[GroupCall, float], BaseException],
        report: Callable[[RankGroup, int, BaseException], None],
    ) -> None:
        self.group, self.number, self.engine = group, number, engine
        self.rank, self.size = group.rank, group.size
        self.timeout_s = timeout_s
        self.label, self.stalls, self.stalled, self._report = label, stalls, stalled, report
        self.shared = shared
        self.tags = GroupTags.of(group.transport.max_tag, number)
        self.calls = 0
        self.failure: BaseException | None = None
        self.under_way: list[GroupCall] = []
        self._failed_elsewhere: dict[int, BaseException] = {}  # why other ranks do not make a call, by its number
        self.texts: dict[int, str] = {}
        self._messages = MessageCalls(group)
        self._order = threading.Lock()
        self._sent: dict[tuple[int, int], int] = {}  # messages between two ranks, by the receiver and the tag
        self._received: dict[tuple[int, int], int] = {}  # receives that were begun, by the sender and the tag
        self._window: deque[GroupCall] = deque(maxlen=1 << WINDOW_BITS)  # the last calls by messages
        self._last: GroupCall | None = None  # the last call through memory

    # --- point to point: calls that may end in any order

    def send(self, array: HostArray, dest: int, tag: int, options: Options = DEFAULT) -> GroupCall:
        """Send a flat contiguous array to a rank of the group."""
        found = self.tags.of_user(tag)

        def steps() -> Steps[None]:
            yield self.group.isend(array, dest, found)

        with self._order:
            _count(self._sent, (self.group.ranks[dest], tag))
        return self._begin(GroupCall(self, -1, f"send to {dest} with tag {tag}", options, steps()))

    def receive(self, array: HostArray, source: int | None, tag: int, options: Options = DEFAULT) -> GroupCall:
        """Receive exactly `array` from a rank of the group, None: from any. The call's result is that rank."""
        found = self.tags.of_user(tag)
        sender = "any rank" if source is None else str(source)
        with self.engine.lock:
            steps = self._messages.receive_queue(found).receive(array, source)
        call = GroupCall(self, -1, f"recv from {sender} with tag {tag}", options, steps)
        if source is not None:  # a receive from any rank may take the messages that others wait for: these need more
            from_ = self.group.ranks[source]
            if (n := _count(self._received, (from_, tag))) is not None:
                call.need = "sent", [self.number, from_, self.group.ranks[self.rank], tag, n]
        return self._begin(call)

    def has_sent(self, dest: int, tag: int, n: int) -> bool:
        """Whether this rank has begun to send n messages with a tag; yes where that is not counted any more."""
        return self._sent.get((dest, tag), 0) >= n or len(self._sent) >= MOST_COUNTED

    # --- how a call is made

    def start(self, described: Collective, options: Options = DEFAULT) -> GroupCall:
        """Make a collective call: through memory where the ranks share one and the call allows it, else by messages."""
        text = described.text
        if self.failure is not None:
            kind = PeerError if isinstance(self.failure, PeerError) else MpikvError  # it may be another rank's
            raise kind(
                f"{text}: an earlier call of this group has failed, and its ranks are not in step any more "
                f"({type(self.failure).__name__}: {self.failure})"
            ) from self.failure
        code, through_memory = digest(text), None
        if self.shared is not None and described.in_memory is not None:
            through_memory = self.shared.run(code, partial(described.in_memory, self.shared))
        with self._order:  # a callback of a future may make calls in another thread
            number = self._count(text)
            if through_memory is None:
                before = self._window[0] if len(self._window) == self._window.maxlen else None
                steps = described.by_messages(self._messages, self.tags.of_call(number, code))
                call = GroupCall(self, number, text, options, steps, before=before)
                self._window.append(call)
            else:
                before = self._last
                call = self._last = GroupCall(self, number, text, options, through_memory, before=before)
            if through_memory is not None or described.of_all:
                call.need = "made", [self.number, number]
        on_the_spot = through_memory is not None and (before is None or before.done)  # else it would not move
        return self._begin(call, on_the_spot=on_the_spot)

    def _count(self, text: str) -> int:
        self.calls += 1
        self.texts[self.calls] = text
        self.texts.pop(self.calls - REMEMBERED, None)
        return self.calls

    def _begin(self, call: GroupCall, *, on_the_spot: bool = False) -> GroupCall:
        running = call.running
        if on_the_spot:
            spin(running, self.engine.clock)
        if not running.done:
            with self.engine.lock:
                self.under_way.append(call)
                self.engine.take(running)
                self._fail_with_others()
        if running.done and running.error is not None:
            raise running.error
        return call

    def watched(self, call: GroupCall, steps: Steps[Any], before: GroupCall | None) -> Steps[Any]:
        try:
            if before is not None and not before.done:
                call.queued = True
                yield Ended(before.running)
                call.queued = False
                if before.error is not None:
                    raise MpikvError(f"the call before it has failed: {before.error}") from before.error
            result = yield from steps
            if call.finish is not None:
                call.finish()
            return result
        except GeneratorExit:  # `fail` has recorded the error
            raise
        except BaseException as error:  # Ctrl-C, too: the other ranks wait for this one's share of the call
            if call.number >= 0:
                self._failed(error)
            raise
        finally:
            if call in self.under_way:
                self.under_way.remove(call)
            call.finish = None  # it keeps tensors alive
            call.ended()

    # --- failures, on this rank and on others

    def fail(self, call: GroupCall, error: BaseException) -> None:
        """End a call that cannot be completed. The caller holds the engine's lock."""
        if call.number >= 0 and self.failure is None:
            self.failure = error
            # Found by asking. A rank that asks later may get no answer, since this one may have left by then.
            if isinstance(error, MismatchError):
                self._report(self, ALL_LATER, error)
        call.running.fail(error)

    def refuse(self, error: BaseException) -> None:
        """Count a collective call that this rank cannot make, since its arguments are wrong, and report it. Local.

        Ranks that have made it wait for this one, and raise then; where all refuse it, the group can still be used.
        """
        with self._order, self.engine.lock:
            self._count(f"a call with wrong arguments ({type(error).__name__}: {error})")
            self._failed_elsewhere.pop(self.calls, None)
            self._report(self, self.calls, error)

    def _failed(self, error: BaseException) -> None:
        """Make no more collective calls, and report the error to the other ranks, unless each finds it by itself."""
        if self.failure is None:
            self.failure = error
            if not isinstance(error, (MismatchError, StallError, PeerError)):
                with self.engine.lock:
                    self._report(self, ALL_LATER, error)

    def failed_elsewhere(self, number: int, error: BaseException) -> None:
        """Record that another rank does not make call `number`, or, for ALL_LATER, any more. Under the engine's lock"""
        if number == ALL_LATER:
            self.failure = self.failure or error
        else:
            self._failed_elsewhere[number] = error
        self._fail_with_others()

    def _fail_with_others(self) -> None:
        for call in [one for one in self.under_way if one.number >= 0]:
            error = self._failed_elsewhere.get(call.number, self.failure)
            if error is not None:
                self.fail(call, error)

    def close(self) -> None:
        """End all calls under way with an error, and give the group's memory back."""
        with self.engine.lock:
            self.failure = self.failure or MpikvError("the process group was destroyed")
            for call in tuple(self.under_way):
                self.fail(call, MpikvError(f"{call.text}: the process group was destroyed"))
            if self.shared is not None:
                self.shared.discard()


def _count(counts: dict[tuple[int, int], int], pair: tuple[int, int]) -> int | None:
    """Count a message of this rank and tag; None where there are too many of them."""
    if len(counts) >= MOST_COUNTED:
        return None
    counts[pair] = counts.get(pair, 0) + 1
    return counts[pair]
