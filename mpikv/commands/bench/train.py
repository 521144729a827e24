"""`mpikv bench train`: training steps of a network, with each way of exchanging the gradients beside the step alone.

On GPUs where every rank has one, else on the CPU. In every round each way makes `STEPS` steps in turn, in an order that
rotates. All ways begin with the same weights and see the same batches, which differ between ranks. The time of a turn
is that of the slowest rank. What is compared is the ratio to the step alone in the same round, of which the median is
shown: so a noisy neighbour hits both.

Checked after every round: how far the weights have moved from the first ones must agree, on all ranks, with a reference
that is trained beside the others and not timed: MPI_Allreduce of each gradient. Training enlarges differences, so that
after some steps a last bit decides over a hundredth of the way. How much it does shows a second reference, whose first
weights are off by one rounding: a way is wrong where it is several times as far off.

Columns: examples of one rank in a step; who; median and 95th percentile of the slowest rank's time for a step, in
milliseconds; the median and the 95th percentile of its ratio to the step alone in the same round; how far the weights
were from the reference's at most, relative to how far they have moved.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpikv import kv
from mpikv.commands.bench import torch_models
from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.measure import iterations_for, summary
from mpikv.commands.bench.options import TRAIN_WAYS, TRAINED
from mpikv.commands.bench.report import known, milliseconds
from mpikv.commands.bench.session import BenchRun
from mpikv.commands.bench.stores import gpu_everywhere
from mpikv.commands.bench.train_ways import ALONE, WAYS, TrainedCopy, TrainWay, Work, raw_each
from mpikv.commands.tables import Column, Table
from mpikv.kvstore import KVStore

BATCHES = {"cpu": (4, 32), "cuda": (128,)}
STEPS = 2  # of a way in a turn
TOLERANCE = 1e-4  # of what the weights have moved
ROUNDINGS = 8  # how many times as far as one rounding of the first weights leads: a step has a few roundings more

TABLE = Table(
    Column("batch", 6, text=lambda row: row["batch"]),
    Column("what", 22, left=True, text=lambda row: row["what"]),
    Column("median ms", 10, text=milliseconds("median_s")),
    Column("p95 ms", 10, text=milliseconds("p95_s")),
    Column("vs alone", 9, text=lambda row: f"{row['ratio_to_alone']:.3f}"),
    Column("p95", 7, text=lambda row: f"{row['ratio_p95']:.3f}"),
    Column("rounds", 7, text=lambda row: row["iterations"]),
    Column("differs", 9, text=known("difference", "{:.1e}".format)),
)


def run(session: BenchRun) -> None:
    options, job = session.options, session.job
    pixels = options.image_size or TRAINED[options.model]
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, job.cores // job.ranks_per_host))
    threads = torch.get_num_threads()
    store, device = store_and_device(job)
    net = torch_models.make(options.model, pixels, seed=0).to(device)
    values = sum(parameter.numel() for parameter in net.parameters())
    session.note(
        f"{options.model}: {len(list(net.parameters()))} arrays, {values} values; images of {pixels} x {pixels}; SGD "
        f"with momentum; torch {torch.__version__}, on {device}, {threads} thread{'s' * (threads > 1)} per rank; "
        f"{STEPS} steps a turn"
    )
    chosen = [ALONE]
    for name in options.vs or [name for name in TRAIN_WAYS if name != "nccl" or device.type == "cuda"]:
        if reason := WAYS[name].missing():
            session.note(f"left out: {WAYS[name].title} ({reason})")
        else:
            chosen.append(WAYS[name])
    session.titles(TABLE)
    with store:
        for examples in options.batch or BATCHES[device.type]:
            session.progress.update(what=f"batch {examples}")
            batches = []
            for step in range(STEPS):
                seed = 1 + step * job.size + job.rank
                made = torch_models.batch(options.model, pixels, examples, seed=seed)
                batches.append(tuple(one.to(device) for one in made))
            rows = _compare(session, Work(job, store, net), chosen, batches)
            session.add(TABLE, [{"model": options.model, "n_bytes": values * 4, **row} for row in rows])


def store_and_device(job: BenchJob) -> tuple[KVStore, torch.device]:
    """Make the store, and say where the network is. Collective."""
    config = job.config.with_(num_servers=0)
    if not (gpu_everywhere(job) and all(job.comm.allgather(torch.cuda.is_available()))):
        return kv.create("dist_sync", comm=job.comm, config=config), torch.device("cpu")
    store = kv.create("dist_sync_device", comm=job.comm, config=config)
    device = torch.device("cuda", store.device)
    torch.cuda.set_device(device)
    return store, device


def _compare(session: BenchRun, work: Work, chosen: Sequence[TrainWay], batches: Sequence[Any]) -> list[dict[str, Any]]:
    """Measure all ways with these batches: one round that is not timed, then the others. Collective."""
    options, comm = session.options, session.job.comm
    copies = [TrainedCopy(work, way.prepare) for way in chosen]
    reference, rounded = TrainedCopy(work, raw_each), TrainedCopy(work, raw_each)
    _round_once(rounded)
    rounded_first = copy.deepcopy(rounded.net)
    wrong, farthest = np.zeros(len(copies), np.int64), np.zeros(len(copies))
    times: list[list[float]] = []
    turn, rounds = 0, 1
    while turn <= rounds:
        start_s = time.perf_counter()
        found = [0.0] * len(copies)
        for i in sorted(range(len(copies)), key=lambda i, turn=turn: (i - turn) % len(copies)):  # type: ignore[misc]
            found[i] = _turn(comm, copies[i], batches)
        _turn(comm, reference, batches)
        _turn(comm, rounded, batches)
        tolerance = max(TOLERANCE, ROUNDINGS * _distance(work, rounded.net, reference, rounded_first))
        for i, one in enumerate(copies[1:], start=1):
            away = _distance(work, one.net, reference, work.net)
            farthest[i] = max(farthest[i], away)
            wrong[i] += not away <= tolerance
        if turn == 0:
            rounds = options.iterations or comm.bcast(iterations_for(options.seconds, time.perf_counter() - start_s))
        else:
            times.append(found)
        turn += 1
    slowest, most, away_of_all = (np.max(comm.allgather(one), axis=0) for one in (times, wrong, farthest))
    rows = []
    for i, (way, one) in enumerate(zip(chosen, copies, strict=True)):
        one.close()
        median, p95 = np.percentile(slowest[:, i] / slowest[:, 0], (50, 95))
        rows.append(
            {
                "batch": len(batches[0][1]),
                "what": way.title,
                **summary(slowest[:, i] / len(batches)),
                "steps": len(batches),
                "ratio_to_alone": float(median),
                "ratio_p95": float(p95),
                "difference": float(away_of_all[i]) if np.isfinite(away_of_all[i]) else None,
                "wrong": int(most[i]),
            }
        )
    return rows


def _turn(comm: Any, trained: TrainedCopy, batches: Sequence[Any]) -> float:
    comm.Barrier()
    start_s = time.perf_counter()
    for images, labels in batches:
        trained.step(images, labels)
    trained.finish()
    return time.perf_counter() - start_s


def _round_once(trained: TrainedCopy) -> None:
    """Change every weight by about a unit in its last place, up or down, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained.net.parameters():
            signs = (torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1).to(parameter.device)
            parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)


def _distance(work: Work, net: torch.nn.Module, reference: TrainedCopy, start: torch.nn.Module) -> float:
    """Return how far a net's path from `start` differs from the reference's, relative to how far this has moved."""
    away = moved = 0.0
    nets = (net, start, reference.net, work.net)
    with torch.no_grad():
        for mine, begun, expected, first in zip(*(one.parameters() for one in nets), strict=True):
            away += float(((mine - begun) - (expected - first)).double().square().sum())
            moved += float((expected - first).double().square().sum())
    return float((away / moved) ** 0.5) if moved else float("inf")
