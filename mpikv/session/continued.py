"""The session of a store whose workers go on without those that die (MPIKV_ON_FAILURE=continue).

It stands before the session of a *generation*, `Workers`, which is given up when a rank dies. Then the survivors come
together, make another one, give each other what some of them lack (placement/recovery.py), and make again what was
under way. All that happens within a call of the program's: a survivor that computes meanwhile is waited for.

A call that all workers make, such as `barrier` or `save_optimizer_states`, has two parts here. First all make it, and
each keeps its result; then all agree that they have one. Whoever has seen this agreed knows that all others have a
result, too, also where a death keeps them from learning it. So either all end the call with what they have, or all make
it again.

Cost: of a call without keys one agreement more; of a push nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from mpikv.codecs.compression import of_text
from mpikv.config import Config
from mpikv.engine.operation import Operation
from mpikv.errors import PeerError, StallError
from mpikv.observe.program import WorkerStatus
from mpikv.observe.recorder import Recorder
from mpikv.optimizers.base import Optimizer
from mpikv.placement.keys import Key, KeyInfo
from mpikv.placement.labels import AttributeLog
from mpikv.session.admission import Admission, Give, Take
from mpikv.session.base import Pending, Session, Updater
from mpikv.session.generation import AllClosedError, Generation, Survivors
from mpikv.session.workers import Workers

T = TypeVar("T")
END, RECOVERY = "the end of a call", "recovery"  # topics: all have the result of a call; what survivors tell each other


class Continuing(Protocol):
    """What the strategy does when a rank has died."""

    def finish(self, call: str) -> None:
        """Wait until the rounds that this worker has opened are done. Blocks."""

    def settle(self) -> None:
        """Take what has come whole from the generation that ends. Local."""

    def report(self) -> dict[str, Any]:
        """What this worker has, as JSON. Local."""

    def catch_up(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Begin in the present generation, with what all survivors have reported. Collective, blocks."""


class UnderWay(Operation, Protocol):
    """A transfer of a store that goes on."""

    def pending(self) -> Pending | None:
        """What it waits for in the present generation; None: it is done. Raises its error."""


def _of_now(name: str) -> Any:
    """An attribute of the session of the present generation."""
    return property(lambda session: getattr(session.now.session, name))


