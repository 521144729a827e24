"""Handlers of the signals that stop: noted once, chained, given back; the second one ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fresh
import pytest

from mpikv import kv
from mpikv.config import Config
from mpikv.runtime.signals import StopSignals


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)  # what later tests start would inherit what a store keeps off


def send(number: int, *heard_by: StopSignals) -> None:
    """Signal this process. The handler runs here soon, since another thread gets the signal."""
    os.kill(os.getpid(), number)
    until_s = time.monotonic() + 30
    while number in signal.sigpending() or not all(stop.why() for stop in heard_by):
        assert time.monotonic() < until_s
        time.sleep(0.001)


# `passed_s` is what time it is for those who count signals.
BEGIN = """
import os, signal, sys, time
from types import SimpleNamespace
from mpikv.runtime import signals
from mpikv.runtime.signals import StopSignals
passed_s = 0.0
looks = []  # of handlers at the time
signals.time = SimpleNamespace(monotonic=lambda: looks.append(1) or passed_s)
stops = []
def install(*names):
    stops.append(StopSignals(names))
    stops[-1].install()
def send(name, handled=True):
    before = len(looks)
    os.kill(os.getpid(), signal.Signals["SIG" + name])
    while handled and len(looks) == before:
        time.sleep(0.001)
def say():
    print(stops[0].why(), flush=True)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """In a process without a thread of NumPy's, which might take a signal, and not be in time."""
    return fresh.python(BEGIN + textwrap.dedent(program))


@pytest.mark.parametrize(("file", "why"), [("asked", "SIGUSR1"), ("not there/asked", None)])
def test_a_signal_from_before_the_handlers(tmp_path: Path, file: str, why: str | None) -> None:
    """It was ignored, as in a batch job, but there is the file; a folder that is gone is nothing to fail of."""
    (tmp_path / "asked").touch()
    stop = StopSignals(["TERM", "USR1"], str(tmp_path / file))
    assert stop.why() is None
    stop.install()
    assert stop.why() == why
    stop.restore()


@pytest.mark.parametrize(("name", "stores", "restored"), [("TERM", 1, False), ("USR1", 2, False), ("TERM", 2, True)])
def test_handler_that_a_library_sets_later_is_called_too(name: str, stores: int, restored: bool):
    """Once, also where it calls the one that it found, and so is the program's own; and stores hear of the signal.

    A library that has given back the handler that it found is not called.
    """
    number, came = signal.Signals[f"SIG{name}"], []
    before = signal.signal(number, lambda *_: came.append("the program's"))
    own = signal.getsignal(number)
    stops = [StopSignals([name]) for _ in range(stores)]
    for stop in stops:
        stop.install()
    found = signal.getsignal(number)

    def later(signum: int, frame) -> None:
        came.append(signum)
        found(signum, frame)

    signal.signal(number, later)
    assert [stop.why() for stop in stops] == [None] * stores
    if restored:
        signal.signal(number, found)
        assert [stop.why() for stop in stops] == [None] * stores
    send(number, *stops)
    assert came == [number] * (not restored) + ["the program's"]
    for stop in stops:
        stop.restore()
    assert signal.getsignal(number) is (own if restored else later)
    signal.signal(number, before)


@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0)])
def test_stores_note_the_first_signal(order):
    before = signal.getsignal(signal.SIGUSR1)
    stops = [StopSignals(["USR1", "USR2"]) for _ in order]
    for stop in stops:
        stop.install()
        assert stop.why() is None
    send(signal.SIGUSR2, *stops)
    send(signal.SIGUSR1)
    assert [stop.why() for stop in stops] == ["SIGUSR2"] * len(stops)
    both = {signal.SIGUSR1, signal.SIGUSR2}
    for left, i in zip((*reversed(range(len(order))), 0), (*order, 0), strict=True):
        stops[i].restore()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & both == (both if left else set())  # kept off children
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_at_the_end_of_a_process_that_is_asked_for_one_until_then() -> None:
    """As by the end of MPI, which handles what comes meanwhile."""
    done = run("""
        import atexit
        def late():
            assert stops[0].why() is None
            class Late:
                def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
                    kill(pid, number)
            sys.late = Late()  # lives until Python has given back what has handlers
        atexit.register(late)
        install("TERM")
    """)
    assert done.returncode == 0, done.stderr


