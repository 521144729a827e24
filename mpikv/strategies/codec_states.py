"""The states of codecs between the workers and a states file.

Every worker's codecs hold residuals: the errors of what they have encoded, to be added to later pushes. They are saved
with the optimizer's states, piece by piece for each worker, so that a run with as many workers goes on with the same
bits. With another number of workers, the sum of all residuals is divided equally among them, and the rest of a state is
taken from worker 0. Where the pieces have other bounds than before, each element keeps its residual, and the rest of a
state starts anew. A file grows with the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mpikv.codecs import compression
from mpikv.codecs.identity import IDENTITY
from mpikv.common.checks import shown
from mpikv.errors import StatesFileError
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import Place, records_from_bytes, records_to_bytes
from mpikv.placement.keys import Key
from mpikv.session.base import Session
from mpikv.strategies.base import Strategy

RESIDUAL = "residual"


def compresses(session: Session, keys: Iterable[Key] | None = None) -> bool:
    """Whether a codec, which may have states, encodes pushes of some of these keys (None: of all). Local."""
    infos = session.infos.values() if keys is None else [session.infos[key] for key in keys]
    return any(compression.of_text(info.codec).push != IDENTITY for info in infos)


def own(session: Session, strategy: Strategy, call: str, keys: Sequence[Key] | None = None) -> list[StateRecord]:
    """The states of this worker's codecs of `keys` (None: of all). Collective if any is encoded."""
    if not compresses(session, keys):
        return []
    found = (part for part in strategy.codec_states(call) if keys is None or part.key in keys)
    return [part._replace(worker=session.rank) for part in found]


def check(saved: Iterable[StateRecord], path: Place) -> None:
    """Raise StatesFileError where a residual has another dtype or length than its piece requires."""
    for part in saved:
        residual = part.state.get(RESIDUAL)
        found = getattr(residual, "dtype", type(residual)), getattr(residual, "shape", ())
        if residual is not None and found != (np.float32, (part.end - part.begin,)):
            raise StatesFileError(
                f"{path} is damaged: the residual of key {shown(part.key)} at worker {part.worker} is {found[0]} "
                f"{found[1]}, not float32 ({part.end - part.begin},)"
            )


def spread(session: Session, strategy: Strategy, call: str, saved: Sequence[StateRecord]) -> None:
    """Replace the states of all workers' codecs by those saved, at worker 0. Collective if any key is encoded."""
    if not compresses(session):
        return
    parts = None
    if session.rank == 0:
        known = [part for part in saved if part.key in session.infos]
        parts = [records_to_bytes(given) for given in shares(known, session.num_workers)]
    strategy.take_codec_states(records_from_bytes(session.scatter(call, parts)))


def shares(saved: Sequence[StateRecord], num_workers: int) -> list[list[StateRecord]]:
    """The codec states for each of `num_workers` workers, from those that some workers had saved.

    They are unchanged if the number of workers is the same. Else each worker gets an equal share of all residuals.
    """
    workers = sorted({part.worker for part in saved if part.worker is not None})
    if workers == list(range(num_workers)):
        return [[part for part in saved if part.worker == worker] for worker in workers]
    sums: dict[tuple[Key, int, int], StateRecord] = {}
    for part in saved:
        piece = (part.key, part.begin, part.end)
        first = sums.setdefault(piece, part._replace(state=dict(part.state)))
        if part.worker != first.worker and RESIDUAL in part.state:
            first.state[RESIDUAL] = first.state.get(RESIDUAL, 0) + part.state[RESIDUAL].astype(np.float64)
    found = []
    for part in sums.values():
        state = dict(part.state)
        if RESIDUAL in state:
            state[RESIDUAL] = (state[RESIDUAL] / num_workers).astype(np.float32)
        found.append(part._replace(state=state))
    return [[part._replace(worker=worker) for part in found] for worker in range(num_workers)]
