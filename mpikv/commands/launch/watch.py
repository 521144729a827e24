"""The job while it runs: one `mpirun`, one connection to the process above each rank, and time limits for everything.

The end of one rank with a status other than 0 is the job's end: the others have `LAST_WORDS_S` to say what they miss,
then SIGTERM, then SIGKILL. Ctrl-C and SIGTERM become SIGTERM for all ranks, as `mpirun` does it. Every path through
here ends within 10 s of the event that begins the end; `--grace` lengthens the way from SIGTERM to SIGKILL. That is
longer, too, where workers that are asked to end finish their step and save their state first: their settings tell so
(MPIKV_STOP_SIGNALS), or the line in which worker 0 announces it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from mpikv.commands.launch import channel
from mpikv.commands.launch.entrance import GREETING_S, Entrance
from mpikv.commands.launch.output import ERR, OUT, Output
from mpikv.commands.launch.placement import Block
from mpikv.commands.launch.processes import die_with_parent, is_alive
from mpikv.commands.launch.ranks import FAILED, IDLE_SERVERS, Rank, Verdict, expected, first_failure, judge, names
from mpikv.runtime.abort import MISTAKE

LAST_WORDS_S = 1.0
KILL_MPIRUN_S = 1.5  # from SIGKILL of the ranks to SIGTERM of mpirun, and from that to its SIGKILL
IDLE_SERVERS_S = 3.0  # servers end with the last worker's store, so within this time of its process
LINGERING_S = 5.0  # for an mpirun whose ranks have all reported their end
TICK_S = 0.25
READ_BYTES = 1 << 16
# How MPICH and Intel MPI say it in the rank's own output, and how ours does under any MPI (runtime/abort.py)
ABORTED = re.compile(
    rb"^(?:.*application called MPI_Abort\(\w+, (-?\d+)\)|\[rank \d+ of \d+ on \S+\] ends the job with status (\d+)$"
    rb"|mpikv: error: \[rank \d+ of \d+ on \S+\] )",
    re.MULTILINE,
)
STOPPING = re.compile(rb"^mpikv: .*: all workers stop after their step$", re.MULTILINE)  # session/service.py
HARMLESS = b"plm:ssh: Warning: setpgid("  # Open MPI 5, when its child was quicker (PRRTE, plm_ssh_module.c)
# The link is dead, or what came is nonsense
WRONG = (OSError, ValueError, KeyError, TypeError, RecursionError)
TIMED_OUT = 124  # as timeout(1)
BROKEN_PIPE = 128 + signal.SIGPIPE
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Limits(NamedTuple):
    """Time limits, in seconds. job: None for none. start: for all ranks to report. grace: from SIGTERM to SIGKILL.

    save: instead of `grace` where the end is asked for and workers save their state then. saves: whether they are known
    to do so. greeting: for who has connected to prove that it belongs to the job.
    """

    job: float | None
    start: float
    grace: float
    save: float
    saves: bool = False
    greeting: float = GREETING_S


@dataclass
class Peer:
    """A connection that has proved that it belongs to the job. rank: None before it has said which it is."""

    socket: socket.socket
    rank: Rank | None = None
    frames: channel.Frames = field(default_factory=channel.Frames)


class Watch:
    """One job. `run` once."""

    def __init__(
        self,
        blocks: Sequence[Block],
        secret: str,
        output: Output,
        limits: Limits,
        addresses: Sequence[str] = ("127.0.0.1",),
    ) -> None:
        """addresses: of this host, where ranks are to reach it. Raises ConfigError where it has none of them."""
        self.ranks = expected(blocks)
        self._output = output
        self._limits = limits
        self._peers: dict[socket.socket, Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._entrance = Entrance(addresses, secret, len(self.ranks), self._selector)
        self.addresses = self._entrance.addresses
        self._plan: list[tuple[float, Callable[[], None]]] = []  # what comes next in the end, with its time
        self._asked: Verdict | None = None
        self._ending = False
        self._saving: bool | None = None  # whether they have `Limits.save` instead of `grace`; None: not so far
        self._killed_mpirun = False
        self._reports = 0
        self._held: list[tuple[int, bytes]] = []  # mpirun's own lines after the first failure
        self._mpirun: subprocess.Popen[bytes]
        self._paused = False
        self._dismissed = False
        self._workers_ended: float | None = None  # when all of them had, with status 0

    def run(self, words: Sequence[str], env: dict[str, str]) -> Verdict:
        """Start `mpirun` and stay until it and all ranks have ended, whatever happens."""
        with self._signals():
            self._mpirun = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, start_new_session=True,
                preexec_fn=die_with_parent(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - it takes no lock
            )  # fmt: skip
            self._streams: dict[IO[bytes], tuple[int, bytearray]] = {}
            for stream, number in ((self._mpirun.stdout, OUT), (self._mpirun.stderr, ERR)):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                self._streams[stream] = (number, bytearray())
                self._selector.register(stream, selectors.EVENT_READ)
            self._started = time.monotonic()
            while self._mpirun.poll() is None or any(peer.rank for peer in self._peers.values()):
                self._step()
            self._read_rest()
        verdict = judge(
            list(self.ranks.values()), None if self._killed_mpirun else self._mpirun.returncode, asked=self._asked
        )
        ranks = list(self.ranks.values())
        if verdict.status and self._asked is None and first_failure(ranks) is None and not any(r.lost for r in ranks):
            for number, lines in self._held:  # else it says at length what the launcher says in a line
                self._output.plain(number, "mpirun", lines)
        return verdict

    # --- events

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals wake the loop, and are seen to in it."""
        read_end, write_end = socket.socketpair()
        for end in (read_end, write_end):
            end.setblocking(False)
        before = {signum: signal.signal(signum, lambda *_: None) for signum in (*CAUGHT, signal.SIGCHLD)}
        old = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        self._wakeup = read_end
        self._selector.register(read_end, selectors.EVENT_READ)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            for end in (read_end, write_end, *self._entrance, *self._peers):
                end.close()
            self._selector.close()

    def _step(self) -> None:
        self._pause(self._output.full)
        for key, _ in self._selector.select(TICK_S):
            if key.fileobj is self._wakeup:
                for signum in self._wakeup.recv(4096):
                    self._signalled(signum)
            elif key.fileobj in self._entrance:
                assert isinstance(key.fileobj, socket.socket)
                self._let_in(self._entrance.event(key.fileobj))
            elif key.fileobj in self._peers:
                self._hear(self._peers[key.fileobj])
            elif key.fileobj in self._streams:
                self._read_mpirun(key.fileobj)
        self._look()
        now = time.monotonic()
        while self._plan and self._plan[0][0] <= now:
            self._plan.pop(0)[1]()

    def _pause(self, full: bool) -> None:
        """Do not read what cannot be written."""
        if full != self._paused:
            self._paused = full
            for connection in self._peers:
                if full:
                    self._selector.unregister(connection)
                else:
                    self._selector.register(connection, selectors.EVENT_READ)

    def _let_in(self, connection: socket.socket | None) -> None:
        if connection is not None:
            self._peers[connection] = Peer(connection)
            if not self._paused:
                self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(READ_BYTES)
            for kind, body in peer.frames.add(data):
                self._frame(peer, kind, body)
        except BlockingIOError:
            return
        except WRONG:
            data = b""
        if not data:
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        if not self._paused:
            self._selector.unregister(peer.socket)
        del self._peers[peer.socket]
        peer.socket.close()
        if peer.rank is not None and peer.rank.status is None:
            peer.rank.lost = True
            self._end_after_failure()

    def _frame(self, peer: Peer, kind: int, body: bytes) -> None:
        if peer.rank is None:
            if kind != channel.HELLO:
                raise ValueError("no greeting")
            self._welcome(peer, json.loads(body))
        elif kind in (channel.OUT, channel.ERR):
            rank = peer.rank
            said = None if rank.aborted else ABORTED.search(body)
            if said is not None:
                self._reports += 1
                rank.aborted, rank.abort_status = self._reports, int(said[1] or said[2] or MISTAKE)
            self._output.lines(OUT if kind == channel.OUT else ERR, rank.role, rank.number, rank.host, body)
            if self._ending and STOPPING.search(body):
                self._let_save()
        elif kind == channel.ENDED:
            self._ended(peer.rank, json.loads(body))
        elif kind == channel.GONE:
            peer.rank.gone = True

    def _welcome(self, peer: Peer, told: dict[str, object]) -> None:
        rank = self.ranks[int(str(told["rank"]))]
        if rank.host:
            raise ValueError("the rank has reported before")
        rank.host, rank.pid = str(told["host"]), int(str(told["pid"]))
        peer.rank = rank
        if self._ending:
            self._send(peer, channel.SIGNAL, signal=int(signal.SIGTERM))

    def _ended(self, rank: Rank, told: dict[str, object]) -> None:
        self._reports += 1
        rank.order = self._reports
        rank.status, rank.told = int(str(told["status"])), bool(told["told"])
        rank.error = str(told["error"])
        if rank.status != 0:
            self._end_after_failure()

    def _look(self) -> None:
        """What no event tells: time limits, and states that must not last."""
        now = time.monotonic()
        self._entrance.turn_away_slow(self._limits.greeting)
        ranks = self.ranks.values()
        if self._ending:
            if not self._dismissed and not any(rank.running for rank in ranks):
                self._dismissed = True
                self._to_all(channel.BYE)
            return
        if self._limits.job is not None and now - self._started > self._limits.job:
            limit = f"{self._limits.job:g} s"
            self._ask(f"the time limit of {limit} is over", Verdict(TIMED_OUT, f"timed out after {limit}"))
        elif self._output.broken:
            self._end(Verdict(BROKEN_PIPE, "nobody reads the output any more"), signal.SIGTERM)
        elif self._mpirun.poll() is not None:
            self._end(None, signal.SIGTERM, after_s=LAST_WORDS_S)
        elif any(not rank.host for rank in ranks):
            if now - self._started > self._limits.start:
                missing = ", ".join(rank.name for rank in ranks if not rank.host)
                text = f"{missing} did not start within {self._limits.start:g} s (--start-timeout)"
                self._end(Verdict(FAILED, text), signal.SIGTERM)
        elif not all(rank.status == 0 for rank in ranks if rank.role == "worker"):
            pass
        elif self._workers_ended is None:
            self._workers_ended = now
        elif all(rank.status == 0 for rank in ranks):
            if now - self._workers_ended > LINGERING_S:
                self._output.say("all ranks have ended, and mpirun has not: it is killed")
                self._end(None, None)
        elif now - self._workers_ended > IDLE_SERVERS_S:
            self._end(Verdict(0, IDLE_SERVERS), signal.SIGTERM)

    def _signalled(self, signum: int) -> None:
        if signum in PASSED_ON:
            self._to_all(channel.SIGNAL, signal=signum)
        elif signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            name = signal.Signals(signum).name
            if self._asked is not None and self._asked.status:
                self._output.say(f"{name} again: the ranks are killed")
                self._plan = []
                self._kill_steps(time.monotonic())
                return
            self._ask(name, Verdict(128 + signum, f"ended by {name}"))

    # --- the end

    def _ask(self, why: str, verdict: Verdict) -> None:
        """Begin an end that somebody asks for. Workers may take it as a request to save their state."""
        self._output.say(f"{why}: all ranks are told to end (SIGTERM again: they are killed)")
        self._end(verdict, signal.SIGTERM)
        if self._limits.saves:
            self._let_save()

    def _let_save(self) -> None:
        """Put SIGKILL off, once, where the end was asked for and nothing has failed."""
        if self._asked is None or not self._asked.status or self._saving is not None:
            return
        self._saving = True
        limit_s = self._limits.save
        self._output.say(f"workers that save their state after this step have {limit_s:g} s for it (--grace)")
        self._kill_after(limit_s)

    def _end_after_failure(self) -> None:
        if not self._ending:
            self._end(None, signal.SIGTERM, after_s=LAST_WORDS_S)
        elif self._saving:  # which they do together: nobody can finish it any more
            self._saving = False
            self._kill_after(self._limits.grace)

    def _end(self, asked: Verdict | None, signum: int | None, after_s: float = 0.0) -> None:
        """Begin the end: `signum` to all ranks after `after_s`, then harder. asked: why, if not for a failure."""
        if asked is not None and first_failure(list(self.ranks.values())) is None:
            self._asked = asked
        self._ending = True
        self._plan = []
        if after_s:
            self._plan.append((time.monotonic() + after_s, lambda: self._to_all(channel.SIGNAL, signal=signum)))
        elif signum is not None:
            self._to_all(channel.SIGNAL, signal=signum)
        self._kill_steps(time.monotonic() + after_s + (0.0 if signum is None else self._limits.grace))

    def _kill_after(self, limit_s: float) -> None:
        """SIGTERM was sent: what follows comes so long from now."""
        self._plan = []
        self._kill_steps(time.monotonic() + limit_s)

    def _kill_steps(self, at: float) -> None:
        self._plan += [
            (at, self._kill),
            (at + KILL_MPIRUN_S, lambda: self._kill_mpirun(signal.SIGTERM)),
            (at + 2 * KILL_MPIRUN_S, lambda: self._kill_mpirun(signal.SIGKILL)),
            (at + 2 * KILL_MPIRUN_S, self._forget),
        ]

    def _kill(self) -> None:
        workers = [rank for rank in self.ranks.values() if rank.role == "worker" and rank.running]
        if self._asked is not None and workers:
            self._output.say(
                f"{names(workers, len(self.ranks))} had not ended: killed, and a state that was not yet saved is lost "
                "(--grace SECONDS gives more time)"
            )
        self._to_all(channel.SIGNAL, signal=int(signal.SIGKILL))

    def _kill_mpirun(self, signum: int) -> None:
        """Only once its ranks had their chance: it ends all that it has started."""
        if self._mpirun.poll() is None:
            self._killed_mpirun = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._mpirun.pid, signum)

    def _forget(self) -> None:
        """Ranks that still answer nothing: their hosts are looked at afterwards."""
        for peer in list(self._peers.values()):
            self._drop(peer)

    def _to_all(self, kind: int, **fields: object) -> None:
        for peer in self._peers.values():
            if peer.rank is not None:
                self._send(peer, kind, **fields)

    def _send(self, peer: Peer, kind: int, **fields: object) -> None:
        with contextlib.suppress(OSError):  # a full pipe means that it does not listen; its end is noticed elsewhere
            peer.socket.send(channel.message(kind, **fields))

    # --- mpirun's own words

    def _read_mpirun(self, stream: IO[bytes]) -> None:
        number, waiting = self._streams[stream]
        try:
            data = os.read(stream.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        waiting += data
        end = waiting.rfind(b"\n") + 1
        if not data:
            waiting += b"" if waiting.endswith(b"\n") or not waiting else b"\n"
            end = len(waiting)
            self._selector.unregister(stream)
        if end:
            self._mpirun_said(number, bytes(waiting[:end]))
            del waiting[:end]
        if not data:
            del self._streams[stream]

    def _mpirun_said(self, number: int, lines: bytes) -> None:
        lines = b"".join(line for line in lines.splitlines(keepends=True) if HARMLESS not in line)
        if self._ending:
            self._held.append((number, lines))
        else:
            self._output.plain(number, "mpirun", lines)

    def _read_rest(self) -> None:
        """mpirun has ended; a daemon of it may hold its pipes for ever."""
        until = time.monotonic() + 1.0
        while self._streams and time.monotonic() < until:
            for key, _ in self._selector.select(0.1):
                if key.fileobj in self._streams:
                    self._read_mpirun(key.fileobj)
            if not is_alive(self._mpirun.pid) and not self._selector.select(0):
                break
