"""Workers that push a round under different attributes: each gradient counts with its own factor, or all raise.

In every way that a round can go, against plain arithmetic in float64 on numbers that are exact in every dtype.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from store_modes import long_messages

from mpikv import ConfigError, optimizers
from mpikv.config import Config
from mpikv.strategies.queued_call import QueuedCall
from mpikv.testing.reference import ReferenceStore
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

BOUND = 8  # elements from which on a key is cut over all servers
SIZES = (0, 1, 2, 5, 24, 300)
DTYPES = tuple(np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


class Form(NamedTuple):
    """How a round goes. hosts: of each rank, one letter each; '': all on one. memory: as in `store_modes.Mode`."""

    workers: int
    servers: int = 0
    algorithm: str = "auto"
    hosts: str = ""
    memory: str = "auto"
    part_bytes: int = 1 << 20

    def run(self, body, **changes: Any):
        fields = {
            "algorithm": self.algorithm,
            "shared_memory": "off" if self.memory == "off" else "auto",
            "bigarray_bound_elems": BOUND,
            "partition_bytes": self.part_bytes,
            "timeout_s": TEST_TIMEOUT_S,
            **changes,
        }
        arguments = {"num_servers": self.servers, "config": Config(**fields), "hosts": list(self.hosts) or None}
        if self.memory == "long":
            with long_messages():
                return spawn_stores("dist_sync", self.workers, body, **arguments)
        return spawn_stores("dist_sync", self.workers, body, **arguments)


ALGORITHMS = ("naive", "ring", "halving_doubling")
BY_MESSAGES = tuple(Form(w, algorithm=a) for w in (2, 3, 5) for a in ALGORITHMS)
DIRECT = (Form(2), Form(3), Form(5))
HOSTS = (
    Form(3, hosts="abc"),
    Form(4, hosts="aabb"),
    Form(5, hosts="aabbb"),
    Form(5, hosts="ababb", memory="off"),
    Form(6, hosts="aabbcc", memory="off"),
)
SERVERS = tuple(
    Form(w, servers=s, memory=memory, part_bytes=part)
    for (w, s, part), memory in itertools.product(((2, 1, 1 << 20), (3, 2, 64), (5, 3, 64)), ("auto", "off", "long"))
)
FORMS = (*BY_MESSAGES, *DIRECT, *HOSTS, *SERVERS)
FEW = (
    Form(3, algorithm="ring"),
    Form(3),
    Form(3, hosts="aab"),
    Form(3, hosts="abc"),
    Form(3, servers=2, part_bytes=64),
)


def form_id(form: Form) -> str:
    return f"{form.workers}w{form.servers}s-{form.algorithm}-{form.hosts or 'one'}-{form.memory}-{form.part_bytes}"


EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=form_id)
SOME_FORMS = pytest.mark.parametrize("form", FEW, ids=form_id)

# The factor of each worker, step by step: alike; the last batch; alike again, also in the step in which all change; and
# one worker alone, who then goes on with what it has.
FACTORS = (
    (1.0,) * 6,
    (0.5, 2.0, 1.0, 0.5, 2.0, 1.0),
    (1.0,) * 6,
    (0.5,) * 6,
    (0.5, 0.5, 1.0, 0.5, 0.5, 0.5),
    (0.5, 1.0, 1.0, 0.5, 0.5, 0.5),
    (0.5, 1.0, 1.0, 0.5, 0.5, 0.5),
)


def small_numbers(n: int, worker: int, step: int, dtype: Any) -> Any:
    return ((np.arange(n) + worker + step) % 2).astype(dtype)


def expected(n: int, workers: int, step: int) -> Any:
    """The value after so many steps of `weight += factor * gradient`."""
    return sum(
        (FACTORS[i][w] * small_numbers(n, w, i, np.float64) for i in range(step) for w in range(workers)), np.zeros(n)
    )


CALLS = ("pushpull", "in place", "one by one", "push and pull", "async", "shared")


def exchange(store, call: str, keys, grads, outs) -> None:
    if call == "pushpull":
        store.pushpull(keys, grads, out=outs)
    elif call in {"in place", "shared"}:
        for out, grad in zip(outs, grads, strict=True):
            out[...] = grad
        store.pushpull(keys, outs)
    elif call == "one by one":
        for key, grad, out in zip(keys, grads, outs, strict=True):
            store.pushpull(key, grad, out=out)
    elif call == "push and pull":
        for key, grad in zip(keys, grads, strict=True):
            store.push(key, grad)
        store.pull(keys, out=outs)
    else:
        store.pushpull_async(keys, grads, out=outs).wait()


@pytest.mark.grid(1)
@EVERY_FORM
def test_each_gradient_counts_with_its_own_factor(form: Form) -> None:
    # Each size in two dtypes, each dtype in three sizes.
    shapes = [(n, DTYPES[(i + k) % len(DTYPES)]) for i, n in enumerate(SIZES) for k in (0, 1)]

    def body(store):
        keys = [f"{n} {dtype}" for n, dtype in shapes]
        optimizer = optimizers.create("test")
        store.init(keys, [np.zeros(n, dtype) for n, dtype in shapes])
        store.set_optimizer(optimizer)
        shared = [store.zeros((n,), dtype) for n, dtype in shapes]
        found = []
        for step, factors in enumerate(FACTORS):
            call = CALLS[(step + form.workers) % len(CALLS)]
            optimizer.rescale_grad = factors[store.rank]
            grads = [small_numbers(n, store.rank, step, dtype) for n, dtype in shapes]
            outs = shared if call == "shared" else [np.empty(n, dtype) for n, dtype in shapes]
            exchange(store, call, keys, grads, outs)
            found.append([out.astype(np.float64) for out in outs])
        return found

    for found in form.run(body):
        for step, values in enumerate(found):
            for (n, dtype), value in zip(shapes, values, strict=True):
                assert value.tolist() == expected(n, form.workers, step + 1).tolist(), (step, n, dtype)


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form.workers == 2 or form.algorithm == "naive"], ids=form_id
)
def test_which_bits_results_have(form: Form) -> None:
    """With the factor that was agreed on no bit changes, also where the rate does, and where factors have differed
    before; with another one each gradient is multiplied by the ratio of the two, rounded once, and then all is as
    before. So it is in every form.
    """
    n, agreed = 200, 1 / 48
    steps = [(1 / 48, 0.3), (1 / 48, 0.3), (1 / 7, 0.3), (1 / 7, 0.07), (1 / 48, 0.3), None, (1 / 48, 0.3), (0.1, 0.2)]

    def numbers(worker: int, step: int) -> Any:
        return np.random.default_rng([worker, step]).standard_normal(n).astype(np.float32)

    def body(store):
        optimizer = optimizers.create("sgd", learning_rate=0.3, wd=0.01, rescale_grad=agreed)
        store.init("w", np.ones(n, np.float32))
        store.set_optimizer(optimizer)
        found = []
        for step, attributes in enumerate(steps):
            optimizer.rescale_grad, optimizer.learning_rate = attributes or (1.0 / (3 + store.rank), 0.3)
            out = np.empty(n, np.float32)
            store.pushpull("w", numbers(store.rank, step), out=out)
            found.append(out)
        return found

    results = form.run(body)
    optimizer = optimizers.create("sgd", wd=0.01, rescale_grad=agreed)
    for step, attributes in enumerate(steps):
        assert len({found[step].tobytes() for found in results}) == 1
        if attributes is None:
            continue
        factor, optimizer.learning_rate = attributes
        before = results[0][step - 1] if step else np.ones(n, np.float32)

        def update(weight, total):
            new = weight.copy()
            optimizer.update("w", new, total, optimizer.init(new))
            return new

        reference = ReferenceStore(form.workers, update=update)
        reference.init("w", before)
        for worker in range(form.workers):
            gradient = numbers(worker, step)
            reference.push(worker, "w", [gradient if factor == agreed else gradient * np.float32(factor / agreed)])
        assert results[0][step].tobytes() == reference.pull(0, "w").tobytes(), step


@SOME_FORMS
def test_rounds_ahead_in_any_order(form: Form) -> None:
    """Every worker pushes rounds of several keys in an order of its own, far ahead, each under labels of its own."""
    n_keys, n_rounds, n = 4, 12, 20

    def factor(worker: int, key: int, round_: int) -> float:
        random = np.random.default_rng([key, round_])
        alike, odd = random.random() < 0.5, int(random.integers(form.workers))
        common = float(2.0 ** random.integers(-2, 2))
        if alike or (worker != odd and random.random() < 0.5):
            return common
        return float(2.0 ** np.random.default_rng([key, round_, worker]).integers(-2, 2))

    def body(store):
        optimizer = optimizers.create("test")
        keys = [str(key) for key in range(n_keys)]
        store.init(keys, [np.zeros(n)] * n_keys)
        store.set_optimizer(optimizer)
        order = [key for key in range(n_keys) for _ in range(n_rounds)]
        np.random.default_rng(store.rank).shuffle(order)
        made = [0] * n_keys
        for key in order:
            optimizer.rescale_grad = factor(store.rank, key, made[key])
            made[key] += 1
            store.push(str(key), small_numbers(n, store.rank, made[key], np.float64))
        return [store.pull(key).tolist() for key in keys]

    wanted = [
        sum(
            factor(w, key, i) * small_numbers(n, w, i + 1, np.float64)
            for i in range(n_rounds)
            for w in range(form.workers)
        ).tolist()
        for key in range(n_keys)
    ]
    assert form.run(body) == [wanted] * form.workers


# --- other attributes

DIFFERENT = {
    "learning_rate": (0.1, 0.2),
    "wd": (0.0, 0.5),
    "momentum": (0.0, 0.9),
    "clip_gradient": (None, 1.0),
    "lr_mult": ({}, {"w": 2.0}),
    "lr_scheduler": (None, optimizers.FactorScheduler(step=1, factor=0.5)),
}


def refused(call, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def owned(store) -> list[bytes]:
    """What this worker has of the values, where no servers have them."""
    queues = getattr(store.strategy, "_queues", {})
    return [queue.value()[queue.span(info)].tobytes() for queue in queues.values() for info in queue.keys]


def without_bundles(monkeypatch: Any) -> None:
    """Let every message be of one key, as soon as it can leave."""
    monkeypatch.setattr(sys.modules[__name__], "Config", functools.partial(Config, bucket_bytes=0))


def refused_step(form: Form, set_attributes, *, steps: int = 1, attribute: str = "learning_rate") -> None:
    """All is well for some steps; then the attributes differ. Both names, on all workers; nothing is updated.

    The arrays for the result hold the stored value then, or what they held.
    """

    def body(store):
        optimizer = optimizers.create("sgd", learning_rate=0.1)
        keys, shapes = ["w", "tiny", "empty"], [(40,), (1,), (0,)]
        store.init(keys, [np.ones(shape, np.float32) for shape in shapes])
        store.set_optimizer(optimizer)
        grads = [np.ones(shape, np.float32) for shape in shapes]
        for _ in range(steps):
            store.pushpull(keys, grads, out=[np.empty(shape, np.float32) for shape in shapes])
        values = [store.pull(key) for key in keys]
        before = owned(store)
        set_attributes(optimizer, store.rank)
        outs = [np.full(shape, 7, np.float32) for shape in shapes]
        texts = [refused(store.pushpull, keys, grads, out=outs)]
        assert all((out == 7).all() or (out == value).all() for out, value in zip(outs, values, strict=True))
        texts.append(refused(store.pull, "w"))
        texts.append(refused(store.push, "w", grads[0]))
        after = owned(store)
        store.close()  # which says nothing that was said
        return before == after, texts

    for unchanged, texts in form.run(body):
        assert unchanged
        for text in texts:  # of one key or the other
            assert f"round {steps + 1}: different attributes" in text
            assert all(text.count(f"worker {i} on ") == 1 for i in range(form.workers))
            assert text.count(f": {attribute}=") == 2
            assert "nothing was updated" in text


@EVERY_FORM
def test_another_rate_is_an_error_on_all(form: Form) -> None:
    def odd(optimizer, rank):
        optimizer.learning_rate = 0.2 if rank == 1 else 0.1
        optimizer.rescale_grad = 0.5

    refused_step(form, odd)


@SOME_FORMS
def test_a_key_that_is_refused_while_the_other_keys_of_the_call_are_pushed(form: Form, monkeypatch) -> None:
    """Worker 0 is slow: it has pushed the first key, the others all. It pushes the rest all the same."""
    before, armed, late = QueuedCall._lent_round, threading.Event(), threading.Event()

    def slow(call, queue, *arguments):
        keys = {one.info.key: one for one in call._keys.all()}
        if armed.is_set() and call._session.rank == 0 and queue.info.key != "w" and keys["w"].waiting:
            deadline = time.monotonic() + TEST_TIMEOUT_S
            while not keys["w"].running.done:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            late.set()
        return before(call, queue, *arguments)

    def odd(optimizer, rank):
        optimizer.learning_rate = 0.2 if rank == 1 else 0.1
        if rank == 0:
            armed.set()

    monkeypatch.setattr(QueuedCall, "_lent_round", slow)
    without_bundles(monkeypatch)  # which leave at the end of a call
    refused_step(form, odd)
    assert late.is_set() == (not form.servers)  # to those all keys go in one message


@pytest.mark.grid
@pytest.mark.parametrize("attribute", DIFFERENT)
@pytest.mark.parametrize("form", [FEW[0], FEW[1], FEW[-1]], ids=form_id)
def test_every_attribute_counts(form: Form, attribute: str) -> None:
    def odd(optimizer, rank):
        setattr(optimizer, attribute, DIFFERENT[attribute][rank == 1])

    refused_step(form, odd, steps=2, attribute=attribute)


@SOME_FORMS
def test_who_has_changed_is_found_out_whoever_it_is(form: Form) -> None:
    """Worker 1 stays as it was, the others change: one of them alone, or both alike."""
    for changed in ({0}, {2}, {0, 2}):

        def odd(optimizer, rank, changed=frozenset(changed)):
            optimizer.learning_rate = 0.4 if rank in changed else 0.1

        refused_step(form, odd, steps=2)


@SOME_FORMS
def test_an_attribute_changed_for_one_push_alone(form: Form) -> None:
    """Worker 0 changes it, pushes, and changes it back, far ahead of the others."""

    def body(store):
        optimizer = optimizers.create("sgd", learning_rate=0.5)
        store.init(["a", "b"], [np.zeros(9, np.float32)] * 2)
        store.set_optimizer(optimizer)
        for step in range(6):
            optimizer.learning_rate = 1.0 if (store.rank, step) == (0, 3) else 0.5
            store.push("a", np.ones(9, np.float32))
            optimizer.learning_rate = 0.5
            store.push("b", np.ones(9, np.float32))
        value = store.pull("b").tolist()
        return value, refused(store.close)  # the first who can say it

    for value, *texts in form.run(body):
        assert value == [-3.0 * form.workers] * 9
        assert all("round 4" in text and "learning_rate=1.0" in text for text in texts)


@SOME_FORMS
def test_integers_cannot_be_scaled(form: Form) -> None:
    def body(store):
        optimizer = optimizers.create("test")
        store.init("w", np.zeros(9, np.int32))
        store.set_optimizer(optimizer)
        store.push("w", np.ones(9, np.int32))
        value = store.pull("w").tolist()
        optimizer.rescale_grad = 1.0 + store.rank
        store.push("w", np.ones(9, np.int32))
        text = refused(store.pull, "w")
        store.close()
        return value, text

    for value, *texts in form.run(body):
        assert value == [form.workers] * 9
        assert all("integers cannot be scaled" in text and "rescale_grad=3.0" in text for text in texts)


@SOME_FORMS
def test_optimizers_of_their_own_keys(form: Form) -> None:
    """Two slots: the factors of one differ, those of the other do not; an optimizer that needs the whole key."""

    def body(store):
        store.init(["a", "b"], [np.zeros(30, np.float32), np.ones(30, np.float32)])
        first, second = optimizers.create("test"), optimizers.create("lars", learning_rate=0.5)
        store.strategy.set_optimizer(first, ["a"])
        store.strategy.set_optimizer(second, ["b"])
        for step, factors in enumerate(FACTORS):
            first.rescale_grad = factors[store.rank]
            second.rescale_grad = 0.25 * factors[store.rank]
            grads = [small_numbers(30, store.rank, step, np.float32)] * 2
            store.pushpull(["a", "b"], grads, out=[np.empty(30, np.float32)] * 2 if step < 0 else None)
        return store.pull("a").tolist(), store.pull("b")

    single = np.ones(30, np.float32)
    lars = optimizers.create("lars", learning_rate=0.5)
    state = lars.init(single)
    for step in range(len(FACTORS)):
        total = expected(30, form.workers, step + 1) - expected(30, form.workers, step)
        lars.rescale_grad = 0.25
        state = lars.update("b", single, total.astype(np.float32), state)
    for a, b in form.run(body):
        assert a == expected(30, form.workers, len(FACTORS)).tolist()
        np.testing.assert_allclose(b, single, rtol=1e-5)


def test_asynchronous_pushes_count_with_their_own_attributes() -> None:
    def body(store):
        optimizer = optimizers.create("sgd", learning_rate=1.0)
        store.init("w", np.zeros(20, np.float32))
        store.set_optimizer(optimizer)
        optimizer.learning_rate, optimizer.rescale_grad = 2.0**store.rank, 0.5
        store.push("w", np.ones(20, np.float32))
        store.barrier()
        return store.pull("w").tolist()

    for servers in (0, 2):
        found = spawn_stores("dist_async", 3, body, num_servers=servers, config=Config(bigarray_bound_elems=BOUND))
        assert found == [[-3.5] * 20] * 3


# --- counts


COUNTED = (*BY_MESSAGES, *HOSTS, Form(5, hosts="abcde"), Form(2, hosts="ab"), Form(3), Form(3, 2))


@pytest.mark.parametrize("form", COUNTED, ids=form_id)
def test_messages(form: Form, monkeypatch) -> None:
    """As many in a step that changes attributes as in one that does not; also where workers' factors differ."""
    without_bundles(monkeypatch)
    shapes = (1, 2, 30, 300)

    def body(store):
        optimizer = optimizers.create("sgd", learning_rate=0.1)
        keys = list(range(len(shapes)))
        store.init(keys, [np.zeros(n, np.float32) for n in shapes])
        store.set_optimizer(optimizer)
        counts = []
        for step in range(7):
            if step in {2, 4}:
                optimizer.learning_rate /= 2
            if step in {3, 4}:
                optimizer.rescale_grad /= 2
            if step == 5:
                optimizer.rescale_grad = 1.0 + store.rank
            if step == 6:
                optimizer.rescale_grad = 1.0
            store.barrier()
            before = store.stats()
            store.pushpull(keys, [np.ones(n, np.float32) for n in shapes])
            after = store.stats()
            names = ("messages_sent", "control_messages_sent", "declined_calls")
            counts.append([after.get(name, 0) - before.get(name, 0) for name in names])
        store.barrier()
        return counts

    for counts in form.run(body):
        assert all(control == 0 for _, control, _ in counts)
        messages = [messages for messages, _, _ in counts]
        if form == Form(3):  # who has another factor than the agreed one has to copy: then each key has its own round
            assert [declined for _, _, declined in counts] == [0, 0, 0, 1, 1, 1, 0]
        if not form.servers:  # whom workers tell new attributes in a message, once for all keys
            assert messages == [messages[0]] * len(counts)


