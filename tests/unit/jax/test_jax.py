"""mpikv.jax on thread ranks: values, kinds of leaves, devices, transformations, training with optax, mistakes."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any
from unittest import mock

import frameworks
import numpy as np
import pytest
from on_workers import on
from store_modes import Mode

jax = frameworks.need("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402

import mpikv.jax as mj  # noqa: E402
from mpikv import optimizers  # noqa: E402
from mpikv.errors import ShapeMismatch, UnsupportedError  # noqa: E402
from mpikv.jax import calls  # noqa: E402
from mpikv.transports.faulty import Deaths, Faults  # noqa: E402

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # read when JAX is first used
# XLA has as many threads as there are cores, and ranks of one process would wait for each other in all of them.
jax.config.update("jax_cpu_enable_async_dispatch", False)

TWO, THREE = Mode("dist_sync", 2), Mode("dist_sync", 3)
MODES = (Mode("local", 1), Mode("dist_sync", 1), THREE, Mode("dist_sync", 3, memory="off"), Mode("dist_sync", 2, 2))
DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8", "int32")  # int64 and float64 need jax_enable_x64
SHAPES = ((), (3,), (0, 2), (2, 3, 4), (70,), (5, 1))


def tree_of(rank: int, dtypes: Any = DTYPES) -> Any:
    """Small whole numbers, which six workers or fewer can add and divide exactly."""
    leaves = [
        jnp.asarray(((np.arange(np.prod(shape)).reshape(shape) % 3 + rank) * 6).astype(jnp.dtype(dtype)))
        for dtype, shape in zip(dtypes, SHAPES, strict=True)
    ]
    return {"a": leaves[:2], "none": None, "b": (leaves[2], {"c": leaves[3:]}), "empty": {}}


def as_numpy(tree: Any) -> list[Any]:
    return [(str(leaf.dtype), leaf.shape, np.asarray(leaf).astype(float).tolist()) for leaf in jax.tree.leaves(tree)]


def ways(function: Any) -> tuple[Any, Any]:
    """Outside of jit, and inside."""
    return function, jax.jit(function)


def refused(error: type[Exception], text: str, call: Any) -> None:
    """The call raises this; inside of a compiled program, as JAX's error with the same text."""
    with pytest.raises((error, jax.errors.JaxRuntimeError)) as found:
        jax.block_until_ready(call())
    assert text in str(found.value)
    assert isinstance(found.value, error) or f"{error.__name__}: " in str(found.value)


# ---- values


