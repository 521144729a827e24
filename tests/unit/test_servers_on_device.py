"""Servers inside workers that keep keys in GPU memory there: bits, counts of copies, states, order, and the ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_device_servers import F32, LONG, copies, hold, on_host, run, values_of

from mpikv import optimizers
from mpikv.arrays import dtype_of
from mpikv.errors import StallError
from mpikv.testing.fake_gpu import FakeGpu

N_LONG = 3 * LONG + 5
WAYS = pytest.mark.parametrize(("path", "memory"), [("staged", "auto"), ("staged", "off"), ("mpi", "off")])


def train(store: Any, put: Any, get: Any, kind: str, dtype: Any, *, file: str, **settings: Any) -> list[bytes]:
    """What each worker sees in turn, of keys that are long, short and, in every store, in host memory."""
    sizes = {"long": N_LONG, "short": 7, "none": 0, "host": 5}

    def arrays(step: int) -> list[Any]:
        made = [(values_of(store.rank, step, n) / 3).astype(dtype) for n in sizes.values()]
        return [*map(put, made[:3]), made[3]]

    store.init(list(sizes), arrays(0))
    store.set_optimizer(optimizers.create(kind, learning_rate=0.125, **settings))
    seen = []
    for step in range(4):
        for rank in range(store.num_workers):
            store.barrier()
            if rank == store.rank:
                store.pushpull(list(sizes), arrays(step), outs := arrays(step))
                seen += [one.tobytes() for one in [*map(get, outs[:3]), outs[3]]]
        store.barrier()
        if step == 1:
            store.save_optimizer_states(file)
        if step == 2:
            store.load_optimizer_states(file)
    return seen


@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        ("sgd", "float32", {"momentum": 0.5}),
        ("lamb", "float32", {}),  # the whole value at a time
        ("dcasgd", "float32", {}),
        ("adam", "float16", {"multi_precision": True}),
        ("adam", "bfloat16", {"multi_precision": True}),
        ("test", "int64", {}),
    ],
)
@WAYS
@pytest.mark.grid(1)
def test_the_bits_are_those_of_host_memory(
    path: str, memory: str, kind: str, dtype: str, settings: dict[str, Any], *, tmp_path: Any
) -> None:
    """Also from states that were saved and loaded, and the files are the same."""
    form, files = dtype_of(dtype), [str(tmp_path / one) for one in "hd"]
    expected = on_host(
        2,
        0,
        lambda store: train(store, np.array, np.array, kind, form, file=files[0], **settings),
        name="dist_async",
        shared_memory=memory,
        partition_bytes=1 << 16,  # a unit is cut from several of them for "lamb"
    )
    found = run(
        2,
        0,
        lambda store, gpu: train(store, gpu.array, lambda one: one.get(), kind, form, file=files[1], **settings),
        name="dist_async",
        path=path,
        shared_memory=memory,
        partition_bytes=1 << 16,
    )
    assert found == expected
    assert (tmp_path / "h").read_bytes() == (tmp_path / "d").read_bytes()


@pytest.mark.parametrize(("dtype", "wide"), [("float32", 1), ("float16", 2)])
@pytest.mark.parametrize("kind", ["sgd", "lamb"])
@WAYS
@pytest.mark.grid(1)
def test_the_copies_of_each_call(path: str, memory: str, kind: str, dtype: str, wide: int) -> None:
    """None between a worker and its own server for a long key; else at the server n up for a push, in the dtype of the
    sum, and n down for a pull: values and states stay there."""
    form = np.dtype(dtype)

    def body(store: Any, gpu: FakeGpu) -> None:
        for key, n in (("long", N_LONG), ("short", 1000)):
            store.init(key, gpu.array(np.ones(n, form)))
            store.set_optimizer(optimizers.create(kind))
            store.barrier()
            n_bytes, grad, out = n * form.itemsize, gpu.array(np.ones(n, form)), gpu.array(np.zeros(n, form))
            # What the worker itself copies to its messages and from them (test_device_servers.py), and the server.
            down, up = (0, 0) if key == "long" else (n_bytes, wide * n_bytes)
            for _ in range(2):
                pushed = copies(store, lambda: (store.push(key, grad), store.barrier()))  # noqa: B023 - called at once
                assert pushed == (down, up)
                assert copies(store, lambda: store.pull(key, out)) == (down, down)  # noqa: B023
            both = copies(store, lambda: store.pushpull(key, grad, out))  # noqa: B023
            assert both == (2 * down, up + down)
            there = np.zeros(n, form)  # in host memory, which the answer goes to by a message
            assert copies(store, lambda: store.pull(key, there)) == (n_bytes, 0)  # noqa: B023
            assert there.tobytes() == out.get().tobytes()
        host = np.ones(N_LONG, F32)
        store.init("host", host)
        assert copies(store, lambda: store.pushpull("host", host)) == (0, 0)

    run(1, 0, body, name="dist_async", path=path, shared_memory=memory)


@WAYS
def test_the_copies_of_two_workers(path: str, memory: str) -> None:
    """Of a key that both servers have half of, each worker copies the other's half, and its server for the other."""

    def body(store: Any, gpu: FakeGpu) -> None:
        n = 4 * LONG
        store.init("w", gpu.array(np.ones(n, F32)))
        store.set_optimizer(optimizers.create("sgd"))
        grad, out = gpu.array(np.ones(n, F32)), gpu.array(np.zeros(n, F32))
        store.barrier()

        def calls() -> None:
            store.barrier()  # the other's pushes reach this server once both have begun to count
            for _ in range(2):
                store.push("w", grad)
                store.pull("w", out)
            store.barrier()

        client = 0 if path == "mpi" else 2 * n  # bytes of a half
        assert copies(store, calls) == (2 * client + 2 * 2 * n, 2 * client + 2 * 2 * n)
        store.barrier()

    run(2, 0, body, name="dist_async", path=path, shared_memory=memory, bigarray_bound_elems=1)


