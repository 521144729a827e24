"""What a rank is doing in one of its stores, for those who wait for it.

A rank with several stores may wait in one of them while others miss it in another store, and these must learn of it:
two ranks that close two stores in different orders wait for each other for ever.

Cost: a call that does not wait notes its name and the time; all else is worked out when somebody asks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpikv.common.clock import MACHINE_CLOCK, Clock
from mpikv.observe import program
from mpikv.observe.deadlock import Blocked, WaitFact
from mpikv.observe.looks import Looks, look
from mpikv.observe.recorder import Recorder
from mpikv.observe.stall import Waiting

MOST_NEEDS = (
    100  # of a call with thousands of keys: workers that miss one of them have most often missed the first ones
)


class Activity:
    """The store call that a rank is in, or was in last, and since when.

    store: tells the store from others; the same text on all of its workers, as far as stores can meet. me: this worker
    in it. ending: why the program is about to end; "": it is not. reached(item): how far this rank has come in what
    workers must come to. others: the activities of the process's other stores. alone(thread): whether no other thread
    of this rank may go on while that one waits. facts: which waits cannot end before which, as the last inquiry in this
    store has found. hopeless: a wait, by its id, that can never end, and why. recorder: gets each wait when it has
    ended. looks: at this rank, and by it at others.
    """

    def __init__(
        self, clock: Clock = MACHINE_CLOCK, store: str = "", me: str = "", recorder: Recorder | None = None
    ) -> None:
        self._clock, self.store, self._me = clock, store, me
        self.recorder = Recorder(clock) if recorder is None else recorder
        self._call: object = None  # whose text says what it is, which is not asked for in every call
        self._last: object = "kv.create"
        self._failed = False  # the last call; the process is about to end then, and others still ask
        self.ending = ""
        self._since_s = self._clock.now_s()
        self._home, self._load = threading.get_ident(), program.ThreadLoad(threading.get_native_id())
        self._thread = self._home  # of the last call that waited
        self._n_threads = 0  # that have waited, as far as that matters: one, or more
        self._n_waits = 0
        self._needs: Sequence[Waiting] = ()
        self._free: Callable[[], bool] | None = None
        self.looks = Looks()
        self.elsewhere = " of another store"  # how those name it that are asked of another one
        self.reached: Callable[[Any], Any] = lambda _item: 0
        self.others: Callable[[], Iterable[Activity]] = tuple
        self.alone: Callable[[int], bool] = lambda _thread: True
        self.facts: list[WaitFact] = []
        self.hopeless: tuple[str, str] | None = None

    @contextmanager
    def during(
        self, call: object, needs: Sequence[Waiting] = (), free: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Note a call for as long as it lasts. needs: the waits that it consists of. free(): see `Blocked`."""
        begun_s = self._since_s = self._clock.now_s()
        self._failed = False
        thread = threading.get_ident()
        if self._n_threads == 0 or thread != self._thread:
            self._n_threads, self._thread = self._n_threads + 1, thread
        self._needs, self._free, self._n_waits = needs, free, self._n_waits + 1
        self._call = call
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._last, self._call, self._since_s = call, None, self._clock.now_s()
            if self.recorder.on:
                first = needs[0] if needs and needs[0].key is not None else None
                if first is None:
                    self.recorder.add("agree", begun_s, call)
                else:
                    self.recorder.add("wait", begun_s, first.key, first.round or 0)

    def note(self, call: object) -> None:
        self._last, self._since_s, self._failed = call, self._clock.now_s(), False

    def waiting(self) -> str | None:
        """Return text such as 'in pull of key 'w' for 2.1 s' during a call, else None."""
        return self.text() if self._call is not None else None

    @look("nobody could see what")
    def text(self) -> str:
        """Return text such as 'in pull of key 'w' for 2.1 s', or 'outside the store for 7.0 s, its last call was ...'.

        Where the rank waits in another store: 'in close of another store for 2.1 s'; where it has waited there in vain:
        'its close of another store failed 0.3 s ago'. Where its program has failed: 'ends by ValueError: ...'.
        """
        elapsed_s = self._clock.now_s() - self._since_s
        if self.ending:
            return f"ends by {self.ending}"
        if self._call is not None:
            return f"in {self._call} for {elapsed_s:.1f} s"
        for other in self.others():
            if (call := other._call) is not None:  # noqa: SLF001
                return f"in {call}{other.elsewhere} for {self._clock.now_s() - other._since_s:.1f} s"  # noqa: SLF001
            if other._failed:  # noqa: SLF001
                return f"its {other._last}{other.elsewhere} failed {self._clock.now_s() - other._since_s:.1f} s ago"  # noqa: SLF001
        return f"outside the store for {elapsed_s:.1f} s, its last call was {self._last}"

    # --- for who asks

    def all(self) -> list[Activity]:
        return [self, *self.others()]

    @look("")
    def where(self) -> str:
        """Return where the program is, and what it does there: 'at train.py:41 in main, computing'; "" if unknown.

        It computes or not, or is in a call of this package that has not waited so far: 'in mpikv'.
        """
        blocked = next((one for one in self.all() if one._call is not None), None)  # noqa: SLF001
        place = program.position(self._home if blocked is None else blocked._thread)  # noqa: SLF001
        if not place:
            return ""
        if blocked is None and program.in_package(self._home):
            return f"at {place}, in mpikv"
        computes = None if blocked is not None else self._load.computes(self._clock.now_s())
        return f"at {place}" + {None: "", True: ", computing", False: ", not computing"}[computes]

    @look(None)
    def blocked(self) -> Blocked | None:
        """Return the wait that this rank is in, in any of its stores. None where it is in none, or where several of its
        threads wait: one of them may come to what others need while another one waits.
        """
        if len({one._thread for one in self.all() if one._n_threads}) > 1:  # noqa: SLF001
            return None
        for one in self.all():
            found = one._blocked()  # noqa: SLF001
            if found is not None:
                return found._replace(free=found.free or not self.alone(one._thread))  # noqa: SLF001
        return None

    def _blocked(self) -> Blocked | None:
        call, number, needs, free = self._call, self._n_waits, self._needs, self._free
        if call is None or self._n_threads > 1:
            return None
        place = program.position(self._thread)
        # A rank has another number in each store; one of the others is that of making a store.
        process = f" (pid {os.getpid()})" if len([*self.others()]) > 1 else ""
        text = f"{self._me}{process} in {call}" + (f" at {place}" if place else "")
        return Blocked(
            f"{self.store}/{self._me}/{number}",
            text,
            [(self.store, waiting.need) for waiting in needs[:MOST_NEEDS] if waiting.need is not None],
            free is not None and free(),
        )

    @look(-1)
    def reached_of(self, store: str, item: Any) -> Any:
        """Return how far this rank has come in what workers of a store must come to; -1 where it has no such store."""
        for one in self.all():
            if one.store == store:
                return one.reached(item)
        return -1

    def give_up(self, wait: str, why: str) -> None:
        for one in self.all():
            one.hopeless = wait, why

    @look(None)
    def why_hopeless(self) -> str | None:
        """Return why the wait that this rank is in can never end; None where it may."""
        if self.hopeless is None:
            return None
        blocked = self._blocked()
        return self.hopeless[1] if blocked is not None and blocked.id == self.hopeless[0] else None
