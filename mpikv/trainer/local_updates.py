"""Training that seldom talks: workers make steps by themselves, and then agree on weights by what each has moved.

What a worker has moved since the last round, `old - new`, is pushed as if it were a gradient; the store's *outer*
optimizer makes the next common weights of the mean. With SGD and a rate of 1 that is the mean of the workers' weights
("mean": local SGD; Lin et al. 2020, arXiv:1808.07217). With Nesterov momentum it is DiLoCo (Douillard et al. 2023,
arXiv:2311.08105); with plain momentum SlowMo (Wang et al. 2020, arXiv:1910.00643) for an inner rate that does not
change. With elastic averaging (Zhang et al. 2015, arXiv:1412.6651) a worker keeps its weights, and they and the common
ones come nearer to each other by a part of their difference.

The exchanges may be spread, and hidden behind computing (Streaming DiLoCo; Douillard et al. 2025, arXiv:2501.18512):
each of several parts of the weights has rounds of its own, which end one after another, and the result of an exchange
is waited for some steps later only. Parameters are dealt out to parts by size: the largest first, each to the part that
has the fewest bytes so far; of layers of equal size each part gets every so many-th, as the paper's "strided" parts.

Cost: one exchange of all weights each round. Memory: a copy of the weights with their gradients, on each worker.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mpikv import optimizers
from mpikv.arrays import as_numpy
from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.errors import MpikvError
from mpikv.kvstore import KVStore
from mpikv.trainer.local_state import LocalState, weight_of
from mpikv.trainer.parameter import Parameter, divide, is_frozen, list_data, named, zero_grad
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


class PartsTrainer(Trainer):
    """A `Trainer` whose steps may leave out some parts of the parameters. parts: the names of each."""

    _left_out: frozenset[str] = frozenset()

    def __init__(self, params: Any, optimizer: Any, parts: Sequence[Sequence[str]], **options: Any) -> None:
        self._parts = [frozenset(part) for part in parts]
        super().__init__(params, optimizer, **options)

    @contextmanager
    def only(self, part: int) -> Iterator[None]:
        """Return a context for `pull_weights`, and for one step after it, with the parameters of this part."""
        self._left_out = frozenset().union(*self._parts) - self._parts[part]
        try:
            yield
        finally:
            self._left_out = frozenset()

    def _is_frozen(self, name: str) -> bool:
        return name in self._left_out or super()._is_frozen(name)

    def _count_step(self, batch_size: float) -> None:
        self._left_out = frozenset()  # a checkpoint that this may write is of all parts
        super()._count_step(batch_size)

    def _after_step(self) -> None:
        """Do nothing: `LocalUpdates` takes snapshots, after what it does with the common weights."""

    def step_ended(self) -> None:
        """Take a snapshot if it is time; called after each step, or each exchange, that all workers make."""
        self._take_snapshot_if_due()

    def _follow_others(self) -> None:
        """Do nothing: what workers have moved is relative to the weights that they have."""


class LocalUpdates:
    """Lets each worker train by itself, and makes the workers' weights one from time to time.

    params: as a `Trainer` takes them: a torch.nn.Module, or a dict or an iterable of parameters, one device each.
    Worker 0's values, those of frozen parameters and of buffers among them, are everybody's afterwards. Only parameters
    that are trained are exchanged, row-sparse ones whole; buffers, such as statistics of a batch normalisation, stay
    each worker's own, but for `sync_buffers`. store: `dist_sync`, `dist_async` or `local`.

    every: after how many steps a round ends; or a function that gets the number of steps made and returns that, the
    same on all workers; or None: a round ends where the program calls `exchange`, after any number of steps on each
    worker, by which their parts are weighed.

    outer: 'mean', 'nesterov', 'slowmo', 'easgd' or a dict with such a `type` and its arguments; or an optimizer as
    `optimizers.create` takes one, to which the mean of what workers have moved is the gradient. 'easgd', made for
    `dist_async`, has `moving_rate` (0.9): each round moves a worker and the common weights towards each other by
    moving_rate / number of workers of their difference; `common` has the weights to evaluate.

    optimizer: the worker's own, whose state `save` includes: a `Trainer(..., kvstore=None)` for the same parameters, or
    a torch.optim.Optimizer. compression: as in `set_gradient_compression`, for what is pushed.

    parts: how many parts of the parameters are exchanged in turn, each every `every` steps: every `every` / `parts` one
    of them. A part is some whole parameters; all have about as many bytes. delay: how many steps after an exchange has
    begun its result is written into the parameters; only then a worker waits for it. At most `every` // `parts`.

    mixing: what the parameters get when the common weights arrive. None: these, and what the worker has moved since the
    exchange began. A number from 0 to 1: mixing * own + (1 - mixing) * common, as in Streaming DiLoCo.

    common: the weights of the last round: a module if `params` is one, else parameters by their names.

    Collective, blocks. Raises TypeError or ValueError for wrong arguments; what `Trainer` raises.

    >>> params = {'weight': mpikv.Parameter(np.ones(2))}
    >>> trainer = mpikv.Trainer(params, 'sgd', {'learning_rate': 0.1}, kvstore=None)
    >>> local = mpikv.LocalUpdates(params, kv.create('local'), every=2, optimizer=trainer)
    >>> for _ in range(4):
    ...     params['weight'].grad[...] = 1.0
    ...     trainer.step()
    ...     _ = local.step()
    >>> local.exchange(), local.sync_buffers(), local.save('saved')
    (None, None, None)
    >>> local.steps, local.rounds, local.stop_requested, params['weight'].data.round(3).tolist()
    (4, 2, False, [0.6, 0.6])
    >>> mpikv.LocalUpdates(params, kv.create('local'), every=2).resume('no such file')
    0
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
        parts: int = 1,
        delay: int = 0,
        mixing: float | None = None,
    ) -> None:
        if not isinstance(store, KVStore):
            raise checks.wrong("LocalUpdates: store", "a store, as kv.create makes one", store)
        if every is not None and not callable(every):
            checks.whole("every", every, 1)
        made, rate = _outer(outer)
        _check_parts(every, parts, delay, mixing, elastic=rate > 0)
        store.session.check_no_spares("LocalUpdates", "each worker has weights of its own")
        if rate:
            store.session.check_all_stay("LocalUpdates: outer='elastic' needs")
        self._every, self._delay, self._mixing = every, delay, mixing
        self._store = store
        self._elastic = rate / store.num_workers  # 0: workers get the common weights
        self._own = named(params)
        for name, parameter in self._own.items():
            if len(list_data(parameter)) > 1:
                raise ValueError(f"LocalUpdates: parameter {shown(name)} is on several devices; give one for a worker")
        self._state = LocalState(self._own, parts, optimizer)
        # With the weights of the last round; their gradients are what this worker has moved since.
        self.common, self._shared = _copies(params, self._own)
        self._parts = divide({name: weight_of(one).nbytes for name, one in self._shared.items()}, parts)
        self._trainer = PartsTrainer(
            list((self._own | self._shared).items()),
            made,
            self._parts,
            kvstore=store,
            compression_params=compression,
            worker_state=self._state,
        )
        for shared in self._shared.values():
            zero_grad(shared)
        self._take_all()

    @property
    def steps(self) -> int:
        """The steps that this worker has made, those of earlier runs among them."""
        return self._state.steps

    @property
    def rounds(self) -> int:
        """The rounds whose exchange has begun; with several parts each round is of one part."""
        return self._trainer.steps

    @property
    def optimizer(self) -> Any:
        """The outer optimizer. Attributes that are changed on all workers, such as `learning_rate`, count at once."""
        return self._trainer.optimizer

    @property
    def stop_requested(self) -> bool:
        """Whether all workers stop after the last exchange: see `Trainer.stop_requested`."""
        return self._trainer.stop_requested

    def step(self) -> bool:
        """Count a step of this worker, and end the round if it is time. Returns whether a round has ended.

        Call it after each step of the worker's own optimizer. Collective where the exchange of a round begins. Where a
        round ends, with a delay so many steps later, the parameters have the next common weights afterwards, and in a
        synchronous store the call blocks until all workers have begun the exchange. Raises ValueError where `every`
        returns no number of steps, and what `Trainer.step` raises.
        """
        state, every = self._state, self._every
        state.count()
        ended = self._finish_if_due()
        if every is None:
            return False
        if callable(every):
            every = checks.whole("every: what it returns", every(state.steps), 1)
        # The last part's exchange is the last one of a turn, from which steps are counted.
        if state.unsent[-1] < (state.part + 1) * every // len(self._parts):
            self._trainer.step_ended()
            return ended
        self._begin(state.part, None)
        ended |= self._finish_if_due()
        self._trainer.step_ended()
        return ended

    def exchange(self) -> None:
        """End the rounds of all parts now, whatever `every` says, as before an evaluation. Collective, blocks.

        What is under way is finished before. Does nothing for a part whose round has just ended. With every=None each
        worker's part has the weight of the steps that it has made since the last round, and a worker that has made none
        gets MpikvError.
        """
        self._finish()
        if self._every is None and not self._state.unsent[0]:
            raise MpikvError("exchange: this worker has made no step since the last round")
        for part, unsent in enumerate(self._state.unsent):
            if unsent:
                self._begin(part, float(unsent) if self._every is None else None)
                self._finish()
        self._state.part = 0
        self._trainer.step_ended()

    def _begin(self, part: int, examples: float | None) -> None:
        """Begin the exchange of this part, and without a delay wait for it."""
        self._finish()
        self._state.begin(part)  # before the step, which may save it all and end the program
        with self._trainer.only(part):
            if self._elastic:
                self._trainer.pull_weights()
            for name in self._parts[part]:
                shared, own = weight_of(self._shared[name]), weight_of(self._own[name])
                moved = _gradient(self._shared[name])
                moved[...] = shared
                moved -= own
                if self._elastic:
                    _add(own, moved, self._elastic)
                    moved *= self._elastic * self._store.num_workers  # of which the mean is taken
            self._trainer.step(examples=examples, wait=not self._delay)
        self._keep_begun()

    def _keep_begun(self) -> None:
        """Keep the weights with which the exchange under way has begun: in gradients, which have been pushed."""
        if self._state.pending is not None and self._delay and self._mixing is None:
            for name in self._parts[self._state.pending]:
                place = _gradient(self._shared[name])
                if name in self._state.begun:  # from a file
                    as_numpy.write(place, self._state.begun[name], f"parameter {shown(name)}")
                else:
                    place[...] = weight_of(self._own[name])
                self._state.begun[name] = place

    def _finish_if_due(self) -> bool:
        pending = self._state.pending
        if pending is None or self._state.unsent[pending] < self._delay:
            return False
        self._finish()
        return True

    def _finish(self) -> None:
        """Wait for the exchange that has begun, if any, and let the worker have the common weights."""
        if self._state.pending is not None:
            for name in self._parts[self._state.pending]:
                self._trainer.wait(name)
                if not self._elastic:
                    self._take(name, self._state.begun.pop(name, None))
            self._state.pending = None

    def _take(self, name: str, begun: Any) -> None:
        own, shared = weight_of(self._own[name]), weight_of(self._shared[name])
        if self._mixing:
            own *= self._mixing
            _add(own, shared, 1 - self._mixing)
        elif begun is None:
            own[...] = shared
        else:
            own -= begun
            own += shared

    def sync_buffers(self) -> None:
        """Write worker 0's buffers of the module into every worker's, as before an evaluation by all.

        Collective, blocks. Does nothing if `params` is no module.
        """
        self._trainer.sync_buffers()

    # --- files

    def save(self, fname: str | os.PathLike[str]) -> None:
        """Write all into one file: common weights, the outer optimizer's states, each worker's weights and optimizer.

        Also in the middle of a round. The result of an exchange under way is waited for and saved, and gets into the
        parameters in its time. In an asynchronous store the worker gets what others have moved until now. Collective,
        blocks; worker 0 writes. Raises what `Trainer.save` raises.
        """
        if "async" in self._store.type and not self._elastic:
            self._follow()
        self._trainer.save(fname)

    def _follow(self) -> None:
        """Pull the common weights, as saving does, and add to the worker's what they have changed by."""
        pending = () if self._state.pending is None else self._parts[self._state.pending]
        for name in pending:
            self._trainer.wait(name)
        others = [name for name in self._shared if name not in pending]
        before = [copy.deepcopy(weight_of(self._shared[name])) for name in others]
        self._store.barrier()
        self._trainer.pull_weights()
        for name, old in zip(others, before, strict=True):
            own = weight_of(self._own[name])
            own += weight_of(self._shared[name]) - old

    def resume(self, fname: str | os.PathLike[str] | None = None) -> int:
        """Continue from a file of `save`; returns the number of rounds, 0 where there is no such file.

        As many workers go on exactly where they were. With another number of them each begins a round with the common
        weights and its own optimizer as it is, and worker 0 prints that. Collective, blocks; before the first step.
        """
        self._state.restored = False
        rounds = self._trainer.resume(fname)
        if self._state.restored:
            self._keep_begun()
            self._finish_if_due()  # where a signal stopped the run before
        else:
            self._take_all()
        return rounds

    def _take_all(self) -> None:
        for name, shared in self._shared.items():
            weight_of(self._own[name])[...] = weight_of(shared)


def _check_parts(every: Any, parts: Any, delay: Any, mixing: Any, *, elastic: bool) -> None:
    """Raise TypeError or ValueError for arguments of `LocalUpdates` that are wrong, or do not go together."""
    checks.whole("parts", parts, 1)
    checks.whole("delay", delay)
    if mixing is not None and checks.number("mixing", mixing, 0.0) > 1:
        raise ValueError(f"mixing must be at most 1, not {mixing:g}")
    if elastic and (delay or mixing is not None):
        raise ValueError("outer='easgd' has no delay and no mixing: a worker moves before anything is sent")
    if parts == 1 and not delay:
        return
    if every is None or callable(every):
        raise ValueError("parts and delay need `every` to be a number of steps, by which the exchanges are spread")
    if delay > every // parts or parts > every:
        text = "each exchange has every // parts steps, 1 at least, to itself, of which delay takes some or all"
        raise ValueError(f"every={every}, parts={parts}, delay={delay}: {text}")


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
