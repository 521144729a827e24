"""powersgd with the rows of a key: a gradient that has its rank in the key's shape arrives, however it is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from on_workers import on
from store_modes import Mode

from mpikv import optimizers
from mpikv.codecs.compression import make, wire_of
from mpikv.config import Config
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.owners import as_announced, place_at_owners

RANK, F32 = 2, np.dtype(np.float32)


def gradient(shape: tuple[int, ...], round_: int) -> np.ndarray:
    """Of whole numbers, and of that rank as a matrix of rows; the same on all workers."""
    numbers = np.random.default_rng(round_)
    left, right = (numbers.integers(-4, 5, n) for n in ((shape[0], RANK), (RANK, int(np.prod(shape[1:])))))
    return (left @ right).reshape(shape).astype(F32)


def mode_of(workers: int, servers: int) -> Mode:
    return Mode("dist_sync", workers, servers, hosts="abcdefgh"[: workers + servers], part_bytes=1200)


OPTIONS = {"compression": make({"type": "powersgd", "rank": RANK, "force": True}), "bigarray_bound_elems": 100}


@pytest.mark.parametrize("shape", [(64, 48), (30, 7, 5, 2), (5, 200)])
@on(mode_of(2, 0), mode_of(3, 0), mode_of(2, 1), mode_of(3, 2), **OPTIONS)
@pytest.mark.parametrize("optimizer", [False, True])
def test_it_arrives(store: Any, W: int, shape: tuple[int, ...], optimizer: bool) -> None:
    """A few rows of it, too, where owners or partitions have no more; nothing is owed then."""
    store.init(["w", "b"], [np.zeros(shape, F32), np.zeros(5, F32)])
    if optimizer:
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0))
    expected = np.zeros(shape)
    for round_ in range(3):
        store.pushpull(["w", "b"], [grad := gradient(shape, round_), np.full(5, round_, F32)])
        total = W * gradient(shape, round_).astype(np.float64)
        expected = expected - total if optimizer else total
        # Of the nearly square matrix more than nine tenths would be left over.
        np.testing.assert_allclose(grad, expected, rtol=0, atol=2.0**-16 * np.linalg.norm(total))
    assert store.stats()["encoded_bytes"] < 3 * W * 4 * np.prod(shape)


@pytest.mark.parametrize("servers", [0, 1, 3])
@pytest.mark.parametrize("shape", [(100, 7), (3, 1000), (64, 3, 3, 3)])
def test_rows_are_not_cut(servers: int, shape: tuple[int, ...]) -> None:
    row = int(np.prod(shape[1:]))
    codec = make({"type": "powersgd", "force": True}).for_shape(shape)
    info = KeyInfo("w", 0, shape, F32, codec.text)
    hosts = tuple("abcdefgh"[: 4 + servers])
    config = Config(bigarray_bound_elems=10, partition_bytes=1 << 11)
    members = Members(hosts, (0, 1, 2, 3), tuple(range(4, 4 + servers)), config=config)
    wire = wire_of(info)
    found = place_at_owners(members, info, wire, updated=True)
    assert all(bound % row == 0 for bound in found.bounds)
    assert found.partition_elems % row == 0
    assert as_announced(members, info, found.announced(), wire) == found


@pytest.mark.parametrize("shape", [(1, 1 << 20), (2, 1 << 19), (1 << 20, 1)])
@pytest.mark.parametrize("servers", [0, 2])
def test_few_long_rows_are_cut_as_without_a_shape(shape: tuple[int, ...], servers: int) -> None:
    """In their own shape nothing would be saved, and one owner would have all in one message."""
    members = Members(tuple("abcdef"[: 4 + servers]), (0, 1, 2, 3), tuple(range(4, 4 + servers)))
    placements = []
    for one in (shape, (1 << 20,)):
        info = KeyInfo("w", 0, one, F32, make({"type": "powersgd", "force": True}).for_shape(one).text)
        placements.append(place_at_owners(members, info, wire_of(info), updated=True))
    assert placements[0] == placements[1]
    assert len(placements[0].shards) == (servers or 4)
