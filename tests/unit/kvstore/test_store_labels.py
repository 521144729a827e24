"""Workers that push a round under different attributes: each gradient counts with its own factor, or all raise.

In every way that a round can go, against plain arithmetic in float64 on numbers that are exact in every dtype.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from direct_stores import CALLS, exchange
from on_workers import counted, on, uniform
from store_modes import ADDING, FEW_DIST_SYNC, HYBRID, Mode

from mpikv import ConfigError, optimizers
from mpikv.testing.reference import ReferenceStore

F32 = np.float32
SIZES = (0, 1, 2, 5, 24, 300)
DTYPES = tuple(np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
Form = functools.partial(Mode, "dist_sync")  # how a round goes

BY_MESSAGES = (Form(2, algorithm="owners"), Form(3, algorithm="ring"), Form(5, algorithm="owners"))
HOSTS = (Form(3, hosts="abc"), Form(4, hosts="aabb"), Form(5, hosts="ababb", memory="off"))
SERVERS = (Form(2, 1), Form(3, 2, memory="off", part_bytes=64), Form(5, 3, memory="long", part_bytes=64))
FORMS = (*BY_MESSAGES, Form(2), Form(3), *HOSTS, *SERVERS, *ADDING[:2], HYBRID[2])
FEW = (Form(3, algorithm="ring"), Form(3), Form(3, hosts="aab"), ADDING[0], HYBRID[2], Form(3, 2, part_bytes=64))

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


@on(*FORMS)
def test_each_gradient_counts_with_its_own_factor(store, W) -> None:
    # Each size in two dtypes, each dtype in three sizes.
    shapes = [(n, DTYPES[(i + k) % len(DTYPES)]) for i, n in enumerate(SIZES) for k in (0, 1)]
    keys = [f"{n} {dtype}" for n, dtype in shapes]
    optimizer = optimizers.create("test")
    store.init(keys, [np.zeros(n, dtype) for n, dtype in shapes])
    store.set_optimizer(optimizer)
    outs, shared = ([make(n, dtype) for n, dtype in shapes] for make in (np.zeros, store.zeros))
    calls = itertools.islice(itertools.cycle(CALLS), W, None)
    for step, (factors, call) in enumerate(zip(FACTORS, calls, strict=False)):
        optimizer.rescale_grad = factors[store.rank]
        values = [small_numbers(n, store.rank, step, dtype) for n, dtype in shapes]
        if step % 3 == 2:
            for array, value in zip(shared, values, strict=True):
                array[...] = value
            values = shared
        exchange(store, call, keys, values, outs)
        for (n, dtype), value in zip(shapes, values, strict=True):
            assert value.astype(np.float64).tolist() == expected(n, W, step + 1).tolist(), (step, n, dtype)


@on(*[form for form in FORMS if form.workers == 2 or form.algorithm == "owners"])
def test_which_bits_results_have(mode: Mode) -> None:
    """With the factor that was agreed on no bit changes, also where the rate does, and where factors have differed
    before; with another one each gradient is multiplied by the ratio of the two, rounded once, and then all is as
    before. So it is in every form.
    """
    n, agreed = 200, 1 / 48
    steps = [(1 / 48, 0.3), (1 / 48, 0.3), (1 / 7, 0.3), (1 / 7, 0.07), (1 / 48, 0.3), None, (1 / 48, 0.3), (0.1, 0.2)]

    def numbers(worker: int, step: int) -> Any:
        return np.random.default_rng([worker, step]).standard_normal(n).astype(F32)

    def body(store):
        optimizer = optimizers.create("sgd", learning_rate=0.3, wd=0.01, rescale_grad=agreed)
        store.init("w", np.ones(n, F32))
        store.set_optimizer(optimizer)
        found = []
        for step, attributes in enumerate(steps):
            optimizer.rescale_grad, optimizer.learning_rate = attributes or (1.0 / (3 + store.rank), 0.3)
            store.pushpull("w", numbers(store.rank, step), out=(out := np.empty(n, F32)))
            found.append(out)
        return found

    results = mode.run(body)
    optimizer = optimizers.create("sgd", wd=0.01, rescale_grad=agreed)

    def update(weight, total):
        new = weight.copy()
        optimizer.update("w", new, total, optimizer.init(new))
        return new

    for step, attributes in enumerate(steps):
        assert len({found[step].tobytes() for found in results}) == 1
        if attributes is None:
            continue
        factor, optimizer.learning_rate = attributes
        reference = ReferenceStore(mode.workers, update=update)
        reference.init("w", results[0][step - 1] if step else np.ones(n, F32))
        for worker in range(mode.workers):
            gradient = numbers(worker, step)
            reference.push(worker, "w", [gradient if factor == agreed else gradient * F32(factor / agreed)])
        assert results[0][step].tobytes() == reference.pull(0, "w").tobytes(), step


@on(*FEW, *FEW_DIST_SYNC[2:], late=True)
def test_rounds_ahead_in_any_order(store, W) -> None:
    """Every worker pushes rounds of several keys in an order of its own, far ahead, each under labels of its own."""
    n_rounds, n, keys = 12, 20, range(4)

    def factor(worker: int, key: int, round_: int) -> float:
        random = np.random.default_rng([key, round_])
        alike, odd = random.random() < 0.5, int(random.integers(W))
        common = float(2.0 ** random.integers(-2, 2))
        if alike or (worker != odd and random.random() < 0.5):
            return common
        return float(2.0 ** np.random.default_rng([key, round_, worker]).integers(-2, 2))

    def rate(key: int, round_: int) -> float:
        return 2.0 ** ((3 * key + round_ // 2) % 4)  # some rounds have that of the one before

    def moved(worker: int, key: int) -> Any:
        return sum(
            small_numbers(n, worker, i, np.float64) * factor(worker, key, i) * rate(key, i) for i in range(n_rounds)
        )

    optimizer = optimizers.create("sgd")
    store.init([*keys], [np.zeros(n) for _ in keys])
    store.set_optimizer(optimizer)
    made = dict.fromkeys(keys, 0)
    for key in np.random.default_rng(store.rank).permutation([*keys] * n_rounds).tolist():
        optimizer.learning_rate, optimizer.rescale_grad = rate(key, made[key]), factor(store.rank, key, made[key])
        store.push(key, small_numbers(n, store.rank, made[key], np.float64))
        made[key] += 1
    for key in keys:
        assert store.pull(key).tolist() == (-sum(moved(worker, key) for worker in range(W))).tolist()


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
    return [queue.value()[slice(*queue.bounds[store.rank :][:2])].tobytes() for queue in store.strategy.ring.all()]


def refused_step(store, W, attribute: str, *, steps: int = 1, **attributes: Any) -> None:
    """All is well for some steps; then the attributes differ. Both names, on all workers; nothing is updated.

    attributes: those that this worker sets. The arrays for the result hold the stored value then, or what they held.
    """
    optimizer = optimizers.create("sgd", learning_rate=0.1)
    keys, sizes = ["w", "tiny", "empty"], [40, 1, 0]
    store.init(keys, [np.ones(n, F32) for n in sizes])
    store.set_optimizer(optimizer)
    grads = [np.ones(n, F32) for n in sizes]
    for _ in range(steps):
        store.pushpull(keys, grads, out=[np.empty(n, F32) for n in sizes])
    values = [store.pull(key) for key in keys]
    before = owned(store)
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    outs = [np.full(n, 7, F32) for n in sizes]
    texts = [refused(store.pushpull, keys, grads, out=outs)]
    assert all((out == 7).all() or (out == value).all() for out, value in zip(outs, values, strict=True))
    texts += [refused(store.pull, "w"), refused(store.push, "w", grads[0])]
    assert before == owned(store)
    for text in texts:  # of one key or the other
        assert f"round {steps + 1}: different attributes" in text
        assert [text.count(f"worker {i} on ") for i in range(W)] == [1] * W
        assert text.count(f": {attribute}=") == 2
        assert "nothing was updated" in text
    store.close()  # which says nothing that was said


@pytest.mark.parametrize("changed", [{0}, {1}, {0, 2}], ids=str)
@on(*FORMS)
def test_another_rate_is_an_error_on_all(store, W, changed: set[int]) -> None:
    """Whoever has changed it."""
    rate = 0.2 if store.rank in changed else 0.1
    refused_step(store, W, "learning_rate", steps=len(changed), learning_rate=rate, rescale_grad=0.5)


@pytest.mark.parametrize("attribute", DIFFERENT)
@on(FEW[1])
def test_every_attribute_counts(store, W, attribute: str) -> None:
    refused_step(store, W, attribute, steps=2, **{attribute: DIFFERENT[attribute][store.rank == 1]})


@on(*FEW)
def test_integers_cannot_be_scaled(store, W) -> None:
    optimizer = optimizers.create("test")
    store.init("w", np.zeros(9, np.int32))
    store.set_optimizer(optimizer)
    store.push("w", np.ones(9, np.int32))
    assert uniform(store.pull("w")) == W
    optimizer.rescale_grad = 1.0 + store.rank
    store.push("w", np.ones(9, np.int32))
    text = refused(store.pull, "w")
    assert "integers cannot be scaled" in text
    assert "rescale_grad=3.0" in text
    store.close()


@on(Mode("dist_async", 3), Mode("dist_async", 3, 2))
def test_asynchronous_pushes_count_with_their_own_attributes(store) -> None:
    optimizer = optimizers.create("sgd", learning_rate=1.0)
    store.init("w", np.zeros(20, F32))
    store.set_optimizer(optimizer)
    optimizer.learning_rate, optimizer.rescale_grad = 2.0**store.rank, 0.5
    store.push("w", np.ones(20, F32))
    store.barrier()
    assert uniform(store.pull("w")) == -3.5


# --- counts


@on(*BY_MESSAGES, *HOSTS, Form(5, hosts="abcde"), Form(2, hosts="ab"), Form(3), Form(3, 2))
@pytest.mark.usefixtures("patient")
def test_messages(store, mode: Mode) -> None:
    """As many in a step that changes attributes as in one that does not; also where workers' factors differ."""
    optimizer = optimizers.create("sgd", learning_rate=0.1)
    keys, sizes = [0, 1, 2, 3], (1, 2, 30, 300)
    store.init(keys, [np.zeros(n, F32) for n in sizes])
    store.set_optimizer(optimizer)

    def step(rate: float, factor: float) -> None:
        optimizer.learning_rate, optimizer.rescale_grad = rate, factor
        store.pushpull(keys, [np.ones(n, F32) for n in sizes])
        store.barrier()  # until this worker has answered all others

    attributes = [(0.1, 1), (0.1, 1), (0.05, 1), (0.05, 0.5), (0.025, 0.25), (0.025, 1.0 + store.rank), (0.025, 1)]
    names = ("messages_sent", "control_messages_sent", "declined_calls")
    counts = [counted(store, functools.partial(step, *one), *names) for one in attributes]
    messages, control, declined = zip(*counts, strict=True)
    assert len(set(control)) == 1  # the barrier's
    if mode == Form(3):  # who has another factor than the agreed one has to copy: then each key has its own round
        assert declined == (0, 0, 0, 1, 1, 1, 0)
    if not mode.servers:  # whom workers tell new attributes in a message, once for all keys
        assert set(messages) == {messages[0]}


@on(*FORMS)
def test_another_op_is_an_error_on_all(store) -> None:
    sizes = [3, 300]
    store.init(["a", "b"], [np.zeros(n, F32) for n in sizes])
    store.pushpull(["a", "b"], [np.full(n, store.rank, F32) for n in sizes], op="max")
    op = "max" if store.rank == 1 else "sum"
    text = refused(store.pushpull, ["a", "b"], [np.ones(n, F32) for n in sizes], op=op)
    host = store.session.members.worker_hosts[1]
    store.close()
    assert "round 2: another op of pushpull on different workers" in text  # of one key or the other
    assert f"worker 1 on {host}: op='max'" in text
    assert "op='sum'" in text
    assert "nothing was updated" in text
