"""What a worker says of itself to those who wait for it."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fresh
import pytest
from virtual_clock import VirtualClock

from mpikv.observe import program
from mpikv.observe.activity import Activity
from mpikv.observe.stall import Waiting
from mpikv.runtime.abort import Guard


def test_calls_of_a_store_and_of_another_one() -> None:
    clock = VirtualClock()
    asked, other = Activity(clock), Activity(clock)
    asked.others = lambda: [other]
    clock.advance(5.0, lookers=0)
    assert asked.text() == "outside the store for 5.0 s, its last call was kv.create"
    with asked.during("pull of key 'w'"):
        assert asked.text() == asked.waiting() == "in pull of key 'w' for 0.0 s"
    assert asked.waiting() is None
    assert asked.text().endswith("its last call was pull of key 'w'")
    asked.note("push of key 'w'")
    assert asked.text().endswith("its last call was push of key 'w'")

    with contextlib.suppress(ValueError), other.during("close"):
        clock.advance(2.0, lookers=0)
        assert asked.text() == "in close of another store for 2.0 s"
        raise ValueError
    clock.advance(1.0, lookers=0)
    assert asked.text() == "its close of another store failed 1.0 s ago"
    with asked.during("barrier"):
        assert asked.text().startswith("in barrier")
    with other.during("barrier"):
        pass
    assert asked.text().startswith("outside the store for 0.0 s")


def test_the_wait_that_others_may_count_on() -> None:
    """With all that it needs, of any store of the process; none where several threads wait."""
    asked, other = Activity(store="s", me="worker 0"), Activity(store="t", me="worker 1")
    asked.others, other.others = lambda: [other], lambda: [asked, Activity()]
    other.reached = {7: 3}.__getitem__
    assert asked.blocked() is None
    round_, barrier = Waiting("pull", "w", 7, 4), Waiting("barrier", agreed=("barrier", 2))
    with other.during(round_, (round_, barrier, Waiting("init('w')"))):
        found = asked.blocked()
        assert found is not None
        assert found.id == other.blocked().id
        assert found.needs == [("t", (7, 4)), ("t", (["barrier", 2], 1))]
        assert re.match(
            r"worker 1 \(pid \d+\) in pull of key 'w', round 4 at test_activity.py:\d+ in test_", found.text
        )
        assert [asked.reached_of(store, 7) for store in "tu"] == [3, -1]
        asked.give_up(found.id, "a circle")
        assert (other.why_hopeless(), asked.why_hopeless()) == ("a circle", None)
    assert other.why_hopeless() is None
    with other.during(round_, (round_,)):
        assert other.why_hopeless() is None  # another wait
        thread = threading.Thread(target=lambda: asked.during(barrier).__enter__())
        thread.start()
        thread.join()
        assert asked.blocked() is None


def test_where_the_program_is() -> None:
    """A call that does not count as a wait so far is told from the program's own code."""
    asked, here = Activity(), r"at test_activity.py:\d+ in test_where_the_program_is"
    with ThreadPoolExecutor(1) as another:
        said = another.submit(asked.where)
    assert re.fullmatch(rf"{here}, (not )?computing", said.result())
    assert re.fullmatch(rf"{here}, in mpikv", asked.where())
    with asked.during("barrier"):
        assert re.fullmatch(here, asked.where())


def test_a_thread_that_polls_does_not_compute_and_one_short_of_a_core_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the time that it has taken between two looks; by its state where there is no such time."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    load, found = program.ThreadLoad(1), list[object]()
    for now_s, letter, taken_s in (
        (100.0, "R", 3.0),  # the first look
        (100.25, "R", 3.01),  # it runs at this moment, but has slept before
        (100.5, "S", 3.2),  # the other way round
        (100.55, "S", 3.2),  # just now
        (110.0, "S", 9.0),  # long ago
        (110.2, "R", 9.0),
    ):
        fields = [letter, *["0"] * 10, str(round(taken_s / tick_s)), "0"]
        monkeypatch.setattr(program.proc, "stat", lambda _which, fields=fields: fields)
        found.append(load.computes(now_s))
    monkeypatch.setattr(program.proc, "stat", lambda _which: [])
    assert [*found, load.computes(111.0)] == [True, False, True, False, False, False, None]


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_frames_are_looked_at(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else threads may wait for each other for ever; from any number of threads, and it is as before afterwards."""
    during: list[bool] = []

    class Frame:
        f_code, f_lineno = test_where_the_program_is.__code__.replace(co_filename="<frozen>"), 1

        def __init__(self, n_outside: int) -> None:
            self._n_outside = n_outside

        @property
        def f_back(self) -> Frame | None:
            during.append(gc.isenabled())
            return Frame(self._n_outside - 1) if self._n_outside else None

    def frames() -> dict[int, Frame]:
        during.append(gc.isenabled())
        time.sleep(0)
        return {0: Frame(2)}

    monkeypatch.setattr(sys, "_current_frames", frames)
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(800):
                threads.submit(program.position, 0)
        assert gc.isenabled() == collects
        assert during == [False] * 800 * 4
    finally:
        (gc.enable if before else gc.disable)()


def test_a_program_that_is_about_to_end() -> None:
    """Its error is told while it waits for its turn to print it; the first one, where several follow from it."""
    asked, guard = Activity(), Guard(1, 3)
    guard.watch(asked)
    guard._note_end("ValueError: no such file\nin two lines")
    guard._note_end("sys.exit(1)")
    assert asked.text() == "ends by ValueError: no such file"


THREADS = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from mpikv.observe.program import INSTALLED, alone

go, there = threading.Event(), threading.Event()

def may_push():
    there.set()
    go.wait()

def thread(target, name=None, *args):
    threading.Thread(target=target, name=name, args=args, daemon=True).start()

installed = {}
exec(compile("def monitor(there, go): there.set(); go.wait()", INSTALLED[2] + "bar/monitor.py", "exec"), installed)
pool = ThreadPoolExecutor(1)
case = sys.argv[1]
if case == "own":
    thread(may_push)
elif case == "of mpikv":
    thread(may_push, "mpikv-prefetch")
elif case == "of a package":
    thread(installed["monitor"], None, there, go)
elif case == "idle pool":
    pool.submit(there.set).result()
elif case == "busy pool":
    pool.submit(may_push)
assert there.wait(60)
print(alone(threading.get_ident()), flush=True)
import os
os._exit(0)
"""


@pytest.mark.parametrize("case", ["own", "busy pool", "idle pool", "of mpikv", "of a package"])
def test_threads_that_may_go_on_while_one_waits(case: str, tmp_path: Path) -> None:
    """In a process of its own, since those of a test runner have other threads."""
    (tmp_path / "program.py").write_text(THREADS)
    code = "import runpy, sys; runpy.run_path(sys.argv[2], run_name='__main__')"
    found = fresh.python(code, case, str(tmp_path / "program.py"))
    assert found.stdout.strip() == str(case not in ("own", "busy pool")), found.stderr
