"""`mpikv bench wire`: what one step of a network's gradients puts on the wire, and how long it takes, way by way.

One `pushpull` of all gradients, in one call: as it is; without bundles of short messages; in 16 bits; with each codec,
always encoded (`force`); as a row-sparse table of the same size of which each rank has some rows; beside MPI_Allreduce
for each array, and of all packed into one, and Gloo where PyTorch is installed on every rank.

Bytes and messages are those that `store.stats()` counts in one step, on the rank with most. Results are compared with
the exact sum, those of codecs that lose precision excepted. All take turns; the memory of each store is held meanwhile.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpikv import kv
from mpikv.arrays.as_numpy import HostArray
from mpikv.arrays.row_sparse import RowSparse
from mpikv.codecs import registry
from mpikv.commands.bench import gloo
from mpikv.commands.bench.counts import Counts, counts_of, most
from mpikv.commands.bench.job import Job
from mpikv.commands.bench.measure import Contender, Result, measure
from mpikv.commands.bench.pattern import EXACT, Pattern
from mpikv.commands.bench.raw import packed_contender, raw_contender
from mpikv.commands.bench.session import Session
from mpikv.commands.bench.stores import Way, store_contender
from mpikv.commands.models import shapes
from mpikv.commands.tables import Column, Table
from mpikv.config import Config

PLAIN = "uncompressed"
ROW_ELEMS = 64  # of the table's rows
HALVES = {"fp16": "float16", "bf16": "bfloat16"}  # codecs, and what their values are exact in


@dataclass(frozen=True)
class WireRow:
    """One way of exchanging. Counts are of one step, times in seconds, of the slowest rank; None: not known.

    n_bytes: of the gradients. of_plain: bytes_sent as a share of those of the uncompressed store. ratio: time, in the
    same way. wrong: how many results were not the exact sum; checked: whether it is expected.
    """

    what: str
    n_bytes: int
    bytes_sent: int | None
    of_plain: float | None
    messages: int | None
    iterations: int
    median_s: float
    p95_s: float
    ratio: float
    checked: bool
    wrong: int


TABLE = Table(
    Column("what", 24, left=True),
    Column("sent, bytes", 12),
    Column("% of uncompr.", 13),
    Column("messages", 8),
    Column("median ms", 10),
    Column("p95 ms", 9),
    Column("x time", 7),
)


def run(session: Session) -> None:
    """Measure what the options ask for. Collective, blocks."""
    job, options = session.job, session.options
    if len(job.host_names) == 1 and not job.config.fake_hosts:
        session.note("all ranks are on one host: values go through shared memory, and nothing is sent or compressed")
    found = tuple(reversed(shapes(options.model)))
    n_bytes = 4 * sum(math.prod(shape) for shape in found)
    session.note(f"{options.model}: {len(found)} arrays of float32, {n_bytes} bytes; one step of each rank")
    with gloo.process_group(job, wanted=_has_torch(job)):
        made = contenders(session, found)
        session.progress.update(what=options.model)
        results = measure(job.comm, made, session.plan)
        counts = [contender.counts() for contender in made]
        for contender in made:
            contender.close()
    session.rows += rows_of(results, counts, n_bytes, unchecked(job.size))
    session.titles(TABLE)
    session.lines(line, session.rows)
    session.progress.update(1)


def _has_torch(job: Job) -> bool:
    """Whether every rank has PyTorch. Collective."""
    return all(job.comm.allgather(importlib.util.find_spec("torch") is not None))


def contenders(session: Session, found: tuple[tuple[int, ...], ...]) -> list[Contender]:
    """Make all ways. Collective."""
    job, single = session.job, np.dtype(np.float32)
    pattern, config = Pattern(single, job.rank, job.size), job.config.with_(num_servers=0)
    arrays: list[HostArray] = [np.zeros(shape, single) for shape in found]
    plain = Way(PLAIN, found, single, config)
    made = [
        store_contender(job, pattern, plain, arrays),
        store_contender(job, pattern, replace(plain, what="no bundles", config=config.with_(bucket_bytes=0)), arrays),
    ]
    for name in HALVES.values():
        half: np.dtype[Any] = np.dtype(name)
        way = replace(plain, what=f"{name} keys", dtype=half)
        made.append(store_contender(job, Pattern(half, job.rank, job.size), way))
    lossy = unchecked(job.size)
    for name in codecs_of(session.options.codecs):
        way = replace(plain, what=f"codec {name}", compression={"type": name, "force": True})
        contender = store_contender(job, pattern, way, arrays)
        made.append(replace(contender, check=lambda: True) if way.what in lossy else contender)
    n_elems = sum(array.size for array in arrays)
    n_rows = session.options.rows or max(1, n_elems // ROW_ELEMS)
    made.append(sparse_contender(job, config, (n_rows, max(1, n_elems // n_rows)), session.options.density))
    made += [raw_contender(job, pattern, arrays), packed_contender(job, pattern, arrays)]
    if _has_torch(job):
        made.append(gloo.contender(job, pattern, arrays))
    return made


def codecs_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return those to measure: of all there are, `none` is what the first row is."""
    return tuple(names) or tuple(name for name in registry.names() if name != "none")


