"""Keys on GPUs, on the fake CuPy: each path against a store of NumPy arrays; copies, streams, who does not do alike.

What every call does on a GPU the tests of all modes say (store_modes.py): here is what only GPUs have.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adasum_reference import close, random_vectors
from fake_cupy import Machine
from fake_gpus import DeviceFabric, gpu_of, gpus_of, one_gpu, spaces_of
from on_workers import counted, taken_of, uniform

from mpikv import codecs, optimizers
from mpikv.config import Config
from mpikv.create import spec
from mpikv.create.assembly import local_store
from mpikv.errors import MpikvError, UnsupportedError
from mpikv.spaces.named import DEVICE, HOST, Spaces
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores
from mpikv.transports.threads import Fabric

F4 = np.dtype(np.float32)
PATHS = {  # by name: the path, the hosts of workers, and the algorithm
    "host": ("host", "aaaaaa", "auto"),
    "host ring": ("host", "abcdef", "ring"),
    "host hosts": ("host", "aabbcc", "auto"),
    "pointers": ("mpi", "abcdef", "ring"),
    "pointers naive": ("mpi", "abcdef", "owners"),
    "nccl": ("nccl", "aabbcc", "auto"),
}


def run(path: str, body: Callable[[Any, Any], Any], *, n: int = 3, servers: int = 0, machine: Any = None, **more: Any):
    device_path, hosts, algorithm = PATHS[path]
    machine = Machine(n if device_path == "nccl" else 1) if machine is None else machine
    gpus = gpus_of(machine, n + servers)
    settings = {"timeout_s": TEST_TIMEOUT_S, "device_path": device_path, "algorithm": algorithm}
    names = list(more.pop("hosts", hosts))[: n + servers]
    found = spawn_stores(
        more.pop("name", "dist_sync_device"),
        n,
        lambda store: body(store, gpus[store.session.transport.rank].cupy),
        num_servers=servers,
        config=Config(**{**settings, **more.pop("settings", {})}),
        hosts=names,
        fabric=DeviceFabric(Fabric(n + servers, tuple(names))) if device_path == "mpi" else None,
        gpus=gpus,
        **more,
    )
    return found, machine


def on_paths(*paths: str, **options: Any) -> Callable[[Any], Any]:
    """Make a test on each of these paths of what a worker does with its store and its process's CuPy."""

    def decorate(body: Any) -> Any:
        def on_path(worker: Any, given: Any) -> None:
            run(given["path"], lambda store, cupy: worker(store, cupy=cupy), **options)

        return pytest.mark.parametrize("path", paths)(taken_of(body, on_path, "path", brings=["cupy"]))

    return decorate


def grads(rank: int, shape: Any, dtype: Any, step: int) -> np.ndarray:
    generator = np.random.default_rng([rank, step])
    return (generator.integers(-8, 9, shape)).astype(dtype)  # whole numbers: sums are exact in any order


SHAPES = ((1,), (13, 7), (0,), (1003,), (40_001,))


def trained(store: Any, put: Callable[[Any], Any], dtype: Any, optimizer: str, codec: str) -> list[np.ndarray]:
    if codec:
        store.set_gradient_compression({"type": codec, "force": True})
    keys = [f"w{i}" for i in range(len(SHAPES))]
    store.init(keys, [put(grads(9, shape, dtype, 0)) for shape in SHAPES])
    if optimizer:
        store.set_optimizer(optimizers.create(optimizer, learning_rate=0.125))
    outs = [put(np.zeros(shape, dtype)) for shape in SHAPES]
    for step in range(3):
        values = [put(grads(store.rank, shape, dtype, step)) for shape in SHAPES]
        if optimizer or step:
            store.push(keys, values)
            store.pull(keys, outs)
        else:
            store.pushpull(keys, values, outs)
    return [one if isinstance(one, np.ndarray) else one.get() for one in outs]


