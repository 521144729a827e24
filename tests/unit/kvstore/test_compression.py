"""`set_gradient_compression`: what it takes, which keys it is for, and what comes back from servers by a codec."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from on_workers import full, on, uniform
from store_modes import Mode, every_way

from mpikv import ConfigError, MpikvError, ShapeMismatch, kv, optimizers
from mpikv.codecs import compression
from mpikv.codecs.compression import NONE, make
from mpikv.strategies.client_key import INLINE_BYTES

PART_BYTES = 32
SIZES = (1, 5, 9, 40, 67)


# --- what it takes


def test_a_compression_has_one_text() -> None:
    stepped = {"type": "2bit", "threshold": 0.25, "pull": {"type": "bf16"}, "force": True}
    for params in ("fp16", {"type": "fp16"}, stepped, {"type": "none", "pull": "fp16"}, None):
        found = make(params)
        assert compression.of_text(found.text) == found
    assert make("fp16").text == "fp16"
    assert make("none") == make(None) == make({"type": "none", "force": True}) == NONE
    assert make({"pull": "fp16", "type": "none"}).text == make({"type": "none", "pull": {"type": "fp16"}}).text


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"type": "fb16"}, ValueError, "Did you mean 'fp16'"),
        ({"threshold": 0.5}, TypeError, "a dict with 'type'"),
        ({"type": "fp16", "threshold": 0.5}, TypeError, "'fp16' takes error_feedback, not 'threshold'"),
        ({"type": "fp16", "force": 1}, TypeError, "'force' is True or False, not 1"),
        ({"type": "fp16", "pull": 5}, TypeError, "a codec is a name"),
        (5, TypeError, "compression_params is a dict"),
    ],
)
def test_wrong_parameters(params: Any, error: type[Exception], text: str) -> None:
    store = kv.create("local")
    with pytest.raises(error, match=text):
        store.set_gradient_compression(params)
    store.init("w", np.zeros(2))


def test_one_process_sends_nothing_and_compresses_nothing() -> None:
    store = kv.create("local")
    store.set_gradient_compression({"type": "2bit", "force": True})
    store.init("w", np.zeros(2, np.float32))
    store.push("w", np.full(2, 0.7, np.float32))
    assert store.pull("w").tolist() == np.full(2, 0.7, np.float32).tolist()
    with pytest.raises(MpikvError, match="after init of key 'w'"):
        store.set_gradient_compression({"type": "fp16"})
    store.set_gradient_compression({"type": "fp16"}, keys="v")
    with pytest.raises(TypeError, match="a store does not mix"):
        store.set_gradient_compression({"type": "fp16"}, keys=["u", 5])


HOSTS = "aab"


@pytest.mark.parametrize(("hosts", "link"), [("", "1kbit"), (HOSTS, "1kbit"), (HOSTS, "1000tbit")])
def test_which_keys_are_compressed(hosts: str, link: str) -> None:
    """Those named, or all new ones; never integers; where it is not forced not on one host, nor on fast links."""

    def body(store: Any) -> None:
        store.set_gradient_compression({"type": "fp16", "pull": "bf16"})
        store.set_gradient_compression({"type": "2bit", "force": True}, keys=["b", "i"])
        store.set_gradient_compression(None, keys="c")
        store.init(["a", "b", "c"], [np.zeros(5, np.float32)] * 3)
        store.init("i", np.zeros(5, np.int32))
        store.set_gradient_compression({"type": "fp16"}, keys="d")
        store.init("d", np.zeros(5, np.float64))
        both = '{"pull": {"type": "bf16"}, "type": "fp16"}'
        used = bool(hosts) and link == "1kbit"
        expected = [both if used else "none", forced, "none", "none", "fp16" if used else "none"]
        assert [store.session.infos[key].codec for key in ("a", "b", "c", "i", "d")] == expected
        rows = store.stats().get("compressed_keys", {})
        assert {
            key: (row["codec"], row["travels"], row["encoded_s"] < row["plain_s"]) for key, row in rows.items()
        } == (
            {key: (codec, ("as it is", "encoded")[used], used) for key, codec in (("a", both), ("d", "fp16"))}
            if hosts
            else {}
        )

    forced = make({"type": "2bit", "force": True}).text
    Mode("dist_sync", 2, 1, hosts=hosts).run(body, link=link)


@on(Mode("dist_sync", 2, 1, hosts=HOSTS))
def test_workers_that_differ_are_told_what_each_brought(store: Any) -> None:
    store.set_gradient_compression({"type": "fp16" if store.rank else "bf16"})
    with pytest.raises(ShapeMismatch, match=r"worker 0 .* as bf16; worker 1 .* as fp16"):
        store.init("w", np.zeros(5, np.float32))


# --- what comes back

MODES = every_way(Mode("dist_sync", 1, 1), Mode("dist_sync", 3, 2), Mode("dist_async", 3, 2), Mode("dist_async", 2, 0))
PULL16 = make({"type": "none", "pull": "fp16", "force": True})


@pytest.fixture(params=[False, True], ids=["fetched", "inline"])
def part_bytes(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of partitions, where small values are announced and fetched, and where they are in the push itself."""
    monkeypatch.setattr("mpikv.strategies.client_key.INLINE_BYTES", INLINE_BYTES if request.param else 0)
    return 4096 if request.param else PART_BYTES


