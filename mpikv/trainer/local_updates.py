"""Training that seldom talks: workers make steps by themselves, and then agree on weights by what each has moved.

    trainer = Trainer(params, "adam", {"learning_rate": 1e-3}, kvstore=None)
    local = LocalUpdates(params, store, every=8, outer={"type": "nesterov", "learning_rate": 0.7, "momentum": 0.9})
    ...
    trainer.step(batch_size)             # or of PyTorch: optimizer.step()
    local.step()                         # after every 8 steps all workers have the same weights again

What a worker has moved since the last round, `old - new`, is pushed as if it were a gradient; the store's *outer*
optimizer makes the next common weights of the mean. With SGD and a rate of 1 that is the mean of the workers' weights
("mean": local SGD; Lin et al. 2020, arXiv:1808.07217, from some step on: post-local SGD). With Nesterov momentum it is
DiLoCo (Douillard et al. 2023, arXiv:2311.08105); with plain momentum SlowMo (Wang et al. 2020, arXiv:1910.00643) for an
inner rate that does not change. With elastic averaging (Zhang et al. 2015, arXiv:1412.6651) a worker keeps its weights,
and they and the common ones come nearer to each other by a part of their difference.

Cost: one exchange of all weights each round. Memory: a copy of the weights with their gradients, on each worker.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

from mpikv import optimizers
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.errors import MpikvError
from mpikv.kvstore import KVStore
from mpikv.trainer.local_state import LocalState
from mpikv.trainer.parameter import Parameter, is_frozen, list_data, named, zero_grad
from mpikv.trainer.torch_parameter import TorchParameter, is_module
from mpikv.trainer.trainer import Trainer

# By the name of `type`: the store's optimizer, and its arguments where they are not given.
OUTER: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mean": ("sgd", {"learning_rate": 1.0}),
    "nesterov": ("nag", {"learning_rate": 0.7, "momentum": 0.9}),  # DiLoCo's, section 3.1
    "slowmo": ("sgd", {"learning_rate": 1.0, "momentum": 0.5}),
    "easgd": ("sgd", {"learning_rate": 1.0}),
}
MOVING_RATE = 0.9  # of elastic averaging, over all workers: section 5 of the paper


class LocalUpdates:
    """Lets each worker train by itself, and makes the workers' weights one from time to time.

    params: as a `Trainer` takes them: a torch.nn.Module, or a dict or an iterable of parameters, one device each.
    Worker 0's values, those of frozen parameters and of buffers among them, are everybody's afterwards. Only parameters
    that are trained are exchanged, row-sparse ones whole; buffers, such as statistics of a batch normalisation, stay
    each worker's own, but for `sync_buffers`. store: `dist_sync`, `dist_async` or `local`.

    every: after how many steps a round ends; or a function that gets the number of steps made and returns that, the
    same on all workers (`lambda step: 1 if step < 1000 else 8`: post-local SGD); or None: a round ends where the
    program calls `exchange`, after any number of steps on each worker, by which their parts are weighed.

    outer: 'mean', 'nesterov', 'slowmo', 'easgd' or a dict with such a `type` and its arguments; or an optimizer as
    `optimizers.create` takes one, to which the mean of what workers have moved is the gradient. 'easgd', made for
    `dist_async`, has `moving_rate` (0.9): each round moves a worker and the common weights towards each other by
    moving_rate / number of workers of their difference; `common` has the weights to evaluate.

    optimizer: the worker's own, whose state `save` includes: a `Trainer(..., kvstore=None)` for the same parameters, or
    a torch.optim.Optimizer. compression: as in `set_gradient_compression`, for what is pushed.

    common: the weights of the last round: a module if `params` is one, else parameters by their names.

    Collective, blocks. Raises TypeError or ValueError for wrong arguments; what `Trainer` raises.

    >>> params = {'weight': mpikv.Parameter(np.ones(2))}
    >>> trainer = mpikv.Trainer(params, 'sgd', {'learning_rate': 0.1}, kvstore=None)
    >>> local = mpikv.LocalUpdates(params, kv.create('local'), every=2, optimizer=trainer)
    >>> for _ in range(4):
    ...     params['weight'].grad[...] = 1.0
    ...     trainer.step()
    ...     _ = local.step()
    >>> local.rounds, params['weight'].data.round(3).tolist()
    (2, [0.6, 0.6])
    """

    def __init__(
        self,
        params: Any,
        store: KVStore,
        *,
        every: int | Callable[[int], int] | None,
        outer: Any = "mean",
        optimizer: Any = None,
        compression: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(store, KVStore):
            raise checks.wrong("LocalUpdates: store", "a store, as kv.create makes one", store)
        if every is not None and not callable(every):
            checks.whole("every", every, 1)
        self._every = every
        made, rate = _outer(outer)
        self._store = store
        self._elastic = rate / store.num_workers  # 0: workers get the common weights
        self._own = named(params)
        for name, parameter in self._own.items():
            if len(list_data(parameter)) > 1:
                raise ValueError(f"LocalUpdates: parameter {shown(name)} is on several devices; give one for a worker")
        self._state = LocalState(self._own, optimizer)
        # With the weights of the last round; their gradients are what this worker has moved since.
        self.common, self._shared = _copies(params, self._own)
        self._trainer = Trainer(
            list((self._own | self._shared).items()),
            made,
            kvstore=store,
            compression_params=compression,
            worker_state=self._state,
        )
        for shared in self._shared.values():
            zero_grad(shared)
        self._take()

    @property
    def steps(self) -> int:
        """The steps that this worker has made, those of earlier runs among them.

        >>> local = mpikv.LocalUpdates([mpikv.Parameter(np.ones(2))], kv.create('local'), every=2)
        >>> [local.step() for _ in range(3)], local.steps
        ([False, True, False], 3)
        """
        return self._state.steps

    @property
    def rounds(self) -> int:
        """The rounds that have ended."""
        return self._trainer.steps

    @property
    def optimizer(self) -> Any:
        """The outer optimizer. Attributes that are changed on all workers, such as `learning_rate`, count at once."""
        return self._trainer.optimizer

    def step(self) -> bool:
        """Count a step of this worker, and end the round if it is time. Returns whether a round has ended.

        Call it after each step of the worker's own optimizer. Collective where a round ends, and then blocks in a
        synchronous store until all workers have come; the parameters have the next common weights afterwards. Raises
        ValueError where `every` returns no number of steps, and what `Trainer.step` raises.
        """
        self._state.count()
        if self._every is None:
            return False
        every = self._every
        if callable(every):
            every = checks.whole("every: what it returns", every(self._state.steps), 1)
        if self._state.since < every:
            return False
        self._exchange(None)
        return True

    def exchange(self) -> None:
        """End the round now, whatever `every` says, as before an evaluation. Collective, blocks.

        Does nothing right after a round. With every=None each worker's part has the weight of the steps that it has
        made since the last round, and a worker that has made none gets MpikvError.

        >>> local = mpikv.LocalUpdates([mpikv.Parameter(np.ones(2))], kv.create('local'), every=100)
        >>> _ = local.step()
        >>> local.exchange()
        >>> local.rounds
        1
        """
        if self._every is not None:
            if self._state.since:
                self._exchange(None)
            return
        if not self._state.since:
            raise MpikvError("exchange: this worker has made no step since the last round")
        self._exchange(float(self._state.since))

    def _exchange(self, examples: float | None) -> None:
        if self._elastic:
            self._trainer.pull_weights()
        for name, parameter in self._shared.items():
            shared, own, moved = _weight(parameter), _weight(self._own[name]), _gradient(parameter)
            moved[...] = shared
            moved -= own
            if self._elastic:
                _add(own, moved, self._elastic)
                moved *= self._elastic * self._store.num_workers  # of which the mean is taken
        self._trainer.step(examples=examples)
        if not self._elastic:
            self._take()
        self._state.begin_round()

    def _take(self) -> None:
        """Let the worker have the common weights."""
        for name, parameter in self._shared.items():
            _weight(self._own[name])[...] = _weight(parameter)

    def sync_buffers(self) -> None:
        """Write worker 0's buffers of the module into every worker's, as before an evaluation by all.

        Collective, blocks. Does nothing if `params` is no module.

        >>> mpikv.LocalUpdates([mpikv.Parameter(np.ones(2))], kv.create('local'), every=2).sync_buffers()
        """
        self._trainer.sync_buffers()

    # --- files

    def save(self, fname: str | os.PathLike[str]) -> None:
        """Write all into one file: common weights, the outer optimizer's states, each worker's weights and optimizer.

        Also in the middle of a round. Collective, blocks; worker 0 writes. Raises what `Trainer.save` raises.

        >>> mpikv.LocalUpdates([mpikv.Parameter(np.ones(2))], kv.create('local'), every=2).save('saved')
        """
        self._trainer.save(fname)

    def resume(self, fname: str | os.PathLike[str] | None = None) -> int:
        """Continue from a file of `save`; returns the number of rounds, 0 where there is no such file.

        As many workers go on exactly where they were. With another number of them each begins a round with the common
        weights and its own optimizer as it is, and worker 0 prints that. Collective, blocks; before the first step.

        >>> mpikv.LocalUpdates([mpikv.Parameter(np.ones(2))], kv.create('local'), every=2).resume('no such file')
        0
        """
        self._state.restored = False
        rounds = self._trainer.resume(fname)
        if rounds and not self._state.restored:
            self._take()
        return rounds


def _copies(params: Any, own: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A copy of the module, or else of the parameters by name; and the copies of those that are trained.

    The copy of a module has the buffers of the module itself, so that it can be evaluated.
    """
    trained = [name for name, parameter in own.items() if not is_frozen(parameter)]
    if is_module(params):
        module = copy.deepcopy(params, {id(buffer): buffer for buffer in params.buffers()})
        tensors = dict(module.named_parameters())
        return module, {name: TorchParameter(tensors[name], name) for name in trained}
    shared: dict[str, Any] = {}
    for name in trained:
        one = own[name]
        if isinstance(one, TorchParameter):
            shared[name] = TorchParameter(copy.deepcopy(one.tensor), name)
        else:
            shared[name] = Parameter(list_data(one)[0].copy(), name)
    return {name: getattr(one, "tensor", one) for name, one in shared.items()}, shared


