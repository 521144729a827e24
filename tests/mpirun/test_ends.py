"""How a program ends that does itself what a store or a process group would have done: MPI.Finalize, sys.excepthook."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from jobs import Job, Mpi, mpirun

BEGIN = """
import sys
import numpy as np
from mpi4py import MPI
from mpikv import kv
from mpikv.groups.world import opened
def store():
    made = kv.create("dist_sync")
    made.init("w", np.zeros(3))
    made.pushpull("w", np.ones(3))
    return made
def group():
    return opened().group((0, 1), 1, 20)
"""
FINALIZES = {
    "store": "one = store()",
    "stores": "one, two, three = store(), store(), store()\ntwo.close()",
    "closed store": "store().close()",
    "group": "one = group()",
    "dropped group": "opened().drop(group())",
    "both": "one, two = group(), store()",
    # What MPI.Finalize would have closed is held until it is closed, and no longer.
    "freed stores": """
import gc, weakref
stores = [store() for _ in range(3)]
for one in stores:
    one.close()
left = [weakref.ref(one) for one in stores]
del one, stores
gc.collect()
assert not any(ref() for ref in left)
""",
}


def job(mpi: Mpi, folder: Path, program: str) -> Job:
    path = folder / "program.py"
    path.write_text(program)
    return mpirun(2, ["python", str(path)], mpi=mpi, env={"MPIKV_TIMEOUT_S": "20"})


@pytest.mark.parametrize(("has", "status"), [*zip(FINALIZES, itertools.cycle([0, 3]), strict=False)])
def test_finalize(mpi: Mpi, tmp_path: Path, has: str, status: int) -> None:
    ended = job(
        mpi, tmp_path, f"{BEGIN}{FINALIZES[has]}\nMPI.Finalize()\nprint('done', flush=True)\nsys.exit({status})\n"
    )
    ended.check(status)
    assert ended.stdout.count("done") == 2, ended.output
    assert "FINALIZE" not in ended.output, ended.output


@pytest.mark.parametrize("has", ["store", "group"])
def test_hook_of_exceptions_that_is_replaced(mpi: Mpi, tmp_path: Path, has: str) -> None:
    """A library's hook, set later, prints the error and ends no job: the exit does, and names the hook."""
    wait = "one.pull('w')" if has == "store" else "opened().ask('get', ['never'])"
    ended = job(
        mpi,
        tmp_path,
        f"""{BEGIN}
one = {has}()
def pretty(kind, error, trace):
    print("pretty", error, flush=True)
sys.excepthook = pretty
if MPI.COMM_WORLD.rank == 1:
    raise RuntimeError("not my day")
one.push("w", np.ones(3)) if {has == "store"} else None
{wait}
""",
    )
    ended.check(1)
    assert "pretty not my day" in ended.stdout
    assert "RuntimeError: not my day; sys.excepthook was replaced by __main__.pretty" in ended.stderr, ended.output
    assert "StallError" not in ended.output, ended.output


WAITS = """
from mpikv.groups.collective import allreduce
from mpikv.arrays.reductions import OF_GROUPS
one = group()
if MPI.COMM_WORLD.rank == 1:
    {}
one.start(allreduce([np.ones(1)], OF_GROUPS["sum"])).wait()
"""


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ("sys.exit(3)", r"\[rank 1 of 2 on \S+\] sys.exit\(3\) while there was a process group"),
        # as if it were done, which is what a bare SystemExit looks like
        ("raise SystemExit(3)", r"PeerError: rank 0 of 2 on \S+ waits in .*, but rank 1 of 2 on \S+ has left the job"),
    ],
)
def test_a_rank_that_leaves_a_process_group(mpi: Mpi, tmp_path: Path, leaves: str, said: str) -> None:
    ended = job(mpi, tmp_path, BEGIN + WAITS.format(leaves))
    ended.check(None)
    assert re.search(said, ended.stderr), ended.output


INTERRUPTED = """
import os, pathlib, signal, sys, threading, time
from mpikv import kv

rank, main = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]), threading.get_ident()
begun = pathlib.Path(sys.argv[0] + ".begun")

def interrupt():
    frame = None
    while frame is None:  # until the main thread is in MPI_Init
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code.co_name != "initialise":
            frame = frame.f_back
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    begun.touch()

if rank == 1:
    threading.Thread(target=interrupt, daemon=True).start()
while rank == 0 and not begun.exists():
    time.sleep(0.01)
kv.create("dist_sync")
"""


def test_interrupted_while_mpi_starts(mpi: Mpi, tmp_path: Path) -> None:
    """The interrupt is raised when MPI_Init returns: the others, which go on, are not left to wait."""
    ended = job(mpi, tmp_path, INTERRUPTED)
    ended.check(130)
    assert "StallError" not in ended.output, ended.output
