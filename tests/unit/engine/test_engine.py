"""The progress engine: generators, waits with a limit, services, the thread."""

from __future__ import annotations

import itertools
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
        self.done = False
        self.error = None
        self.tests = 0

    def test(self):
        self.tests += 1
        if self.error is not None:
            raise self.error
        return self.done


def raising(error):
    def on_timeout():
        return error

    return on_timeout


TOO_LATE = raising(TimeoutError("too late"))


@pytest.fixture(params=[False, True], ids=["calls", "thread"])
def engine(request):
    failures = []
    engine = Engine(threaded=request.param, on_fatal=failures.append)
    engine.failures = failures
    yield engine
    engine.stop()


def settled(engine, condition):
    """Wait for a condition, stepping where no thread does."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        engine.step()


def test_a_generator_runs_until_it_must_wait():
    flag, seen = Flag(), []

    def steps():
        seen.append(1)
        yield Done()
        seen.append(2)
        yield flag
        seen.append(3)
        return "result"

    running = Running(steps(), "x")
    assert not running.test()
    assert running.advance()
    assert seen == [1, 2]
    assert not running.advance()
    flag.done = True
    assert running.advance()
    assert running.test()
    assert (running.result, seen) == ("result", [1, 2, 3])
    assert not running.advance()


def test_an_error_inside_or_of_a_request_is_raised_by_test():
    def inside():
        yield Done()
        raise ZeroDivisionError

    flag = Flag()
    flag.error = KeyError("k")

    def of_a_request():
        yield flag

    for steps, kind in ((inside(), ZeroDivisionError), (of_a_request(), KeyError)):
        running = Running(steps, "x")
        running.advance()
        for _ in range(2):
            with pytest.raises(kind):
                running.test()


def test_cancel_closes_the_generator():
    closed = []

    def steps():
        try:
            yield Flag()
        finally:
            closed.append(True)

    running = Running(steps(), "x")
    running.advance()
    running.cancel()
    running.cancel()
    assert closed == [True]


def test_run():
    def steps():
        yield Done()
        yield Done()
        return 5

    assert run(steps(), 1, TOO_LATE) == 5

    def stuck():
        yield Flag()

    with pytest.raises(TimeoutError, match="too late"):
        run(stuck(), 0.01, TOO_LATE)

    def nested():
        return 1 + (yield from steps())

    assert run(nested(), 1, TOO_LATE) == 6


def test_wait(engine):
    flag = Flag()

    def steps():
        yield flag
        return "result"

    running = engine.start(steps(), "x")
    with pytest.raises(TimeoutError, match="too late"):
        engine.wait(running, 0.01, TOO_LATE)
    threading.Timer(0.02, lambda: setattr(flag, "done", True)).start()
    engine.wait(running, 10, TOO_LATE)
    assert running.result == "result"
    engine.wait(Done(), 0, TOO_LATE)


def test_wait_raises_the_error_or_what_check_raises(engine):
    def fails():
        yield Done()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.wait(engine.start(fails(), "x"), 10, TOO_LATE)

    def check():
        raise KeyError("peer left")

    with pytest.raises(KeyError):
        engine.wait(Flag(), 10, TOO_LATE, check)
    engine.wait(Done(), 10, TOO_LATE, check)  # done comes first


def test_many_generators_wait_for_each_other(engine):
    runnings = []

    def steps(i):
        if i:
            yield runnings[i - 1]
        yield Done()
        return i

    start = Flag()

    def first():
        yield start
        return 0

    runnings.append(engine.start(first(), "0"))
    for i in range(1, 50):
        runnings.append(engine.start(steps(i), str(i)))
    assert not any(running.done for running in runnings)
    start.done = True
    engine.wait(runnings[-1], 10, TOO_LATE)
    assert [running.result for running in runnings] == list(range(50))


def test_a_generator_may_start_others(engine):
    def child(i):
        yield Done()
        return i

    def parent():
        children = [engine.start(child(i), "child") for i in range(5)]
        yield from children
        return [one.result for one in children]

    running = engine.start(parent(), "parent")
    engine.wait(running, 10, TOO_LATE)
    assert running.result == [0, 1, 2, 3, 4]


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
        settled(engine, lambda n=n: len(handled) == n)
        assert engine.failures == []
    flag.done = True
    settled(engine, lambda: engine.failures)
    assert [str(error) for error in engine.failures] == ["service"]
    with pytest.raises(ZeroDivisionError, match="service"):
        engine.wait(Flag(), 10, TOO_LATE)
    engine.step()
    assert len(engine.failures) == 1


@pytest.mark.parametrize("kind", ["transfer", "service"])
def test_after_ctrl_c_inside_a_transfer_every_wait_says_so(kind):
    """The interrupt itself reaches whoever steps, once."""
    failures = []
    engine = Engine(threaded=False, on_fatal=failures.append)

    def steps():
        yield flag
        raise KeyboardInterrupt

    flag = Flag()
    running = engine.serve(steps(), "listener") if kind == "service" else engine.start(steps(), "key 'w'")
    engine.step()
    flag.done = True
    with pytest.raises(KeyboardInterrupt):
        engine.wait(Flag(), 10, TOO_LATE)
    name = "listener" if kind == "service" else "key 'w'"
    for request in (Flag(), running):
        with pytest.raises(MpikvError, match=rf"KeyboardInterrupt has interrupted a transfer half-way \({name}\)"):
            engine.wait(request, 10, TOO_LATE)
    engine.step()
    assert [type(error) for error in failures] == ([KeyboardInterrupt] if kind == "service" else [])
    engine.stop()


def test_a_busy_service_does_not_keep_others_waiting(engine):
    """One that always finds another message."""
    n = 300_000
    turns = itertools.count()

    def service():
        while next(turns) < n:
            yield Done()

    engine.serve(service(), "busy")

    flag = Flag()

    def steps():
        yield flag
        return next(turns)

    running = engine.start(steps(), "x")
    flag.done = True
    engine.wait(running, 30, TOO_LATE)
    assert running.result < n


def test_a_busy_service_does_not_lift_the_limit(engine):
    stop_s = time.monotonic() + 20

    def service():
        while time.monotonic() < stop_s:
            yield Done()

    engine.serve(service(), "busy")
    with pytest.raises(TimeoutError):
        engine.wait(Flag(), 0.05, TOO_LATE)
    assert time.monotonic() < stop_s


def test_the_limit_holds_while_things_move():
    clock = Told()

    def step():
        clock.time_s += 0.001
        return True

    with pytest.raises(TimeoutError):
        wait_until(lambda: clock.time_s > 3, step, 0.02, TOO_LATE, clock=clock)


def test_no_time_at_all():
    with pytest.raises(TimeoutError):
        wait_until(lambda: False, lambda: True, 0, TOO_LATE)
    wait_until(lambda: True, lambda: True, 0, TOO_LATE)


class Told:
    """A clock that says what it is told, and notes naps."""

    def __init__(self):
        self.time_s = 0.0
        self.naps = []
        self.sleep = self.naps.append

    def now_s(self):
        return self.time_s


def test_time_in_which_the_process_was_stopped_is_not_time_waited():
    """The others were perhaps stopped, too, or have answered long ago: there are turns left to see it."""
    clock, turns = Told(), []

    def step():
        turns.append(clock.time_s)
        clock.time_s += 1000.0 if len(turns) == 3 else 0.125
        return True

    wait_until(lambda: len(turns) == 6, step, 10, TOO_LATE, clock=clock)
    turns.clear()
    with pytest.raises(TimeoutError):
        wait_until(lambda: False, step, 10, TOO_LATE, clock=clock)
    assert len(turns) == 77  # one turn counts for half a second, 76 for an eighth


def test_the_thread_moves_things_while_nobody_waits():
    engine = Engine(threaded=True, on_fatal=lambda error: None)
    flag, reached = Flag(), threading.Event()

    def steps():
        yield flag
        reached.set()

    engine.start(steps(), "x")
    flag.done = True
    assert reached.wait(10)
    engine.stop()
    engine.stop()


def test_without_a_thread_nothing_moves_by_itself():
    threads = set(threading.enumerate())
    engine = Engine(threaded=False, on_fatal=lambda error: None)
    flag = Flag()

    def steps():
        yield flag

    running = engine.start(steps(), "x")
    flag.done = True
    assert set(threading.enumerate()) <= threads
    assert not running.done
    assert engine.step()
    assert running.done
    assert not engine.step()


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
    engine.stop()
    assert sorted(ended) == ["service", "transfer"]


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


def test_several_threads_may_wait(engine):
    flags = [Flag() for _ in range(4)]

    def steps(flag):
        yield flag

    runnings = [engine.start(steps(flag), "x") for flag in flags]
    done = []

    def waiter(running):
        engine.wait(running, 10, TOO_LATE)
        done.append(running)

    threads = [threading.Thread(target=waiter, args=(running,)) for running in runnings]
    for thread in threads:
        thread.start()
    for flag in reversed(flags):
        flag.done = True
    for thread in threads:
        thread.join(10)
    assert len(done) == 4


def test_backoff_polls_then_yields_then_sleeps(monkeypatch):
    clock, yields = Told(), []
    naps = clock.naps
    monkeypatch.setattr("os.sched_yield", lambda: yields.append(1))
    backoff = Backoff(last_nap_s=0.001, clock=clock)
    for _ in range(200):
        backoff.pause()
    assert len(yields) + len(naps) < 200  # the first ones poll
    assert naps == sorted(naps)
    assert naps[0] < 1e-4
    assert naps[-1] == 0.001
    backoff.reset()
    naps.clear()
    backoff.pause()
    assert 0 < naps[0] < 1e-4  # after a long wait the next one is likely long, too: not a poll, but a short nap
    backoff.reset()
    naps.clear()
    backoff.pause()
    assert naps == []  # but that one was short


class Mailbox:
    """A transport: `arrived` says whose messages have come, and `poll` then wakes those who wait for them."""

    def __init__(self):
        self.tests = 0
        self.waiting, self.arrived = [], []

    def receive(self):
        message = Message(self)
        self.waiting.append(message)
        return message

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
    engine = Engine(threaded=False, on_fatal=lambda error: None, poll=mailbox.poll)
    yield engine
    engine.stop()


def test_who_waits_for_messages_is_not_asked_until_one_has_come(mailbox, polling):
    def two():
        yield mailbox.receive()
        yield mailbox.receive()
        return "both"

    transfers = [polling.start(two(), "") for _ in range(5)]
    assert mailbox.tests == 5
    for _ in range(10):
        polling.step()
    assert mailbox.tests == 5
    mailbox.arrived.append(mailbox.waiting[3])
    polling.step()
    assert mailbox.tests == 7  # of the one: the first, then the second
    mailbox.arrived += mailbox.waiting
    polling.step()
    mailbox.arrived += mailbox.waiting
    polling.step()
    assert [transfer.result for transfer in transfers] == ["both"] * 5


@pytest.mark.parametrize("under_way", [10, 10_000])
def test_a_step_costs_what_has_something_to_do_and_not_what_is_under_way(mailbox, polling, under_way):
    def one():
        yield mailbox.receive()

    transfers = [polling.start(one(), "") for _ in range(under_way)]
    before = mailbox.tests
    for message in mailbox.waiting[::-1][:5]:
        mailbox.arrived.append(message)
        polling.step()
        polling.step()
    assert mailbox.tests == before + 5
    assert sum(transfer.done for transfer in transfers) == 5


def test_a_message_that_came_before_anybody_waited_for_it_is_not_waited_for(mailbox, polling):
    message = mailbox.receive()
    mailbox.arrived.append(message)
    polling.step()

    def wait():
        yield message

    assert polling.start(wait(), "").done


def test_who_waits_for_a_generator_is_woken_by_its_end(mailbox, polling):
    asked = []

    class Asked(Running):
        def test(self):
            asked.append(self)
            return super().test()

    child = Asked(iter_of(mailbox.receive()), "child")
    polling.take(child)

    def parent():
        yield child
        return "then"

    waiting = polling.start(parent(), "parent")
    for _ in range(10):
        polling.step()
    assert len(asked) == 1
    mailbox.arrived += mailbox.waiting
    polling.step()  # wakes the child, which wakes the parent
    polling.step()
    assert waiting.result == "then"
    assert len(asked) == 2


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_who_waits_for_a_generator_is_woken_when_it_is_given_up(mailbox, polling, how):
    child = polling.start(iter_of(mailbox.receive()), "child")
    parent = polling.start(iter_of(child), "parent")
    polling.step()
    if how == "cancel":
        child.cancel()
    else:
        child.fail(ZeroDivisionError("given up"))
    polling.step()
    assert parent.done
    assert type(parent.error) is (ZeroDivisionError if how == "fail" else type(None))


def test_who_waits_for_what_wakes_nobody_is_asked_in_every_step(polling):
    flag = Flag()
    transfer = polling.start(iter_of(flag), "")
    for _ in range(10):
        polling.step()
    assert flag.tests == 11
    flag.done = True
    polling.step()
    assert transfer.done
    polling.step()
    assert flag.tests == 12


def test_who_is_woken_by_another_thread_goes_on(engine):
    """As a rank's sends are, where ranks are threads."""
    completions = [Completion() for _ in range(200)]
    transfers = [engine.start(iter_of(one), "") for one in completions]
    finisher = threading.Thread(target=lambda: [one.finish() for one in completions])
    finisher.start()
    for transfer in transfers:
        engine.wait(transfer, 10, TOO_LATE)
    finisher.join()


def iter_of(request):
    yield request


def test_python_gives_way_sooner_while_something_is_under_way_and_only_then():
    usual_s = sys.getswitchinterval()
    engine = Engine(threaded=True, on_fatal=lambda error: None)
    flag = Flag()

    def wait():
        yield flag

    try:
        transfer = engine.start(wait(), "")
        deadline = time.monotonic() + 10
        while sys.getswitchinterval() >= usual_s:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        flag.done = True
        while sys.getswitchinterval() != usual_s:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert transfer.done
    finally:
        engine.stop()
    assert sys.getswitchinterval() == usual_s
