"""The way by NCCL, on fake GPUs: all workers make the same calls in the same order, and nobody waits for ever."""

from __future__ import annotations

import itertools
import sys
import threading
import types

import ml_dtypes
import numpy as np
import pytest
from device_rounds import FIRST, Case, Side, run_rounds
from fake_nccl import CallOrderError, Network

from mpikv import Config, optimizers
from mpikv.arrays import SUPPORTED_DTYPES, sum_dtype
from mpikv.collectives.nccl import DTYPES as DTYPES_OF_NCCL
from mpikv.collectives.nccl import OPS as OPS_OF_NCCL
from mpikv.collectives.nccl import CupyNccl, Nccl, NcclComm
from mpikv.collectives.nccl_introduction import Introduced, introduce
from mpikv.errors import MpikvError, StallError, UnsupportedError
from mpikv.placement import LARGE_BYTES
from mpikv.reductions import REDUCTIONS
from mpikv.testing.device_transport import DeviceFabric
from mpikv.testing.fake_gpu import FakeGpus
from mpikv.testing.ranks import Gathering, RankError, spawn
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores
from mpikv.transports.faulty import Faults, FaultyFabric
from mpikv.transports.threads import Fabric

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)
OPS = (np.add, np.minimum, np.maximum, np.multiply)


def network_of(p: int, seed: int = 0) -> Network:
    gpus = FakeGpus(p, seed=seed)
    return Network([gpus.view([rank])[0] for rank in range(p)])


def by_nccl(p: int, cases: list[Case], seed: int = 0, fabric: Fabric | None = None) -> list:
    network = network_of(p, seed)
    fabric = Fabric(p) if fabric is None else fabric

    def body(transport):
        rank = transport.rank
        return run_rounds("nccl", transport, Side(network.gpus[rank], network.of(rank)), cases)

    results = spawn(p, body, fabric=DeviceFabric(fabric, network.gpus), timeout_s=120)
    assert network.destroyed == (set(range(p)) if p > 1 else set())
    assert not network.aborted
    return results


def by_messages(p: int, cases: list[Case]) -> list:
    return spawn(p, lambda transport: run_rounds("messages", transport, Side(), cases))


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_sums_of_all_lengths_dtypes_and_operations(p: int) -> None:
    """Also where parts differ in length, and where some workers own nothing."""
    cases = [Case(algorithm, n, whole=True) for algorithm in ("ring", "halving_doubling") for n in (0, 1, 2, 60, 1001)]
    cases += [Case("ring", 37, dtype, op, whole=True) for dtype, op in itertools.product(DTYPES, OPS)]
    assert by_nccl(p, cases) == by_messages(p, cases)


@pytest.mark.parametrize("seed", range(8))
def test_keys_in_any_order(seed: int) -> None:
    """Of pushes, of messages and of the GPUs' work."""
    p = 2 + seed % 3
    cases = [Case("ring", n, whole=True, rounds=4) for n in (3, 17, 1000, 1001, 5)]
    fabric = FaultyFabric(p, lambda rank: Faults(seed=seed))
    assert by_nccl(p, cases, seed, fabric) == by_messages(p, cases)