def unchecked(size: int) -> frozenset[str]:
    """Return the rows whose results are not the exact sum of `size` ranks' patterns: those in 16 bits may be."""
    most_of_one = 16  # a little more than a value of a `Pattern`
    exact = {name for name, dtype in HALVES.items() if most_of_one * size <= EXACT[dtype]} | {"none"}
    return frozenset(f"codec {name}" for name in registry.names() if name not in exact)


def sparse_contender(job: Job, config: Config, shape: tuple[int, int], density: float) -> Contender:
    """Make the contender that pushes some rows of a table and pulls the same rows. Collective.

    density: of the rows that each rank has, at least one, others on each rank.
    """
    n_rows = max(1, round(density * shape[0]))
    ids = [np.sort(np.random.default_rng(rank).choice(shape[0], n_rows, replace=False)) for rank in range(job.size)]
    mine = ids[job.rank]
    rows = RowSparse(mine, np.ones((n_rows, shape[1]), np.float32), shape)
    expected = sum(np.isin(mine, other).astype(np.float32) for other in ids)
    store = kv.create("dist_sync", comm=job.comm, config=config)
    store.init("table", RowSparse.zeros(shape, np.float32))
    pulled: list[Any] = [None]

    def step() -> None:
        store.push("table", rows)
        pulled[0] = store.row_sparse_pull("table", row_ids=mine)

    def check() -> bool:
        return bool(np.array_equal(pulled[0].values, np.broadcast_to(np.reshape(expected, (-1, 1)), rows.values.shape)))

    def counts() -> Counts:
        job.comm.Barrier()
        before = store.stats()
        step()
        job.comm.Barrier()
        return most(job.comm, counts_of(before, store.stats()))

    return Contender(f"rows, {100 * density:g} %", lambda: None, step, check, store.close, counts)


def rows_of(
    results: Sequence[Result], counts: Sequence[Counts], n_bytes: int, unchecked_: frozenset[str]
) -> list[WireRow]:
    """Return the rows; the first result is that of the uncompressed store."""
    plain_s, plain_bytes = results[0].summary.median_s, counts[0].bytes_sent
    return [
        WireRow(
            what=result.what,
            n_bytes=n_bytes,
            bytes_sent=one.bytes_sent,
            of_plain=one.bytes_sent / plain_bytes if one.bytes_sent is not None and plain_bytes else None,
            messages=one.messages,
            iterations=result.summary.iterations,
            median_s=result.summary.median_s,
            p95_s=result.summary.p95_s,
            ratio=result.summary.median_s / plain_s,
            checked=result.what not in unchecked_,
            wrong=result.wrong,
        )
        for result, one in zip(results, counts, strict=True)
    ]


def line(row: WireRow) -> str:
    """Return a row of the table."""
    return TABLE.line(
        row.what,
        "-" if row.bytes_sent is None else row.bytes_sent,
        "-" if row.of_plain is None else f"{100 * row.of_plain:.1f}",
        "-" if row.messages is None else row.messages,
        f"{1e3 * row.median_s:.2f}",
        f"{1e3 * row.p95_s:.2f}",
        f"{row.ratio:.2f}",
        end=f"  WRONG {row.wrong}x" if row.wrong else "",
    )
