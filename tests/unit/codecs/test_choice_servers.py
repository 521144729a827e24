"""Whether values travel to servers encoded or as they are: each worker by its own times; nothing pushed is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from choice_rounds import EACH, FIRST, SECOND, TWO_BITS, pushed

from mpikv import optimizers
from mpikv.codecs.compression import make
from mpikv.config import Config
from mpikv.testing.stores import spawn_stores


def with_servers(
    compression: Any,
    seconds: Callable[[int, bool], float],
    *,
    call: str,
    kind: str = "dist_sync",
    dtype: str = "float32",
) -> list[Any]:
    """Rounds on 2 workers and a server, on a host each: values, how each travelled, what is owed, stats.

    seconds: of a worker's rounds, as they are or not; it has begun each when it has pushed.
    """

    def body(store: Any) -> Any:
        store.init("w", np.zeros(67, dtype))
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0, wd=0.0))
        key = store.strategy._keys[store.session.infos["w"].id]
        begin, end, now = key.begin_round, key.end_round, [0.0]

        def ends(_: float) -> None:
            now[0] += seconds(store.rank, key.choice.uncompressed)
            end(now[0])

        key.begin_round, key.end_round = lambda total, _: begin(total, now[0]), ends
        found, plain = [], []
        for round_ in range(SECOND + 1):
            value = pushed(store.rank, round_).astype(dtype)
            plain.append(key.choice is not None and key.choice.uncompressed)
            if call == "pushpull":
                store.pushpull("w", value)
            else:
                store.push("w", value)
                store.pull("w", value)
            found.append(value)
        owed = np.zeros(67)
        for piece, state in key.encoded.states.items():
            owed[slice(*piece)] += state.get("residual", np.zeros(1))
        store.barrier()
        return np.array(found, np.float64), plain, owed, store.pull("w").astype(np.float64), store.stats()

    config = Config(timeout_s=20.0, servers_take="all")
    return spawn_stores(kind, 2, body, num_servers=1, hosts="abc", config=config, compression=make(compression))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("kind", "call"), [("dist_sync", "pushpull"), ("dist_sync", "push, pull"), ("dist_async", "push, pull")]
)
def test_with_servers_each_worker_chooses_for_its_own_link(kind: str, call: str, dtype: str) -> None:
    """The link of worker 0 is slow, that of worker 1 is fast. All that was pushed has arrived, or is owed."""
    found = with_servers(
        TWO_BITS, lambda worker, plain: (8.0, 1.0)[worker] if plain else 4.0, call=call, kind=kind, dtype=dtype
    )
    if kind == "dist_sync":
        assert np.array_equal(found[0][0], found[1][0])
    for worker, (_, travelled, _, _, stats) in enumerate(found):
        assert travelled[:FIRST] == [False] * EACH + [True] * EACH
        assert travelled[FIRST:-1] == [bool(worker)] * (SECOND - FIRST)
        row = stats["compressed_keys"]["w"]
        assert row["travels"] == ("encoded", "as it is")[worker]
        assert (row["encoded_s"], row["plain_s"], row["looks"]) == (4.0, (8.0, 1.0)[worker], 1)
    total = sum(pushed(worker, round_).astype(np.float64) for worker in range(2) for round_ in range(SECOND + 1))
    assert np.array_equal(-found[0][3] + found[0][2] + found[1][2], total)
    assert not found[1][2].any()


def test_with_servers_answers_come_as_they_are_in_rounds_as_they_are() -> None:
    """Each element so has all its digits; encoded ones are float16."""
    compression = {"type": "bf16", "pull": "fp16", "error_feedback": False}
    values, travelled, _, _, stats = with_servers(compression, lambda _, plain: 1.0 if plain else 2.0, call="pushpull")[
        0
    ]
    assert stats["compressed_keys"]["w"]["travels"] == "as it is"
    total = np.zeros(67)
    for round_, (value, plain) in enumerate(zip(values, travelled, strict=True)):
        total -= sum(pushed(worker, round_) for worker in range(2))
        assert np.array_equal(value, total if plain else total.astype(np.float16))


def test_with_servers_what_is_forced_is_never_measured() -> None:
    for _, travelled, _, _, stats in with_servers(TWO_BITS | {"force": True}, lambda *_: 1.0, call="pushpull"):
        assert not any(travelled)
        assert "compressed_keys" not in stats
        assert stats["encoded_from_bytes"] == (SECOND + 1) * 67 * 4
