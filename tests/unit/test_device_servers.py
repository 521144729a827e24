"""Keys in device memory at workers whose values live with servers: bits, counts of copies, order, and the ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from store_modes import TEST_TIMEOUT_S, long_messages

from mpikv import optimizers
from mpikv.codecs import registry
from mpikv.config import Config
from mpikv.errors import ConfigError, MpikvError, StallError
from mpikv.spaces.named import DEVICE, HOST
from mpikv.strategies.client_key import INLINE_BYTES
from mpikv.testing.device_transport import DeviceFabric
from mpikv.testing.fake_gpu import AccessError, FakeGpu
from mpikv.testing.ranks import RankError
from mpikv.testing.stores import spawn_stores
from mpikv.transports.base import Transport
from mpikv.transports.faulty import Faults, FaultyFabric
from mpikv.transports.threads import Fabric

F32 = np.dtype(np.float32)
LONG = INLINE_BYTES // 2  # elements of float32: two shards of it travel by themselves, also halves of one
Body = Callable[[Any, FakeGpu], Any]


class PinnedTransport:
    """Asks the GPU of page-locked memory, too, whether copies are under way in what is sent or received into.

    Other memory of the host may lie where an array of the fake GPU once was: AccessError, of which nothing is made.
    """

    def __init__(self, inner: Transport, gpu: FakeGpu) -> None:
        self._inner, self._gpu = inner, gpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def isend(self, buf: Any, dest: int, tag: int, room_bytes: int = 0) -> Any:
        if isinstance(buf, np.ndarray):
            with contextlib.suppress(AccessError):
                self._gpu.host_reads(buf.ctypes.data, buf.nbytes)
        return self._inner.isend(buf, dest, tag, room_bytes)

    def irecv(self, buf: Any, source: int, tag: int, room_bytes: int = 0) -> Any:
        if isinstance(buf, np.ndarray):
            with contextlib.suppress(AccessError):
                self._gpu.host_writes(buf.ctypes.data, buf.nbytes)
        return self._inner.irecv(buf, source, tag, room_bytes)


class PinnedFabric(Fabric):
    """See `PinnedTransport`."""

    def __init__(self, fabric: Fabric, gpus: list[FakeGpu]) -> None:
        super().__init__(fabric.size, fabric.hosts, fabric.clock)
        self._fabric, self._gpus = fabric, gpus

    def rank(self, rank: int) -> Transport:
        transport: Any = PinnedTransport(self._fabric.rank(rank), self._gpus[rank])
        return transport  # type: ignore[no-any-return]


def run(
    workers: int,
    servers: int,
    body: Body,
    *,
    path: str = "staged",
    name: str = "dist_sync",
    hosts: str = "",
    seed: int = 0,
    late: bool = False,
    **settings: Any,
) -> list[Any]:
    """`body(store, gpu)` on workers that share a GPU, each with its own view of it, as the servers have one unused."""
    size, gpu = workers + servers, FakeGpu(seed=seed)
    gpus = [gpu, *(gpu.view() for _ in range(size - 1))]
    places = hosts or "a" * size
    fabric = FaultyFabric(size, lambda rank: Faults(seed=seed), places) if late else Fabric(size, places)
    if path == "mpi":
        fabric = DeviceFabric(fabric, gpus)
    config = Config(
        **{"timeout_s": TEST_TIMEOUT_S, "device_path": path, "bigarray_bound_elems": LONG, "num_servers": servers}
        | settings
    )
    found = spawn_stores(
        name,
        workers,
        lambda store: body(store, gpus[store.session.transport.rank]),
        num_servers=servers,
        hosts=places,
        fabric=PinnedFabric(fabric, gpus),
        drivers=gpus,
        config=config,
    )
    for one in gpus:  # every store has given back what it had
        assert one.counts["frees"] == one.counts["allocations"]
    return found


def on_host(workers: int, servers: int, body: Callable[[Any], Any], name: str = "dist_sync", **settings: Any) -> Any:
    config = Config(timeout_s=TEST_TIMEOUT_S, bigarray_bound_elems=LONG, **settings)
    return spawn_stores(name, workers, body, num_servers=servers, config=config)


def values_of(rank: int, step: int, n: int, dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng([rank, step]).integers(-8, 8, n).astype(dtype)


def copies(store: Any, action: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that an action copies down and up."""
    before = store.stats()
    action()
    after = store.stats()
    down, up = (after[name] - before[name] for name in ("copies_down_bytes", "copies_up_bytes"))
    return down, up


