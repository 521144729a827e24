"""The base of a Trainer: its parameters, the store in which they are keys, and whether store or workers update them.

When it is made, worker 0's weights are copied to all workers and devices. If the store makes the updates, `wait` and
`pull_weights` return when new weights have arrived.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpikv import kv, optimizers
from mpikv.arrays import as_numpy
from mpikv.calls.request import Request
from mpikv.codecs import compression
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.common.files import place_of
from mpikv.create import notices, spec
from mpikv.create.worker_device import spaces_for
from mpikv.errors import ConfigError
from mpikv.kvstore import KVStore
from mpikv.optimizers import Optimizer
from mpikv.optimizers.adam import RunningMeans
from mpikv.placement.keys import Key
from mpikv.session.base import Session
from mpikv.trainer import parameter as parameters
from mpikv.trainer import rows
from mpikv.trainer.own_updates import OwnUpdates
from mpikv.trainer.parameter import list_data, named, place_grad
from mpikv.trainer.torch_parameter import TorchBuffer, TorchParameter, is_module


class TrainedWeights:
    """The weights of a Trainer. The arguments are those of `Trainer`; clips: whether it clips by the global norm."""

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None,
        kvstore: KVStore | str | None,
        *,
        compression_params: Mapping[str, Any] | None,
        update_on_kvstore: bool | None,
        clips: bool,
    ) -> None:
        self._module = params if is_module(params) else None
        self._params = named(params)
        self._optimizer = optimizers.create(optimizer, **checks.options("optimizer_params", optimizer_params))
        self._scale = self._optimizer.rescale_grad
        self._steps = 0
        several_devices = any(len(list_data(p)) > 1 for p in self._params.values())
        self._store = store = _store_of(kvstore, several_devices)
        # The store if it makes the updates; None: each worker makes them.
        self._updater = store if _updates_on_store(store, update_on_kvstore, clips=clips) else None
        if checks.options("compression_params", compression_params) and store is None:
            raise ValueError("compression_params need a store, and with this kvstore nothing is sent")
        if store is None:
            self._spaces = spaces_for(
                p.tensor if hasattr(p, "tensor") else list_data(p)[0] for p in self._params.values()
            )
            weakref.finalize(self, self._spaces.close).atexit = False
        else:
            self._spaces = store.session.spaces
        for parameter in self._params.values():
            if isinstance(parameter, (TorchParameter, TorchBuffer)):
                parameter.through_host = self._spaces.device is None
        self._local = OwnUpdates(self._optimizer, self._spaces)
        # Of the store, or of this process alone.
        owner = self._local if store is None else store
        self._session, self._strategy = owner.session, owner.strategy
        self._asynchronous = "async" in self._session.name
        _check_stop_file(self._session)
        self._number = self._session.new_namespace()  # among the trainers of its store
        self._keys: dict[str, Key] = {name: f"trainer{self._number}/{name}" for name in self._params}
        if store is not None and compression_params:
            store.set_gradient_compression(compression_params, list(self._keys.values()))
        self._apply_factors()
        # Of transfers: the next forward pass needs the first parameters first.
        self._priorities = {name: -i for i, name in enumerate(self._params)}
        self._names = {id(getattr(parameter, "tensor", parameter)): name for name, parameter in self._params.items()}
        self._batch_size: float | None = None  # the one for which the optimizer's rescale_grad is set
        self._trained = {name: key for name, key in self._keys.items() if not self._is_frozen(name)}
        self._pulls: dict[str, Request | rows.ChangedRows] = {}  # of weights that were not waited for yet
        several = self._session.num_workers > 1
        # Whether there are several workers, each of which makes the updates by itself.
        self._workers_update = self._updater is None and several
        # True until the first step, in which workers agree on the factor that owners apply.
        self._factor_open = self._session.synchronous and several
        self._tensors = {name: p for name, p in self._params.items() if isinstance(p, TorchParameter)}
        self._sparse = rows.sparse_names(self._params, self._trained, self._updater, self._optimizer)
        self._start()

    def _start(self) -> None:
        """Copy worker 0's weights to all workers and devices, and set the optimizer of the store or of this worker."""
        data = {name: list_data(parameter) for name, parameter in self._params.items()}
        keys = list(self._trained.values())
        if self._store is not None:
            # Also parameters that are not trained: statistics of a batch normalisation must be equal at the start.
            for name in self._sparse:
                rows.start(self._store, self._keys[name], self._params[name])
            dense = [name for name in data if name not in self._sparse]
            outs = [data[name] for name in dense]
            self._store.broadcast([self._keys[name] for name in dense], [one[0] for one in outs], out=outs)
            self._data_written(data)
            _warn_of_codec(self._store, self._optimizer, keys)
        else:
            for name, replicas in data.items():
                self._write_sum(replicas[:1], replicas[1:], f"parameter {shown(name)}")
        if self._updater is not None:
            self._strategy.set_optimizer(self._optimizer, keys)
        else:
            for name, key in self._trained.items():
                self._local.add(key, data[name][0])
        if self._workers_update:
            self._strategy.compare_updates(self._optimizer, keys)

    def wait(self, parameter: Any) -> None:
        """Block until this parameter's weight of the last `step(wait=False)` has arrived.

        parameter: one of this trainer's, or its name; ValueError for any other.

        >>> weight = mpikv.Parameter(np.ones(2))
        >>> trainer = mpikv.Trainer([weight], 'sgd', {'learning_rate': 0.5}, kvstore=kv.create('local'))
        >>> weight.grad[...] = 1.0
        >>> trainer.step(wait=False)
        >>> trainer.wait(weight)
        >>> weight.data
        array([0.5, 0.5])
        """
        name = self._name_of(parameter, "wait")
        request = self._pulls.pop(name, None)
        if request is not None:
            request.wait()
            self._data_written([name])

    def _name_of(self, parameter: Any, call: str) -> str:
        name = parameter if isinstance(parameter, str) else self._names.get(id(parameter))
        if name is None or name not in self._params:
            raise ValueError(f"{call}: {shown(parameter)} is not among this trainer's parameters")
        return name

    def pull_weights(self) -> None:
        """Pull the present weights of the store into this worker's devices. Blocks.

        It is for `dist_async`, where other workers' pushes change the weights between this worker's steps; after a
        `barrier` of the store it pulls the final result. With other stores nothing changes.
        """
        self._finish_waiting()
        if self._updater is not None:
            trained = [name for name in self._params if not self._is_frozen(name)]
            dense = [name for name in trained if name not in self._sparse]
            pulls = [self._changed_rows(self._updater, name) for name in trained if name in self._sparse]
            self._updater.pull([self._keys[name] for name in dense], [list_data(self._params[name]) for name in dense])
            for pull in pulls:
                pull.wait()
            self._data_written(trained)

    def _finish_waiting(self) -> None:
        while self._pulls:
            self.wait(next(iter(self._pulls)))

    def _changed_rows(self, store: KVStore, name: str) -> rows.ChangedRows:
        return rows.ChangedRows(store, self._keys[name], self._params[name], self._priorities[name])

    def _data_written(self, names: Iterable[str]) -> None:
        if self._tensors:
            for name in names:
                parameters.data_written(self._params[name])

    def _write_sum(self, sources: Sequence[Any], outs: Sequence[Any], what: str) -> None:
        """Write the sum of one worker's arrays into others; it is added in the space of the first array."""
        if outs:
            callers = self._spaces.callers_arrays(sources)
            space = self._spaces.space_of(callers[0])
            total = self._spaces.total(space, callers, what, on_device=True)
            for out in self._spaces.callers_arrays(outs):
                self._spaces.write(space, out, total, what)

    def _is_frozen(self, name: str) -> bool:
        return parameters.is_frozen(self._params[name])

    # --- the factor of a worker's gradients (placement/labels.py)

    def _slot(self) -> int:
        """The slot of this trainer's optimizer."""
        return self._session.slot_of(self._session.infos[next(iter(self._trained.values()))])

    def _factor(self) -> float:
        """The factor of the sum of gradients that all workers have agreed on."""
        return self._session.attributes.factor(self._slot())

    def _scaling(self) -> AbstractContextManager[None]:
        """A context in which pushed gradients are scaled for an update that this worker makes by itself."""
        return self._session.attributes.scaling(self._slot()) if self._workers_update else nullcontext()

    def _agree_on_factor(self) -> None:
        """Agree on the factor in the first step. Gradients are scaled relative to it, which is rarely necessary."""
        if self._factor_open:
            self._session.agree_on_factor(next(iter(self._trained.values())))
            self._factor_open = False

    def _agreed_factor(self) -> Sequence[float]:
        """The factor that workers agreed on in the first step, and their number; () if they have not."""
        session = self._session
        agreed = session.synchronous and session.num_workers > 1 and not self._factor_open
        return (self._factor(), session.num_workers) if agreed else ()

    def _resume_factor(self, agreed: Sequence[float]) -> None:
        """Use the factor of the checkpoint if there are as many workers, so that the results have the same bits."""
        if self._factor_open and agreed and agreed[1] == self._session.num_workers:
            self._session.attributes.agree(self._slot(), agreed[0])
            self._factor_open = False

    # --- hyperparameters

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. Change its attributes alike on every worker; they apply from the next step on. See `step`."""
        return self._optimizer

    @property
    def kvstore(self) -> KVStore | None:
        """The store; None if there is none."""
        return self._store

    @property
    def learning_rate(self) -> float:
        """The learning rate; with a schedule the one of the last step (`steps`)."""
        schedule = self._optimizer.lr_scheduler
        return self._optimizer.learning_rate if schedule is None else float(schedule(max(1, self._steps)))

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate from the next step on, alike on every worker. UnsupportedError with a schedule. Local."""
        self._optimizer.set_learning_rate(lr)

    def _rescale(self, batch_size: float) -> None:
        """Make the optimizer divide gradients by `batch_size`."""
        self._batch_size = batch_size
        self._optimizer.rescale_grad = self._scale / batch_size
        self._apply_factors()

    def _apply_factors(self) -> None:
        """Set the factors of the optimizer, which are by key, from those that were set by parameters' names."""
        for attribute in ("lr_mult", "wd_mult"):
            factors: dict[Any, float] = getattr(self._optimizer, attribute)
            for name, parameter in self._params.items():
                own = float(getattr(parameter, attribute, 1.0))
                if name in factors or own != 1.0 or self._keys[name] in factors:
                    factors[self._keys[name]] = factors.get(name, 1.0) * own

    def _place_gradients(self, store: KVStore, trained: Sequence[str]) -> None:
        """Allocate the gradients in memory that the host's workers share, so that they are added without a copy.

        Each gets a place, also one on another device than its key: all workers must allocate alike.
        """
        kinds: dict[str, list[str]] = {}
        for name in trained:
            _, dtype = as_numpy.shape_and_dtype(list_data(self._params[name])[0], f"parameter {shown(name)}")
            kinds.setdefault(str(dtype), []).append(name)
        for dtype_name, names in sorted(kinds.items()):
            shapes = [tuple(list_data(self._params[name])[0].shape) for name in names]
            for name, memory in zip(names, store.zeros(shapes, dtype_name), strict=True):
                place_grad(self._params[name], memory)


def _store_of(kvstore: KVStore | str | None, several_devices: bool) -> KVStore | None:
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


def _check_stop_file(session: Session) -> None:
    """Raise ConfigError if the stop file cannot be written, since an error at the stop would lose the training."""
    path = session.stop_file
    if not path or session.rank:
        return
    try:
        folder = os.path.dirname(place_of(path))
    except OSError as error:
        raise ConfigError(f"MPIKV_STOP_FILE={shown(path)}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"MPIKV_STOP_FILE={shown(path)}: cannot be written in {folder}")


def _updates_on_store(store: KVStore | None, wanted: bool | None, *, clips: bool) -> bool:
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


def _warn_of_codec(store: KVStore, optimizer: Optimizer, keys: Sequence[Key]) -> None:
    """Warn if an optimizer like Adam gets gradients of a codec with which it trains badly."""
    if isinstance(optimizer, RunningMeans) or hasattr(optimizer, "betas"):
        for codec in {store.session.infos[key].codec for key in keys}:
            notices.warn_of_codec(compression.of_text(codec).push.name)
