"""The ring, what moves bytes, and adasum, on thread ranks against NumPy: the whole grid of sizes, ranks and dtypes."""

from __future__ import annotations

import numpy as np
import pytest
from adasum_reference import adasum as adasum_of
from adasum_reference import close, random_vectors

from mpikv.collectives import adasum, ring
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


def test_one_owner_of_everything_and_chunks_of_several_segments() -> None:
    for p in (1, 2, 3, 5):
        for owner in range(p):
            check(p, 13, "float32", whole_bounds(13, p, owner))
    check(3, n := 3 * (1 << 18) + 5, "float32", even_bounds(n, 3))


@pytest.mark.parametrize("p", [2, 5])
def test_same_bits_on_every_rank_and_run(p: int) -> None:
    """Values whose sum depends on the order of adding."""
    bounds, parts = even_bounds(501, p), random_vectors(p, 501, "float32")

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


# ---- adasum


def combined_by_each(arrays: list[np.ndarray]) -> list[tuple[np.ndarray, int, int]]:
    """Of each rank: the result, which is the same bits on every rank, and the messages and bytes that it has sent."""

    def steps(group):
        buf, ledger = arrays[group.rank].copy(), group.transport.ledger
        yield from adasum.allreduce(group, buf, 100)
        return buf, ledger.messages, ledger.bytes

    found = run_collective(len(arrays), steps)
    assert len({buf.tobytes() for buf, _, _ in found}) == 1
    return found


def combined(arrays: list[np.ndarray]) -> np.ndarray:
    return combined_by_each(arrays)[0][0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 64, 1001, 2 * adasum.BLOCK_ELEMS + 5])
def test_adasum_is_the_formula_of_its_paper(p: int, n: int, dtype: str) -> None:
    vectors = random_vectors(p, n, dtype)
    close(combined(vectors), vectors)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("p", RANKS)
def test_orthogonal_vectors_are_added(p: int, dtype: str) -> None:
    vectors = [np.zeros(3 * p, dtype) for _ in range(p)]
    for rank, vector in enumerate(vectors):
        vector[rank::p] = (rank + 1, -7, 0.1)
    assert combined(vectors).tobytes() == sum(vectors[1:], vectors[0]).tobytes()


@pytest.mark.parametrize("p", RANKS)
def test_parallel_vectors_of_two_lengths(p: int) -> None:
    """The mean of two, as of equal ones, and exact in binary; one of several that are zero."""
    vector = np.arange(1, 20, dtype=np.float64)
    vectors = [vector * 2.0 ** (rank % 2) for rank in range(p)]
    assert combined(vectors).tolist() == adasum_of(vectors).tolist()
    if p == 2:
        assert combined(vectors).tolist() == (vector * 1.5).tolist()
    assert combined([vector] * p).tobytes() == vector.tobytes()
    for at in range(p):  # zeros change nothing
        assert combined([vector * (rank == at) for rank in range(p)]).tobytes() == vector.tobytes()


@pytest.mark.parametrize("p", RANKS[1:])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_all_of_it_nan(p: int, bad: float) -> None:
    for at in range(p):
        for others in (1.0, 0.0):
            vectors = [np.full(9, others, np.float32) for _ in range(p)]
            vectors[at][4] = bad
            assert np.isnan(combined(vectors)).all()


def test_short_and_long_vectors_of_float32() -> None:
    """Products are float64: squares of float32 neither overflow nor vanish there."""
    for scale in (1e30, 1e-30):
        vectors = [(one * scale).astype(np.float32) for one in random_vectors(4, 50, "float64")]
        close(combined(vectors), vectors)
    assert np.isnan(combined([np.full(3, 1e200)] * 2)).all()  # as the file says of float64


@pytest.mark.parametrize("p", RANKS)
def test_messages_and_bytes(p: int) -> None:
    n, steps = 64, p.bit_length() - 1
    core, products = 1 << steps, (steps + 1) * steps // 2
    for rank, (_, messages, n_bytes) in enumerate(combined_by_each(random_vectors(p, n, "float32"))):
        if rank >= core:
            assert (messages, n_bytes) == (1, 4 * n)
            continue
        folded = rank + core < p
        assert messages == 2 * steps + products + folded
        assert n_bytes == 2 * 4 * n * (core - 1) // core + 24 * products + 4 * n * folded
