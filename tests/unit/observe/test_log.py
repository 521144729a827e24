"""What stores decide is in the log: each decision once, with the rank and its host, and nothing in a step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from on_workers import full, on
from store_modes import Mode

from mpikv import ConfigError, RowSparse, kv
from mpikv.observe.log import LOGGER, print_from
from mpikv.placement import described

BIG = 1 << 10


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def lines(self, role: str, rank: int) -> list[str]:
        return [one.getMessage() for one in self.records if (one.role, one.rank) == (role, rank)]


@pytest.fixture
def log() -> Iterator[Kept]:
    kept, level = Kept(), LOGGER.level
    LOGGER.addHandler(kept)
    LOGGER.setLevel(logging.DEBUG)
    yield kept
    LOGGER.removeHandler(kept)
    print_from("")
    LOGGER.setLevel(level)


class Case(NamedTuple):
    """What a store of this mode says of itself and of a key. params: of compression, of which `compared` is said."""

    mode: Mode
    ranks: str
    memory: str
    key: str
    params: dict[str, Any] | None = None
    compared: str = ""


CODEC = '{"threshold": 0.5, "type": "2bit"}'
ONE_HOST, APART = "2 workers and no servers on 1 host", "2 workers and no servers on 2 hosts"
NO_MEMORY, NOT_SHARED = "not used: no host has several ranks", "not used: MPIKV_SHARED_MEMORY=off"


def sync(workers: int, servers: int = 0, hosts: str = "", **more: Any) -> Mode:
    return Mode("dist_sync", workers, servers, hosts=hosts, **more)


SHARED = "the workers share memory"
OVER_2, OVER_HOSTS = "over 2 workers on 1 host, since", "over 2 workers on 2 hosts, since"
HOSTED = "path hosted over 3 workers on 2 hosts, since the workers of each host share memory"
BYTES = f"in a round 256 B leave a host encoded, and 4.0 KiB as they are; codec {CODEC} travels encoded"
RING = "MPIKV_ALGORITHM=ring"
ALONE = "all of it on server 0 (rank 2 on localhost), since it is the only one; no codec"
CUT = "cut evenly over 2 servers, since it has 8 elements or more; no codec"
CASES = (
    Case(sync(2), ONE_HOST, "used", f"path direct {OVER_2} {SHARED}; no codec"),
    Case(sync(2, algorithm="ring"), ONE_HOST, f"not used: {RING}", f"path ring {OVER_2} {RING}; no codec"),
    Case(sync(3, hosts="aab"), "3 workers and no servers on 2 hosts", "used", f"{HOSTED}; no codec"),
    Case(
        *(sync(2, hosts="ab"), APART, NO_MEMORY, f"path owners {OVER_HOSTS} {BYTES}"),
        params={"type": "2bit"},
        compared=f"codec {CODEC} is used: a round takes",
    ),
    Case(sync(2, 1, memory="off"), "2 workers and 1 server on 1 host", NOT_SHARED, ALONE),
    Case(Mode("dist_async", 2, 2), "2 workers and 2 servers on 1 host", "used", CUT),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.key.partition(',')[0]}-{case.mode.workers}")
def test_each_decision_is_one_line_of_each_rank(case: Case, log: Kept) -> None:
    mode = case.mode

    def body(store: Any) -> None:
        if case.params:
            store.set_gradient_compression(case.params)
        store.init("w", full(0, BIG))
        if not mode.synchronous:
            store.set_optimizer("sgd")
        store.pushpull("w", full(1, BIG))
        store.barrier()
        before = len(log.records)
        for _ in range(4):
            store.pushpull("w", full(1, BIG))
        store.barrier()
        assert len(log.records) == before

    mode.run(body, link="10mbit,1ms")
    links = ["links between hosts MPIKV_LINK=10mbit,1ms: 10 Mbit/s, 1e+03 us"] * (len(set(mode.hosts)) > 1)
    of_store = [f"store {mode.name!r}: {case.ranks}", *links, f"shared memory {case.memory}"]
    optimizer = f"optimizer SGD updates all keys that have no other one: it goes to {mode.servers} servers"
    of_keys = [
        *(f"key 'w' (4.0 KiB float32): {text}" for text in (case.compared, case.key) if text),
        *([] if mode.synchronous else [optimizer]),
    ]
    for role, n in (("worker", mode.workers), ("server", mode.servers)):
        for rank in range(n):
            host = next(one.host for one in log.records if (one.role, one.rank) == (role, rank))
            assert host in [*mode.hosts, "localhost"]
            wanted = of_store + of_keys * (role == "worker")
            lines = [line.partition(" takes ")[0] + " takes" * (" takes " in line) for line in log.lines(role, rank)]
            assert lines == [f"{role} {rank} on {host}: {text}" for text in wanted]
    infos = Counter(one.role + str(one.rank) for one in log.records if one.levelno == logging.INFO)
    assert infos == {"worker0": len(of_store) + (not mode.synchronous)}


ROWS = RowSparse(np.arange(2), full(1, (2, 5)), (8, 5))
AN_OPTIMIZER = "optimizer SGD updates all keys that have no other one: it goes to the wor"
ON_GPU = "key 'w' (16 B float32 on a GPU): path host over 2 workers on 1 host, since that is the path of "
# A mode, its links, values of keys, parts of lines.
SAID: list[tuple[Mode, str, list[Any], list[str]]] = [
    (sync(2, hosts="ab"), "100mbit", [full(0, BIG)], [f"): codec {CODEC} is used: a round", AN_OPTIMIZER]),
    (sync(2, hosts="ab"), "1000tbit", [full(0, BIG)], [f"): codec {CODEC} is not used: a round", AN_OPTIMIZER]),
    (
        *(sync(2, memory="off"), "auto", [full(0, 3), ROWS]),
        [f"(12 B float32): path owners {OVER_2} it is short", "row-sparse, its rows are cut evenly over 2 workers"],
    ),
    (sync(2, device="host"), "auto", [full(0)], ["arrays on GPUs: host (not ", ON_GPU]),
]


@pytest.mark.parametrize(("mode", "link", "values", "said"), SAID)
def test_each_rank_says_it_once(mode: Mode, link: str, values: list[Any], said: list[str], log: Kept) -> None:
    def body(store: Any) -> None:
        if link != "auto":
            store.set_gradient_compression({"type": "2bit"})
        store.init(["w", "v"][: len(values)], values)
        store.set_optimizer("sgd")

    mode.run(body, link=link)
    for rank in range(2):
        lines = log.lines("worker", rank)
        assert [sum(text in line for line in lines) for text in said] == [1] * len(said), lines


def test_a_direct_call_that_is_declined_is_told_once(log: Kept) -> None:
    def body(store: Any) -> int:
        store.init("w", full(0))
        for _ in range(3):
            if store.rank == 0:
                store.pushpull("w", full(1))
            else:
                store.push("w", full(1))
                store.pull("w")
        return store.stats()["declined_calls"]

    assert Mode("dist_sync", 2).run(body) == [3, 0]
    told = "a direct call goes through the queues of its keys: not all workers came to the same call in time"
    assert [sum(told in line for line in log.lines("worker", rank)) for rank in range(2)] == [1, 0]


def test_a_program_formats_records_itself(log: Kept) -> None:
    with kv.create("local") as store:
        store.init("w", full(0))
    (record,) = log.records
    formatted = logging.Formatter("%(role)s %(rank)s %(levelname)s %(filename)s: %(message)s").format(record)
    assert formatted.startswith("worker 0 INFO kv.py: worker 0 on ")
    assert formatted.endswith(": store 'local' of one process: it sends nothing to others")


def test_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log: Kept) -> None:
    """Each line once, however many stores are made; nothing without MPIKV_LOG, warnings neither."""
    for level, n in (("", 0), ("Debug", 1), ("info", 1), ("warning", 0), ("", 0)):
        monkeypatch.setenv("MPIKV_LOG", level)
        kv.create("local").close()
        text = capsys.readouterr().err
        assert text.count("\n") == text.count("store 'local' of one process") == n, (level, text)
    assert text == ""
    LOGGER.removeHandler(log)
    monkeypatch.setattr(LOGGER, "propagate", False)  # as where a program has configured nothing
    LOGGER.warning("nobody listens")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("MPIKV_LOG", "loud")
    with pytest.raises(ConfigError, match="MPIKV_LOG='loud' is none of debug, info, warning"):
        kv.create("local")


@on(Mode("dist_sync", 2), Mode("dist_sync", 2, 1))
def test_without_who_listens_no_text_is_made(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise AssertionError("a text was made")

    monkeypatch.setattr(described, "line", fail)
    store.init("w", full(0))
    store.pushpull("w", full(1))