@pytest.mark.parametrize("p", [2, 3])
def test_labels_and_factors(p: int) -> None:
    """Sums are in the units of worker 0; where labels differ in what must be equal, nobody updates."""
    wrong = tuple(FIRST._replace(text=f"{rank}") for rank in range(p))
    different = tuple(FIRST._replace(factor=2.0 ** (rank - 1)) for rank in range(p))
    case = Case("ring", 41, labels=[(FIRST,) * p, different, wrong, (FIRST,) * p], whole=True)
    results = by_nccl(p, [case])
    plain = by_messages(p, [case])
    values = [((np.arange(41) * 7 + 3 * rank + 1) % 5 + 1) for rank in range(p)]
    mixed = sum(2.0**rank * values[rank] for rank in range(p)).astype(np.float32).tobytes()
    for (found,), (expected,) in zip(results, plain, strict=True):
        assert [one[1] for one in found[1:]] == [False, False, True, False]
        assert found[1] == expected[1]
        assert found[2] == ((True, 0.5), False, mixed)
        assert found[3] == (None, True, mixed)
        assert found[4] == expected[4]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_store(workers: int) -> None:
    """Keys pushed in any order, an optimizer with state, a key with one owner; whole numbers are exact on any way."""
    gpus = [gpu.view(rank) for rank, gpu in enumerate(FakeGpus(workers))]
    network = Network(gpus)
    sizes = [1001, 0, 3, 1, 64]

    def body(store, made=np.array, read=np.asarray):
        store.init(list(range(5)), [made(np.full(n, 3.0 + store.rank, np.float32)) for n in sizes])
        found = []
        for step in range(3):
            if step == 1:
                store.set_optimizer(optimizers.create("sgd", learning_rate=0.5, momentum=0.5))
            random = np.random.default_rng([store.rank, step])
            for key in random.permutation(5).tolist():
                store.push(key, made(random.integers(-4, 5, sizes[key]).astype(np.float32)))
            outs = [made(np.empty(n, np.float32)) for n in sizes]
            store.pull(list(range(5)), outs)
            found += [read(out).tobytes() for out in outs]
        return found

    def on_gpu(store):
        return body(store, gpus[store.rank].array, lambda array: array.get())

    config = Config(timeout_s=TEST_TIMEOUT_S, algorithm="nccl")
    results = spawn_stores(
        "dist_sync",
        workers,
        on_gpu,
        config=config,
        drivers=gpus,
        nccls=[network.of(rank) for rank in range(workers)],
        fabric=DeviceFabric(Fabric(workers), gpus),
    )
    assert results == spawn_stores("dist_sync", workers, body)
    assert len(network.calls) == (2 * 3 * 4 if workers > 1 else 0)
    assert network.destroyed == (set(range(workers)) if workers > 1 else set())


def test_the_fake_finds_calls_in_different_orders() -> None:
    network = network_of(2)
    comms = spawn(2, lambda t: network.of(t.rank).init(2, bytes(128), t.rank))
    streams = [gpu.stream() for gpu in network.gpus]
    memories = [gpu.allocate(64) for gpu in network.gpus]
    comms[0].all_gather(memories[0], (0, 4, 8), 4, streams[0])
    with pytest.raises(CallOrderError, match="call 0 of rank 1"):
        comms[1].all_gather(memories[1], (0, 3, 8), 4, streams[1])


# --- what goes wrong


class Looks:
    """A clock by which a minute passes at each look."""

    def __init__(self) -> None:
        self._looks = 0

    def now_s(self) -> float:
        self._looks += 1
        return 60.0 * self._looks

    def sleep(self, seconds: float) -> None:
        """Nobody sleeps by it here."""


def test_a_worker_that_dies_stalls_nobody_for_ever() -> None:
    """It has told that it is there, and then makes no call: the others abort, and the key's waits raise."""
    network = network_of(3)

    def body(transport):
        side = Side(network.gpus[transport.rank], network.of(transport.rank))
        if transport.rank == 2:
            real = side.nccl.init

            def init(size, unique_id, rank):
                comm = real(size, unique_id, rank)
                comm.reduce_scatter = lambda *what: None  # its GPU never comes to it
                comm.all_gather = lambda *what: None
                return comm

            side.nccl.init = init
        run_rounds("nccl", transport, side, [Case("ring", 100, rounds=1)])

    with pytest.raises(RankError) as found:
        spawn(3, body, fabric=DeviceFabric(Fabric(3, clock=Looks()), network.gpus))
    assert found.value.errors.keys() == {0, 1}
    for rank in (0, 1):
        error = found.value.errors[rank]
        assert isinstance(error, StallError)
        assert f"worker {rank} of 3 on localhost: NCCL has not ended within 60 s" in str(error)
    assert network.aborted == {0, 1}


def test_what_nccl_notices_ends_the_round() -> None:
    network = network_of(2)

    def body(transport):
        nccl = network.of(transport.rank)
        real = nccl.init

        def init(size, unique_id, rank):
            comm = real(size, unique_id, rank)
            comm.fails = MpikvError("NCCL has failed: a link is down")
            return comm

        nccl.init = init
        run_rounds("nccl", transport, Side(network.gpus[transport.rank], nccl), [Case("ring", 100)])

    with pytest.raises(RankError) as found:
        spawn(2, body, fabric=DeviceFabric(Fabric(2), network.gpus))
    assert any("a link is down" in str(error) for error in found.value.errors.values())
    assert network.aborted


# --- large keys by NCCL, small ones by another way


LARGE = LARGE_BYTES // 4


