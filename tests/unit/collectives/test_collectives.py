"""The ring, and what moves bytes, on thread ranks against NumPy: the whole grid of sizes, ranks and dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv.collectives import ring
from mpikv.collectives.blobs import gather, scatter
from mpikv.collectives.broadcast import broadcast
from mpikv.placement.keys import even_bounds, whole_bounds
from mpikv.testing.ranks import run_collective

RANKS = (1, 2, 3, 4, 5, 6, 7, 8)
SIZES = (0, 1, 2, 7, 64, 1001)
DTYPES = ("float32", "float64", "int8", "uint8", "int32", "int64")


def contribution(rank: int, n: int, dtype: str) -> np.ndarray:
    """Small whole numbers, so that every order of adding gives the same bits."""
    return (np.arange(n) % 5 + rank % 3).astype(dtype)


def check(p: int, n: int, dtype: str, bounds: tuple[int, ...]) -> None:
    expected = sum((contribution(rank, n, dtype).astype(np.int64) for rank in range(p)), np.zeros(n, np.int64))

    def steps(group):
        buf = contribution(group.rank, n, dtype)
        yield from ring.reduce_scatter(group, buf, bounds, 100)
        own = slice(bounds[group.rank], bounds[group.rank + 1])
        scattered = buf[own].copy()
        result = np.full(n, 99, dtype)
        result[own] = scattered
        yield from ring.allgather(group, result, bounds, 101)
        return scattered, result

    for rank, (scattered, result) in enumerate(run_collective(p, steps)):
        own = slice(bounds[rank], bounds[rank + 1])
        np.testing.assert_array_equal(scattered, expected[own].astype(dtype))
        np.testing.assert_array_equal(result, expected.astype(dtype))


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", SIZES)
def test_sum_of_all_sizes(p: int, n: int) -> None:
    for dtype in DTYPES if n == 7 else DTYPES[:1]:
        check(p, n, dtype, even_bounds(n, p))


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_one_owner_of_everything(p: int) -> None:
    for owner in range(p):
        check(p, 13, "float32", whole_bounds(13, p, owner))


def test_chunks_longer_than_several_segments() -> None:
    n = 3 * (1 << 18) + 5
    check(3, n, "float32", even_bounds(n, 3))


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_same_bits_on_every_rank_and_run(p: int) -> None:
    """Values whose sum depends on the order of adding."""
    bounds = even_bounds(501, p)
    parts = [np.random.default_rng(rank).standard_normal(501).astype(np.float32) * 10.0**rank for rank in range(p)]

    def steps(group):
        buf = parts[group.rank].copy()
        yield from ring.reduce_scatter(group, buf, bounds, 100)
        yield from ring.allgather(group, buf, bounds, 101)
        return buf.tobytes()

    assert len({bits for _ in range(5) for bits in run_collective(p, steps)}) == 1


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_broadcast_from_every_root(p: int, n: int) -> None:
    for root in range(p):

        def steps(group, root=root):
            buf = np.full(n, group.rank, np.int32)
            yield from broadcast(group, buf, root, 7)
            return buf

        for result in run_collective(p, steps):
            np.testing.assert_array_equal(result, np.full(n, root))


@pytest.mark.parametrize("p", [1, 2, 5])
def test_bytes_gathered_and_scattered(p: int) -> None:
    def steps(group):
        blobs = yield from gather(group, bytes([group.rank]) * group.rank * 3000, 0, 7)
        mine = yield from scatter(group, blobs[::-1] if group.rank == 0 else None, 0, 7)
        return blobs, mine

    for rank, (blobs, mine) in enumerate(run_collective(p, steps)):
        expected = [bytes([r]) * r * 3000 for r in range(p)]
        assert blobs == (expected if rank == 0 else [])
        assert mine == expected[p - 1 - rank]
