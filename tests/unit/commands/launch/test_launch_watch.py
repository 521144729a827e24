"""The watch over a job, without MPI: a shell stands in for mpirun and starts the processes above the ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest

from mpikv.commands.launch import channel, processes, quick, watch
from mpikv.commands.launch.connections import MORE_STRANGERS
from mpikv.commands.launch.output import Output
from mpikv.commands.launch.processes import JOB, descendants, end_job, is_alive, of_job, send
from mpikv.commands.launch.rank import LAUNCH
from mpikv.commands.launch.ranks import JobEnd, RankBlock, place
from mpikv.commands.launch.watch import JobWatch, Limits
from mpikv.common.files import open_log
from mpikv.errors import ConfigError

LIMITS = Limits(job=None, start=120.0, grace=60.0, save=3600.0)  # longer than anything here takes on a busy machine
HASTY = LIMITS._replace(grace=0.1)  # for what has to be killed
LEFT_S = 60.0
SECRET = "of this test"
READY = "touch $FOLDER/$PMI_RANK"  # a rank says so to `when_started`
GO = "until [ -e $FOLDER/go ]; do sleep 0.1; done"


def plan_of(job: str, addresses: object) -> dict[str, object]:
    return {"job": job, "secret": SECRET, "addresses": addresses, "network": channel.network()}


class Job:
    def __init__(
        self,
        commands: list[str],
        limits: Limits = LIMITS,
        blocks: list[RankBlock] | None = None,
        *,
        continues: bool = False,
        **env: str,
    ):
        self.id = os.urandom(8).hex()
        self.blocks = blocks or place([], len(commands), 0)
        self.folder = Path(tempfile.mkdtemp(prefix="mpikv-job-"))
        self.output = Output(colours=(False, False))
        self.continues = continues
        self.watch = JobWatch(self.blocks, SECRET, self.output, limits, ["127.0.0.1"], continues=continues)
        self.commands = commands
        self.env = env

    def run(self, plan: dict[str, object] | None = None, before: str = "", after: str = "wait") -> JobEnd:
        starts = [before]
        for block in self.blocks:
            for i in range(block.ranks):
                rank = block.first_rank + i
                words = quick.command("rank", block.role, str(block.first_number), str(block.first_rank), "--")
                starts.append(f"PMI_RANK={rank} {shlex.join(words)} sh -c '{self.commands[rank]}' &")
        sent = (
            plan_of(self.id, self.watch.addresses) | {"patience_s": 3600.0 if self.continues else None} | (plan or {})
        )
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM"))}
        try:
            return self.watch.run(
                ["sh", "-c", "\n".join([*starts, after])],
                {**environ, LAUNCH: json.dumps(sent), JOB: f"{self.id}/mpirun", "FOLDER": str(self.folder), **self.env},
            )
        finally:
            self.output.close()
            until = time.monotonic() + LEFT_S
            while (left := of_job(self.id)) and time.monotonic() < until:
                time.sleep(0.02)  # a process ends some time after its signal
            self.left = left
            left = end_job(self.id, 0, 5)
            shutil.rmtree(self.folder)
            assert left == []

    def go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture(scope="module")
def forks() -> None:
    """What forks the programs of tests stays."""
    fresh.python("pass")


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And nobody has last words here for which others would wait, but may be late to say that it goes on."""
    monkeypatch.setattr(watch, "LAST_WORDS_S", 0.0)
    monkeypatch.setattr(watch, "NO_STORE_S", LEFT_S)
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) - before == set()