@pytest.mark.parametrize(
    "form", [Form(3, algorithm="ring"), Form(5, algorithm="halving_doubling"), *HOSTS], ids=form_id
)
def test_messages_of_another_op(form: Form) -> None:
    def body(store):
        store.init("w", np.ones(30, np.float32))
        counts = []
        for op in ("sum", "sum", "max", "mean", "max", "sum"):
            store.barrier()
            before = store.stats()["messages_sent"]
            store.pushpull("w", np.ones(30, np.float32), op=op)
            counts.append(store.stats()["messages_sent"] - before)
        store.barrier()
        return counts

    for counts in form.run(body):
        assert counts == [counts[0]] * len(counts)


@EVERY_FORM
def test_another_op_is_an_error_on_all(form: Form) -> None:
    def body(store):
        shapes = [3, 300]
        store.init(["a", "b"], [np.zeros(n, np.float32) for n in shapes])
        store.pushpull(["a", "b"], [np.full(n, store.rank, np.float32) for n in shapes], op="max")
        op = "max" if store.rank == 1 else "sum"
        text = refused(store.pushpull, ["a", "b"], [np.ones(n, np.float32) for n in shapes], op=op)
        store.close()
        return [text]

    for texts in form.run(body):
        for text in texts:  # of one key or the other
            assert "round 2: another op of pushpull on different workers" in text
            assert "worker 1 on localhost: op='max'" in text or form.hosts
            assert "op='sum'" in text
            assert "nothing was updated" in text
