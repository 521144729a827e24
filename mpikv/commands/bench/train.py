"""`mpikv bench train`: training steps of a network, with each way of exchanging the gradients beside the step alone.

In every round each way makes some steps in turn, in an order that rotates. All ways begin with the same weights and see
the same batches, which differ between ranks. The time of a turn is that of the slowest rank. What is compared is the
ratio to the step alone in the same round, of which the median is shown: so a noisy neighbour hits both.

Checked after every round: how far the weights have moved from the first ones must agree, on all ranks, with a reference
that is trained beside the others and not timed: MPI_Allreduce of each gradient. Training enlarges differences, so that
after some steps a last bit decides over a hundredth of the way. How much it does shows a second reference, whose first
weights are off by one rounding: a way is wrong where it is several times as far off.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpikv import kv
from mpikv.commands.bench import plot, torch_models, train_report
from mpikv.commands.bench.gpu import device_store, open_space
from mpikv.commands.bench.job import Job
from mpikv.commands.bench.measure import iterations_for
from mpikv.commands.bench.options import TRAIN_VERSUS, TRAINED
from mpikv.commands.bench.session import Session
from mpikv.commands.bench.statistics import ratios, summarise
from mpikv.commands.bench.train_report import TrainRow
from mpikv.commands.bench.train_ways import WAYS, Alone, RawEach, Work
from mpikv.errors import ConfigError
from mpikv.kvstore import KVStore

BATCHES = {"cpu": (4, 32), "cuda": (128,)}
TOLERANCE = 1e-4  # of what the weights have moved
ROUNDINGS = 8  # how many times as far as one rounding of the first weights leads: a step has a few roundings more


def run(session: Session) -> None:
    """Measure what the options ask for. Collective."""
    options, job = session.options, session.job
    pixels = options.image_size or TRAINED[options.model]
    threads = options.threads or max(1, session.job.cores // job.ranks_per_host)
    torch.set_num_threads(threads)
    store, device = _store_and_device(job, on_gpu=options.device)
    net = torch_models.make(options.model, pixels, seed=0).to(device)
    values = sum(parameter.numel() for parameter in net.parameters())
    session.note(
        f"{options.model}: {len(list(net.parameters()))} arrays, {values} values; images of {pixels} x {pixels}; SGD "
        f"with momentum; torch {torch.__version__}, on {device}, {threads} thread{'s' * (threads > 1)} per rank; "
        f"{options.steps} steps a turn"
    )
    chosen: list[type[Alone]] = [Alone]
    versus = options.vs or [name for name in TRAIN_VERSUS if name != "nccl" or options.device]
    for name in (*options.ways, *versus):
        reason = WAYS[name].missing()
        if reason:
            session.note(f"left out: {WAYS[name].title} ({reason})")
        else:
            chosen.append(WAYS[name])
    session.titles(train_report.TABLE)
    session.draw = plot.step_times
    with store:
        for examples in options.batch or BATCHES[device.type]:
            session.progress.update(what=f"batch {examples}")
            batches = [
                tuple(
                    one.to(device)
                    for one in torch_models.batch(options.model, pixels, examples, seed=1 + step * job.size + job.rank)
                )
                for step in range(options.steps)
            ]
            rows = _compare(session, Work(job, store, net, options.bucket_bytes), chosen, batches, values * 4)
            session.rows += rows
            session.lines(train_report.line, rows)
            session.progress.update(1)


def _store_and_device(job: Job, *, on_gpu: bool) -> tuple[KVStore, torch.device]:
    """Make the store, and say where the network is. Raises ConfigError on all ranks where it cannot. Collective."""
    if not on_gpu:
        config = job.config.with_(num_servers=0)
        return kv.create("dist_sync", comm=job.comm, config=config), torch.device("cpu")
    if not job.comm.allreduce(int(torch.cuda.is_available())) == job.size:
        raise ConfigError(f"--device: torch {torch.__version__} sees no GPU on some rank; another build of it may")
    store = device_store(job)
    device = torch.device("cuda", open_space(job, store).device)
    torch.cuda.set_device(device)
    return store, device


def _compare(
    session: Session, work: Work, chosen: Sequence[type[Alone]], batches: Sequence[Any], n_bytes: int
) -> list[TrainRow]:
    """Measure all ways with these batches. Collective."""
    plan, comm = session.plan, session.job.comm
    ways = [way(work) for way in chosen]
    reference, rounded = RawEach(work), RawEach(work)
    _round_once(rounded)
    rounded_first = copy.deepcopy(rounded.net)
    wrong, farthest = np.zeros(len(ways), np.int64), np.zeros(len(ways))
    times: list[list[float]] = []
    turn, rounds, round_s = 0, 1, 0.0
    while turn < plan.warmup + rounds:
        start_s = time.perf_counter()
        found = [0.0] * len(ways)
        for i in sorted(range(len(ways)), key=lambda i, turn=turn: (i - turn) % len(ways)):  # type: ignore[misc]
            found[i] = _turn(comm, ways[i], batches)
        if plan.check:
            _turn(comm, reference, batches)
            _turn(comm, rounded, batches)
            tolerance = max(TOLERANCE, ROUNDINGS * _distance(work, rounded.net, reference, rounded_first))
            for i, way in enumerate(ways[1:], start=1):
                away = _distance(work, way.net, reference, work.net)
                farthest[i] = max(farthest[i], away)
                wrong[i] += not away <= tolerance
        round_s = time.perf_counter() - start_s
        turn += 1
        if turn > plan.warmup:
            times.append(found)
        elif turn == plan.warmup:
            rounds = plan.iterations or comm.bcast(iterations_for(plan.seconds, round_s))
    slowest, most, away_of_all = (np.max(comm.allgather(one), axis=0) for one in (times, wrong, farthest))
    for way in ways:
        way.close()
    rows = []
    for i, way in enumerate(ways):
        step, ratio = summarise(slowest[:, i] / len(batches)), ratios(slowest[:, i], slowest[:, 0])
        rows.append(
            TrainRow(
                model=session.options.model,
                batch=len(batches[0][1]),
                what=way.title,
                n_bytes=n_bytes,
                **step._asdict(),
                steps=len(batches),
                ratio_to_alone=ratio[0],
                ratio_p95=ratio[1],
                difference=float(away_of_all[i]) if np.isfinite(away_of_all[i]) else None,
                wrong=int(most[i]),
            )
        )
    return rows


def _turn(comm: Any, way: Alone, batches: Sequence[Any]) -> float:
    """Make some steps, and return the seconds that they took here."""
    comm.Barrier()
    start_s = time.perf_counter()
    for images, labels in batches:
        way.step(images, labels)
    way.finish()
    return time.perf_counter() - start_s


def _round_once(way: Alone) -> None:
    """Change every weight by about a unit in its last place, up or down, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in way.net.parameters():
            signs = (torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1).to(parameter.device)
            parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)


def _distance(work: Work, net: torch.nn.Module, reference: Alone, start: torch.nn.Module) -> float:
    """Return how far a net's way from `start` differs from the reference's, relative to how far this has moved."""
    away = moved = 0.0
    nets = (net, start, reference.net, work.net)
    with torch.no_grad():
        for mine, begun, expected, first in zip(*(one.parameters() for one in nets), strict=True):
            away += float(((mine - begun) - (expected - first)).double().square().sum())
            moved += float((expected - first).double().square().sum())
    return float((away / moved) ** 0.5) if moved else float("inf")
