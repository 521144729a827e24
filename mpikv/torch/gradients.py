"""The exchange of a model's gradients: every `grad` becomes the sum over the workers, each times its own factor.

In the first round each worker notes the order in which its gradients are computed; worker 0's becomes the order of the
buckets for all. From then on a gradient is copied into its bucket, times the factor, as soon as it is complete. Between
hosts, and on GPUs, a bucket is sent when all its gradients are there, while the backward pass continues. In host memory
that all workers share, all buckets are added in one call at the end, without a message. After the round a parameter's
`grad` is a view of the bucket.

In a `DistributedModel` that view becomes the `grad` as soon as it is written, so that autograd's memory for the
gradient is free, and in the processor's cache, for the next one. What PyTorch adds to such a view later in the same
pass would lack the factor, which happens only if a pass runs inside another one. So when passes.py has detected that,
gradients are kept until the round ends, as those of a `DistributedOptimizer` are, whose rounds end in `step`.

A round is complete when every worker has called `finish`. Its result for each parameter:

- used by some workers: the sum, to which workers that did not use it add the `grad` that they had, or zero;
- used by none: its `grad` does not change (if compressed, its sum is pushed again: `UnusedSums`);
- trained on some workers and frozen on others: ConfigError on all;
- frozen before, and trained from now on: it is exchanged in this round, and gets a bucket if it has none.

Buckets of which all parameters are frozen are not sent. Names, shapes and dtypes were compared before.

Cost per round and worker: one pass over the gradients, and the cost of `pushpull`. Memory: the gradients once, and the
tail; until the round ends, a second time those whose view is not yet their `grad`. Idea of the buckets: Li et al.,
PyTorch Distributed, VLDB 2020.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpikv.arrays.reductions import SUM
from mpikv.calls.keyless import CollectiveCalls, difference
from mpikv.calls.request import Request
from mpikv.codecs.compression import make
from mpikv.common import checks
from mpikv.create.notices import warn_of_codec
from mpikv.errors import ConfigError, PeerError, ShapeMismatch, UnsupportedError
from mpikv.strategies.base import Entry
from mpikv.torch.buckets import Form, GradientBucket, GradientView, Spare, Spares, form_of, gradient_of, make_buckets
from mpikv.torch.buffers import Buffers
from mpikv.torch.compression import Compression
from mpikv.torch.steps import Steps
from mpikv.torch.tail import Flags, GradientTail, RoundOutcome


class Gradients:
    """The gradients of named parameters.

    calls: of the store. name: prefix of its keys. average: whether each becomes a mean, else a sum. scale: the factor
    of this worker's. compression: see DistributedModel. buffers: are sent with the gradients; None: no buffers are.
    source: the worker whose buffers all get. views_as_grads: whether a view replaces the `grad` before the round ends.
    steps: the optimizers' steps, which are compared.
    """

    def __init__(
        self,
        calls: CollectiveCalls,
        name: str,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        average: bool,
        bucket_bytes: int | None,
        compression: Any = None,
        buffers: Buffers | None = None,
        views_as_grads: bool = False,
    ) -> None:
        self.calls = calls
        self._store = calls.store
        self.name = name
        self.parameters = [parameter for _, parameter in named]
        self.forms: list[Form] = [form_of(*one, self._store) for one in named]
        session = self._store.session
        self._averages = average
        # By their numbers at the start, where some may be gone.
        self._me, self._places = session.number, session.at_start
        self.weigh()
        self.source = 0
        self.views_as_grads = views_as_grads
        self._bucket_bytes = bucket_bytes
        # The store's own is read now, since all workers agree on it before they agree on keys.
        own = self._store.session.compressions.of_new_keys
        self.compression = own if compression is None or compression is Compression.none else make(compression)
        self._unused = UnusedSums()
        self._buffers = buffers
        self.steps = Steps(calls, named, "mean" if average else "sum")
        # If all workers add in shared host memory, one call for all buckets is faster.
        self._overlap = not self._store.session.shares_memory or all(form.on_gpu for form in self.forms)
        self._buckets: list[GradientBucket] = []
        self._sets: list[tuple[int, str, list[GradientBucket]]] = []  # see `make_buckets`
        weakref.finalize(self, _give_back, Spares.of(self._store), self._sets).atexit = False
        self._views: dict[int, GradientView] = {}
        self._tail_bucket: GradientBucket | None = None
        self._tail = GradientTail(self._places, len(named), 0)
        self._trained: Flags = self._requires_grad()  # as all workers have agreed
        self._groups: list[list[int]] = []  # the parameters that got their buckets together
        self.fired: dict[int, None] = {}  # parameters with a gradient in this round, in order
        self._sends_early = False  # whether buckets of this round are sent before the pass ends
        self._used = np.zeros(len(named), np.bool_)  # since the last exchange
        session.passed_on[name] = self

    def _requires_grad(self) -> Flags:
        return np.fromiter((parameter.requires_grad for parameter in self.parameters), np.bool_, len(self.parameters))

    def lines(self) -> list[str]:
        """Return the properties that must be the same on all workers, one line for each parameter."""
        return [
            f"parameter {form.name!r}: {form.dtype} {form.size}, strides {form.stride}, "
            + ("trained" if parameter.requires_grad else "frozen")
            + (", on the store's GPU" if form.on_gpu else "")
            for form, parameter in zip(self.forms, self.parameters, strict=True)
        ]

    # --- during a backward pass

    def note(self, i: int) -> None:
        self._used[i] = True

    def ready(self, i: int) -> None:
        """Copy the gradient of parameter i, which is complete for this round, into its bucket. Never blocks."""
        view = self._views.get(i)
        new = i not in self.fired
        if not new and view is not None and (view.bucket.sent or (view.scaled and view.is_grad)):
            raise UnsupportedError(
                f"parameter {self.forms[i].name!r} got a gradient twice in one backward pass, and the first has been "
                "taken (checkpointing with use_reentrant=True of a shared parameter?); use use_reentrant=False"
            )
        if not self.fired:
            # Else a parameter that is unfrozen since the last round could get its gradient after its bucket was sent.
            self._sends_early = self._overlap and bool((self._requires_grad() == self._trained).all())
        self._used[i] = True
        self.fired[i] = None
        if view is None:
            gradient_of(self.forms[i], self.parameters[i])  # raises for one that cannot be exchanged
            return
        view.copy_grad(self.scale, as_grad=self.views_as_grads)
        bucket = view.bucket
        bucket.written()
        if new:
            bucket.missing -= 1
            if self._sends_early and not bucket.missing and not bucket.has_tail:
                self._send(bucket)

    def _send(self, bucket: GradientBucket) -> None:
        self._fill(bucket)
        session = self._store.session
        session.check_open("backward")
        if bucket.on_gpu or not self._store.strategy.lends:
            bucket.request = self._store.pushpull_async(bucket.key, bucket.flat)
        else:  # faster: the checks of `pushpull_async` are not needed for this key and array
            entry = Entry(session.infos[bucket.key], bucket.flat, None, (bucket.flat,))
            bucket.request = Request(session, self._store.strategy.prepare([entry], SUM).start())

    def _fill(self, bucket: GradientBucket) -> None:
        """Complete all gradients of a bucket, also of parameters that got none in this round."""
        bucket.wait_for_streams()
        for i, view in bucket.views.items():
            view.complete(self.scale, fired=i in self.fired)
            if bucket.compressed:
                self._unused.fill(i, view.tensor, used=i in self.fired)
        bucket.sent = True

    def weigh(self, weights: np.ndarray[Any, Any] | None = None) -> None:
        """Set how much each worker's gradients count, by their numbers at the start; None: all alike. Local."""
        self._weights = np.ones(self._places) if weights is None else weights
        mine, total = self._weights[self._me], self._weights.sum()
        self.scale = float(mine / total if self._averages and total else mine)

    # --- at the end of a pass

    def finish(self, failed: bool = False, joined: bool = False) -> bool:
        """Send the buckets that were not sent yet, and wait for all sums. Collective, blocks.

        failed: whether this worker's backward pass ended early; then the others raise PeerError. joined: whether it has
        no more data (uneven.py). Returns whether all workers have joined. Raises ConfigError if
        parameters are frozen on some workers only, or optimizers' settings differ, and what `pushpull` raises.
        """
        if self._store.has_optimizer:
            raise UnsupportedError("the store has an optimizer for all keys, so it gives no sums; use another store")
        if failed:
            self.fired.clear()  # their gradients may not exist any more, and are not used
            self._used[:] = False
        elif self._buffers is not None:
            try:
                self._buffers.check()
            except ConfigError:
                self.finish(failed=True)  # the other workers wait for this one
                raise
        if self._tail_bucket is None:
            self._begin()
        assert self._tail_bucket is not None
        mine = self._me == self.source
        buffers = self._buffers
        settings = "" if joined else "\n".join(self.steps.take())
        if ": betas=" in settings and any(bucket.compressed for bucket in self._buckets):
            warn_of_codec(self.compression.push.name)
        if self._overlap:  # first: the buffers of a GPU come to the host, which waits for the whole pass
            self._send_all([bucket for bucket in self._buckets if not bucket.has_tail and self._is_trained(bucket)])
        self._tail.fill(
            self._tail_bucket.tail,
            self._requires_grad(),
            self._used,
            failed=self._me if failed else None,
            joined=self._me if joined else None,
            more_buffers=buffers is not None and buffers.others_changed(),
            buffers=buffers.collect() if mine and buffers is not None else None,
            settings=settings,
        )
        self._exchange([bucket for bucket in self._buckets if bucket.has_tail or self._is_trained(bucket)])
        there = self._contributors(self._tail_bucket)
        outcome = self._tail.read(self._tail_bucket.tail, there)
        try:
            self.steps.compare_values(joined=joined)
            if not (failed or joined):
                self._check(outcome, settings)
            if not failed:
                self._exchange_new(outcome.trained)
                self._keep_unused(outcome)
                if self._averages:
                    self._correct_means()
                self._deliver_all(outcome, mine, of_source=self.source in there)
                if self.source not in there:  # it has died, and another one's buffers come from the next round on
                    self.source = min(there)
        finally:
            self._reset()
        return outcome.all_joined

    def _contributors(self, bucket: GradientBucket) -> Sequence[int]:
        """The workers in the last sum of a bucket, by their numbers at the start."""
        return self._store.strategy.contributors(bucket.key) or range(self._places)

    def _correct_means(self) -> None:
        """Where workers have died, make means over those that are in each sum: it was weighted for all at the start."""
        for bucket in self._buckets:
            there = self._contributors(bucket)
            if bucket.sent and len(there) != self._places:
                weight = self._weights[[*there]].sum()
                for view in bucket.views.values():
                    view.tensor.mul_(self._weights.sum() / weight if weight else 0.0)

    def _keep_unused(self, outcome: RoundOutcome) -> None:
        taken = outcome.used & outcome.trained
        for bucket in self._buckets:
            if bucket.sent and bucket.compressed:
                for i, view in bucket.views.items():
                    if not taken[i]:
                        self._unused.keep(i, view.tensor, first=self._store.rank == 0)

    def _deliver_all(self, outcome: RoundOutcome, mine: bool, *, of_source: bool) -> None:
        """of_source: whether the buffers are there, whose worker may have died."""
        assert self._tail_bucket is not None
        copies: dict[GradientBucket, torch.Tensor] = {}
        for i in np.flatnonzero(outcome.used & outcome.trained).tolist():
            self._views[i].deliver(copies)
        if self._buffers is not None:
            if not mine and of_source:
                self._buffers.deliver(self._tail.buffers(self._tail_bucket.tail))
            if outcome.more_buffers:
                self._buffers.broadcast_others(0 if self._store.session.continues else self.source)

    @property
    def agreed(self) -> list[Any] | None:
        """See `Agreed`; None: there was no round yet. Local."""
        in_tail = [] if self._buffers is None else self._buffers.in_tail
        found = [self._groups, in_tail, self._trained.tolist(), self.source, self.steps.rounds]
        return found if self._groups else None

    @agreed.setter
    def agreed(self, found: list[Any] | None) -> None:
        if found is not None:
            groups, in_tail, trained, self.source, rounds = found
            self._trained = np.array(trained, np.bool_)
            self.steps.begin(rounds)
            self._make_buckets(groups, in_tail)
            self._reset()

    def _begin(self) -> None:
        """Agree on the order of the parameters, and make the buckets, in the first round."""
        rest = [i for i in reversed(range(len(self.parameters))) if self._trained[i] and i not in self.fired]
        order = np.full(len(self.parameters), -1, np.int64)
        mine = [*(i for i in self.fired if self._trained[i]), *rest]
        order[: len(mine)] = mine
        order = self.calls.broadcast([order], name="order of gradients")[0]
        in_tail = [] if self._buffers is None else self._buffers.choose()
        self._make_buckets([[int(i) for i in order if i >= 0]], in_tail)

    def _make_buckets(self, groups: Sequence[list[int]], in_tail: list[str]) -> None:
        n_bytes = 0 if self._buffers is None else self._buffers.put_in_tail(in_tail)
        self._tail = GradientTail(self._places, len(self.parameters), n_bytes)
        for i, group in enumerate(groups):
            self._add_group(group, 0 if i else self._tail.n_elems)

    def _add_group(self, members: list[int], tail_elems: int) -> None:
        key = f"{self.name}/gradients" + (f" {len(self._groups)}," if self._groups else "")
        i, sizes, found = make_buckets(
            self.calls,
            key,
            members,
            self.forms,
            self.parameters,
            limit_bytes=self._bucket_bytes,
            tail_elems=tail_elems,
            compression=self.compression,
        )
        self._groups.append(members)
        self._sets.append((i, sizes, found))
        self._buckets += found
        self._tail_bucket = next((bucket for bucket in found if bucket.has_tail), self._tail_bucket)
        for bucket in found:
            self._views |= bucket.views
            for i, view in bucket.views.items():
                if i in self.fired and self.parameters[i].grad is not None:  # else the program has cleared it
                    view.copy_grad(self.scale, as_grad=True)  # the pass has ended

    def _is_trained(self, bucket: GradientBucket) -> bool:
        return any(self._trained[i] for i in bucket.views)

    def _send_all(self, chosen: list[GradientBucket]) -> None:
        for bucket in chosen:
            if not bucket.sent:
                self._send(bucket)

    def _exchange(self, chosen: list[GradientBucket]) -> None:
        if self._overlap:
            self._send_all(chosen)
            for bucket in chosen:
                assert bucket.request is not None
                bucket.request.wait()
                bucket.wait_for_streams()
            return
        for bucket in chosen:
            self._fill(bucket)
        for on_gpu in (False, True):  # those on a GPU in a call of their own, so that both add in place
            some = [bucket for bucket in chosen if bucket.on_gpu == on_gpu]
            if some:
                self._store.pushpull([bucket.key for bucket in some], [bucket.flat for bucket in some])

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
        """Exchange the gradients of parameters that were frozen in the last round. Collective if there are any."""
        new = np.flatnonzero(trained & ~self._trained)
        self._trained = trained
        without_bucket = [int(i) for i in reversed(new) if int(i) not in self._views]
        if without_bucket:
            self._add_group(without_bucket, 0)
        late = dict.fromkeys(self._views[int(i)].bucket for i in new)
        chosen = [bucket for bucket in late if not bucket.sent]
        if chosen:
            self._exchange(chosen)

    def _reset(self) -> None:
        self.fired.clear()
        self._used[:] = False
        self._unused.end_round()
        for bucket in self._buckets:
            bucket.end_round(self._trained)