# --- bits

# Path, shared memory: how a worker gets to servers.
WAYS = pytest.mark.parametrize(
    ("path", "memory"), [("staged", "auto"), ("staged", "off"), ("staged", "long"), ("mpi", "off")]
)


def calls(store: Any, n: int, put: Callable[[Any], Any], get: Callable[[Any], np.ndarray]) -> list[bytes]:
    """Pushes one behind the other, pulls late, calls in place, and with a list of arrays."""
    store.init("w", put(np.arange(n, dtype=F32)))
    out, found = put(np.empty(n, F32)), []
    for step in range(2):
        grads = [put(values_of(store.rank, 2 * step + i, n) / 3) for i in range(2)]
        for grad in grads:
            store.push("w", grad)
        store.pull("w", out)
        found.append(get(out).tobytes())
        requests = [store.pushpull_async("w", grad) for grad in grads]
        for request in requests:
            request.wait()
        store.pushpull("w", grads[0], out)
        store.pushpull("w", [grads[0], grads[1]], op="max")
        found += [get(one).tobytes() for one in (*grads, out)]
    return found


@WAYS
@pytest.mark.parametrize("n", [0, 1, 1000, 2 * LONG + 3])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.grid(1)
def test_the_bits_of_host_arrays(path: str, memory: str, n: int, seed: int) -> None:
    """However messages and copies are ordered."""

    def body(store: Any, gpu: FakeGpu) -> Any:
        found = calls(store, n, gpu.array, lambda array: array.get())
        assert store.session.infos["w"].space == DEVICE
        assert store.stats()["device_path"] == path
        return found

    settings: dict[str, Any] = {"shared_memory": "off" if memory == "off" else "auto"}
    expected = on_host(2, 2, lambda store: calls(store, n, np.array, np.array), **settings)
    parts = {"partition_bytes": 1 << 14} if seed else {}
    with long_messages() if memory == "long" else pytest.MonkeyPatch.context():
        assert run(2, 2, body, path=path, seed=seed, late=bool(seed), **settings, **parts) == expected


@pytest.mark.parametrize(("path", "memory"), [("staged", "auto"), ("staged", "off"), ("mpi", "off")])
def test_more_partitions_than_are_under_way_at_once(path: str, memory: str) -> None:
    n = 70 * LONG // 2

    def body(store: Any, gpu: FakeGpu) -> Any:
        store.init("w", gpu.array(np.zeros(n, F32)))
        store.pushpull("w", grad := gpu.array(values_of(store.rank, 0, n)))
        store.pull("w", out := gpu.array(np.zeros(n, F32)))
        return np.array_equal(grad.get(), values_of(0, 0, n) + values_of(1, 0, n)) and np.array_equal(
            out.get(), grad.get()
        )

    assert run(2, 1, body, path=path, shared_memory=memory, partition_bytes=1) == [True, True]


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize(("path", "memory"), [("staged", "auto"), ("staged", "off"), ("mpi", "off")])
def test_an_asynchronous_store(path: str, memory: str, servers: int) -> None:
    """A worker sees its own pushes in its next pull, and everybody's after a barrier."""
    n, workers = 2 * LONG + 1, 2

    def body(store: Any, gpu: FakeGpu) -> Any:
        store.init(["w", "s"], [gpu.array(np.zeros(n, F32)), gpu.array(np.zeros(3, F32))])
        store.set_optimizer(optimizers.create("test"))
        out = [gpu.array(np.empty(n, F32)), gpu.array(np.empty(3, F32))]
        for i in range(3):
            store.push(["w", "s"], [gpu.array(np.ones(n, F32)), gpu.array(np.ones(3, F32))])
            store.pull(["w", "s"], out)
            assert all((one.get() >= i + 1).all() for one in out)
        store.push(["w", "s"], [gpu.array(np.ones(n, F32)), gpu.array(np.ones(3, F32))])
        store.barrier()  # nobody has pulled this one
        store.pull(["w", "s"], out)
        return [np.unique(one.get()).tolist() for one in out]

    found = run(workers, servers, body, path=path, name="dist_async", shared_memory=memory)
    assert found == [[[8.0], [8.0]]] * 2


