"""Encoded pushes between workers without servers: the bits, bytes and messages, and which calls are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import codecs_of_tests
import ml_dtypes
import numpy as np
import pytest
from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from store_modes import Mode

from mpikv import optimizers
from mpikv.codecs import registry
from mpikv.codecs.compression import make
from mpikv.collectives.labelled import TRAILER_BYTES
from mpikv.config import Config
from mpikv.errors import ConfigError
from mpikv.placement.keys import even_bounds
from mpikv.strategies import pieces
from mpikv.strategies.pieces import piece_elems
from mpikv.testing.ranks import RankError
from mpikv.testing.reference import add
from mpikv.testing.stores import spawn_stores

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BF16)
LARGE = 3 * pieces.STEP_ELEMS + 5  # with `short_pieces` four of them for one worker
SIZES = (0, 1, 7, LARGE)
REVERSED, SIGN = codecs_of_tests.Reversed.name, codecs_of_tests.Sign.name


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MOST_ELEMS", pieces.STEP_ELEMS)


def numbers(n: int, worker: int, round_: int, dtype: Any = F32) -> np.ndarray:
    rng = np.random.default_rng([n, worker, round_])
    return (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(dtype)


def run(
    workers: int, body: Any, compression: Any = "none", *, hosts: str = "", servers: int = 0, **config: Any
) -> list[Any]:
    """What each worker's `body` returns. hosts: a letter for each rank; by default each is on its own host."""
    hosts = hosts or "abcdefgh"[: workers + servers]
    # Messages are counted as collectives send them, without the joining of messages between hosts.
    # And on slow links, where codecs are worth their time.
    settings = {"timeout_s": 20.0, "bigarray_bound_elems": 10**9, "bucket_bytes": 0, "link": "10mbit", **config}
    settings_ = Config(**settings)
    return spawn_stores(
        "dist_sync", workers, body, num_servers=servers, hosts=hosts, config=settings_, compression=make(compression)
    )


def placement_of(store: Any, key: Any = "w") -> Any:
    return store.strategy.keys.queues[store.session.infos[key].id].placement


def rounds(n: int, dtype: Any = F32, optimizer: str = "", n_rounds: int = 3, counts: bool = True) -> Any:
    """A body that does rounds of one key, and returns each round's value, and the messages and bytes sent for it."""

    def body(store: Any) -> Any:
        store.init("w", np.linspace(-1, 1, n).astype(dtype))
        if optimizer:
            store.set_optimizer(optimizers.create(optimizer, learning_rate=0.1))
        bits, sent = [], []
        for round_ in range(n_rounds):
            value = numbers(n, store.rank, round_, dtype)
            before = store.stats()
            store.pushpull("w", value)
            after = store.stats()
            bits.append(value.tobytes())
            sent.append((after["messages_sent"] - before["messages_sent"], after["bytes_sent"] - before["bytes_sent"]))
        return (bits, sent) if counts else bits

    return body


def expected_counts(
    codec: Any, back: Any, dtype: np.dtype[Any], n: int, workers: int, *, gathers: bool
) -> list[tuple[int, int]]:
    """Messages and bytes that each worker sends, by the module's formula, from the lengths of pieces alone."""

    def of(begin: int, end: int, one: Any) -> np.ndarray:
        cuts = [*range(begin, end, piece_elems(one, dtype)), end]
        return np.array([len(cuts) - 1, sum(one.wire_bytes(b - a, dtype) for a, b in pairwise(cuts))])

    spans, found = list(pairwise(even_bounds(n, workers))), []
    for me in range(workers):
        if gathers:
            total = (workers - 1) * of(0, n, codec)
        else:
            pushed = sum(of(*spans[owner], codec) for owner in range(workers) if owner != me)
            total = pushed + (workers - 1) * of(*spans[me], back)
        found.append(tuple(total.tolist()))
    return found


