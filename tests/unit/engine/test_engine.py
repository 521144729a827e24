"""The progress engine: generators, waits with a limit, services, the thread."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from mpikv.engine.backoff import Backoff, wait_until
from mpikv.engine.engine import Engine
from mpikv.engine.operation import Completion, Done
from mpikv.engine.running import Running, run
from mpikv.errors import MpikvError


class Flag:
    """A request that is done when somebody says so."""

    def __init__(self):
        self.done, self.error, self.tests = False, None, 0

    def test(self):
        self.tests += 1
        if self.error is not None:
            raise self.error
        return self.done


class Told:
    """A clock that says what it is told, and notes naps."""

    def __init__(self):
        self.time_s, self.naps = 0.0, []
        self.sleep = self.naps.append

    def now_s(self):
        return self.time_s


def too_late():
    return TimeoutError("too late")


def iter_of(request, result=None):
    yield request
    return result


def failing(error):
    yield Done()
    raise error


def unthreaded(**options):
    return Engine(threaded=False, **{"on_fatal": lambda error: None, **options})


@pytest.fixture(params=[False, True], ids=["calls", "thread"])
def engine(request):
    failures = []
    engine = Engine(threaded=request.param, on_fatal=failures.append)
    engine.failures = failures
    yield engine
    engine.stop()


def settled(condition, step=lambda: time.sleep(0.001)):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        step()


# ---- one generator


def test_run():
    assert run(iter_of(Done(), 5), 1, too_late) == 5
    with pytest.raises(TimeoutError, match="too late"):
        run(iter_of(Flag()), 0.01, too_late)


# ---- waits


def test_wait(engine):
    flag = Flag()
    running = engine.start(iter_of(flag, "result"), "x")
    with pytest.raises(TimeoutError, match="too late"):
        engine.wait(running, 0.01, too_late)
    threading.Timer(0.02, lambda: setattr(flag, "done", True)).start()
    engine.wait(running, 10, too_late)
    assert running.result == "result"


def test_wait_raises_the_error_or_what_check_raises(engine):
    with pytest.raises(ZeroDivisionError):
        engine.wait(engine.start(failing(ZeroDivisionError()), "x"), 10, too_late)

    def check():
        raise KeyError("peer left")

    with pytest.raises(KeyError):
        engine.wait(Flag(), 10, too_late, check)
    engine.wait(Done(), 0, too_late, check)  # done comes first


@pytest.mark.parametrize(("turn_s", "turns"), [(0.0, 1), (0.125, 80)])
def test_the_limit_holds_while_things_move(turn_s, turns):
    """Without any time, too."""
    clock, seen = Told(), []

    def step():
        seen.append(clock.time_s)
        clock.time_s += turn_s
        return True

    with pytest.raises(TimeoutError):
        wait_until(lambda: False, step, 80 * turn_s, too_late, clock=clock)
    assert len(seen) == turns
    wait_until(lambda: True, step, 0, too_late)


def test_time_in_which_the_process_was_stopped_is_not_time_waited():
    """The others were perhaps stopped, too, or have answered long ago: there are turns left to see it."""
    clock, turns = Told(), []

    def step():
        turns.append(clock.time_s)
        clock.time_s += 1000.0 if len(turns) == 3 else 0.125
        return True

    with pytest.raises(TimeoutError):
        wait_until(lambda: False, step, 10, too_late, clock=clock)
    assert len(turns) == 77  # one turn counts for half a second, 76 for an eighth


def test_backoff_polls_then_yields_then_sleeps(monkeypatch):
    clock, yields = Told(), []
    naps = clock.naps
    monkeypatch.setattr("os.sched_yield", lambda: yields.append(1))
    backoff = Backoff(last_nap_s=0.001, clock=clock)
    for _ in range(200):
        backoff.pause()
    assert 0 < len(yields) < 200 - len(naps)  # the first ones poll
    assert naps == sorted(naps)
    assert naps[0] < 1e-4
    assert naps[-1] == 0.001
    # After a long wait the next one is likely long, too: not a poll, but a short nap. That one was short.
    for n_naps in (1, 0):
        backoff.reset()
        naps.clear()
        backoff.pause()
        assert [0 < nap < 1e-4 for nap in naps] == [True] * n_naps


# ---- services, interrupts, the end


def test_services_run_beside_and_their_error_is_fatal(engine):
    flag, handled = Flag(), []

    def service():
        while True:
            yield flag
            flag.done = False
            handled.append(len(handled))
            if len(handled) == 3:
                raise ZeroDivisionError("service")

    engine.serve(service(), "service")
    for n in (1, 2):
        flag.done = True
        settled(lambda n=n: len(handled) == n, engine.step)
        assert engine.failures == []
    flag.done = True
    settled(lambda: engine.failures, engine.step)
    with pytest.raises(ZeroDivisionError, match="service"):
        engine.wait(Flag(), 10, too_late)
    engine.step()
    assert [str(error) for error in engine.failures] == ["service"]


@pytest.mark.parametrize("kind", ["transfer", "service"])
def test_after_ctrl_c_inside_a_transfer_every_wait_says_so(kind):
    """The interrupt itself reaches whoever steps, once."""
    failures, flag = [], Flag()
    engine = unthreaded(on_fatal=failures.append)

    def steps():
        yield flag
        raise KeyboardInterrupt

    running = (engine.serve if kind == "service" else engine.start)(steps(), "key 'w'")
    engine.step()
    flag.done = True
    with pytest.raises(KeyboardInterrupt):
        engine.wait(Flag(), 10, too_late)
    for request in (Flag(), running):
        with pytest.raises(MpikvError, match=r"KeyboardInterrupt has interrupted a transfer half-way \(key 'w'\)"):
            engine.wait(request, 10, too_late)
    engine.step()
    assert [type(error) for error in failures] == ([KeyboardInterrupt] if kind == "service" else [])
    engine.stop()


def test_stop_gives_up_what_runs(engine):
    ended = []

    def steps(name):
        try:
            yield Flag()
        finally:
            ended.append(name)

    engine.start(steps("transfer"), "x")
    engine.serve(steps("service"), "y")
    engine.step()
    for _ in range(2):
        engine.stop()
        assert sorted(ended) == ["service", "transfer"]


# ---- the thread


def test_the_thread_moves_things_while_nobody_waits():
    """Python gives way to it sooner while something is under way, and only then."""
    usual_s = sys.getswitchinterval()
    engine, flag = Engine(threaded=True, on_fatal=lambda error: None), Flag()
    try:
        transfer = engine.start(iter_of(flag), "")
        settled(lambda: sys.getswitchinterval() < usual_s)
        flag.done = True
        settled(lambda: sys.getswitchinterval() == usual_s)
        assert transfer.done
    finally:
        engine.stop()
    assert sys.getswitchinterval() == usual_s


def test_without_a_thread_nothing_moves_by_itself():
    threads = set(threading.enumerate())
    engine, flag = unthreaded(), Flag()
    running = engine.start(iter_of(flag), "x")
    flag.done = True
    assert set(threading.enumerate()) <= threads
    assert not running.done
    assert engine.step()
    assert running.done
    assert not engine.step()


def test_a_thread_that_does_not_end_is_an_error(monkeypatch):
    """It hangs inside a call, which nobody can end."""
    monkeypatch.setattr("mpikv.engine.engine.STOP_S", 0.01)
    inside, end = threading.Event(), threading.Event()

    def poll():
        inside.set()
        end.wait(60)

    engine = Engine(threaded=True, on_fatal=lambda error: None, poll=poll)
    try:
        assert inside.wait(60)
        with pytest.raises(MpikvError, match=r"has not ended in 0\.01 s"):
            engine.stop()
    finally:
        end.set()
    monkeypatch.undo()
    engine.stop()


# ---- who is woken, and who has to be asked


class Mailbox:
    """A transport: `arrived` says whose messages have come, and `poll` then wakes those who wait for them."""

    def __init__(self):
        self.tests = 0
        self.waiting, self.arrived = [], []

    def receive(self):
        self.waiting.append(Message(self))
        return self.waiting[-1]

    def poll(self):
        for message in self.arrived:
            message.finish()
        self.arrived = []


class Message(Completion):
    def __init__(self, mailbox):
        super().__init__()
        self.mailbox = mailbox

    def test(self):
        self.mailbox.tests += 1
        return super().test()


@pytest.fixture
def mailbox():
    return Mailbox()


@pytest.fixture
def polling(mailbox):
    engine = unthreaded(poll=mailbox.poll)
    yield engine
    engine.stop()


@pytest.mark.parametrize("under_way", [10, 1000])
def test_a_step_costs_what_has_something_to_do_and_not_what_is_under_way(mailbox, polling, under_way):
    transfers = [polling.start(iter_of(mailbox.receive()), "") for _ in range(under_way)]
    for message in mailbox.waiting[::-1][:5]:
        mailbox.arrived.append(message)
        polling.step()
        polling.step()
    assert mailbox.tests == under_way + 5
    assert sum(transfer.done for transfer in transfers) == 5


@pytest.mark.parametrize("how", ["end", "cancel", "fail"])
def test_who_waits_for_a_generator_is_woken_by_its_end(mailbox, polling, how):
    """Also where it is given up; and asks it no more often than that."""
    asked = []

    class Asked(Running):
        def test(self):
            asked.append(self)
            return super().test()

    child = Asked(iter_of(mailbox.receive()), "child")
    polling.take(child)
    parent = polling.start(iter_of(child, "then"), "parent")
    for _ in range(10):
        polling.step()
    assert len(asked) == 1
    for _ in range(2):  # the second time changes nothing
        if how == "end":
            mailbox.arrived = [*mailbox.waiting]
            polling.step()  # wakes the child, which wakes the parent
        elif how == "cancel":
            child.cancel()
        else:
            child.fail(ZeroDivisionError("given up"))
    polling.step()
    assert parent.done
    assert parent.result == ("then" if how != "fail" else None)
    assert type(parent.error) is (ZeroDivisionError if how == "fail" else type(None))
    assert len(asked) == 2
