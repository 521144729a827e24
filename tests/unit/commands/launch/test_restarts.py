"""Whether a job is started again, and from which state, by what its ranks have reported."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import pytest

from mpikv.commands.launch import job
from mpikv.commands.launch.hosts import Host
from mpikv.commands.launch.output import Output
from mpikv.commands.launch.ranks import JobEnd, LaunchedRank, judge, workers_that_fit
from mpikv.commands.launch.restarts import Restarts
from mpikv.commands.launch.watch import Limits
from mpikv.errors import ConfigError

FAILED = JobEnd(1, "failed")
KILLED = {"status": -9}
RAISED = {"status": 1, "aborted": 1, "said": "[rank 0 of 2 on h0] ValueError: x", "step": 7}
ELSEWHERE = {**RAISED, "said": "[rank 1 of 2 on h1] ValueError: x"}
MISTAKE = {"status": 2, "aborted": 1, "said": "mpikv: error: [rank 0 of 2 on h0] init: no key"}
ALONE = {"status": 1, "said": "ModuleNotFoundError: No module named 'x'"}


def ranks(*changes: dict[str, Any]) -> list[LaunchedRank]:
    usual: dict[str, Any] = {"host": "h", "order": 1}
    return [LaunchedRank("worker", i, i, **{**usual, **one}) for i, one in enumerate(changes)]


def ends(most: int, *runs: dict[str, Any], asked: bool = False) -> list[bool]:
    """For each run, of one rank, whether another one follows."""
    restarts, found = Restarts(most), []
    for one in map(ranks, runs):
        found.append(restarts.again(one, judge(one, 1), asked=asked)[0])
    return found


@pytest.mark.parametrize(
    ("runs", "again"),
    [
        ([KILLED, KILLED, KILLED], [True, True, True]),  # may well be killed at the same step twice
        ([{"status": None, "lost": True}], [True]),
        ([{"status": 137}, {"status": 137}], [True, True]),  # a shell or a container says so of what it has started
        ([{"status": 14}, {"status": 14}], [True, True]),  # Open MPI's: another rank's host has gone
        ([RAISED, RAISED], [True, False]),
        ([RAISED, ELSEWHERE], [True, False]),  # the same error on another rank and host
        ([RAISED, {**RAISED, "step": 8}, RAISED], [True, True, True]),
        ([RAISED, {**RAISED, "said": "ValueError: y"}], [True, True]),
        ([RAISED, KILLED, RAISED], [True, True, True]),
        ([MISTAKE, MISTAKE], [True, False]),
        ([ALONE, ALONE], [True, False]),  # before there was a store, and a step
        ([{"status": 127, "error": "no such command"}], [False]),
        ([{"status": None, "host": ""}], [False]),  # nothing has begun
    ],
)
def test_what_is_started_again(runs: list[dict[str, Any]], again: list[bool]) -> None:
    assert ends(9, *runs) == again
    assert not any(ends(0, *runs))
    assert not any(ends(9, *runs, asked=True))
    assert Restarts(9).again(ranks(*runs), JobEnd(0, ""), asked=False) == (False, "")


def test_a_rank_without_which_the_others_went_on_is_not_the_cause() -> None:
    restarts = Restarts(9)
    assert [restarts.again(ranks({**KILLED, "gone": True}, RAISED), FAILED, asked=False)[0] for _ in range(2)] == [
        True,
        False,
    ]


def test_an_error_that_the_death_of_mpirun_has_brought_about() -> None:
    restarts = Restarts(9)
    assert [restarts.again(ranks(RAISED), JobEnd(137, ""), asked=False)[0] for _ in range(2)] == [True, True]


def test_what_has_never_begun() -> None:
    """Is not started again, but where `mpirun` was killed, or a run before had begun."""
    none = ranks({"status": None, "host": ""})
    for before, end, again in (([], FAILED, False), ([], JobEnd(137, ""), True), ([ranks(KILLED)], FAILED, True)):
        restarts = Restarts(9)
        assert all(restarts.again(one, JobEnd(137, ""), asked=False)[0] for one in before)
        assert restarts.again(none, end, asked=False) == (again, "")


def test_the_number_of_restarts_and_the_words() -> None:
    restarts = Restarts(2)
    said = [restarts.again(ranks(KILLED), JobEnd(137, ""), asked=False)[1] for _ in range(3)]
    assert said == ["", "", "not started again: that was done 2 times (--restarts)"]
    restarts = Restarts(2)
    said = [restarts.again(ranks(RAISED), FAILED, asked=False)[1] for _ in range(2)]
    assert said == ["", "not started again: the same error after step 7 as in the run before"]


def test_a_signal_between_two_runs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def start(*_: object) -> job.RunEnd:
        os.kill(os.getpid(), signal.SIGTERM)
        return job.RunEnd(137, True, "from step 5")

    launched = job.LaunchedJob(
        [], [], [], {}, (), {job.SNAPSHOTS: "theirs"}, [], Limits(None, 1.0, 1.0), patience_s=None
    )
    monkeypatch.setattr(job, "_start", start)
    monkeypatch.setattr(job, "prepare", lambda *_: launched)
    output = Output(colours=(False, False))
    assert job._run(launched, argparse.Namespace(restarts=1, timeout=None), output) == 143
    output.close()
    assert capfd.readouterr().err == "mpikv launch: not started again: ended by SIGTERM\n"


def test_from_which_state() -> None:
    """All shares have to be there, on any host."""
    names = [f"step-{step:08}-{step:016x}-{worker}-of-2.snapshot" for step in (5, 40) for worker in (0, 1)]
    for there, stop_file, words in (
        ([*names, "other"], "train.state", "from step 40"),
        (names[:3], "", "from step 5"),
        (names[:1], "train.state", "from train.state"),
        (names[:1], "", "from the beginning, as nothing was saved"),
    ):
        restarts = Restarts(1)
        restarts.note(there)
        restarts.note([])  # of a run that did not begin
        assert restarts.goes_on_from(stop_file) == words


def test_how_many_workers_fit() -> None:
    hosts = [Host("a", 2), Host("b", 3)]
    assert [workers_that_fit(hosts, workers, 1, 1) for workers in (3, 4, 9)] == [3, 4, 4]
    assert workers_that_fit([*hosts, Host("c")], 9, 1, 9) == 9
    for left, servers, least in ((hosts, 1, 5), (hosts, 5, 1), ([], 0, 1)):
        with pytest.raises(
            ConfigError, match=r"slots are left: too few for \d workers and \d servers \(--min-workers\)"
        ):
            workers_that_fit(left, 5, servers, least)