# --- bits


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("codec", ["fp16", REVERSED, SIGN])
@pytest.mark.parametrize("optimizer", ["", "sgd"])
def test_the_bits_are_those_of_a_server(codec: str, n: int, workers: int, optimizer: str, short_pieces: None) -> None:
    """Messages and bytes are those of the placement's algorithm, which is `owners` where an optimizer is set."""
    compression = {"type": codec, "force": True}
    found = run(workers, rounds(n, optimizer=optimizer), compression)
    served = run(workers, rounds(n, optimizer=optimizer, counts=False), compression, servers=1)
    assert [bits for bits, _ in found] == served
    one, identity = registry.create(codec), registry.create("none")
    gathers = not optimizer and workers * one.wire_bytes(n, F32) <= one.wire_bytes(n, F32) + 4 * n
    counts = expected_counts(one, identity, F32, n, workers, gathers=gathers)
    assert [sent for _, sent in found] == [[count] * 3 for count in counts]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("memory", ["hosts", "one host by messages"])
def test_half_precision_is_sent_uncompressed(dtype: Any, n: int, workers: int, memory: str, short_pieces: None) -> None:
    """It takes two bytes per element in both directions, is added in float32 in rank order, and rounded once."""
    changes = {} if memory == "hosts" else {"hosts": "a" * workers, "shared_memory": "off"}
    found = run(workers, rounds(n, dtype), **changes)
    sums = [add([numbers(n, worker, round_, dtype) for worker in range(workers)]).tobytes() for round_ in range(3)]
    assert [bits for bits, _ in found] == [sums] * workers
    identity = registry.create("none")
    counts = expected_counts(identity, identity, dtype, n, workers, gathers=workers == 2)
    assert [sent for _, sent in found] == [[count] * 3 for count in counts]
    assert sum(n_bytes for _, n_bytes in counts) == 2 * (workers - 1) * 2 * n


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * pieces.STEP_ELEMS), min_size=1, max_size=4),
    workers=st.integers(1, 4),
    codec=st.sampled_from(["none", "fp16", REVERSED, SIGN]),
    dtype=st.sampled_from([F32, *HALVES]),
    seed=st.integers(0, 2**16),
)
def test_any_sizes_in_any_order(sizes: list[int], workers: int, codec: str, dtype: Any, seed: int) -> None:
    """Each worker pushes keys in another order and some calls ahead; the bits are those of a server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MOST_ELEMS", pieces.STEP_ELEMS)

        def body(store: Any) -> Any:
            order = np.random.default_rng([seed, store.rank])
            store.init(list(range(len(sizes))), [np.zeros(n, dtype) for n in sizes])
            requests = []
            for round_ in range(2):
                for key in order.permutation(len(sizes)).tolist():
                    value = numbers(sizes[key], store.rank, round_, dtype)
                    requests.append((store.pushpull_async(key, value, np.empty_like(value)), value))
            for request, _ in requests:
                request.wait()
            return [store.pull(key).tobytes() for key in range(len(sizes))]

        compression = codec if codec == "none" else {"type": codec, "force": True}
        assert run(workers, body, compression) == run(workers, body, compression, servers=1)


def test_only_sums_are_encoded() -> None:
    """Pushes are uncompressed while compression is suspended, and residuals are kept until it is resumed."""

    def body(store: Any) -> Any:
        found = []
        store.init("w", np.zeros(67, F32))
        for round_ in range(5):
            value = numbers(67, store.rank, round_)
            before = store.stats()["bytes_sent"]
            if round_ == 2:
                with store.session.compressions.suspend():
                    store.pushpull("w", value)
            else:
                store.pushpull("w", value, op="max" if round_ == 3 else "sum")
            found.append((value.tobytes(), store.stats()["bytes_sent"] - before, store.stats().get("encoded_bytes", 0)))
        return found

    found = run(3, body, SIGN)
    served = run(3, body, SIGN, servers=1)
    assert [[bits for bits, _, _ in one] for one in found] == [[bits for bits, _, _ in one] for one in served]
    bounds = even_bounds(67, 3)
    for rank, one in enumerate(found):
        own = bounds[rank + 1] - bounds[rank]
        plain = 4 * (67 - own) + 4 * 2 * own
        trailers = 2 * TRAILER_BYTES  # that there is another reduction than in the round before
        assert [sent for _, sent, _ in one] == [2 * 9, 2 * 9, plain, plain + trailers, 2 * 9 + trailers]  # 67 bits
        assert [encoded for _, _, encoded in one] == [9, 18, 18, 18, 27]


# --- labels


@pytest.mark.parametrize("codec", ["fp16", REVERSED])
def test_workers_with_different_factors(codec: str) -> None:
    """Each worker's values are scaled by its factor; the factors are powers of two, which change no bit."""

    def body(store: Any, *, alike: bool = False) -> Any:
        optimizer = optimizers.create("sgd", learning_rate=0.5, momentum=0.5)
        store.init("w", np.zeros(67, F32))
        store.set_optimizer(optimizer)
        found = []
        for round_ in range(4):
            factor = 1.0 if round_ == 0 else 2.0 ** (store.rank - 1)
            optimizer.rescale_grad = 1.0 if alike else factor
            value = np.round(numbers(67, store.rank, round_)).clip(-50, 50).astype(F32)
            store.push("w", value * F32.type(factor) if alike else value)
            found.append(store.pull("w").tobytes())
        return found

    assert run(3, body, {"type": codec, "force": True}) == run(3, lambda store: body(store, alike=True))