@pytest.mark.parametrize("kind", ["adam", "lamb", "sgd"])
@pytest.mark.parametrize(("path", "memory"), [("staged", "auto"), ("mpi", "off")])
def test_optimizers_and_their_states(path: str, memory: str, kind: str, tmp_path: Any) -> None:
    """Also of the whole value, for which cut keys move to one server; the file is that of a store on the host."""
    n = 2 * LONG + 2

    def train(store: Any, put: Any, get: Any, file: str) -> Any:
        store.init("w", put(np.ones(n, F32)))
        store.push("w", put(values_of(store.rank, 0, n) / 3))
        store.set_optimizer(optimizers.create(kind, learning_rate=0.125))
        for step in range(2):
            store.push("w", put(values_of(store.rank, step, n) / 3))
        store.save_optimizer_states(file)
        store.push("w", put(values_of(store.rank, 3, n) / 3))
        store.load_optimizer_states(file)
        store.pushpull("w", out := put(values_of(store.rank, 4, n) / 3))
        return get(out).tobytes()

    files = [str(tmp_path / one) for one in "hd"]
    expected = on_host(2, 2, lambda store: train(store, np.array, np.array, files[0]), shared_memory=memory)
    found = run(
        2,
        2,
        lambda store, gpu: train(store, gpu.array, lambda array: array.get(), files[1]),
        path=path,
        shared_memory=memory,
    )
    assert found == expected
    assert (tmp_path / "h").read_bytes() == (tmp_path / "d").read_bytes()


@pytest.mark.parametrize("memory", ["auto", "off"])
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ({"type": "fp16", "pull": "fp16"}, F32),
        ({"type": "2bit"}, F32),
        ({"type": "int8"}, F32),
        ({"type": "topk"}, F32),
        ({"type": "none", "pull": "bf16"}, np.dtype(np.float16)),
        ({"type": "2bit", "pull": "int8"}, F32),
        ({"type": "int8", "pull": "2bit"}, np.dtype(np.float16)),
        ({"type": "int8", "pull": "topk"}, F32),
    ],
    ids=str,
)
def test_compressed_values(codec: dict[str, Any], dtype: np.dtype[Any], memory: str, tmp_path: Any) -> None:
    """They are encoded in the order of the pushes: the same bits, also of what is still owed, and of the answers."""
    n, params = 2 * LONG + 3, {**codec, "force": True}

    def train(store: Any, put: Any, get: Any, file: str) -> Any:
        store.set_gradient_compression(params)
        store.init(["w", "s"], [put(np.zeros(n, dtype)), put(np.zeros(5, dtype))])
        if codec.get("pull") in (None, "fp16", "bf16"):
            store.set_optimizer(optimizers.create("sgd", learning_rate=0.125))
        for step in range(3):
            store.push(["w", "s"], [put((values_of(store.rank, step, size) / 3).astype(dtype)) for size in (n, 5)])
        store.save_optimizer_states(file)
        outs = [put((values_of(store.rank, 4, size) / 3).astype(dtype)) for size in (n, 5)]
        others = [[put(np.zeros(size, F32)), np.zeros(size, dtype)] for size in (n, 5)]
        store.pushpull(["w", "s"], outs)
        store.pull(["w", "s"], others)
        store.barrier()
        found = [*outs, *(one for pair in others for one in pair)]
        return [np.asarray(get(out)).tobytes() for out in found], store.stats().get("encoded_bytes")

    files = [str(tmp_path / one) for one in "hd"]
    expected = on_host(2, 2, lambda store: train(store, np.array, np.array, files[0]), shared_memory=memory)
    for path in ("staged",) if memory == "auto" else ("staged", "mpi"):
        found = run(
            2,
            2,
            lambda store, gpu: train(
                store, gpu.array, lambda array: array if isinstance(array, np.ndarray) else array.get(), files[1]
            ),
            path=path,
            shared_memory=memory,
        )
        assert found == expected
        assert (tmp_path / "h").read_bytes() == (tmp_path / "d").read_bytes()


# --- counts of copies


