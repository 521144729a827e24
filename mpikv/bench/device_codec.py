"""`mpikv bench codec --device`: codecs in device memory, beside a copy on the GPU (device_work.py).

Of each codec that can work there (`Codec.on_device`), with error feedback and alone: a row for encoding, decoding and
adding. Before that, what is encoded of some short pushes, the residual, and what is decoded and added are compared with
the host's, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpikv.arrays import sum_dtype
from mpikv.bench.codec import SHORT_ELEMS, variants
from mpikv.bench.device_work import WorkRow, line, measured, same_bits, table
from mpikv.bench.gpu import Gpu, device_store, open_gpu
from mpikv.bench.session import Session
from mpikv.codecs import registry
from mpikv.codecs.base import Codec
from mpikv.codecs.identity import IDENTITY
from mpikv.codecs.sparse_device import SparseOnDevice
from mpikv.keys import KeyInfo
from mpikv.strategies.device_pieces import DevicePieces
from mpikv.strategies.pieces import Pieces

GOAL = 0.6  # of the copy bandwidth
PUSHES = 3  # of the comparison with the host
TABLE = table("codec", 20)


def run(session: Session) -> None:
    """Measure what the options ask for. Collective."""
    job = session.job
    with device_store(job) as store:
        gpu = open_gpu(job, store)
        session.note(f"GPU {gpu.driver.number} of rank 0: {gpu.driver.name}; to reach: {100 * GOAL:.0f} % of the limit")
        names = session.options.codecs or registry.names()
        on_host = [name for name in names if registry.create(name).on_device(session.dtype) is None]
        if on_host:
            session.note(f"encoded on the host: {', '.join(on_host)}")
        session.titles(TABLE)
        for name in names:
            session.progress.update(what=name)
            if name not in on_host:
                for what, codec in variants(name):
                    for row in _rows(session, gpu, store.session.spaces.device, what, codec):
                        session.rows.append(row)
                        session.lines(lambda one: line(TABLE, one), [row])
            session.progress.update(1)
        session.more["goals"] = said(session.rows)
        session.progress.say(*(f"# {one}" for one in session.more["goals"]))


def said(rows: Sequence[WorkRow]) -> list[str]:
    """What is said of all rows: which fall short; else how near the slowest is."""
    wanted = f"to reach: {100 * GOAL:.0f} %"
    slowest = min(rows, key=lambda row: row.limit_percent, default=None)
    if slowest is not None and slowest.limit_percent >= 100 * GOAL:
        return [f"{slowest.what}, the slowest: {slowest.limit_percent:.0f} % of the limit; {wanted}"]
    short = [row for row in rows if row.limit_percent < 100 * GOAL]
    return [f"{row.what}: {row.limit_percent:.0f} % of the limit; {wanted}, NOT REACHED" for row in short]


def _rows(session: Session, gpu: Gpu, space: Any, what: str, codec: Codec) -> Iterator[WorkRow]:
    """Measure one codec. Collective."""
    dtype = session.dtype
    check = session.options.check
    wrong = session.job.comm.allreduce(int(check and not has_bits_of_host(space, codec, dtype)))
    n_elems = session.options.bytes // dtype.itemsize
    pieces = DevicePieces(_info(codec, n_elems, dtype), codec, space)
    values, out = space.zeros(n_elems, dtype), space.zeros(n_elems, sum_dtype(dtype))
    # Of codecs that choose among values the pieces of a store: each is the work of one block of threads.
    parts = pieces.of((0, n_elems)) if isinstance(codec.on_device(dtype), SparseOnDevice) else [(0, n_elems)]
    data = pieces.encode_all(values, parts)
    n_sent = sum(one.nbytes for one in data.values())
    encoding_moves = values.nbytes + n_sent + 2 * pieces.held_bytes  # residuals are read and written

    def each(does: Callable[[Any, Any], None]) -> None:
        for part, one in data.items():
            does(one, out[slice(*part)])

    calls: dict[str, tuple[Any, int]] = {
        "encode": (lambda: pieces.encode_all(values, parts), encoding_moves),
        "decode": (lambda: each(pieces.decode), n_sent + out.nbytes),
        "add": (lambda: each(pieces.add), n_sent + 2 * out.nbytes),
    }
    if codec == IDENTITY:
        del calls["encode"]  # values travel from where they are
    for name, (call, moved) in calls.items():
        row = measured(session, gpu, space.stream, f"{what}, {name}", call, n_bytes=values.nbytes, moved_bytes=moved)
        yield replace(row, wrong=wrong)


def _info(codec: Codec, n_elems: int, dtype: np.dtype[Any]) -> KeyInfo:
    return KeyInfo("w", 0, (n_elems,), dtype, codec.name)


def has_bits_of_host(space: Any, codec: Codec, dtype: np.dtype[Any]) -> bool:
    """Whether some pushes are encoded, decoded and added on the GPU as on the host, and leave the same residual."""
    info, piece = _info(codec, SHORT_ELEMS, dtype), (0, SHORT_ELEMS)
    there, here, generator = DevicePieces(info, codec, space), Pieces(info, codec), np.random.default_rng(0)
    total: Any = np.zeros(SHORT_ELEMS, sum_dtype(dtype))
    total_there = space.from_host(total)
    for push in range(PUSHES):
        values = generator.standard_normal(SHORT_ELEMS).astype(dtype)
        expected, found = here.encode(values, piece), there.encode(space.from_host(values), piece)
        if not same_bits(space.to_host(found), expected.view(np.uint8)):
            return False
        (here.add if push else here.decode)(expected, total)
        (there.add if push else there.decode)(found, total_there)
    states = here.states[piece], there.states_on_host()[piece]
    return same_bits(space.to_host(total_there), total) and all(
        same_bits(states[1][name], states[0][name]) for name in states[0]
    )
