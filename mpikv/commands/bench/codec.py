"""`mpikv bench codec`: how fast each codec encodes, decodes and adds on one core, beside memcpy and a sum.

Bandwidths are of the values, not of what travels of them. They are the best of many iterations: other work on the
machine can only make them worse. memcpy and `a += b` of the same values are measured in between, for what the memory
allows in the same minutes. A codec that is not exact is measured as the registry makes it, with error feedback around
it, and without: the row whose name ends with "alone".

Before that, of a short piece, what is encoded must have the length that was agreed on, and `add` must have the bits of
`decode` and a sum, unless --no-check is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.codecs import ErrorFeedback, registry
from mpikv.codecs.base import Codec
from mpikv.commands.bench.measure import Contender, measure
from mpikv.commands.bench.session import Session
from mpikv.commands.bench.sizes import short
from mpikv.commands.tables import Column, Table

COPY, SUM = "memcpy", "a += b"
SHORT_ELEMS = (1 << 16) + 3  # of the check


@dataclass(frozen=True)
class CodecRow:
    """One codec. n_elems, n_bytes: of the values. wire_bytes: of what travels. Times in seconds, the best of all.

    wrong: on how many ranks a length or a sum was wrong.
    """

    what: str
    codec: str
    n_elems: int
    n_bytes: int
    wire_bytes: int
    iterations: int
    encode_s: float
    decode_s: float
    add_s: float
    copy_s: float
    sum_s: float
    wrong: int


TABLE = Table(
    Column("bytes", 9),
    Column("codec", 16, left=True),
    Column("on wire/value", 13),
    Column("smaller by", 10),
    Column("encode GB/s", 11),
    Column("decode", 8),
    Column("add", 8),
    Column(COPY, 8),
    Column(SUM, 8),
)


def run(session: Session) -> None:
    """Measure what the options ask for. Collective; each rank measures by itself, and the slowest counts."""
    session.note("GB/s of values, of the slowest rank, best of all iterations")
    session.titles(TABLE)
    for name in session.options.codecs or registry.names():
        session.progress.update(what=name)
        for what, codec in variants(name):
            row = _one(session, what, codec)
            session.rows.append(row)
            session.lines(line, [row])
        session.progress.update(1)


def variants(name: str) -> Iterator[tuple[str, Codec]]:
    """Yield a codec of this name as a user gets it, and without the error feedback around it."""
    codec = registry.create(name)
    yield name, codec
    if isinstance(codec, ErrorFeedback):
        yield f"{name} alone", codec.codec


def _one(session: Session, what: str, codec: Codec) -> CodecRow:
    """Measure one codec. Collective."""
    job, dtype = session.job, session.dtype
    wrong = job.comm.allreduce(int(session.options.check and not is_right(codec, dtype)))
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

    results = measure(job.comm, [Contender(name, prepare, call) for name, call in calls.items()], session.plan)
    best_s = {result.what: result.summary.min_s for result in results}
    return CodecRow(
        what=what,
        codec=repr(codec),
        n_elems=n_elems,
        n_bytes=values.nbytes,
        wire_bytes=codec.wire_bytes(n_elems, dtype),
        iterations=results[0].summary.iterations,
        encode_s=best_s["encode"],
        decode_s=best_s["decode"],
        add_s=best_s["add"],
        copy_s=best_s[COPY],
        sum_s=best_s[SUM],
        wrong=wrong,
    )


def is_right(codec: Codec, dtype: np.dtype[Any]) -> bool:
    """Whether lengths are as agreed on, and sums those of what is decoded."""
    generator = np.random.default_rng(0)
    values, out = (generator.standard_normal(SHORT_ELEMS).astype(kind) for kind in (dtype, sum_dtype(dtype)))
    data, decoded = codec.encode(values, codec.init(SHORT_ELEMS)), np.empty_like(out)
    codec.decode(data, decoded)
    expected = out + decoded
    codec.add(data, out)
    return data.nbytes == codec.wire_bytes(SHORT_ELEMS, dtype) and out.tobytes() == expected.tobytes()


def line(row: CodecRow) -> str:
    """Return a row of the table."""
    times = (row.encode_s, row.decode_s, row.add_s, row.copy_s, row.sum_s)
    return TABLE.line(
        short(row.n_bytes),
        row.what,
        f"{row.wire_bytes / max(row.n_elems, 1):.3f}",
        f"{row.n_bytes / max(row.wire_bytes, 1):.1f}",
        *(f"{row.n_bytes / time_s / 1e9:.2f}" for time_s in times),
        end="  WRONG: a length, or the bits of a sum" if row.wrong else "",
    )