def mixed(p: int, body, *, ended: bool = True) -> tuple[list, Network]:
    """A store of `p` workers on as many hosts that leaves the way of its keys open. ended: by all of them together."""
    gpus = [gpu.view(rank) for rank, gpu in enumerate(FakeGpus(p))]
    network, hosts = Network(gpus), [f"host{rank}" for rank in range(p)]
    results = spawn_stores(
        "dist_sync",
        p,
        lambda store: body(store, gpus[store.rank]),
        config=Config(timeout_s=TEST_TIMEOUT_S),
        drivers=gpus,
        nccls=[network.of(rank) for rank in range(p)],
        fabric=DeviceFabric(Fabric(p, hosts), gpus),
        hosts=hosts,
    )
    assert network.destroyed == (set(range(p)) if ended else set())
    return results, network


@pytest.mark.parametrize("p", [2, 3])
def test_large_keys_go_by_nccl_and_small_ones_do_not(p: int) -> None:
    """Pushed in an order of its own by each worker. Only sums by NCCL have an order of addition of their own."""
    sizes = [LARGE + 3, LARGE - 1, 17, LARGE, 0, 1000]
    steps = 3

    def rounds(store, made, read):
        store.init(list(range(6)), [made(np.zeros(n, np.float32)) for n in sizes])
        store.set_optimizer(optimizers.create("sgd", learning_rate=0.5, momentum=0.5))
        for step in range(steps):
            order = np.random.default_rng([store.rank, step]).permutation(6).tolist()
            for key in order:
                values = np.random.default_rng([store.rank, step, key]).standard_normal(sizes[key])
                store.push(key, made(values.astype(np.float32)))
        outs = [made(np.empty(n, np.float32)) for n in sizes]
        store.pull(list(range(6)), outs)
        return [read(out) for out in outs], store.stats()

    on_host = spawn_stores("dist_sync", p, lambda store: rounds(store, np.array, np.asarray), hosts=list("abc"[:p]))
    results, network = mixed(p, lambda store, gpu: rounds(store, gpu.array, lambda array: array.get()))
    for (found, stats), (expected, _) in zip(results, on_host, strict=True):
        for key, n in enumerate(sizes):
            if n >= LARGE:
                np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=p * steps * 2**-20)
                assert found[key].tobytes() == results[0][0][key].tobytes()
            else:
                assert found[key].tobytes() == expected[key].tobytes()
        assert stats["device_path"] == "staged"
        assert (stats["device_path_large"], stats["device_path_large_bytes"]) == ("nccl", LARGE_BYTES)
        assert stats["device_path_bits"].startswith("keys of 1 MiB and more go by nccl and have the bits of its sums")
    assert len(network.calls) == 2 * 2 * steps


def test_a_bucket_goes_by_its_own_length() -> None:
    """Some are made of few keys, and are no large ones."""

    def body(store, gpu):
        names = list(range(8))
        n = LARGE // 4
        store.init(names, [gpu.array(np.zeros(n, np.float32))] * 8)
        travelling = store.strategy.bucket(names)
        queues = store.strategy.keys.all()
        paths = sorted((queue.info.n_elems >= LARGE, queue.way.placement.path) for queue in queues)
        store.push(names, [gpu.array(np.full(n, key + store.rank, np.float32)) for key in names])
        outs = [gpu.array(np.empty(n, np.float32)) for _ in names]
        store.pull(names, outs)
        del travelling
        return paths, [np.unique(out.get()).tolist() for out in outs]

    results, network = mixed(2, body)
    assert {paths[-1] for paths, _ in results} == {(True, "nccl")}
    for paths, outs in results:
        assert all(path == ("nccl" if large else "staged") for large, path in paths)
        assert outs == [[2.0 * key + 1] for key in range(8)]
    assert network.calls


def test_fewer_workers() -> None:
    """The communicator was that of all: what went by NCCL goes the way of small keys from then on."""

    def body(store, gpu):
        def pushed():
            store.push("k", gpu.array(np.full(LARGE, store.rank + 1, np.float32)))
            out = gpu.array(np.empty(LARGE, np.float32))
            store.pull("k", out)
            return np.unique(out.get()).tolist()

        store.init("k", gpu.array(np.zeros(LARGE, np.float32)))
        found = pushed()
        store.barrier()
        if store.rank == 1:
            store.session.closed = True  # as if it had died
            store.session.abandon()
            return found
        store.strategy.keys.regroup(store.session.members.only((0, 2)))
        stats = store.stats()
        return found + pushed() + [stats["device_path"], stats["device_path_reasons"]["nccl"]]

    results, network = mixed(3, body, ended=False)
    last = ["staged", "its communicator was that of more workers"]
    assert results == [[6.0, 3.0, *last], [6.0], [6.0, 3.0, *last]]
    assert network.aborted == {0, 2}


