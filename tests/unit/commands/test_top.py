"""`mpikv top`: which processes are asked, and what is printed of their answers."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from mpikv.__main__ import main
from mpikv.commands import top
from mpikv.observe import endpoint
from mpikv.runtime import job_processes
from mpikv.runtime.job_processes import ProcessEntry


def entry(parent: int, name: str, uid: int = 5, **environ: str) -> ProcessEntry:
    return ProcessEntry(parent, uid, "S", name, environ)


# mpikv launch, its mpirun and two ranks; a job of Slurm with a rank here; one rank of another user's; a shell.
TABLE = {
    1: entry(0, "init", 0),
    10: entry(1, "python3.11"),
    11: entry(10, "mpirun"),
    12: entry(11, "python3.11"),
    13: entry(11, "python3.11"),
    20: entry(1, "slurmstepd", 0),
    21: entry(20, "python3.11", SLURM_JOB_ID="77"),
    30: entry(1, "python3.11", 6),
    40: entry(1, "bash", PBS_JOBID="88.server"),
}
ASKABLE = {12: 5, 13: 5, 21: 5, 30: 6}


@pytest.mark.parametrize(
    ("word", "uid", "found"),
    [
        ("12", 5, {12}),
        ("11", 5, {12, 13}),
        ("10", 5, {12, 13}),
        ("77", 5, {21}),
        ("30", 0, {30}),
        ("30", 5, "process 30 belongs to another user"),
        ("40", 5, r"neither process 40 \(bash\) nor one that it has started has an open store"),
        ("88", 5, "job 88 runs here, and no process of it has an open store on this host"),
        ("99", 5, "no process and no job 99 on this host; .*`srun --jobid=99 --overlap -n 1 mpikv top`"),
        ("x", 5, "no process and no job x on this host"),
        ("-1", 5, "no process and no job -1 on this host"),
    ],
)
def test_which_processes_are_meant(word: str, uid: int, found: Any) -> None:
    if isinstance(found, set):
        assert top.find(TABLE, ASKABLE, word, uid) == found
    else:
        with pytest.raises(top.NotFoundError, match=found):
            top.find(TABLE, ASKABLE, word, uid)


def store(worker: int, number: str = "a", **more: Any) -> dict[str, Any]:
    about = {"kind": "store", "store": number, "type": "dist_sync", "worker": worker, "workers": 2, "servers": 1}
    return {**about, "doing": f"in barrier for {worker}.0 s", "host": "h", "asks": True, "rows": None, **more}


def document(*offers: Mapping[str, Any]) -> dict[str, Any]:
    return {"host": "h", "program": "train.py", "offers": [*offers]}


ROWS = [
    {"rank": 0, "host": "h", "pid": 12, "seen_s": 0.0, "doing": "in barrier for 1.0 s; at train.py:3 in main"},
    {"rank": 1, "host": "far", "pid": 7, "seen_s": None, "doing": "no answer for 2.0 s"},
]
SERVES = {"kind": "server", "store": "a", "workers": 2, "servers": 1, "doing": "server 0 of 1, for 2 workers"}


def test_what_is_printed() -> None:
    documents = {12: document(store(0)), 13: document(SERVES)}
    assert top.shown(documents, {"a": ROWS}).splitlines()[1:] == [
        "dist_sync: 2 workers, 1 server",
        "worker host      pid seen s doing",
        "     0 h          12    0.0 in barrier for 1.0 s; at train.py:3 in main",
        "     1 far         7  never no answer for 2.0 s",
        "pid 13: server 0 of 1, for 2 workers",
    ]


def test_what_is_printed_where_nobody_can_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process that answers tells of itself; of others the system does."""
    monkeypatch.setattr(job_processes, "read", lambda: {14: ProcessEntry(1, 5, "T", "python", {})})
    documents = {13: document(store(1)), 12: document(store(0), store(0, "b")), 14: None}
    lines = top.shown(documents, {}).splitlines()
    assert lines[1:5] == [
        "dist_sync: 2 workers, 1 server; of 2 of them, on this host, what each knows by itself",
        "worker host      pid seen s doing",
        "     0 h          12    0.0 in barrier for 0.0 s",
        "     1 h          13    0.0 in barrier for 1.0 s",
    ]
    assert len(lines) == 9
    assert lines[-1] == "pid 14: no answer for 1.0 s; it was stopped by a signal (SIGCONT lets it go on)"


def test_each_store_is_asked_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answers(pids: list[int], question: str, _limit_s: float) -> dict[int, Any]:
        asked.extend(pids)
        return {pid: document(*[store(0, name, rows=ROWS) for name in names[pid]]) for pid in pids}

    monkeypatch.setattr(top, "asked", answers)
    names = {12: "a", 13: "ab", 14: "a"}
    documents = {11: None, **{pid: document(*[store(0, name) for name in names[pid]]) for pid in names}}
    assert top.of_stores(documents) == {"a": ROWS, "b": ROWS}
    assert asked == [12, 13]


def test_several_jobs_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    documents = {12: None, 13: document(store(1)), 21: document({"kind": "create", "doing": "in MPI_Init"})}
    monkeypatch.setattr(os, "geteuid", lambda: 5)
    monkeypatch.setattr(job_processes, "read", lambda: TABLE)
    monkeypatch.setattr(endpoint, "endpoints", lambda: ASKABLE)
    monkeypatch.setattr(top, "asked", lambda pids, *_: {pid: documents[pid] for pid in pids})
    assert main(["top"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "pid 13 on h: train.py, 2 workers, 1 server",
        "pid 21 on h: train.py, at its start",
        "mpikv top PID shows one of them",
    ]


def test_on_a_terminal_it_asks_until_the_job_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [{12: document(store(0))}] * 2
    monkeypatch.setattr(top, "_chosen", lambda _: [12])
    monkeypatch.setattr(top, "asked", lambda _, question, limit_s: answers.pop() if answers else {})
    monkeypatch.setattr(top, "of_stores", lambda _: {"a": ROWS})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(top.time, "strftime", lambda *_: "12:00:00")
    assert main(["top", "12", "--every", "0.001"]) == 0
    first, *tables = capsys.readouterr().out.split(top.CLEAR)
    assert (first, len(tables)) == ("", 2)
    assert tables[1] == tables[0] + "mpikv top: the job has ended, or has closed its stores\n"
    answers.append({12: document(store(0))})
    assert main(["top", "12", "--once"]) == 0
    assert capsys.readouterr().out == tables[0]


def test_without_a_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(endpoint, "endpoints", dict)
    assert main(["top"]) == 1
    assert re.match("mpikv top: no job of this user has an open store on this host; ", capsys.readouterr().err)
