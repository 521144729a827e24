"""The Trainer of gluon: it pushes the gradients of a model's parameters to a store, and pulls the new weights.

With `update_on_kvstore` the store holds the optimizer: a step is one `pushpull` of gradients and new weights, and in a
`dist` store every optimizer state exists once over all owners. Without it, `pushpull` adds the gradients, and every
worker updates its weights itself, so that the sum can be clipped between `allreduce_grads` and `update`.

Keys are 'trainerN/name', where N counts the trainers of one store, so that two trainers on one store have different
keys.

Source of names and defaults: MXNet 1.9, python/mxnet/gluon/trainer.py and model.py (_create_kvstore).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

from mpikv.arrays.row_sparse import RowSparse
from mpikv.calls.request import Request
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.create import notices
from mpikv.errors import MpikvError, PeerError, StallError, UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.runtime.abort import tells
from mpikv.trainer import parameter as parameters
from mpikv.trainer.checkpoint import WorkerState, check_kept
from mpikv.trainer.files import TrainerFiles
from mpikv.trainer.overlap import Overlap
from mpikv.trainer.own_updates import norm_of
from mpikv.trainer.parameter import list_data, list_grad
from mpikv.trainer.shares import Share, Shares, in_steps, positive
from mpikv.trainer.torch_parameter import TorchBuffer, added_parameters


class Trainer(TrainerFiles):
    """Applies an optimizer to a set of parameters, with the gradients of all workers and devices.

    params: a torch.nn.Module; a dict from names to parameters, which are taken in the order of their names; or an
    iterable of parameters, or of pairs of name and parameter as `module.named_parameters()` yields them. A parameter is
    an `mpikv.Parameter`, a `torch.nn.Parameter`, or anything with `data` and `grad` (or `list_data()` and
    `list_grad()`). Names must be the same on all workers. A tensor with two names counts once. A parameter with
    `grad_req='null'` or `requires_grad=False` gets worker 0's value at the start and is not changed afterwards. So do
    the buffers of a module (statistics of a batch normalisation), which `sync_buffers` makes equal again.

    optimizer: as in `optimizers.create`; optimizer_params: its arguments. `lr_mult` and `wd_mult` of the optimizer may
    name parameters, and an `mpikv.Parameter` may have factors of its own; the two are multiplied.

    kvstore: a type for `kv.create`, a store, or None. A type without 'dist' makes a store only if a parameter has
    several devices. Without a store, the gradients of this process's devices are still summed (**differs**: in gluon
    their weights drift apart). compression_params: for `set_gradient_compression` of the store.

    update_on_kvstore: whether the store makes the updates; None: it does if there is a store. A `dist_async` store
    always makes them (False is a ValueError).

    clip_global_norm: scale each update down so that the norm of all its gradients together, of the mean that is
    applied, is at most this number. Every worker then makes the updates itself, with optimizer states for the whole
    model (update_on_kvstore=True is a ValueError, and so is `dist_async`).

    overlap: push the gradients of PyTorch parameters during the backward pass; see `no_sync`.

    worker_state: a state of this worker that `save` and `resume` include, such as velocities of its own gradients: an
    object with `state_dict()`, which returns arrays by name, and `load_state_dict(state)`, which gets NumPy arrays.

    Making a trainer is collective over the workers of a `dist` store. When it returns, every worker and device has
    worker 0's weights (**differs**: gluon sends them in the first step). If the store makes the updates, its next step
    overwrites weights that the model changes later: load a checkpoint before making the trainer.

    Raises TypeError or ValueError for wrong parameters or optimizers; what `kv.create` and `init` raise.

    >>> weight = mpikv.Parameter(np.ones(2))
    >>> trainer = mpikv.Trainer([weight], 'sgd', {'learning_rate': 0.5}, kvstore='local')
    >>> weight.grad[...] = 1.0  # the model's backward pass
    >>> trainer.step()
    >>> weight.data
    array([0.5, 0.5])
    >>> trainer.learning_rate, trainer.optimizer.name, trainer.kvstore
    (0.5, 'sgd', None)
    >>> trainer.steps, trainer.examples, trainer.stop_requested
    (1, 0, False)
    >>> trainer.set_learning_rate(0.1), trainer.zero_grad(), trainer.pull_weights(), trainer.sync_buffers()
    (None, None, None, None)
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
        worker_state: WorkerState | None = None,
    ) -> None:
        self._clip = None if clip_global_norm is None else positive(clip_global_norm, "clip_global_norm")
        self._worker_state = check_kept(worker_state)
        super().__init__(
            params,
            optimizer,
            optimizer_params,
            kvstore,
            compression_params=compression_params,
            update_on_kvstore=update_on_kvstore,
            clips=self._clip is not None,
        )
        self.last_global_norm: float | None = None  # before clipping, of the last step; None without clip_global_norm
        # Gradients pushed since the last step. Of each a request, done when the workers' sum is in it, if they update.
        self._pushed: dict[str, tuple[Request | None, list[Any]]] = {}
        self._pushed_with: Mapping[str, Any] = {}  # the optimizer's attributes when they were pushed
        self._frozen: list[str] = []  # of the last step, on all workers
        dense = [name for name in self._trained if name not in self._sparse]
        self._adds_in_memory = self._session.adds_in_memory([self._keys[name] for name in dense])
        if self._store is not None and self._adds_in_memory:
            self._place_gradients(self._store, dense)
        devices = len(list_data(self._params[next(iter(self._trained))]))
        self._shares = Shares(self._store, f"examples of trainer{self._number}", devices, self._optimizer)
        self._overlap = Overlap(self._tensors if overlap else {}, self.push_grad)
        self._begin_snapshots()

    # --- the step

    def push_grad(self, parameter: Any, batch_size: float | None = None) -> None:
        """Push a gradient as soon as the backward pass has completed it, so that it is sent while the pass continues.

        parameter: one of this trainer's, or its name. batch_size: the one that `step` will get; by default that of the
        last step. The gradient may be overwritten when this returns, except with `update_on_kvstore=False`: then the
        sum over the workers is written into it, before `step` returns. Waits for other workers in the first step alone.
        `step` sends what was not pushed: all in a first step without batch_size, and where all workers share memory.

        Raises ValueError for a parameter that is not this trainer's, one that was pushed before in this step, a missing
        gradient, or a batch_size that differs from that of earlier pushes.

        >>> weight = mpikv.Parameter(np.ones(2))
        >>> trainer = mpikv.Trainer([weight], 'sgd', {'learning_rate': 0.5}, kvstore=kv.create('local'))
        >>> weight.grad[...] = 1.0
        >>> trainer.push_grad(weight, batch_size=1)
        >>> trainer.step(1)
        >>> weight.data
        array([0.5, 0.5])
        """
        name = self._name_of(parameter, "push_grad")
        if name in self._pushed:
            raise ValueError(f"push_grad: the gradient of {shown(name)} was pushed already; `step` comes next")
        if batch_size is not None:
            share = self._shares.of_batch(batch_size)
            self._weigh(share.weights)
        batch_size = self._batch_size if batch_size is None else share.divisor
        if self._store is None or self._is_frozen(name) or batch_size is None or self._adds_in_memory:
            return
        if self._shares.joined or name not in self._trained:  # `step` exchanges examples, or raises for the parameter
            return
        self._check_batch_size(batch_size)
        replicas = list_grad(self._params[name])
        if any(replica is None for replica in replicas):
            raise ValueError(f"push_grad: grad is None in {shown(name)}; call it after the gradient has been written")
        self._finish_waiting()
        self._rescale(batch_size)
        self._agree_on_factor()
        if not self._pushed:
            self._pushed_with = self._optimizer.attributes()
        if self._updater is not None:
            self._updater.push(self._keys[name], replicas, self._priorities[name])
            self._pushed[name] = None, []
        elif not self._workers_update or self._factor() == self._optimizer.rescale_grad:  # else `step` scales a copy
            with self._scaling():
                request = self._store.pushpull_async(self._keys[name], replicas, priority=self._priorities[name])
            self._pushed[name] = request, replicas

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backward passes whose gradients are only accumulated: `with trainer.no_sync():`. Local.

        Without overlap=True it changes nothing. With it, and with several hosts or servers, a gradient is pushed as
        soon as a backward pass has completed it, for the batch_size of the last step. So only the last backward pass of
        a step may be outside of `no_sync`. Between that pass and the step the program must not change gradients or the
        optimizer, and the step must have the batch_size of the one before, or make all its passes inside; anything else
        is an error.

        >>> weight = mpikv.Parameter(np.ones(2))
        >>> trainer = mpikv.Trainer([weight], 'sgd', {'learning_rate': 0.5})
        >>> with trainer.no_sync():
        ...     weight.grad += 0.5  # the first backward pass
        >>> weight.grad += 0.5  # the last one
        >>> trainer.step()
        >>> weight.data
        array([0.5, 0.5])
        """
        return self._overlap.paused()

    def _check_batch_size(self, batch_size: float) -> None:
        if self._pushed and batch_size != self._batch_size:
            raise ValueError(
                f"gradients of this step were pushed for a batch of {self._batch_size:g}, not {batch_size:g}: "
                "pass the same batch_size to push_grad and step (with overlap=True, call backward in no_sync() where "
                "the batch_size changes)"
            )

    def _check_pushed(self) -> None:
        self._overlap.check()
        if self._pushed and self._updater is not None and self._optimizer.attributes() != self._pushed_with:
            raise ValueError(
                "the optimizer was changed after gradients of this step had been pushed: set the learning rate before "
                "the backward pass"
            )

    def step(
        self,
        n: float | None = None,
        ignore_stale_grad: bool = False,
        *,
        batch_size: float | None = None,
        examples: float | None = None,
        wait: bool = True,
    ) -> None:
        """Make one update of all parameters. The argument tells what the gradients are.

        `step()`: each gradient is a mean over the examples of its worker (and device), as of PyTorch's losses. The
        update is made with the mean of these over the workers and devices.

        `step(examples=n)`: the same, and n is the number of examples of this worker. The update is made with the mean
        over all examples; that costs one more small exchange.

        `step(batch_size=n)`, and `step(n)` as in gluon: each gradient is a sum over examples. The update is made with
        (their sum over devices and workers) / n; n is the number of examples of all workers together, in `join` of this
        one. PyTorch's losses are means unless they have `reduction='sum'`: with its parameters `step(n)` warns once.

        If workers pass different batch sizes, each worker's gradient is divided by its own. Any other attribute of the
        optimizer that differs between workers is a ConfigError on all of them, and nothing is updated; in a
        `dist_async` store each worker's gradients are applied with its own.

        Blocks; in a synchronous store until all workers have called it. Raises FloatingPointError, on every worker and
        without changing weights, if clip_global_norm finds a norm that is not finite.

        ignore_stale_grad: treat a parameter without a gradient (`grad` is None) as one with gradient 0, so that workers
        stay in step; otherwise it is a ValueError that names it, and nothing is sent.

        wait=False: return at once if the store makes the updates. `wait(parameter)` then blocks until that parameter's
        weight has arrived, and the next step, push_grad or close waits for all of them.

        >>> weight = mpikv.Parameter(np.ones(2))
        >>> trainer = mpikv.Trainer([weight], 'sgd', {'learning_rate': 0.5})
        >>> weight.grad[...] = 8.0  # the sum over 4 examples
        >>> trainer.step(4)
        >>> weight.data
        array([0., 0.])
        """
        checks.flag("ignore_stale_grad", ignore_stale_grad)
        checks.flag("wait", wait)
        waits_for = self._steps + (not self._pulls)  # after wait=False the last step has to end first
        if self._shares.joined or examples is not None:
            self._grads(ignore_stale_grad)  # raises for a missing gradient before others count on this worker
        if n is not None and batch_size is not None:
            raise ValueError("step: its first argument is batch_size, as in gluon; give it once")
        size = batch_size if n is None else n
        try:
            self._step(self._shares.of_step(size, examples), ignore_stale_grad, wait=wait)
        except (PeerError, StallError) as error:
            raise in_steps(error, waits_for).with_traceback(error.__traceback__) from error.__cause__
        if n is not None and n > self._shares.n_gradients and self._tensors:
            notices.warn_of_sums(n)

    def _step(self, share: Share, ignore_stale_grad: bool, *, wait: bool) -> None:
        batch_size = share.divisor
        self._weigh(share.weights)
        self._check_batch_size(batch_size)
        self._finish_waiting()
        self._rescale(batch_size)
        self._check_pushed()
        grads = self._grads(ignore_stale_grad)
        if share.factor != 1.0:  # so that this worker's means have the weight of its number of examples
            if self._pushed:
                raise ValueError(
                    "step(examples=) with other numbers on other workers, after gradients were pushed: with "
                    "overlap=True call backward in no_sync() where they may differ"
                )
            self._scale_grads(grads, share.factor)
        self._agree_on_factor()
        if self._updater is not None:
            self._step_on_store(self._updater, grads, wait=wait)
        else:
            self._allreduce(grads)
            self._update(grads, self._factor() if self._workers_update else None)
        self._forget_pushed()
        self._count_step(share.examples)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Return a context for a loop that makes more steps on some workers than on others: `with trainer.join():`.

        A worker that reaches the end of the block takes part in the others' steps, with gradients of 0, until all
        workers have reached it. So it may leave its loop whenever it has no more data, also by `break`. Every update is
        the mean over the examples of the workers that have data: `step(examples=n)` or `step(batch_size)` with this
        worker's own number, or `step()` for the mean over these workers. All workers have the same weights at the end.

        A step in the block costs one more small exchange, and sends no gradient before `step`. `learning_rate` may be
        set in the loop, alike on all workers that are in it. Entering and leaving is collective, and blocks. Raises
        MpikvError inside another `join` of this trainer; UnsupportedError for `dist_async`, and where spares may come
        (MPIKV_SPARES).

        >>> from mpikv.testing.stores import spawn_stores
        >>> def train(store):
        ...     weight = mpikv.Parameter(np.zeros(1))
        ...     trainer = mpikv.Trainer([weight], 'sgd', {'learning_rate': 1}, kvstore=store)
        ...     with trainer.join():
        ...         for _ in range(1 + store.rank):  # worker 1 makes one step more
        ...             weight.grad[...] = -1.0
        ...             trainer.step()
        ...     return weight.data.tolist()
        >>> spawn_stores('dist_sync', 2, train)
        [[2.0], [2.0]]
        """
        if self._pushed:
            raise MpikvError("join after gradients were pushed: begin it before the backward pass")
        with self._shares.join(), self.no_sync():
            yield
            while (share := self._shares.of_others()) is not None:
                for name, parameter in self._params.items():
                    if not self._is_frozen(name):
                        parameters.zero_grad(parameter)
                self._step(share, ignore_stale_grad=False, wait=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, as a torch.optim.Optimizer does. Those of an `mpikv.Parameter` become 0. Local.

        set_to_none=False sets the gradients of PyTorch parameters to 0, too, which is neither faster nor slower.
        """
        for parameter in self._params.values():
            if not isinstance(parameter, TorchBuffer):
                parameters.zero_grad(parameter, set_to_none=set_to_none)

    def _agree_on_frozen(self, store: KVStore) -> None:
        """Agree with the other workers on which parameters are frozen, where others than in the last step are."""
        frozen = [name for name in self._trained if parameters.is_frozen(self._params[name])]
        session, differs = store.session, frozen != self._frozen
        if differs and session.synchronous and not self._adds_in_memory:
            keys = [self._keys[name] for name in frozen]
            session.agree("skip", keys, "a step with other parameters frozen than before")
        self._frozen = frozen

    def _step_on_store(self, store: KVStore, grads: dict[str, list[Any]], *, wait: bool) -> None:
        self._agree_on_frozen(store)
        changed = [shown(name) for name, one in self._tensors.items() if name in grads and one.changed_by_others]
        if changed:
            notices.warn_of_lost_weights(changed)
        dense = {name: replicas for name, replicas in grads.items() if name not in self._sparse}
        outs = {name: list_data(self._params[name]) for name in dense}
        in_one_call = wait and not self._pushed
        for name, replicas in grads.items():
            if name not in self._pushed and not (in_one_call and name in dense):
                store.push(self._keys[name], replicas, self._priorities[name])
        if in_one_call:
            store.pushpull([self._keys[name] for name in dense], list(dense.values()), out=list(outs.values()))
            self._data_written(dense)
        for name in grads:
            if name in self._sparse:
                self._pulls[name] = self._changed_rows(store, name)
            elif not in_one_call:
                self._pulls[name] = store.pull_async(self._keys[name], outs[name], self._priorities[name])
        if wait:
            self._finish_waiting()

    def _forget_pushed(self) -> None:
        self._pushed.clear()
        self._overlap.clear()

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """Replace every gradient by the sum over devices and workers. Only with `update_on_kvstore=False`.

        Collective, blocks. `update` follows; in between the sums may be changed, alike on every worker.

        >>> weight = mpikv.Parameter(np.ones(2))
        >>> trainer = mpikv.Trainer([weight], 'sgd', {'learning_rate': 0.5}, update_on_kvstore=False)
        >>> weight.grad[...] = 5.0
        >>> trainer.allreduce_grads()
        >>> np.clip(weight.grad, -1.0, 1.0, out=weight.grad)
        array([1., 1.])
        >>> trainer.update()
        >>> weight.data
        array([0.5, 0.5])
        """
        self._need_own_updates("allreduce_grads")
        self._overlap.check()
        self._allreduce(self._grads(ignore_stale_grad), scales=False)

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> None:
        """Update the weights with the sums of `allreduce_grads`. Only with `update_on_kvstore=False`.

        batch_size: as for `step`, but the same on every worker, since the gradients have been added already.

        Local. If batch_size or another attribute of the optimizer was not the same on every worker, their weights
        differ from then on, and the next `allreduce_grads` or `step`, or `close` of the store, raises ConfigError on
        all of them. Example: see `allreduce_grads`.
        """
        self._need_own_updates("update")
        share = self._shares.of_step(batch_size, None)
        self._rescale(share.divisor)
        self._weigh(share.weights)
        grads = self._grads(ignore_stale_grad)
        self._update(grads)
        if self._workers_update:
            self._session.attributes.updated(self._slot())
        self._count_step(share.examples)

    def _allreduce(self, grads: dict[str, list[Any]], *, scales: bool = True) -> None:
        """Add gradients. scales: scale this worker's gradients before, if its factor differs from the agreed one."""
        if self._store is not None:
            self._agree_on_frozen(self._store)
            rest = [name for name in grads if name not in self._pushed]
            with self._scaling() if scales else nullcontext():
                self._store.pushpull([self._keys[name] for name in rest], [grads[name] for name in rest])
            for request, replicas in self._pushed.values():
                if request is not None:
                    request.wait()
                    # They may have been pushed in another stream than the one in which the program uses the sums.
                    self._spaces.make_callers_wait(self._spaces.callers_arrays(replicas))
            for name in grads if self._tensors else ():
                parameters.grad_written(self._params[name])
            self._forget_pushed()
            return
        for name, replicas in grads.items():
            if len(replicas) > 1:
                self._write_sum(replicas, replicas, f"the gradient of parameter {shown(name)}")

    def _weigh(self, weights: Sequence[float] | None) -> None:
        self._strategy.weights = None if weights is None else (self._slot(), weights)

    def _scale_grads(self, grads: dict[str, list[Any]], ratio: float) -> None:
        for name, replicas in grads.items():
            for replica in replicas:
                if isinstance(replica, RowSparse):
                    replica.assign(replica.indices, replica.values * replica.dtype.type(ratio))
                else:
                    self._spaces.scale(replica, ratio, f"the gradient of parameter {shown(name)}")

    def _update(self, grads: dict[str, list[Any]], factor: float | None = None) -> None:
        """Update the weights by the sums. factor: of the sums; None: this worker's rescale_grad."""
        own = self._optimizer.rescale_grad
        if self._strategy.weights is not None:
            _, weights = self._strategy.weights
            for name in grads:
                there = [weights[worker] for worker in self._strategy.contributors(self._keys[name])]
                # 0 where all that had data have died, in `join`: then so is the sum.
                self._scale_grads({name: grads[name][:1]}, 1 / (sum(there) or 1))
        self._optimizer.rescale_grad = own if factor is None else factor
        try:
            if self._clip is not None:
                norm = self.last_global_norm = norm_of(self._optimizer, grads, self._spaces)
                self._optimizer.rescale_grad *= min(1.0, self._clip / (norm + 1e-6))  # as torch's clip_grad_norm_
            updated = {self._keys[name]: list_data(self._params[name]) for name in grads}
            self._local.apply(updated, {self._keys[name]: replicas[0] for name, replicas in grads.items()})
        finally:
            self._optimizer.rescale_grad = own
        self._data_written(grads)

    def _grads(self, ignore_stale_grad: bool) -> dict[str, list[Any]]:
        """Return the gradients of every trained parameter, one per device. Raises ValueError if any is missing."""
        result: dict[str, list[Any]] = {}
        missing = []
        added = {} if self._module is None else added_parameters(self._module, self._names)
        new = [name for name, tensor in added.items() if tensor.requires_grad]
        if new:
            self._needs_another(new, "came to the module after")
        for name, parameter in self._params.items():
            if self._is_frozen(name):
                continue
            if name in self._pushed:
                _, result[name] = self._pushed[name]
                continue
            if name not in self._trained:
                self._needs_another([name], "was frozen when")
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

    @staticmethod
    def _needs_another(names: list[str], why: str) -> NoReturn:
        named = ", ".join(map(repr, names))
        raise ValueError(f"parameter {named} {why} the Trainer was made, and has no optimizer: make a new Trainer")

    def _need_own_updates(self, call: str) -> None:
        if self._shares.joined:
            raise UnsupportedError(f"{call} in join: workers that have reached its end take part in step alone")
        if self._updater is not None:
            raise UnsupportedError(
                f"{call}: the store updates the weights here, so there are no summed gradients to see; "
                "make the Trainer with update_on_kvstore=False"
            )
