"""A group of ranks and its collective calls: their order, their tags, their ways and their limits.

Each call has a number, the same on every rank, since all make the same calls in the same order. Ranks of one host call
each other through memory (shared.py), others by messages (messages.py). A call through memory is made on the spot if
the others come soon; what is left of it, and everything by messages, is moved on by the progress engine.

The tag of a call's messages holds its number and some bits of its digest (what it is called, with which shapes and
options), so that messages of different calls are never taken for each other. A rank that waits for long asks the others
(watch.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.broadcast import broadcast
from mpikv.common.digests import digest
from mpikv.engine.backoff import Backoff
from mpikv.engine.engine import Engine
from mpikv.engine.request import Steps
from mpikv.engine.running import Ended, Running
from mpikv.errors import MpikvError, PeerError, ShapeMismatch, StallError, UnsupportedError
from mpikv.groups import messages
from mpikv.groups.mailbox import Mailbox
from mpikv.groups.operators import Operator
from mpikv.groups.shared import Chunk, MismatchError, SharedCalls
from mpikv.transports.base import Group

WINDOW_BITS = 5  # calls under way by messages at the same time: 32
LEAST_BITS = 21  # UCX's tags, the shortest among the usual ones, have 23
PATIENCE_S = 5e-3  # how long a call through memory is made on the spot while others are awaited
ALL_LATER = -1  # for the number of a call: none is made from now on
REMEMBERED = 64  # calls, for the question which one it was


class Tags(NamedTuple):
    """How a tag is divided: one bit for point-to-point, half of the others for the group, `low_bits` for the rest.

    base: the group's number in its place. user: the bit for point-to-point.
    """

    low_bits: int
    base: int
    user: int

    @classmethod
    def of(cls, max_tag: int, number: int) -> Tags:
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
        """Return the tag for the messages of call `number`."""
        bits = self.low_bits - WINDOW_BITS
        return self.base | (number % (1 << WINDOW_BITS)) << bits | digest_ % (1 << bits)

    def of_user(self, tag: int) -> int:
        """Return the tag for the messages between two ranks under a tag of the user's."""
        limit = (1 << self.low_bits) - 1
        if not 0 <= tag <= limit:
            raise ValueError(f"tag {tag} of a message: tags are 0 to {limit}")
        return self.user | self.base | tag


class Options(NamedTuple):
    """What any call may be given. timeout_s: the limit to its waiting, None: the group's.

    finish: what to do at its end.
    """

    timeout_s: float | None = None
    finish: Callable[[], None] | None = None


DEFAULT = Options()