@on(*MODES)
def test_values_come_back_rounded_and_stay_whole_at_their_owner(mode: Mode, part_bytes: int) -> None:
    """One by one, as lists, blocking and not. What no worker has pushed yet comes as `init` brought it."""
    keys, first = [str(n) for n in SIZES], 1 + 2.0**-20

    def body(store: Any) -> None:
        store.set_optimizer(optimizers.create("test"))
        store.init(keys, [full(first, n) for n in SIZES])
        assert [uniform(value) for value in store.pull(keys)] == [first] * len(SIZES)
        store.barrier()
        for round_ in (1, 2, 3):
            for key, n in zip(keys, SIZES, strict=True):
                store.pushpull(key, full(2.0**-12, n))
            store.push(keys, [full(2.0**-12, n) for n in SIZES])
            store.wait_all()
            store.barrier()
            rounded = float(np.float16(np.float32(first) + np.float32(2.0**-12 * 2 * round_ * mode.workers)))
            store.pull_async(keys, wide := [np.empty(n, np.float64) for n in SIZES]).wait()
            assert [uniform(value) for value in (*store.pull(keys), *wide)] == [rounded] * 2 * len(SIZES)
            store.barrier()

    mode.run(body, compression=PULL16, partition_bytes=part_bytes)


REST = make({"type": "none", "pull": {"type": "2bit", "threshold": 1.0}, "force": True})


@on(Mode("dist_sync", 3, 2), Mode("dist_sync", 2, 1, memory="off"), compression=REST, partition_bytes=PART_BYTES)
def test_what_a_sum_still_owes_comes_with_the_next_one(store: Any, W: int) -> None:
    """By a codec with a state, where nothing updates the key: encoded once for all workers, who get the same bytes."""
    store.init("w", full(0, 67))
    for expected in (0.0, 1.0, 1.0, 1.0):
        store.pushpull("w", full(np.float32(0.75 / W), 67), out := full(9, 67))
        assert uniform(out) == expected


NOT_BACK = {  # with their options, and the error's text
    "2bit": ({"threshold": 2.0}, "key 'w' .* 'pull': '2bit'"),
    "bf16": ({"error_feedback": True}, "'pull': 'bf16' with 'error_feedback' .*: leave 'error_feedback' away"),
}


@pytest.mark.parametrize("before", [True, False], ids=["init", "set_optimizer"])
@pytest.mark.parametrize("pull", NOT_BACK)
@on(Mode("dist_sync", 2, 1))
def test_weights_come_back_by_codecs_that_round_alone(mode: Mode, pull: str, before: bool) -> None:
    options, text = NOT_BACK[pull]

    def body(store: Any) -> None:
        calls = {"init": partial(store.init, "w", full(0, 5)), "set_optimizer": partial(store.set_optimizer, "sgd")}
        first, second = calls if before else reversed(calls)
        calls[first]()
        with pytest.raises(ConfigError, match=f"{second}: .*{text}"):
            calls[second]()
        if before:
            store.pushpull("w", value := full(1, 5))
            assert value.tolist() == [2.0] * 5

    mode.run(body, compression=make({"type": "none", "pull": {"type": pull, **options}, "force": True}))


# --- what is not compressed

COARSE = make({"type": "2bit", "threshold": 16.0, "pull": "fp16", "force": True})


@on(Mode("dist_sync", 2, 1), Mode("dist_sync", 2, 2, memory="off"))
def test_sums_alone_are_compressed(mode: Mode, part_bytes: int) -> None:
    """A mean is a sum; a maximum, and what is pushed while compression is suspended, travel as they are."""
    exact = 1 + 2.0**-20

    def body(store: Any) -> None:
        store.init("w", full(0, 67))
        # Of 17 one is owed, so that 16 are pushed with 15.
        for op, value, expected in (("sum", 17, 32), ("max", exact + store.rank, exact + 1), ("mean", 15, 16)):
            store.pushpull("w", array := full(value, 67), op=op)
            assert uniform(array) == expected
        with store.session.compressions.suspend():
            store.pushpull("w", array := full(exact, 67))
            assert uniform(array) == 2 * exact

    mode.run(body, compression=COARSE, partition_bytes=part_bytes)


# --- powersgd with the rows of a key

RANK = 2
APART = [Mode("dist_sync", w, s, hosts="abcde"[: w + s], part_bytes=1200) for w, s in ((2, 0), (3, 0), (2, 1), (3, 2))]
POWERSGD = make({"type": "powersgd", "rank": RANK, "force": True})


def of_rank(shape: tuple[int, ...], round_: int) -> np.ndarray:
    """Whole numbers, of that rank as a matrix of rows; the same on all workers."""
    numbers = np.random.default_rng(round_)
    left, right = (numbers.integers(-4, 5, n) for n in ((shape[0], RANK), (RANK, int(np.prod(shape[1:])))))
    return (left @ right).reshape(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(64, 48), (30, 7, 5, 2), (5, 200)])
@pytest.mark.parametrize("optimizer", [False, True])
@on(*APART, compression=POWERSGD, bigarray_bound_elems=100)
def test_a_gradient_of_its_rank_arrives(store: Any, W: int, shape: tuple[int, ...], optimizer: bool) -> None:
    """A few rows of it, too, where owners or partitions have no more; nothing is owed then."""
    store.init(["w", "b"], [full(0, shape), full(0, 5)])
    if optimizer:
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0))
    expected = np.zeros(shape)
    for round_ in range(3):
        store.pushpull(["w", "b"], [grad := of_rank(shape, round_), full(round_, 5)])
        total = W * of_rank(shape, round_).astype(np.float64)
        expected = expected - total if optimizer else total
        # Of the nearly square matrix more than nine tenths would be left over.
        np.testing.assert_allclose(grad, expected, rtol=0, atol=2.0**-16 * np.linalg.norm(total))
    assert store.stats()["encoded_bytes"] < 3 * W * 4 * np.prod(shape)
