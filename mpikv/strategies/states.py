"""Optimizer states between their owners and a file: the same in every mode.

Owners hold the states of their shards. A file holds the states of whole keys, so that a store with another number of
workers or servers can read it: shards are joined before writing, and cut by the store's placement after reading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.common.checks import plain, shown
from mpikv.errors import MpikvError, PeerError, StallError, StatesFileError, UnsupportedError
from mpikv.observe.stall import say
from mpikv.optimizers import archive, states, states_file
from mpikv.optimizers.archive import damaged
from mpikv.optimizers.base import Optimizer
from mpikv.optimizers.owner import Owner
from mpikv.optimizers.states import StateRecord, check_rows, join_rows, record_of, slice_rows
from mpikv.optimizers.states_file import Place
from mpikv.optimizers.step import State
from mpikv.placement.keys import Key, KeyInfo
from mpikv.session.base import Session
from mpikv.strategies import codec_states
from mpikv.strategies.base import Loaded, Strategy

# The calls, as errors and agreements name them
SAVE, LOAD, SNAPSHOT = "save_optimizer_states", "load_optimizer_states", "snapshot"
KIND_OF_SHARE = "mpikv share of what is saved"

Owned = Sequence[tuple[KeyInfo, int, int]]  # keys, each with begin and end of the shard that is owned


def collect(owner: Owner, owned: Owned) -> list[StateRecord]:
    """The states of the shards that an owner owns, in host memory; keys that were never updated have none."""
    with owner.in_stream():
        return [
            record_of(info, begin, end, states.on_host(owner.states[info.id]))
            for info, begin, end in owned
            if begin < end and info.id in owner.states
        ]


def archived(share: Callable[[], Mapping[str, Any]]) -> tuple[bytes, str]:
    """This worker's share of what is saved, as an archive, and its error, "" for none: the others wait in the call."""
    try:
        return archive.to_bytes(KIND_OF_SHARE, share()), ""
    except (PeerError, StallError):
        raise
    except (UnsupportedError, TypeError) as error:  # which say all
        text = str(error)
    except Exception as error:  # noqa: BLE001 - of the user's own objects, too
        text = f"{type(error).__name__}: {error}"
    return archive.to_bytes(KIND_OF_SHARE, {"error": text}), text


def opened(worker: int, data: bytes, origin: str = "a worker's share") -> dict[str, Any]:
    """A worker's share. Raises UnsupportedError with its error, StatesFileError for one that is damaged."""
    share = archive.from_bytes(data, KIND_OF_SHARE, origin)
    if error := share.get("error"):
        raise UnsupportedError(f"worker {worker}: {error}")
    return share


def share_of(
    session: Session,
    strategy: Strategy,
    call: str,
    *,
    keys: Collection[Key] | None = None,
    own: Collection[Key] | None = None,
    of_codecs: Sequence[StateRecord] = (),
    alone: bool = False,
    dump_optimizer: bool = True,
) -> dict[str, Any]:
    """This worker's share of the states of `keys` (None: of all), for `join_shares`. Collective, blocks.

    own: the keys of which this worker gives what it has, if not of all of them. of_codecs: of this worker. alone: see
    `own_states`.
    """
    own = keys if own is None else own
    mine = [part for part in strategy.own_states(call, alone=alone) if own is None or part.key in own]
    # It also names keys that were never updated, so that loading the file removes the states that they have by then.
    optimizers = {key: one for key, one in session.optimizers().items() if keys is None or key in keys}
    kinds = [[key, optimizer.name] for key, optimizer in optimizers.items()]
    configs = [[key, optimizer.config()] for key, optimizer in optimizers.items()] if dump_optimizer else []
    meta = {"optimizers": kinds, "configs": configs, **_cuts(session, strategy)}
    return states_file.packed([*mine, *of_codecs], meta)


def join_shares(session: Session, shares: Sequence[Mapping[str, Any]], origin: str) -> dict[str, Any]:
    """The content of a file of states, of the shares of all workers. Local. Raises StatesFileError.

    session: has the keys.
    """
    of_codecs, by_key = list[StateRecord](), dict[Key, list[StateRecord]]()
    for part in (part for share in shares for part in states_file.records_of(share, origin)):
        (by_key.setdefault(part.key, []) if part.worker is None else of_codecs).append(part)
    whole = []
    for info in session.in_order():
        if info.key in by_key and info.sparse:
            whole.append(join_rows(info, by_key[info.key]))
        elif info.key in by_key:
            pieces = [(part.begin, part.end, part.state) for part in by_key[info.key]]
            whole.append(record_of(info, 0, info.n_elems, states.join_states(pieces, info.n_elems)))
    return states_file.packed([*whole, *of_codecs], shares[0]["meta"])


def save_shares(session: Session, of: Session, path: Place, share: Callable[[], Mapping[str, Any]]) -> None:
    """Write the shares that all workers make into one file, whole or not at all. Collective, blocks.

    of: has the keys. Raises MpikvError where no key has an optimizer or a codec, what `share` has raised, and OSError,
    on every worker.
    """

    def write(gathered: Sequence[bytes]) -> None:
        shares = [opened(worker, data) for worker, data in enumerate(gathered)]
        if not shares[0]["meta"]["optimizers"] and not codec_states.compresses(session):
            raise MpikvError("save_optimizer_states: no optimizer was set, there are no states")
        states_file.save_content(path, join_shares(of, shares, str(path)))

    session.at_first(SAVE, lambda: archived(share)[0], write)