def test_a_signal_that_was_sent_before_they_are_given_back_is_noted() -> None:
    """It is on its way to another thread, and would find the action that ends the process."""
    done = run("""
        signals.time = time
        for _ in range(300):
            install("USR1")
            os.kill(os.getpid(), signal.SIGUSR1)
            stops[-1].restore()
            assert stops[-1].why() == "SIGUSR1"
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("program", "printed", "status"),
    [
        # A user's signal is one request however often it comes.
        ("install('USR1'); send('USR1'); passed_s = 1.1; send('USR1'); say()", "SIGUSR1\n", 0),
        # The second signal that is meant to end a program ends it, unless it comes soon after the first.
        (
            "install('TERM'); send('TERM'); send('TERM'); say(); passed_s = 1.1; send('TERM'); print('survived')",
            "SIGTERM\n",
            -signal.SIGTERM,
        ),
        (
            "install('INT'); send('INT'); say(); passed_s = 1.1\n"
            "try: send('INT'); signal.pause()\n"
            "except KeyboardInterrupt: print('interrupted')",
            "SIGINT\ninterrupted\n",
            0,
        ),
        # Different signals are counted apart.
        ("install('TERM', 'USR1'); send('USR1'); passed_s = 1.1; send('TERM'); say()", "SIGUSR1\n", 0),
        # While the interpreter ends they are ignored.
        (
            "import atexit; atexit.register(lambda: (send('USR1', False), print('last words')))\n"
            "install('USR1'); stops[0].restore()",
            "last words\n",
            0,
        ),
    ],
    ids=["twice", "to end", "Ctrl-C", "different", "at exit"],
)
def test_what_a_signal_does_to_a_program(program, printed, status):
    done = run(program)
    assert (done.stdout, done.returncode) == (printed, status), done.stderr


LONG = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # an hour in C code, where no handler in Python would run


@pytest.mark.parametrize("thread", ["main", "another"])
@pytest.mark.parametrize("stores", [0, 2])
def test_forked_child_is_ended_by_the_first(stores, thread):
    """At once, wherever it is and however soon it comes; its parent goes on noting it. SIGUSR1 ends no child."""
    done = run(f"""
        import hashlib, threading
        from mpikv.runtime import abort
        abort.install(0, 2)
        stops = [StopSignals(["TERM", "USR1"]) for _ in range({stores})]
        for stop in stops:
            stop.install()
        ours = signal.getsignal(signal.SIGTERM)
        def fork():
            for i in range(16):
                pid = os.fork()
                if pid == 0:
                    signal.alarm(60)  # not an hour, if the test fails
                    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                        {LONG}
                    os._exit(0)
                if i % 2:
                    time.sleep(0.01)
                if stops and i % 4 >= 2:
                    os.kill(pid, signal.SIGUSR1)
                os.kill(pid, signal.SIGTERM)
                ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                assert ended == -signal.SIGTERM, (i, ended)
            print("all ended", flush=True)
        if {thread == "main"}:
            fork()
        else:
            forking = threading.Thread(target=fork)
            forking.start()
            forking.join()
        assert signal.getsignal(signal.SIGTERM) == ours != signal.SIG_DFL
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == ({{signal.SIGUSR1}} if stops else set())
        if stops:
            os.kill(os.getpid(), signal.SIGTERM)
        print([stop.why() for stop in stops], flush=True)
    """)
    assert (done.stdout, done.returncode) == (f"all ended\n{['SIGTERM'] * stores}\n", 0), done.stderr


def test_forked_child_keeps_what_is_the_programs():
    done = run("""
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"own\\n"))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        stop = StopSignals(["TERM", "USR1", "USR2"]); stop.install()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGTERM}
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            os.write(1, b"held\\n")
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), stop.why(), flush=True)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    """)
    assert (done.stdout, done.returncode) == (f"own\nheld\n{-signal.SIGTERM} None\n", 0), done.stderr


def test_not_in_the_main_thread():
    before, words = signal.getsignal(signal.SIGUSR1), r"not called in the main thread.*SIGUSR1 \(MPIKV_STOP_SIGNALS\)"
    with ThreadPoolExecutor(1) as thread, pytest.warns(RuntimeWarning, match=words):
        store = thread.submit(kv.create, "local", config=Config(stop_signals="USR1")).result()
    assert signal.getsignal(signal.SIGUSR1) == before
    store.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_local_store():
    """It listens if it is told to. After `close` a signal that comes late changes nothing; `with` gives it back."""
    before = signal.getsignal(signal.SIGUSR1)
    with kv.create("local", config=Config()):
        assert signal.getsignal(signal.SIGUSR1) == before
    with kv.create("local", config=Config(stop_signals="USR1")) as store:
        assert not store.stop_requested
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before
    store = kv.create("local", config=Config(stop_signals="USR1"))
    send(signal.SIGUSR1)
    while not store.stop_requested:
        time.sleep(0.001)
    store.close()
    assert signal.getsignal(signal.SIGUSR1) != before
    send(signal.SIGUSR1)
