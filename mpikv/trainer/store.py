"""Decides which store a Trainer uses, whether the store or the workers make the updates, and where gradients are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mpikv import kv
from mpikv.arrays import as_numpy
from mpikv.codecs import compression
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.common.files import place_of
from mpikv.create import notices, spec
from mpikv.errors import ConfigError
from mpikv.kvstore import KVStore
from mpikv.optimizers import Optimizer
from mpikv.optimizers.adam import RunningMeans
from mpikv.placement.keys import Key
from mpikv.trainer.parameter import list_data, place_grad


def store_of(kvstore: KVStore | str | None, several_devices: bool) -> KVStore | None:
    """Return the store for a Trainer's argument `kvstore`."""
    if isinstance(kvstore, KVStore):
        return kvstore
    if kvstore is not None and not isinstance(kvstore, str):
        raise checks.wrong("kvstore", "a type such as 'dist_sync', a store or None", kvstore)
    # `spec.parse` raises for an unknown name, even if no store is made.
    if kvstore is not None and (spec.parse(kvstore).distributed or several_devices):
        return kv.create(kvstore)
    notices.warn_of_unread()
    notices.warn_of_separate_ranks(f"Trainer(kvstore={kvstore!r}) has no store")
    return None


def check_stop_file(store: KVStore | None) -> None:
    """Raise ConfigError if the stop file cannot be written, since an error at the stop would lose the training."""
    path = "" if store is None or store.rank != 0 else store.session.stop_file
    if not path:
        return
    try:
        folder = os.path.dirname(place_of(path))
    except OSError as error:
        raise ConfigError(f"MPIKV_STOP_FILE={shown(path)}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"MPIKV_STOP_FILE={shown(path)}: cannot be written in {folder}")


def updates_on_store(store: KVStore | None, wanted: bool | None, *, clips: bool) -> bool:
    """Decide whether the store makes the updates. wanted: the user's choice; None: it does if it can."""
    if wanted is not None and not isinstance(wanted, bool):
        raise checks.wrong("update_on_kvstore", "True, False or None", wanted)
    if clips and store is not None and "async" in store.type:
        raise ValueError(f"clip_global_norm: a {store.type} store applies each gradient alone; there is no sum to clip")
    if clips and wanted:
        raise ValueError("clip_global_norm needs the sums before the update: leave update_on_kvstore=True out")
    if store is None:
        if wanted:
            raise ValueError("update_on_kvstore=True needs a store; with this kvstore there is none")
        return False
    if "async" in store.type and wanted is False:
        raise ValueError(
            f"a {store.type} store makes the updates itself; leave update_on_kvstore out, or use dist_sync"
        )
    return not clips and store.is_capable("optimizer") if wanted is None else wanted


def warn_of_codec(store: KVStore, optimizer: Optimizer, keys: Sequence[Key]) -> None:
    """Warn if an optimizer like Adam gets gradients of a codec with which it trains badly. Local."""
    if isinstance(optimizer, RunningMeans) or hasattr(optimizer, "betas"):
        for codec in {store.session.infos[key].codec for key in keys}:
            notices.warn_of_codec(compression.of_text(codec).push.name)


def place_gradients(store: KVStore, params: Mapping[str, Any], trained: Sequence[str]) -> None:
    """Allocate the gradients in memory that the host's workers share, so that they are added without a copy.

    Each parameter gets a place, also one that this worker has on another device than its key: all workers must allocate
    alike, and pages that are never written take no memory.
    """
    kinds: dict[str, list[str]] = {}
    for name in trained:
        _, dtype = as_numpy.shape_and_dtype(list_data(params[name])[0], f"parameter {shown(name)}")
        kinds.setdefault(str(dtype), []).append(name)
    for dtype_name, names in sorted(kinds.items()):
        shapes = [tuple(list_data(params[name])[0].shape) for name in names]
        for name, memory in zip(names, store.zeros(shapes, dtype_name), strict=True):
            place_grad(params[name], memory)
