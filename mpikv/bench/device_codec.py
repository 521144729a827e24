"""`mpikv bench codec --device`: codecs in device memory, beside a copy on the GPU (device_work.py).

Of each codec, with error feedback and alone: a row for encoding, decoding and adding. Before that, what some short
pushes come to is compared with the host's: equal, or near where the codec's arithmetic rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from mpikv.arrays import sum_dtype
from mpikv.bench.codec import SHORT_ELEMS, variants
from mpikv.bench.device_work import WorkRow, differs, line, measured, table
from mpikv.bench.gpu import device_store, open_space
from mpikv.bench.session import Session
from mpikv.codecs import registry
from mpikv.codecs.base import Codec
from mpikv.codecs.identity import IDENTITY
from mpikv.keys import KeyInfo
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.device_pieces import DevicePieces, pieces_in
from mpikv.strategies.pieces import Pieces

PUSHES = 3  # of the comparison with the host
ROUNDS = {"int8": 1 / 100, "powersgd": 1 / 1000}  # codecs whose numbers may differ, by this part of the largest
TABLE = table("codec", 20)


def run(session: Session) -> None:
    """Measure what the options ask for. Collective."""
    job = session.job
    with device_store(job) as store:
        space = open_space(job, store)
        session.note(f"GPU {space.device} of rank 0: {space.gpu.name}")
        session.titles(TABLE)
        for name in session.options.codecs or registry.names():
            session.progress.update(what=name)
            for what, codec in variants(name):
                if codec != IDENTITY and not isinstance(_pieces(space, codec, 1, session.dtype), DevicePieces):
                    session.note(f"{what} is encoded on the host")
                    continue
                for row in _rows(session, space, what, codec):
                    session.rows.append(row)
                    session.lines(lambda one: line(TABLE, one), [row])
            session.progress.update(1)


def _pieces(space: DeviceSpace | None, codec: Codec, n_elems: int, dtype: np.dtype[Any]) -> Pieces:
    return pieces_in(space, KeyInfo("w", 0, (n_elems,), dtype, codec.name), codec)


def _rows(session: Session, space: DeviceSpace, what: str, codec: Codec) -> Iterator[WorkRow]:
    """Measure one codec, in pieces as a store cuts them. Collective."""
    dtype, n_elems = session.dtype, session.options.bytes // session.dtype.itemsize
    wrong = session.job.comm.allreduce(int(session.options.check and not is_right(space, codec, dtype)))
    pieces, total = _pieces(space, codec, n_elems, dtype), sum_dtype(dtype)
    values, out, cut = space.zeros(n_elems, dtype), space.zeros(n_elems, total), pieces.of((0, n_elems))
    with space.here():
        data = {piece: pieces.encode(values, piece) for piece in cut}
    n_sent = sum(one.nbytes for one in data.values())
    works: dict[str, tuple[Any, int]] = {  # and what must be read and written; residuals are both
        "encode": (lambda piece: pieces.encode(values, piece), values.nbytes + n_sent + 2 * pieces.held_bytes),
        "decode": (lambda piece: pieces.decode(data[piece], out[slice(*piece)]), n_sent + out.nbytes),
        "add": (lambda piece: pieces.add(data[piece], out[slice(*piece)]), n_sent + 2 * out.nbytes),
    }
    if codec == IDENTITY:
        del works["encode"]  # values travel from where they are
    for name, (work, moved) in works.items():

        def each(work: Any = work) -> None:
            for piece in cut:
                work(piece)

        row = measured(session, space, f"{what}, {name}", each, n_bytes=values.nbytes, moved_bytes=moved)
        yield replace(row, wrong=wrong)


def is_right(space: DeviceSpace, codec: Codec, dtype: np.dtype[Any]) -> bool:
    """Whether some pushes, one after the other, come to what they come to on the host."""
    there, here = (_pieces(one, codec, SHORT_ELEMS, dtype) for one in (space, None))
    total = np.zeros(SHORT_ELEMS, sum_dtype(dtype))
    total_there, generator = space.from_host(total), np.random.default_rng(0)
    for _ in range(PUSHES):
        values = generator.standard_normal(SHORT_ELEMS).astype(dtype)
        with space.here():
            there.add(there.encode(space.from_host(values), (0, SHORT_ELEMS)), total_there)
        here.add(here.encode(values, (0, SHORT_ELEMS)), total)
    return differs(space.to_host(total_there), total) <= ROUNDS.get(codec.name.partition(" ")[0], 0)
