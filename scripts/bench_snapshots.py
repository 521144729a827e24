"""What a snapshot costs a training of ResNet-18 on the CPU, by turns.

    MPIKV_SNAPSHOT_DIR=$(mktemp -d) MPIKV_SNAPSHOT_S=1e8 mpirun -n 2 python scripts/bench_snapshots.py

Blocks of steps with and without a snapshot at their beginning take turns; a block is long enough for the file to be
written in it. `cost` is how much longer those with one take, in the median, on the way of the training and by the
thread that writes, and which part of a run that is which takes one every 30 s.
"""

from __future__ import annotations

import statistics
import time

import torch

import mpikv
from mpikv import kv
from mpikv.commands.bench import torch_models

STEPS, BLOCKS, EVERY_S = 5, 16, 30


def main() -> None:
    """Train, and print the cost at worker 0."""
    torch.set_num_threads(1)
    with kv.create("dist_sync") as store:
        net = torch_models.make("resnet18", 224, seed=1)
        images, labels = torch_models.batch("resnet18", 224, 8, seed=store.rank)
        trainer = mpikv.Trainer(net, "sgd", {"learning_rate": 0.01, "momentum": 0.9}, store)
        snapshots = trainer._snapshots  # which takes none by itself, so rarely
        assert snapshots is not None, "set MPIKV_SNAPSHOT_DIR"
        took_s: tuple[list[float], list[float]] = [], []
        for block in range(2 * BLOCKS + 2):
            takes = (block + block // 2) % 2  # a, b, b, a, ...
            store.barrier()
            begun_s = time.perf_counter()
            if takes:
                snapshots.take(trainer.steps)
            for _ in range(STEPS):
                trainer.zero_grad()
                torch.nn.functional.cross_entropy(net(images), labels).backward()
                trainer.step()
            store.barrier()
            if block > 1:
                took_s[takes].append(time.perf_counter() - begun_s)
        if store.rank == 0:
            plain_s, cost_s = statistics.median(took_s[0]), statistics.median(took_s[1]) - statistics.median(took_s[0])
            print(f"{STEPS} steps: {plain_s:.3f} s; cost of a snapshot: {cost_s:.3f} s, "
                  f"{100 * cost_s / EVERY_S:.2f} % of a run with one every {EVERY_S} s")  # fmt: skip


if __name__ == "__main__":
    main()