class ContinuedSession(Session):
    continues = True

    def __init__(self, name: str, config: Config, survivors: Survivors) -> None:
        self.survivors = survivors
        try:
            self.now = self._regrouped()
        except AllClosedError:
            raise SystemExit(0) from None  # of a server, which comes here again and again: its work is done
        super().__init__(name, config, self.now.session.spaces)
        self.synchronous = self.now.session.synchronous
        self.compressions = self.now.session.compressions
        self.log = self.now.session.log
        self.keeper: Continuing
        self.number, self.at_start = self.now.mine.number, self.now.mine.of
        self.has_spares = config.spares > 0
        self.admission = Admission(self)
        self._n_samplers = 0  # that have got names
        self.tells: dict[str, Callable[[], Any]] = {}  # what else each worker tells the others after a death, as JSON
        self.told: list[dict[str, Any]] = []  # by all of them
        self._ended: dict[str, int] = {}  # by topic, how many calls have ended here
        self._ended_by_all: dict[str, int] = {}  # and on one survivor at least, when they last came together
        self._inside = threading.local()  # a call of all workers
        self._recovering = threading.RLock()
        self._asks: Callable[[], str | None] | None = None
        self.after_close.append(lambda: self.now.session.give_up())  # noqa: PLW0108 - that of now

    def start(self) -> None:
        """Begin, when there is a strategy: in a later generation than the first together with those that were in an
        earlier one. Blocks only then.
        """
        number = self.now.number
        if number and not self.alone:
            try:
                self._begin(self.now.session)
            except Exception as error:
                if not self.survivors.is_death(error):
                    raise
                self.recover(number)

    # --- what it is now

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self.now.number

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.coming.index(self.number) if self.alone else self.now.session.rank

    @property
    def num_workers(self) -> int:  # type: ignore[override]
        return len(self.coming) if self.alone else self.now.session.num_workers

    @property
    def numbers(self) -> Sequence[int]:  # type: ignore[override]
        if self.alone:
            return self.coming
        return sorted(seat.number for seat in self.now.seats if seat.number >= 0 and not seat.spare)

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self.now.alone

    @property
    def coming(self) -> Sequence[int]:  # type: ignore[override]
        return sorted(seat.number for seat in self.now.seats if seat.number >= 0)

    hosts, pid, threaded, activity = map(_of_now, ("hosts", "pid", "threaded", "activity"))
    members, waits, rounds, can_ask = map(_of_now, ("members", "waits", "rounds", "can_ask"))

    @property
    def recorder(self) -> Recorder:
        return self.now.session.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None: ...

    @property
    def attributes(self) -> AttributeLog:
        return self.now.session.attributes

    @attributes.setter
    def attributes(self, attributes: AttributeLog) -> None: ...

    def lookup(self, key: Key) -> KeyInfo | None:
        self.now.session.lookup(key)  # which raises what became of an `init` that had returned early
        return self.infos.get(key)

    def slot_of(self, info: KeyInfo) -> int:
        """That of the present generation, in which slots have the numbers that they have had before."""
        there = self.now.session.infos.get(info.key)
        return super().slot_of(info) if there is None else self.now.session.slot_of(there)

    def stats(self) -> dict[str, Any]:
        return {**self.now.session.stats(), "generation": self.generation}

    def by_key(self) -> dict[Key | None, int]:
        return self.now.session.by_key()

    def workers(self) -> list[WorkerStatus]:
        return self.now.session.workers()

    def serve_in(self, slot: int, optimizer: Optimizer | None, infos: Sequence[KeyInfo]) -> None:
        """Note which optimizer serves which keys, in the slot that all workers have agreed on. Local."""
        if optimizer is not None:
            self._optimizers[slot] = optimizer
        self._slots.update({info.id: slot for info in infos})

    def set_updater(self, updater: Updater) -> None:
        self.now.session.set_updater(updater)

    # --- deaths

    def again(self, attempt: Callable[[], T]) -> T:
        """Make an attempt, and after each death that ends it another one, with the ranks that are left then.

        Within a call of all workers it is a part of that, all of which is made again.
        """
        while not self._is_inside:
            number = self.now.number
            try:
                return attempt()
            except Exception as error:
                if self.now.number == number and not self.survivors.is_death(error):
                    raise
            self.recover(number)
        return attempt()

    @property
    def _is_inside(self) -> bool:
        return getattr(self._inside, "a_call", False)

    def _regrouped(self) -> Generation:
        while True:
            try:
                return self.survivors.regroup()
            except Exception as error:
                if not self.survivors.is_death(error):
                    raise
            gc.collect()  # as in `recover`; a server comes here alone

    def recover(self, number: int, *, admits: bool = False) -> None:
        """Go on from generation `number` to the next, unless another thread has done so. Collective, blocks.

        admits: and let in spares that are ready.
        """
        with self._recovering:
            if self.now.number != number:
                return
            if admits:
                self.survivors.is_ready(admits=True)
            self._go_on()
            gc.collect()  # all of a generation refers to itself, and so keeps memory of the size of the values
        for call in tuple(self.on_change):
            call()

    def _go_on(self) -> None:
        self.keeper.settle()
        before = self.now.session
        with before.activity.during("a recovery"):
            while True:
                self.now.session.give_up()
                self.now = self._regrouped()
                try:
                    self._begin(before)
                    return
                except Exception as error:
                    if not self.survivors.is_death(error):
                        raise

    def _begin(self, before: Workers) -> None:
        """Bring the generation that has begun to where the last one was."""
        session = self.now.session
        session.compressions = self.compressions
        session.stopping.count_on(before.stopping)
        if self._asks is not None:
            session.listen_for(self._asks)
        told = {name: tell() for name, tell in [*self.tells.items()]}
        known = {**self.admission.told(), "ended": self._ended, "told": told}
        known |= {"samplers": self._n_samplers, "stop": before.stopping.told(), "reads": before.stopping.reads}
        known["codecs"] = [(key, one.text) for key, one in self.compressions.of_keys.items()]
        reports = self.everywhere({**self.keeper.report(), **known})
        self.admission.heard(reports)
        self.told = [report["told"] for report in reports]
        self._ended_by_all = {}
        for ended in (report["ended"] for rank, report in enumerate(reports) if rank not in self.admission.new):
            self._ended_by_all |= {topic: max(n, self._ended_by_all.get(topic, 0)) for topic, n in ended.items()}
        self._ended_by_all |= self.admission.ended()
        session.stopping.go_on([report["stop"] for report in reports])
        if self.admission.is_new:  # the others are all in the same place of their programs
            self._ended = dict(self._ended_by_all)
            self._n_samplers = max(report["samplers"] for report in reports)
            session.stopping.read_as(max(report["reads"] for report in reports))
            self.compressions.of_keys |= {key: of_text(text) for report in reports for key, text in report["codecs"]}
        self.keeper.catch_up(reports)

    def everywhere(self, mine: Any) -> list[Any]:
        """What every survivor brings (JSON), by its present number. Collective, blocks."""
        gathered = self.now.session.gather(RECOVERY, json.dumps(mine).encode())
        found: list[Any] = self.now.session.decide(RECOVERY, lambda: [json.loads(one) for one in gathered])
        return found

    # --- spares

    def between_steps(self, give: Give, take: Take) -> bool:
        return self.admission.between_steps(give, take)

    def take_place(self, give: Give, take: Take) -> None:
        self.admission.take_place(give, take)

    @property
    def has_come(self) -> bool:  # type: ignore[override]
        return self.admission.has_come

    def has_news(self) -> bool:
        """Whether a spare that was coming is ready, or dead. Local."""
        return self.survivors.has_news()

    def new_sampler(self) -> str:
        """A name for what the workers draw examples from; the same on all that make theirs in the same order. Local."""
        self._n_samplers += 1
        return f"sampler {self._n_samplers}"

    # --- calls of all workers

    def whole(self, topic: str, attempt: Callable[[], T]) -> T:
        """Make a call that all workers make, and end it on all of them, or make it again on all. Collective, blocks.

        Calls within it are parts of it.
        """
        if self._is_inside:
            return attempt()
        number, result = self._ended.get(topic, 0) + 1, list[Callable[[], T]]()

        def both() -> None:
            if self._ended_by_all.get(topic, 0) < number:
                self._inside.a_call = True
                try:
                    result[:] = [self._result_of(attempt)]
                    self.now.session.agree(END, None, topic)
                finally:
                    self._inside.a_call = False

        self.again(both)
        self._ended[topic] = number
        return result[0]()

    def _result_of(self, attempt: Callable[[], T]) -> Callable[[], T]:
        """Gives what an attempt has returned, or raises what it has raised on all workers."""
        try:
            found = attempt()
        except (PeerError, StallError):
            raise
        except Exception as error:
            if self.survivors.is_death(error):
                raise
            failed = error

            def fail() -> T:
                raise failed

            return fail
        return lambda: found

    def decide(self, call: str, attempt: Callable[[], Any]) -> Any:
        self.check_open(call)
        return self.whole(call, lambda: self.now.session.decide(call, attempt))

    def gather(self, call: str, data: bytes) -> list[bytes]:
        return self.whole(call, lambda: self.now.session.gather(call, data))

    def scatter(self, call: str, parts: Sequence[bytes] | None) -> bytes:
        return self.whole(call, lambda: self.now.session.scatter(call, parts))

    def swap(self, call: str, data: bytes, dests: Sequence[int]) -> dict[int, bytes]:
        return self.whole(call, lambda: self.now.session.swap(call, data, dests))

    def agree(self, topic: str, payload: Any, call: str, *, patient: bool = False) -> Any:
        return self.whole(topic, lambda: self.now.session.agree(topic, payload, call, patient=patient))

    def barrier(self) -> None:
        self.whole("barrier", lambda: self.now.session.barrier())  # noqa: PLW0108 - each time that of now

    def agree_on_factor(self, key: Key) -> None:
        self.whole("factor", lambda: self.now.session.agree_on_factor(key))

    # --- waiting

    def wait(self, pending: Pending, timeout_s: float | None = None, further: Sequence[Pending] = ()) -> None:
        request: UnderWay = pending.request  # type: ignore[assignment]

        def attempt() -> None:
            while (under_way := request.pending()) is not None:
                self.now.session.wait(under_way, timeout_s)

        self.again(attempt)

    def progress(self) -> None:
        self.now.session.progress()

    # --- stopping together

    def stop_requested(self) -> bool:
        self.stopped = self.again(lambda: self.now.session.stop_requested())  # noqa: PLW0108 - each time that of now
        return self.stopped

    def request_stop(self, why: str) -> None:
        try:
            self.now.session.request_stop(why)
        except Exception as error:
            if not self.survivors.is_death(error):
                raise  # else the wish is noted, and the survivors tell it each other in their next call

    def listen_for(self, asked: Callable[[], str | None]) -> None:
        self._asks = asked
        self.now.session.listen_for(asked)

    # --- the end

    def end(self) -> None:
        """Close the session of the present generation. Collective, blocks."""
        with contextlib.suppress(AllClosedError):
            self.again(lambda: self.now.strategy.close())  # noqa: PLW0108 - each time that of now
        if not self.alone:
            self.survivors.closed()

    def not_given(self) -> Iterator[BaseException]:
        return self.now.session.not_given()

    def abandon(self) -> None:
        super().abandon()
        self.now.session.abandon()