def agreed(
    calls: CollectiveCalls, what: str, named: Sequence[tuple[str, torch.nn.Parameter]], settings: str, **options: Any
) -> Gradients:
    """Make gradients of the same parameters and options on all workers. Collective, blocks; ConfigError, ShapeMismatch.

    what: the class that has them. settings: its arguments as text, but those in `options`, which are of `Gradients`.
    """
    if (bucket_bytes := options["bucket_bytes"]) is not None:
        options["bucket_bytes"] = checks.whole("bucket_bytes", bucket_bytes, 1)
    if (session := calls.store.session).has_spares and session.resumed:
        raise UnsupportedError(f"{what}: with spares (MPIKV_SPARES) make it before resume(), which tells a spare of it")
    name = f"{what.removeprefix('Distributed').lower()}{session.new_namespace()}"
    found = Gradients(calls, name, named, **options)
    settings += f", bucket_bytes={bucket_bytes}, compression={found.compression.text}"
    calls.agree([settings], f"the arguments of {what}")
    calls.agree(found.lines(), f"the parameters of {what}", ShapeMismatch)
    return found


def _give_back(spares: Spares, sets: list[tuple[int, str, list[GradientBucket]]]) -> None:
    """Give back the keys of buckets whose gradients are freed, unless they are compressed or being sent."""
    for i, sizes, found in sets:
        in_use = [view.in_use for bucket in found for view in bucket.views.values()]
        for bucket in found:
            bucket.views.clear()  # which refer to the bucket, so that both are freed at once
        if not any(bucket.compressed or bucket.sent for bucket in found):
            keys, flats = [bucket.key for bucket in found], [bucket.flat for bucket in found]
            spares.give(i, Spare(sizes, keys, flats, in_use))