def test_workers_with_different_attributes_update_nothing() -> None:
    def body(store: Any) -> Any:
        optimizer = optimizers.create("sgd", learning_rate=0.5)
        store.init("w", np.zeros(2, F32))  # worker 2 owns nothing
        store.set_optimizer(optimizer)
        store.pushpull("w", value := np.ones(2, F32))
        optimizer.learning_rate = 0.5 if store.rank else 0.25
        with pytest.raises(ConfigError, match=r"key 'w'.*round 2|round 2.*key 'w'"):
            store.pushpull("w", np.ones(2, F32))
        return value.tolist()

    assert run(3, body, {"type": "fp16", "force": True}) == [[-1.5, -1.5]] * 3


def test_workers_with_different_reductions() -> None:
    """One worker sends a sum, encoded, and the other a maximum, uncompressed: lengths differ, which ends the job."""

    def body(store: Any) -> None:
        store.init("w", np.zeros(67, F32))
        store.pushpull("w", np.ones(67, F32), op="max" if store.rank else "sum")

    ends = r"rank {}: ShapeMismatch: message from rank {}.*: {} bytes, {} expected"
    whoever_is_first = f"{ends.format(1, 0, 9, 140)}|{ends.format(0, 1, 144, 17)}"
    with pytest.raises(RankError, match=whoever_is_first):
        run(2, body, SIGN, timeout_s=3.0)


# --- what stays owed


