"""Row-sparse parameters of a Trainer: the weights of training with dense gradients, at the cost of rows."""

from __future__ import annotations

import threading
from functools import partial

import frameworks
import numpy as np
import pytest
from on_workers import on
from store_modes import Mode, modes

from mpikv import Parameter, RowSparse, ShapeMismatch, Trainer, UnsupportedError, kv, optimizers

SHAPE = (40, 3)
MODES = (
    Mode("local", 1),
    Mode("dist_sync", 1),
    Mode("dist_sync", 3),
    Mode("dist_sync", 3, 0, "owners"),  # which adds in the order of the workers, as owners of rows do
    Mode("dist_sync", 2, 2, memory="off"),
)
each = pytest.mark.parametrize


def given(worker, step, sparse):
    rng = np.random.default_rng(100 * step + worker)
    grad = RowSparse(rng.integers(0, SHAPE[0], 6), rng.normal(size=(6, 3)), SHAPE)
    return grad if sparse else grad.to_dense()


def train(store, *, sparse=True, optimizer="adam", steps=range(4), wait=True, early=False, path=None, resume=None):
    rng = np.random.default_rng(store.rank)  # worker 0's weights count
    table = Parameter(rng.normal(size=SHAPE), "table", sparse=sparse)
    bias = Parameter(rng.normal(size=3), "bias")
    trainer = Trainer([bias, table], optimizer, {"learning_rate": 0.1}, kvstore=store)
    if resume is not None:
        trainer.resume(resume)
    for step in steps:
        table.grad = given(store.rank, step, sparse)
        bias.grad[...] = step
        if early:
            trainer.push_grad(table, 8)
        trainer.step(8, wait=wait)
    trainer.wait(table)
    trainer.wait(bias)
    if path is not None:
        trainer.save(path)
    return table.data.tobytes(), bias.data.tobytes()


def counted(store, *, sparse):
    """Examples weigh, inside join and outside."""
    table = Parameter(np.zeros(SHAPE), "table", sparse=sparse)
    trainer = Trainer([table], "sgd", {"learning_rate": 1.0}, kvstore=store)
    for step in range(2):
        table.grad = given(store.rank, step, sparse)
        trainer.step(examples=1 + store.rank)
    with trainer.join():
        for step in range(store.rank + 1):
            table.grad = given(store.rank, step, sparse)
            trainer.step(examples=2)
    return table.data.tobytes(), b""


def module(store, *, sparse=True, overlap=False, set_to_none=True):
    """A module of PyTorch with an embedding whose gradients are sparse."""
    torch = frameworks.need("torch")
    net = torch.nn.Sequential(torch.nn.Embedding(30, 4, sparse=sparse), torch.nn.Linear(4, 1))
    rng = np.random.default_rng(store.rank)  # worker 0's weights count
    for one in net.parameters():
        one.data.copy_(torch.from_numpy(rng.normal(size=tuple(one.shape))))
    trainer = Trainer(net, "adagrad", {"learning_rate": 0.1}, kvstore=store, overlap=overlap)
    for step in range(3):
        trainer.zero_grad(set_to_none=set_to_none)
        words = torch.from_numpy(np.random.default_rng(10 * step + store.rank).integers(0, 30, (2, 5)))
        net(words).square().mean().backward()
        trainer.step()
    return [one.detach().numpy().tobytes() for one in net.parameters()]


@each("body", [partial(train, optimizer="sgd"), partial(train, optimizer="adagrad"), module, counted])
@modes(*MODES)
def test_the_weights_are_those_of_dense_gradients(mode, body):
    sparse = mode.run(partial(body, sparse=True))
    assert sparse == mode.run(partial(body, sparse=False))
    assert sparse == [sparse[0]] * mode.workers


@each("how", [{"wait": False}, {"early": True}])
@modes(*MODES[2:])
def test_gradients_that_leave_early_and_weights_that_come_late(mode, how):
    assert mode.run(partial(train, **how)) == mode.run(train)


@each("how", [{"overlap": True}, {"set_to_none": False}])
def test_other_ways_to_train_a_module(how):
    assert MODES[-1].run(partial(module, **how)) == MODES[-1].run(module)


