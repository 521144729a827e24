"""What a machine with a GPU is asked once the tests are over, in one table; `scripts/test --gpu` runs it.

    python tests/gpu/report_program.py [--of ipc,torch] [--sizes 4K,1M,64M] [--ranks N] [--limit SECONDS]

Of each way between workers and of each size: a `pushpull` of one array that the user has on the GPU, checked, by
`mpikv bench allreduce`. Of a small convolutional network: a step by `mpikv.torch.DistributedModel`, and by PyTorch's
DDP over NCCL where each rank has a GPU, by `mpikv bench train`.
Two ranks, or one for each GPU where there are more. NCCL does not take two ranks on one GPU, and a store of one rank
asks nothing of it: on one GPU only its calls are tested (test_gpu_arrays.py).

Each way is a job of its own, so that one that fails or hangs takes nothing from the others: what could not be measured
is said, with its reason, and is no failure. A wrong result is. Ends within --limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import jobs

from mpikv.commands.numbers import size as bytes_of
from mpikv.commands.tables import Column, Table
from mpikv.runtime import cuda_driver

PROGRAM = str(jobs.ROOT / "tests/gpu/bench_program.py")
PATHS = ("ipc", "staged", "nccl", "mpi")
JOB_S = 60.0
SPEEDS = Table(
    Column("path", 8, left=True),
    Column("ranks", 5),
    Column("size", 6),
    Column("us", 10),
    Column("GB/s", 8),
)
STEPS = Table(Column("PyTorch step", 30, left=True), Column("ranks", 5), Column("ms", 8), Column("times alone", 11))
NET = ["--model", "resnet18", "--image-size", "64", "--batch", "64", "--vs", "model,nccl"]


class Report:
    """The jobs, each within what is left of the time. wrong: how many results were."""

    def __init__(self, kind: str, limit_s: float) -> None:
        self._kind, self._until, self.wrong = kind, time.monotonic() + limit_s, 0
        self._missing: list[str] = []

    def measure(self, what: str, n: int, words: list[str], **env: str) -> dict[str, Any]:
        """What a benchmark finds; nothing where it cannot be made, which is noted. env: variables of the job."""
        left_s = min(JOB_S, self._until - time.monotonic() - 2 * jobs.TERMINATE_S)
        if left_s < 1:
            return self.misses(what, "no time was left")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.json")
            line = ["python", PROGRAM, self._kind, *words, "--seconds", "0.3", "--json", str(path)]
            try:
                job = jobs.mpirun(n, line, env=env, timeout_s=left_s)
            except (AssertionError, OSError) as error:
                return self.misses(what, str(error))
            if not path.exists():
                said = [one for one in job.output.splitlines() if "error: " in one.lower()] or [job.output[-300:]]
                return self.misses(what, f"no end in {left_s:.0f} s" if job.timed_out else " ".join(said[0].split()))
            found: dict[str, Any] = json.loads(path.read_text())
        self.wrong += sum(row["wrong"] for row in found["rows"])
        return found

    def misses(self, what: str, why: str) -> dict[str, Any]:
        """Note that something could not be measured."""
        self._missing.append(f"not measured: {what}: {why}")
        return {}

    def end(self) -> int:
        """Say what could not be measured, and what was wrong. Returns a status."""
        print(*self._missing, f"{self.wrong} results were wrong", sep="\n", flush=True)
        return int(self.wrong > 0)


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="cuda", choices=("cuda", "fake"))
    parser.add_argument("--of", default=",".join((*PATHS, "torch")))
    parser.add_argument("--sizes", default="4K,1M,64M")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--limit", type=float, default=300.0)
    options = parser.parse_args()
    report, sizes = Report(options.kind, options.limit), options.sizes.split(",")
    driver = cuda_driver.ask()
    ranks = options.ranks or max(2, len(driver.names))
    print(f"{', '.join(driver.names) or driver.problem} {driver.version}", SPEEDS.head(), sep="\n", flush=True)
    wanted = options.of.split(",")
    for path in (one for one in PATHS if one in wanted):
        words = ["allreduce", "-b", sizes[0], "-e", sizes[-1]]
        found = report.measure(path, ranks, words, MPIKV_DEVICE_PATH=path)
        speeds = {row["n_bytes"]: row for row in found.get("rows", ()) if row["what"] == "gpu"}
        for size in sizes:
            if (row := speeds.get(bytes_of(size))) is not None:
                figures = row["median_s"] * 1e6, row["n_bytes"] / row["median_s"] / 1e9
                end = "  WRONG" if row["wrong"] else ""
                print(SPEEDS.line(path, ranks, size, *(f"{one:.4g}" for one in figures), end=end), flush=True)
    print(STEPS.head(), flush=True)
    if "torch" in wanted:
        found = report.measure("a step of PyTorch", ranks, ["train", *NET])
        for note in (one for one in found.get("notes", ()) if one.startswith("left out: ")):
            report.misses("a step of PyTorch", note.removeprefix("left out: "))
        for row in found.get("rows", ()):
            end = "  WRONG" if row["wrong"] else ""
            figures = f"{row['median_s'] * 1e3:.2f}", f"{row['ratio_to_alone']:.3f}"
            print(STEPS.line(row["what"], ranks, *figures, end=end), flush=True)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
