"""Buckets: which small arrays are sent in one buffer.

Keys that are pushed one after another are put into one bucket until it is full. The first bucket is small, so that the
first message is sent while most of a backward pass is still to come. An array as large as a bucket has one of its own.

A larger bucket means fewer messages, but each is sent later: on a link of 1 Gbit/s 4 MiB take 34 ms. What is least in
sum, of the time c that a bucket costs by itself and of the last bucket's time on a link of B bytes/s, has the square
root of c * B * (bytes of all) in a bucket. GPUs have faster links, and a bucket costs some 0.5 ms of Python there (an
estimate): 22 MB for ResNet-50 at 10 GB/s. PyTorch's DDP has 25 MiB.
The idea is that of Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_BYTES = 256 << 10
LIMIT_BYTES = 4 << 20
GPU_LIMIT_BYTES = 25 << 20


def plan(
    sizes_bytes: Sequence[int],
    kinds: Sequence[str],
    *,
    on_gpu: Sequence[bool] = (),
    limit_bytes: int | None = None,
) -> list[list[int]]:
    """Buckets as lists of positions, in the order in which they fill up. Every position is in exactly one.

    kinds: arrays of different kinds never share one. on_gpu: whether each array is in a GPU's memory, as all of a kind
    are. limit_bytes: of all buckets but the first.
    """
    done: list[list[int]] = []
    open_: dict[str, tuple[list[int], int]] = {}
    for i, (n_bytes, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        limit = limit_bytes or (GPU_LIMIT_BYTES if on_gpu and on_gpu[i] else LIMIT_BYTES)
        limit = limit if done else min(FIRST_BYTES, limit)
        if n_bytes >= limit:
            done.append([i])
            continue
        positions, filled = open_.pop(kind, ([], 0))
        if filled + n_bytes > limit and positions:
            done.append(positions)
            positions, filled = [], 0
        open_[kind] = ([*positions, i], filled + n_bytes)
    return done + [positions for positions, _ in open_.values()]
