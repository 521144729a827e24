"""`mpikv bench wire`: what one step of a network's gradients sends, and how long it takes, in several forms.

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
from dataclasses import replace
from typing import Any

import numpy as np

from mpikv import kv
from mpikv.arrays.row_sparse import RowSparse
from mpikv.codecs import registry
from mpikv.commands.bench import gloo
from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.pattern import EXACT, Pattern
from mpikv.commands.bench.raw import packed_contender, raw_contender
from mpikv.commands.bench.report import BenchTable, known, milliseconds
from mpikv.commands.bench.session import BenchRun
from mpikv.commands.bench.stores import StoreUse, counted, store_contender
from mpikv.commands.models import shapes
from mpikv.config import Config

PLAIN = "uncompressed"
ROW_ELEMS, DENSITY = 64, 0.01  # of the table's rows; how many of them each rank has
HALVES = {"fp16": "float16", "bf16": "bfloat16"}  # codecs, and what their values are exact in
MOST_OF_ONE = 16  # a little more than a value of a `Pattern`

TABLE = BenchTable(
    ("what", 24, lambda row: row["what"]),
    ("sent, bytes", 12, known("bytes_sent")),
    ("% of uncompr.", 13, known("of_plain", lambda share: f"{100 * share:.1f}")),
    ("messages", 8, known("messages")),
    ("median ms", 10, milliseconds("median_s")),
    ("p95 ms", 9, milliseconds("p95_s")),
    ("x time", 7, lambda row: f"{row['ratio']:.2f}"),
)


def run(session: BenchRun) -> None:
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
        results = session.measure(made)
        counts = [{"bytes_sent": None, "messages": None, **contender.counts()} for contender in made]
        for contender in made:
            contender.close()
    plain_s, plain_bytes = results[0].median_s, counts[0]["bytes_sent"]
    lossy = unchecked(job.size)
    session.titles(TABLE)
    rows = [
        {
            **result._asdict(),
            "n_bytes": n_bytes,
            "bytes_sent": sent["bytes_sent"],
            "messages": sent["messages"],
            "of_plain": sent["bytes_sent"] / plain_bytes if sent["bytes_sent"] is not None and plain_bytes else None,
            "ratio": result.median_s / plain_s,
            "checked": result.what not in lossy,
        }
        for result, sent in zip(results, counts, strict=True)
    ]
    session.add(TABLE, rows)


def _has_torch(job: BenchJob) -> bool:
    """Whether every rank has PyTorch. Collective."""
    return all(job.comm.allgather(importlib.util.find_spec("torch") is not None))


def contenders(session: BenchRun, found: tuple[tuple[int, ...], ...]) -> list[Contender]:
    """Make all forms. Collective."""
    job, single = session.job, np.dtype(np.float32)
    pattern, config = Pattern(single, job.rank, job.size), job.config.with_(num_servers=0)
    arrays = [pattern.zeros(shape) for shape in found]
    plain = StoreUse(PLAIN, found, single, config)
    made = [
        store_contender(job, pattern, plain, arrays),
        store_contender(job, pattern, replace(plain, what="no bundles", config=config.with_(bucket_bytes=0)), arrays),
    ]
    for name in HALVES.values():
        half: np.dtype[Any] = np.dtype(name)
        use = replace(plain, what=f"{name} keys", dtype=half)
        made.append(store_contender(job, Pattern(half, job.rank, job.size), use))
    lossy = unchecked(job.size)
    for name in codecs_of(session.options.codecs):
        use = replace(plain, what=f"codec {name}", compression={"type": name, "force": True})
        contender = store_contender(job, pattern, use, arrays)
        made.append(replace(contender, check=lambda: True) if use.what in lossy else contender)
    made.append(sparse_contender(job, config, sum(array.size for array in arrays)))
    made += [raw_contender(job, pattern, arrays), packed_contender(job, pattern, arrays)]
    if _has_torch(job):
        made.append(gloo.contender(job, pattern, arrays))
    return made


def codecs_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return those to measure: of all there are, `none` is what the first row is."""
    return tuple(names) or tuple(name for name in registry.names() if name != "none")


def unchecked(size: int) -> frozenset[str]:
    """Return the rows whose results are not the exact sum of `size` ranks' patterns: those in 16 bits may be."""
    exact = {name for name, dtype in HALVES.items() if MOST_OF_ONE * size <= EXACT[dtype]} | {"none"}
    return frozenset(f"codec {name}" for name in registry.names() if name not in exact)


def sparse_contender(job: BenchJob, config: Config, n_elems: int) -> Contender:
    """Make the contender that pushes some rows of a table of so many values and pulls the same rows. Collective.

    Each rank has others, at least one.
    """
    table_rows = max(1, n_elems // ROW_ELEMS)
    n_rows, shape = max(1, round(DENSITY * table_rows)), (table_rows, min(n_elems, ROW_ELEMS))
    ids = [np.sort(np.random.default_rng(rank).choice(table_rows, n_rows, replace=False)) for rank in range(job.size)]
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

    what = f"rows, {100 * DENSITY:g} %"
    return Contender(what, step, check=check, close=store.close, counts=lambda: counted(job, store, step))