@on(*MODES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_every_dtype_and_kind_of_leaf(store: Any, op: str) -> None:
    n, dtypes = store.num_workers, DTYPES if op == "sum" else DTYPES[:3] * 2
    given = [tree_of(rank, dtypes) for rank in range(n)]
    expected = jax.tree.map(lambda *leaves: sum(np.asarray(one).astype(float) for one in leaves), *given)
    for reduced in ways(lambda tree: mj.allreduce(tree, store, **({"op": "sum"} if op == "sum" else {}))):
        for _ in range(2):
            found = reduced(given[store.rank])
            assert jax.tree.structure(found) == jax.tree.structure(given[0])
            for one, mine, right in zip(*map(jax.tree.leaves, (found, given[0], expected)), strict=True):
                assert (one.dtype, one.shape) == (mine.dtype, mine.shape)
                np.testing.assert_array_equal(np.asarray(one).astype(float), right / (n if op == "mean" else 1))
    assert as_numpy(given[store.rank]) == as_numpy(tree_of(store.rank, dtypes))


@on(Mode("dist_sync", 3, 1))
def test_a_store_that_compresses_all_keys_leaves_sums_alone(store: Any) -> None:
    store.set_gradient_compression({"type": "1bit", "force": True})
    total = mj.allreduce(jnp.full(3, store.rank + 0.25), store, op="sum")
    assert total.tolist() == [sum(range(store.num_workers)) + 0.25 * store.num_workers] * 3


@on(TWO)
def test_results_are_arrays_of_their_own(store: Any) -> None:
    """The memory of the store is used again by the next call; earlier results stay as they are."""
    for reduced in ways(lambda x: mj.allreduce(x, store, "sum")):
        results = [reduced(jnp.full(100, float(i))) for i in range(5)]
        for i, result in enumerate(results):
            assert np.asarray(result).tolist() == [2.0 * i] * 100


@on(TWO)
def test_numbers_keep_their_weak_type(store: Any) -> None:
    for reduced in ways(lambda x: mj.allreduce(x, store)):
        found = reduced({"x": 2.0 + 2 * store.rank, "y": jnp.float32(store.rank), "z": np.ones(2, np.float32)})
        assert [(float(found[k].sum()), found[k].weak_type) for k in "xyz"] == [(3, True), (0.5, False), (2, False)]
        assert all(isinstance(leaf, jax.Array) for leaf in found.values())


@on(*MODES)
def test_broadcast_of_any_dtype_from_any_worker(store: Any) -> None:
    n = store.num_workers
    trees = [{**tree_of(rank), "bool": jnp.arange(3) > rank, "u": jnp.uint32(rank)} for rank in range(n)]
    for root in range(n):
        for sent in ways(lambda tree, root=root: mj.broadcast(tree, store, root=root)):
            found = sent(trees[store.rank])
            assert jax.tree.structure(found) == jax.tree.structure(trees[0])
            assert as_numpy(found) == as_numpy(trees[root])


@on(TWO)
def test_constants_and_results_that_nobody_uses_inside_of_jit(store: Any) -> None:
    """What does not depend on the arguments is exchanged at every call, too, not once while JAX traces."""

    @jax.jit
    def program(x: Any) -> Any:
        mj.allreduce(x, store)
        return mj.allreduce(np.full(2, store.rank, np.float32), store, "sum")

    before = store.stats()["direct_calls"]
    for _ in range(3):
        assert np.asarray(program(jnp.ones(2))).tolist() == [1, 1]
    assert store.stats()["direct_calls"] - before >= 3 * 2


@on(TWO)
def test_loops_and_branches(store: Any) -> None:
    def step(x: Any, i: Any) -> tuple[Any, Any]:
        x = jax.lax.cond(i % 2 == 0, lambda x: mj.allreduce(x, store), lambda x: x, x + store.rank)
        return x, x.sum()

    x, sums = jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(4)))(jnp.zeros(2))
    mine = store.rank
    assert np.asarray(sums).tolist() == [1, 1 + 2 * mine, 3, 3 + 2 * mine]
    assert np.asarray(x).tolist() == [1.5 + mine] * 2


def test_more_kinds_of_sums_than_are_kept() -> None:
    def body(store: Any) -> None:
        for reduced in ways(lambda x: mj.allreduce(x, store)):
            for n in (1, 2, 3, 1, 3):
                for dtype in ("float16", "bfloat16", "float32"):
                    found = reduced(jnp.full(n, 2 * store.rank, dtype))
                    assert (str(found.dtype), found.tolist()) == (dtype, [1] * n)

    with mock.patch.object(calls, "KINDS", 2):
        TWO.run(body)


# ---- devices


@on(TWO)
def test_arrays_stay_where_they_are(store: Any) -> None:
    last, mesh = jax.devices()[3], Mesh(np.array(jax.devices()[:2]), ("d",))
    parted, x = NamedSharding(mesh, PartitionSpec("d")), jnp.arange(4.0) * 2 * store.rank
    for place in (parted, NamedSharding(mesh, PartitionSpec()), SingleDeviceSharding(last)):
        found = mj.allreduce(jax.device_put(x, place), store)
        assert (found.tolist(), found.sharding) == ([0, 1, 2, 3], place)
    found = mj.allreduce(x, store)
    assert (found.committed, found.devices()) == (False, x.devices())
    compiled = jax.jit(lambda x: mj.allreduce(x, store))
    found = compiled(jax.device_put(x, last))
    assert (found.tolist(), found.devices()) == ([0, 1, 2, 3], {last})
    several = jax.jit(lambda x: mj.allreduce(x, store))
    refused(UnsupportedError, "inside of a jit over 2 devices", lambda: several(jax.device_put(x, parted)))


# ---- transformations


@on(TWO)
def test_vmap_pmap_and_shard_map_are_refused(store: Any) -> None:
    x, mesh, parts = jnp.ones((2, 3)), Mesh(np.array(jax.devices()[:2]), ("d",)), PartitionSpec("d")
    # In jax itself since 0.6.
    shard_map = getattr(jax, "shard_map", None) or importlib.import_module("jax.experimental.shard_map").shard_map
    for call in (lambda x: mj.allreduce(x, store), lambda x: mj.broadcast(x, store)):
        refused(UnsupportedError, "inside of vmap", lambda call=call: jax.vmap(call)(x))
        refused(UnsupportedError, "inside of vmap", lambda call=call: jax.jit(jax.vmap(call))(x))
        # With old versions it is JAX that refuses: pmap before 0.8, shard_map before 0.6.
        with pytest.raises((UnsupportedError, ValueError), match="pmap"):
            jax.pmap(call)(x)
        with pytest.raises((UnsupportedError, NotImplementedError), match="shard_map"):
            jax.jit(shard_map(call, mesh=mesh, in_specs=parts, out_specs=parts))(x)
        assert call(x).tolist() == x.tolist()  # nothing was sent


