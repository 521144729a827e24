#!/usr/bin/env python3
"""What a timeline costs: steps of ResNet-18 with and without one, by turns, in one job.

    mpirun -n 2 python scripts/bench_timeline.py --pairs 30

Each pair is one step without and one with a timeline, in an order that changes from pair to pair. The time of a step is
the slowest rank's. Printed are the median of both, and of the pairs' ratios with its quartiles; then the same for calls
of `pushpull` alone, in which nothing hides what a record costs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

from mpikv import kv
from mpikv.commands.bench import torch_models
from mpikv.torch import DistributedModel

CALLS = 200  # of `pushpull` in a turn


def main() -> None:
    """Measure, and print on worker 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="images of a step [4]")
    parser.add_argument("--pixels", type=int, default=128, help="of each side of an image [128]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, kv.create("dist_sync") as store:
        _compare(store, directory, options.pairs, "step of ResNet-18", _step(store, options.batch, options.pixels))
        for n_bytes in (8, 1 << 16):
            _compare(store, directory, options.pairs, f"{CALLS} pushpull of {n_bytes} B", _calls(store, n_bytes))


def _step(store: kv.KVStore, batch: int, pixels: int) -> Callable[[], None]:
    net = DistributedModel(torch_models.make("resnet18", pixels, seed=0), store=store)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(0, 1000, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()

    return step


def _calls(store: kv.KVStore, n_bytes: int) -> Callable[[], None]:
    values = np.zeros(n_bytes // 4, "float32")
    store.init(f"{n_bytes}", values)

    def calls() -> None:
        for _ in range(CALLS):
            store.pushpull(f"{n_bytes}", values)

    return calls


def _compare(store: kv.KVStore, directory: str, pairs: int, what: str, turn: Callable[[], None]) -> None:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for i in range(-3, pairs):
        for with_timeline in (i % 2 == 0, i % 2 == 1):
            timeline = store.timeline(directory) if with_timeline else None
            store.barrier()
            begin_s = time.perf_counter()
            turn()
            taken_s = np.array([time.perf_counter() - begin_s])
            if timeline is not None:
                timeline.end()
            if i < 0:
                continue  # warm-up
            seconds[with_timeline].append(_slowest(store, taken_s))
    if store.rank == 0:
        ratios = [on / off for off, on in zip(seconds[False], seconds[True], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        off_ms, on_ms = (statistics.median(seconds[on]) * 1e3 for on in (False, True))
        print(f"{what}: off {off_ms:.3f} ms, on {on_ms:.3f} ms, on/off {middle:.4f} (quartiles {low:.4f}, {high:.4f})")


def _slowest(store: kv.KVStore, taken_s: np.ndarray) -> float:
    if "slowest" not in store:
        store.init("slowest", taken_s)
    store.pushpull("slowest", taken_s, op="max")
    return float(taken_s[0])


if __name__ == "__main__":
    main()
