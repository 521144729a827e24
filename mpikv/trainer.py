"""Trainer: gluon's. It takes the gradients of a model's parameters through a store and brings the new weights back.

    trainer = Trainer(parameters, 'sgd', {'learning_rate': 0.1}, kvstore='dist_sync')
    ...                                  # forward and backward: gradients summed over the examples of this worker
    trainer.step(batch_size)             # batch_size: examples of all workers and devices together; may differ

With `update_on_kvstore` the store holds the optimizer: a step is one `pushpull` of gradients and new weights, and in a
`dist` store every optimizer state exists once over all owners. Without, `pushpull` adds up the gradients, and every
worker updates for itself: what gradient clipping over the sum needs, between `allreduce_grads` and `update`.

Keys are 'trainerN/name', N counting the trainers of one store, so that two trainers on one store do not meet.

Source of names and defaults: MXNet 1.9, python/mxnet/gluon/trainer.py and model.py (_create_kvstore).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpikv import arrays, kv, optimizers, spec
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore, Request
from mpikv.local_updates import LocalUpdates
from mpikv.parameter import Parameter, list_data, list_grad, named
from mpikv.strategies.base import OwnUpdates
from mpikv.trainer_files import TrainerFiles


class Trainer(TrainerFiles):
    """Applies an optimizer to a set of parameters.

    params: a dict name -> parameter (sorted by name, as in gluon) or a list or other iterable of them. A parameter
    is an `mpikv.Parameter`, a `torch.nn.Parameter`, or anything with `data` and `grad` (or `list_data()` and
    `list_grad()`). One with `grad_req='null'` or `requires_grad=False` gets worker 0's value at the start and is
    left alone afterwards. Names must be the same on all workers. optimizer: as in `optimizers.create`;
    optimizer_params: its arguments. `lr_mult` and `wd_mult` of the optimizer may name parameters, and an
    `mpikv.Parameter` may bring its own; the two are multiplied. kvstore: a type for `kv.create`, a store, or None.
    A type without 'dist' makes a store only where a parameter has several devices. Without a store, the devices of
    this process are summed all the same (**differs**: in gluon their weights drift apart). compression_params: for
    `set_gradient_compression` of the store. update_on_kvstore: whether the store makes the updates. None: True
    where there is a store. A `dist_async` store makes them always (False is a ValueError).

    Making a trainer is collective over the workers of a `dist` store, and worker 0's weights have reached every
    worker and device when it returns (**differs**: gluon sends them in the first step). Weights that the model
    changes later are overwritten by the next step of a store that makes the updates: load a checkpoint before
    making the trainer.

    Raises TypeError or ValueError for parameters or optimizers that are none; what `kv.create` and `init` raise.
    """

    def __init__(  # noqa: PLR0917 - gluon's
        self,
        params: Mapping[str, Any] | Iterable[Any],
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: KVStore | str | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._params = named(params)
        self._optimizer = optimizers.create(optimizer, **dict(optimizer_params or {}))
        self._scale = self._optimizer.rescale_grad
        self._steps = 0
        several = any(len(list_data(p)) > 1 for p in self._params.values())
        self._store = _store(kvstore, several)
        self._on_store = _updates_on_store(self._store, update_on_kvstore)
        if compression_params:
            if self._store is None:
                raise ValueError("compression_params need a store, and with this kvstore nothing is sent")
            self._store.set_gradient_compression(compression_params)
        self._check_stop_file()
        number = 0 if self._store is None else self._store._new_namespace()
        self._keys = {name: f"trainer{number}/{name}" for name in self._params}
        self._apply_factors()
        self._local = LocalUpdates(self._optimizer)
        self._order = {name: i for i, name in enumerate(self._params)}
        self._names = {id(parameter): name for name, parameter in self._params.items()}
        self._batch_size: float | None = None  # that the optimizer's rescale_grad is set for
        self._handed: dict[str, Request | None] = {}  # gradients handed over since the last step
        self._awaited: dict[str, Request] = {}  # weights of the last step that nobody has waited for yet
        self._bucketed: list[str] = []
        self._frozen: list[str] = []  # of these, in the last step
        self._own: OwnUpdates | None = None  # where all workers update by themselves
        self._start()

    def _start(self) -> None:
        """Bring worker 0's weights to all workers and devices, and the optimizer to where it runs."""
        data = {name: list_data(parameter) for name, parameter in self._params.items()}
        trained = self._trained = [name for name in self._params if not self._is_frozen(name)]
        if self._store is not None:
            # Parameters that are not trained too: statistics of a batch normalisation must agree at the start.
            keys = list(self._keys.values())
            self._store.broadcast(keys, [replicas[0] for replicas in data.values()], out=list(data.values()))
        else:
            for name, replicas in data.items():
                first = arrays.host_view(replicas[0], f"parameter {name!r}")
                for other in replicas[1:]:
                    arrays.write(other, first, f"parameter {name!r}")
        if self._on_store and self._store is not None:
            self._store._set_optimizer_for([self._keys[name] for name in trained], self._optimizer)
        else:
            for name in trained:
                self._local.add(self._keys[name], data[name][0])
            if self._store is not None:
                self._own = self._store._own_updates([self._keys[name] for name in trained], self._optimizer)
        if self._store is not None and self._store._shares_memory:
            self._place_gradients(trained)
        elif self._store is not None:
            # A backward pass comes to the last parameters first.
            self._bucketed = list(reversed(trained))
            self._store._bucket([self._keys[name] for name in self._bucketed])

    def _place_gradients(self, trained: Sequence[str]) -> None:
        """Gradients of NumPy parameters go to memory that the host's workers share, side by side.

        There is a place for each parameter, also where this worker's is on a device: all workers must allocate alike,
        and memory that nobody writes to takes no room.
        """
        assert self._store is not None
        by_dtype: dict[str, list[str]] = {}
        for name in trained:
            _, dtype = arrays.shape_and_dtype(list_data(self._params[name])[0], f"parameter {name!r}")
            by_dtype.setdefault(str(dtype), []).append(name)
        for dtype_name, names in sorted(by_dtype.items()):
            shapes = [tuple(list_data(self._params[name])[0].shape) for name in names]
            for name, memory in zip(names, self._store.zeros(shapes, dtype_name), strict=True):
                parameter = self._params[name]
                if isinstance(parameter, Parameter):
                    parameter._place_grad(memory)

    # --- the step

    def push_grad(self, parameter: Any, batch_size: float | None = None) -> None:
        """Hand over a gradient as soon as the backward pass has it, so that it travels while the pass goes on.

        parameter: one of this trainer's, or its name. Its gradient is not needed any more when this returns, unless
        `update_on_kvstore=False`: then the sum will be written into it, before `step` returns. batch_size: as `step`
        will be called with; default that of the last step. Before the first step, without it, the gradient goes with
        `step`, and so it does where all workers are on one host and share memory: there is no link to keep busy, and
        one call for all is faster. `step` sends what was not handed over. Does not wait for other workers.

        Raises ValueError for a parameter that is not this trainer's, one handed over before in this step, a missing
        gradient, or a batch_size other than that of gradients handed over before.
        """
        name = parameter if isinstance(parameter, str) else self._names.get(id(parameter))
        if name not in self._params:
            raise ValueError(f"push_grad: {parameter!r} is not among this trainer's parameters")
        if name in self._handed:
            raise ValueError(f"push_grad: the gradient of {name!r} was handed over already; `step` comes next")
        batch_size = self._batch_size if batch_size is None else batch_size
        if self._store is None or self._is_frozen(name) or batch_size is None or self._store._shares_memory:
            return
        self._check_batch_size(batch_size)
        replicas = list_grad(self._params[name])
        if any(replica is None for replica in replicas):
            raise ValueError(f"push_grad: grad is None in {name!r}; call it after the gradient has been written")
        self._finish_waiting()
        self._rescale(batch_size)
        if self._on_store:
            self._store.push(self._keys[name], replicas, self._priority(name))
            self._handed[name] = None
        elif self._own is None or self._own.may_leave():  # else workers have to agree first, which `step` does
            self._handed[name] = self._store.pushpull_async(self._keys[name], replicas, priority=self._priority(name))

    def _priority(self, name: str) -> int:
        """The next forward pass needs the first parameters first."""
        return -self._order[name]

    def _check_batch_size(self, batch_size: float) -> None:
        if self._handed and batch_size != self._batch_size:
            raise ValueError(
                f"gradients of this step were handed over for a batch of {self._batch_size:g}, not {batch_size:g}: "
                "pass the same batch_size to push_grad and step"
            )

    def step(self, batch_size: float, ignore_stale_grad: bool = False, *, wait: bool = True) -> None:
        """One update of all parameters with (sum of the gradients over devices and workers) / batch_size.

        batch_size: the number of examples that all workers' gradients are of together. Where workers give different
        ones, as in the last, short batch of an epoch, each worker's gradient is divided by its own. Any other attribute
        of the optimizer that differs between workers is a ConfigError on all of them, and nothing is updated; in a
        `dist_async` store each worker's gradients are applied with its own. Blocks; in a synchronous store until all
        workers have come. ignore_stale_grad: a parameter without a gradient (`grad` is None) counts as one with
        gradient 0, so that workers stay in step; otherwise it is a ValueError that names it, and nothing is sent. (A
        NumPy array does not tell whether it was written since the last step.) wait=False: returns at once where the
        store makes the updates; `wait(parameter)` then blocks until that one's weight is there, and the next step,
        push_grad or close waits for all.
        """
        self._check_batch_size(batch_size)
        self._finish_waiting()
        self._rescale(batch_size)
        grads = self._grads(ignore_stale_grad)
        if self._on_store and self._store is not None:
            self._step_on_store(self._store, grads, wait=wait)
        else:
            ratio = 1.0 if self._own is None else self._own.begin(contributed=bool(self._handed))
            self._allreduce(grads, ratio)
            self._update(grads, None if self._own is None else self._own.end())
        self._handed.clear()
        self._count_step()

    def _skip_frozen(self) -> None:
        """Parameters that were trained at the start and are not any more: those they travel with must not wait."""
        frozen = [name for name in self._bucketed if self._is_frozen(name)]
        if self._store is not None and (frozen or self._frozen):
            self._store._skip([self._keys[name] for name in frozen], changed=frozen != self._frozen)
        self._frozen = frozen

    def _step_on_store(self, store: KVStore, grads: dict[str, list[Any]], *, wait: bool) -> None:
        self._skip_frozen()
        outs = {name: list_data(self._params[name]) for name in grads}
        if wait and not self._handed:
            store.pushpull([self._keys[name] for name in grads], list(grads.values()), out=list(outs.values()))
            return
        for name, replicas in grads.items():
            if name not in self._handed:
                store.push(self._keys[name], replicas, self._priority(name))
        for name in sorted(grads, key=self._order.__getitem__):
            self._awaited[name] = store.pull_async(self._keys[name], outs[name], self._priority(name))
        if wait:
            self._finish_waiting()

    def wait(self, parameter: Any) -> None:
        """Block until the weight that `step(wait=False)` did not wait for has arrived; at once if it has."""
        name = parameter if isinstance(parameter, str) else self._names.get(id(parameter))
        if name not in self._params:
            raise ValueError(f"wait: {parameter!r} is not among this trainer's parameters")
        request = self._awaited.pop(name, None)
        if request is not None:
            request.wait()

    def _finish_waiting(self) -> None:
        while self._awaited:
            self.wait(next(iter(self._awaited)))

    def pull_weights(self) -> None:
        """Bring the weights that the store has now to this worker's devices. Blocks.

        For `dist_async`, where other workers' pushes change them between this worker's steps; after a `barrier` of the
        store it is the final result. Nothing changes with other stores.
        """
        if self._on_store and self._store is not None:
            trained = [name for name in self._params if not self._is_frozen(name)]
            keys = [self._keys[name] for name in trained]
            self._store.pull(keys, [list_data(self._params[name]) for name in trained])

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Replace every gradient by the sum over devices and workers. `update_on_kvstore=False` only. Blocks.

        `update` follows; in between the sums may be changed, in the same way on every worker.
        """
        self._need_own_updates("allreduce_grads")
        if self._own is not None:
            self._own.settle()
        self._allreduce(self._grads(ignore_stale_grad))

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights from the sums that `allreduce_grads` left. `update_on_kvstore=False` only.

        batch_size: the same on every worker, since the gradients have been added already (`step` takes different ones).
        Local; where this or another attribute has changed since the last update, blocks until it is known that it has
        on all workers alike. ConfigError where not: on those that have changed it before anything is updated here, on
        the others then or in the next call.
        """
        self._need_own_updates("update")
        self._rescale(batch_size)
        grads = self._grads(ignore_stale_grad)
        if self._own is not None:
            self._own.begin(separate=True)
            self._own.end()
        self._update(grads)
        self._count_step()

    def _allreduce(self, grads: dict[str, list[Any]], ratio: float = 1.0) -> None:
        if self._store is not None:
            self._skip_frozen()
            if ratio != 1.0:
                self._scale_grads(grads, ratio)
            rest = [name for name in grads if name not in self._handed]
            self._store.pushpull([self._keys[name] for name in rest], [grads[name] for name in rest])
            for request in self._handed.values():
                if request is not None:
                    request.wait()
            self._handed.clear()
            return
        for name, replicas in grads.items():
            if len(replicas) > 1:
                what = f"the gradient of parameter {name!r}"
                total = arrays.sum_devices(replicas, what, on_device=False)
                for replica in replicas:
                    arrays.write(replica, total, what)

    @staticmethod
    def _scale_grads(grads: dict[str, list[Any]], ratio: float) -> None:
        for name, replicas in grads.items():
            what = f"the gradient of parameter {name!r}"
            for replica in replicas:
                view = arrays.host_view(replica, what)
                wide = arrays.sum_dtype(view.dtype)
                arrays.write(replica, (view.astype(wide, copy=False) * wide.type(ratio)).reshape(-1), what)

    def _update(self, grads: dict[str, list[Any]], factor: float | None = None) -> None:
        """factor: the units that the gradients are in, where workers' own factors differ."""
        own = self._optimizer.rescale_grad
        self._optimizer.rescale_grad = own if factor is None else factor
        try:
            for name, replicas in grads.items():
                self._local.apply(self._keys[name], list_data(self._params[name]), replicas[0])
        finally:
            self._optimizer.rescale_grad = own

    def _grads(self, ignore_stale_grad: bool) -> dict[str, list[Any]]:
        """The gradients of every trained parameter, one per device; nothing is sent before all are there."""
        result = {}
        missing = []
        for name, parameter in self._params.items():
            if self._is_frozen(name):
                continue
            replicas = list_grad(parameter)
            if any(replica is None for replica in replicas):
                if ignore_stale_grad:
                    parameter.grad = copy.deepcopy(parameter.data)
                    parameter.grad[...] = 0
                    replicas = list_grad(parameter)
                else:
                    missing.append(name)
            result[name] = replicas
        if missing:
            raise ValueError(
                f"grad is None in {', '.join(map(repr, missing))}: run the backward pass before the step; "
                "for a parameter that this model does not use, set requires_grad=False on all workers, or pass "
                "ignore_stale_grad=True"
            )
        return result

    def _need_own_updates(self, call: str) -> None:
        if self._on_store:
            raise UnsupportedError(
                f"{call}: the store updates the weights here, so there are no summed gradients to see; "
                "make the Trainer with update_on_kvstore=False"
            )

    def _is_frozen(self, name: str) -> bool:
        parameter = self._params[name]
        return getattr(parameter, "grad_req", "write") == "null" or not getattr(parameter, "requires_grad", True)

    # --- hyperparameters

    @property
    def optimizer(self) -> optimizers.Optimizer:
        """The optimizer. Attributes changed here, the same on every worker, hold from the next step on: see `step`."""
        return self._optimizer

    @property
    def kvstore(self) -> KVStore | None:
        """The store, None where there is none."""
        return self._store

    @property
    def learning_rate(self) -> float:
        """The learning rate; with a schedule that of the last step (`steps`)."""
        schedule = self._optimizer.lr_scheduler
        return self._optimizer.learning_rate if schedule is None else float(schedule(max(1, self._steps)))

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on; the same on every worker. UnsupportedError with a schedule."""
        self._optimizer.set_learning_rate(lr)

    def _rescale(self, batch_size: float) -> None:
        """Let the optimizer divide by it."""
        if (
            not isinstance(batch_size, bool)
            and hasattr(batch_size, "__float__")
            and 0 < float(batch_size) < float("inf")
        ):
            self._batch_size = batch_size
            self._optimizer.rescale_grad = self._scale / float(batch_size)
            self._apply_factors()
            return
        raise ValueError(f"batch_size is the number of examples of all workers together, above 0; got {batch_size!r}")

    def _apply_factors(self) -> None:
        """Give the optimizer, which knows keys, the factors that were set by parameters' names."""
        for attribute in ("lr_mult", "wd_mult"):
            factors: dict[Any, float] = getattr(self._optimizer, attribute)
            for name, parameter in self._params.items():
                own = float(getattr(parameter, attribute, 1.0))
                if name in factors or own != 1.0 or self._keys[name] in factors:
                    factors[self._keys[name]] = factors.get(name, 1.0) * own


def _store(kvstore: KVStore | str | None, several_devices: bool) -> KVStore | None:
    if kvstore is None or isinstance(kvstore, KVStore):
        return kvstore
    if isinstance(kvstore, str):
        wanted = spec.parse(kvstore)  # an unknown name must not pass, even where no store is made
        return kv.create(kvstore) if several_devices or wanted.distributed else None
    raise TypeError(f"kvstore is a type such as 'dist_sync', a store or None, not {type(kvstore).__name__}")


def _updates_on_store(store: KVStore | None, wanted: bool | None) -> bool:
    if store is None:
        if wanted:
            raise ValueError("update_on_kvstore=True needs a store; with this kvstore there is none")
        return False
    if "async" in store.type and wanted is False:
        raise ValueError(
            f"a {store.type} store makes the updates itself; leave update_on_kvstore out, or use dist_sync"
        )
    if wanted is None:
        return store.is_capable("optimizer")
    if not isinstance(wanted, bool):
        raise TypeError(f"update_on_kvstore is True, False or None, not {wanted!r}")
    return wanted
