"""More servers, or more large shards in one call, than a worker has tags raise clear errors, and nothing is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from store_modes import Mode

from mpikv.arrays.row_sparse import RowSparse
from mpikv.errors import UnsupportedError
from mpikv.strategies.client_key import INLINE_BYTES
from mpikv.testing import ranks
from mpikv.testing.ranks import RankError
from mpikv.transports import wire


@pytest.fixture(autouse=True)
def few_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ranks whose partners have failed are not waited for."""
    monkeypatch.setattr(wire, "PAYLOAD_TAGS", 4)
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)


def test_more_servers_than_tags() -> None:
    assert Mode("dist_sync", 1, 3).run(lambda store: store.num_workers) == [1]
    for mode in (Mode("dist_sync", 1, 4), Mode("dist_async", 4)):
        with pytest.raises(RankError, match="ConfigError: 4 servers: a worker can ask at most 3 at a time"):
            mode.run(lambda store: None, timeout_s=2)


def test_more_owners_of_rows_than_tags() -> None:
    def body(store: Any) -> None:
        store.init("dense", np.zeros(3))
        store.init("rows", RowSparse(np.zeros(0, int), np.zeros((0, 2)), (8, 2)))

    with pytest.raises(RankError, match="4 workers, all owners of key 'rows': a worker can ask at most 3"):
        Mode("dist_sync", 4).run(body)


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_more_large_shards_in_one_call_than_tags(memory: str) -> None:
    def body(store: Any) -> Any:
        keys = list(range(5))
        store.init(keys, [np.zeros(INLINE_BYTES // 4 + 1, np.float32)] * 4 + [np.zeros(3, np.float32)])
        values = [np.ones_like(value) for value in store.pull(keys[2:])]
        for call in (store.push, store.pushpull, store.pull):
            with pytest.raises(UnsupportedError, match=r"4 shards of more than 64 KiB: at most 3 .*fewer keys"):
                call(keys, *([] if call == store.pull else [[values[0]] * 4 + [values[-1]]]))
        store.pushpull(keys[2:], values)
        return [float(value[-1]) for value in values]

    mode = Mode("dist_sync", 2, 1, memory=memory)
    assert mode.run(body, bigarray_bound_elems=10**9, partition_bytes=1 << 30) == [[2.0] * 3] * 2
