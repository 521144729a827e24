"""Waits that last: what is printed of them, and workers that wait for each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from on_workers import limit, until
from store_modes import Mode, mode_id

from mpikv import PeerError, StallError
from mpikv.observe import program
from mpikv.observe.program import Process, state_of, this_process
from mpikv.session import questions, stalls, waits
from mpikv.testing.ranks import RankError
from mpikv.transports import threads, wire

WARN_S = 0.2
MODES = [
    Mode("dist_sync", 3),
    Mode("dist_sync", 3, memory="off"),
    Mode("dist_sync", 3, servers=1),
]
ONES = np.ones(3, np.float32)
every_mode = pytest.mark.parametrize("mode", MODES, ids=mode_id)


def text_with(printed: list[str], *words: str) -> str:
    """The first text with all of these: a slow machine may have others before it."""
    return next((text for text in printed if all(word in text for word in words)), "")


def waits_for_it(printed: list[str], *words: str) -> None:
    until(lambda: text_with(printed, *words))


@every_mode
def test_a_wait_is_told_with_both_sides_and_its_end(mode: Mode, printed: list[str]) -> None:
    words = " for worker 1 on localhost\n", "in pushpull of key 'w'"

    def body(store: Any) -> list[float]:
        store.init("w", np.zeros(3, np.float32))
        if store.rank == 1:
            waits_for_it(printed, *words)
        store.pushpull("w", out := ONES.copy())
        store.barrier()
        return out.tolist()

    assert mode.run(body, stall_warn_s=WARN_S) == [[3.0] * 3] * 3
    table = text_with(printed, *words)
    assert re.match(r"mpikv: stalled for \d+\.\d s: worker (0|2|0, 2) on localhost waits? for worker 1", table)
    (late,) = [line for line in table.splitlines() if line.startswith("  worker 1 on ")]
    assert re.search(r"\(pid \d+\): outside the store for .*; at on_workers.py:\d+ in until, (not )?computing", late)
    assert re.search(r"in pushpull of key 'w', round 1 for \d+\.\d s; at test_stalls.py:\d+ in body", table)
    until(lambda: printed[-1].startswith("mpikv: going on, after a stall of "))


@every_mode
def test_another_table_where_another_worker_is_missing(
    mode: Mode, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    ask = questions.Questions.ask

    def noted(self: Any, items: Any, *more: Any) -> Any:
        asked.append([json.dumps(item) for item in items])
        return ask(self, items, *more)

    monkeypatch.setattr(questions.Questions, "ask", noted)

    def body(store: Any) -> None:
        if store.rank == 1:
            until(lambda: any(re.search(r" waits? for worker (0, )?1(, 2)? on localhost\n", one) for one in printed))
        store.init("w", ONES)  # workers initialise their keys in any order: the call has no number
        if store.rank == 1:
            waits_for_it(printed, "waits for worker 1, 2 on", "in barrier")
        elif store.rank == 2:
            waits_for_it(printed, "wait for worker 2 on", "in barrier")
        store.barrier()

    mode.run(body, stall_warn_s=WARN_S)
    assert len([text for text in printed if "stalled" in text]) >= 2
    assert ['["", ["barrier", 1]]'] in asked
    assert all(len(set(items)) == len(items) for items in asked)  # of what several wait for all are asked once


def test_what_has_taken_as_long_before_is_not_told(printed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After one long wait those of its kind are told when they last so many times longer, here than a test can."""
    monkeypatch.setattr(stalls, "USUAL", 1e6)

    def tables() -> list[str]:
        return [text for text in printed if "in barrier" in text]

    def body(store: Any) -> list[str]:
        store.barrier()
        if store.rank == 1:
            waits_for_it(printed, "stalled")
        store.barrier()
        waits_for_it(printed, "going on")
        before = tables()
        for _ in range(2):
            if store.rank == 1:
                until(lambda: re.search(r"in barrier for ([1-9]|0\.[5-9])", store.workers[0].doing))
            store.barrier()
        return before

    for before in Mode("dist_sync", 2).run(body, stall_warn_s=WARN_S):
        assert tables() == before


# Calls of worker 0, 1 and 2, which all make in the end; "|" is a barrier, "+" the init of a key, a letter a pushpull.
PROGRAMS = ["a| |a |a", "ba ab ab", "abc bca cab", "a|b ba| ba|", "a+ +a +a", "+a a+ a+"]
NAMES = {"|": "barrier", "+": "init('n')"}