@pytest.mark.parametrize("memory", ["auto", "off"])
@pytest.mark.parametrize("pull", ["none", "fp16", "int8", "topk"])
@pytest.mark.parametrize("codec", ["fp16", "2bit", "int8"])
def test_the_copies_of_compressed_values(codec: str, pull: str, memory: str) -> None:
    """Down goes what travels, in one copy for each message; up the answer: whole, or what travels of it."""
    one = registry.create(codec)

    def body(store: Any, gpu: FakeGpu) -> None:
        store.set_gradient_compression({"type": codec, "pull": pull, "force": True})
        for n in (4 * LONG + 3, 1000):
            key = f"w{n}"
            store.init(key, gpu.array(np.zeros(n, F32)))
            store.barrier()
            routes = store.strategy._keys[store.session.infos[key].id].routes
            parts = [end - begin for route in routes for begin, end in route.parts]
            assert sum(parts) == n
            down = sum(one.wire_bytes(part, F32) for part in parts)
            grad, out = gpu.array(np.ones(n, F32)), gpu.array(np.zeros(n, F32))
            assert copies(store, lambda: store.push(key, grad)) == (down, 0)  # noqa: B023 - called at once
            encoded = pull != "none"
            up = sum(registry.create(pull).wire_bytes(part, F32) for part in parts) if encoded else 4 * n
            assert copies(store, lambda: store.pull(key, out)) == (0, up)  # noqa: B023
            assert copies(store, lambda: store.pull(key, [out, np.zeros(n, F32)])) == (0, 4 * n)  # noqa: B023
            before = store.stats()
            store.push(key, grad)
            store.pull(key, out)
            after = store.stats()
            assert after["copies_down"] - before["copies_down"] == len(parts)
            if encoded:
                assert after["copies_up"] - before["copies_up"] == len(parts)

    run(2, 2, body, path="staged", shared_memory=memory)


@pytest.mark.parametrize("dtype", [F32, np.dtype(np.float16), np.dtype(np.int64)], ids=str)
@WAYS
@pytest.mark.grid(1)
def test_the_copies_of_each_call(path: str, memory: str, dtype: np.dtype[Any]) -> None:
    """n down for a push and n up for a pull; none by CUDA-aware MPI, but for shards that travel in other messages."""
    n_long, n_short = 4 * LONG + 3, 1000

    def body(store: Any, gpu: FakeGpu) -> None:
        for n in (n_long, n_short):
            key, n_bytes = f"w{n}", n * dtype.itemsize
            store.init(key, gpu.array(np.zeros(n, dtype)))
            store.barrier()
            crosses = 0 if path == "mpi" and n == n_long else n_bytes
            grad, out = gpu.array(np.ones(n, dtype)), gpu.array(np.zeros(n))  # of another dtype
            assert copies(store, lambda: store.push(key, grad)) == (crosses, 0)  # noqa: B023 - called at once
            assert copies(store, lambda: store.push(key, [grad, grad, grad])) == (crosses, 0)  # noqa: B023
            assert copies(store, lambda: store.pull(key, out)) == (0, crosses)  # noqa: B023
            assert copies(store, lambda: store.pushpull(key, grad)) == (crosses, crosses)  # noqa: B023
            assert copies(store, lambda: store.pushpull_async(key, grad, [grad, out]).wait()) == (crosses, crosses)  # noqa: B023
            assert (grad.get() == 4).all()
            # Arrays in host memory take the answer themselves; beside one on the GPU it comes by way of the host.
            plain = np.empty(n, dtype)
            assert copies(store, lambda: store.pull(key, plain)) == (0, 0)  # noqa: B023
            assert copies(store, lambda: store.pushpull(key, grad, plain)) == (crosses, 0)  # noqa: B023
            assert copies(store, lambda: store.pull(key, [out, plain])) == (0, n_bytes)  # noqa: B023
            assert (plain == 8).all()
            assert (out.get() == 8).all()

    with long_messages() if memory == "long" else pytest.MonkeyPatch.context():
        run(2, 2, body, path=path, shared_memory="off" if memory == "off" else "auto")


def test_only_what_goes_through_the_hosts_memory_is_copied() -> None:
    """With a server on each of two hosts, half of a key that is cut: what goes to the other host MPI takes itself."""
    n = 4 * LONG

    def body(store: Any, gpu: FakeGpu) -> Any:
        store.init(["w", "s"], [gpu.array(np.zeros(n, F32)), gpu.array(np.zeros(3, F32))])
        store.barrier()
        grad, out, plain = gpu.array(values_of(store.rank, 0, n)), gpu.array(np.zeros(n, F32)), np.empty(n, F32)
        half = n * 4 // 2
        assert copies(store, lambda: store.push("w", grad)) == (half, 0)
        assert copies(store, lambda: store.pull("w", out)) == (0, half)
        assert np.array_equal(out.get(), values_of(0, 0, n) + values_of(1, 0, n))
        assert copies(store, lambda: store.pushpull("w", grad, plain)) == (half, 0)
        assert copies(store, lambda: store.pushpull("w", grad, [out, plain])) == (half, 2 * half)
        assert np.array_equal(plain, out.get())
        store.pushpull(["w", "s"], [grad, three := gpu.array(np.ones(3, F32))])
        assert np.array_equal(grad.get(), plain)
        return three.get().tolist(), store.session.transport.hosts

    for three, hosts in run(2, 2, body, path="mpi", hosts="abab"):
        assert three == [2.0] * 3
        assert hosts == ("a", "b", "a", "b")


