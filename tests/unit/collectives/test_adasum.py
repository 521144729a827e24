"""Adasum on thread ranks against the formula of its paper, on whole vectors."""

from __future__ import annotations

import numpy as np
import pytest
from adasum_reference import adasum as reference
from adasum_reference import close, random_vectors

from mpikv.collectives import adasum
from mpikv.testing.ranks import run_collective

RANKS = (1, 2, 3, 4, 5, 6, 7, 8)
SIZES = (0, 1, 2, 3, 7, 64, 1001, 2 * adasum.BLOCK_ELEMS + 5)
EACH_DTYPE = pytest.mark.parametrize("dtype", ["float32", "float64"])


def run(arrays: list[np.ndarray]) -> list[tuple[np.ndarray, int, int]]:
    """Of each rank: the result, which is the same bits on every rank, and the messages and bytes that it has sent."""

    def steps(group):
        buf, ledger = arrays[group.rank].copy(), group.transport.ledger
        yield from adasum.allreduce(group, buf, 100)
        return buf, ledger.messages, ledger.bytes

    found = run_collective(len(arrays), steps)
    assert len({buf.tobytes() for buf, _, _ in found}) == 1
    return found


def combined(arrays: list[np.ndarray]) -> np.ndarray:
    return run(arrays)[0][0]


@EACH_DTYPE
@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", SIZES)
def test_the_formula(p: int, n: int, dtype: str) -> None:
    vectors = random_vectors(p, n, dtype)
    close(combined(vectors), vectors)


@EACH_DTYPE
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
    assert combined(vectors).tolist() == reference(vectors).tolist()
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
    for rank, (_, messages, n_bytes) in enumerate(run(random_vectors(p, n, "float32"))):
        if rank >= core:
            assert (messages, n_bytes) == (1, 4 * n)
            continue
        folded = rank + core < p
        assert messages == 2 * steps + products + folded
        assert n_bytes == 2 * 4 * n * (core - 1) // core + 24 * products + 4 * n * folded