def test_residuals_are_kept_when_the_algorithm_changes() -> None:
    """`set_optimizer` changes the algorithm from `gather` to `owners`, which adds the residuals of earlier pushes."""

    def body(store: Any, *, late: bool) -> Any:
        found = []
        store.init("w", np.zeros(LARGE, F32))
        for round_ in range(6):
            if round_ == 3:
                assert placement_of(store).algorithm == ("gather" if late else "owners")
                store.set_optimizer(optimizers.create("test"))
                assert placement_of(store).algorithm == "owners"
            value = numbers(LARGE, store.rank, round_)
            store.pushpull("w", value)
            found.append(value.tobytes())
        return found

    gathered = run(3, lambda store: body(store, late=True), SIGN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpikv.placement.encoding.Wire.gathers", lambda *_: False)
        owners = run(3, lambda store: body(store, late=False), SIGN)
    assert gathered == owners


# --- the way back


@pytest.mark.parametrize("optimizer", ["", "sgd"])
def test_encoded_answers_are_rounded_for_all(optimizer: str, short_pieces: None) -> None:
    """All workers, also the owner, get the rounded values, but the owner updates the exact ones."""
    plain = run(3, rounds(LARGE, optimizer=optimizer, counts=False), {"type": REVERSED, "force": True})
    rounded = run(3, rounds(LARGE, optimizer=optimizer), {"type": REVERSED, "pull": "fp16", "force": True})
    half = registry.create({"type": "fp16", "error_feedback": False})
    for bits, _ in rounded:
        for found, value in zip(bits, plain[0], strict=True):
            data = half.encode(np.frombuffer(value, F32), {})
            assert found == data.astype(F32).tobytes()
    codec = registry.create(REVERSED)
    counts = expected_counts(codec, half, F32, LARGE, 3, gathers=False)
    assert [sent for _, sent in rounded] == [[count] * 3 for count in counts]


def test_the_owner_adds_the_residuals_of_answers() -> None:
    """Answers are encoded by a codec with residuals: the mean of many rounds of one sum is close to that sum."""
    n, n_rounds = 5, 64

    def body(store: Any) -> Any:
        store.init("w", np.zeros(n, F32))
        total = np.zeros(n, F32)
        for _ in range(n_rounds):
            value = np.linspace(-0.1, 0.1, n).astype(F32)
            store.pushpull("w", value)
            total += value
        return total.tolist()

    found = run(3, body, {"type": REVERSED, "pull": SIGN, "force": True})
    assert found[0] == found[1] == found[2]
    wanted = 3 * n_rounds * np.linspace(-0.1, 0.1, n)
    assert np.abs(np.array(found[0]) - wanted).max() <= 1.0  # twice the threshold: what is still owed


# --- placed so


@pytest.mark.parametrize(
    ("hosts", "compression", "path", "algorithm"),
    [
        ("abc", "none", "messages", "naive"),
        ("abc", "fp16", "encoded", "gather"),
        ("abcd", "fp16", "encoded", "owners"),
        ("abc", {"type": "fp16", "pull": "fp16"}, "encoded", "owners"),
        ("aaa", "fp16", "direct", "naive"),
        ("aaa", {"type": "fp16", "force": True}, "encoded", "gather"),
        ("a", SIGN, "messages", "naive"),
        ("aabb", SIGN, "encoded", "gather"),
        ("aabb", "fp16", "hosted", "hierarchical"),  # 12 bytes for each element, where hosts send 8
        ("aabb", {"type": "fp16", "force": True}, "encoded", "owners"),
        ("aabb", {"type": SIGN, "pull": "fp16"}, "encoded", "owners"),
    ],
)
def test_which_keys_are_sent_encoded(hosts: str, compression: Any, path: str, algorithm: str) -> None:
    """Integers never are."""

    def body(store: Any) -> Any:
        store.init(["w", "i"], [np.zeros(1000, F32), np.zeros(1000, np.int32)])
        store.pushpull("w", value := np.ones(1000, F32))
        placement = placement_of(store)
        store.pushpull("i", whole := np.arange(1000, dtype=np.int32))
        assert placement_of(store, "i").path != "encoded"
        assert whole.tolist() == [len(hosts) * i for i in range(1000)]
        return placement.path, placement.algorithm, np.unique(value).size

    assert run(len(hosts), body, compression, hosts=hosts) == [(path, algorithm, 1)] * len(hosts)


def test_keys_of_a_bucket_have_one_codec() -> None:
    """Of three keys two have the same codec and share a bucket, in which each key has its own residuals."""

    def body(store: Any, *, together: bool) -> Any:
        for key, codec in zip("abc", (SIGN, "none", SIGN), strict=True):
            store.session.compressions.of_new_keys = make(codec)
            store.init(key, np.zeros(67, F32))
        if together:
            store.strategy.bucket(list("abc"))
            queues = store.strategy.keys.queues
            of = [queues[store.session.infos[key].id] for key in "abc"]
            assert of[0] is of[2]
            assert of[0] is not of[1]
            assert [queue.placement.path for queue in of] == ["encoded", "messages", "encoded"]
        found = []
        for round_ in range(3):
            values = [numbers(67, store.rank, 10 * round_ + i) for i in range(3)]
            store.pushpull(list("abc"), values)
            found += [value.tobytes() for value in values]
        return found

    assert run(2, lambda store: body(store, together=True)) == run(2, lambda store: body(store, together=False))


def test_keys_on_a_gpu_are_copied() -> None:
    """A codec that cannot run on a GPU encodes on the host, with the bits of a key whose values are there."""

    def body(store: Any) -> Any:
        store.init("w", np.zeros(67, F32))
        store.set_optimizer(optimizers.create("sgd", learning_rate=0.1, momentum=0.9))
        found = []
        for round_ in range(3):
            store.push("w", numbers(67, store.rank, round_))
            found.append(np.asarray(store.pull("w")).tobytes())
        return found

    mode = Mode("dist_sync", 3, device="host", codec=SIGN)
    assert mode.run(body) == mode._replace(device="").run(body)
