"""Optimizer states between their owners and a file: the same in every mode.

Owners hold the states of their shards. A file holds the states of whole keys, so that a store with another number of
workers or servers can read it: shards are joined before writing, and cut by the store's placement after reading.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpikv.common.checks import plain, shown
from mpikv.errors import MpikvError, StatesFileError
from mpikv.observe.stall import say
from mpikv.optimizers import states, states_file
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

SAVE, LOAD = "save_optimizer_states", "load_optimizer_states"  # the calls, as errors and agreements name them

Owned = Sequence[tuple[KeyInfo, int, int]]  # keys, each with begin and end of the shard that is owned


def collect(owner: Owner, owned: Owned) -> list[StateRecord]:
    """The states of the shards that an owner owns, in host memory; keys that were never updated have none."""
    with owner.in_stream():
        return [
            record_of(info, begin, end, states.on_host(owner.states[info.id]))
            for info, begin, end in owned
            if begin < end and info.id in owner.states
        ]


def save_file(
    session: Session,
    strategy: Strategy,
    path: Place,
    keys: Sequence[Key] | None = None,
    *,
    dump_optimizer: bool,
    of_codecs: Sequence[StateRecord] = (),
) -> None:
    """Write the optimizer states of `keys` (None: of all) into one file, whole or not at all. Collective, blocks.

    The file also has the states of all workers' codecs of these keys, and `of_codecs`, which another store has
    gathered. Raises MpikvError where no key has an optimizer or a codec, and OSError, on every worker.
    """
    of_codecs = [*of_codecs, *codec_states.gather(session, strategy, SAVE, keys)]
    stateless, cuts = not codec_states.compresses(session, keys), _cuts(session, strategy)

    def write(parts: Sequence[Sequence[StateRecord]]) -> None:
        infos = [info for info in session.in_order() if keys is None or info.key in keys]
        optimizers = {info.key: one for info in infos if (one := session.optimizer_of(info)) is not None}
        if not optimizers and stateless:
            raise MpikvError("save_optimizer_states: no optimizer was set, there are no states")
        _write_file(path, parts, infos, optimizers, of_codecs, cuts=cuts, dump_optimizer=dump_optimizer)

    strategy.save_states(write)


def load_file(session: Session, strategy: Strategy, path: Place) -> Sequence[StateRecord]:
    """Read a states file. Collective, blocks.

    Optimizer attributes from the file reach the owners with the next push. Returns the codec states of the file, at
    worker 0. Raises StatesFileError or OSError on every worker and changes nothing then.
    """
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


def _write_file(
    path: Place,
    parts: Sequence[Sequence[StateRecord]],
    infos: Sequence[KeyInfo],
    optimizers: Mapping[Key, Optimizer],
    of_codecs: Sequence[StateRecord],
    *,
    cuts: Mapping[str, Any],
    dump_optimizer: bool,
) -> None:
    """Join the shards' states of all owners and write those of `infos`. optimizers: the user's, of these keys."""
    by_key: dict[Key, list[StateRecord]] = {}
    for part in (part for some in parts for part in some):
        by_key.setdefault(part.key, []).append(part)
    whole = []
    for info in infos:
        if info.key in by_key and info.sparse:
            whole.append(join_rows(info, by_key[info.key]))
        elif info.key in by_key:
            pieces = [(part.begin, part.end, part.state) for part in by_key[info.key]]
            whole.append(record_of(info, 0, info.n_elems, states.join_states(pieces, info.n_elems)))
    # The file also names keys that were never updated, so that loading it removes the states that they have by then.
    kinds = [[key, optimizer.name] for key, optimizer in optimizers.items()]
    configs = [[key, optimizer.config()] for key, optimizer in optimizers.items()] if dump_optimizer else []
    states_file.save_states(path, [*whole, *of_codecs], meta={"optimizers": kinds, "configs": configs, **cuts})


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
