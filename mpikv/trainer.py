"""Trainer: gluon's. It takes the gradients of a model's parameters through a store and brings the new weights back.

    trainer = Trainer(parameters, 'sgd', {'learning_rate': 0.1}, kvstore='dist_sync')
    ...                                  # forward and backward
    trainer.step()                       # gradients are means over the examples of their worker; or
    trainer.step(batch_size)             # they are sums; batch_size: examples of all workers and devices together

With `update_on_kvstore` the store holds the optimizer: a step is one `pushpull` of gradients and new weights, and in a
`dist` store every optimizer state exists once over all owners. Without, `pushpull` adds up the gradients, and every
worker updates for itself: what gradient clipping over the sum needs, between `allreduce_grads` and `update`.

Keys are 'trainerN/name', N counting the trainers of one store, so that two trainers on one store do not meet.

Source of names and defaults: MXNet 1.9, python/mxnet/gluon/trainer.py and model.py (_create_kvstore).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from mpikv import arrays, checks, optimizers
from mpikv import parameter as parameters
from mpikv.checks import shown
from mpikv.errors import MpikvError, PeerError, StallError, UnsupportedError
from mpikv.kvstore import KVStore, Request
from mpikv.local_updates import LocalUpdates
from mpikv.parameter import list_data, list_grad, named
from mpikv.runtime.abort import tells
from mpikv.session.base import OwnUpdates
from mpikv.strategies.base import Travelling
from mpikv.torch_parameter import TorchBuffer, TorchParameter
from mpikv.trainer_clip import factor_for, norm_of
from mpikv.trainer_ends import in_steps
from mpikv.trainer_files import TrainerFiles
from mpikv.trainer_overlap import Overlap
from mpikv.trainer_shares import Share, Shares, positive
from mpikv.trainer_store import place_gradients, store_of, updates_on_store


class Handed(NamedTuple):
    """A gradient that was handed over. request: of its sum, and `replicas` will hold it; None: the store updates."""

    request: Request | None
    replicas: list[Any]


class Trainer(TrainerFiles):
    """Applies an optimizer to a set of parameters.

    params: a torch.nn.Module, with its own names; a dict name -> parameter (sorted by name, as in gluon); or an
    iterable of parameters, or of pairs of name and parameter as `module.named_parameters()` gives. A parameter is an
    `mpikv.Parameter`, a `torch.nn.Parameter`, or anything with `data` and `grad` (or `list_data()` and `list_grad()`).
    One with `grad_req='null'` or `requires_grad=False` gets worker 0's value at the start and is left alone afterwards,
    and so do the buffers of a module (statistics of a batch normalisation), which `sync_buffers` makes equal again.
    A tensor with two names counts once. Names must be the same on all workers. optimizer: as in `optimizers.create`;
    optimizer_params: its arguments. `lr_mult` and `wd_mult` of the optimizer may name parameters, and an
    `mpikv.Parameter` may bring its own; the two are multiplied. kvstore: a type for `kv.create`, a store, or None.
    A type without 'dist' makes a store only where a parameter has several devices. Without a store, the devices of
    this process are summed all the same (**differs**: in gluon their weights drift apart). compression_params: for
    `set_gradient_compression` of the store. update_on_kvstore: whether the store makes the updates. None: True
    where there is a store. A `dist_async` store makes them always (False is a ValueError). clip_global_norm: scale each
    update down so that the norm of all its gradients together, of the mean that is applied, is at most this number. It
    takes the sum of all gradients before the update: every worker updates for itself then, with optimizer states for
    the whole model (update_on_kvstore=True is a ValueError, and so is `dist_async`). overlap: let the gradients of
    PyTorch parameters leave during the backward pass; see `no_sync`.

    Making a trainer is collective over the workers of a `dist` store, and worker 0's weights have reached every
    worker and device when it returns (**differs**: gluon sends them in the first step). Weights that the model
    changes later are overwritten by the next step of a store that makes the updates: load a checkpoint before
    making the trainer.

    Raises TypeError or ValueError for parameters or optimizers that are none; what `kv.create` and `init` raise.
    """

    @tells
    def __init__(  # noqa: PLR0917 - gluon's
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: KVStore | str | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        clip_global_norm: float | None = None,
        overlap: bool = False,
    ) -> None:
        self._params = named(params)
        self._optimizer = optimizers.create(optimizer, **checks.options("optimizer_params", optimizer_params))
        self._scale = self._optimizer.rescale_grad
        self._steps = 0
        several = any(len(list_data(p)) > 1 for p in self._params.values())
        self._store = store_of(kvstore, several)
        self._clip = None if clip_global_norm is None else positive(clip_global_norm, "clip_global_norm")
        self._on_store = updates_on_store(self._store, update_on_kvstore, clips=self._clip is not None)
        self.last_global_norm: float | None = None  # before clipping, of the last step; None without clip_global_norm
        if checks.options("compression_params", compression_params):
            if self._store is None:
                raise ValueError("compression_params need a store, and with this kvstore nothing is sent")
            self._store.set_gradient_compression(compression_params or {})
        self._check_stop_file()
        number = 0 if self._store is None else self._store.session.new_namespace()
        self._keys = {name: f"trainer{number}/{name}" for name in self._params}
        self._apply_factors()
        self._local = LocalUpdates(self._optimizer)
        self._order = {name: i for i, name in enumerate(self._params)}
        self._names = {id(getattr(parameter, "tensor", parameter)): name for name, parameter in self._params.items()}
        self._batch_size: float | None = None  # that the optimizer's rescale_grad is set for
        self._handed: dict[str, Handed] = {}  # gradients handed over since the last step
        self._handed_with: Mapping[str, Any] = {}  # attributes of the optimizer
        self._trainable = frozenset(name for name in self._params if not self._is_frozen(name))
        self._awaited: dict[str, Request] = {}  # weights of the last step that nobody has waited for yet
        self._bucketed: list[str] = []  # parameters whose keys travel together, if any do
        self._travelling: Travelling | None = None
        self._own: OwnUpdates | None = None  # where all workers update by themselves
        self._tensors = {name: p for name, p in self._params.items() if isinstance(p, TorchParameter)}
        self._start()
        devices = len(list_data(self._params[self._trained[0]]))
        self._shares = Shares(self._store, f"examples of trainer{number}", devices, self._optimizer)
        self._overlap = Overlap(self._tensors if overlap else {}, self._gradient_ready)

    def _start(self) -> None:
        """Bring worker 0's weights to all workers and devices, and the optimizer to where it runs."""
        data = {name: list_data(parameter) for name, parameter in self._params.items()}
        trained = self._trained = [name for name in self._params if name in self._trainable]
        if self._store is not None:
            # Parameters that are not trained too: statistics of a batch normalisation must agree at the start.
            keys = list(self._keys.values())
            self._store.broadcast(keys, [replicas[0] for replicas in data.values()], out=list(data.values()))
            self._data_written(data)
        else:
            for name, replicas in data.items():
                first = arrays.host_view(replicas[0], f"parameter {shown(name)}")
                for other in replicas[1:]:
                    arrays.write(other, first, f"parameter {shown(name)}")
        if self._on_store and self._store is not None:
            self._store.strategy.set_optimizer(self._optimizer, [self._keys[name] for name in trained])
        else:
            for name in trained:
                self._local.add(self._keys[name], data[name][0])
            if self._store is not None:
                self._own = self._store.session.own_updates(self._optimizer, [self._keys[name] for name in trained])
        if self._store is not None and self._store.session.shares_memory:
            place_gradients(self._store, self._params, trained)
        elif self._store is not None:
            # A backward pass comes to the last parameters first.
            self._bucketed = list(reversed(trained))
            self._travelling = self._store.strategy.bucket([self._keys[name] for name in self._bucketed])

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
            raise ValueError(f"push_grad: {shown(parameter)} is not among this trainer's parameters")
        if name in self._handed:
            raise ValueError(f"push_grad: the gradient of {shown(name)} was handed over already; `step` comes next")
        batch_size = self._batch_size if batch_size is None else batch_size
        if self._store is None or self._is_frozen(name) or batch_size is None or self._store.session.shares_memory:
            return
        if self._shares.joined or name not in self._trainable:  # `step` knows the number of examples, or what is wrong
            return
        self._check_batch_size(batch_size)
        replicas = list_grad(self._params[name])
        if any(replica is None for replica in replicas):
            raise ValueError(f"push_grad: grad is None in {shown(name)}; call it after the gradient has been written")
        self._finish_waiting()
        self._rescale(batch_size)
        if not self._handed:
            self._handed_with = self._optimizer.attributes()
        if self._on_store:
            self._store.push(self._keys[name], replicas, self._priority(name))
            self._handed[name] = Handed(None, [])
        elif self._own is None or self._own.may_leave():  # else workers have to agree first, which `step` does
            request = self._store.pushpull_async(self._keys[name], replicas, priority=self._priority(name))
            self._handed[name] = Handed(request, replicas)

    def _gradient_ready(self, name: str) -> None:
        """A backward pass has completed this gradient."""
        if not self._is_frozen(name):
            self.push_grad(name)

    def no_sync(self) -> AbstractContextManager[None]:
        """`with trainer.no_sync():` around backward passes whose gradients are only added up, for a later step.

        With overlap=True, and several hosts or servers, a gradient leaves as soon as a backward pass has completed it,
        for the batch_size of the last step (before the first step, and in `join`, with the step). So each step then
        has one backward pass outside `no_sync`, which comes last, and after which nobody changes gradients or the
        optimizer before the step, whose batch_size is that of the last one: all else is an error. A step that needs
        another batch_size makes all its passes here. Without overlap it changes nothing. Local.
        """
        return self._overlap.paused()

    def _priority(self, name: str) -> int:
        """The next forward pass needs the first parameters first."""
        return -self._order[name]

    def _check_batch_size(self, batch_size: float) -> None:
        if self._handed and batch_size != self._batch_size:
            raise ValueError(
                f"gradients of this step were handed over for a batch of {self._batch_size:g}, not {batch_size:g}: "
                "pass the same batch_size to push_grad and step (with overlap=True, call backward in no_sync() where "
                "the batch_size changes)"
            )

    def _check_handed(self) -> None:
        """Gradients that were handed over must be those of now, and for the same update as the others."""
        self._overlap.check()
        if self._handed and self._on_store and self._optimizer.attributes() != self._handed_with:
            raise ValueError(
                "the optimizer was changed after gradients of this step had been handed over: set the learning rate "
                "before the backward pass"
            )

    def step(
        self,
        batch_size: float | None = None,
        ignore_stale_grad: bool = False,
        *,
        examples: float | None = None,
        wait: bool = True,
    ) -> None:
        """One update of all parameters. What the arguments are depends on what the gradients are.

        `step()`: means over the examples of their worker (and device), as PyTorch's losses give them. The update is
        made with the mean of these over the workers and devices. `step(examples=n)`: the same, and n is the number of
        examples of this worker. The update is made with the mean over all examples, and costs a small exchange more.
        `step(batch_size)`: sums over examples, as in gluon. The update is made with (their sum over devices and
        workers) / batch_size; batch_size is the number of examples of all workers together, in `join` of this one.

        Where workers give different batch sizes, as in the last, short batch of an epoch, each worker's gradient is
        divided by its own. Any other attribute of the optimizer that differs between workers is a ConfigError on all of
        them, and nothing is updated; in a `dist_async` store each worker's gradients are applied with its own.

        Blocks; in a synchronous store until all workers have come. ignore_stale_grad: a parameter without a
        gradient (`grad` is None) counts as one with gradient 0, so that workers stay in step; otherwise it is a
        ValueError that names it, and nothing is sent. (A NumPy array does not tell whether it was written since the
        last step.) wait=False: returns at once where the store makes the updates; `wait(parameter)` then blocks until
        that one's weight is there, and the next step, push_grad or close waits for all. Raises FloatingPointError,
        on every worker and with all weights as they were, where clip_global_norm finds a norm that is not finite.
        """
        checks.flag("ignore_stale_grad", ignore_stale_grad)
        checks.flag("wait", wait)
        waits_for = self._steps + (not self._awaited)  # after wait=False the last step is to end first
        if self._shares.joined or examples is not None:
            self._grads(ignore_stale_grad)  # what is missing must be found before others count on this worker
        try:
            self._step(self._shares.of_step(batch_size, examples), ignore_stale_grad, wait=wait)
        except (PeerError, StallError) as error:
            raise in_steps(error, waits_for).with_traceback(error.__traceback__) from error.__cause__

    def _step(self, share: Share, ignore_stale_grad: bool, *, wait: bool) -> None:
        batch_size = share.divisor
        self._check_batch_size(batch_size)
        self._finish_waiting()
        self._rescale(batch_size)
        self._check_handed()
        grads = self._grads(ignore_stale_grad)
        if share.factor != 1.0:
            self._weigh(grads, share.factor)
        if self._on_store and self._store is not None:
            self._step_on_store(self._store, grads, wait=wait)
        else:
            ratio = 1.0 if self._own is None else self._own.begin(contributed=bool(self._handed))
            self._allreduce(grads, ratio)
            self._update(grads, None if self._own is None else self._own.end())
        self._all_sent()
        self._count_step(share.examples)

    def _weigh(self, grads: dict[str, list[Any]], factor: float) -> None:
        """Let this worker's gradients, means, weigh as much as its examples do."""
        if self._handed:
            raise ValueError(
                "step(examples=) with other numbers on other workers, after gradients were handed over: with "
                "overlap=True call backward in no_sync() where they may differ"
            )
        self._scale_grads(grads, factor)

    @contextmanager
    def join(self) -> Iterator[None]:
        """`with trainer.join():` around a loop that makes more steps on some workers than on others.

        A worker that comes to the end of the block goes on taking part in the others' steps, with gradients of 0, until
        all have come there. So it may leave its loop whenever it has no more data, also by `break`. Every update is the
        mean over the examples that were there: `step(examples=n)` or `step(batch_size)` with this worker's own number,
        or `step()` for the mean over the workers that were there. All workers have the same weights at the end.

        A step in it costs one small exchange more; gradients leave with the step. `learning_rate` may be set in the
        loop, to the same on all workers that are in it. Entering and leaving is collective, and blocks. An exception
        leaves at once, and takes no part: the others get the errors of a worker that is gone. MpikvError inside another
        `join` of this trainer; UnsupportedError for `dist_async`, where nobody waits for anybody.
        """
        if self._handed:
            raise MpikvError("join after gradients were handed over: begin it before the backward pass")
        with self._shares.join(), self.no_sync():
            yield
            while (share := self._shares.of_others()) is not None:
                for name, parameter in self._params.items():
                    if not self._is_frozen(name):
                        parameters.zero_grad(parameter)
                self._step(share, ignore_stale_grad=False, wait=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, as a torch.optim.Optimizer does. Those of an `mpikv.Parameter` become 0. Local.

        set_to_none=False makes those of PyTorch parameters 0, too, which is neither quicker nor slower.
        """
        for parameter in self._params.values():
            if not isinstance(parameter, TorchBuffer):
                parameters.clear_grad(parameter, set_to_none=set_to_none)

    def _skip_frozen(self) -> None:
        """Parameters that were trained at the start and are not any more: those they travel with must not wait."""
        if self._travelling is not None:
            self._travelling.skip([self._keys[name] for name in self._bucketed if self._is_frozen(name)])

    def _step_on_store(self, store: KVStore, grads: dict[str, list[Any]], *, wait: bool) -> None:
        self._skip_frozen()
        outs = {name: list_data(self._params[name]) for name in grads}
        if wait and not self._handed:
            store.pushpull([self._keys[name] for name in grads], list(grads.values()), out=list(outs.values()))
            self._data_written(grads)
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
            raise ValueError(f"wait: {shown(parameter)} is not among this trainer's parameters")
        request = self._awaited.pop(name, None)
        if request is not None:
            request.wait()
            self._data_written([name])

    def _data_written(self, names: Iterable[str]) -> None:
        if self._tensors:
            for name in names:
                parameters.data_written(self._params[name])

    def _all_sent(self) -> None:
        self._handed.clear()
        self._overlap.clear()

    def _finish_waiting(self) -> None:
        while self._awaited:
            self.wait(next(iter(self._awaited)))

    def pull_weights(self) -> None:
        """Bring the weights that the store has now to this worker's devices. Blocks.

        For `dist_async`, where other workers' pushes change them between this worker's steps; after a `barrier` of the
        store it is the final result. Nothing changes with other stores.
        """
        self._finish_waiting()
        if self._on_store and self._store is not None:
            trained = [name for name in self._params if not self._is_frozen(name)]
            keys = [self._keys[name] for name in trained]
            self._store.pull(keys, [list_data(self._params[name]) for name in trained])
            self._data_written(trained)

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Replace every gradient by the sum over devices and workers. `update_on_kvstore=False` only. Blocks.

        `update` follows; in between the sums may be changed, in the same way on every worker.
        """
        self._need_own_updates("allreduce_grads")
        if self._own is not None:
            self._own.settle()
        self._overlap.check()
        self._allreduce(self._grads(ignore_stale_grad))

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> None:
        """Update the weights from the sums that `allreduce_grads` left. `update_on_kvstore=False` only.

        batch_size: as for `step`, but the same on every worker, since the gradients have been added already.
        Local; where this or another attribute has changed since the last update, blocks until it is known that it has
        on all workers alike. ConfigError where not: on those that have changed it before anything is updated here, on
        the others then or in the next call.
        """
        self._need_own_updates("update")
        share = self._shares.of_step(batch_size, None)
        self._rescale(share.divisor)
        grads = self._grads(ignore_stale_grad)
        if self._own is not None:
            self._own.begin(separate=True)
            self._own.end()
        self._update(grads)
        self._count_step(share.examples)

    def _allreduce(self, grads: dict[str, list[Any]], ratio: float = 1.0) -> None:
        if self._store is not None:
            self._skip_frozen()
            if ratio != 1.0:
                self._scale_grads(grads, ratio)
            rest = [name for name in grads if name not in self._handed]
            self._store.pushpull([self._keys[name] for name in rest], [grads[name] for name in rest])
            for handed in self._handed.values():
                if handed.request is not None:
                    handed.request.wait()
            for name in grads if self._tensors else ():
                parameters.grad_written(self._params[name])
            self._all_sent()
            return
        for name, replicas in grads.items():
            if len(replicas) > 1:
                what = f"the gradient of parameter {shown(name)}"
                total = arrays.sum_devices(replicas, what, on_device=False)
                for replica in replicas:
                    arrays.write(replica, total, what)

    @staticmethod
    def _scale_grads(grads: dict[str, list[Any]], ratio: float) -> None:
        for name, replicas in grads.items():
            what = f"the gradient of parameter {shown(name)}"
            for replica in replicas:
                view = arrays.host_view(replica, what)
                wide = arrays.sum_dtype(view.dtype)
                arrays.write(replica, (view.astype(wide, copy=False) * wide.type(ratio)).reshape(-1), what)

    def _update(self, grads: dict[str, list[Any]], factor: float | None = None) -> None:
        """factor: the units that the gradients are in, where workers' own factors differ."""
        own = self._optimizer.rescale_grad
        self._optimizer.rescale_grad = own if factor is None else factor
        try:
            if self._clip is not None:
                self.last_global_norm = norm_of(self._optimizer, grads)
                self._optimizer.rescale_grad *= factor_for(self.last_global_norm, self._clip)
            for name, replicas in grads.items():
                self._local.apply(self._keys[name], list_data(self._params[name]), replicas[0])
        finally:
            self._optimizer.rescale_grad = own
        self._data_written(grads)

    def _grads(self, ignore_stale_grad: bool) -> dict[str, list[Any]]:
        """The gradients of every trained parameter, one per device; nothing is sent before all are there."""
        result: dict[str, list[Any]] = {}
        missing = []
        for name, parameter in self._params.items():
            if parameters.is_frozen(parameter):
                continue
            if name in self._handed:
                result[name] = self._handed[name].replicas
                continue
            if name not in self._trainable:
                raise ValueError(
                    f"parameter {name!r} was frozen when the Trainer was made, and has no optimizer: make a new Trainer"
                )
            replicas = list_grad(parameter)
            if any(replica is None for replica in replicas):
                if ignore_stale_grad:
                    parameters.zero_grad(parameter)
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
        if self._shares.joined:
            raise UnsupportedError(f"{call} in join: the workers that have come to its end take part in step alone")
        if self._on_store:
            raise UnsupportedError(
                f"{call}: the store updates the weights here, so there are no summed gradients to see; "
                "make the Trainer with update_on_kvstore=False"
            )

    def _is_frozen(self, name: str) -> bool:
        return parameters.is_frozen(self._params[name])

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
        try:
            number = checks.number("batch_size", batch_size)
        except (TypeError, ValueError):
            number = 0.0
        if number <= 0:
            what = "the number of examples of all workers together, above 0"
            raise ValueError(f"batch_size is {what}; got {shown(batch_size)}")
        self._batch_size = batch_size
        self._optimizer.rescale_grad = self._scale / number
        self._apply_factors()

    def _apply_factors(self) -> None:
        """Give the optimizer, which knows keys, the factors that were set by parameters' names."""
        for attribute in ("lr_mult", "wd_mult"):
            factors: dict[Any, float] = getattr(self._optimizer, attribute)
            for name, parameter in self._params.items():
                own = float(getattr(parameter, attribute, 1.0))
                if name in factors or own != 1.0 or self._keys[name] in factors:
                    factors[self._keys[name]] = factors.get(name, 1.0) * own
