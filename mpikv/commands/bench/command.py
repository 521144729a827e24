"""`mpikv bench WHAT`: checks the options, starts mpirun or joins the other ranks, and runs one of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from mpikv.codecs import registry
from mpikv.commands.bench import allreduce, codec, gloo, link, lists, output, plot, ps, pushpull, wire
from mpikv.commands.bench.job import Job, describe, header, open_job
from mpikv.commands.bench.options import FLOATS, TRAINED
from mpikv.commands.bench.progress import Recorded
from mpikv.commands.bench.report import Row
from mpikv.commands.bench.session import Session
from mpikv.commands.bench.sizes import short, sweep
from mpikv.commands.bench.start import BAD_INPUT, check_ranks, environment_rank, run_mpirun
from mpikv.commands.bench.tcp import between_hosts
from mpikv.common.progress import Progress
from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.runtime import launcher


def train(session: Session) -> None:
    """Run `train.run`, which imports PyTorch."""
    importlib.import_module("mpikv.commands.bench.train").run(session)


BENCHMARKS: Mapping[str, Callable[[Session], None]] = {
    "allreduce": allreduce.run,
    "pushpull": pushpull.run,
    "model": lists.run_model,
    "train": train,
    "ps": ps.run,
    "codec": codec.run,
    "link": link.run,
    "wire": wire.run,
}
OWN_ROWS = ("train", "codec", "wire")  # kinds whose rows know of no memory held
WRONG = 1  # the status where a result was not exact


def run(options: argparse.Namespace) -> int:
    """Run a benchmark. Returns the status to exit with: 0, 1 after a wrong result, 2 for what cannot be measured."""
    try:
        config = Config.from_environ()
        _check(options)
        if check_ranks(options.n):
            drawn = options.progress == "bar" and sys.stderr.isatty()
            return run_mpirun(options.n, options.words, config.mpi, bar=drawn)
        job = open_job(config)
        _check_job(options, job)
    except (ConfigError, ValueError) as error:
        return _refuse(error)
    try:
        return _measure(options, job)
    except ConfigError as error:  # which all ranks find: there is no GPU
        return _refuse(error)


def _refuse(error: Exception) -> int:
    """Say once for all ranks what cannot be measured. Returns the status."""
    if environment_rank() == 0:
        print(f"mpikv bench: error: {error}", file=sys.stderr, flush=True)
    else:
        launcher.let_rank_0_speak()
    return BAD_INPUT


def _check(options: argparse.Namespace) -> None:
    """Find mistakes that can be seen before MPI starts. Raises ConfigError or ValueError."""
    if hasattr(options, "min_bytes") and not getattr(options, "keys", None):
        sweep(options.min_bytes, options.max_bytes, options.factor, 1)
    if options.kind in ("pushpull", "ps") and options.dtype not in FLOATS:
        raise ConfigError(f"--dtype {options.dtype}: an optimizer needs one of {', '.join(FLOATS)}")
    for option in ("json", "plot"):
        if getattr(options, option):
            output.check_writable(f"--{option}", getattr(options, option))
    if options.plot:
        plot.check_matplotlib()
    _check_device(options)
    if options.kind == "train":
        _check_training(options)
    if options.kind in ("codec", "wire"):
        _check_codecs(options)
    if options.kind == "wire" and options.dtype != "float32":
        raise ConfigError(f"--dtype {options.dtype}: wire compares float32 with what takes less")
    if "gloo" in getattr(options, "vs", ()) or options.kind == "train":
        gloo.check_torch("--vs gloo" if options.kind != "train" else "train")


def _check_device(options: argparse.Namespace) -> None:
    if not getattr(options, "device", False):
        if getattr(options, "device_paths", ()):
            raise ConfigError("--device-paths compares ways of arrays on a GPU: give --device, too")
        return
    for option in ("algorithms", "vs"):
        if options.kind != "train" and getattr(options, option, ()):
            raise ConfigError(f"--{option} is of arrays in host memory: leave it out, or --device")


def _check_codecs(options: argparse.Namespace) -> None:
    if options.dtype not in FLOATS:
        raise ConfigError(f"--dtype {options.dtype}: a codec encodes one of {', '.join(FLOATS)}")
    unknown = sorted(set(options.codecs) - set(registry.names()))
    if unknown:
        raise ConfigError(f"--codecs {','.join(unknown)}: there are {', '.join(registry.names())}")
    if options.plot:
        raise ConfigError("--plot draws bandwidths over sizes, which codecs have not")


def _check_training(options: argparse.Namespace) -> None:
    if options.dtype != "float32":
        raise ConfigError(f"--dtype {options.dtype}: train measures float32 alone")
    if options.model == "lenet" and options.image_size not in (None, TRAINED["lenet"]):
        raise ConfigError(f"--image-size {options.image_size}: lenet takes images of 28 x 28")


def _check_job(options: argparse.Namespace, job: Job) -> None:
    """Find mistakes for which the number of ranks is needed. Raises ConfigError on all of them."""
    if options.kind == "ps" and options.servers >= job.size:
        raise ConfigError(
            f"--servers {options.servers} of {job.size} ranks leave no worker; start {options.servers + 1} or more (-n)"
        )
    if options.kind == "link" and job.size < 2:
        raise ConfigError("link needs at least 2 ranks: -n 2, or mpirun -n 2")


def _measure(options: argparse.Namespace, job: Job) -> int:
    found = describe(job)
    progress = _progress(options, job.rank)
    words = options.words[:-2] if options.progress_file else options.words  # by `follow`
    command = shlex.join(["mpikv", *words])
    progress.say(f"# {command}", *header(found))
    session = Session(options, job, progress)
    if options.kind != "link" and len(job.host_names) > 1:
        session.link_bytes_per_s = between_hosts(job)
        session.note(f"raw TCP between hosts: {session.link_bytes_per_s * 8 / 1e6:.0f} Mbit/s")
    with gloo.process_group(job, wanted="gloo" in getattr(options, "vs", ()) or options.kind == "train"):
        BENCHMARKS[options.kind](session)
    if options.kind not in OWN_ROWS:
        progress.say(*ledger_lines(ledger(session.rows)))
    progress.close()
    wrong = sum(row.wrong for row in session.rows)
    if job.rank == 0:
        if options.json:
            more = {**({} if options.kind in OWN_ROWS else {"ledger": ledger(session.rows)}), **session.more}
            output.write_json(options.json, output.document(command, found, session.rows, session.notes, **more))
            print(f"# rows written to {Path(options.json).resolve()}", flush=True)
        if options.plot:
            session.draw(options.plot, f"mpikv bench {options.kind}, {job.size} ranks", session.rows)
            print(f"# plot written to {Path(options.plot).resolve()}", flush=True)
        if wrong:
            print(f"mpikv bench: {wrong} results were wrong", file=sys.stderr, flush=True)
    job.comm.Barrier()
    return WRONG if wrong else 0


def _progress(options: argparse.Namespace, rank: int) -> Progress:
    """Make the progress that rank 0 shows, and other ranks do not."""
    if options.progress_file and rank == 0:
        return Recorded(options.progress_file, _steps(options))
    return Progress("mpikv bench", _steps(options), "sizes", shown=rank == 0, mode=options.progress)


def _steps(options: argparse.Namespace) -> int:
    """Return how often something is measured."""
    if options.kind == "train":
        return len(options.batch or (1,) * (1 if options.device else 2))
    if options.kind == "codec":
        return len(options.codecs or registry.names())
    if not hasattr(options, "min_bytes") or getattr(options, "keys", None):
        return 1
    itemsize_bytes = np.dtype(options.dtype).itemsize
    sizes = sweep(options.min_bytes, options.max_bytes, options.factor, itemsize_bytes)
    return len(sizes) * len(getattr(options, "variants", ("one",)))


def ledger(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return for each contender the row at which its store held most memory beyond the user's arrays."""
    found = []
    for what in dict.fromkeys(row.what for row in rows):
        known = [row for row in rows if row.what == what and row.held_bytes is not None]
        if known:
            most = max(known, key=lambda row: row.held_bytes or 0)
            found.append({"what": what, "n_bytes": most.n_bytes, "held_bytes": most.held_bytes})
    return found


def ledger_lines(entries: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the footer: what the stores held."""
    if not entries:
        return ["# memory held beyond the user's arrays: not counted for this kind of store"]
    lines = ["# memory held beyond the user's arrays, by the rank with most"]
    for one in entries:
        held, size = int(str(one["held_bytes"])), int(str(one["n_bytes"]))
        lines.append(f"#   {one['what']}: {held} bytes, at {short(size)}")
    return lines
