"""DistributedModel: a module whose gradients are the mean over all workers when `backward` returns.

Except for its forward pass it behaves as the wrapped module: parameters, buffers and submodules are the same objects
under the same names, so that `state_dict`, `named_parameters`, `train` and optimizers work on the module itself.

How gradients are exchanged: gradients.py. When: passes.py. Buffers: buffers.py. Uneven data: uneven.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.torch import arrays, buffers
from mpikv.torch.arrays import exchanges
from mpikv.torch.default import calls_of
from mpikv.torch.gradients import agreed
from mpikv.torch.passes import Passes
from mpikv.torch.uneven import Join
from mpikv.trainer.torch_parameter import added_parameters

_OWN = frozenset({"training", "_wrapped", "_gradients", "_passes", "_known", "_join"})


class DistributedModel(torch.nn.Module):
    """`module` on every worker of `store`, with one set of weights.

    module: the same on all workers, including names, shapes, dtypes, memory formats and `requires_grad` of its
    parameters and buffers (else ShapeMismatch on all). store: `dist_sync`, with or without servers, without an
    optimizer of its own; or `local`; default as in `init`. average: gradients are the mean over the workers, else the
    sum. compression: of gradients: `Compression.fp16`, the name of a codec, or a dict as for
    `set_gradient_compression`; default: what that call has set for all keys. Each bucket is compressed as one key,
    after its gradients are divided by the number of workers; the module's buffers are never compressed. bucket_bytes:
    how many bytes of gradients are sent as one key between hosts and on GPUs; default: 4 MiB, on GPUs 25 MiB.
    sync_buffers: whether buffers become worker 0's after every backward pass that is exchanged, else only at the start.

    Making it is collective, blocks, and gives every worker the parameters and buffers of worker 0. Every `backward`
    through it is collective: all workers make equally many, and wait for each other at the end of each. Then `grad` of
    every parameter that any worker has used is the mean, in which a worker that has not used it counts as 0; the `grad`
    of other parameters does not change. It is the same on all workers, so that `torch.nn.utils.clip_grad_norm_` after
    `backward` clips by the global norm. Parameters may be frozen and unfrozen between passes, alike on all workers
    (else ConfigError on all).

    A backward pass raises ConfigError on all workers if the steps since the last one were made by optimizers of
    `torch.optim` with different settings, such as learning rates, once in 100 passes also if the weights differ; and on
    a worker whose buffer has another shape or dtype than at the start (with sync_buffers). Clear the gradients of a
    pass that ended by an error: they are not valid. A closure that is given to the `step` of such an optimizer returns
    the mean loss over the workers, outside of `join`.

    `module` stays usable; gradients of its own forward passes are exchanged, too, unless these contain checkpointing
    with use_reentrant=True. Raises UnsupportedError for sparse gradients, gradients with a graph (create_graph=True),
    `dist_async` stores, dtypes that a store cannot add, and in `forward` for parameters that were added later.

    >>> model = mt.DistributedModel(torch.nn.Linear(2, 1), kv.create('local'))
    >>> model(torch.ones(4, 2)).mean().backward()
    >>> model.weight.grad, model.module, sorted(model.state_dict())
    (tensor([[1., 1.]]), Linear(in_features=2, out_features=1, bias=True), ['bias', 'weight'])
    >>> model.train(False).training, model.apply(print) is model  # as the module's own
    Linear(in_features=2, out_features=1, bias=True)
    (False, True)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        store: KVStore | None = None,
        *,
        average: bool = True,
        compression: Any = None,
        bucket_bytes: int | None = None,
        sync_buffers: bool = True,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module is a torch.nn.Module, not {type(module).__name__}")
        if isinstance(module, DistributedModel):
            raise TypeError("module is a DistributedModel already")
        super().__init__()
        calls = calls_of(store)
        store = calls.store
        named = list(module.named_parameters())
        _check_parameters(module, store)
        tensors = [(f"parameter {name!r}", one) for name, one in named]
        tensors += [(f"buffer {name!r}", one) for name, one in module.named_buffers()]
        buffers.check(calls, tensors, "the module of DistributedModel")
        kept = buffers.Buffers(module, calls)

        # Without `self`, so that a model is freed with its last reference.
        def synchronize(root: int, *, with_buffers: bool = sync_buffers) -> None:
            tensors = [*module.parameters(), *(kept.tensors() if with_buffers else ())]
            buffers.broadcast(calls, [tensor.data for tensor in tensors], root, "parameters and buffers")

        gradients = agreed(
            calls,
            "DistributedModel",
            named,
            f"average={bool(average)}, sync_buffers={bool(sync_buffers)}",
            average=bool(average),
            bucket_bytes=bucket_bytes,
            compression=compression,
            buffers=kept if sync_buffers else None,
            views_as_grads=True,
        )
        for own, value in (
            ("_wrapped", module),
            ("_gradients", gradients),
            ("_passes", None),
            ("_known", {id(one) for one in gradients.parameters}),
            ("_join", Join(calls, gradients, average=average, synchronize_model=synchronize)),
            ("_parameters", module._parameters),
            ("_buffers", module._buffers),
            ("_modules", module._modules),
            ("training", module.training),
        ):
            object.__setattr__(self, own, value)
        if exchanges(store):
            synchronize(0, with_buffers=True)
            object.__setattr__(self, "_passes", Passes(gradients, self._join.before_round))
        kept.remember()

    # --- forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass.

        Local; but if an error ended the last backward pass, it first completes that pass, which is collective.

        >>> model = mt.DistributedModel(torch.nn.Linear(2, 1), kv.create('local'))
        >>> model(torch.ones(4, 2)).shape  # PyTorch calls forward
        torch.Size([4, 1])
        >>> model.forward(torch.ones(4, 2)).shape
        torch.Size([4, 1])
        """
        if self._passes is None or not self._passes.hooks or not torch.is_grad_enabled():
            return self._wrapped(*args, **kwargs)
        self._passes.before_forward()
        self._check_new()
        if self._join.active:
            self._join.n_examples = (self._join.n_examples or 0) + _examples(args, kwargs)
        result = self._wrapped(*args, **kwargs)
        self._passes.after_forward(result)
        return result

    def _check_new(self) -> None:
        names = [repr(name) for name in added_parameters(self._wrapped, self._known)]
        if names:
            raise UnsupportedError(
                f"parameter {', '.join(names[:8])} came to the module after the DistributedModel was made, and is not "
                "exchanged; make the DistributedModel when all parameters are there, on all workers"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes only add to this worker's gradients; the next pass exchanges them.

        >>> model = mt.DistributedModel(torch.nn.Linear(2, 1), kv.create('local'))
        >>> with model.no_sync():
        ...     model(torch.ones(4, 2)).mean().backward()
        >>> model(torch.ones(4, 2)).mean().backward()
        >>> model.weight.grad
        tensor([[2., 2.]])
        """
        if self._passes is None:
            yield
            return
        before, self._passes.synchronize = self._passes.synchronize, False
        try:
            yield
        finally:
            self._passes.synchronize = before

    def join(
        self, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None
    ) -> AbstractContextManager[None]:
        """Return a context for training with unequally many batches: `with model.join(optimizer): for x, y in loader:
        ...`.

        Inside, gradients are weighted by the number of examples: the first dimension of the first tensor argument of
        the forward passes since the last exchange, for a loss that is a mean over them. (With average=False they are
        added.) A worker that leaves the block, at the end of its data or by `break`, waits there until all others have
        left it, and then has their parameters, buffers (with sync_buffers) and the states of `optimizer` and
        `scheduler`, if given. scheduler: one of `torch.optim.lr_scheduler` that is stepped inside. Collective: all
        workers enter it. After an exception in the block the other workers wait for this one in vain. Raises
        UnsupportedError on all workers for a backward pass without a forward pass of the DistributedModel itself, and
        where spares may come (MPIKV_SPARES).

        >>> model = mt.DistributedModel(torch.nn.Linear(2, 1), kv.create('local'))
        >>> with model.join():
        ...     model(torch.ones(4, 2)).mean().backward()
        >>> model.weight.grad
        tensor([[1., 1.]])
        """
        return self._join.joined(optimizer, scheduler)

    def detach(self) -> torch.nn.Module:
        """Take the hooks off the module's parameters, and return the module. Local; call it on all workers.

        From now on gradients are each worker's own. The same happens when nothing refers to the DistributedModel any
        more, and when a newer one is made of the same parameters, or more, which it exchanges from then on.

        >>> model = mt.DistributedModel(torch.nn.Linear(2, 1), kv.create('local'))
        >>> model.detach()
        Linear(in_features=2, out_features=1, bias=True)
        """
        if self._passes is not None:
            self._passes.detach()
        return self._wrapped

    # --- the interface of the wrapped module

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        return self._wrapped

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not set yet
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or name in _OWN or "_wrapped" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    def train(self, mode: bool = True) -> DistributedModel:
        """Do what the module's own `train` does. Local."""
        self._wrapped.train(mode)
        object.__setattr__(self, "training", mode)
        return self

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> DistributedModel:
        """Do what the module's own `apply` does, and return this model. Local."""
        self._wrapped.apply(fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> DistributedModel:
        self._wrapped._apply(*args, **kwargs)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, without a prefix. Equal on all workers, except buffers with sync_buffers=False.
        Local.
        """
        return self._wrapped.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state into the module. Local: load the same one on every worker.

        >>> model = mt.DistributedModel(torch.nn.Linear(2, 1), kv.create('local'))
        >>> model.load_state_dict(model.state_dict())
        <All keys matched successfully>
        """
        return self._wrapped.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._wrapped._load_from_state_dict(*args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Raise TypeError, for torch.save, copy.deepcopy and AveragedModel: the store belongs to this process."""
        raise TypeError(
            "a DistributedModel cannot be copied or pickled: its store belongs to this process; use its .module or "
            "its state_dict()"
        )

    def extra_repr(self) -> str:
        """Return the module's class and the store, for `repr`.

        >>> mt.DistributedModel(torch.nn.Linear(2, 1), kv.create('local')).extra_repr()
        'Linear on <KVStore local: worker 0 of 1>'
        """
        return f"{type(self._wrapped).__name__} on {self._gradients.calls.store!r}"


def _examples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the first dimension of the first tensor argument."""
    for tensor in arrays.tensors_in([*args, *kwargs.values()]):
        return int(tensor.shape[0]) if tensor.ndim else 1
    raise UnsupportedError("join: the forward pass has no tensor argument whose first dimension counts the examples")


def _check_parameters(module: torch.nn.Module, store: KVStore) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse:
            raise UnsupportedError(
                f"{name or 'the module'} has sparse gradients, which a store cannot add; make it with sparse=False"
            )
    arrays.warn_of_host_memory("DistributedModel", module.parameters(), store, 3)
