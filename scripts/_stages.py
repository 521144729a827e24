"""Run the stages of `scripts/test`, one after the other, and sum up.

A stage is one pytest session in one environment: pytest-xdist divides its tests over the cores, or all ranks of an
`mpirun` run them together (tests/mpi). The outcomes come from the file that the tests write (`tests/report.py`), so a
stage that dies in the middle still counts. A stage that executes no test fails, and so does each number of ranks. Each
has a time limit, after which all its processes are ended, with those of the jobs that it has started.

Where tests that start a real job (the mark `whole_job`) fail, they are run once more when all stages have ended, with
nothing beside them. One that passes then has passed, and is listed as unsteady. No other test is run twice.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import frameworks  # noqa: E402 - lies beside the tests
import grids  # noqa: E402
import jobs  # noqa: E402
import report  # noqa: E402

MODES = ("quick", "thorough", "full", "cluster", "oldest", "newest", "contract", "gpu")
CORES = len(os.sched_getaffinity(0))
LIMIT_S = 3600.0  # of a stage, against a hang; each job and test has a limit of its own
PART_S = 470.0  # of --gpu: all, within eight minutes
NO_TESTS = 5  # pytest's status where it executed none
# What an environment was made with: a test that does not find it fails there, and is skipped elsewhere.
ALL = ",".join(frameworks.ALL)
MADE_WITH = {"openmpi": ALL, "oldest": "torch", "newest": ALL, "gpu": "torch,jax"}
MADE_WITH |= {"contract12": "cupy", "contract13": "cupy,nvidia"}


def files(folder: str, *names: str) -> list[str]:
    """The files of tests in a folder and below, by names with wildcards."""
    found = (path for name in names for path in sorted((ROOT / "tests" / folder).rglob(f"test_{name}.py")))
    return [str(path.relative_to(ROOT)) for path in found]


# The tests that depend on versions most, which a run without options makes with the oldest and the newest, too.
OLDEST = files("unit", "arrays", "tensors", "store_forms", "store_results", "optimizers_wrapped", "trainer", "torch*")
NEWEST = files("unit", "jax*", "data", "image*", "codecs_compiled", "bench_report", "library", "trainer_torch")
NEWEST_JOBS = files("mpirun", "torch_backend", "jax_jobs")
SELECTED = {"oldest": OLDEST, "newest": OLDEST + NEWEST + NEWEST_JOBS}


@dataclass(frozen=True)
class Stage:
    """One pytest session. group: its name for --only. environment: by its name. marks: pytest's `-m`.

    ranks: under mpirun with so many, or 0. workers: processes that its tests are divided over, or 0. may_skip: not
    every machine can run its tests.
    """

    group: str
    title: str
    environment: str
    paths: Sequence[str]
    ranks: int = 0
    workers: int = CORES + 1  # since many tests wait
    marks: str = "not full"
    may_skip: bool = False


@dataclass
class Result:
    """The tests of a stage by outcome. skipped: with the reasons. whole_jobs: of the failed, those that start a job."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    whole_jobs: list[str] = field(default_factory=list)


def stages(mode: str, environments: Container[str]) -> list[Stage]:
    """What a run in this mode makes ("": without any), in those environments that there are."""
    unit = Stage("unit", "without MPI", "openmpi", ["tests/unit", "tests/property"])
    cluster = Stage("cluster", "clusters", "openmpi", ["tests/cluster"], marks="", may_skip=True)
    gpu = Stage("gpu-arrays", "GPU, one process", "gpu", ["tests/gpu"], workers=0, marks="gpu and not whole_job")

    def ranks(group: str, environment: str, *sizes: int) -> list[Stage]:
        """The tests that all ranks run together, with each number of ranks."""
        return [Stage(group, f"{environment}, {n} ranks", environment, ["tests/mpi"], n, workers=0) for n in sizes]

    if mode == "gpu":
        return [gpu, replace(gpu, group="gpu-jobs", title="GPU, jobs", marks="gpu and whole_job")]
    if mode == "quick":
        return [unit, *ranks("mpi", "openmpi", 3)]
    if mode == "cluster":
        return [cluster]
    if mode in SELECTED:
        found = [replace(unit, group=mode, title=f"{mode}, without MPI", environment=mode), *ranks(mode, mode, 3)]
        return [*found, *[Stage(mode, f"{mode}, whole jobs", mode, NEWEST_JOBS)][: mode == "newest"]]
    found = [
        unit,
        Stage("jobs", "whole jobs", "openmpi", ["tests/mpirun", "tests/gpu"]),
        Stage("examples", "examples", "openmpi", ["tests/examples"]),
        replace(cluster, title="clusters, a selection", marks="not full and not cluster_full"),
        *ranks("mpi", "openmpi", *((2, 4) if mode else (2,))),
        *ranks("mpich", "mpich", 3),
    ]
    few = f"not full and not {grids.THOROUGH}"  # they have been made with the usual versions
    found += [
        Stage(name, f"{name}, a selection", name, SELECTED[name], marks=few if mode != "full" else "")
        for name in SELECTED
        if name in environments
    ]
    if mode == "full":  # 5 ranks of MPICH on 2 cores spend their time spinning
        found += ranks("full", "openmpi", 1, 3, 5) + ranks("full", "mpich", 4)
        found = [replace(one, marks="") if one.marks == "not full" else one for one in found]
    contract = [name for name in ("contract12", "contract13") if name in environments]
    found *= mode != "contract"
    return [*found, *(Stage("contract", name, name, ["tests/contract"], workers=0) for name in contract)]