def test_what_asks_for_another_way_keeps_the_bits() -> None:
    """MPIKV_DEVICE_PATH=staged is of all keys."""

    def body(store, gpu):
        store.init("w", gpu.array(np.zeros(LARGE, np.float32)))
        store.pushpull("w", gpu.array(np.ones(LARGE, np.float32)), out := gpu.array(np.empty(LARGE, np.float32)))
        stats = store.stats()
        return np.unique(out.get()).tolist(), stats["device_path"], [name for name in stats if name[11:] in WORDS]

    gpus = [gpu.view(rank) for rank, gpu in enumerate(FakeGpus(2))]
    results = spawn_stores(
        "dist_sync",
        2,
        lambda store: body(store, gpus[store.rank]),
        config=Config(timeout_s=TEST_TIMEOUT_S, device_path="staged"),
        drivers=gpus,
        hosts=["a", "b"],
    )
    assert results == [([2.0], "staged", [])] * 2


WORDS = ("_large", "_large_bytes", "_bits")


def test_nccl_adds_whatever_a_store_adds() -> None:
    """So a key's dtype, and what a push asks for, never keep it from NCCL."""
    assert {sum_dtype(dtype).name for dtype in SUPPORTED_DTYPES} <= DTYPES_OF_NCCL.keys()
    assert {one.combine for one in REDUCTIONS.values()} <= OPS_OF_NCCL.keys()


# --- how the workers come to a communicator


def introduced(p: int, change) -> tuple[list[Introduced], Network]:
    """What each of `p` workers has. change: of the NCCL of one rank, before."""
    network, gathering = network_of(p), Gathering(p)
    names = [f"worker {rank}" for rank in range(p)]

    def body(transport):
        nccl = network.of(transport.rank)
        change(transport.rank, nccl)
        return introduce(lambda: nccl, names, transport.rank, gathering.of(transport.rank), 60.0)

    return spawn(p, body), network


def test_all_have_a_communicator_or_none_has() -> None:
    results, network = introduced(3, lambda rank, nccl: None)
    assert all(one.comm is not None and not one.problem for one in results)
    assert network.ids == 1


def test_a_worker_alone_needs_none() -> None:
    assert introduced(1, lambda rank, nccl: None)[0] == [Introduced(None, "")]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_worker_without_nccl(failing: int) -> None:
    def change(rank, nccl):
        if rank == failing:
            nccl.error = UnsupportedError("NCCL is used through CuPy, which cannot be imported")

    results, network = introduced(3, change)
    assert results == [Introduced(None, f"worker {failing}: NCCL is used through CuPy, which cannot be imported")] * 3
    assert not network.aborted


def test_versions_that_differ() -> None:
    def change(rank, nccl):
        nccl.number = "22000" if rank == 2 else "21805"

    results, _ = introduced(3, change)
    text = "worker 0 has NCCL 21805, and worker 2 has NCCL 22000: install the same on all"
    assert results == [Introduced(None, text)] * 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_communicator_that_cannot_be_made(failing: int) -> None:
    """Who has his rank of it gives it up: all hear what failed."""

    def change(rank, nccl):
        if rank == failing:
            nccl.init_error = MpikvError("NCCL has failed: no GPU")
        nccl.network.arrived = threading.Barrier(1)  # the other one has its rank at once

    results, network = introduced(2, change)
    assert results == [Introduced(None, f"worker {failing}: NCCL has failed: no GPU")] * 2
    assert network.aborted == {1 - failing}


def test_a_communicator_that_does_not_come_in_time_is_given_up_when_it_does() -> None:
    """NCCL blocks in one worker beyond the limit: nobody waits longer, and nobody uses what comes late."""
    network, gathering, held = network_of(2), Gathering(2), threading.Event()
    network.arrived = threading.Barrier(1)
    given_up = threading.Semaphore(0)

    def body(transport):
        nccl = network.of(transport.rank)
        make = nccl.init

        def init(size, unique_id, rank):
            held.wait(30)
            comm = make(size, unique_id, rank)
            comm.abort = given_up.release
            return comm

        if transport.rank == 1:
            nccl.init = init
        return introduce(lambda: nccl, ["a", "b"], transport.rank, gathering.of(transport.rank), 0.2)

    results = spawn(2, body)
    assert results == [Introduced(None, "b: NCCL has not brought the workers together within 0.1 s")] * 2
    assert network.aborted == {0}
    held.set()
    assert given_up.acquire(timeout=30)


