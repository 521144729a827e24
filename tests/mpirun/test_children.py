"""Processes that a rank forks, as data loaders do, end on their own: their errors are not the job's."""

from __future__ import annotations

from pathlib import Path

from jobs import mpirun

PROGRAM = """
import multiprocessing, sys, time
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
def wait(running):
    running.set()  # Python drops a signal that comes before the child has begun
    time.sleep(60)

running = fork.Event()
waiting = fork.Process(target=wait, args=(running,))
waiting.start()
assert running.wait(30)
waiting.terminate()
waiting.join()
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
