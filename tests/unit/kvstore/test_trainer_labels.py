"""Trainers whose workers give different batch sizes, or other attributes, in every way that a step can go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_store_labels import Form, form_id

from mpikv import ConfigError, Parameter, Trainer
from mpikv.testing.stores import spawn_stores

SHAPES = {"a": (3, 5), "b": (1,), "c": (40,), "d": ()}
# Of each worker, step by step: alike, the last, short batch, alike in another size, always different, alike.
LAST, ALWAYS = (2.0, 1.0, 4.0, 2.0, 0.5, 2.0), (2.0, 1.0, 2.0, 4.0, 2.0, 2.0)
BATCHES = ((2.0,) * 6, LAST, (2.0,) * 6, (4.0,) * 6, ALWAYS, ALWAYS, (2.0,) * 6)

EVERY_FORM = pytest.mark.parametrize(
    "form",
    [
        Form(2),
        Form(3),
        Form(3, algorithm="ring"),
        Form(5, algorithm="halving_doubling"),
        Form(3, hosts="abc"),
        Form(3, hosts="aab"),
        Form(4, hosts="aabb", memory="off"),
        Form(2, servers=1),
        Form(3, servers=2, part_bytes=64),
        Form(3, servers=2, part_bytes=64, memory="off"),
    ],
    ids=form_id,
)
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


def expected(name: str, workers: int, steps: int) -> Any:
    return sum(gradient(name, w, i).astype(np.float64) / BATCHES[i][w] for i in range(steps) for w in range(workers))


@pytest.mark.grid
@ON_STORE
@pytest.mark.parametrize("how", ["step", "push_grad", "some pushed", "later"])
@EVERY_FORM
def test_each_gradient_is_divided_by_its_own_batch_size(form: Form, how: str, on_store: bool) -> None:
    def body(store):
        parameters, trainer = made(store, on_store)
        found = []
        for step, sizes in enumerate(BATCHES):
            write(parameters, store.rank, step)
            size = sizes[store.rank]
            if how in {"push_grad", "some pushed"}:
                for name in list(reversed(parameters))[: None if how == "push_grad" else 2]:
                    trainer.push_grad(name, size)
            trainer.step(size, wait=how != "later")
            for name in parameters:
                trainer.wait(name)
            found.append([parameter.data.tolist() for parameter in parameters.values()])
        return found

    for found in form.run(body):
        for step, values in enumerate(found):
            assert values == [expected(name, form.workers, step + 1).tolist() for name in SHAPES], step


@pytest.mark.grid
@ON_STORE
@EVERY_FORM
def test_sizes_that_differ_in_the_first_step(form: Form, on_store: bool) -> None:
    def body(store):
        parameters, trainer = made(store, on_store)
        for sizes in (LAST, LAST, BATCHES[0]):
            write(parameters, store.rank, 0)
            trainer.push_grad("c", sizes[store.rank])
            trainer.step(sizes[store.rank])
        return [parameter.data.tolist() for parameter in parameters.values()]

    wanted = [
        sum(gradient(name, w, 0) / sizes[w] for sizes in (LAST, LAST, BATCHES[0]) for w in range(form.workers)).tolist()
        for name in SHAPES
    ]
    assert form.run(body) == [wanted] * form.workers


@ON_STORE
def test_steps_of_the_size_of_the_first_one_are_made_together(on_store: bool) -> None:
    """On one host, in one call for all keys, without a message; also after a step with other sizes."""

    def body(store):
        parameters, trainer = made(store, on_store)
        counts = []
        for size in (4, 4, 4, 3 + store.rank, 4):
            write(parameters, store.rank, 0)
            store.barrier()
            before = store.stats()
            trainer.step(size)
            after = store.stats()
            counts.append([after[name] - before[name] for name in ("direct_calls", "messages_sent")])
        store.barrier()
        return counts[1:]

    for counts in Form(2).run(body):
        assert counts == [[1, 0], [1, 0], [0, 0], [1, 0]]


@pytest.mark.grid
@ON_STORE
@EVERY_FORM
def test_all_workers_hold_the_same_bits(form: Form, on_store: bool) -> None:
    """With factors that are no powers of two, momentum and two trainers on one store."""

    def body(store):
        trainers = [made(store, on_store, names, "sgd", momentum=0.9) for names in (("a", "c"), ("b", "d"))]
        for step in range(6):
            for i, (parameters, trainer) in enumerate(trainers):
                random = np.random.default_rng([store.rank, step, i])
                for parameter in parameters.values():
                    parameter.grad[...] = random.standard_normal(parameter.data.shape)
                trainer.step(7 if step % 3 else 3 + store.rank + i)
        return [bits(parameters) for parameters, _ in trainers]

    results = form.run(body)
    assert all(result == results[0] for result in results)


@pytest.mark.grid
@ON_STORE
@EVERY_FORM
def test_another_rate_stops_all_workers(form: Form, on_store: bool) -> None:
    def body(store):
        parameters, trainer = made(store, on_store, optimizer="sgd", learning_rate=0.5)
        write(parameters, store.rank, 0)
        trainer.step(2)
        before = bits(parameters)
        if store.rank == 1:
            trainer.set_learning_rate(0.25)
        write(parameters, store.rank, 1)
        with pytest.raises(ConfigError) as caught:
            trainer.step(2 + store.rank)
        after = bits(parameters)
        store.close()
        return before == after, str(caught.value)

    for unchanged, text in form.run(body):
        assert unchanged
        assert "learning_rate=0.25" in text
        assert "learning_rate=0.5" in text


BY_MESSAGES = [
    Form(2, algorithm="naive"),
    Form(3, algorithm="ring"),
    Form(5, algorithm="halving_doubling"),
    Form(3, hosts="abc"),
    Form(3, hosts="aab"),
    Form(5, hosts="aabbb", memory="off"),
]


@pytest.mark.parametrize("how", ["step", "push_grad"])
@pytest.mark.parametrize("form", BY_MESSAGES, ids=form_id)
def test_a_step_that_changes_attributes_sends_no_message_more(form: Form, how: str) -> None:
    """A rate set by hand in every step, sizes that change together, and sizes that differ. In the first step workers
    agree on the factor that is applied.
    """

    def body(store):
        parameters, trainer = made(store, True, optimizer="sgd", learning_rate=0.5)
        counts = []
        for step, size in enumerate((2, 2, 2, 2, 4, 1 + store.rank, 1 + store.rank, 2)):
            if step > 1:
                trainer.set_learning_rate(0.5 / step)
            write(parameters, store.rank, step)
            store.barrier()
            before = store.stats()
            if how == "push_grad":
                for name in reversed(parameters):
                    trainer.push_grad(name, size)
            trainer.step(size)
            after = store.stats()
            counts.append([after[name] - before[name] for name in ("messages_sent", "control_messages_sent")])
        store.barrier()
        return counts

    found = form.run(body)
    assert any(counts[0][0] for counts in found)
    for rank, ((_, agreeing), *counts) in enumerate(found):
        assert agreeing == (form.workers - 1 if rank == 0 else 1)
        assert counts == [[counts[0][0], 0]] * len(counts)


@pytest.mark.parametrize("names", [("b",), ("b", "d")], ids=["one key", "bucket"])
@pytest.mark.parametrize("form", BY_MESSAGES, ids=form_id)
def test_fewer_elements_than_workers(form: Form, names: tuple[str, ...]) -> None:
    """Those who own nothing count as well, and learn of an error in the same step."""

    def body(store):
        parameters, trainer = made(store, True, names)
        found = []
        for step, sizes in enumerate(BATCHES):
            write(parameters, store.rank, step)
            trainer.step(sizes[store.rank])
            found.append([float(parameter.data.sum()) for parameter in parameters.values()])
        before = bits(parameters)
        trainer.optimizer.wd = 0.5 if store.rank == form.workers - 1 else 0.0
        with pytest.raises(ConfigError, match=rf"wd=0\.0.* worker {form.workers - 1} on \S+: wd=0\.5"):
            trainer.step(2)
        store.close()
        assert before == bits(parameters)
        return found

    wanted = [[float(expected(name, form.workers, i + 1).sum()) for name in names] for i in range(len(BATCHES))]
    assert form.run(body) == [wanted] * form.workers


@pytest.mark.parametrize("form", [Form(3), Form(3, hosts="abc"), Form(3, servers=1)], ids=form_id)
def test_allreduce_and_update_with_equal_attributes(form: Form) -> None:
    """What lies between them may take any time; where all change together nothing is wrong."""

    def body(store):
        parameters, trainer = made(store, on_store=False)
        for step, size in enumerate((2, 2, 4, 4, 2)):
            write(parameters, store.rank, step)
            trainer.allreduce_grads()
            sums = {name: parameter.grad.tolist() for name, parameter in parameters.items()}
            assert sums == {name: sum(gradient(name, w, step) for w in range(3)).tolist() for name in parameters}
            trainer.update(size)
        return [parameter.data.tolist() for parameter in parameters.values()]

    wanted = [
        sum(gradient(name, w, i) / size for i, size in enumerate((2, 2, 4, 4, 2)) for w in range(3)).tolist()
        for name in SHAPES
    ]
    assert form.run(body) == [wanted] * 3


@pytest.mark.parametrize("attribute", ["batch_size", "learning_rate"])
@pytest.mark.parametrize("form", [Form(3), Form(3, hosts="abc"), Form(3, servers=1)], ids=form_id)
def test_allreduce_and_update_with_different_attributes(form: Form, attribute: str) -> None:
    """Who differs from the start finds out before anybody updates, else in the next call; all do."""

    def body(store):
        parameters, trainer = made(store, False, optimizer="sgd", learning_rate=0.5)
        for step in range(2):
            write(parameters, store.rank, step)
            trainer.allreduce_grads()
            trainer.update(2)
        odd = store.rank == 2
        if odd and attribute == "learning_rate":
            trainer.set_learning_rate(1.5)
        write(parameters, store.rank, 2)
        if attribute == "batch_size":
            trainer.allreduce_grads()
            trainer.update(4 if odd else 2)
            trainer.optimizer.rescale_grad = 0.5  # on all
        before = bits(parameters)
        with pytest.raises(ConfigError) as caught:
            trainer.allreduce_grads()
        store.close()  # which says nothing that was said
        return before == bits(parameters), str(caught.value)

    for unchanged, text in form.run(body):
        assert unchanged
        assert ("rescale_grad=0.25" if attribute == "batch_size" else "learning_rate=1.5") in text
        assert "worker 2" in text


@pytest.mark.parametrize("form", [Form(3), Form(3, hosts="abc"), Form(3, servers=1)], ids=form_id)
def test_what_the_last_update_was_made_with_is_compared_by_close(form: Form) -> None:
    def body(store):
        parameters, trainer = made(store, False, optimizer="sgd", learning_rate=0.5)
        for step in range(2):
            write(parameters, store.rank, step)
            trainer.allreduce_grads()
            if store.rank == 2 and step == 1:
                trainer.set_learning_rate(1.5)
            trainer.update(2)
        with pytest.raises(ConfigError, match=r"close: .*worker 2 on \S+: the last update's learning_rate=1\.5"):
            store.close()

    form.run(body)


def test_trainers_that_update_by_themselves_compare_their_optimizers() -> None:
    def body(store):
        with pytest.raises(ConfigError, match=r"learning_rate=0\.5; worker 1 on \S+: learning_rate=0\.25"):
            made(store, False, optimizer="sgd", learning_rate=0.5 - 0.25 * store.rank)

    spawn_stores("dist_sync", 2, body)


@pytest.mark.parametrize("form", [Form(2), Form(2, hosts="ab"), Form(2, servers=1)], ids=form_id)
def test_states_that_are_loaded(form: Form, tmp_path) -> None:
    """Attributes that come from a file reach all workers alike; one that is changed afterwards is found."""

    def body(store):
        parameters, trainer = made(store, True, optimizer="sgd", learning_rate=0.5, momentum=0.5)
        write(parameters, store.rank, 0)
        trainer.step(2)
        trainer.save_states(str(tmp_path / "states"))
        trainer.set_learning_rate(2.0)
        write(parameters, store.rank, 1)
        trainer.step(2 + store.rank)
        trainer.load_states(str(tmp_path / "states"))
        rate = trainer.learning_rate
        write(parameters, store.rank, 2)
        trainer.step(2)
        trainer.optimizer.momentum = 0.5 - 0.25 * store.rank
        with pytest.raises(ConfigError, match=r"momentum=0\.25"):
            trainer.step(2)
        store.close()
        return rate, bits(parameters)

    results = form.run(body)
    assert results[0] == results[1]
    assert results[0][0] == 0.5