@pytest.mark.parametrize("ranks", [0, 1])
def test_signals_are_for_the_command_down_to_its_rank(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    words = ["sh", "-c", "sh -c 'sleep 600 & echo $$ $!; wait' & wait"]
    command = subprocess.Popen(words, stdout=-1, start_new_session=True)
    assert command.stdout is not None
    rank, child = (int(word) for word in command.stdout.readline().split())
    try:
        monkeypatch.setattr(processes, "is_rank", lambda pid: bool(ranks) and pid == rank)
        assert processes.addressed(command.pid) == [command.pid, rank, *([] if ranks else [child])]
    finally:
        send([*descendants(command.pid), command.pid], signal.SIGKILL)
        command.wait()


def test_output_environment_and_folder(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    seen = f"pwd; echo $A $B $C $PYTHONUNBUFFERED ${JOB} ${LAUNCH}"
    commands = [rf"{seen}; echo b >&2; printf c", rf"{seen}; printf \\303\\251\\n; printf \\377\\n"]
    job = Job(commands, blocks=place([], 1, 1), C="inherited")
    assert job.run({"env": {"A": "1", "B": "2"}, "folder": str(tmp_path)}) == JobEnd(0, "")
    out, err = capfd.readouterr()
    host = socket.gethostname()
    for role, more in (("worker", ["c"]), ("server", ["é", "\N{REPLACEMENT CHARACTER}"])):
        lines = [line for line in out.splitlines() if line.startswith(f"[{role} 0 @ {host}] ")]
        assert [line.split("] ")[1] for line in lines] == [str(tmp_path), f"1 2 inherited 1 {job.id}/{role}-0", *more]
    assert err == f"[worker 0 @ {host}] b\n"


def test_a_bar_is_seen_while_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is rewritten by carriage returns, before or behind each state; the whole line comes in the end."""
    commands = [rf"printf \\r10%%{end}; {GO}; printf \\r{end}99%%\\n" for end in ("", r"\\r")]
    job, seen = Job(commands, LIMITS._replace(job=60.0)), [[], []]

    def see(_stream: int, _role: str, number: int, _host: str, data: bytes) -> None:
        seen[number].append(data)
        if b"10%\r" in seen[0] and b"10%\r" in seen[1]:
            job.go()

    monkeypatch.setattr(job.output, "lines", see)
    assert job.run() == JobEnd(0, "")
    for rank in range(2):
        assert seen[rank][0] == b"10%\r"
        assert b"".join(seen[rank][1:]).replace(b"99%\r", b"").endswith(b"99%\n")


ONE_EACH = place([], 1, 1)
IT_IS_KILLED = "mpikv launch: all ranks have ended, and mpirun has not: it is killed\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("commands", "options", "starts", "status", "text", "said"),
    [
        (["sleep 300", "exit 3", "sleep 300"], {}, {}, 3, "worker 1 on .* ended with status 3", ""),
        (["sleep 300", "kill -9 $$"], {}, {}, 137, r"worker 1 on .* was killed by signal 9 \(SIGKILL\)", ""),
        (["(trap : TERM; setsid sleep 300 & sleep 300) & exit 4"], {}, {}, 4, "worker 0 .* with status 4", ""),
        (["sleep 300", "kill -9 $PPID; sleep 300"], {"limits": HASTY}, {}, 1,
         r"worker 1 \(1 of 2 ranks\) on .* without a report", ""),
        (["true"], {}, {"plan": {"folder": "/no/such"}}, 127, "the folder /no/such does not exist on", ""),
        (["true"] * 2, {"limits": HASTY._replace(start=0.1), "blocks": ONE_EACH}, {"before": "sleep 300"}, 1,
         "^worker 0, server 0 did not start within 0.1 s", ""),
        (["true"], {}, {"before": "echo oh no; exit 0"}, 1,
         r"^mpirun ended, and worker 0 \(1 of 1 ranks\) never started$", "[mpirun] oh no\n"),
        (["true"] * 2, {}, {"after": "wait; sleep 300"}, 0, "^$", IT_IS_KILLED),  # its ranks have ended, with status 0
        (["true", "sleep 300"], {"blocks": ONE_EACH}, {}, 0, "servers that wait", ""),
        (["trap : TERM; while :; do sleep 0.1; done"], {"limits": HASTY._replace(job=0.5)}, {}, 124,
         "^timed out after 0.5 s$", ""),
    ],
)  # fmt: skip
def test_how_a_job_ends(  # noqa: PLR0917
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    commands: list[str],
    options: dict[str, Any],
    starts: dict[str, Any],
    status: int,
    text: str,
    said: str,
) -> None:
    monkeypatch.setattr(watch, "IDLE_SERVERS_S", 0.0)
    if said == IT_IS_KILLED:
        monkeypatch.setattr(watch, "LINGERING_S", 0.0)
    job = Job(commands, **options)
    end = job.run(**starts)
    assert end.status == status
    assert re.search(text, end.text)
    assert capfd.readouterr().err == said or not said
    assert job.left == [] or "$PPID" in commands[-1]  # whose leavings are looked for afterwards


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("[rank 1 of 2 on h] ends the job with status 3", 3),
        ("Abort(3): application called MPI_Abort(X, 3) - process 1", 3),
        ("mpikv: error: [rank 1 of 2 on h] x", 2),
        ("some [rank 1 of 2 on h] ends the job with status 3", 0),
    ],
)
def test_a_rank_that_ends_the_job_is_to_blame(line: str, status: int) -> None:
    host = socket.gethostname()
    job = Job([f"{READY}; {GO}; exit 14", f'echo "{line}" >&2; {READY}; sleep 300'])
    blamed = JobEnd(status, f"worker 1 on {host} called MPI_Abort with status {status}")
    with when_started(job, lambda: None), when(lambda: bool(job.watch.ranks[1].aborted) or not status, job.go):
        assert job.run() == (blamed if status else JobEnd(14, f"worker 0 on {host} ended with status 14"))


# As create/survivors.py says it
GO_ON, GONE = "mpikv: when one of 2 ranks dies, the others go on", "mpikv: 1 rank is gone: 1 go on"
CAN = f'echo "{GO_ON}" >&2; {GO}'  # which may be read after the other's end


@pytest.mark.parametrize(
    ("dies", "can", "says", "status"),
    [
        ("kill -9 $$", CAN, "", 0),
        ("exit 3", CAN, GONE, 0),
        ("exit 3", CAN, "", 3),  # the result of a program that nobody has missed
        ("kill -9 $$", CAN, f"some {GONE}", 0),
        ("kill -9 $$", GO, GONE, 0),  # while they make the store
    ],
)
def test_the_others_go_on(capfd: pytest.CaptureFixture[str], dies: str, can: str, says: str, status: int) -> None:
    """And learn of it from mpirun, which sees a signal, though the rank has left something running."""
    job = Job([f'{can}; echo "{says}" >&2', f"setsid sleep 300 & {dies}"], continues=True)
    ended = f"worker 1 on {socket.gethostname()} "
    ended += "was killed by signal 9 (SIGKILL)" if "kill" in dies else "ended with status 3"
    with when((job.folder / "told").exists, job.go):
        end = job.run({"grace_s": 3600.0}, after="wait $!; echo $?; touch $FOLDER/told; wait; exit 9")
    assert end == JobEnd(status, ended if status else "")
    err = capfd.readouterr().err
    assert f"mpikv launch: {ended}; 1 rank goes on\n" in err
    assert "[mpirun] 137\n" in err
    assert job.left == []


def test_mpirun_is_not_waited_for_where_all_have_ended_or_are_gone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LINGERING_S", 0.0)
    assert Job([f'echo "{GO_ON}"', "kill -9 $$"], continues=True).run(after="wait; sleep 300") == JobEnd(0, "")
    assert IT_IS_KILLED in capfd.readouterr().err


def test_nobody_goes_on_before_there_is_a_store(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "NO_STORE_S", 0.0)
    end = Job(["sleep 300", "kill -9 $$"], continues=True).run()
    why = "was killed by signal 9 (SIGKILL) before the ranks had a store: the others cannot go on"
    assert end == JobEnd(137, f"worker 1 on {socket.gethostname()} {why}")
    assert not capfd.readouterr().err


SUSPENDED = """
import mmap, os, signal
rank = open(os.environ["FOLDER"] + "/libmpi.so", "wb+")
rank.truncate(mmap.PAGESIZE)
loaded = mmap.mmap(rank.fileno(), 0)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_rank_that_is_suspended_is_killed_and_the_others_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever is on its host besides."""
    suspends = 'exec $PYTHON -S -c "$PROGRAM"'
    job = Job([CAN, suspends], continues=True, PYTHON=sys.executable, PROGRAM=SUSPENDED)
    with when(lambda: job.watch.ranks[1].gone, job.go):
        assert job.run({"patience_s": 0.1}).status == 0
    said = capfd.readouterr().err
    assert re.search(r"\[worker 1 @ \S+\] mpikv: process \d+ on \S+ was suspended for 0.05 s, half of MPIKV_TI", said)
    assert re.search(r"mpikv launch: worker 1 on \S+ was killed by signal 9 \(SIGKILL\); 1 rank goes on\n", said)


ENDS_THE_JOB = 'echo "[rank 1 of 2 on h] ends the job with status 3" >&2; exit 3'
RAISES = 'echo "Traceback (most recent call last):" >&2; exit 1'
BOX = "echo MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD"  # Open MPI's mpirun


@pytest.mark.parametrize(
    ("commands", "before", "status"),
    [
        ([CAN, ENDS_THE_JOB], "", 3),
        ([f"{CAN}; exit 4", "kill -9 $$"], "", 4),  # then nobody is left
        ([f"{CAN}; sleep 300", "exit 6"], f"({GO}; {BOX}) &", 6),
        ([CAN, RAISES], "", 1),
    ],
)
def test_nobody_goes_on(capfd: pytest.CaptureFixture[str], commands: list[str], before: str, status: int) -> None:
    job = Job(commands, continues=True)
    with when(lambda: job.watch.ranks[1].gone, job.go):
        end = job.run(before=before)
    assert end.status == status
    assert ("1 rank goes on" in capfd.readouterr().err) == (commands[1] not in (ENDS_THE_JOB, RAISES))
    assert job.left == []


def test_a_rank_has_reported_before_its_command_starts() -> None:
    """What it sends later is lost with it, if the command or anybody else kills it at once."""
    with Above("kill -9 $PPID") as above:
        kinds: list[int] = []
        above.read(lambda kind: bool(kinds.append(kind)))
    assert kinds[0] == channel.HELLO


def test_a_rank_that_reports_when_the_others_are_dismissed_is_dismissed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its process would wait for that, and mpirun for it."""
    job, sent = Job(["true"] * 2), list[int]()
    monkeypatch.setattr(job.watch._connections, "send", lambda kind, *_, **__: sent.append(kind))
    with contextlib.closing(job.output), contextlib.closing(job.watch):
        job.watch._ending, late = True, job.watch.ranks[1]
        job.watch._look()
        late.host = "h"
        job.watch._frame(late, channel.HELLO, b"")
        job.watch._look()
        assert sent == [channel.BYE, channel.SIGNAL]
        late.status = -signal.SIGTERM
        job.watch._look()
    assert sent == [channel.BYE, channel.SIGNAL, channel.BYE]
    shutil.rmtree(job.folder)


def test_mpirun_kills_its_children() -> None:
    """The ranks get SIGTERM through the process above them and still report; mpirun's status counts."""
    job = Job([f'trap "echo told; exit 1" TERM; {READY}; sleep 300 & wait'] * 2)
    with when_started(job, job.go):
        verdict = job.run(after=f"{GO}; kill -9 $(jobs -p); exit 9")
    assert verdict == JobEnd(9, "mpirun ended the ranks, with status 9")


def test_mpirun_does_not_say_again_which_rank_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    """It would do so in a box of text. What it says before, and of what no rank has reported, is shown."""
    warning = "plm:ssh: Warning: setpgid(1,1) failed in parent with errno=Permission denied(13)"
    job = Job([f"{READY}; {GO}; exit 3"])
    with when_started(job, job.go):
        job.run(before=f'echo "{warning}" >&2; echo early >&2', after="wait; echo a box >&2; exit 3")
    assert capfd.readouterr().err == "[mpirun] early\n"


ENDS_WELL = f'trap "exit 0" TERM; {READY}; sleep 300 & wait'
PASSED_ON = f'trap "exit 0" USR1; {READY}; sleep 300 & wait'
TOLD = "touch $FOLDER/told$PMI_RANK"
RUNS_ON = f'trap "{TOLD}" TERM; {READY}; while :; do sleep 0.1; done'
SAVES = f'trap "{TOLD}; {GO}; exit 0" TERM; {READY}; while :; do sleep 0.1; done'
FAILS_TO = SAVES.replace("exit 0", "exit 3")
# Their settings may come from the program, of which the launcher knows nothing: then it is what they print.
SAYS = "mpikv: SIGTERM at worker 0 on h: all workers stop after their step"
ANNOUNCES = SAVES.replace(TOLD, f"{TOLD}; echo {SAYS} >&2")
LOST = "{} of 2 ranks) had not ended: killed, and a state that was not yet saved is lost (--grace SECONDS gives more "
ONE_LOST, BOTH_LOST = LOST.format("worker 0 (1"), LOST.format("worker 0, worker 1 (2")
IN_TIME = "workers that save their state after this step have 3600 s for it (--grace)"
ENDED, KILLED = JobEnd(0, "ended by SIGTERM, and all ranks ended with status 0"), JobEnd(143, "ended by SIGTERM")
NO_TIME = LIMITS._replace(grace=0.0, saves=True)


@pytest.mark.parametrize(
    ("commands", "limits", "signum", "end", "said"),
    [
        ([f"{READY}; sleep 300"] * 2, LIMITS, signal.SIGTERM, KILLED, ""),
        ([ENDS_WELL] * 2, LIMITS, signal.SIGINT, JobEnd(130, "ended by SIGINT"), ""),
        ([ENDS_WELL] * 2, LIMITS, signal.SIGTERM, ENDED, ""),
        ([PASSED_ON] * 2, LIMITS, signal.SIGUSR1, JobEnd(0, ""), ""),
        ([SAVES] * 2, NO_TIME, signal.SIGTERM, ENDED, IN_TIME),
        ([ANNOUNCES] * 2, LIMITS._replace(grace=600.0), signal.SIGTERM, ENDED, IN_TIME),
        # nobody waits for a state that a rank cannot save, nor for longer than there is time
        ([RUNS_ON, FAILS_TO], NO_TIME, signal.SIGTERM, KILLED, ONE_LOST),
        ([RUNS_ON] * 2, HASTY._replace(save=0.1, saves=True), signal.SIGTERM, KILLED, BOTH_LOST),
    ],
)
def test_signals_to_the_launcher(
    capfd: pytest.CaptureFixture[str], *, commands: list[str], limits: Limits, signum: int, end: JobEnd, said: str
) -> None:
    job = Job(commands, limits)

    def may_save() -> bool:
        told = all((job.folder / f"told{rank}").exists() for rank in job.watch.ranks)
        announced = any(at - time.monotonic() > 1000 for at, _ in job.watch._plan[:1])
        return told and (commands[0] != ANNOUNCES or announced)

    with when_started(job, lambda: os.kill(os.getpid(), signum)), when(may_save, job.go):
        assert job.run() == end
    err = capfd.readouterr().err
    assert said in err
    assert ("is lost" in err) == (said in (ONE_LOST, BOTH_LOST))


def test_workers_save_when_the_time_is_over() -> None:
    job = Job([SAVES] * 2, NO_TIME)

    def over() -> None:
        job.watch._limits = NO_TIME._replace(job=0.0)  # only now: all ranks are to be there before

    with when_started(job, over), when((job.folder / "told0").exists, job.go):
        assert job.run().status == 124


def test_a_second_signal_kills(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job([RUNS_ON] * 2, LIMITS._replace(grace=3600.0))

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with when_started(job, interrupt), when((job.folder / "told0").exists, interrupt):
        assert job.run().status == 130
    assert BOTH_LOST in capfd.readouterr().err


@contextlib.contextmanager
def when_started(job: Job, act: Callable[[], None]) -> Iterator[None]:
    """Do something once the launcher has heard of all ranks and their commands have said that they are ready."""

    def started() -> bool:
        return all(rank.host and (job.folder / str(number)).exists() for number, rank in job.watch.ranks.items())

    with when(started, act):
        yield


@contextlib.contextmanager
def when(reached: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Do something once, beside what is done here, as soon as it is so."""
    over = threading.Event()

    def wait() -> None:
        while not reached():
            if over.wait(0.02):
                return
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LEFT_S)


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def receive(connection: socket.socket, count: int) -> bytes:
    """So many bytes, fewer where the other side has closed the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < count and (more := connection.recv(count - len(data))):
            data += more
    return data


OF_STRANGERS = (
    b"GET / HTTP/1.1\r\nHost: somewhere.else.example.org\r\nAccept: */*\r\n\r\n",
    channel.frame(channel.HELLO, b"[" * 100_000),
    channel.message(channel.ENDED, status=0) * 10,
)
OF_RANKS = (  # with the secret, but nonsense: a bug of ours
    channel.frame(channel.HELLO, b"[" * 5000),
    channel.frame(channel.HELLO, b"[" * 500_000),
    channel.message(channel.HELLO, rank=0, host="x"),  # it has reported before
    channel.message(channel.HELLO, rank=7, host="x"),
    channel.message(channel.ENDED, status=0),
    b"\xff" * 100,
)


def dial(job: Job) -> socket.socket:
    connection = socket.create_connection(job.watch.addresses[0])
    connection.settimeout(30)
    return connection


def nonsense(job: Job) -> None:
    """Without the secret nobody becomes a rank, or gets a proof: the challenge comes, and the end."""
    for data in (*OF_STRANGERS, *OF_RANKS):
        proves = data in OF_RANKS
        with channel.connect(job.watch.addresses, SECRET) if proves else dial(job) as one:
            one.settimeout(30)
            with contextlib.suppress(ConnectionError):
                one.sendall(data)
            assert len(receive(one, 1000)) in ((0,) if proves else (0, channel.NONCE_BYTES))


def recorded_greeting(job: Job) -> None:
    ((host, port),) = job.watch.addresses
    nonce = os.urandom(channel.NONCE_BYTES)
    with dial(job) as rank:
        challenge = receive(rank, channel.NONCE_BYTES)
        greeting = nonce + channel.proof(SECRET, "rank", f"{host}:{port}", challenge, nonce)
        rank.sendall(greeting)
        answer = receive(rank, channel.PROOF_BYTES)
        assert answer == channel.proof(SECRET, "launcher", f"{host}:{port}", challenge, nonce)
    # With the secret, but for a connection to another address; and what a launcher sends is no proof of a rank.
    for prover, to in (("", ""), ("rank", f"{host}:1"), ("launcher", f"{host}:{port}")):
        with dial(job) as other:
            fresh = receive(other, channel.NONCE_BYTES)
            assert fresh != challenge
            other.sendall(nonce + channel.proof(SECRET, prover, to, fresh, nonce) if prover else greeting)
            assert receive(other, 1000) == b""


def silence(job: Job) -> None:
    job.watch._limits = LIMITS._replace(job=120.0, greeting=0.5)  # only now: its rank has been greeted
    with dial(job) as silent, dial(job) as slow:
        slow.sendall(b"x")
        for stranger in (silent, slow):
            assert len(receive(stranger, 1000)) == channel.NONCE_BYTES


def many(job: Job) -> None:
    """Only so many at once: the first to come is the first to go, and a rank still gets in."""
    with contextlib.ExitStack() as open_connections:
        strangers = [open_connections.enter_context(dial(job)) for _ in range(MORE_STRANGERS + 20)]
        for stranger in strangers[: len(strangers) - MORE_STRANGERS - 1]:
            assert len(receive(stranger, 1000)) == channel.NONCE_BYTES
        channel.connect(job.watch.addresses, SECRET).close()


@pytest.mark.parametrize("act", [nonsense, recorded_greeting, silence, many])
def test_strangers_disturb_no_job(act: Callable[[Job], None], capfd: pytest.CaptureFixture[str]) -> None:
    """It goes on until they have done what they do, and then ends well."""
    job, failures = Job([f"{READY}; {GO}"], LIMITS._replace(job=120.0, greeting=100.0)), list[BaseException]()

    def then_go() -> None:
        try:
            act(job)
        except BaseException as error:
            failures.append(error)
        job.go()

    with when_started(job, then_go):
        verdict = job.run()
    assert not failures, failures
    assert (verdict, capfd.readouterr().err) == (JobEnd(0, ""), "")


def test_it_listens_on_the_addresses_of_the_job_alone() -> None:
    with contextlib.closing(Output()) as output:
        job = JobWatch(place([], 1, 0), SECRET, output, LIMITS, ["127.0.0.1", "127.0.0.2", "192.0.2.1"])
        assert [host for host, _ in job.addresses] == ["127.0.0.1", "127.0.0.2"]  # 192.0.2.1 is not ours (RFC 5737)
        for host, port in job.addresses:
            other = {"127.0.0.1": "127.0.0.2", "127.0.0.2": "127.0.0.1"}[host]
            socket.create_connection((host, port)).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port))
        job.close()
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
            JobWatch(place([], 1, 0), SECRET, output, LIMITS, ["192.0.2.1"])


def test_who_is_dialled_from_another_host() -> None:
    """Not an address that this host has as well: a program of somebody else may listen there."""
    addresses = [("192.0.2.1", 5), ("127.0.0.1", 6), ("::1", 7)]
    assert channel.dialled_from(addresses, channel.network()) == addresses
    assert ("127.0.0.1", 6) not in channel.dialled_from(addresses, "of another host")
    assert channel.dialled_from(addresses[:1], "of another host") == addresses[:1]


def test_a_program_that_is_no_launcher_learns_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """It is left for another address, and what the rank sent it is a proof for it alone."""
    for wrong in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, b"x" * channel.NONCE_BYTES):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            heard: list[bytes] = []

            def answer(wrong: bytes = wrong, heard: list[bytes] = heard, listener: socket.socket = listener) -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(10)
                    connection.sendall(wrong)
                    if wrong:
                        heard.append(receive(connection, channel.NONCE_BYTES + channel.PROOF_BYTES))
                        with contextlib.suppress(OSError):
                            connection.sendall(wrong)

            other = threading.Thread(target=answer)
            other.start()
            with pytest.raises(ConnectionError, match="another program answered"):
                channel.connect([listener.getsockname()], SECRET)
            other.join()
            for said in heard:
                assert said[channel.NONCE_BYTES :] == channel.proof(
                    SECRET, "rank", address(listener), wrong[: channel.NONCE_BYTES], said[: channel.NONCE_BYTES]
                )


FEW_FILES = """
import resource, selectors, socket, sys
from mpikv.commands.launch import channel
from mpikv.commands.launch.connections import Connections
n, hard = int(sys.argv[1]), int(sys.argv[2]) or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
selector = selectors.DefaultSelector()
connections = Connections(["127.0.0.1"], "secret", dict.fromkeys(range(n)), selector)
((host, port),) = connections.addresses
def see() -> None:
    for key, _ in selector.select(5):
        assert not list(connections.event(key.fileobj))
for i in range(2 * n):
    if i % 2:  # every second one proves itself, and is gone; the launcher's end of its connection stays
        rank = channel.Dialled(host, port, "secret")
        see(), rank.read(), see(), rank.read()
        connections.pause(True)
        rank.socket.close()
    else:
        stranger = socket.create_connection((host, port))
        see()
        stranger.close()
print(len(connections._peers))
"""


@pytest.mark.parametrize(
    ("ranks", "hard", "said"),
    [(300, 0, "300\n"), (30, 100, "30\n"), (60, 100, "60 ranks needs 124 open files, and may have 100 here: raise ")],
)
@pytest.mark.usefixtures("forks")
def test_many_ranks_and_few_open_files(ranks: int, hard: int, said: str) -> None:
    """The soft limit is raised; strangers are turned away before there is no file left for a rank."""
    done = fresh.python(FEW_FILES, str(ranks), str(hard))
    assert said in done.stdout + done.stderr


def test_a_launcher_that_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        free = silent.getsockname()[1]
    sent = plan_of("0" * 16, [["127.0.0.1", free]])
    done = subprocess.run(
        quick.command("rank", "worker", "0", "0", "--", "true"),
        env={LAUNCH: json.dumps(sent), "PMI_RANK": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 125
    assert f"127.0.0.1:{free}: ConnectionRefusedError" in done.stderr


class Above(contextlib.AbstractContextManager["Above"]):
    def __init__(self, command: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        plan = plan_of(os.urandom(8).hex(), [self._listener.getsockname()])
        words = quick.command("rank", "server", "2", "5", "--", "sh", "-c", command)
        self.process = subprocess.Popen(words, env={LAUNCH: json.dumps(plan), "PMI_RANK": "6"})
        self._connection, _ = self._listener.accept()
        place, challenge = address(self._listener), os.urandom(channel.NONCE_BYTES)
        self._connection.sendall(challenge)
        nonce, given = (receive(self._connection, n) for n in (channel.NONCE_BYTES, channel.PROOF_BYTES))
        assert given == channel.proof(SECRET, "rank", place, challenge, nonce)
        self._connection.sendall(channel.proof(SECRET, "launcher", place, challenge, nonce))
        self._frames = channel.Frames()
        self.out = ""

    def read(self, until: Callable[[int], bool] = lambda _: False) -> str:
        """What the command has printed, once such a frame came, or the end."""
        while data := self._connection.recv(4096):
            for kind, body in list(self._frames.add(data)):
                self.out += body.decode() if kind == channel.OUT else ""
                if until(kind):
                    return self.out
        self.process.wait()
        return self.out

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._listener.close()
        self.process.wait()


@pytest.mark.parametrize("status", [3, 128, 129, 143, 193])
def test_the_status_that_mpirun_sees(status: int) -> None:
    """128 + N is a shell's word for signal N, if there is such a signal."""
    with Above(f"echo a; exit {status}") as above:
        assert above.read(lambda kind: kind == channel.ENDED) == "a\n"
    assert above.process.returncode == (128 - status if status in (129, 137, 143) else status)


def test_a_daemon_of_a_rank_is_ended_with_it() -> None:
    """By the process above the rank, with and without its environment: the launcher looks at no other host."""
    daemon = "setsid sleep 300 >/dev/null 2>&1 & echo $!"
    with Above(f"{daemon}; env -i {daemon}") as above:
        pids = above.read().split()
    assert above.process.returncode == 0
    assert [is_alive(int(pid)) for pid in pids] == [False, False]


def test_each_of_several_signals_reaches_the_command() -> None:
    waiting = "i=0; while [ $((i += 1)) -lt 600 ]; do sleep 0.1; done"
    with Above(f"trap 'echo one' USR1; trap 'echo two; exit 7' TERM; echo ready; {waiting}") as above:
        above.read(lambda kind: kind == channel.OUT)
        for signum in (signal.SIGUSR1, signal.SIGTERM):
            above.process.send_signal(signum)
        assert above.read(lambda kind: kind == channel.ENDED) == "ready\none\ntwo\n"
    assert above.process.returncode == 7


def test_output_files_and_colours(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = Output(tmp_path / "new" / "logs", colours=(True, False))
    output.lines(1, "worker", 1, "h", b"a\nb\n")
    output.lines(1, "worker", 1, "h", b"5%\r")
    output.lines(1, "worker", 1, "h", b"\r5%\r\r9%\n")
    output.lines(
        2, "server", 0, "h", b"[rank 0 of 2 on h] c\nmpikv: error: [rank 0 of 2 on h] x [rank 0 of 2 on h] y\n"
    )
    output.of_mpirun(b"d\n")
    output.say("e")
    output.close()
    out, err = capfd.readouterr()
    texts = "a\n", "b\n", "5%\r", "5%\r", "9%\n"
    assert out == "".join(f"\033[K\033[33m[worker 1 @ h]\033[0m {text}" for text in texts)
    assert err == "[server 0 @ h] c\n[server 0 @ h] mpikv: error: x [rank 0 of 2 on h] y\n[mpirun] d\nmpikv launch: e\n"
    files = {path.name: path.read_bytes().decode() for path in (tmp_path / "new" / "logs").iterdir()}
    assert files == {
        "worker-1.log": "a\nb\n\r5%\r\r9%\n",
        "server-0.log": "c\nmpikv: error: x [rank 0 of 2 on h] y\n",
        "launch.log": "d\nmpikv launch: e\n",
    }


@pytest.mark.parametrize("full", ["worker-0.log", "launch.log"])
def test_a_full_disk_below_the_files_is_one_warning(
    full: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mpikv.commands.launch.output.open_log",
        lambda path: io.FileIO("/dev/full", "w") if path.name == full else open_log(path),
    )
    output = Output(tmp_path, colours=(False, False))
    for _ in range(2):
        output.say("a line")
        output.lines(1, "worker", 0, "h", b"abcdef\n")
    output.close()
    out, err = capfd.readouterr()
    assert out == "[worker 0 @ h] abcdef\n" * 2
    said = err.splitlines()
    assert said.count("mpikv launch: a line") == 2
    warning = f"{tmp_path / full}: No space left on device; nothing more is written to --output-dir"
    assert [line for line in said if "a line" not in line] == [f"mpikv launch: warning: {warning}"]


def test_a_full_disk_below_stdout_is_one_warning() -> None:
    program = (
        "from mpikv.commands.launch.output import Output\n"
        "output = Output()\n"
        "for _ in range(2): output.lines(1, 'worker', 0, 'h', b'a')\n"
        "output.say('the end')\n"
        "output.close()\n"
        "assert not output.broken\n"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=-1, text=True, check=True)
    warning = "mpikv launch: warning: stdout: No space left on device; lines are lost"
    assert sorted(done.stderr.splitlines()) == ["mpikv launch: the end", warning]
