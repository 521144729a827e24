"""The job while it runs: one `mpirun`, one connection to the process above each rank, and time limits for everything.

The end of one rank with a status other than 0 is the job's end: the others have `LAST_WORDS_S` to say what they miss,
then SIGTERM, then SIGKILL. Ctrl-C and SIGTERM become SIGTERM for all ranks, as `mpirun` does it. Every end is reached
within 10 s of the event that begins it; `--grace` lengthens the time from SIGTERM to SIGKILL. That is longer, too,
where workers that are asked to end finish their step and save their state first: their settings show it
(MPIKV_STOP_SIGNALS), or the line in which worker 0 announces it.

Where ranks may go on without those that die, such a rank is let go at once, and the end is that of the others. They say
once that they have a store, with which they can: before that they may wait for it in MPI_Init. A signal ends no program
by itself, so its victim is forgiven. A status may be a result: that of a rank which the store has lost, as its
survivors say, or which says at the end that something was wrong, and then it is the job's.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpikv.commands.launch import channel
from mpikv.commands.launch.connections import GREETING_S, LOST, Connections
from mpikv.commands.launch.output import ERR, OUT, Output
from mpikv.commands.launch.processes import die_with_parent, is_alive, woken_by
from mpikv.commands.launch.ranks import (
    FAILED,
    IDLE_SERVERS,
    JobEnd,
    LaunchedRank,
    RankBlock,
    ended_badly,
    expected,
    first_failure,
    judge,
    leaves_others,
    names,
)
from mpikv.runtime.abort import MISTAKE

LAST_WORDS_S = 1.0
KILL_MPIRUN_S = 1.5  # from SIGKILL of the ranks to SIGTERM of mpirun, and from that to its SIGKILL
IDLE_SERVERS_S = 3.0  # servers end with the last worker's store, so within this time of its process
LINGERING_S = 5.0  # for an mpirun whose ranks have all reported their end
NO_STORE_S = 5.0  # from a death to the line in which the others, if they have a store, say that they go on
START_S = 120.0  # for the ranks of all hosts to report
TICK_S = 0.25
READ_BYTES = 1 << 16
# How MPICH and Intel MPI report it in the rank's own output, and how ours does under any MPI (runtime/abort.py)
ABORTED = re.compile(
    rb"^(?:.*application called MPI_Abort\(\w+, (-?\d+)\)"
    rb"|\[rank \d+ of \d+ on \S+\] ends the job with status (\d+)(?: after step (\d+))?$"
    rb"|mpikv: error: \[rank \d+ of \d+ on \S+\] )",
    re.MULTILINE,
)
GO_ON = re.compile(rb"^mpikv: when one of \d+ ranks dies, the others go on$", re.MULTILINE)  # create/survivors.py
GONE = re.compile(rb"^mpikv: (\d+) ranks? (?:is|are) gone: \d+ go on$", re.MULTILINE)  # so does this
TRACEBACK = re.compile(rb"^Traceback \(most recent call last\):$", re.MULTILINE)
CALLED_ABORT = b"MPI_ABORT was invoked on rank"  # Open MPI's mpirun
STOPPING = re.compile(rb"^mpikv: .*: all workers stop after their step$", re.MULTILINE)  # session/stop.py
HARMLESS = b"plm:ssh: Warning: setpgid("  # Open MPI 5, when its child was quicker (PRRTE, plm_ssh_module.c)
TIMED_OUT = 124  # as timeout(1)
BROKEN_PIPE = 128 + signal.SIGPIPE
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Limits(NamedTuple):
    """Time limits, in seconds. job: None for none. grace: from SIGTERM to SIGKILL.

    save: instead of `grace` where the end is asked for and workers save their state then. saves: whether they are known
    to do so. start: for all ranks to report. greeting: for who has connected to prove that it belongs to the job.
    """

    job: float | None
    grace: float
    save: float
    saves: bool = False
    start: float = START_S
    greeting: float = GREETING_S


class JobWatch:
    """One job. `run` once."""

    def __init__(
        self,
        blocks: Sequence[RankBlock],
        secret: str,
        output: Output,
        limits: Limits,
        addresses: Sequence[str],
        *,
        continues: bool = False,
    ) -> None:
        """addresses: of this host, where ranks are to reach it. Raises ConfigError where it has none of them.

        continues: whether the others go on without a rank that dies.
        """
        self.ranks = expected(blocks)
        self._output = output
        self._limits = limits
        self._continues = continues
        self._have_store = False  # with which they can
        self._said_gone = 0  # ranks without which the others have said to go on
        self._selector = selectors.DefaultSelector()
        self._connections = Connections(addresses, secret, self.ranks, self._selector)
        self.addresses = self._connections.addresses
        self._plan: list[tuple[float, Callable[[], None]]] = []  # what comes next in the end, with its time
        self._asked: JobEnd | None = None
        self._ending = False
        self._saving: bool | None = None  # whether they have `Limits.save` instead of `grace`; None: not so far
        self._killed_mpirun = False
        self._unfinished, self._held = b"", b""  # mpirun's last line, and its lines after the first failure
        self._mpirun: subprocess.Popen[bytes]
        self._dismissed = False
        self._workers_ended: float | None = None  # when all of them had, with status 0

    def run(self, words: Sequence[str], env: dict[str, str]) -> JobEnd:
        """Start `mpirun` and stay until it and all ranks have ended, whatever happens."""
        with woken_by((*ENDING, *PASSED_ON, signal.SIGCHLD)) as self._wakeup, contextlib.closing(self):
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            self._mpirun = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=-1, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=die_with_parent(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - it takes no lock
            )  # fmt: skip
            assert self._mpirun.stdout is not None
            self._pipe: int | None = self._mpirun.stdout.fileno()
            os.set_blocking(self._pipe, False)
            self._selector.register(self._pipe, selectors.EVENT_READ)
            self._started = time.monotonic()
            while self._mpirun.poll() is None or self._connections.open:
                self._step()
            self._read_rest_of_mpirun()
        ranks = list(self.ranks.values())
        if self._said_gone < sum(rank.gone for rank in ranks):
            self._answer_for_statuses()  # which may be results of programs that nobody missed any more
        end = judge(ranks, None if self._killed_mpirun else self._mpirun.returncode, asked=self._asked)
        if end.status and self._asked is None and first_failure(ranks) is None and not any(one.lost for one in ranks):
            self._output.of_mpirun(self._held)  # else it says at length what the launcher says in a line
        return end

    @property
    def asked(self) -> bool:
        """Whether somebody asked for the end, by a signal or a limit, or nobody needed the job any more."""
        return self._asked is not None

    def close(self) -> None:
        self._connections.close()
        self._selector.close()

    # --- events

    def _step(self) -> None:
        self._connections.pause(self._output.full)  # do not read what cannot be written
        for key, _ in self._selector.select(TICK_S):
            if key.fileobj is self._wakeup:
                for signum in self._wakeup.recv(4096):
                    self._signalled(signum)
            elif key.fileobj == self._pipe:
                self._read_mpirun()
            elif key.fileobj in self._connections:
                assert isinstance(key.fileobj, socket.socket)
                for rank, kind, body in self._connections.event(key.fileobj):
                    self._frame(rank, kind, body)
        self._look()
        while self._plan and self._plan[0][0] <= time.monotonic():
            self._plan.pop(0)[1]()

    def _frame(self, rank: LaunchedRank, kind: int, body: bytes) -> None:
        if kind == channel.HELLO and self._ending:
            self._dismissed = False  # the others may have been by now
            self._connections.send(channel.SIGNAL, rank, signal=int(signal.SIGTERM))
        elif kind in (channel.OUT, channel.ERR):
            if not rank.aborted:
                self._look_for_abort(rank, body)
            self._output.lines(OUT if kind == channel.OUT else ERR, rank.role, rank.number, rank.host, body)
            rank.raised = rank.raised or TRACEBACK.search(body) is not None
            gone = sum(int(found[1]) for found in GONE.finditer(body))
            self._said_gone += gone
            if not self._ending and (gone or GO_ON.search(body)):
                self._have_store = True
                for one in [one for one in self.ranks.values() if one.early]:
                    self._go_on_without(one)
            if self._ending and STOPPING.search(body):
                self._let_save()
        elif kind == channel.ENDED and self._goes_on_without(rank):
            self._connections.send(channel.BYE, rank)  # mpirun tells the others, once the process above it has ended
            if self._have_store:
                self._go_on_without(rank)
            else:
                rank.early = True
                self._plan.append((time.monotonic() + NO_STORE_S, self._end_after_early_death))
        elif kind == LOST or (kind == channel.ENDED and rank.status != 0):
            self._end_after_failure()

    def _goes_on_without(self, rank: LaunchedRank) -> bool:
        return self._continues and not self._ending and leaves_others(rank, list(self.ranks.values()))

    def _end_after_early_death(self) -> None:
        if not self._have_store:
            self._end_after_failure()

    def _go_on_without(self, rank: LaunchedRank) -> None:
        rank.gone, rank.early = True, False
        left = sum(one.status is None for one in self.ranks.values())
        others = {0: "the others have ended", 1: "1 rank goes on"}.get(left, f"{left} ranks go on")
        self._output.say(f"{ended_badly(rank).text}; {others}")

    def _answer_for_statuses(self) -> None:
        """Count as gone only those that a signal has ended: a status of a rank's own is the job's."""
        for rank in self.ranks.values():
            rank.gone = rank.gone and (rank.status or 0) < 0

    def _look_for_abort(self, rank: LaunchedRank, body: bytes) -> None:
        """Note the last line that a rank printed, or the last one before it ends the job."""
        aborts = ABORTED.search(body)
        said = body
        if aborts is not None:
            rank.aborted = next(self._connections.reports)
            rank.abort_status = int(aborts[1] or aborts[2] or MISTAKE)
            rank.step = None if aborts[3] is None else int(aborts[3])
            said = body[: aborts.start()] if aborts[2] else body
        rank.said = said.rstrip().rpartition(b"\n")[2].decode(errors="replace") or rank.said

    def _look(self) -> None:
        """What no event tells: time limits, and states that must not last."""
        now = time.monotonic()
        self._connections.turn_away_slow(self._limits.greeting)
        ranks = self.ranks.values()
        if self._ending:
            if not self._dismissed and not any(rank.running for rank in ranks):
                self._dismissed = True
                self._connections.send(channel.BYE)
            return
        missing = ", ".join(rank.name for rank in ranks if not rank.host)
        if self._limits.job is not None and now - self._started > self._limits.job:
            limit = f"{self._limits.job:g} s"
            self._ask(f"the time limit of {limit} is over", JobEnd(TIMED_OUT, f"timed out after {limit}"))
        elif self._output.broken:
            self._end(JobEnd(BROKEN_PIPE, "nobody reads the output any more"))
        elif self._mpirun.poll() is not None:
            self._end(None, after_s=LAST_WORDS_S)
        elif missing:
            if now - self._started > self._limits.start:
                text = f"{missing} did not start within {self._limits.start:g} s"
                self._end(JobEnd(FAILED, text))
        elif all(rank.status == 0 or rank.gone for rank in ranks if rank.role == "worker"):
            self._workers_ended = self._workers_ended or now
            if all(rank.status == 0 or rank.gone for rank in ranks):
                if now - self._workers_ended > LINGERING_S:
                    self._output.say("all ranks have ended, and mpirun has not: it is killed")
                    self._ending = True
                    self._kill_after(0.0)
            elif now - self._workers_ended > IDLE_SERVERS_S:
                self._end(JobEnd(0, IDLE_SERVERS))

    def _signalled(self, signum: int) -> None:
        if signum in PASSED_ON:
            self._signal_all(signum)
        elif signum in ENDING:
            name = signal.Signals(signum).name
            if self._asked is not None and self._asked.status:
                self._output.say(f"{name} again: the ranks are killed")
                self._kill_after(0.0)
            else:
                self._ask(name, JobEnd(128 + signum, f"ended by {name}"))

    # --- the end

    def _ask(self, why: str, end: JobEnd) -> None:
        """Begin an end that somebody asks for. Workers may take it as a request to save their state."""
        self._output.say(f"{why}: all ranks are told to end (SIGTERM again: they are killed)")
        self._end(end)
        if self._limits.saves:
            self._let_save()

    def _let_save(self) -> None:
        """Put SIGKILL off, once, where the end was asked for and nothing has failed."""
        if self._asked is not None and self._asked.status and self._saving is None:
            self._saving = True
            limit_s = self._limits.save
            self._output.say(f"workers that save their state after this step have {limit_s:g} s for it (--grace)")
            self._kill_after(limit_s)

    def _end_after_failure(self) -> None:
        if not self._ending:
            self._end(None, after_s=LAST_WORDS_S)
        elif self._saving:  # which they do together: nobody can finish it any more
            self._saving = False
            self._kill_after(self._limits.grace)

    def _end(self, asked: JobEnd | None, *, after_s: float = 0.0) -> None:
        """Begin the end: SIGTERM to all ranks after `after_s`, then harder. asked: why, if not for a failure."""
        if asked is not None and first_failure(list(self.ranks.values())) is None:
            self._asked = asked
        self._ending = True
        self._kill_after(after_s + self._limits.grace)
        if after_s:
            self._plan.insert(0, (time.monotonic() + after_s, lambda: self._signal_all(signal.SIGTERM)))
        else:
            self._signal_all(signal.SIGTERM)

    def _kill_after(self, limit_s: float) -> None:
        """What comes so long from now, whatever was planned before."""
        at = time.monotonic() + limit_s
        self._plan = [
            (at, self._kill),
            (at + KILL_MPIRUN_S, lambda: self._kill_mpirun(signal.SIGTERM)),
            (at + 2 * KILL_MPIRUN_S, lambda: self._kill_mpirun(signal.SIGKILL)),
            # Ranks that still answer nothing: their hosts are looked at afterwards.
            (at + 2 * KILL_MPIRUN_S, self._connections.drop_all),
        ]

    def _kill(self) -> None:
        workers = [rank for rank in self.ranks.values() if rank.role == "worker" and rank.running]
        if self._asked is not None and workers:
            self._output.say(
                f"{names(workers, len(self.ranks))} had not ended: killed, and a state that was not yet saved is lost "
                "(--grace SECONDS gives more time)"
            )
        self._signal_all(signal.SIGKILL)

    def _kill_mpirun(self, signum: int) -> None:
        """Only once its ranks had their chance: it ends all that it has started."""
        if self._mpirun.poll() is None:
            self._killed_mpirun = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._mpirun.pid, signum)

    def _signal_all(self, signum: int) -> None:
        self._connections.send(channel.SIGNAL, signal=int(signum))

    # --- mpirun's own lines

    def _read_mpirun(self) -> None:
        assert self._pipe is not None
        try:
            data = os.read(self._pipe, READ_BYTES)
        except BlockingIOError:
            return
        text = self._unfinished + data
        if not data:
            self._selector.unregister(self._pipe)
            self._pipe = None
            text += b"\n" if text else b""
        end = text.rfind(b"\n") + 1
        self._unfinished = text[end:]
        lines = b"".join(line for line in text[:end].splitlines(keepends=True) if HARMLESS not in line)
        if self._ending:
            self._held += lines
        else:
            self._output.of_mpirun(lines)
        if self._continues and CALLED_ABORT in lines:  # under fault tolerance mpirun itself may let the others go on
            self._answer_for_statuses()
            self._end_after_failure()

    def _read_rest_of_mpirun(self) -> None:
        """It has ended; a daemon of it may hold its pipe for ever."""
        until = time.monotonic() + 1.0
        while self._pipe is not None and time.monotonic() < until:
            ready = [key for key, _ in self._selector.select(0.1) if key.fileobj == self._pipe]
            if ready:
                self._read_mpirun()
            elif not is_alive(self._mpirun.pid):
                break
