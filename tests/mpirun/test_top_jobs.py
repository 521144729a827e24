"""`mpikv top` asks a running job from outside."""

from __future__ import annotations

import re
import time
from pathlib import Path

import fresh
import pytest
from jobs import start

PROGRAM = str(Path(__file__).with_name("stalls_program.py"))
LIMIT_S = 60
AT_WORK = r"( +\d+ \S+ +\d+ +\d+\.\d .*; at stalls_program\.py:\d+ in .*\n)"
STOPPED = r" +1 \S+ +\d+ +\S+ no answer for 2\.0 s; it was stopped by a signal"
CASES = {
    "stopped": ({}, rf"3 workers, 0 servers\n(.*\n)+{STOPPED}"),
    "a server": (
        {"MPIKV_NUM_SERVERS": "1"},
        rf"2 workers, 1 server\n.*\n{AT_WORK}{{2}}pid \d+: server 0 of 1, for 2 w",
    ),
    "calls": ({"MPIKV_PROGRESS": "calls"}, rf"3 workers, 0 servers; of 3 of them, .*\n.*\n{AT_WORK}{{3}}"),
}


def top(*words: str, says: str = "") -> tuple[int, str]:
    """What it prints, once it says this: a process that gets no core for a second has not answered."""
    deadline = time.monotonic() + LIMIT_S / 2
    while True:
        done = fresh.python("import sys; from mpikv.__main__ import main; sys.exit(main())", "top", *words)
        output = done.stdout + done.stderr
        if re.search(says, output) or time.monotonic() > deadline:
            return done.returncode, output


@pytest.mark.parametrize("case", CASES)
def test_a_job_is_asked_by_the_pid_of_mpirun(mpi, case: str, tmp_path: Path) -> None:
    env, said = CASES[case]
    body = "stopped" if case == "stopped" else "sleep_in_python"
    env = {"FOLDER": str(tmp_path), "MPIKV_TIMEOUT_S": "100", **env}
    with start(3, ["python", PROGRAM, body, "1"], env=env, timeout_s=LIMIT_S, mpi=mpi) as running:
        running.wait_for("rank 1 stays away")
        pid = running._process.pid
        status, output = top(str(pid), says=said)
        assert (status, output.splitlines()[0].split()[0]) == (0, "stalls_program.py")
        assert re.search(said, output), output
        (tmp_path / "go").touch()
        if case == "stopped":
            running.end()
    if case != "stopped":
        running.result.check()
    status, output = top(str(pid))
    assert status == 1
    assert "no process and no job" in output
