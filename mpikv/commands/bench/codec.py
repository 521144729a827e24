"""`mpikv bench codec`: how fast each codec encodes, decodes and adds on one core, beside memcpy and a sum.

Bandwidths are of the values, not of what travels of them. They are the best of many iterations: other work on the
machine can only make them worse. memcpy and `a += b` of the same values are measured in between, for what the memory
allows in the same minutes. A codec that is not exact is measured as the registry makes it, with error feedback around
it, and without: the row whose name ends with "alone".

Before that, of a few values, what is encoded must have the length that was agreed on, and `add` must have the bits of
`decode` and a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.codecs import ErrorFeedback, registry
from mpikv.codecs.base import Codec
from mpikv.commands.bench.measure import Contender
from mpikv.commands.bench.report import BenchTable, Text
from mpikv.commands.bench.session import BenchRun
from mpikv.commands.bench.sizes import short

COPY, SUM = "memcpy", "a += b"
SHORT_ELEMS = (1 << 16) + 3  # of the check


def _rate(name: str) -> Text:
    return lambda row: f"{row['n_bytes'] / row[name] / 1e9:.2f}"


TABLE = BenchTable(
    ("bytes", 9, lambda row: short(row["n_bytes"])),
    ("codec", 16, lambda row: row["what"]),
    ("on wire/value", 13, lambda row: f"{row['wire_bytes'] / max(row['n_elems'], 1):.3f}"),
    ("smaller by", 10, lambda row: f"{row['n_bytes'] / max(row['wire_bytes'], 1):.1f}"),
    ("encode GB/s", 11, _rate("encode_s")),
    ("decode", 8, _rate("decode_s")),
    ("add", 8, _rate("add_s")),
    (COPY, 8, _rate("copy_s")),
    (SUM, 8, _rate("sum_s")),
    left=("codec",),
)


def run(session: BenchRun) -> None:
    """Measure what the options ask for. Collective; each rank measures by itself, and the slowest counts."""
    session.note("GB/s of values, of the slowest rank, best of all iterations")
    session.titles(TABLE)
    for name in session.options.codecs or registry.names():
        session.progress.update(what=name)
        session.add(TABLE, [_one(session, what, codec) for what, codec in variants(name)])


def variants(name: str) -> Iterator[tuple[str, Codec]]:
    """Yield a codec of this name as a user gets it, and without the error feedback around it."""
    codec = registry.create(name)
    yield name, codec
    if isinstance(codec, ErrorFeedback):
        yield f"{name} alone", codec.codec


def _one(session: BenchRun, what: str, codec: Codec) -> dict[str, Any]:
    """Measure one codec. Collective."""
    job, dtype = session.job, session.dtype
    wrong = job.comm.allreduce(int(not is_right(codec, dtype)))
    n_elems = session.options.bytes // dtype.itemsize
    values = np.random.default_rng(job.rank).standard_normal(n_elems, np.float32).astype(dtype)
    state, out = codec.init(n_elems), np.zeros(n_elems, sum_dtype(dtype))
    other = np.zeros_like(out)
    data = codec.encode(values, state)
    calls: dict[str, Any] = {
        "encode": lambda: codec.encode(values, state),
        "decode": lambda: codec.decode(data, out),
        "add": lambda: codec.add(data, out),
        COPY: lambda: np.copyto(other, out),
        SUM: lambda: np.add(other, out, out=other),
    }

    def prepare() -> None:
        out.fill(0)  # so that sums do not grow beyond what a float holds

    results = session.measure([Contender(name, call, prepare) for name, call in calls.items()])
    best_s = {result.what: result.min_s for result in results}
    return {
        "what": what,
        "codec": repr(codec),
        "n_elems": n_elems,
        "n_bytes": values.nbytes,
        "wire_bytes": codec.wire_bytes(n_elems, dtype),
        "iterations": results[0].iterations,
        "encode_s": best_s["encode"],
        "decode_s": best_s["decode"],
        "add_s": best_s["add"],
        "copy_s": best_s[COPY],
        "sum_s": best_s[SUM],
        "wrong": wrong,
    }


def is_right(codec: Codec, dtype: np.dtype[Any]) -> bool:
    """Whether lengths are as agreed on, and sums those of what is decoded."""
    generator = np.random.default_rng(0)
    values, out = (generator.standard_normal(SHORT_ELEMS).astype(kind) for kind in (dtype, sum_dtype(dtype)))
    data, decoded = codec.encode(values, codec.init(SHORT_ELEMS)), np.empty_like(out)
    codec.decode(data, decoded)
    expected = out + decoded
    codec.add(data, out)
    return data.nbytes == codec.wire_bytes(SHORT_ELEMS, dtype) and out.tobytes() == expected.tobytes()