@on(THREE)
def test_derivatives_are_those_of_the_sum_over_the_workers(store: Any) -> None:
    """f_r = sum_i c_r[i] y[i], y = allreduce(x_r^2): the derivative of sum_r f_r by x_r is 2 x_r allreduce(c)."""
    x, c = jnp.arange(3.0) + store.rank, jnp.arange(3.0) * (1 + store.rank)
    everybodys = [np.arange(3.0) * (1 + rank) for rank in range(3)]
    for op, factor in (("sum", 1), ("mean", 1 / 3)):

        def loss(x: Any, op: str = op) -> Any:
            reduced, count = mj.allreduce((x * x, jnp.float32(3)), store, op)
            return (c * reduced).sum() + count

        expected = 2 * np.asarray(x) * sum(everybodys) * factor
        for gradient in (jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))) if op == "sum" else (jax.grad(loss),):
            np.testing.assert_allclose(gradient(x), expected, rtol=1e-6)
        _, change = jax.jvp(lambda x, op=op: mj.allreduce(x, store, op), (x,), (c,))
        np.testing.assert_allclose(change, sum(everybodys) * factor, rtol=1e-6)

    def sent(x: Any) -> Any:
        found = mj.broadcast({"x": x * x, "n": jnp.int32(3)}, store, root=1)
        return (c * found["x"]).sum()

    expected = 2 * np.asarray(x) * sum(everybodys) * (store.rank == 1)
    for gradient in (jax.grad(sent), jax.jit(jax.grad(sent))):
        np.testing.assert_allclose(gradient(x), expected, rtol=1e-6)


# ---- training


def test_steps_are_those_of_one_process_with_the_joined_batch() -> None:
    """Gradients are exchanged inside of the compiled update, or before it."""
    optax, numbers = frameworks.need("optax"), np.random.default_rng(1)
    x, y = (numbers.normal(size=(4, 12, n)).astype(np.float32) for n in (5, 3))
    rest = optax.clip_by_global_norm(0.5), optax.adam(0.01)

    def first_weights(seed: int) -> Any:
        return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=(5, 3)), jnp.float32), "b": jnp.zeros(3)}

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return ((jnp.tanh(x @ weights["w"]) + weights["b"] - y) ** 2).mean()

    def train(weights: Any, x: Any, y: Any, optimizer: Any, exchange: Any = lambda gradients: gradients) -> Any:
        gradient, state = jax.jit(jax.grad(loss)), optimizer.init(weights)

        @jax.jit
        def update(weights: Any, state: Any, gradients: Any) -> Any:
            updates, state = optimizer.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state

        for batch in zip(x, y, strict=True):
            weights, state = update(weights, state, exchange(gradient(weights, *batch)))
        return weights

    def body(store: Any) -> Any:
        mine = slice(6 * store.rank, 6 * store.rank + 6)
        given = mj.broadcast(first_weights(store.rank), store), x[:, mine], y[:, mine]
        inside = train(*given, optax.chain(mj.allreduce_gradients(store), *rest))
        return inside, train(*given, optax.chain(*rest), lambda gradients: mj.allreduce(gradients, store))

    alone, first, second = train(first_weights(0), x, y, optax.chain(*rest)), *TWO.run(body)
    for found, other in zip(first, second, strict=True):
        for name, expected in alone.items():
            assert np.asarray(found[name]).tobytes() == np.asarray(other[name]).tobytes()
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


# ---- mistakes


