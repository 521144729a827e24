"""DistributedOptimizer: an optimizer that steps with the gradients of all workers, as Horovod's does.

Gradients are sent during the backward pass (gradients.py); `step`, or `synchronize` before it, waits for the sums. What
the program does to a gradient in between would be lost, so it is an error (`_Sent`). The result is an instance of a
class derived from the optimizer's, with the same groups and the same state, so that schedulers accept it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mpikv import kv
from mpikv.calls.keyless import CollectiveCalls
from mpikv.common import checks
from mpikv.errors import UnsupportedError
from mpikv.kvstore import KVStore
from mpikv.torch import arrays
from mpikv.torch.arrays import is_dense
from mpikv.torch.calls import Average, Sum
from mpikv.torch.compression import Compressor
from mpikv.torch.gradients import Gradients, agreed
from mpikv.torch.passes import is_last
from mpikv.torch.process_sets import ProcessSet, calls_in
from mpikv.torch.tensor_calls import Allreduce
from mpikv.torch.uneven import has_stepped
from mpikv.trainer.hooks import Hooks, add_hooks, remove_hooks

_SAMPLE_ELEMS = 1024


class _Exchanging:
    """The first base of the derived class; the second one is the optimizer's own class."""

    _mpikv_gradients: Gradients | GradientCalls
    _mpikv_sparse: dict[int, None]  # parameters whose gradients are sparse
    _mpikv_passes: int
    _mpikv_counts: dict[int, int]
    _mpikv_sent: dict[int, _Sent]
    _mpikv_hooks: Hooks  # empty: they have been taken off
    _mpikv_synchronized: bool
    _mpikv_skip: bool
    param_groups: list[dict[str, Any]]

    def on_gradient(self, i: int) -> None:
        count = self._mpikv_counts[i] = self._mpikv_counts.get(i, 0) + 1
        self._mpikv_synchronized = False
        gradients = self._mpikv_gradients
        if count > self._mpikv_passes:
            raise RuntimeError(
                f"parameter {gradients.forms[i].name!r} got {count} gradients since the last step; with "
                f"backward_passes_per_step={self._mpikv_passes} call step() or synchronize() in between"
            )
        grad = gradients.parameters[i].grad
        if count == self._mpikv_passes and grad is not None and grad.is_sparse:
            gradients.parameters[i].grad = grad.to_dense()
            self._mpikv_sparse[i] = None
        if count == self._mpikv_passes and is_last(self._mpikv_hooks[i]):
            gradients.ready(i)
            if isinstance(gradients, Gradients):
                self._mpikv_sent[i] = _Sent(gradients.parameters[i])
        else:
            gradients.note(i)

    def detach(self) -> None:
        """Take the hooks off the parameters, which are exchanged no more; `step` is an error from now on. Local.

        A DistributedOptimizer that is made later of the same parameters, or more, does so with this one.
        """
        remove_hooks(self._mpikv_hooks)
        self._mpikv_gradients.steps.stop()

    def synchronize(self) -> None:
        """Wait for the gradients of all workers: then every `grad` is the mean, or the sum. Collective, blocks.

        Call it before anything that changes gradients before `step`, such as clipping or `GradScaler.unscale_`. `step`
        may follow in `with optimizer.skip_synchronize():`, or outside, where it does not synchronize again. Raises
        RuntimeError if a gradient was changed after it had been sent.
        """
        gradients = self._mpikv_gradients
        if not self._mpikv_hooks:
            raise RuntimeError(
                "this DistributedOptimizer exchanges no gradients any more: detach() was called, or a newer one "
                "has all of its parameters; use that one"
            )
        if arrays.exchanges(gradients.calls.store):
            sent, self._mpikv_sent = self._mpikv_sent, {}
            changed = [i for i, one in sent.items() if not one.is_there()]
            gradients.steps.note(self)
            for i in self._mpikv_counts:
                if i not in gradients.fired:
                    gradients.ready(i)  # the parameter was used in some of the passes only, or has later hooks
            self._mpikv_counts.clear()
            gradients.finish()  # after which this stream has waited for those that computed the gradients
            if isinstance(gradients, Gradients):
                has_stepped(gradients)
            flags = [one.differs() for one in sent.values()]
            if flags:
                values = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
                changed += [i for i, differs in zip(sent, values, strict=True) if differs]
            if changed:
                raise RuntimeError(
                    f"the gradient of parameter {gradients.forms[changed[0]].name!r} was changed after the backward "
                    "pass, when it had been sent: the change is lost (clipping, GradScaler.unscale_, zero_grad, ...). "
                    "Call synchronize() after backward, then change gradients, then step in `with skip_synchronize():`"
                )
            for parameter in (gradients.parameters[i] for i in self._mpikv_sparse):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(1)  # an optimizer for sparse gradients takes no others
        self._mpikv_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` does no more than the optimizer's own."""
        self._mpikv_skip = True
        try:
            yield
        finally:
            self._mpikv_skip = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `synchronize`, then the optimizer's own step.

        closure: each call of it is followed by `synchronize`, and returns the mean loss over the workers (with op=Sum
        the sum), so that a line search decides alike on all of them.
        """
        own: Callable[..., Any] = super().step  # type: ignore[misc]
        if closure is not None:
            if self._mpikv_counts and not self._mpikv_skip:
                self.synchronize()  # the gradients of a pass before, with which some optimizers begin

            def synchronized() -> Any:
                loss = closure()
                self.synchronize()
                return loss

            return own(synchronized)
        if not self._mpikv_skip and not self._mpikv_synchronized:
            self.synchronize()
        self._mpikv_synchronized = False
        return own()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many gradients of a parameter are added before a step, from the next round on. Local."""
        self._mpikv_passes = checks.whole("backward_passes_per_step", passes, 1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do what the optimizer's own does. RuntimeError between `backward` and `step`, while gradients are sent."""
        if self._mpikv_gradients.fired:
            raise RuntimeError("zero_grad after backward, but before step or synchronize: gradients are being sent")
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UnsupportedError: the workers have agreed on the parameters."""
        raise UnsupportedError("add_param_group: make the DistributedOptimizer when all groups are there")


class _Sent:
    """A gradient as it was sent. Neither `GradScaler.unscale_` nor a change of `grad.data` changes its version, so some
    of its values are kept, too.
    """

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._parameter, self._grad = parameter, parameter.grad
        assert self._grad is not None
        self._version, self._sample = self._grad._version, self._values()

    def _values(self) -> torch.Tensor:
        """Return the bytes of some elements, evenly spread. Waits for no GPU."""
        assert self._grad is not None
        flat = self._grad.detach()
        if is_dense(tuple(flat.shape), flat.stride()):
            flat = flat.as_strided((flat.numel(),), (1,))  # in the order of memory, without a copy
        return flat.reshape(-1)[:: max(1, flat.numel() // _SAMPLE_ELEMS)].clone().view(torch.uint8)

    def is_there(self) -> bool:
        """Return whether it is the parameter's gradient still, and the same as far as its version tells."""
        parameter, grad = self._parameter, self._grad
        return parameter.requires_grad and parameter.grad is grad is not None and grad._version == self._version

    def differs(self) -> torch.Tensor:
        """Return whether its values are others now, as a tensor, for which nobody has waited yet."""
        return (self._values() != self._sample).any()


class GradientCalls:
    """In place of `gradients`, with a compression object of the program's own: an exchange by a call, in `step`.

    Workers first tell each other which gradients they have; a worker without one that others have adds zero. op: 'mean'
    or 'sum'. Cost per round: a small exchange, and one of all gradients, which are copied in and out.
    """

    def __init__(self, gradients: Gradients, op: str, compression: Compressor) -> None:
        self.calls, self.forms, self.parameters = gradients.calls, gradients.forms, gradients.parameters
        self.steps = gradients.steps
        self._compression, self._call = compression, Allreduce(self.calls, "gradients", op)
        self.fired: dict[int, None] = {}

    def note(self, i: int) -> None:
        """Do nothing: a gradient counts when it is ready."""

    def ready(self, i: int) -> None:
        """Note that the gradient of parameter i is complete for this round. Local."""
        self.fired[i] = None

    def finish(self) -> None:
        """Exchange the gradients of this round. Collective, blocks."""
        used = np.zeros(len(self.parameters), np.int8)
        used[list(self.fired)] = 1
        (used,) = self.calls.allreduce([used], "max", "which gradients there are")
        chosen = [self.parameters[i] for i in np.flatnonzero(used)]
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in chosen]
        sent = [self._compression.compress(grad.detach()) for grad in grads]
        results = self._call.make([one for one, _ in sent])
        for parameter, result, (_, ctx) in zip(chosen, results, sent, strict=True):
            parameter.grad = self._compression.decompress(result, ctx)
        self.fired.clear()


def DistributedOptimizer(  # noqa: N802, PLR0917 - Horovod's name and order
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
    *,
    store: KVStore | None = None,
    bucket_bytes: int | None = None,
) -> Any:
    """Make an optimizer like `optimizer` whose `step` uses the gradients of all workers. Collective, blocks.

    named_parameters: names for errors, of all parameters of the optimizer; None: they are numbered. compression,
    bucket_bytes: see DistributedModel; or an object with `compress` and `decompress`: gradients are then sent in
    `step`. A store may stand in its place, too. backward_passes_per_step: how many gradients of a parameter are added
    on each worker before. op: Average or Sum. process_set: the workers that share gradients; on others the result is an
    optimizer like any. store: `dist_sync` or `local`; default as in `init`. Accepted as in Horovod, not used:
    gradient_predivide_factor, since gradients are multiplied by 1 / number of workers before they are added;
    num_groups, groups, since buckets are made by size; sparse_as_dense, since sparse gradients are sent dense, and are
    sparse again for the step.

    Parameters, states and buffers are not changed: call `broadcast_parameters` and `broadcast_optimizer_state` at the
    start. Raises ShapeMismatch or ConfigError on every worker if the parameters or arguments differ; UnsupportedError
    for other values of op; what `set_gradient_compression` raises.

    >>> net = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    >>> optimizer = mt.DistributedOptimizer(optimizer, net.named_parameters(), kv.create('local'))
    >>> net(torch.ones(4, 2)).mean().backward()
    >>> optimizer.step()
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Exchanging):
        raise TypeError("optimizer is a DistributedOptimizer already")
    if op not in (Average, Sum):
        raise UnsupportedError(f"op is Average or Sum; got {op!r}")
    passes = checks.whole("backward_passes_per_step", backward_passes_per_step, 1)
    if gradient_predivide_factor <= 0 or (gradient_predivide_factor != 1 and op != Average):
        raise ValueError("gradient_predivide_factor is above 0, and other than 1 for op=Average only")
    if isinstance(compression, KVStore):
        compression, store = None, compression
    alone = process_set is not None and not process_set.included()
    calls = CollectiveCalls(kv.create("local")) if alone else calls_in(process_set, store)
    by_calls = isinstance(compression, Compressor) and not isinstance(compression, Mapping)
    named = _named(optimizer, named_parameters)
    kind_of_compression = f", compression={type(compression).__name__}" if by_calls else ""
    gradients = agreed(
        calls,
        "DistributedOptimizer",
        named,
        f"op={op}, backward_passes_per_step={passes}{kind_of_compression}",
        average=op == Average,
        bucket_bytes=bucket_bytes,
        compression=None if by_calls else compression,
    )
    kind = type(optimizer)
    found: Any = object.__new__(type(kind.__name__, (_Exchanging, kind), {"__module__": kind.__module__}))
    found.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    found.__dict__.update(
        _mpikv_gradients=GradientCalls(gradients, op, compression) if by_calls else gradients,
        _mpikv_sparse={},
        _mpikv_passes=passes,
        _mpikv_counts={},
        _mpikv_sent={},
        _mpikv_hooks=[None],
        _mpikv_synchronized=False,
        _mpikv_skip=False,
    )
    if arrays.exchanges(calls.store):
        found._mpikv_hooks = add_hooks(found, _Exchanging, gradients.parameters)  # noqa: SLF001 - this module's own
        arrays.warn_of_host_memory("DistributedOptimizer", gradients.parameters, calls.store, 2)
    return found


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the optimizer's parameters with their names, in its order."""
    wanted = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return [(f"parameter {i}", parameter) for i, parameter in enumerate(wanted)]
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise TypeError("named_parameters are pairs (name, parameter), such as module.named_parameters() gives")
    names = {id(parameter): name for name, parameter in pairs}
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("named_parameters has a name twice")
    missing = sum(id(parameter) not in names for parameter in wanted)
    if missing:
        raise ValueError(f"named_parameters lacks {missing} of the optimizer's {len(wanted)} parameters")
    return [(names[id(parameter)], parameter) for parameter in wanted]