CASES = [  # the dtype, the optimizer, the codec
    *(("float32", "", ""), ("float16", "", ""), ("bfloat16", "sgd", ""), ("float64", "adam", ""), ("int32", "", "")),
    *(("float32", "lamb", ""), ("float32", "sgd", "2bit"), ("float32", "", "topk"), ("float16", "", "int8")),
    ("float32", "", "powersgd"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dtype", "optimizer", "codec"), CASES, ids=["-".join(filter(None, one)) for one in CASES])
def test_every_path_has_the_values_of_host_memory(path: str, dtype: str, optimizer: str, codec: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    expected = spawn_stores(
        "dist_sync",
        3,
        lambda store: trained(store, lambda values: values, kind, optimizer, codec),
        config=Config(timeout_s=TEST_TIMEOUT_S, algorithm="owners"),
        hosts=list("abc"),
    )[0]
    found, machine = run(path, lambda store, cupy: trained(store, cupy.asarray, kind, optimizer, codec))
    for one in found:
        for a, b, first in zip(one, expected, found[0], strict=True):
            assert a.tobytes() == first.tobytes()  # all workers have the same bits
            limit = 0 if not optimizer and codec in ("", "topk") else 4 * np.finfo(np.float32).eps
            np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=limit, atol=limit * 100)
    assert machine.counts["syncs"] == 0


@on_paths("pointers", "host", "nccl")
def test_what_crosses_to_the_host(store: Any, cupy: Any, path: str) -> None:
    """Nothing, by `mpi` and `nccl`; else n down and n up, beside what the owner sends back and forth."""
    n = 30_000
    store.init("w", cupy.zeros(n, F4))
    grad = cupy.asarray(np.ones(n, F4))
    store.pushpull("w", grad)
    crossed = counted(store, lambda: store.pushpull("w", grad), *CROSSED)
    assert (grad.get() == 9).all()
    bounds = store.strategy.ring.queues[store.session.infos["w"].id].bounds
    own = 4 * (bounds[store.rank + 1] - bounds[store.rank])
    assert crossed == ([4 * n + own, 4 * n] if path == "host" else [0, 0])


CROSSED = ("copies_down_bytes", "copies_up_bytes")


@on_paths(*PATHS)
def test_adasum_crosses_to_the_host_once_each_way(store: Any, cupy: Any) -> None:
    """Whichever path the key's sums take, in rounds before and after."""
    n = 20_001
    store.init("w", cupy.zeros(n, F4))
    for step in range(2):
        every = random_vectors(store.num_workers, n, "float32", step)
        value, out = cupy.asarray(every[store.rank]), cupy.zeros(n, F4)
        call = functools.partial(store.pushpull, "w", value, out, op="adasum")
        assert counted(store, call, *CROSSED) == [4 * n, 4 * n]
        close(out.get(), every)
        assert (value.get() == every[store.rank]).all()
        store.pushpull("w", ones := cupy.asarray(np.ones(n, F4)))
        assert uniform(ones.get()) == store.num_workers


@on_paths("host", name="dist_sync")
def test_lists_of_keys_and_arrays_of_both_kinds(store: Any, cupy: Any) -> None:
    store.init(["h", "d"], [np.zeros(4, F4), cupy.zeros(4, F4)])
    assert [store.session.infos[key].space for key in "hd"] == [HOST, DEVICE]
    ones, out = np.ones(4, F4), cupy.zeros(4, np.float64)
    store.push(["h", "d"], [[cupy.asarray(ones), ones], [ones, cupy.asarray(ones)]])
    host = np.zeros(4, F4)
    store.pull(["h", "d"], [[out, host], [host.copy(), cupy.zeros(4, F4)]])
    assert uniform([out.get(), host]) == 6
    both = [cupy.asarray(ones), cupy.asarray(ones)]
    store.pushpull("d", both, op="max")
    wide = store.pull("d", like=cupy.zeros(1))
    assert isinstance(wide, cupy.ndarray)
    assert uniform([both[1].get(), wide.get(), store.pull("d")]) == 1


@on_paths("host", "pointers")
def test_a_gradient_that_is_still_computed_holds_up_its_own_key_alone(store: Any, cupy: Any) -> None:
    """The round of another key ends, though it was pushed later; and nothing is added before its caller wrote it."""
    machine = cupy.machine
    store.init(["slow", "fast"], [cupy.zeros(100, F4), cupy.zeros(100, F4)])
    fast = cupy.asarray(np.ones(100, F4))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        slow = cupy.asarray(np.ones(100, F4))
        machine.hold(stream)
        slow += 1
        under_way = store.pushpull_async("slow", slow)
    store.pushpull("fast", fast)
    assert not under_way.test()
    machine.hold(stream, held=False)
    under_way.wait()
    with stream:
        assert (fast.get()[0], (slow + 1).get()[0]) == (3.0, 7.0)


OWNED = [(name, servers, "") for name in ("dist_sync", "dist_async") for servers in (0, 2)]
OWNED += [("dist_sync", 1, codec) for codec in ("fp16", "1bit", "topk")]


@pytest.mark.parametrize(("name", "servers", "codec"), OWNED)
def test_pushes_and_pulls(name: str, servers: int, codec: str) -> None:
    """To servers each push is what travels down, each pull n bytes up, by page-locked memory, which is used again."""
    sizes = {"w": 100_003, "s": 3}

    def body(store: Any, cupy: Any) -> list[bytes]:
        if codec:
            store.set_gradient_compression({"type": codec, "force": True})
        if name == "dist_async":
            store.set_optimizer("test")
        store.init([*sizes], [cupy.zeros(n, F4) for n in sizes.values()])
        outs = [cupy.zeros(n, F4) for n in sizes.values()]

        def there_and_back() -> None:
            store.push([*sizes], [cupy.asarray(np.ones(n, F4)) for n in sizes.values()])
            if name == "dist_async":
                store.barrier()
            store.pull([*sizes], outs)

        for _ in range(2):
            crossed = counted(store, there_and_back, *CROSSED)
        if not codec:
            wanted = 6 if name == "dist_async" else 3
            assert [uniform(one) for one in (store.pull("w"), *(out.get() for out in outs))] == [wanted] * 3
        if servers:
            keys = [store.strategy.owners._keys[store.session.infos[key].id] for key in sizes]
            pieces = [piece for key in keys for route in key.routes for piece in route.pieces]
            width = codecs.create(codec).wire_bytes if codec else lambda n, dtype: n * dtype.itemsize
            assert crossed == [sum(width(end - begin, F4) for begin, end in pieces), 4 * sum(sizes.values())]
        return [out.get().tobytes() for out in outs]

    found, machine = run("host", body, servers=servers, name=name)
    assert found == found[:1] * 3
    assert machine.counts["syncs"] == 0


def test_a_gpu_that_fails_ends_the_round_and_is_named() -> None:
    def body(store: Any, cupy: Any) -> Any:
        store.init("k", cupy.zeros(10, F4))
        store.barrier()
        if store.rank == 0:
            cupy.machine.failed = 700
        with pytest.raises(MpikvError, match=r"GPU 0|fake|out of reach|Out of reach"):
            store.pushpull("k", cupy.zeros(10, F4) if store.rank else np.zeros(10, F4))
        raise ZeroDivisionError  # ends this rank without closing its store

    with pytest.raises(RankError, match=r"ZeroDivisionError|GPU 0"):
        run("host", body, n=2, settings={"timeout_s": 3.0})


def test_all_memory_is_given_back() -> None:
    def body(store: Any, cupy: Any) -> None:
        store.init("k", cupy.zeros(5000, F4))
        store.pushpull("k", cupy.zeros(5000, F4))

    _, machine = run("host", body)
    gc.collect()
    assert machine.used[0] <= 2 * 3 * 32768  # what is left is the callers' own


# --- one process


def test_updaters_and_functions_get_arrays_of_cupy() -> None:
    cupy, gpu = one_gpu()
    seen = []

    def updater(key: str, total: Any, stored: Any) -> None:
        seen.append((type(total), type(stored), total.shape))
        stored += total

    def function(weight: Any, grad: Any, state: Any) -> Any:
        seen.append((type(weight), type(grad), grad.shape))
        weight -= 0.5 * grad
        return {"count": 1, "sum": grad.copy()}

    for setting, value, expected in (("set_updater", updater, 3), ("set_optimizer", function, 0)):
        store = local_store("local", spec.parse("local"), spaces=spaces_of(gpu))
        getattr(store, setting)(value)
        store.init("d", ones := cupy.asarray(np.ones((2, 2), F4)))
        for _ in range(2):
            store.push("d", ones)
        assert store.pull("d")[0, 0] == expected
    assert seen == [(cupy.ndarray, cupy.ndarray, (2, 2))] * 4


@pytest.mark.parametrize("device", ["gpu", "cuda", "gpu:1", 1])
def test_arrays_of_the_stores(device: Any) -> None:
    cupy = Machine(2).process()
    store = local_store("local", spec.parse("local"), spaces=spaces_of(gpu_of(cupy, 1)))
    assert store.device == 1
    one, other = store.zeros([(2, 3), (2,)], "float64", device=device)
    assert (one.shape, other.shape, one.dtype, one.device.id) == ((2, 3), (2,), np.float64, 1)
    with cupy.cuda.Device(1):
        one += 1
        store.init("w", one)
        store.pushpull("w", [one, one])
        assert one.get().tolist() == [[2.0] * 3] * 2
        assert other.get().tolist() == [0, 0]
    with pytest.raises(UnsupportedError, match="uses GPU 1"):
        store.zeros(2, device=0)
    none = local_store("local", spec.parse("local"), spaces=Spaces(missing="CuPy is not installed"))
    with pytest.raises(UnsupportedError, match=r"worker 0 of 1 uses no GPU: CuPy is not installed"):
        none.zeros(2, device="gpu")
