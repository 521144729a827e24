"""PyTorch's own tests of process groups and of DistributedDataParallel, over the backend mpikv.

    mpirun -n 3 python scripts/pytorch_tests.py [--list FILE] [--backend mpikv]

PyTorch's wheels contain the tests that its backends have in common (torch/testing/_internal/distributed), and a runner
that starts processes for each. Here every rank of MPI runs each test's body itself, in a process group of its own; a
test has passed where it has on all ranks. Skipped is what PyTorch's decorators skip: tests of GPUs, of other backends,
of other numbers of ranks. The tests go by a backend's name, so they are told that ours is gloo, which most of them are
written for. `--backend gloo` runs the same tests over Gloo itself: what fails there too fails for want of a GPU or of
torchvision. tests/mpirun/pytorch_tests.txt lists those that pass over mpikv with 2, 3 and 4 ranks.

Prints one line per test, then the counts and the reasons; the exit status is the number of failures, at most 100. Needs
the packages `expecttest` and `torch`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from datetime import timedelta
from typing import Any, NamedTuple

from mpi4py import MPI

STALL_S = 30.0
TAKEN_FOR = "gloo"  # by the tests


class Outcome(NamedTuple):
    """status: passed, skipped or failed."""

    status: str
    reason: str


def load(backend: str, comm: MPI.Intracomm) -> type:
    """The class of the tests, for a rank that runs them in this process."""
    os.environ.update(BACKEND=TAKEN_FOR, WORLD_SIZE=str(comm.Get_size()))
    folder = tempfile.mkdtemp(prefix="mpikv-pytorch-") if comm.Get_rank() == 0 else ""
    os.environ["TEMP_DIR"] = comm.bcast(folder)
    if comm.Get_rank() == 0:
        for part in ("barrier", "test_dir", "init_dir"):
            os.mkdir(os.path.join(folder, part))
    comm.Barrier()
    import torch.testing._internal.distributed.distributed_test as theirs  # noqa: PLC0415
    from torch import distributed as dist  # noqa: PLC0415
    from torch.testing._internal import common_utils  # noqa: PLC0415

    usual = dist.init_process_group

    def init_process_group(asked: str | None = None, *arguments: Any, **options: Any) -> None:
        asked = options.pop("backend", asked)
        usual(backend if asked in (None, TAKEN_FOR) else asked, *arguments, **options)

    dist.init_process_group = init_process_group  # some tests make their group anew

    class Tests(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        """All tests; each rank is one that PyTorch's runner would have started."""

        rank = comm.Get_rank()
        world_size = comm.Get_size()
        file_name = os.path.join(os.environ["TEMP_DIR"], "file")

        def __init__(self, name: str) -> None:
            common_utils.TestCase.__init__(self, name)

        def setUp(self) -> None:
            # Their barrier counts in files, which the process that starts all others empties before each test.
            theirs.Barrier.barrier_id = 0
            comm.Barrier()
            if self.rank == 0:
                theirs.Barrier.init()
            comm.Barrier()

        def tearDown(self) -> None:
            pass

    return Tests


def run_one(tests: type, name: str, backend: str) -> Outcome:
    """Run one test on this rank, in a process group of its own."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch.testing._internal import common_distributed, common_utils  # noqa: PLC0415

    skips = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    test = tests(name)
    test.setUp()
    dist.init_process_group(backend, timeout=timedelta(seconds=STALL_S))
    try:
        common_utils.set_rng_seed(common_utils.SEED)
        getattr(test, name)()
    except unittest.SkipTest as skipped:
        return Outcome("skipped", str(skipped))
    except SystemExit as leaving:
        reason = skips.get(leaving.code, f"sys.exit({leaving.code})")  # type: ignore[arg-type]
        return Outcome("skipped" if leaving.code in skips else "failed", reason)
    except Exception as error:  # noqa: BLE001 - a test's
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("failed", f"{type(error).__name__}: {lines[0] if lines else ''} ({where.name}:{where.lineno})")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return Outcome("passed", "")


def merged(outcomes: list[Outcome]) -> Outcome:
    """The outcome of a test on all ranks: one that has failed anywhere has failed."""
    for status in ("failed", "skipped"):
        found = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.status == status]
        if found and status == "failed":
            return Outcome(status, "; ".join(f"rank {rank}: {outcome.reason}" for rank, outcome in found[:2]))
        if found:
            return found[0][1]
    return Outcome("passed", "")


def main() -> int:
    """Run the tests that the options name; the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--backend", default="mpikv", help="the backend that runs")
    parser.add_argument("--list", help="a file with the names of the tests to run")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    tests = load(options.backend, comm)
    import mpikv.torch  # noqa: F401, PLC0415

    names = sorted(name for name in dir(tests) if name.startswith("test_"))
    if options.list:
        with open(options.list, encoding="utf-8") as lines:
            wanted = set(lines.read().split())
        unknown = wanted - set(names)
        if unknown:
            parser.error(f"PyTorch has no test {', '.join(sorted(unknown))}")
        names = [name for name in names if name in wanted]
    counts: Counter[str] = Counter()
    rows: list[tuple[str, Outcome]] = []
    for name in names:
        begin_s = time.monotonic()
        outcome = merged(comm.allgather(run_one(tests, name, options.backend)))
        counts[outcome.status] += 1
        rows.append((name, outcome))
        if comm.Get_rank() == 0:
            seconds = time.monotonic() - begin_s
            print(f"{outcome.status} {name} {seconds:.1f} s {outcome.reason}".rstrip(), flush=True)
    if comm.Get_rank() == 0:
        reasons: Counter[Any] = Counter(outcome.reason for _, outcome in rows if outcome.status == "skipped")
        for reason, count in reasons.most_common():
            print(f"{count} skipped: {reason}")
        print(f"{comm.Get_size()} ranks: {', '.join(f'{counts[s]} {s}' for s in ('passed', 'skipped', 'failed'))}")
    return min(100, counts["failed"])


if __name__ == "__main__":
    sys.exit(main())