def test_an_answer_waits_for_its_copy_and_other_keys_do_not_wait_for_it() -> None:
    """Of a key on the GPU; several in one message, too. One in host memory is answered meanwhile."""

    held = [False]  # what the GPU of worker 0 does, which owns part of the keys

    def body(store: Any, gpu: FakeGpu) -> None:
        if store.rank == 0:
            hold(gpu, held)
        sizes = {"h": 3, "long": N_LONG, "a": 3, "b": 4, "c": 5}
        store.init(list(sizes), [np.ones(3, F32), *(gpu.array(np.ones(n, F32)) for n in list(sizes.values())[1:])])
        store.set_optimizer(optimizers.create("test"))
        store.barrier()
        if store.rank == 1:
            held[0] = True
            outs = {key: np.zeros(n, F32) for key, n in sizes.items()}
            one = store.pull_async("long", outs["long"])
            some = store.pull_async(["a", "b", "c"], [outs[key] for key in "abc"])
            store.pull("h", outs["h"])
            assert outs["h"].tolist() == [1.0] * 3
            with pytest.raises(StallError, match="long"):
                one.wait(0.2)
            assert not some.test()
            held[0] = False
            store.wait_all()
            assert all((out == 1).all() for out in outs.values())
        store.barrier()

    run(2, 0, body, name="dist_async", shared_memory="off")


@WAYS
@pytest.mark.parametrize("seed", [0, 1])
def test_close_while_pushes_and_pulls_are_under_way(path: str, memory: str, seed: int) -> None:
    def body(store: Any, gpu: FakeGpu) -> None:
        store.init("w", gpu.array(np.zeros(N_LONG, F32)))
        store.set_optimizer(optimizers.create("test"))
        for i in range(4):
            store.push("w", gpu.array(np.full(N_LONG, i, F32)))
        store.pull_async("w", gpu.array(np.zeros(N_LONG, F32)))

    run(2, 0, body, name="dist_async", path=path, shared_memory=memory, seed=seed, late=memory == "off")