class UnusedSums:
    """Sums of compressed parameters that no worker has used, and what was pushed for them; by the parameter's number.

    A codec sends values of earlier pushes, too, from its residual. So that these are not lost with a sum that nobody
    takes, each worker subtracts in the next round what it pushed in this one, and worker 0 pushes the sum again.
    Memory: twice the gradients of parameters that are in a bucket but not used.
    """

    def __init__(self) -> None:
        self._pushed: dict[int, torch.Tensor] = {}  # in this round, for parameters that this worker has not used
        self._corrections: dict[int, torch.Tensor] = {}  # to be added to the next push

    def fill(self, i: int, view: torch.Tensor, *, used: bool) -> None:
        """Add the correction of the round before to a push, which is in `view`. used: whether this worker used it."""
        if not used:
            self._pushed[i] = view.clone()
        if i in self._corrections:
            view.add_(self._corrections.pop(i))

    def keep(self, i: int, total: torch.Tensor, *, first: bool) -> None:
        """Note a sum that no worker takes. first: whether this is worker 0. NaN and infinities are dropped."""
        correction = self._pushed.pop(i, None)
        if correction is None:
            return  # the parameter was frozen between its backward pass and the exchange
        correction.neg_()
        if first:
            correction.add_(total)
        self._corrections[i] = correction.nan_to_num_(0.0, 0.0, 0.0)

    def end_round(self) -> None:
        self._pushed.clear()
