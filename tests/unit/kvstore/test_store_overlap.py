"""Arrays of one call that overlap: the result is that of the arrays as they were when the call began, in every mode."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv import KVStore
from mpikv.config import Config
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

SIZES = (10, 5000, 100_000)  # alone in a cache line, some partitions, several chunks
SHIFT = 7


@pytest.mark.parametrize(("servers", "memory"), [(0, "auto"), (0, "off"), (1, "auto"), (2, "auto")])
@pytest.mark.parametrize("own", [True, False], ids=["own arrays", "arrays of the store"])
@pytest.mark.parametrize("form", ["one array for two keys", "swapped", "shifted", "moved up", "moved down"])
def test_overlapping_arrays(form: str, own: bool, servers: int, memory: str) -> None:
    def body(store: KVStore) -> None:
        for n in SIZES:
            keys = [f"a{n}", f"b{n}"]
            store.init(keys, [np.zeros(n, np.int64)] * 2)
            whole = np.zeros(2 * n, np.int64) if own else store.zeros(2 * n, "int64")
            numbers = np.arange(2 * n)
            x, y = (
                slice(0, n),
                slice(n, 2 * n) if form in {"swapped", "one array for two keys"} else slice(SHIFT, SHIFT + n),
            )
            if form == "moved down":
                x, y = y, x
            for _ in range(3):  # the third time the call is known
                whole[:] = numbers * (store.rank + 1)
                sums = numbers[x] * 3, numbers[y] * 3
                if form == "swapped":
                    store.pushpull(keys, [whole[x], whole[y]], out=[whole[y], whole[x]])
                    np.testing.assert_array_equal(whole[y], sums[0])
                    np.testing.assert_array_equal(whole[x], sums[1])
                elif form == "shifted":
                    store.pushpull(keys, [whole[x], whole[y]])
                elif form == "one array for two keys":
                    store.pushpull(keys, [whole[x], whole[x]])
                    sums = sums[0], sums[0]
                    np.testing.assert_array_equal(whole[x], sums[0])
                else:
                    store.pushpull(keys[0], whole[x], out=whole[y])
                    np.testing.assert_array_equal(whole[y], sums[0])
                    sums = sums[0], np.zeros(n)
                for key, expected in zip(keys, sums, strict=True):
                    np.testing.assert_array_equal(store.pull(key), expected)
                store.barrier()

    config = Config(timeout_s=TEST_TIMEOUT_S, shared_memory=memory, partition_bytes=4096)
    spawn_stores("dist_sync", 2, body, num_servers=servers, config=config)
