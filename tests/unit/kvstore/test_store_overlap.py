"""Arrays of one call that overlap: the result is that of the arrays as they were when the call began, in every mode."""

from __future__ import annotations

import numpy as np
import pytest
from on_workers import on
from store_modes import Mode

from mpikv import KVStore

SIZES = (10, 5000, 100_000)  # alone in a cache line, some partitions, several chunks
SHIFT = 7


@on(
    *(Mode("dist_sync", 2, part_bytes=4096), Mode("dist_sync", 2, memory="off", part_bytes=4096)),
    *(Mode("dist_sync", 2, 1, part_bytes=4096), Mode("dist_sync", 2, 2, part_bytes=4096)),
)
@pytest.mark.parametrize("own", [True, False], ids=["own arrays", "arrays of the store"])
@pytest.mark.parametrize("form", ["one array for two keys", "swapped", "shifted", "moved up", "moved down"])
def test_overlapping_arrays(store: KVStore, form: str, own: bool) -> None:
    for n in SIZES:
        keys = [f"a{n}", f"b{n}"]
        store.init(keys, [np.zeros(n, np.int64)] * 2)
        whole = np.zeros(2 * n, np.int64) if own else store.zeros(2 * n, "int64")
        x, y = whole[:n], whole[n:] if form in {"swapped", "one array for two keys"} else whole[SHIFT : SHIFT + n]
        if form == "moved down":
            x, y = y, x
        for _ in range(3):  # the third time the call is known
            whole[:] = np.arange(2 * n)
            sums = [x * 3, y * 3]
            whole *= store.rank + 1
            if form == "swapped":
                store.pushpull(keys, [x, y], out=[y, x])
                results = [y, x]
            elif form == "shifted":
                store.pushpull(keys, [x, y])
                results = []  # each has elements of the other
            elif form == "one array for two keys":
                store.pushpull(keys, [x, x])
                sums = sums[:1] * 2
                results = [x]
            else:
                store.pushpull(keys[0], x, out=y)
                sums[1] = np.zeros(n)
                results = [y]
            for found, expected in [*zip(results, sums, strict=False), *zip(store.pull(keys), sums, strict=True)]:
                np.testing.assert_array_equal(found, expected)
            store.barrier()
