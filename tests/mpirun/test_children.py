"""Processes that a rank starts, as data loaders do: they end on their own, and are no ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job, find_mpi, mpirun


def finished(folder: Path, program: str, *words: str, servers: int = 0) -> Job:
    """Run a program on two workers, which both come to its end and leave nothing behind."""
    path = folder / "program.py"
    path.write_text(program)
    job = mpirun(2 + servers, ["python", str(path), *words], timeout_s=60)
    job.check()
    assert job.stdout.count("finished") == 2
    return job


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

def leave():
    sys.exit(3)

def fail():
    raise RuntimeError("in a child")

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
            assert name in str(error) and "forked from" in str(error), (name, error)
        else:
            raise AssertionError(name)
    store.close()
    local.pushpull("w", value)
    queue.put(value.tolist())

fork = multiprocessing.get_context("fork")
for body in (leave, fail):
    process = fork.Process(target=body)
    process.start()
    process.join()
    assert process.exitcode in (1, 3), process.exitcode
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
def test_a_child_may_fail_and_cannot_use_the_store(kind: str, servers: int, tmp_path: Path) -> None:
    """Its calls would go through the parent's connections and counters."""
    assert "told to end" not in finished(tmp_path, FORKED, kind, str(servers), servers=servers).output


STARTED = """
import multiprocessing, subprocess, sys
import numpy as np
from mpikv import kv

def child():
    pass

def status():
    if how == "subprocess":
        code = "from mpikv import kv; kv.create('dist_sync')"
        return subprocess.run([sys.executable, "-c", code]).returncode
    process = multiprocessing.get_context(how).Process(target=child)
    process.start()
    process.join()
    return process.exitcode

how = sys.argv[1]
store = kv.create("dist_sync")  # with no guard: who imports this program anew comes here, too
store.init("w", np.zeros(3))
assert status() in (1, 2)
store.pushpull("w", value := np.ones(3))
assert value.tolist() == [2, 2, 2]
store.close()
sys.stdout.write("finished\\n")
"""


@pytest.mark.parametrize("how", ["spawn", "forkserver", "subprocess"])
def test_a_started_process_is_no_rank(how: str, tmp_path: Path) -> None:
    """It inherits the variables by which MPI knows the rank; MPI_Init would crash in it, or wait for ever."""
    job = finished(tmp_path, STARTED, how)
    for rank in range(2):
        said = f"mpikv: error: ConfigError: this process was started by rank {rank} of 2"
        assert job.stderr.count(said) == 1, job.output
    assert job.stderr.count('if __name__ == "__main__":') == 2


NESTED = """
import subprocess, sys
from mpikv import kv

store = kv.create("dist_sync")
if len(sys.argv) > 1:
    inner = [*INNER, sys.executable, __file__]
    done = subprocess.run(inner, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("2 workers") == 2, done
store.close()
sys.stdout.write(f"{store.num_workers} workers\\n")
"""


def test_a_job_of_its_own_below_a_rank(tmp_path: Path) -> None:
    mpi = find_mpi()
    assert mpi is not None
    inner = [mpi.program("mpirun"), "-n", "2"]
    if mpi.kind == "openmpi":
        inner[1:1] = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    path = tmp_path / "program.py"
    path.write_text(NESTED.replace("INNER", repr(inner)))
    job = mpirun(1, ["python", str(path), "outer"], timeout_s=60)
    job.check()
    assert job.stdout.count("1 workers") == 1