def joined(chosen: Sequence[Stage]) -> list[Stage]:
    """The stages of jobs as one, so that those that wait, for a scheduler most, leave the cores to others.

    Not with --bare, which is not for clusters, nor with --full, of which clusters make a selection.
    """
    waiting = [stage for stage in chosen if stage.group in ("jobs", "examples", "cluster")]
    if len(waiting) < 2:
        return list(chosen)
    # Clusters first: one worker then makes all their tests, and sets each up once; the short tests come last.
    paths = [path for stage in waiting[::-1] for path in stage.paths]
    one = replace(waiting[0], title=", ".join(stage.title for stage in waiting), paths=paths, marks=waiting[-1].marks)
    return [one if stage is waiting[0] else stage for stage in chosen if stage not in waiting[1:]]


def run_stage(stage: Stage, options: argparse.Namespace) -> Result:
    """Run one stage; its output appears as it comes."""
    mpi, limit_s = options.environments[stage.environment], LIMIT_S
    line = ["python", "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "-m", stage.marks, "-k", options.k]
    line += [*options.pytest, *stage.paths]
    if options.until:
        limit_s = max(1.0, options.until - time.monotonic())
    if stage.ranks:
        line = jobs.command(mpi, [(stage.ranks, [*line, "--with-mpi"])])
    elif stage.workers:
        line += ["-n", str(stage.workers), "--dist", "worksteal"]
    if options.before and stage.group != "cluster":  # the programs of a cluster are the subject of its tests
        line = [options.before, *line]
    print(f"--- {stage.title}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mpikv-stage-", ignore_cleanup_errors=True) as folder:
        (temporary := Path(folder, "tmp")).mkdir()
        env = {
            report.FILE_VARIABLE: f"{folder}/report",
            jobs.ENVIRONMENTS: ":".join(str(one.prefix) for one in options.environments.values()),
            jobs.CUDA_MPI: os.environ.get(jobs.CUDA_MPI, ""),
            jobs.PREFIX: str(mpi.prefix) if options.as_it_is else "",
            frameworks.VARIABLE: "" if options.as_it_is else MADE_WITH.get(stage.environment, ""),
            grids.VARIABLE: options.mode,
            grids.PART_VARIABLE: options.part if stage.marks else "",  # what is run once more is no part
        }
        running = jobs.Running(line, jobs.environment(mpi, env, temporary), temporary, limit_s, echo=True)
        try:
            job = running.finish()
        except BaseException:  # Ctrl-C
            running.end()
            raise
        result = count(Path(folder, "report"))
    judge(stage, job, result, selected=bool(options.k))
    counts = f"{len(result.passed)} passed, {len(result.failed)} failed, {len(result.skipped)} skipped"
    print(f"{stage.title}: {counts} in {job.seconds:.0f} s", flush=True)
    return result


def count(path: Path) -> Result:
    """The tests by what the report has of them; one that has started and has no outcome has failed."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        found.setdefault(entry["test"], {})[entry["outcome"]] = entry
    result = Result()
    for test, outcomes in found.items():
        if "failed" in outcomes or list(outcomes) == ["started"]:
            result.failed.append(test)
            result.whole_jobs += [test] * outcomes.get("failed", {}).get("whole_job", False)
        elif "skipped" in outcomes:
            result.skipped[test] = outcomes["skipped"]["reason"]
        else:
            result.passed.append(test)
    return result


def judge(stage: Stage, job: jobs.Job, result: Result, *, selected: bool) -> None:
    """Add what is wrong with the stage as a whole to its failed tests. selected: `-k` may have selected none of it."""
    may_be_empty = selected or (stage.may_skip and result.skipped)
    if job.timed_out:
        result.failed.append("(it did not end in time)")
    elif not result.failed and job.status not in ((0, NO_TESTS) if may_be_empty else (0,)):
        result.failed.append(f"(it ended with status {job.status})")
    elif not result.failed and not result.passed and not may_be_empty:
        result.failed.append("(no test was executed)")
    if job.ranks_left and not job.timed_out:
        result.failed.append(f"(it left {len(job.ranks_left)} processes behind)")
    if job.status != 1:  # else pytest has come to its end, and knows how each test went
        result.whole_jobs.clear()


def run(chosen: Sequence[Stage], options: argparse.Namespace) -> int:
    """Run these stages, then what failed of real jobs once more, and sum up. 0 if all tests passed."""
    began, n_passed, failed, executed = time.monotonic(), 0, list[str](), set[str]()
    skipped: dict[str, str] = {}
    for stage, result in [(stage, run_stage(stage, options)) for stage in chosen]:
        mended = set()
        if result.whole_jobs and not (options.until and time.monotonic() > options.until):
            title = f"{stage.title}: real jobs that failed, once more"
            again = replace(stage, title=title, paths=result.whole_jobs, workers=0, marks="")
            mended = {*run_stage(again, options).passed} & {*result.whole_jobs}
        print(*(f"unsteady: {stage.title}: {one}\n" for one in sorted(mended)), sep="", end="")
        failed += [f"{stage.title}: {one}" for one in result.failed if one not in mended]
        n_passed += len(result.passed) + len(mended)
        executed.update(result.passed, result.failed)
        skipped |= result.skipped
    # A test that needs more ranks than one stage has is skipped there and executed in another: not skipped.
    skipped = {test: reason for test, reason in skipped.items() if test not in executed}
    for reason, n in collections.Counter(skipped.values()).items():
        print(f"skipped: {n} x {reason}")
    if not executed:
        failed.append("no test was executed")
    print(*(f"failed: {one}\n" for one in failed), sep="", end="")
    print(f"{time.monotonic() - began:.0f} s in all, on {CORES} cores")
    print(f"{n_passed} passed, {len(failed)} failed" + (f", {len(skipped)} skipped" if skipped else ""))
    return 1 if failed else 0


def main() -> int:
    """Run the stages that were asked for; 0 if all tests passed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="scripts/test", add_help=False, allow_abbrev=False)
    modes = parser.add_mutually_exclusive_group()
    for name in MODES:
        modes.add_argument(f"--{name}", dest="mode", action="store_const", const=name, default="")
    parser.add_argument("--with", dest="prefixes", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--as-it-is", action="store_true")
    for name in ("--before", "--part", "--only", "-k"):
        parser.add_argument(name, default="")
    options, options.pytest = parser.parse_known_args()
    prefixes = {name: Path(prefix).absolute() for name, _, prefix in (one.partition("=") for one in options.prefixes)}
    options.environments = {
        name: jobs.mpi_of(prefix) if name == "gpu" else jobs.Mpi("mpich" if name == "mpich" else "openmpi", prefix)
        for name, prefix in prefixes.items()
    }
    chosen, part = stages(options.mode, prefixes), re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", options.part or "1/1")
    known = list(dict.fromkeys(stage.group for stage in chosen))
    groups = list(filter(None, options.only.split(","))) or known
    if not set(groups) <= set(known):
        parser.error(f"--only knows {', '.join(known)}")
    if not part or int(part[1]) > int(part[2]) or (options.part and options.mode != "gpu"):
        parser.error("--part K/N goes with --gpu, and K is one of 1 to N")
    chosen = [one for one in chosen if one.group in groups]
    if not chosen or any(options.environments.get(stage.environment) is None for stage in chosen):
        parser.error("an environment is missing, or an mpirun for it: --with NAME=DIR")
    options.until = began + PART_S if options.mode == "gpu" else None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its jobs, in sessions of their own, are ended on the way
    return run(chosen if options.before or options.mode == "full" else joined(chosen), options)


if __name__ == "__main__":
    sys.exit(main())
