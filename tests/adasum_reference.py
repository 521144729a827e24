"""Adasum as its paper writes it (arXiv:2006.02924), of whole vectors on one rank, in float64: the tests' reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def of_two(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    common, of_a, of_b = a @ b, a @ a, b @ b
    return (1 - common / (2 * of_a) if of_a else 1.0) * a + (1 - common / (2 * of_b) if of_b else 1.0) * b


def tree(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Of a power of two of vectors: those of the first half with those of the second."""
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    return of_two(tree(vectors[:half]), tree(vectors[half:]))


def adasum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    vectors = [array.astype(np.float64).reshape(-1) for array in arrays]
    core = 1
    while core * 2 <= len(vectors):
        core *= 2
    firsts = [of_two(vectors[i], vectors[core + i]) if core + i < len(vectors) else vectors[i] for i in range(core)]
    return tree(firsts).reshape(arrays[0].shape)


def random_vectors(workers: int, n: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    """A part in common and one of each worker, of different lengths."""
    random = np.random.default_rng([seed, n])
    common = random.standard_normal(n)
    return [((common + random.standard_normal(n)) * 2.0**i).astype(dtype) for i in range(workers)]


def close(found: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    """Within some roundings of the dtype, relative to the largest element: what unlike signs leave may be smaller."""
    assert (found.dtype, found.shape) == (arrays[0].dtype, arrays[0].shape)
    largest = max((np.abs(array).max() for array in arrays if array.size), default=0.0)
    np.testing.assert_allclose(found, adasum(arrays), rtol=0, atol=4 * np.finfo(found.dtype).eps * largest)