def test_page_locked_memory_is_used_again() -> None:
    """After the first round none is taken; through the host's memory it is part of that, and not copied twice."""
    n = 4 * LONG

    def body(store: Any, gpu: FakeGpu) -> None:
        store.init("w", gpu.array(np.zeros(n, F32)))
        grad = gpu.array(np.ones(n, F32))
        through_memory = store.session.links is not None

        def held() -> tuple[int, int]:
            return gpu.counts["pinned"], gpu.counts["registered"]

        store.pushpull("w", grad)
        before, stats = held(), store.stats()
        for _ in range(4):
            store.pushpull("w", grad)
        assert held() == before
        if through_memory:  # answers are copied out, and what is pushed is read where it is
            assert store.stats()["bytes_copied"] - stats["bytes_copied"] < 5 * n * 4

    run(2, 1, body, shared_memory="auto")
    run(2, 1, body, shared_memory="off")


# --- calls with arrays of both kinds


@pytest.mark.parametrize(("path", "memory"), [("staged", "auto"), ("staged", "off"), ("mpi", "off")])
def test_keys_and_arrays_of_both_kinds_in_one_call(path: str, memory: str) -> None:
    sizes = {"host": 5, "host long": 3 * LONG, "short": 7, "long": 3 * LONG + 1, "none": 0}
    keys = list(sizes)

    def body(store: Any, gpu: FakeGpu) -> Any:
        first = [np.zeros(n, F32) for n in sizes.values()]
        store.init(
            keys, [one if key.startswith("host") else gpu.array(one) for key, one in zip(keys, first, strict=True)]
        )
        assert [store.session.infos[key].space for key in keys] == [HOST] * 2 + [DEVICE] * 3
        grads = [values_of(store.rank, 0, n) for n in sizes.values()]
        pushed = [[gpu.array(grad), grad] if i % 2 else [grad, gpu.array(grad)] for i, grad in enumerate(grads)]
        outs = [gpu.array(one) if i % 2 else np.array(one) for i, one in enumerate(first)]
        store.push(keys, pushed)
        store.pull(keys, outs)
        found = [np.empty(n, F32) for n in sizes.values()]
        store.pushpull(keys, [gpu.array(grad) for grad in grads], found)
        store.pushpull(keys, outs)
        return [one.tobytes() for one in found], [
            (one if isinstance(one, np.ndarray) else one.get()).tobytes() for one in outs
        ]

    sums = [values_of(0, 0, n) + values_of(1, 0, n) for n in sizes.values()]
    expected = [one.tobytes() for one in sums], [(4 * one).tobytes() for one in sums]
    assert run(2, 2, body, path=path, shared_memory=memory) == [expected] * 2


# --- order


def hold(gpu: FakeGpu, held: list[bool]) -> None:
    """Let nothing that the GPU does be known to be done, for as long as `held[0]`."""
    done = gpu.done
    gpu.done = lambda event: not held[0] and done(event)  # type: ignore[method-assign]


def test_no_call_overtakes_one_whose_copy_is_under_way() -> None:
    """Pushes return at once, and nothing is sent; then servers see all in the order of the calls."""
    n = 3 * LONG

    def body(store: Any, gpu: FakeGpu) -> None:
        held = [False]
        hold(gpu, held)
        store.init(["h", "d"], [np.zeros(3, F32), gpu.array(np.zeros(n, F32))])
        store.set_optimizer(optimizers.create("test"))
        store.barrier()
        held[0] = True
        sent = store.stats()["messages_sent"], store.stats()["memory_messages"]
        for i in range(1, 4):
            store.push("d", gpu.array(np.full(n, i, F32)))
            store.push("h", np.full(3, i, F32))
        request = store.pull_async(["d", "h"], [out := gpu.array(np.zeros(n, F32)), small := np.zeros(3, F32)])
        again = store.pushpull_async("h", np.ones(3, F32), last := np.zeros(3, F32))
        assert not request.test()
        assert not again.test()
        assert (store.stats()["messages_sent"], store.stats()["memory_messages"]) == sent
        held[0] = False
        store.pushpull("h", np.ones(3, F32), latest := np.zeros(3, F32))
        store.wait_all()
        assert np.unique(out.get()).tolist() == [6.0]
        assert (small[0], last[0], latest[0]) == (6.0, 7.0, 8.0)

    run(1, 1, body, name="dist_async")


