"""The exchange of a model's gradients: the sum over the workers, each times its own factor, in place of every `grad`.

In the first round the order in which gradients appear is noted, and worker 0's becomes the order of the buckets for
all. From then on a gradient is copied into its bucket, times the factor, as soon as it is there. Between hosts, and on
GPUs, a bucket leaves when it is full, while the backward pass goes on; in host memory that the workers share all are
added in one call at the end, which sends no message. A parameter's `grad` then is a view into the bucket.

A `DistributedModel` lets `grad` be that view at once: the memory that autograd has taken for a gradient is free, and in
the processor's cache, for the next one. Whatever PyTorch adds to such a view later in the same pass would lack the
factor. That can only be where a pass runs inside another one, so models in which passes.py has seen that keep a
gradient as it is until the round ends, as a `DistributedOptimizer` does, whose rounds end in `step`.

Gradients on the store's GPU stay there: buckets are in its memory, and all that is done with them is put into streams,
so that no backward pass waits for the host. The tail then is a key of its own in host memory. So it is where gradients
are compressed: flags and buffers travel as they are.

A round is complete when every worker has called `finish`; what it brings for each parameter:

- used by some workers: the sum, in which those that did not use it count with the `grad` that they had, or zero;
- used by none: its `grad` is as it was;
- trained on some workers and frozen on others: ConfigError on all;
- trained from now on, frozen before: it is exchanged at once, and gets a bucket if it has none.

Where gradients are compressed, what a codec has sent of parameters that none has used comes again (`Untaken`).

Buckets of which all parameters are frozen stay where they are. Names, shapes and dtypes were compared before.

Cost per round and worker: one pass over the gradients, and what `pushpull` costs; memory: the gradients once, and the
tail, and until the round ends a second time what is not a view at once. Idea of the buckets: Li et al., PyTorch
Distributed, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_not
from typing import Any

import numpy as np
import torch

from mpikv.arrays.reductions import SUM
from mpikv.calls.keyless import CollectiveCalls, difference
from mpikv.calls.request import Request
from mpikv.codecs.compression import make
from mpikv.create.notices import warn_of_codec
from mpikv.errors import ConfigError, PeerError, UnsupportedError
from mpikv.strategies.base import Entry, PreparedCall
from mpikv.torch.buckets import Form, GradientBucket, GradientView, form_of, gradient_of, make_buckets
from mpikv.torch.buffers import Buffers
from mpikv.torch.tail import Flags, GradientTail, RoundOutcome


class Gradients:
    """The gradients of named parameters.

    calls: of the store. name: what its keys begin with. scale: the factor of this worker's gradients. settings: lines
    about the optimizers (steps.py), for each round; none: there is nothing to compare. compression: as DistributedModel
    takes it. buffers: travel with the gradients; None: they do not. source: the worker whose buffers all workers get.
    views_at_once: whether a `grad` is a view into its bucket before the round ends.
    """

    def __init__(
        self,
        calls: CollectiveCalls,
        name: str,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        scale: float,
        bucket_bytes: int,
        settings: Callable[[], Sequence[str]],
        compression: Any = None,
        buffers: Buffers | None = None,
        views_at_once: bool = False,
    ) -> None:
        self.calls = calls
        self._store = calls.store
        self.name = name
        self.parameters = [parameter for _, parameter in named]
        self.forms: list[Form] = [form_of(*one, self._store) for one in named]
        self.scale = scale
        self.source = 0
        self.views_at_once = views_at_once
        self._bucket_bytes = bucket_bytes
        # That of the store is asked for now: all workers agree on it before they agree on keys.
        self.compression = self._store.session.compressions.of_new_keys if compression is None else make(compression)
        self._untaken = Untaken()
        self._buffers = buffers
        self._settings = settings
        # Where all add in host memory that they share, one call for everything is faster.
        self._overlap = not self._store.session.shares_memory or all(form.on_gpu for form in self.forms)
        self._buckets: list[GradientBucket] = []
        self._views: dict[int, GradientView] = {}
        self._last: GradientBucket | None = None  # the one with the tail
        self._call: PreparedCall | None = None  # the last one that added buckets in shared memory, and those
        self._called: list[Any] = []
        self._tail = GradientTail(self._store.num_workers, len(named), 0)
        self._trained: Flags = self._requires_grad()  # as agreed
        self._groups = 0
        self.fired: dict[int, None] = {}  # parameters with a gradient in this round, in order
        self._early = False  # whether buckets leave in this round as soon as they are full
        self._used = np.zeros(len(named), np.bool_)  # since the last exchange

    def _requires_grad(self) -> Flags:
        return np.fromiter((parameter.requires_grad for parameter in self.parameters), np.bool_, len(self.parameters))

    def lines(self) -> list[str]:
        """Return what must be the same on all workers, one line for each parameter."""
        return [
            f"parameter {form.name!r}: {form.dtype} {form.size}, strides {form.stride}, "
            + ("trained" if parameter.requires_grad else "frozen")
            + (", on the store's GPU" if form.on_gpu else "")
            for form, parameter in zip(self.forms, self.parameters, strict=True)
        ]

    # --- during a backward pass

    def note(self, i: int) -> None:
        """Note that parameter i got a gradient in a pass that is not exchanged."""
        self._used[i] = True

    def ready(self, i: int) -> None:
        """Take the gradient of parameter i, which is complete for this round. Never blocks."""
        view = self._views.get(i)
        new = i not in self.fired
        if not new and view is not None and (view.bucket.left or (view.scaled and view.is_grad)):
            raise UnsupportedError(
                f"parameter {self.forms[i].name!r} got a gradient twice in one backward pass, and the first has been "
                "taken (checkpointing with use_reentrant=True of a shared parameter?); use use_reentrant=False"
            )
        if not self.fired:
            # A parameter that is unfrozen just now may come when its bucket has left.
            self._early = self._overlap and bool((self._requires_grad() == self._trained).all())
        self._used[i] = True
        self.fired[i] = None
        if view is None:
            gradient_of(self.forms[i], self.parameters[i])  # raises for one that cannot be exchanged
            return
        view.take(self.scale, at_once=self.views_at_once)
        bucket = view.bucket
        bucket.written()
        if new:
            bucket.waits_for -= 1
            if self._early and not bucket.waits_for and not bucket.has_tail:
                self._leave(bucket)

    def _leave(self, bucket: GradientBucket) -> None:
        self._fill(bucket)
        session = self._store.session
        session.check_open("backward")
        if bucket.on_gpu or not self._store.strategy.lends:
            bucket.request = self._store.pushpull_async(bucket.key, bucket.flat)
        else:  # what that would look at is known: the key, and that the array is in no other call
            call = self._store.strategy.prepare(self._lent([bucket.key], [bucket.flat]), SUM)
            bucket.request = Request(session, call.start())

    def _lent(self, keys: Sequence[str], flats: Sequence[Any]) -> list[Entry]:
        """The entries of a call that adds these arrays where they are."""
        infos = self._store.session.infos
        return [Entry(infos[key], flat, None, (flat,)) for key, flat in zip(keys, flats, strict=True)]

    def _fill(self, bucket: GradientBucket) -> None:
        """Complete a bucket, with gradients that lie in it and those of parameters that got none in this round."""
        bucket.follow()
        for i, view in bucket.views.items():
            view.complete(self.scale, fired=i in self.fired)
            if bucket.compressed:
                self._untaken.fill(i, view.tensor, used=i in self.fired)
        bucket.left = True

    # --- its end

    def finish(self, failed: bool = False) -> None:
        """Exchange what has not left yet, and wait for all. Collective, blocks.

        failed: this worker's backward pass ended early: PeerError on the others. Raises ConfigError where parameters
        are frozen on some workers only, or optimizers' settings differ, and what `pushpull` raises.
        """
        if self._store.has_optimizer:
            raise UnsupportedError("the store has an optimizer for all keys, so it gives no sums; use another store")
        if failed:
            self.fired.clear()  # their gradients may be gone, and are of no use
            self._used[:] = False
        if self._last is None:
            self._start()
        assert self._last is not None
        mine = self._store.rank == self.source
        buffers = self._buffers
        settings = "\n".join(self._settings())
        if ": betas=" in settings and any(bucket.compressed for bucket in self._buckets):
            warn_of_codec(self.compression.push.name)
        self._tail.fill(
            self._last.tail,
            self._requires_grad(),
            self._used,
            failed=self._store.rank if failed else None,
            more_buffers=buffers is not None and buffers.changed_otherwise(),
            buffers=buffers.collect() if mine and buffers is not None else None,
            settings=settings,
        )
        self._exchange([bucket for bucket in self._buckets if bucket.has_tail or self._is_trained(bucket)])
        outcome = self._tail.read(self._last.tail)
        try:
            if not failed:
                self._check(outcome, settings)
                self._exchange_new(outcome.trained)
                self._deliver_all(outcome, mine)
        finally:
            self._reset()

    def _deliver_all(self, outcome: RoundOutcome, mine: bool) -> None:
        assert self._last is not None
        taken = outcome.used & outcome.trained
        copies: dict[GradientBucket, torch.Tensor] = {}
        for i in np.flatnonzero(taken).tolist():
            self._views[i].deliver(copies)
        for bucket in self._buckets:
            if bucket.left and bucket.compressed:
                for i, view in bucket.views.items():
                    if not taken[i]:
                        self._untaken.keep(i, view.tensor, first=self._store.rank == 0)
        if self._buffers is not None:
            if not mine:
                self._buffers.deliver(self._tail.buffers(self._last.tail))
            if outcome.more_buffers:
                self._buffers.send_otherwise(self.source)

    def _start(self) -> None:
        """In the first round, agree on the order of the buckets and make them."""
        rest = [i for i in reversed(range(len(self.parameters))) if self._trained[i] and i not in self.fired]
        order = np.full(len(self.parameters), -1, np.int64)
        mine = [*(i for i in self.fired if self._trained[i]), *rest]
        order[: len(mine)] = mine
        order = self.calls.broadcast([order], name="order of gradients")[0]
        n_bytes = 0 if self._buffers is None else self._buffers.choose()
        self._tail = GradientTail(self._store.num_workers, len(self.parameters), n_bytes)
        self._add_group([int(i) for i in order if i >= 0], self._tail.n_elems)

    def _add_group(self, members: list[int], tail_elems: int) -> None:
        key = f"{self.name}/gradients" + (f" {self._groups}," if self._groups else "")
        found = make_buckets(
            self._store,
            key,
            members,
            self.forms,
            self.parameters,
            limit_bytes=self._bucket_bytes,
            tail_elems=tail_elems,
            compression=self.compression,
        )
        self._groups += 1
        self._buckets += found
        self._last = next((bucket for bucket in found if bucket.has_tail), self._last)
        for bucket in found:
            self._views |= bucket.views
            for i, view in bucket.views.items():
                if i in self.fired and self.parameters[i].grad is not None:  # else somebody has cleared it since
                    view.take(self.scale, at_once=True)  # the pass has ended

    def _is_trained(self, bucket: GradientBucket) -> bool:
        return any(self._trained[i] for i in bucket.views)

    def _exchange(self, chosen: list[GradientBucket]) -> None:
        if self._overlap:
            for bucket in chosen:
                if not bucket.left:
                    self._leave(bucket)
            for bucket in chosen:
                assert bucket.request is not None
                bucket.request.wait()
                bucket.follow()
            return
        for bucket in chosen:
            self._fill(bucket)
        on_host = [bucket for bucket in chosen if not bucket.on_gpu]
        on_gpu = [bucket for bucket in chosen if bucket.on_gpu]  # keys of both cannot be added where they are
        if on_host:
            self._add_in_shared_memory([bucket.key for bucket in on_host], [bucket.flat for bucket in on_host])
        if on_gpu:
            self._store.pushpull([bucket.key for bucket in on_gpu], [bucket.flat for bucket in on_gpu])

    def _add_in_shared_memory(self, keys: list[str], flats: list[Any]) -> None:
        """Make one call for all keys.

        It is kept from the first time on: what `pushpull` does not keep, it copies to the keys' own memory.
        """
        self._store.session.check_open("backward")
        if not self._store.strategy.lends:
            self._store.pushpull_async(keys, flats).wait()
            return
        call = self._call
        if call is None or not call.valid or len(flats) != len(self._called) or any(map(is_not, flats, self._called)):
            if call is not None:
                call.release()
            call = self._call = self._store.strategy.prepare(self._lent(keys, flats), SUM, waits=True)
            self._called = flats
        if pending := call.start():
            call.wait(pending)

    def _check(self, outcome: RoundOutcome, settings: str) -> None:
        if outcome.failed:
            who = ", ".join(f"worker {worker}" for worker in outcome.failed)
            raise PeerError(f"the backward pass of {who} ended early, by an error; there are no gradients of this step")
        both = np.flatnonzero(outcome.trained & outcome.frozen)
        if both.size:
            names = ", ".join(repr(self.forms[i].name) for i in both[:8]) + (", ..." if both.size > 8 else "")
            i = int(both[0])
            here = "trained" if self.parameters[i].requires_grad else "frozen"
            raise ConfigError(
                f"requires_grad of {names} differs between workers; {self.forms[i].name!r} is {here} on worker "
                f"{self._store.rank}. Freeze and unfreeze parameters on all workers at the same step"
            )
        if outcome.other_settings:
            texts = self.calls.allgather(np.frombuffer(f"{settings}\0".encode(), np.uint8)).tobytes().decode()
            raise ConfigError(
                f"the optimizers of the workers have different settings: {difference(texts.split(chr(0))[:-1])}. Set "
                "the same on all workers; for a scheduler that is stepped inside `join`: join(optimizer, scheduler)"
            )

    def _exchange_new(self, trained: Flags) -> None:
        """Exchange the gradients of parameters that were frozen when the buckets were chosen.

        Collective where there are any.
        """
        new = np.flatnonzero(trained & ~self._trained)
        self._trained = trained
        new_here = [int(i) for i in reversed(new) if int(i) not in self._views]
        if new_here:
            self._add_group(new_here, 0)
        late = dict.fromkeys(self._views[int(i)].bucket for i in new)
        chosen = [bucket for bucket in late if not bucket.left]
        if chosen:
            self._exchange(chosen)

    def _reset(self) -> None:
        self.fired.clear()
        self._used[:] = False
        self._untaken.end_round()
        for bucket in self._buckets:
            bucket.end_round(self._trained)


class Untaken:
    """What was pushed and what came in a round, of parameters whose sum nobody has taken; by the parameter's number.

    What a codec sends of a parameter in one round is not what was pushed in it: it may belong to earlier pushes, whose
    residual the codec keeps. A bucket also has parameters whose sum no worker takes, because none has used them. So
    that nothing is lost, each worker takes back in the next round what it pushed, and worker 0 pushes the sum again.
    Memory: twice the gradients of parameters that are in a bucket but not used.
    """

    def __init__(self) -> None:
        self._pushed: dict[int, torch.Tensor] = {}  # in this round, of parameters that this worker has not used
        self._rest: dict[int, torch.Tensor] = {}  # for the next one

    def fill(self, i: int, view: torch.Tensor, *, used: bool) -> None:
        """Add to a push, which is in `view`, what is left of the round before. used: whether this worker used it.

        What is left stays pushed: what was pushed before is taken back alone.
        """
        if not used:
            self._pushed[i] = view.clone()
        if i in self._rest:
            view.add_(self._rest.pop(i))

    def keep(self, i: int, total: torch.Tensor, *, first: bool) -> None:
        """Note that nobody takes this sum. first: whether this is worker 0. Numbers that are not finite are dropped."""
        rest = self._pushed.pop(i, None)
        if rest is None:
            return  # it was frozen between its backward pass and the exchange
        rest.neg_()
        if first:
            rest.add_(total)
        self._rest[i] = rest.nan_to_num_(0.0, 0.0, 0.0)

    def end_round(self) -> None:
        """Forget what was pushed."""
        self._pushed.clear()
