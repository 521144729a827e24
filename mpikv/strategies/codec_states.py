"""What codecs remember, between the workers and a file of states.

Every worker's codecs owe something of what it has pushed. That is saved with the states of the optimizer: the pieces of
each worker, as they are, so that a run with as many workers goes on with the same bits. Where there are more workers
or fewer, all owe in equal parts what all owed together, and the rest of a state is that of worker 0. Where the pieces
are others than they were, what is owed of each element stays owed, and the rest of a state starts anew.

Cost: a file holds the states of all workers, so that it grows with their number; two messages for each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mpikv.codecs import compression
from mpikv.codecs.identity import IDENTITY
from mpikv.common.checks import shown
from mpikv.errors import StatesFileError
from mpikv.optimizers.states import StateRecord
from mpikv.optimizers.states_file import records_from_bytes, records_to_bytes
from mpikv.placement.keys import Key
from mpikv.session.base import Session
from mpikv.session.workers import Workers
from mpikv.strategies.base import Strategy

RESIDUAL = "residual"


def compresses(session: Session, keys: Iterable[Key] | None = None) -> bool:
    """Whether some of these keys (None: of all) are pushed by a codec, which may remember something. Local."""
    infos = session.infos.values() if keys is None else [session.infos[key] for key in keys]
    return any(compression.of_text(info.codec).push != IDENTITY for info in infos)


def gather(session: Session, strategy: Strategy, call: str, keys: Sequence[Key] | None = None) -> list[StateRecord]:
    """The states of the codecs of `keys` (None: of all) on all workers, at worker 0; elsewhere none.

    Collective, blocks, where one of the keys is pushed by a codec; else local.
    """
    if not isinstance(session, Workers) or not compresses(session, keys):
        return []
    found = [part for part in strategy.codec_states(call) if keys is None or part.key in keys]
    mine = records_to_bytes(part._replace(worker=session.rank) for part in found)
    return [part for blob in session.gather(call, mine) for part in records_from_bytes(blob)]


def check(saved: Iterable[StateRecord], path: str) -> None:
    """Raise StatesFileError where a file has residuals that are none of their pieces'."""
    for part in saved:
        residual = part.state.get(RESIDUAL)
        if residual is not None and (residual.dtype, residual.shape) != (np.float32, (part.end - part.begin,)):
            raise StatesFileError(
                f"{path} is damaged: the residual of key {shown(part.key)} at worker {part.worker} is {residual.dtype} "
                f"{residual.shape}, not float32 ({part.end - part.begin},)"
            )


def spread(session: Session, strategy: Strategy, call: str, saved: Sequence[StateRecord]) -> None:
    """Give each worker its part of what was saved; what its codecs remembered is forgotten.

    saved: of all workers, at worker 0. Collective, blocks, where some key of the store is pushed by a codec.
    """
    if not isinstance(session, Workers) or not compresses(session):
        return
    parts = None
    if session.rank == 0:
        here = [part for part in saved if part.key in session.infos]
        parts = [records_to_bytes(given) for given in shares(here, session.num_workers)]
    strategy.take_codec_states(records_from_bytes(session.scatter(call, parts)))


def shares(saved: Sequence[StateRecord], num_workers: int) -> list[list[StateRecord]]:
    """What each of so many workers has of what some workers had: the same, or as many equal parts of all together.

    The sum over the workers of what is owed stays what it was, but for the rounding of one division.
    """
    workers = sorted({part.worker for part in saved if part.worker is not None})
    if workers == list(range(num_workers)):
        return [[part for part in saved if part.worker == worker] for worker in workers]
    owed: dict[tuple[Key, int, int], StateRecord] = {}
    for part in saved:
        place = (part.key, part.begin, part.end)
        first = owed.setdefault(place, part._replace(state=dict(part.state)))
        if part.worker != first.worker and RESIDUAL in part.state:
            first.state[RESIDUAL] = first.state.get(RESIDUAL, 0) + part.state[RESIDUAL].astype(np.float64)
    found = []
    for part in owed.values():
        state = dict(part.state)
        if RESIDUAL in state:
            state[RESIDUAL] = (state[RESIDUAL] / num_workers).astype(np.float32)
        found.append(part._replace(state=state))
    return [[part._replace(worker=worker) for part in found] for worker in range(num_workers)]
