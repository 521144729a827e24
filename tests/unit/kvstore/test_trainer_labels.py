"""Trainers whose workers give different batch sizes, or other attributes. Every way of a round: test_store_labels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from on_workers import counted, on
from store_modes import Mode

from mpikv import ConfigError, Parameter, Trainer

SHAPES = {"a": (3, 5), "b": (1,), "c": (40,), "d": ()}
# Of each worker, step by step: alike, the last, short batch, alike in another size, always different, alike.
LAST, ALWAYS = (2.0, 1.0, 4.0, 2.0, 0.5, 2.0), (2.0, 1.0, 2.0, 4.0, 2.0, 2.0)
BATCHES = ((2.0,) * 6, LAST, (2.0,) * 6, (4.0,) * 6, ALWAYS, ALWAYS, (2.0,) * 6)

Form = functools.partial(Mode, "dist_sync")
FORMS = on(Form(3), Form(3, hosts="abc"), Form(4, hosts="aabb", memory="off"), Form(3, 1))
ON_STORE = pytest.mark.parametrize("on_store", [True, False], ids=["store", "own"])


def made(store, on_store: bool, names=SHAPES, optimizer="test", **params: Any) -> tuple[dict[str, Parameter], Trainer]:
    parameters = {name: Parameter(np.zeros(SHAPES[name], np.float32)) for name in names}
    return parameters, Trainer(parameters, optimizer, params, kvstore=store, update_on_kvstore=on_store)


def gradient(name: str, worker: int, step: int) -> Any:
    shape = SHAPES[name]
    return ((np.arange(int(np.prod(shape))) + worker + step + len(name)) % 3).reshape(shape).astype(np.float32)


def write(parameters: dict[str, Parameter], worker: int, step: int) -> None:
    for name, parameter in parameters.items():
        parameter.grad[...] = gradient(name, worker, step)


def bits(parameters: dict[str, Parameter]) -> list[bytes]:
    return [parameter.data.tobytes() for parameter in parameters.values()]


def expected(name: str, workers: int, steps: int, batches: Any = BATCHES) -> Any:
    return sum(gradient(name, w, i).astype(np.float64) / batches[i][w] for i in range(steps) for w in range(workers))


@ON_STORE
@pytest.mark.parametrize("how", ["step", "push_grad", "some pushed", "later"])
@pytest.mark.parametrize("batches", [BATCHES, (LAST, LAST, BATCHES[0])], ids=["alike at first", "different at first"])
@FORMS
def test_each_gradient_is_divided_by_its_own_batch_size(store, W, batches, how: str, on_store: bool) -> None:
    parameters, trainer = made(store, on_store)
    for step, sizes in enumerate(batches):
        write(parameters, store.rank, step)
        size = sizes[store.rank]
        if how in {"push_grad", "some pushed"}:
            for name in list(reversed(parameters))[: None if how == "push_grad" else 2]:
                trainer.push_grad(name, size)
        trainer.step(size, wait=how != "later")
        for name in parameters:
            trainer.wait(name)
        for name, parameter in parameters.items():
            assert parameter.data.tolist() == expected(name, W, step + 1, batches).tolist(), (step, name)


@ON_STORE
@on(Form(2))
@pytest.mark.usefixtures("patient")
def test_steps_of_the_size_of_the_first_one_are_made_together(store, on_store: bool) -> None:
    """On one host, in one call for all keys, without a message; also after a step with other sizes. In the first step
    workers agree on the factor that is applied.
    """
    parameters, trainer = made(store, on_store)
    counts = []
    names = ("direct_calls", "messages_sent", "control_messages_sent")
    for size in (4, 4, 4, 3 + store.rank, 4):
        write(parameters, store.rank, 0)
        counts.append(counted(store, lambda: trainer.step(size), *names))  # noqa: B023 - at once
    assert counts[0][2] == 1
    assert counts[1:] == [[1, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("odd", ["batch_size", "learning_rate", "the last update"])
@FORMS
def test_trainers_that_update_by_themselves_with_different_attributes(store, odd: str) -> None:
    """Who differs from the start finds out before anybody updates, else in the next call, or in `close`; all do."""
    parameters, trainer = made(store, False, optimizer="sgd", learning_rate=0.5)
    is_odd = store.rank == 2
    for step in range(2):
        write(parameters, store.rank, step)
        trainer.allreduce_grads()
        if is_odd and step == 1 and odd == "the last update":
            trainer.set_learning_rate(1.5)
        trainer.update(4 if is_odd and step == 1 and odd == "batch_size" else 2)
    if odd == "the last update":
        with pytest.raises(ConfigError, match=r"close: .*worker 2 on \S+: the last update's learning_rate=1\.5"):
            store.close()
        return
    trainer.optimizer.rescale_grad = 0.5  # on all
    if is_odd and odd == "learning_rate":
        trainer.set_learning_rate(1.5)
    before = bits(parameters)
    text = "rescale_grad=0.25" if odd == "batch_size" else "learning_rate=1.5"
    with pytest.raises(ConfigError, match=rf"worker 2 on \S+: .*{text}"):
        trainer.allreduce_grads()
    store.close()  # which says nothing that was said
    assert before == bits(parameters)


@on(Form(2))
def test_trainers_that_update_by_themselves_compare_their_optimizers(store) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate=0\.5; worker 1 on \S+: learning_rate=0\.25"):
        made(store, False, optimizer="sgd", learning_rate=0.5 - 0.25 * store.rank)