# --- how NCCL is called through CuPy


class NcclError(RuntimeError):
    pass


def cupy_with_nccl(monkeypatch, calls: list) -> None:
    """What is used of CuPy: notes each call."""

    class NcclCommunicator:
        def __init__(self, *arguments) -> None:
            calls.append(("init", *arguments))

        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, *arguments))

    class Device:
        def __init__(self, number) -> None:
            self.number = number

        def use(self) -> None:
            calls.append(("use", self.number))

    cupy, cuda, nccl = types.ModuleType("cupy"), types.ModuleType("cupy.cuda"), types.ModuleType("cupy.cuda.nccl")
    cupy.cuda, cuda.nccl, cuda.Device = cuda, nccl, Device
    nccl.available, nccl.NcclCommunicator, nccl.NcclError = True, NcclCommunicator, NcclError
    nccl.get_unique_id = lambda: tuple([-128, 127] * 64)
    nccl.get_version = lambda: 21805
    for name in ("groupStart", "groupEnd"):
        setattr(nccl, name, lambda name=name: calls.append((name,)))
    for name in ("SUM", "PROD", "MAX", "MIN", "INT8", "UINT8", "INT32", "INT64", "FLOAT32", "FLOAT64"):
        setattr(nccl, f"NCCL_{name}", sum(name.encode()))
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", nccl)):
        monkeypatch.setitem(sys.modules, name, module)


def test_calls_of_cupy(monkeypatch) -> None:
    """Parts of one length are one call, others a group of calls, one for each part that is not empty."""
    calls: list = []
    cupy_with_nccl(monkeypatch, calls)
    nccl: Nccl = CupyNccl(3)
    assert nccl.version() == "21805"
    unique_id = nccl.unique_id()
    assert len(unique_id) == 128
    comm: NcclComm = nccl.init(2, unique_id, 1)
    assert calls == [("use", 3), ("init", 2, (-128, 127) * 64, 1)]
    f32, i8, add = sum(b"FLOAT32"), sum(b"INT8"), sum(b"SUM")
    calls.clear()
    comm.reduce_scatter(1000, (0, 5, 10), np.dtype(np.float32), np.add, 77)
    comm.all_gather(1000, (0, 5, 10), 2, 77)
    assert calls == [("reduceScatter", 1000, 1020, 5, f32, add, 77), ("allGather", 1010, 1000, 10, i8, 77)]
    calls.clear()
    comm.reduce_scatter(1000, (0, 6, 6, 10), np.dtype(np.float32), np.add, 77)
    comm.all_gather(1000, (0, 6, 6, 10), 2, 77)
    assert calls == [
        ("groupStart",),
        ("reduce", 1000, 1000, 6, f32, add, 0, 77),
        ("reduce", 1024, 1024, 4, f32, add, 2, 77),
        ("groupEnd",),
        ("groupStart",),
        ("broadcast", 1000, 1000, 12, i8, 0, 77),
        ("broadcast", 1012, 1012, 8, i8, 2, 77),
        ("groupEnd",),
    ]
    calls.clear()
    comm.check()
    comm.abort()
    comm.destroy()
    assert calls == [("check_async_error",), ("abort",), ("destroy",)]


def test_an_error_of_nccl_says_what_to_do(monkeypatch) -> None:
    cupy_with_nccl(monkeypatch, [])

    def fails():
        raise NcclError("NCCL_ERROR_SYSTEM_ERROR: ...")

    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "get_unique_id", fails)
    with pytest.raises(MpikvError, match=r"NCCL_ERROR_SYSTEM_ERROR.*GPU of its own; NCCL_DEBUG=WARN"):
        CupyNccl(0).unique_id()


def test_nccl_that_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match="used through CuPy"):
        CupyNccl(0)
    cupy_with_nccl(monkeypatch, [])
    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", False)
    with pytest.raises(UnsupportedError, match="without NCCL"):
        CupyNccl(0)
