"""Arrays of one call that overlap: the result is that of the arrays as they were when the call began, in every mode."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv import KVStore
from mpikv.config import Config
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

N = 5000  # some partitions and chunks


@pytest.mark.parametrize(("servers", "shared"), [(0, "auto"), (0, "off"), (1, "auto"), (2, "auto")])
@pytest.mark.parametrize("form", ["one array for two keys", "swapped", "shifted"])
def test_overlapping_arrays(form: str, servers: int, shared: str) -> None:
    def body(store: KVStore) -> None:
        store.init(["a", "b"], [np.zeros(N, np.int64)] * 2)
        memory = np.arange(2 * N, dtype=np.int64) * (store.rank + 1)
        x, y = (memory[:N], memory[1 : N + 1]) if form == "shifted" else (memory[:N], memory[N:])
        total = np.arange(2 * N, dtype=np.int64) * 3
        expected = total[:N], total[1 : N + 1] if form == "shifted" else total[N:]
        for _ in range(3):  # the third time the call is known
            memory[:] = np.arange(2 * N) * (store.rank + 1)
            if form == "swapped":
                store.pushpull(["a", "b"], [x, y], out=[y, x])
                np.testing.assert_array_equal(y, expected[0])
                np.testing.assert_array_equal(x, expected[1])
            elif form == "shifted":
                store.pushpull(["a", "b"], [x, y])
            else:
                store.pushpull(["a", "b"], [x, x])
                np.testing.assert_array_equal(x, expected[0])
            np.testing.assert_array_equal(store.pull("a"), expected[0])
            np.testing.assert_array_equal(store.pull("b"), expected[0 if form == "one array for two keys" else 1])
            store.barrier()

    config = Config(timeout_s=TEST_TIMEOUT_S, shared_memory=shared, partition_bytes=4096)
    spawn_stores("dist_sync", 2, body, num_servers=servers, config=config)
