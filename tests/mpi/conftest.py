"""The ranks of `mpirun -n N python -m pytest --with-mpi tests/mpi` run one pytest session together.

After each part of a test (set-up, call, tear-down) all ranks tell each other how it went, on a communicator of their
own: what has failed on one has failed on all. Rank 0 alone prints; its report has each rank's text. Where a rank has
failed and the others do not come within GRACE_S, or a test lasts longer than pytest-timeout allows, the stacks of all
ranks are printed, by faulthandler, which works inside a blocked call of MPI, and the job is aborted.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report

GRACE_S = 5.0
STACKS_S = 1.0  # for the ranks to write them
ABORTED = 86


class Together:
    """The pytest plugin of one rank."""

    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        self._world, self._private, self.comm = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
        self._rank = self.comm.rank
        self._stderr = os.dup(2)  # past pytest's capture
        self._folder = Path(self._private.bcast(tempfile.mkdtemp(prefix="mpikv-") if self._rank == 0 else None))
        self._pids = self._private.allgather(os.getpid())
        self._stacks = (self._folder / f"stacks.{self._rank}").open("wb")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, chain=False)
        config.option.basetemp = str(self._folder / f"tmp.{self._rank}")
        if self._rank:
            config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process

    def _tell(self, where: str, mine: Any, failure: str = "") -> list[Any]:
        """What every rank says. failure: of this one's test. Waits without spinning: ranks may outnumber the cores."""
        request, deadline = self._private.Ibarrier(), time.monotonic() + GRACE_S
        while not request.Test():
            if failure and time.monotonic() > deadline:
                self._give_up(where, f"rank {self._rank} failed, and the others did not come:\n{failure}")
            time.sleep(0.0005)
        return self._private.allgather(mine)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        told = self._tell("collection", [item.nodeid for item in session.items])
        if any(names != told[0] for names in told):
            report.write("collection", "failed")
            pytest.exit("the ranks did not collect the same tests", returncode=pytest.ExitCode.INTERNAL_ERROR)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        mine = yield
        text = "\n".join([mine.longreprtext, *(f"{title}:\n{content}" for title, content in mine.sections)])
        text = text if mine.failed else ""
        told = self._tell(item.nodeid, (mine.outcome, text), text)
        outcomes = {outcome for outcome, _ in told}
        if "failed" in outcomes or (mine.when == "setup" and len(outcomes) > 1):
            said = [f"--- rank {rank} of {len(told)}: {outcome}\n{text}" for rank, (outcome, text) in enumerate(told)]
            mine.outcome, mine.longrepr, mine.sections = "failed", "\n".join(said), []
            vars(mine).pop("wasxfail", None)
            self.comm = self._world.Dup()  # messages of the failed test may still be under way
        elif "passed" in outcomes and mine.skipped:
            mine.outcome, mine.longrepr = "passed", None  # executed elsewhere
            vars(mine).pop("wasxfail", None)
        return mine

    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        self._timer = threading.Timer(settings.timeout, self._give_up, [item.nodeid, "it takes too long"])
        self._timer.daemon = True
        self._timer.start()
        return True

    def pytest_timeout_cancel_timer(self) -> bool:
        self._timer.cancel()
        return True

    def _give_up(self, where: str, why: str) -> None:
        """Print why and all ranks' stacks, then abort the job. The first rank that comes here does it for all."""
        try:
            (self._folder / "given-up").touch(exist_ok=False)
        except FileExistsError:
            time.sleep(10 * STACKS_S)
        else:
            report.write(where, "failed")
            for pid in self._pids:
                os.kill(pid, signal.SIGUSR1)
            time.sleep(STACKS_S)
            lines = [f"\n{where}: {why}"]
            for rank in range(len(self._pids)):
                stacks = (self._folder / f"stacks.{rank}").read_text().splitlines()
                lines += [f"--- stacks of rank {rank} of {len(self._pids)}", *filter(is_of_test, stacks)]
            os.write(self._stderr, "\n".join([*lines, ""]).encode(errors="replace"))
            time.sleep(STACKS_S)  # mpirun forwards it through pipes; it must have it before it kills
        threading.Timer(5, os._exit, [ABORTED]).start()  # where Abort is stuck behind the blocked call
        self._world.Abort(ABORTED)

    def pytest_unconfigure(self) -> None:
        faulthandler.unregister(signal.SIGUSR1)
        self._tell("the end", None)
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)


def is_of_test(line: str) -> bool:
    """Whether a line of stacks tells of a test, and not of pytest."""
    return not re.search(r"/(_pytest|pluggy|pytest)/|<frozen runpy>", line)


@pytest.hookimpl(trylast=True)  # after the terminal's reporter
def pytest_configure(config: pytest.Config) -> None:
    """Join the ranks' sessions."""
    if config.getoption("--with-mpi", default=False):
        config.pluginmanager.register(Together(config), "mpikv-together")


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Any:
    """A duplicate of COMM_WORLD, the same in all tests of the session until one fails."""
    return request.config.pluginmanager.get_plugin("mpikv-together").comm


@pytest.hookimpl(tryfirst=True)  # before pytest-mpi, which skips what is marked where there is no mpirun
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, so that none runs without mpirun."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("mpi") is None:
            item.add_marker(pytest.mark.mpi)
