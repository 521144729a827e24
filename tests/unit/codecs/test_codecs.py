"""A codec is how a push travels: through servers and back, by every path, with each kind of codec."""

from __future__ import annotations

import contextlib
from typing import Any

import codecs_of_tests
import numpy as np
import pytest
from store_modes import HYBRID, Mode, every_way, long_messages, mode_id

from mpikv import optimizers
from mpikv.codecs.compression import KeyCompression, make
from mpikv.strategies.client_key import INLINE_BYTES
from mpikv.testing.stores import spawn_stores

FLOAT32 = np.dtype(np.float32)
REVERSED = codecs_of_tests.Reversed.name  # has to be decoded before it is added


def small_numbers(n: int, worker: int = 0, round_: int = 0, dtype: Any = FLOAT32) -> np.ndarray:
    return ((np.arange(n) * 5 + worker + 3 * round_) % 7 - (3 if np.dtype(dtype).kind != "u" else 0)).astype(dtype)


PART_BYTES = 32
SIZES = (1, 5, 8, 9, 40, 67)  # float32: 8 make a partition
MODES = every_way(Mode("dist_sync", 1, 1), Mode("dist_sync", 3, 2), Mode("dist_async", 2, 0), Mode("dist_async", 3, 2))
MODES += (HYBRID[0], HYBRID[2])


def forced(codec: str) -> KeyCompression:
    """Used although all ranks are on one host."""
    return make({"type": codec, "force": True, **({"error_feedback": False} if codec == "fp16" else {})})


def run(mode: Mode, body: Any, codec: str | KeyCompression, **changes: Any) -> list[Any]:
    with long_messages() if mode.memory == "long" else contextlib.nullcontext():
        return spawn_stores(
            mode.name,
            mode.workers,
            body,
            num_servers=mode.servers,
            config=mode.config(**changes),
            compression=forced(codec) if isinstance(codec, str) else codec,
        )


@pytest.mark.parametrize("codec", ["none", "fp16", REVERSED])
@pytest.mark.parametrize("inline", [False, True], ids=["fetched", "inline"])
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_through_servers_and_back(mode: Mode, inline: bool, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and cut over the servers, in partitions and behind their headers, alone and as lists, blocking or not."""
    monkeypatch.setattr("mpikv.strategies.client_key.INLINE_BYTES", INLINE_BYTES if inline else 0)
    W, keys = mode.workers, [str(n) for n in SIZES]

    def body(store: Any) -> Any:
        store.set_optimizer(optimizers.create("test"))
        store.init(keys, [np.zeros(n, np.float32) for n in SIZES])
        mine = [[small_numbers(n, store.rank, round_) for n in SIZES] for round_ in range(3)]
        store.push(keys, mine[0])
        for key, value in zip(keys, mine[1], strict=True):
            store.pushpull(key, value)
        store.pushpull(keys, mine[2], [np.empty(n, np.float64) for n in SIZES])
        store.barrier()
        return [value.tolist() for value in store.pull(keys)]

    expected = [sum(small_numbers(n, w, r) for w in range(W) for r in range(3)).tolist() for n in SIZES]
    assert run(mode, body, codec, partition_bytes=4096 if inline else PART_BYTES) == [expected] * W


@pytest.mark.parametrize("codec", ["fp16", REVERSED])
def test_an_optimizer_that_needs_the_whole_value(codec: str) -> None:
    """The server decodes partitions into one array, and the key moves to one server when the optimizer is set."""

    def body(store: Any) -> Any:
        found = []
        store.init("w", np.linspace(-1, 1, 67).astype(np.float32))
        store.pushpull("w", small_numbers(67, store.rank))
        store.set_optimizer(optimizers.create("lamb", learning_rate=0.1))
        for round_ in range(3):
            value = small_numbers(67, store.rank, round_)
            store.pushpull("w", value)
            found.append(value.tobytes())
        return found

    mode = Mode("dist_sync", 2, 2)
    assert run(mode, body, codec, partition_bytes=PART_BYTES) == run(mode, body, "none", partition_bytes=PART_BYTES)