@on(THREE)
@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"w": jnp.ones(3)}, {"w": jnp.ones(4)}, ("['w']: float32[3]", "['w']: float32[4]")),
        ({"w": jnp.ones(3)}, {"w": jnp.ones(3, "float16")}, ("['w']: float32[3]", "['w']: float16[3]")),
        ({"w": jnp.ones(3)}, {"v": jnp.ones(3)}, ("['w']: float32[3]", "['v']: float32[3]")),
        ({"w": jnp.ones(3), "z": None}, {"w": jnp.ones(3), "z": jnp.ones(2)}, ("nothing more", "['z']: float32[2]")),
        ({}, jnp.ones(2), ("nothing more", "the array: float32[2]")),
    ],
    ids=["shape", "dtype", "name", "structure", "empty"],
)
def test_different_trees_and_calls_are_an_error_on_all(store: Any, one: Any, other: Any, told: tuple[str, str]) -> None:
    tree = other if store.rank == 2 else one
    for call in (lambda tree: mj.allreduce(tree, store), lambda tree: mj.broadcast(tree, store)):
        for way in ways(call):
            for words in ("worker 0, worker 1: ", told[0], "worker 2: ", told[1]):
                refused(ShapeMismatch, words, lambda way=way: way(tree))
    several = (
        lambda: mj.allreduce(one, store),
        lambda: mj.allreduce(one, store, "sum"),
        lambda: mj.broadcast(one, store),
    )
    refused(ShapeMismatch, "worker 2: broadcast(root 0)", several[store.rank])
    assert mj.allreduce(jnp.ones(2), store).tolist() == [1, 1]  # the workers are still in step


@on(Mode("local", 1))
def test_wrong_arguments(store: Any) -> None:
    x = jnp.ones(2)
    for call, error, text in (
        (lambda: mj.allreduce(x, store, "median"), ValueError, "one of mean, sum; got 'median'"),
        (lambda: mj.allreduce_gradients(store, "max"), ValueError, "one of mean, sum; got 'max'"),
        (lambda: mj.allreduce(store, x), TypeError, "store is a KVStore"),
        (lambda: mj.allreduce_gradients("dist_sync"), TypeError, "store is a KVStore"),
        (lambda: mj.broadcast(x, store, root=1), ValueError, "root is a worker, 0 to 0; got 1"),
        (lambda: mj.broadcast(x, store, root="0"), TypeError, "root is a worker's number"),
        (lambda: mj.allreduce({"x": ["text"]}, store), TypeError, "['x'][0] is no array and no number but str"),
        (lambda: mj.allreduce({"n": jnp.arange(3)}, store), UnsupportedError, "['n'] is int32, whose mean"),
        (lambda: mj.allreduce(x > 0, store, "sum"), UnsupportedError, "bool"),
        (lambda: mj.broadcast(jax.random.key(0), store), UnsupportedError, "jax.random.key_data"),
    ):
        for way in ways(call):
            with pytest.raises(error, match=re.escape(text)):
                way()
    store.set_optimizer(optimizers.create("sgd"))
    for way in ways(lambda x: mj.allreduce(x, store)):
        refused(UnsupportedError, "has an optimizer", lambda way=way: way(x))


@on(Mode("dist_async", 1))
def test_asynchronous_stores_are_refused(store: Any) -> None:
    with pytest.raises(UnsupportedError, match="applies every push at once"):
        mj.allreduce(jnp.ones(2), store)


@on(TWO)
def test_an_error_inside_of_a_compiled_program_is_the_users(store: Any) -> None:
    program = jax.jit(lambda x: mj.allreduce(x, store))
    program(jnp.ones(2))
    store.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"MpikvError: .* on a closed store"):
        program(jnp.ones(2)).block_until_ready()


# ---- deaths


@pytest.mark.parametrize("kinds", [64, 0])
@pytest.mark.parametrize("calls", range(1, 25))
def test_means_are_over_who_is_there(calls: int, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter, and a third of 3, are exact. kinds: of sums that have keys of their own."""
    monkeypatch.setattr("mpikv.jax.calls.KINDS", kinds)
    mode, deaths = Mode("dist_sync", 4, memory="off"), Deaths()

    def body(store: Any) -> list[float]:
        found = []
        for round_ in range(4):
            if round_ == 2 and store.session.number == 3:
                deaths.die_in(3, calls, sends=True)
            tree = {"one": jnp.ones(5), "half": jnp.ones(2, jnp.float16)}
            mean = mj.allreduce(tree, store, op="mean")
            assert {*np.asarray(mean["one"]).tolist(), *np.asarray(mean["half"]).tolist()} == {1.0}
            found.append(mj.allreduce(jnp.full(3, 2.0**store.session.number), store, op="sum").tolist()[0])
        return found

    left = [one for one in mode.run_continued(body, deaths, Faults) if one is not None]
    assert all(one == left[0] for one in left)
    assert {*left[0]} <= {15.0, 7.0}