def test_a_stall_while_a_copy_is_under_way() -> None:
    """Whoever waits is told who is missing; the call goes on when the copy is done."""

    def body(store: Any, gpu: FakeGpu) -> None:
        held = [False]
        hold(gpu, held)
        store.init("w", gpu.array(np.zeros(LONG, F32)))
        store.barrier()
        held[0] = store.rank == 1
        request = store.pushpull_async("w", grad := gpu.array(np.ones(LONG, F32)))
        with pytest.raises(StallError, match="key 'w'"):
            request.wait(0.2)
        held[0] = False
        request.wait()
        assert (grad.get() == 2).all()

    run(2, 1, body)


@pytest.mark.parametrize(("path", "memory"), [("staged", "auto"), ("mpi", "off")])
def test_a_refused_round_and_what_comes_after_it(path: str, memory: str) -> None:
    def body(store: Any, gpu: FakeGpu) -> Any:
        store.init(["w", "v"], [gpu.array(np.zeros(3 * LONG, F32)), gpu.array(np.zeros(3, F32))])
        optimizer = optimizers.create("sgd", learning_rate=0.5)
        store.set_optimizer(optimizer)
        optimizer.learning_rate = 0.5 + store.rank
        store.push("w", gpu.array(np.ones(3 * LONG, F32)))
        with pytest.raises(ConfigError, match=r"key 'w'.*learning_rate"):
            store.pull("w", gpu.array(np.zeros(3 * LONG, F32)))
        optimizer.learning_rate = 1.0
        store.pushpull("v", out := gpu.array(np.ones(3, F32)))
        values.append(out.get().tolist())
        return None

    values: list[Any] = []
    run(2, 1, body, path=path, shared_memory=memory)  # `close` does not say it once more
    assert values == [[-2.0] * 3] * 2


@pytest.mark.parametrize(("path", "memory"), [("staged", "auto"), ("staged", "off"), ("mpi", "off")])
@pytest.mark.parametrize("seed", [0, 1])
def test_close_while_pushes_are_under_way(path: str, memory: str, seed: int) -> None:
    """Everything that was pushed reaches the servers, which have to see as many rounds of each worker."""

    def body(store: Any, gpu: FakeGpu) -> None:
        store.init("w", gpu.array(np.zeros(3 * LONG, F32)))
        for i in range(4):
            store.push("w", gpu.array(np.full(3 * LONG, i, F32)))

    run(2, 2, body, path=path, shared_memory=memory, seed=seed, late=memory == "off")


def test_a_push_that_the_gpu_loses_is_not_silent() -> None:
    """The others count on it: so every later wait raises."""
    text = "`copy` fails"

    def body(store: Any, gpu: FakeGpu) -> None:
        store.init("w", gpu.array(np.zeros(3 * LONG, F32)))
        store.set_optimizer(optimizers.create("test"))
        grad = gpu.array(np.ones(3 * LONG, F32))
        gpu.synchronize()
        gpu.fail("copy", 2)  # the first one takes the caller's array
        store.push("w", grad)
        for _ in range(2):
            with pytest.raises(MpikvError, match=text):
                store.pull("w")

    with pytest.raises(RankError, match=text):  # `close` waits, too
        run(1, 0, body, name="dist_async")


@pytest.mark.parametrize("name", ["dist_sync_device", "dist_async_device"])
def test_where_keys_are_follows_from_the_type(name: str) -> None:
    def body(store: Any, gpu: FakeGpu) -> Any:
        store.init("w", np.zeros(3, F32))
        stats = store.stats()
        return store.session.infos["w"].space, stats["device_path"], stats["device_path_reasons"]

    why = {"ipc": "servers own the keys", "nccl": "servers own the keys"}
    for path, settings in (("staged", {}), ("mpi", {"shared_memory": "off"})):
        for space, found, reasons in run(2, 1, body, name=name, path=path, **settings):
            assert (space, found) == (DEVICE, path)
            assert {one: reasons[one] for one in reasons if one in why} == why
