"""Which ranks are given up where they are suspended."""

from __future__ import annotations

import os
import signal
import subprocess
from itertools import starmap

import pytest

from mpikv.common import proc
from mpikv.common.suspended import LOOKS, Suspended
from mpikv.observe.program import STARTED, this_process
from mpikv.runtime import suspended


@pytest.mark.parametrize(
    ("states", "given_up"),
    [
        (["T (stopped)"] * (LOOKS + 1), True),
        (["T (stopped)"] * LOOKS, False),
        (["t (tracing stop)"] * (LOOKS + 9), False),
        (["S (sleeping)"] * (LOOKS + 9), False),
        (["T (stopped)"] * LOOKS + ["S (sleeping)"] + ["T (stopped)"] * LOOKS, False),
        (["S (sleeping)"] + ["T (stopped)"] * (LOOKS + 1), True),
    ],
)
@pytest.mark.parametrize("runs", [False, True])
def test_given_up(monkeypatch: pytest.MonkeyPatch, states: list[str], given_up: bool, runs: bool) -> None:
    """As /proc says it here, look by look. runs: it has run since the last look but one, and was suspended again."""
    suspended, said = Suspended(), {2: "Name:\tpython\nState:\tR (running)\n"}  # process 3 has ended
    monkeypatch.setattr(proc, "text", lambda path: said.get(int(path.removesuffix("/status")), ""))

    def look(i: int, state: str) -> list[int]:
        switches = runs and i == len(states) - 1
        said[1] = f"Name:\tpython\nState:\t{state}\nvoluntary_ctxt_switches:\t{7 + switches}\nother:\t{i}\n"
        return suspended.given_up([1, 2, 3])

    *before, last = starmap(look, enumerate(states))
    assert not any(before)
    assert last == ([1] if given_up and not runs else [])


def test_ranks_that_are_suspended_are_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """And nothing else: a rank that runs, one on another host, and a process that now has a rank's number."""
    mine, sleep = this_process(), ["sleep", "600"]
    runs, elsewhere, other, victim = (subprocess.Popen(sleep, start_new_session=True) for _ in range(4))
    try:
        ranks = [mine._replace(pid=one.pid, started=proc.stat(one.pid)[STARTED]) for one in (runs, elsewhere, victim)]
        ranks[1:2] = [ranks[1]._replace(host="elsewhere"), mine._replace(pid=other.pid, started="0"), mine]
        for one in (elsewhere, other, victim):
            os.kill(one.pid, signal.SIGSTOP)
        end = suspended.watch(ranks, timeout_s=0.1)
        assert victim.wait(60) == -signal.SIGKILL
        end()
        assert [one.poll() for one in (runs, elsewhere, other)] == [None] * 3
    finally:
        for one in (runs, elsewhere, other, victim):
            one.kill()
            one.wait()
    said = capfd.readouterr().err
    assert said.startswith(f"mpikv: process {victim.pid} on {mine.host} was suspended for 0.05 s, half of MPIKV_TIMEO")
    assert said.count("\n") == 1
