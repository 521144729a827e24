"""The ranks of an MPI job run one pytest session together.

    mpirun -n 3 python -m pytest --with-mpi tests/mpi

- All ranks collect the same tests, or the run ends at once.
- After each test all ranks meet in a nonblocking barrier on a communicator of their own and tell each other how it
  went. Failed on one rank is failed on all. Rank 0 alone prints: its report of a failed test has each rank's text,
  under the numbers of the ranks that brought it.
- A test has failed on a rank that now waits for the others, and they do not come within GRACE_S; or a test lasts longer
  than LIMIT_S (`@pytest.mark.timeout(s)` sets another limit): every rank's stacks are printed with its rank, by
  faulthandler on SIGUSR1, which works inside a blocked call of MPI too, and the job is aborted.
- A run in which every test was skipped ends with pytest's status for "no tests".

Python's own signal handlers cannot do this: they run when the blocked call returns, so never. Neither can
pytest-timeout, which is switched off here: it prints one rank's stack, and a failure before the deadlock is lost.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import report
from _pytest.runner import runtestprotocol  # the way of pytest-rerunfailures: reports first, their logging later

LIMIT_S = float(os.environ.get("MPIKV_TEST_LIMIT_S", "60"))
GRACE_S = float(os.environ.get("MPIKV_TEST_GRACE_S", "5"))
ANSWER_S = 10.0  # a rank that is asked for its stacks may get no core before
SPEAK_S = 60.0  # the rank that prints all stacks has this long before the silent ones end by themselves
ABORT_STATUS = 86
PLUGIN = "mpikv-lockstep"


class Outcome(NamedTuple):
    """How one test went on one rank. text: what failed, with traceback and captured output."""

    outcome: str
    text: str


class Lockstep:
    """The pytest plugin of one rank."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._private = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._private.Get_rank(), self._private.Get_size()
        self.comm = MPI.COMM_WORLD.Dup()
        # Past pytest's capture, which replaces descriptor 2 during a test.
        self._stderr = os.dup(2)
        self.folder = Path(self._private.bcast(tempfile.mkdtemp(prefix="mpikv-") if self.rank == 0 else None))
        self._peers = self._private.allgather((socket.gethostname(), os.getpid()))
        self._stacks = open(self._path("stacks", self.rank), "wb")  # noqa: SIM115 - open as long as the process
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True, chain=False)
        self._n_executed = 0
        self._collect_errors: list[str] = []
        self._meet(time.monotonic() + LIMIT_S, "start")

    def _path(self, kind: str, rank: int) -> Path:
        return self.folder / f"{kind}.{rank}"

    # Collection

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collect_errors.append(f"{report.nodeid}\n{report.longreprtext}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._meet(time.monotonic() + LIMIT_S, "collection")
        told = self._private.allgather(([item.nodeid for item in session.items], self._collect_errors))
        if any(errors for _, errors in told) or any(names != told[0][0] for names, _ in told):
            said = [
                Outcome("failed", "\n".join(errors) or f"collected {len(names)} tests: {', '.join(names[:9])} ...")
                for names, errors in told
            ]
            report.write("collection", "failed")
            self._exit(f"the ranks did not collect the same tests\n{by_rank(said)}")

    def _exit(self, text: str) -> NoReturn:
        if self.rank == 0:
            self._print(text)
        self._meet(time.monotonic() + LIMIT_S, "exit")
        pytest.exit(text.splitlines()[0], returncode=pytest.ExitCode.INTERNAL_ERROR)

    # Tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0]) if marker and marker.args else LIMIT_S
        deadline = time.monotonic() + limit_s
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        with self._watchdog(item.nodeid, limit_s):
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            mine = summarise(reports)
            if mine.outcome == "failed":
                self._path("failure", self.rank).write_text(mine.text)
                deadline = min(deadline, time.monotonic() + GRACE_S)
            self._meet(deadline, item.nodeid)
            told = self._private.allgather(mine)
        merge(reports, told)
        self._n_executed += any(one.outcome != "skipped" for one in told)
        for one in reports:
            item.ihook.pytest_runtest_logreport(report=one)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if any(one.outcome == "failed" for one in told):
            # Messages of the failed test may still be under way: the next one gets a communicator that has none.
            self._path("failure", self.rank).unlink(missing_ok=True)
            self.comm = self._mpi.COMM_WORLD.Dup()
        return True

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self._n_executed == 0:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
            if self.rank == 0:
                self._print(f"no test was executed on {self.size} ranks")

    def pytest_unconfigure(self) -> None:
        faulthandler.unregister(signal.SIGUSR1)
        self._meet(time.monotonic() + LIMIT_S, "the end")
        self._stacks.close()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    # Waiting

    def _meet(self, deadline: float, where: str) -> None:
        """Wait for all ranks, without spinning: they may outnumber the cores."""
        request, nap_s = self._private.Ibarrier(), 20e-6
        while not request.Test():
            if time.monotonic() > deadline:
                self._give_up(where, f"rank {self.rank} waited at the end of the test, and the others did not come")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, 1e-3)

    @contextlib.contextmanager
    def _watchdog(self, where: str, limit_s: float) -> Iterator[None]:
        timer = threading.Timer(limit_s, self._give_up, [where, f"it lasted longer than {limit_s:g} s"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, where: str, why: str) -> NoReturn:
        """Print all ranks' failures and stacks, then abort the job. The first rank that comes here does it for all."""
        try:
            (self.folder / "given-up").touch(exist_ok=False)
        except FileExistsError:
            time.sleep(SPEAK_S)
        else:
            self._print(f"\n{where}: {why}; it failed on all {self.size} ranks, and the job ends here")
            for rank in range(self.size):
                failure = self._path("failure", rank)
                if failure.exists():
                    self._print(f"--- failure on rank {rank} of {self.size}\n{failure.read_text()}")
            for rank, (host, pid) in enumerate(self._peers):
                self._print(f"--- stacks of rank {rank} of {self.size} on {host}, process {pid}\n{self._stack(rank)}")
            report.write(where, "failed")
        self._end()

    def _stack(self, rank: int) -> str:
        host, pid = self._peers[rank]
        if host != socket.gethostname():
            return "(on another host)"
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "(gone)"
        # The handler writes at once, but from another process: read when the file has stopped growing.
        path, size, deadline = self._path("stacks", rank), -1, time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and not (0 < size == path.stat().st_size):
            size = path.stat().st_size
            time.sleep(0.1)
        stacks = path.read_text(errors="replace")
        return relevant(stacks) or ("(waits for the other ranks at the end of the test)" if stacks else "(no answer)")

    def _end(self) -> NoReturn:
        shutil.rmtree(self.folder, ignore_errors=True)
        time.sleep(0.3)  # mpirun forwards what was printed through pipes; it must have it before it kills
        # If Abort itself is stuck behind the blocked call, the job ends because a rank does.
        last = threading.Timer(5, os._exit, [ABORT_STATUS])
        last.daemon = True
        last.start()
        self._mpi.COMM_WORLD.Abort(ABORT_STATUS)
        os._exit(ABORT_STATUS)

    def _print(self, text: str) -> None:
        os.write(self._stderr, (text.rstrip("\n") + "\n").encode(errors="replace"))


def relevant(stacks: str) -> str:
    """The stacks without the frames of pytest and of this file, and without the threads that have no others."""
    kept: list[str] = []
    for thread in stacks.strip().split("\n\n"):
        title, *frames = thread.splitlines()
        frames = [one for one in frames if not re.search(r"/(_pytest|pluggy|pytest|lockstep)[/.]|<frozen runpy>", one)]
        if any("/threading.py" not in one for one in frames):
            kept += [title, *frames]
    return "\n".join(kept)


def summarise(reports: list[pytest.TestReport]) -> Outcome:
    """One outcome of the reports of set-up, call and tear-down."""
    failed = [one for one in reports if one.failed]
    if failed:
        text = []
        for one in failed:
            text.append(("" if one.when == "call" else f"in {one.when}:\n") + one.longreprtext)
            text += [f"{title}:\n{content}" for title, content in one.sections]
        return Outcome("failed", "\n".join(text))
    if any(one.skipped and not hasattr(one, "wasxfail") for one in reports):
        return Outcome("skipped", "")
    return Outcome("passed", "")


def by_rank(told: list[Outcome]) -> str:
    """The failures, each text once, under the ranks that brought it."""
    texts: dict[str, list[str]] = {}
    for rank, one in enumerate(told):
        if one.outcome == "failed":
            texts.setdefault(one.text, []).append(str(rank))
    return "\n".join(
        f"failed on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} of {len(told)}:\n{text}"
        for text, ranks in texts.items()
    )


def merge(reports: list[pytest.TestReport], told: list[Outcome]) -> None:
    """Change this rank's reports to what all ranks together say: failed if any failed, skipped if all were."""
    outcomes = {one.outcome for one in told}
    main = next((one for one in reports if one.when == "call"), reports[0])
    if "failed" in outcomes:
        if hasattr(main, "wasxfail"):
            del main.wasxfail
        for one in reports:  # one failure for the test, however many of its parts failed on however many ranks
            one.outcome, one.longrepr, one.sections = "passed", None, []
        main.outcome, main.longrepr = "failed", by_rank(told)
    elif outcomes == {"passed", "skipped"} and main.skipped and not hasattr(main, "wasxfail"):
        # Skipped here, executed elsewhere. pytest counts a passed test at its call.
        main.when, main.outcome, main.longrepr = "call", "passed", None


def pytest_configure(config: pytest.Config) -> None:
    """Under --with-mpi: join the ranks' sessions, and leave the printing and the files to rank 0."""
    if not config.getoption("--with-mpi", default=False) or config.pluginmanager.has_plugin(PLUGIN):
        return
    config.addinivalue_line("markers", "timeout(seconds): the limit of this test")
    plugin = Lockstep()
    config.option.basetemp = str(plugin.folder / f"tmp.{plugin.rank}")
    config.pluginmanager.register(plugin, PLUGIN)
    config.pluginmanager.register(Silence(plugin.rank), f"{PLUGIN}-silence")


class Silence:
    """Takes out what would print or write files on every rank, and pytest-timeout."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Iterator[None]:
        verbosity = session.config.option.verbose
        if self._rank:
            session.config.option.verbose = -1  # no title: the reporter, still there in this hook, prints it
        yield
        session.config.option.verbose = verbosity
        manager = session.config.pluginmanager
        others = ["terminalreporter", "lfplugin", "nfplugin", "stepwiseplugin", "mpikv-report"] if self._rank else []
        for name in ["timeout", *others]:
            if manager.has_plugin(name):
                manager.unregister(name=name)
        for plugin in manager.get_plugins():
            if type(plugin).__name__ == "MPIPlugin":  # pytest-mpi's thirty lines about the library, at every run
                plugin._is_testing_mpi = False


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Any:
    """A duplicate of COMM_WORLD, the same in all tests of the session until one fails."""
    plugin = request.config.pluginmanager.get_plugin(PLUGIN)
    if plugin is None:
        pytest.skip("needs mpirun and --with-mpi")
    return plugin.comm