@modes(*MODES)
def test_a_run_that_is_resumed_is_the_run_without_a_stop(mode, tmp_path):
    path = str(tmp_path / "checkpoint")
    mode.run(partial(train, steps=range(2), path=path))
    assert mode.run(partial(train, steps=range(2, 4), resume=path)) == mode.run(train)


@on(Mode("dist_async", 3))
def test_asynchronous_workers_see_each_other_after_a_barrier(store):
    table = Parameter(np.zeros((10, 2)), "table", sparse=True)
    trainer = Trainer([table], "sgd", {"learning_rate": 1.0}, kvstore=store)
    table.grad = RowSparse([store.rank, 9], -np.ones((2, 2)), (10, 2))
    trainer.step(1)
    store.barrier()
    trainer.pull_weights()
    assert table.data[:, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 3]


def test_a_step_costs_the_rows_that_it_changes():
    """Each of two workers changes 10 of 50,000 rows, and gets those of both."""
    shape, begun = (50_000, 10), threading.Barrier(2)

    def body(store):
        table = Parameter(np.zeros(shape, "float32"), "table", sparse=True)
        trainer = Trainer([table], "sgd", {"learning_rate": 1.0}, kvstore=store)
        table.grad = RowSparse(np.arange(10) * 3 + store.rank, np.ones((10, 10), "float32"), shape)
        trainer.step(1)  # the first one, in which workers agree
        store.barrier()
        before = store.stats()["bytes_sent"]
        begun.wait(60)
        trainer.step(1)
        assert np.flatnonzero(table.data[:, 0]).size == 20
        return store.stats()["bytes_sent"] - before

    # To the other owner: headers, ids padded to 16 bytes, rows; a question; an answer. Owner 0 has all 20 rows.
    nothing, all_rows = 48 + 16, 16 + 80 + 20 * 40
    assert Mode("dist_sync", 2, memory="off").run(body) == [nothing + 48 + all_rows, nothing + 48 + 10 * 40 + 48 + 16]


def test_a_step_without_a_gradient():
    torch = frameworks.need("torch")
    with kv.create("local") as store:
        net = torch.nn.Embedding(5, 2, sparse=True)
        before = net.weight.detach().clone()
        trainer = Trainer(net, "sgd", kvstore=store)
        with pytest.raises(ValueError, match="grad is None in 'weight'"):
            trainer.step()
        trainer.step(ignore_stale_grad=True)
        assert torch.equal(net.weight, before)


def test_parameters():
    table = Parameter(np.ones((4, 2), "float32"), "table", sparse=True)
    assert repr(table.grad) == "<RowSparse: 0 of 4 rows, (4, 2) float32>"
    table.grad = np.ones((4, 2), "float32")
    assert table.grad.indices.tolist() == [0, 1, 2, 3]
    table.zero_grad()
    assert table.grad.indices.size == 0
    with pytest.raises(ShapeMismatch, match="table"):
        table.grad = RowSparse.zeros((5, 2))
    with pytest.raises(TypeError, match="sparse is True or False"):
        Parameter(np.ones(2), sparse="yes")


@each(
    ("arguments", "error", "text"),
    [
        ({"kvstore": None}, ValueError, "needs a store"),
        ({"update_on_kvstore": False}, ValueError, "needs a store that makes the updates"),
        ({"clip_global_norm": 1.0}, ValueError, "clip_global_norm"),
        ({"optimizer": "lamb"}, UnsupportedError, "lamb cannot update some rows alone"),
        ({"optimizer": optimizers.SGD(lazy_update=False)}, UnsupportedError, "sgd cannot"),
    ],
)
def test_trainers_that_cannot_have_them(arguments, error, text):
    table = Parameter(np.ones((4, 2)), "table", sparse=True)
    with pytest.raises(error, match=f"'table' is row-sparse: .*{text}"):
        Trainer([table], **{"optimizer": "sgd", "kvstore": kv.create("local"), **arguments})


def test_a_frozen_one_is_dense():
    with kv.create("local") as store:
        table = Parameter(np.ones((4, 2)), "table", sparse=True, grad_req="null")
        trainer = Trainer([table, Parameter(np.ones(2), "bias")], "sgd", kvstore=store)
        trainer.step(1)
        assert table.data.tolist() == np.ones((4, 2)).tolist()