def save_file(session: Session, strategy: Strategy, path: Place, *, dump_optimizer: bool) -> None:
    """Write the states of all keys' optimizers, and of all workers' codecs, into one file: see `save_shares`."""

    def share() -> dict[str, Any]:
        of_codecs = codec_states.own(session, strategy, SAVE)
        return share_of(session, strategy, SAVE, of_codecs=of_codecs, dump_optimizer=dump_optimizer)

    save_shares(session, session, path, share)


def load_file(session: Session, strategy: Strategy, path: Place) -> Sequence[StateRecord]:
    """Read a states file. Collective, blocks.

    Optimizer attributes from the file reach the owners with the next push. Returns the codec states of the file, at
    worker 0. Raises StatesFileError or OSError on every worker and changes nothing then.
    """
    return session.whole(LOAD, lambda: _load(session, strategy, path))


def _load(session: Session, strategy: Strategy, path: Place) -> Sequence[StateRecord]:
    of_codecs: list[StateRecord] = []  # at worker 0

    def read() -> states_file.StatesFile:
        stateless = not codec_states.compresses(session)
        file = _read_file(path, session.infos, session.optimizers(), stateless=stateless)
        codec_states.check(file.codecs, path)
        _compare_cuts(path, file.meta, _cuts(session, strategy))
        of_codecs.extend(file.codecs)
        return file

    _, configs = strategy.load_states(read)
    codec_states.spread(session, strategy, LOAD, of_codecs)
    for key, config in configs:
        optimizer = session.optimizer_of(session.infos[key])
        if optimizer is not None:
            optimizer.set_attributes(config["attributes"])
    return of_codecs


def _cuts(session: Session, strategy: Strategy) -> dict[str, Any]:
    """What a file says of where keys are divided."""
    cuts = strategy.cuts()
    return {"workers": session.num_workers, "cuts": [list(one) for one in cuts.items()]} if cuts else {}


def _compare_cuts(path: Place, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Print a line where as many workers would go on with other bits, since keys are divided elsewhere."""
    if not here or there.get("workers") != here["workers"]:
        return
    saved = {*map(str, cuts)} if isinstance(cuts := there.get("cuts"), list) else set()
    moved = [one[0] for one in here["cuts"] if str(one) not in saved]
    if moved:
        many = f"{len(moved)} keys are" if len(moved) > 1 else f"key {shown(moved[0])} is"
        say(
            f"mpikv: warning: {many} divided between workers and servers at other places than when {path} was saved, "
            "so sums may differ in the last bit. Links were measured differently, or settings have changed; MPIKV_LINK "
            "with a file of `mpikv bench link --save` in all runs gives the same places"
        )


def _read_file(
    path: Place, infos: Mapping[Key, KeyInfo], optimizers: Mapping[Key, Optimizer], *, stateless: bool
) -> states_file.StatesFile:
    """Read a file and compare its optimizers, keys, shapes and dtypes with those of this store. Changes nothing.

    stateless: whether no key has a codec, so that only optimizers can have states.
    """
    if not optimizers and stateless:
        raise MpikvError("load_optimizer_states: set the optimizer first")
    file, origin = states_file.load_states(path), str(path)
    try:
        kinds, configs = dict(file.meta["optimizers"]), dict(file.meta["configs"])
        file.meta.update(optimizers=[*kinds.items()], configs=[*configs.items()])  # what is checked, and no key twice
    except (KeyError, TypeError, ValueError) as error:
        raise StatesFileError(f"{origin}: does not say which optimizers its states are of") from error
    for key in {**file.entries, **configs}:
        if key not in kinds:
            damaged(origin, f"does not say which optimizer the state of key {shown(key)} is of")
    for record in (*file.entries.values(), *file.codecs):
        info = infos.get(record.key)
        if info is not None and (record.shape, record.dtype) != (info.shape, info.dtype):
            there, here = (f"{one.dtype} {one.shape}" for one in (record, info))
            damaged(origin, f"key {shown(record.key)} is {there} there and {here} here")
    for key, kind in kinds.items():
        info, optimizer, entry = infos.get(key), optimizers.get(key), file.entries.get(key)
        if info is None:
            damaged(origin, f"has states of key {shown(key)}, which this store does not hold")
        if optimizer is None or optimizer.name != kind:
            here = "no optimizer" if optimizer is None else optimizer.name
            damaged(origin, f"key {shown(key)} has a state of {shown(kind)} there and {here} here")
        try:
            after = copy.deepcopy(optimizer)  # the store's own changes only when the whole file has been checked
            if key in configs:
                after.set_attributes(configs[key]["attributes"])
            if entry is not None and info.sparse:
                check_rows(after, info, entry.state)
            elif entry is not None:
                after.check_state(np.zeros(info.shape, info.dtype), entry.state)
        except (ValueError, TypeError, KeyError, AttributeError, MpikvError) as error:
            raise StatesFileError(f"{origin}: key {shown(key)}: {plain(error)}") from error
    return file


def restored(file: states_file.StatesFile) -> Loaded:
    """What every worker must know about a loaded file, see `Loaded`."""
    return [key for key, _ in file.meta["optimizers"]], file.meta["configs"]


def distribute(file: states_file.StatesFile, owned: Owned) -> list[StateRecord]:
    """The states of an owner's shards, cut out of a file."""
    return [
        _cut(info, file.entries[info.key].state, begin, end)
        for info, begin, end in owned
        if begin < end and info.key in file.entries
    ]


def _cut(info: KeyInfo, state: State, begin: int, end: int) -> StateRecord:
    if info.sparse:
        columns = info.n_elems // info.shape[0]
        return slice_rows(info, state, begin // columns, end // columns)
    return record_of(info, begin, end, states.slice_state(state, begin, end, info.n_elems))