def _weight(parameter: Any) -> Any:
    """The array of a weight, in which it may be changed."""
    return parameter.tensor.detach() if isinstance(parameter, TorchParameter) else list_data(parameter)[0]


def _gradient(parameter: Any) -> Any:
    return parameter.tensor.grad if isinstance(parameter, TorchParameter) else parameter.grad


def _add(array: Any, other: Any, factor: float) -> None:
    """array += factor * other. PyTorch's own sum rounds once, and needs no array for the product."""
    if hasattr(array, "add_"):
        array.add_(other, alpha=factor)
    else:
        array += factor * other


def _outer(outer: Any) -> tuple[optimizers.Optimizer, float]:
    """The store's optimizer for what the user has given, and the moving rate of elastic averaging, else 0."""
    if isinstance(outer, str) and outer in OUTER:
        outer = {"type": outer}
    if not isinstance(outer, Mapping):
        return optimizers.create(outer), 0.0
    arguments = checks.options("outer", outer)
    kind = checks.one_of("outer: type", arguments.pop("type", None), [*OUTER])
    rate = arguments.pop("moving_rate", MOVING_RATE) if kind == "easgd" else 0.0
    if kind == "easgd" and not 0 < checks.number("outer: moving_rate", rate) <= 1:
        raise ValueError(f"outer: moving_rate must be above 0 and at most 1, not {rate:g}")
    name, defaults = OUTER[kind]
    return optimizers.create(name, **{**defaults, **arguments}), rate