class Call:
    """One call of a group under way, or done."""

    def __init__(self, group: RankGroup, number: int, text: str, options: Options) -> None:
        self.group, self.number, self.text = group, number, text
        self.timeout_s = group.timeout_s if options.timeout_s is None else options.timeout_s
        self.finish = options.finish
        self.running: Running[Any] = Running(_nothing(), text)
        self.started_s = group.engine.clock.now_s()
        self.waited_s = 0.0  # as watch.py counts it
        self.asked = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, with an error or without."""
        return self.running.done

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, if one did."""
        return self.running.error

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until it has ended, and return its result. Raises its error, or StallError after `timeout_s` seconds.

        The limit of the group holds in any case.
        """
        if not self.running.done:
            engine = self.group.engine
            limit_s = float("inf") if timeout_s is None else timeout_s
            engine.wait(self.running, limit_s, lambda: self.group.stalled(self, limit_s))
        self.running.test()
        return self.running.result

    def when_done(self, callback: Callable[[], None]) -> bool:
        """Let `callback` be called once it has ended, by whoever moves it on; returns False if it has ended already."""
        with self.group.engine.lock:
            if self.running.done:
                return False
            self._callbacks.append(callback)
            return True

    def ended(self) -> None:
        """Call the callbacks."""
        for callback in self._callbacks:
            callback()


def _nothing() -> Steps[None]:
    yield from ()


class RankGroup:
    """One rank's side of a group.

    ranks: the transport's, in the group's order. number: which group of the job it is, the same on all its ranks.
    shared: the ranks' memory, where they all share one. stalled: makes the error of a call that has waited too long.
    tell: tells the other ranks of the group which call, by its number, this one does not make: they wait for it.
    """

    def __init__(
        self,
        group: Group,
        number: int,
        engine: Engine,
        *,
        timeout_s: float,
        shared: SharedCalls | None,
        algorithm: str,
        stalled: Callable[[Call, float], BaseException],
        tell: Callable[[RankGroup, int, BaseException], None],
    ) -> None:
        self.group, self.number, self.engine = group, number, engine
        self.rank, self.size = group.rank, group.size
        self.timeout_s = timeout_s
        self.stalled, self._tell = stalled, tell
        self.shared = shared
        self.tags = Tags.of(group.transport.max_tag, number)
        self.calls = 0
        self.failure: BaseException | None = None
        self.under_way: list[Call] = []
        self._heard: dict[int, BaseException] = {}  # calls that have failed on another rank, by their numbers
        self.history: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._algorithm = algorithm
        self._order = threading.Lock()
        self._window: deque[Call] = deque(maxlen=1 << WINDOW_BITS)  # the last calls by messages
        self._last: Call | None = None  # the last call through memory
        self._mailboxes: dict[int, Mailbox] = {}

    # --- collectives: all ranks make the same ones in the same order. Arrays are flat, contiguous, not to be touched
    # --- until the call is done

    def allreduce(self, arrays: Sequence[HostArray], operator: Operator, options: Options = DEFAULT) -> Call:
        """Combine each of `arrays` over all ranks, in place."""
        for array in arrays:
            operator.check(array.dtype)

        def steps(tag: int) -> Steps[None]:
            for array in arrays:
                yield from messages.allreduce(self.group, array, operator, tag, self._algorithm)

        text = f"all_reduce ({operator.name}) of {_shapes(arrays)}"
        return self._start(text, steps, options, lambda shared: shared.allreduce(arrays, operator))

    def reduce(
        self, values: HostArray, out: HostArray, operator: Operator, root: int, options: Options = DEFAULT
    ) -> Call:
        """Combine `values` over all ranks into the root's `out`, which may be `values`."""
        operator.check(values.dtype)
        return self._start(
            f"reduce ({operator.name}) to {root} of {_shapes([values])}",
            lambda tag: messages.reduce(self.group, values, out, operator, root=root, tag=tag),
            options,
            lambda shared: shared.reduce(values, out, operator, root),
        )

    def broadcast(self, arrays: Sequence[HostArray], root: int, options: Options = DEFAULT) -> Call:
        """Copy the root's arrays to all ranks."""

        def steps(tag: int) -> Steps[None]:
            for array in arrays:
                yield from broadcast(self.group, array, root, tag)

        text = f"broadcast from {root} of {_shapes(arrays)}"
        return self._start(text, steps, options, lambda shared: shared.broadcast(arrays, root))

    def allgather(self, pairs: Sequence[tuple[HostArray, Sequence[HostArray]]], options: Options = DEFAULT) -> Call:
        """Copy every rank's values to every rank. pairs: values, and one array for each rank."""
        for values, outs in pairs:
            _check_parts("all_gather", values, outs[self.rank], outs, self.size)

        def steps(tag: int) -> Steps[None]:
            for values, outs in pairs:
                outgoing = dict.fromkeys(range(self.size), values)
                yield from messages.exchange(self._mailbox(tag), outgoing, dict(enumerate(outs)))

        def one_by_one(shared: SharedCalls) -> Steps[None]:
            for values, outs in pairs:
                yield from shared.run(digest_, lambda: shared.allgather(values, outs))  # noqa: B023 - called at once

        text = f"all_gather of {'; '.join(_shapes(outs) for _, outs in pairs)}"
        digest_ = digest(text)
        return self._start(text, steps, options, through=one_by_one)

    def reduce_scatter(
        self, pairs: Sequence[tuple[Sequence[HostArray], HostArray]], operator: Operator, options: Options = DEFAULT
    ) -> Call:
        """Combine part number `rank` of every rank into `out`. pairs: one array for each rank, and `out`."""
        for parts, out in pairs:
            operator.check(out.dtype)
            _check_parts("reduce_scatter", out, parts[self.rank], parts, self.size)

        def steps(tag: int) -> Steps[None]:
            for parts, out in pairs:
                yield from messages.reduce_scatter(self.group, parts, out, operator, tag)

        def one_by_one(shared: SharedCalls) -> Steps[None]:
            for parts, out in pairs:
                yield from shared.run(digest_, lambda: shared.reduce_scatter(parts, out, operator))  # noqa: B023

        text = f"reduce_scatter ({operator.name}) of {'; '.join(_shapes(parts) for parts, _ in pairs)}"
        digest_ = digest(text)
        return self._start(text, steps, options, through=one_by_one)

    def exchange(
        self,
        name: str,
        outgoing: Mapping[int, HostArray],
        incoming: Mapping[int, HostArray],
        same: object,
        options: Options = DEFAULT,
    ) -> Call:
        """Send `outgoing[rank]` to the ranks in it, and receive `incoming[rank]` from those in it.

        It makes gather, scatter and all-to-all. same: what all ranks bring alike, to tell different calls apart.
        """
        return self._start(
            f"{name} {same}", lambda tag: messages.exchange(self._mailbox(tag), outgoing, incoming), options
        )

    def barrier(self, options: Options = DEFAULT) -> Call:
        """Start a call that is done when every rank has made it."""
        return self._start("barrier", lambda tag: messages.barrier(self.group, tag), options, lambda shared: [])

    # --- point to point: done in any order

    def send(self, array: HostArray, dest: int, tag: int, options: Options = DEFAULT) -> Call:
        """Send a flat contiguous array to a rank of the group."""

        def steps() -> Steps[None]:
            yield self.group.isend(array, dest, self.tags.of_user(tag))

        self.tags.of_user(tag)
        return self._begin(self._prepare(Call(self, -1, f"send to {dest} with tag {tag}", options), steps()))

    def receive(self, array: HostArray, source: int | None, tag: int, options: Options = DEFAULT) -> Call:
        """Receive exactly `array` from a rank of the group, None: from any. The call's result is that rank."""
        found = self.tags.of_user(tag)
        sender = "any rank" if source is None else str(source)
        with self.engine.lock:
            steps = self._mailbox(found).receive(array, source)
        return self._begin(self._prepare(Call(self, -1, f"recv from {sender} with tag {tag}", options), steps))

    def _mailbox(self, tag: int) -> Mailbox:
        return self._mailboxes.setdefault(tag, Mailbox(self.group, tag))

    # --- how a call is made

    def _start(
        self,
        text: str,
        steps: Callable[[int], Steps[None]],
        options: Options,
        plan: Callable[[SharedCalls], Sequence[Chunk]] | None = None,
        through: Callable[[SharedCalls], Steps[None]] | None = None,
    ) -> Call:
        """Make a collective call: through memory as `plan` or `through` say, where there are both; else by messages."""
        if self.failure is not None:
            kind = PeerError if isinstance(self.failure, PeerError) else MpikvError  # another rank's may be news here
            raise kind(
                f"{text}: an earlier call of this group has failed, and its ranks are not in step any more "
                f"({type(self.failure).__name__}: {self.failure})"
            ) from self.failure
        shared, code = self.shared, digest(text)
        by_messages = shared is None or (plan is None and through is None)
        with self._order:  # what is chained to a future may make calls in a thread of its own
            self.calls += 1
            call = Call(self, self.calls, text, options)
            self.history.append((self.calls, text))
            if by_messages:
                before = self._window[0] if len(self._window) == self._window.maxlen else None
                self._window.append(call)
            else:
                before, self._last = self._last, call
            if shared is None or by_messages:
                made = steps(self.tags.of_call(call.number, code))
            else:
                made = through(shared) if through is not None else shared.run(code, lambda: plan(shared))  # type: ignore[misc]
            self._prepare(call, _after(before, made))  # before another thread's call can come after it
        return self._begin(call, on_the_spot=not by_messages)

    def _prepare(self, call: Call, steps: Steps[Any]) -> Call:
        call.running = Running(self._watched(call, steps), call.text)
        return call

    def _begin(self, call: Call, *, on_the_spot: bool = False) -> Call:
        running = call.running
        if on_the_spot:
            self._spin(running)
        if not running.done:
            with self.engine.lock:
                self.under_way.append(call)
                self.engine.take(running)
                self._fail_if_heard()
        if running.done and running.error is not None:
            raise running.error
        return call

    def _spin(self, running: Running[Any]) -> None:
        """Make a call on the spot while the others come soon: no other transfer is moved on meanwhile."""
        clock = self.engine.clock
        backoff, deadline_s = Backoff(clock=clock), None
        while not running.done:
            if running.advance():
                backoff.reset()
                deadline_s = None
                continue
            now_s = clock.now_s()
            if deadline_s is None:
                deadline_s = now_s + PATIENCE_S
            if now_s > deadline_s:
                return
            backoff.pause()

    def _watched(self, call: Call, steps: Steps[Any]) -> Steps[Any]:
        try:
            result = yield from steps
            if call.finish is not None:
                call.finish()
            return result
        except GeneratorExit:  # `fail` has said why
            raise
        except BaseException as error:  # Ctrl-C too: the others count on this rank's part of it
            if call.number >= 0:
                self._failed(error)
            raise
        finally:
            self._over(call)

    def _over(self, call: Call) -> None:
        if call in self.under_way:
            self.under_way.remove(call)
        call.finish = None  # it holds tensors
        call.ended()

    def fail(self, call: Call, error: BaseException) -> None:
        """End a call that cannot be done. The caller holds the engine's lock."""
        if call.number >= 0 and self.failure is None:
            self.failure = error
            if isinstance(error, MismatchError):  # found by asking: who asks later may find nobody here any more
                self._tell(self, ALL_LATER, error)
        call.running.fail(error)

    def refuse(self, error: BaseException) -> None:
        """Count a collective call that could not be made here, since its arguments are wrong, and tell the others.

        Ranks that have made it wait for this one; where all of them have refused it, the group goes on. Local.
        """
        with self._order, self.engine.lock:
            self.calls += 1
            self.history.append((self.calls, f"a call with wrong arguments ({type(error).__name__}: {error})"))
            self._heard.pop(self.calls, None)
            self._tell(self, self.calls, error)

    def _failed(self, error: BaseException) -> None:
        """Make no more collective calls. The others are told, but for what each rank finds by itself.

        That is that calls through memory differ, or that somebody does not come.
        """
        if self.failure is None:
            self.failure = error
            if not isinstance(error, (MismatchError, StallError, PeerError)):
                with self.engine.lock:
                    self._tell(self, ALL_LATER, error)

    def hear(self, number: int, error: BaseException) -> None:
        """Another rank says that it does not make call `number`, or ALL_LATER. The caller holds the engine's lock."""
        if number == ALL_LATER:
            self.failure = self.failure or error
        else:
            self._heard[number] = error
        self._fail_if_heard()

    def _fail_if_heard(self) -> None:
        for call in [one for one in self.under_way if one.number >= 0]:
            error = self._heard.get(call.number, self.failure)
            if error is not None:
                self.fail(call, error)

    def close(self) -> None:
        """Give back the group's memory."""
        with self.engine.lock:
            self.failure = self.failure or MpikvError("the process group was destroyed")
            for call in tuple(self.under_way):
                self.fail(call, MpikvError(f"{call.text}: the process group was destroyed"))
            if self.shared is not None:
                self.shared.discard()


def _after(before: Call | None, steps: Steps[None]) -> Steps[None]:
    """Yield from the steps, once an earlier call is done."""
    if before is not None and not before.done:
        yield Ended(before.running)
        if before.error is not None:
            raise MpikvError(f"the call before it has failed: {before.error}") from before.error
    yield from steps


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype)  # which takes NumPy 10 us


def _shapes(arrays: Sequence[HostArray]) -> str:
    """Write dtypes and lengths, each dtype once in a row: 'float32 10, 20, int64 1'."""
    parts: list[str] = []
    last = ""
    for array in arrays:
        dtype = _name(array.dtype)
        parts.append(str(array.size) if dtype == last else f"{dtype} {array.size}")
        last = dtype
    return ", ".join(parts)


def _check_parts(name: str, one: HostArray, own: HostArray, parts: Sequence[HostArray], size: int) -> None:
    if len(parts) != size:
        raise ShapeMismatch(f"{name}: {len(parts)} tensors for {size} ranks")
    if one.size != own.size or any(part.dtype != one.dtype for part in parts):
        raise ShapeMismatch(f"{name}: {one.dtype} {one.size} does not fit {own.dtype} {own.size}")
