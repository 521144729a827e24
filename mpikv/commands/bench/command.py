"""`mpikv bench WHAT`: checks the options, starts mpirun or joins the other ranks, and runs one of the benchmarks."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mpikv.commands.bench import allreduce, gloo, link, plot, ps
from mpikv.commands.bench.job import BenchJob, describe, header, open_job
from mpikv.commands.bench.options import FLOATS, TRAINED
from mpikv.commands.bench.report import write_json
from mpikv.commands.bench.session import BenchRun, sweep
from mpikv.commands.bench.start import BAD_INPUT, become_mpirun, check_ranks, environment_rank
from mpikv.common.files import place_of
from mpikv.common.progress import Progress
from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.runtime import launcher

WRONG = 1  # the status where a result was not exact


def _train(session: BenchRun) -> None:
    from mpikv.commands.bench import train  # noqa: PLC0415 - it imports PyTorch

    train.run(session)


BENCHMARKS: Mapping[str, Callable[[BenchRun], None]] = {
    "allreduce": allreduce.run,
    "pushpull": allreduce.run,
    "model": allreduce.run,
    "train": _train,
    "ps": ps.run,
    "link": link.run,
}


def run(options: argparse.Namespace) -> int:
    """Run a benchmark. Returns the status to exit with: 0, 1 after a wrong result, 2 for what cannot be measured."""
    try:
        config = Config.from_environ()
        _check(options)
        if check_ranks(options.n):
            become_mpirun(options.n, options.words, one_thread=options.kind != "train")
        job = open_job(config)
        _check_job(options, job)
        return _measure(options, job)
    except (ConfigError, ValueError) as error:  # which all ranks find
        if environment_rank() == 0:
            print(f"mpikv bench: error: {error}", file=sys.stderr, flush=True)
        else:
            launcher.let_rank_0_speak()
        return BAD_INPUT


def _check(options: argparse.Namespace) -> None:
    """Find mistakes that can be seen before MPI starts. Raises ConfigError or ValueError."""
    kind, dtype = options.kind, options.dtype
    _steps(options)
    if kind in ("pushpull", "ps") and dtype not in FLOATS:
        raise ConfigError(f"--dtype {dtype}: an optimizer needs one of {', '.join(FLOATS)}")
    if options.plot == "":
        options.plot = f"mpikv-bench-{kind}.png"
    for option in ("json", "plot", "save"):
        if path := getattr(options, option, None):
            try:  # before an hour of measuring, not after it
                place_of(path)
            except OSError as error:
                raise ConfigError(f"--{option} {path}: {error.strerror}") from None
    if options.plot:
        if options.keys:
            raise ConfigError("--plot draws bandwidth over size, and --keys has one size")
        plot.check_matplotlib()
    if kind == "train" and options.model == "lenet" and options.image_size not in (None, TRAINED["lenet"]):
        raise ConfigError(f"--image-size {options.image_size}: lenet takes images of 28 x 28")
    if needs_torch(options):
        gloo.check_torch("--vs gloo" if kind != "train" else "train")


def needs_torch(options: argparse.Namespace) -> bool:
    return "gloo" in options.vs or options.kind == "train"


def _steps(options: argparse.Namespace) -> int:
    """Return how often something is measured. Raises ValueError where nothing is."""
    if options.kind == "train":
        return len(options.batch or (4, 32))
    if not hasattr(options, "min_bytes"):
        return 1
    sizes = sweep(options.min_bytes, options.max_bytes)
    return 1 if options.keys else len(sizes) * (len(ps.TYPES) if options.kind == "ps" else 1)


def _check_job(options: argparse.Namespace, job: BenchJob) -> None:
    """Find mistakes for which the number of ranks is needed. Raises ConfigError on all of them."""
    if options.kind == "ps" and options.servers >= job.size:
        raise ConfigError(
            f"--servers {options.servers} of {job.size} ranks leave no worker; start {options.servers + 1} or more (-n)"
        )
    if options.kind == "link" and job.size < 2:
        raise ConfigError("link needs at least 2 ranks: -n 2, or mpirun -n 2")
    if options.kind == "link" and options.save and len(job.host_names) == 1:
        raise ConfigError("--save: all ranks are on one host, and there is no link to save")


def _measure(options: argparse.Namespace, job: BenchJob) -> int:
    found = describe(job)
    progress = Progress("mpikv bench", _steps(options), "sizes", shown=job.rank == 0)
    command = shlex.join(["mpikv", *options.words])
    progress.say(f"# {command}", *header(found))
    session = BenchRun(options, job, progress)
    with gloo.process_group(job, wanted=needs_torch(options)):
        BENCHMARKS[options.kind](session)
    progress.close()
    wrong = sum(row.get("wrong", 0) for row in session.rows)
    if job.rank == 0:
        if options.json:
            write_json(options.json, {"command": command, **found, "rows": session.rows, "notes": session.notes})
            print(f"# rows written to {Path(options.json).resolve()}", flush=True)
        if options.plot:
            plot.bandwidths(options.plot, f"mpikv bench {options.kind}, {job.size} ranks", session.rows)
            print(f"# plot written to {Path(options.plot).resolve()}", flush=True)
        if wrong:
            print(f"mpikv bench: {wrong} results were wrong", file=sys.stderr, flush=True)
    job.comm.Barrier()
    return WRONG if wrong else 0
