"""Processes that a rank forks, as data loaders do, end on their own: their errors are not the job's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import command, mpirun

PROGRAM = """
import multiprocessing, signal, sys, time
import numpy as np
from mpikv import kv

def leave():
    sys.exit(3)

def fail():
    raise RuntimeError("in a child")

store = kv.create("dist_sync")
store.init("w", np.zeros(3))
fork = multiprocessing.get_context("fork")
for body in (leave, fail):
    child = fork.Process(target=body)
    child.start()
    child.join()
    assert child.exitcode in (1, 3), child.exitcode
for _ in range(20):
    waiting = fork.Process(target=time.sleep, args=(60,))
    waiting.start()
    waiting.terminate()  # before it has begun, on its way into sleep, or asleep
    waiting.join()
    assert waiting.exitcode == -signal.SIGTERM, waiting.exitcode
store.pushpull("w", value := np.ones(3))
assert value.tolist() == [2, 2, 2]
store.close()
sys.stdout.write("finished\\n")
"""


def test_children_may_fail(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    job = mpirun(2, ["python", str(path)], timeout_s=60)
    assert job.status == 0, job.output
    assert job.stdout.count("finished") == 2
    assert "told to end" not in job.output
    assert job.ranks_left == []


FORKED = """
import multiprocessing, sys
import numpy as np
from mpikv import MpikvError, kv

kind, servers = sys.argv[1], int(sys.argv[2])
store = kv.create(kind, num_servers=servers)
store.init("w", np.zeros(3))
store.set_optimizer("test")
store.pushpull("w", np.ones(3))
request = store.push_async("w", np.ones(3))
local = kv.create("local")
local.init("w", np.zeros(3))

def child(queue):
    value = np.ones(3)
    calls = {
        "pushpull": lambda: store.pushpull("w", value),
        "push": lambda: store.push("w", value),
        "pull": lambda: store.pull("w"),
        "barrier": store.barrier,
        "stop_requested": lambda: store.stop_requested,
        "with": store.__enter__,
        "test": request.test,
        "kv.create": lambda: kv.create(kind),
    }
    for name, call in calls.items():
        try:
            call()
        except MpikvError as error:
            if name == "kv.create":
                assert "was started by a rank" in str(error), error
            else:
                assert name in str(error) and "forked from" in str(error), (name, error)
        else:
            raise AssertionError(name)
    store.close()
    local.pushpull("w", value)
    queue.put(value.tolist())

fork = multiprocessing.get_context("fork")
queue = fork.SimpleQueue()
process = fork.Process(target=child, args=(queue,))
process.start()
assert queue.get() == [1, 1, 1]
process.join()
assert process.exitcode == 0, process.exitcode
request.wait()
store.barrier()
store.pushpull("w", value := np.ones(3))
if kind == "dist_sync":
    assert value.tolist() == [3 * store.num_workers] * 3, value
store.close()
sys.stdout.write("finished\\n")
"""


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("servers", [0, 1])
def test_a_child_cannot_use_the_store(kind: str, servers: int, tmp_path: Path) -> None:
    """Its calls would go through the parent's connections and counters."""
    path = tmp_path / "program.py"
    path.write_text(FORKED)
    job = mpirun(2 + servers, ["python", str(path), kind, str(servers)], timeout_s=60)
    assert job.status == 0, job.output
    assert job.stdout.count("finished") == 2
    assert job.ranks_left == []


STARTED = """
import multiprocessing, os, subprocess, sys
import numpy as np
from mpikv import kv

store = kv.create("dist_sync")  # not below `if __name__ == "__main__"`: spawn and forkserver come here, too
how = sys.argv[1]

def nothing():
    pass

if multiprocessing.parent_process() is None and "child" not in sys.argv:
    if how == "subprocess":
        status = subprocess.run([sys.executable, __file__, how, "child"]).returncode
    elif how == "mpirun":
        line = [*os.environ["LINE"].split(), sys.executable, __file__, how, "child"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_C", "PM", "PRTE"))}
        status = subprocess.run(line, env=inherited).returncode if store.rank == 0 else 0
    else:
        child = multiprocessing.get_context(how).Process(target=nothing)
        child.start()
        child.join()
        status = child.exitcode
    store.init("w", np.zeros(3))
    store.pushpull("w", value := np.ones(3))
    assert value.tolist() == [2, 2, 2]
    print("a child ended with status", status, flush=True)
store.close()
"""


@pytest.mark.parametrize("how", ["spawn", "forkserver", "subprocess"])
def test_what_a_rank_starts_cannot_take_its_place(mpi, how: str, tmp_path: Path) -> None:
    """It has the rank's place in its environment, and MPI_Init would make it the same rank once more."""
    path = tmp_path / "program.py"
    path.write_text(STARTED)
    job = mpirun(2, ["python", str(path), how], timeout_s=60, mpi=mpi)
    assert job.status == 0, job.output
    assert len(re.findall("a child ended with status [12]", job.stdout)) == 2, job.output
    said = re.findall(r"^mpikv: error: ConfigError: this process, \d+, was started by a rank \(", job.output, re.M)
    assert len(said) == 2, job.output
    assert "Traceback" not in job.output
    assert job.ranks_left == []


def test_a_rank_may_start_another_job(mpi, tmp_path: Path) -> None:
    """Its ranks inherit the mark of a rank, but are their own launcher's."""
    path = tmp_path / "program.py"
    path.write_text(STARTED)
    line = " ".join(command(mpi, [(1, ["python"])])[:-1])
    job = mpirun(2, ["python", str(path), "mpirun"], env={"LINE": line}, timeout_s=60, mpi=mpi)
    assert job.status == 0, job.output
    assert job.stdout.count("a child ended with status 0") == 2, job.output
    assert job.ranks_left == []