@every_mode
@pytest.mark.parametrize("program", PROGRAMS)
def test_workers_that_wait_for_each_other_all_raise_it(
    mode: Mode, program: str, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes to its wait after a circle of the others was found waits for one that has raised: so all wait here."""
    all_know = threading.Barrier(3, timeout=60)
    look_at = stalls.Stalls._look_at

    def look_when_all_wait(self: stalls.Stalls, question: questions.Question, now_s: float) -> None:
        if all(answer["blocked"] for answer in question.answers.values()):
            look_at(self, question, now_s)

    monkeypatch.setattr(stalls.Stalls, "_look_at", look_when_all_wait)

    def call(store: Any, one: str) -> None:
        if one == "+":
            store.init("n", ONES)
        else:
            store.barrier() if one == "|" else store.pushpull(one, ONES.copy())

    def body(store: Any) -> list[str]:
        store.init(["a", "b", "c"], [np.zeros(3, np.float32)] * 3)
        texts = []
        for one in program.split()[store.rank]:
            try:
                call(store, one)
            except StallError as error:
                texts.append(str(error))
                if len(texts) == 1:
                    all_know.wait()
        return texts

    for worker, texts in enumerate(mode.run(body, stall_warn_s=WARN_S, timeout_s=60.0)):
        begun = program.split()[worker][0]
        what = re.escape(NAMES.get(begun, f"pushpull of key '{begun}'"))
        assert re.match(rf"worker {worker} on .* waited \d+(\.\d)? s in {what}", texts[0])
        assert re.search(r"Deadlock: worker . on localhost in .* at test_stalls.py:\d+ in call waits for ", texts[0])
        assert "MPIKV_TIMEOUT_S" not in texts[0]


IN_CLOSE = "in close for"


@every_mode
def test_who_closes_early_gets_no_error_for_those_that_wait_for_it(
    mode: Mode, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told that it has left, here after a question to all, and close, too."""
    due = waits.Departures.due
    monkeypatch.setattr(waits.Departures, "due", lambda *given: due(*given) if text_with(printed, IN_CLOSE) else [])

    def body(store: Any) -> None:
        store.init("w", np.zeros(3, np.float32))
        store.pushpull("w", ONES.copy())
        if store.rank != 1:
            with pytest.raises(PeerError):
                store.pushpull("w", ONES.copy())

    mode.run(body, stall_warn_s=WARN_S)
    assert text_with(printed, IN_CLOSE)


def test_a_silent_worker_is_told_of_by_what_its_host_sees(printed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 does not answer, so that another one takes over; with `calls` nobody answers who computes."""
    monkeypatch.setattr(questions, "state_of", lambda *_: "it was stopped")
    monkeypatch.setattr(stalls, "SILENT_S", 0.2)

    def body(store: Any) -> None:
        store.barrier()
        if store.rank == 0:
            waits_for_it(printed, *words)
        store.barrier()

    words = " for worker 0 on localhost\n", "): no answer for 0.2 s; it was stopped"
    Mode("dist_sync", 3, memory="off").run(body, stall_warn_s=WARN_S, progress="calls")
    assert re.search(r"  worker 0 on localhost \(pid \d+\): no answer", text_with(printed, *words))


def test_nothing_is_sent_where_it_is_off_or_waits_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> None:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr(questions.Questions, "ask", asked)

    def body(store: Any) -> None:
        for _ in range(3):
            if store.rank == 1:
                time.sleep(0.05)
            store.barrier()

    for warn_s in ("off", 300):
        Mode("dist_sync", 2).run(body, stall_warn_s=warn_s)


def test_a_wait_with_a_limit_of_its_own_is_no_deadlock(printed: list[str]) -> None:
    """Who waits in it goes on afterwards, here to what the other one needs."""
    both = threading.Barrier(2, timeout=60)

    def body(store: Any) -> Any:
        store.init(["a", "b"], [np.zeros(3, np.float32)] * 2)
        first, second = "ab" if store.rank == 0 else "ba"
        request = store.pushpull_async(first, out := ONES.copy())
        while not text_with(printed, "key 'a'", "key 'b'"):  # until somebody has looked at both waits
            with pytest.raises(StallError, match="MPIKV_TIMEOUT_S sets the limit"):
                request.wait(timeout_s=5 * WARN_S)
        both.wait()
        store.pushpull(second, ONES.copy())
        request.wait()
        return out.tolist()

    assert Mode("dist_sync", 2).run(body, stall_warn_s=WARN_S) == [[2.0] * 3] * 2


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_when_a_worker_dies_the_others_say_who_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without servers, those of them that depend on it; the dead one's own error is told, too."""
    monkeypatch.setattr(waits, "ANSWER_S", 0.1)
    dead = threading.Event()

    def body(store: Any) -> None:
        store.init("w", np.zeros(3, np.float32))
        store.set_optimizer("test")
        for _ in range(5):
            store.pushpull("w", ONES.copy())
        if store.rank == 1:
            dead.set()
            raise ZeroDivisionError
        assert dead.wait(60)
        with limit(store):
            for _ in range(1000):
                store.pushpull("w", ONES.copy())
            store.close()

    with pytest.raises(RankError) as raised:
        Mode(name, 2, memory="off").run(body)
    errors = raised.value.errors
    assert isinstance(errors[1], ZeroDivisionError)
    assert "worker 1 on localhost" in str(errors[0])


@pytest.mark.looks_fail
def test_a_look_that_fails_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []

    def position(thread: int) -> str:
        failed.append(threading.current_thread().name)
        raise AttributeError("'code' object has no attribute 'f_code'")

    monkeypatch.setattr(program, "position", position)

    def body(store: Any) -> tuple[bool, int]:
        if store.rank == 1:
            until(lambda: {"rank 0", "mpikv-progress"} <= {*failed})
        store.barrier()
        return store.stats()["failed_looks"]

    assert sum(Mode("dist_sync", 2).run(body, stall_warn_s=WARN_S)) > 0


def test_what_a_system_tells_of_a_process() -> None:
    me = this_process()
    assert state_of(me) in ("it computes without a break for other threads, as C code may", "") or "sleeps" in state_of(
        me
    )
    assert state_of(me._replace(started="1")) == "its process is gone"
    assert state_of(Process("elsewhere", me.pid, me.started)) == ""
    assert state_of(me._replace(started="")) == ""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert state_of(me._replace(pid=child.pid)) == "its process is gone"  # it began later than this one
        child.stdin.close()


@every_mode
def test_the_workers_of_a_store(mode: Mode) -> None:
    def body(store: Any) -> Any:
        found = dead = None
        if store.rank == 1:
            until(lambda: any("in barrier" in one.doing for one in store.workers))
            found, dead = store.workers, store.dead_workers
        store.barrier()
        return found, dead

    found, dead = mode.run(body)[1]
    assert [(one.rank, one.name, one.alive) for one in found] == [
        (i, f"worker {i} on localhost", True) for i in range(3)
    ]
    assert {one.pid for one in found} == {this_process().pid}
    assert all(0 <= one.seen_s < 60 for one in found)
    assert dead == []


def test_workers_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `calls` nobody answers who computes; what its host tells says whether it is alive."""
    tells = {0: "it was stopped by a signal", 2: "its process is gone"}
    monkeypatch.setattr(waits, "ANSWER_S", 0.2)
    monkeypatch.setattr(questions.Questions, "state", lambda self, worker: tells.get(worker, ""))
    done = threading.Event()

    def body(store: Any) -> Any:
        found = None
        if store.rank == 1:
            found = store.workers, store.dead_workers
            done.set()
        assert done.wait(60)
        store.barrier()
        return found

    found, dead = Mode("dist_sync", 4, memory="off").run(body, progress="calls")[1]
    assert [one.alive for one in found] == [True, True, False, False]
    assert [one.doing for one in found if one.rank != 1] == [
        "no answer for 0.2 s; it was stopped by a signal",
        "no answer for 0.2 s; its process is gone",
        "no answer for 0.2 s",
    ]
    assert [one.rank for one in dead] == [2, 3]


def test_a_server_that_stands_still_is_told_of_by_what_its_host_sees(
    printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers wait for a server, whose transport gives it no message until a table is printed."""
    monkeypatch.setattr(questions, "state_of", lambda *_: "it was stopped")
    inner = threads.ThreadTransport.probe

    def probe(transport: Any, tag: int, *more: Any) -> Any:
        held = (
            transport.rank == 2
            and not text_with(printed, "for server 0")
            and tag == wire.TAG_REQUEST
            and stopped.is_set()
        )
        return None if held else inner(transport, tag, *more)

    stopped = threading.Event()
    monkeypatch.setattr(threads.ThreadTransport, "probe", probe)

    def body(store: Any) -> None:
        store.init("w", np.zeros(3, np.float32))
        store.barrier()
        stopped.set()
        store.push("w", ONES)
        store.pull("w")

    Mode("dist_sync", 2, servers=1, memory="off").run(body, stall_warn_s=WARN_S)
    table = text_with(printed, "for server 0 (rank 2 on localhost)\n")
    assert re.search(r"\n  server 0 \(rank 2 on localhost\) \(pid \d+\): it was stopped$", table)
