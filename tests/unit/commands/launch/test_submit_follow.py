"""Following a job: output that comes late, states that change, jobs that end in every way, and Ctrl-C."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest.mock import ANY

import fresh
import pytest
from jobs import ROOT

from mpikv.__main__ import main
from mpikv.commands.launch.follow import SILENT_S, Follower, GrowingFile
from mpikv.commands.launch.scheduler import BatchState, SchedulerError
from mpikv.errors import ConfigError

PENDING, RUNNING = BatchState("pending (Resources)"), BatchState("running on n1")
DONE, GONE = BatchState("completed", 0), BatchState("finished", lost=True)
LAST = "mpikv: job {} ends with status {}\n"


LAST_17 = LAST.format(17, 0)
REQUEUED = LAST_17.replace("\n", " and goes back into the queue\n")
COPIED = LAST_17.replace("\n", " and goes on as job 43\n")
BUSY = SchedulerError("socket timed out")
Step = BatchState | Exception | str | Callable[[], None]


class Play:
    """A job whose states and output are given, on a clock of its own.

    steps: the answers to the questions for a state, the last one for ever. A text before an answer is what the job has
    printed meanwhile ("43: text" for job 43's), and what is callable is called.
    """

    def __init__(self, folder: Path, steps: Sequence[Step]) -> None:
        self.folder, self.steps = folder, list(steps)
        self.now_s, self.said, self.out = 0.0, [], io.StringIO()
        self.cancelled: list[str] = []

    def write(self, text: str) -> None:
        job, text = ("43", text.removeprefix("43: ")) if text.startswith("43: ") else ("17", text)
        with (self.folder / job).open("a") as file:
            file.write(text)

    def ask(self, _job: str) -> BatchState:
        while isinstance(first := self.steps[0], str) or callable(first):
            self.steps.pop(0)
            self.write(first) if isinstance(first, str) else first()
        if len(self.steps) > 1:
            self.steps.pop(0)
        if isinstance(first, Exception):
            raise first
        return first

    def cancel(self, job: str) -> str:
        self.cancelled.append(job)
        return ""

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def run(self) -> int:
        return Follower(
            "Slurm", "17", output=lambda job: self.folder / job, ask=self.ask, cancel=self.cancel,
            say=self.said.append, out=self.out, sleep=self.sleep, clock=lambda: self.now_s,
        ).run()  # fmt: skip


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Play]:
    return lambda *steps: Play(tmp_path, steps)


@pytest.mark.parametrize(
    ("steps", "status", "said"),
    [
        ([PENDING, PENDING, "one\n", RUNNING, "two\n" + LAST_17, RUNNING, DONE], 0,
         ["job 17: pending (Resources)", "job 17: running on n1", "job 17: completed, status 0"]),
        # the scheduler's status counts: a script may end well and its job not
        ([LAST_17, BatchState("cancelled", 143)], 143, ["job 17: cancelled, status 143"]),
        # but it may know none
        (["x\n" + LAST.format(16, 3) + LAST.format(17, 7), GONE], 7, ["job 17: finished, status 7"]),
        ([GONE, GONE, BatchState("finished", 9, lost=True)], 9,
         [ANY, "job 17: finished, status 9"]),  # from the accounting
        ([GONE, BUSY, BatchState("finished", 9, lost=True)], 9, [ANY, "job 17: finished, status 9"]),
        (["killed in the midst of a li", GONE], 1,
         ["job 17 is over, and Slurm does not know with which status: taken as 1"]),
        # a requeued job is not over; nor is its last line that of the run that is killed later
        ([REQUEUED, BatchState("pending (BeginTime)"), RUNNING, LAST.format(17, 5), GONE], 5,
         ["job 17: pending (BeginTime)", "job 17: running on n1", "job 17: finished, status 5"]),
        ([REQUEUED, RUNNING, GONE], 1, ["job 17: running on n1", ANY]),
        ([f"first\n{COPIED}", GONE, PENDING, "43: second\n" + LAST.format(43, 4), GONE], 4,
         ["job 17: finished, status 0, goes on as job 43", ANY, "job 43: finished, status 4"]),
        ([LAST_17, BUSY, BUSY, RUNNING, DONE], 0, ["job 17: unknown, Slurm does not answer: socket timed out",
         "job 17: running on n1", "job 17: completed, status 0"]),
    ],
)  # fmt: skip
def test_follows(tmp_path: Path, steps: list[Step], status: int, said: list[str]) -> None:
    game = Play(tmp_path, steps)
    printed = "".join(step.removeprefix("43: ") for step in steps if isinstance(step, str))
    assert game.run() == status
    assert game.said == said
    assert game.out.getvalue() == printed


def test_last_lines_come_after_the_end(play: Callable[..., Play]) -> None:
    game = play(RUNNING, DONE)
    wait = game.sleep

    def sleep(seconds: float) -> None:
        if game.steps[0] == DONE and not (game.folder / "17").exists():
            game.write("late\n" + LAST_17)
        wait(seconds)

    game.sleep = sleep  # type: ignore[method-assign]
    assert game.run() == 0
    assert game.out.getvalue().startswith("late\n")


def test_a_controller_that_is_gone(play: Callable[..., Play]) -> None:
    game = play(RUNNING, SchedulerError("connection refused"))
    with pytest.raises(ConfigError, match="has not answered for 300 s; job 17 may still run: connection refused"):
        game.run()
    assert game.now_s == pytest.approx(SILENT_S, abs=30)


def test_questions_get_fewer(play: Callable[..., Play]) -> None:
    """An hour is some hundreds of questions, not thousands: schedulers are shared."""
    game = play(RUNNING)
    asked: list[float] = []
    answer = game.ask

    def ask(job: str) -> BatchState:
        asked.append(game.now_s)
        return DONE if game.now_s > 3600 else answer(job)

    game.ask = ask  # type: ignore[method-assign]
    game.write(LAST_17)
    assert game.run() == 0
    assert len(asked) < 600
    assert max(later - before for before, later in itertools.pairwise(asked)) <= 16


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(play: Callable[..., Play], number: int) -> None:
    game = play(RUNNING, lambda: os.kill(os.getpid(), number), RUNNING, RUNNING, BatchState("cancelled", 143))
    before = signal.getsignal(number)
    assert game.run() == 128 + number
    assert game.cancelled == ["17"]
    assert f"{signal.Signals(number).name}: Slurm was asked to cancel job 17" in game.said
    assert game.said[-1] == "job 17: cancelled, status 143"
    assert signal.getsignal(number) == before


def test_interrupted_twice(play: Callable[..., Play]) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    game = play(RUNNING, interrupt, RUNNING, interrupt, RUNNING)
    assert game.run() == 130
    assert game.said[-1] == "job 17 may still run"


def test_a_cancelled_job_that_stays(play: Callable[..., Play]) -> None:
    game = play(RUNNING, lambda: os.kill(os.getpid(), signal.SIGINT), RUNNING)
    assert game.run() == 130
    assert game.said[-1] == "job 17 is not gone yet"


def test_letters_that_come_in_two_parts(tmp_path: Path) -> None:
    file, text, shown = tmp_path / "x", "Zürich €\n".encode(), ""
    tail = GrowingFile(file)
    for end in range(len(text) + 1):
        file.write_bytes(text[:end])
        shown += tail.read()
    assert shown == "Zürich €\n"


SBATCH = """#!/bin/sh
cat >"$FAKE/script"
env >"$FAKE/seen"
cp -p "$FAKE"/.mpikv-*.env "$FAKE/copy" 2>/dev/null
[ -z "$REFUSE" ] || { echo "sbatch: error: $REFUSE" >&2; exit 1; }
echo RUNNING >"$FAKE/state"
[ -n "$HOLD" ] || {
    (
        for _ in $(seq 300); do [ -e "$FAKE/asked" ] && break; sleep 0.1; done
        printf 'hello\\nmpikv: job 17 ends with status 7\\n' >train-17.out
        echo FAILED >"$FAKE/new"
        mv "$FAKE/new" "$FAKE/state"
    ) >&- 2>&- &
}
echo "17;cluster"
"""
SCONTROL = """#!/bin/sh
read -r state <"$FAKE/state"
touch "$FAKE/asked"
echo "JobId=17 JobName=train JobState=$state Reason=None ExitCode=7:0 NodeList=n1"
"""
SCANCEL = """#!/bin/sh
echo "scancel $*" >"$FAKE/cancelled"
echo CANCELLED >"$FAKE/new"
mv "$FAKE/new" "$FAKE/state"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    return {**os.environ, "PATH": path, "FAKE": str(tmp_path), "PYTHONPATH": str(ROOT)}


def settings(script: str) -> list[str]:
    return [line.split("  # ")[0] for line in script.splitlines()]


@pytest.mark.parametrize("wait", [True, False])
def test_submit_and_wait(slurm: dict[str, str], tmp_path: Path, wait: bool) -> None:
    """Values of variables are in a file that its user alone can read, not in the script nor in what the scheduler takes
    along.
    """
    words = [
        "slurm",
        "-n",
        "3",
        "-s",
        "1",
        *["--wait"] * wait,
        *(f"--env={one}" for one in ("A=b'c", "TOKEN", "LATIN")),
    ]
    latin = os.fsdecode(b"caf\xe9")  # as an environment may hold it
    done = submit(tmp_path, *words, "--", "true", latin, "--wait", env={**slurm, "TOKEN": "s3cret", "LATIN": latin})
    assert done.returncode == (7 if wait else 0), done.stderr
    assert done.stdout == "hello\nmpikv: job 17 ends with status 7\n" * wait
    said = ["Slurm job 17: 3 workers, 1 servers; output in train-17.out"]
    said += ["job 17: running on n1", "job 17: failed, status 7"] * wait
    assert done.stderr.splitlines() == [f"mpikv submit: {line}" for line in said]
    script, copy = (tmp_path / "script").read_text(errors="surrogateescape"), tmp_path / "copy"
    assert {"#SBATCH --ntasks=4", "SERVERS=1", f"PROGRAM=(true '{latin}' --wait)"} <= set(settings(script))
    (line,) = (line for line in settings(script) if line.startswith("ENV_FILE="))
    for text in (script, (tmp_path / "seen").read_text(), done.stdout, done.stderr):
        assert "s3cret" not in text
        assert "b'c" not in text
    assert copy.stat().st_mode & 0o777 == 0o600
    show = f'. {copy}; printf "%s\\0" "$A" "$TOKEN" "$LATIN"'
    shown = subprocess.run(["sh", "-c", show], capture_output=True, check=True).stdout
    assert shown == b"b'c\0s3cret\0caf\xe9\0"
    left = list(tmp_path.glob(".mpikv-*.env"))
    assert [str(file) for file in left] == ([] if wait else [line.removeprefix("ENV_FILE=")])


@pytest.mark.parametrize("inner", ["", "mine"])
def test_values_of_variables_lie_where_nobody_replaces_them(slurm: dict[str, str], tmp_path: Path, inner: str) -> None:
    """The job runs their lines: they go into the home folder where others may write beside the output, or above it."""
    shared, home = tmp_path / "shared", tmp_path / "home"
    (shared / inner).mkdir(parents=True)
    shared.chmod(0o777)
    home.mkdir()
    words = ("slurm", "-n", "2", "--output-dir", str(shared / inner), "--env", "A=1", "--", "true")
    assert submit(tmp_path, *words, env={**slurm, "HOME": str(home)}).returncode == 0
    (line,) = (one for one in settings((tmp_path / "script").read_text()) if one.startswith("ENV_FILE="))
    assert [f"ENV_FILE={one}" for one in home.iterdir()] == [line]
    assert list((shared / inner).iterdir()) == []


def test_values_of_variables_are_not_printed(tmp_path: Path) -> None:
    words = ("slurm", "-n", "2", "--dry-run", "--output-dir", "logs", "--env", "A=s3cret", "--", "true")
    done = submit(tmp_path, *words)
    assert done.returncode == 0
    assert "s3cret" not in done.stdout + done.stderr
    assert f"ENV_FILE={tmp_path}/logs/train.env" in settings(done.stdout)
    assert f"{tmp_path}/logs/train.env is to have a line export NAME=VALUE for each of A" in done.stderr
    assert list(tmp_path.iterdir()) == []


def submit(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which has `folder` as its own."""
    code = "import sys; from mpikv.__main__ import main; sys.exit(main())"
    return fresh.python(code, "submit", *words, cwd=folder, before=env)


@pytest.mark.parametrize(
    ("scheduler", "option", "line"),
    [("slurm", "--account=x", "#SBATCH --account=x"), ("sge", "-P x", "#$ -P x")],
)
def test_options_that_begin_with_a_dash(
    scheduler: str, option: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-n", "2", "--option", option, "--", "train.py", "--option", "--account=y"]
    assert main(["submit", scheduler, "--dry-run", *words]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n")
    assert {line, "PROGRAM=(train.py --option --account=y)"} <= set(settings(script))


def test_ctrl_c_cancels(slurm: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mpikv", "submit", "slurm", "-n", "3", "--wait", "--", "true"],
        env={**slurm, "HOLD": "1"}, cwd=tmp_path, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    while "running" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert (tmp_path / "cancelled").read_text() == "scancel 17\n"
    assert "SIGINT: Slurm was asked to cancel job 17" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "environ", "says"),
    [
        (("slurm", "-n", "2", "--", "true"), {"REFUSE": "bad qos"}, "Slurm refused the job: sbatch: error: bad qos"),
        (("sge", "-n", "2", "--", "true"), {}, "qsub was not found, so Grid Engine cannot be reached from here"),
        (("sge", "-n", "2", "--nodes", "2", "--", "true"), {}, "--nodes is gone: Slurm has it as --option --nodes=N"),
        (("slurm", "-n", "2", "--pe", "mpi", "--", "true"), {}, "--pe is Grid Engine's"),
        (("slurm", "-n", "2", "--time", "soon", "--", "true"), {}, "'soon' is no time limit"),
        (("slurm", "-n", "2", "--env", "NOT_SET_HERE", "--", "true"), {}, "NOT_SET_HERE: no such variable"),
        (("slurm", "-n", "2", "--output-dir", "/proc/x", "--", "true"), {}, "--output-dir /proc/x"),
        (("slurm", "-n", "2"), {}, "no command"),
        (("slurm", "-n", "2", "--notice", "9", "--", "true"), {}, "--notice is gone: it is a line at the top of"),
        (
            ("slurm", "-n", "2", "--mem", "4G", "--", "true"),
            {},
            "arguments: --mem; what Slurm itself understands goes ",
        ),
        (("sge", "-n", "2", "--gpus=2", "--", "true"), {}, 'through --option, as in --option "-l h_vmem=4G"'),
        (("sge", "-n", "2", "--option"), {}, "--option: expected one argument"),
        (("slurm", "--", "true"), {}, "-n/--num-workers"),
        (("pbs", "-n", "2", "--", "true"), {}, "pbs"),
    ],
)
def test_refused(
    slurm: dict[str, str], words: tuple[str, ...], environ: dict[str, str], says: str, in_place: Callable[..., str]
) -> None:
    """In words of this command or of the scheduler, with status 2 and without a traceback."""
    without_slurm = {**slurm, "PATH": slurm["PATH"].partition(":")[0]} if words[0] == "sge" else slurm
    assert says in in_place("submit", *words, env={**without_slurm, **environ})


@pytest.fixture
def in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `mpikv` in this process, which is to end with status 2; returns what it wrote to stderr."""

    def run(*words: str, env: Mapping[str, str] | None = None) -> str:
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as end:
            sys.exit(main(words))
        assert end.value.code == 2
        return capfd.readouterr().err

    return run
