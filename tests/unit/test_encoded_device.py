"""Keys on (fake) GPUs that travel encoded by codecs which a GPU can do: bits of the host, and what is copied."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_store import DeviceStore
from store_modes import Mode

from mpikv import optimizers
from mpikv.codecs.compression import make
from mpikv.config import Config
from mpikv.errors import MpikvError
from mpikv.keys import KeyInfo, even_bounds
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies import pieces
from mpikv.strategies.device_pieces import DevicePieces
from mpikv.strategies.encoded import Encoded
from mpikv.strategies.encoded_device import EncodedOnDevice
from mpikv.testing.device_transport import DeviceFabric
from mpikv.testing.fake_gpu import FakeGpu
from mpikv.testing.stores import spawn_stores
from mpikv.transports.threads import Fabric

F16, BF16, F32, F64 = (np.dtype(one) for one in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
LARGE = 3 * pieces.STEP_ELEMS + 5  # with `short_pieces` four of them for one worker
CODECS: dict[str, dict[str, Any]] = {
    "fp16": {"type": "fp16"},
    "bf16 alone": {"type": "bf16", "error_feedback": False},
    "int8": {"type": "int8"},
    "2bit": {"type": "2bit", "threshold": 3.0},
    "1bit": {"type": "1bit"},
    "topk": {"type": "topk", "ratio": 0.1, "whole_elems": 4},
    "randomk": {"type": "randomk", "ratio": 0.1, "seed": 7},
    "fp16, back as bf16": {"type": "fp16", "pull": "bf16"},
    "none, back as fp16": {"type": "none", "pull": "fp16"},
    "int8 of 100": {"type": "int8", "block": 100},
}
codecs = pytest.mark.parametrize("codec", [*CODECS][:-1])


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MOST_ELEMS", pieces.STEP_ELEMS)


def numbers(n: int, worker: int, round_: int, dtype: Any = F32) -> np.ndarray:
    rng = np.random.default_rng([n, worker, round_])
    return (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3, n)).astype(dtype)


def run(
    workers: int,
    body: Any,
    codec: Any,
    *,
    path: str = "",
    force: bool = True,
    hosts: str = "abcdefgh",
    **config: Any,
) -> list[Any]:
    """Of workers on these hosts. path: of keys on GPUs; "": they are in host memory."""
    settings = Config(timeout_s=20.0, bucket_bytes=0, device_path=path or "auto", **config)
    compression = make({**CODECS.get(codec, {"type": codec}), "force": force})
    arguments: dict[str, Any] = {"config": settings, "compression": compression, "hosts": hosts[:workers]}
    if not path:
        return spawn_stores("dist_sync", workers, body, **arguments)
    gpu = FakeGpu()
    gpus = [gpu, *(gpu.view() for _ in range(workers - 1))]
    fabric = DeviceFabric(Fabric(workers), gpus) if path == "mpi" else None
    return spawn_stores(
        "dist_sync",
        workers,
        lambda store: body(DeviceStore(store, gpus[store.session.transport.rank])),
        drivers=gpus,
        fabric=fabric,
        **arguments,
    )


def way_of(store: Any, key: str = "w") -> Any:
    return store.strategy.keys.queues[store.session.infos[key].id].way


def pulled(store: Any, key: Any, n: int) -> bytes:
    store.pull(key, out := np.zeros(n, F32))
    return out.tobytes()


def rounds(n: int, dtype: Any = F32, optimizer: str = "", n_rounds: int = 4) -> Any:
    """A body: rounds of one key, one of them a maximum, what each gave; and what was encoded."""

    def body(store: Any) -> Any:
        store.init("w", np.linspace(-1, 1, n).astype(dtype))
        if optimizer:
            store.set_optimizer(optimizers.create(optimizer, learning_rate=0.1))
        found = []
        for round_ in range(n_rounds):
            value = numbers(n, store.rank, round_, dtype)
            store.pushpull("w", value, op="max" if round_ == 2 and not optimizer else "sum")
            found.append(value.tobytes())
        return found, store.stats().get("encoded_bytes"), type(way_of(store))

    return body


@pytest.mark.grid
@codecs
@pytest.mark.parametrize("path", ["staged", "mpi"])
@pytest.mark.parametrize("size", [(1, 7), (2, 0), (2, LARGE), (3, 1), (3, LARGE), (5, 7), (5, LARGE)])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("optimizer", ["", "sgd", "adam"])
def test_the_bits_are_those_of_the_host(
    codec: str, path: str, size: tuple[int, int], dtype: Any, optimizer: str
) -> None:
    """Whether owners add or all workers do; the optimizer runs on the GPU."""
    workers, n = size
    body = rounds(n, dtype, optimizer)
    found, expected = run(workers, body, codec, path=path), run(workers, body, codec)
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert {one[2] for one in found} == {EncodedOnDevice}
    assert {one[2] for one in expected} == {Encoded}


def test_a_codec_that_no_gpu_can_do_encodes_on_the_host() -> None:
    body = rounds(LARGE, optimizer="sgd")
    found, expected = run(2, body, "int8 of 100", path="staged"), run(2, body, "int8 of 100")
    assert [one[0] for one in found] == [one[0] for one in expected]
    assert EncodedOnDevice not in {one[2] for one in found}


@pytest.mark.parametrize("path", ["staged", "mpi"])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("optimizer", ["", "sgd"])
def test_powersgd_is_near_the_host(path: str, workers: int, optimizer: str) -> None:
    """The same bits on all workers."""
    body = rounds(LARGE, optimizer=optimizer)
    found, expected = run(workers, body, "powersgd", path=path), run(workers, body, "powersgd")
    assert all(one[0] == found[0][0] for one in found)
    assert {one[2] for one in found} == {EncodedOnDevice}
    for ours, theirs in zip(found[0][0], expected[0][0], strict=True):
        values, reference = (np.frombuffer(one, F32) for one in (ours, theirs))
        np.testing.assert_allclose(values, reference, rtol=1e-4, atol=1e-4 * np.abs(reference).max())


# Of float32 with a residual. topk: totals, the largest, zeros, those put there, what is not finite.
LAUNCHES = {"fp16": 1, "2bit": 1, "1bit": 1, "int8": 4, "topk": 5, "randomk": 7}


@pytest.mark.parametrize("codec", LAUNCHES)
def test_the_pieces_of_a_push_are_encoded_together(codec: str) -> None:
    gpu = FakeGpu()
    space, one = DeviceSpace(gpu), make(CODECS[codec]).push
    here = DevicePieces(KeyInfo("w", 0, (LARGE,), F32, codec), one, space)
    host = pieces.Pieces(KeyInfo("w", 0, (LARGE,), F32, codec), one)
    spans = here.of((0, LARGE))
    assert len(spans) == 4
    for round_ in range(3):
        values = numbers(LARGE, 0, round_)
        there, before = space.from_host(values), gpu.counts["launches"]
        data = here.encode_all(there, spans)
        if round_:  # the first begins with residuals of zeros
            assert gpu.counts["launches"] - before == LAUNCHES[codec]
        for span in spans:
            expected = host.encode(values, span).view(np.uint8)
            assert np.array_equal(space.to_host(data[span]), expected)
    assert (here.encoded_from_bytes, here.encoded_bytes) == (host.encoded_from_bytes, host.encoded_bytes)


def test_positions_that_cannot_be_are_refused() -> None:
    """Before anything of the message is added."""
    n, one = 1000, make({"type": "topk"}).push
    space = DeviceSpace(FakeGpu())
    here = DevicePieces(KeyInfo("w", 0, (n,), F32, "topk"), one, space)
    out = space.zeros(n, F32)
    for positions in ([*range(9), n], [1, *range(9)], [*range(9), -1]):
        data = space.pinned.take(80)[:80]
        data[:40].view(np.int32)[...] = positions
        data[40:].view(F32)[...] = 1
        for does in (here.decode, here.add):
            with pytest.raises(MpikvError, match=r"TopK.*the positions do not increase, or go beyond the 1000 values"):
                does(data, out)
    assert not space.to_host(out).any()


@codecs
@pytest.mark.parametrize("path", ["staged", "mpi"])
@pytest.mark.parametrize("optimizer", ["", "sgd"])
def test_what_is_copied_is_what_travels(codec: str, path: str, optimizer: str) -> None:
    """Down: each piece that is sent, once; up: each that is received."""
    workers, params = 3, make({**CODECS[codec], "force": True})

    def body(store: Any) -> Any:
        store.init("w", np.zeros(LARGE, F32))
        if optimizer:
            store.set_optimizer(optimizers.create(optimizer, learning_rate=0.1))
        store.barrier()  # copies of the first value are done
        names, found = [f"copies_{way}{unit}" for way in ("down", "up") for unit in ("", "_bytes")], []
        for round_ in range(3):
            grad = store._gpu.array(numbers(LARGE, store.rank, round_))
            before = store.stats()
            store._store.pushpull("w", grad)
            after = store.stats()
            found.append([after[name] - before[name] for name in names])
        return way_of(store).placement.algorithm, found

    bounds = even_bounds(LARGE, workers)

    def of(codec: Any, begin: int, end: int) -> np.ndarray:
        cuts = [*range(begin, end, pieces.piece_elems(codec, F32)), end]
        return np.array([len(cuts) - 1, sum(codec.wire_bytes(b - a, F32) for a, b in pairwise(cuts))])

    for rank, (algorithm, found) in enumerate(run(workers, body, codec, path=path)):
        others = [one for one in range(workers) if one != rank]
        push = {one: of(params.push, bounds[one], bounds[one + 1]) for one in range(workers)}
        back = {one: of(params.pull, bounds[one], bounds[one + 1]) for one in range(workers)}
        if algorithm == "gather":
            down = of(params.push, 0, LARGE)
            up = len(others) * down
        else:
            down = sum(push[one] for one in others) + back[rank]
            up = len(others) * push[rank] + sum(back[one] for one in others)
        assert found == [[*down.tolist(), *up.tolist()]] * 3
        assert (algorithm == "gather") == ("back" not in codec and not optimizer)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("path", ["staged", "mpi"])
@pytest.mark.parametrize("codec", ["2bit", "int8", "fp16, back as bf16"])
@pytest.mark.parametrize("hosts", ["ab", "aab"])
@pytest.mark.parametrize("optimizer", ["", "sgd"])
def test_values_that_travel_as_they_are_pay_what_is_owed(
    codec: str, path: str, hosts: str, optimizer: str, dtype: Any
) -> None:
    """They go as keys without compression do; half precision cannot say all that it is owed."""

    def body(store: Any) -> Any:
        store.init("w", np.zeros(LARGE, dtype))
        if optimizer:
            store.set_optimizer(optimizers.create(optimizer, learning_rate=0.1))
        device = getattr(store, "_gpu", None)
        found, copies = [], []
        for round_ in range(20):
            value = numbers(LARGE, store.rank, round_, dtype)
            array, before = value if device is None else device.array(value), store.stats()
            getattr(store, "_store", store).pushpull("w", array)
            after = store.stats()
            found.append((value if device is None else array.get()).tobytes())
            copies.append(
                [after.get(name, 0) - before.get(name, 0) for name in ("copies_down_bytes", "copies_up_bytes")]
            )
        return found, store.stats().get("compressed_keys", {}).get("w", {}).get("looks"), copies[-1]

    workers = len(hosts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpikv.codecs.choice.Choice._decide", decided_for_plain)
        found = run(workers, body, codec, path=path, force=False, hosts=hosts)
        expected = run(workers, body, codec, force=False, hosts=hosts)
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    if dtype == F32 or hosts == "ab":
        assert {looks for _, looks, _ in found} == {1}
    if dtype == F32:  # halves go to their owners in every round
        plain = run(workers, body, "none", path=path, hosts=hosts)
        # of all workers together: without compression those of a host own as much as those of another one
        totals = [np.sum([copies for *_, copies in one], axis=0).tolist() for one in (found, plain)]
        assert totals[0] == totals[1]


def decided_for_plain(choice: Any, seconds: list[float]) -> None:
    """Times are not the same in two runs."""
    choice.looks, choice.seconds, choice.plain = choice.looks + 1, [*seconds], True
    choice._stretch = choice._stretch_left = 128
    choice._begin(trying=False)


def test_workers_with_different_factors() -> None:
    """Values are scaled on the GPU, once they are decoded: powers of two change no bit."""

    def body(store: Any) -> Any:
        optimizer = optimizers.create("sgd", learning_rate=0.5, momentum=0.5)
        store.init("w", np.zeros(67, F32))
        store.set_optimizer(optimizer)
        found = []
        for round_ in range(4):
            optimizer.rescale_grad = 1.0 if round_ == 0 else 2.0 ** (store.rank - 1)
            store.push("w", numbers(67, store.rank, round_))
            found.append(pulled(store, "w", 67))
        return found

    assert run(3, body, "bf16 alone", path="staged") == run(3, body, "bf16 alone")


@pytest.mark.parametrize("codec", ["2bit", "fp16, back as bf16"])
def test_states_are_saved_and_loaded(codec: str, tmp_path: Any) -> None:
    """The same files as on the host; what is loaded goes on with the same bits, also on other workers."""

    def train(file: str) -> Any:
        def body(store: Any) -> Any:
            store.init("w", np.zeros(LARGE, F32))
            store.set_optimizer(optimizers.create("sgd", learning_rate=0.1))
            for round_ in range(3):
                store.push("w", numbers(LARGE, store.rank, round_))
            store.save_optimizer_states(file)
            return pulled(store, "w", LARGE)

        return body

    def resume(store: Any) -> Any:
        store.init("w", np.ones(LARGE, F32))
        store.set_optimizer(optimizers.create("sgd", learning_rate=0.1))
        store.load_optimizer_states(str(tmp_path / "d"))
        found = []
        for round_ in range(2):
            store.pushpull("w", value := numbers(LARGE, store.rank, round_))
            found.append(value.tobytes())
        return found

    assert run(2, train(str(tmp_path / "d")), codec, path="staged") == run(2, train(str(tmp_path / "h")), codec)
    assert (tmp_path / "d").read_bytes() == (tmp_path / "h").read_bytes()
    for workers in (2, 3):
        assert run(workers, resume, codec, path="mpi") == run(workers, resume, codec)


def test_what_is_owed_stays_owed_when_owners_come() -> None:
    """Up to `set_optimizer` all workers gather; then owners do, whose pieces are others."""

    def body(store: Any) -> Any:
        found, algorithms = [], []
        store.init("w", np.zeros(LARGE, F32))
        for round_ in range(6):
            if round_ == 3:
                store.set_optimizer(optimizers.create("test"))
            algorithms.append(way_of(store).placement.algorithm)
            store.pushpull("w", value := numbers(LARGE, store.rank, round_))
            found.append(value.tobytes())
        return found, algorithms

    found = run(3, body, "2bit", path="staged")
    assert found == run(3, body, "2bit")
    assert found[0][1] == ["gather"] * 3 + ["owners"] * 3


def test_many_keys_side_by_side() -> None:
    """In one call and ahead of each other, on one GPU; some share a bucket."""
    sizes = (5, LARGE, 0, 70, 2 * LARGE)

    def body(store: Any) -> Any:
        keys = list(range(len(sizes)))
        store.init(keys, [np.zeros(n, F32) for n in sizes])
        store.set_optimizer(optimizers.create("sgd", learning_rate=0.1, momentum=0.9))
        for round_ in range(3):
            store.push(keys, [numbers(n, store.rank, round_) for n in sizes])
        return [pulled(store, key, n) for key, n in zip(keys, sizes, strict=True)]

    for bucket_bytes in (0, 1 << 10):
        on_host, *found = (
            Mode("dist_sync", 3, device=path, codec="2bit").run(body, bucket_bytes=bucket_bytes)
            for path in ("", "staged", "ipc", "mpi")
        )
        assert found == [on_host] * 3
