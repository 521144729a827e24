"""The codecs go through `mpikv.testing.codecs`, and codecs that are wrong do not; and pushes by every path."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

import codecs_of_tests
import numpy as np
import pytest
from store_modes import HYBRID, Mode, every_way, long_messages, mode_id

from mpikv import optimizers
from mpikv.codecs import Codec, State, names, registry
from mpikv.codecs.cast import Float16
from mpikv.codecs.compression import make
from mpikv.codecs.error_feedback import ErrorFeedback
from mpikv.codecs.int8 import Int8
from mpikv.codecs.powersgd import PowerSGD
from mpikv.codecs.topk import TopK
from mpikv.codecs.twobit import TwoBit
from mpikv.strategies.client_key import INLINE_BYTES
from mpikv.testing import codecs as kit
from mpikv.testing.stores import spawn_stores

OURS = ("none", "fp16", "bf16", "2bit", "1bit", "int8", "topk", "powersgd")
OTHERS = [Float16(), Int8(3), TopK(0.3), TopK(1.0), TopK(0.3, 100), PowerSGD(1), ErrorFeedback(PowerSGD(5))]


@pytest.mark.parametrize("codec", [*map(registry.create, OURS), *OTHERS, TwoBit(1e-3)], ids=repr)
def test_each_codec_does_what_a_codec_has_to(codec: Any) -> None:
    kit.check_codec(codec)
    assert set(OURS) <= set(names())


# --- wrong ones: each makes one mistake, and one check finds it


def wrong(base: type[Codec], *arguments: Any, **changed: Any) -> Any:
    """A codec that is one of ours but for these attributes."""
    return type(f"Wrong{base.__name__}", (base,), changed)(*arguments)


def spoilt(base: type[Codec], spoil: Any, *arguments: Any) -> Any:
    """One of ours, of which spoil(data, values, state) changes something, or returns other data, after each push."""

    def encode(self: Any, values: np.ndarray, state: State) -> np.ndarray:
        data = base.encode(self, values, state)
        other = spoil(data, values, state)
        return data if other is None else other

    return wrong(base, *arguments, encode=encode)


def leaves_zeros_out(self: Any, data: np.ndarray, out: np.ndarray) -> None:
    positions, values = self._sent(data, out.size)
    out[positions] = values


def adds_sparsely(self: Any, data: np.ndarray, out: np.ndarray) -> None:
    """-0.0 + 0.0 is 0.0."""
    positions, values = self._sent(data, out.size)
    out[positions] += values


def writes_beyond(self: Any, data: np.ndarray, out: np.ndarray) -> None:
    Int8.decode(self, data, out)
    if out.base is not None and out.base.size > out.size:
        out.base[0] = 0


def reads_beyond(data: np.ndarray, values: np.ndarray, _: State) -> None:
    data[:1] ^= values.base is not None and values.base.size == values.size + 2


def counts_elsewhere(data: np.ndarray, _: np.ndarray, __: State, pushes: Any = itertools.count()) -> None:  # noqa: B008
    data[:1] ^= next(pushes) % 2


def shares_scratch(data: np.ndarray, _: np.ndarray, __: State, users: set[int] = set()) -> None:  # noqa: B006
    """As soon as a second thread has used it, it gives other bytes."""
    users.add(threading.get_ident())
    data[:1] ^= len(users) > 1


def owes_a_little_less(_: np.ndarray, __: np.ndarray, state: State) -> None:
    """By the last bit of some."""
    state["residual"] *= np.float32(1 - 2.0**-20)


def never_forgets(self: Any, values: np.ndarray, state: State) -> np.ndarray:
    broken = ~np.isfinite(state["residual"] + values)
    data = TwoBit.encode(self, values, state)
    state["residual"][broken] = np.nan
    return data


@pytest.mark.parametrize(
    ("codec", "check", "text"),
    [
        (wrong(Int8, __hash__=None), kit.check_value, "unhashable"),
        (spoilt(Int8, lambda data, *_: np.append(data, np.uint8(0))), kit.check_sizes, "gave 1 bytes"),
        (spoilt(Int8, lambda _, values, __: values.fill(0)), kit.check_sizes, "encode changed the values"),
        (wrong(TopK, decode=leaves_zeros_out), kit.check_decoding, "where something else was before"),
        (wrong(TopK, add=adds_sparsely), kit.check_decoding, "add is not decode and a sum"),
        (wrong(Int8, exact=True), kit.check_decoding, "says that it is exact"),
        (wrong(Int8, decode=writes_beyond), kit.check_decoding, "wrote beside the array"),
        (spoilt(Int8, reads_beyond), kit.check_repeats, "other bytes from other memory"),
        (spoilt(Int8, counts_elsewhere), kit.check_states, "a copy of the state gave other bytes"),
        (wrong(TwoBit, has_residual=False), kit.check_states, "does not say `has_residual = True`"),
        (spoilt(ErrorFeedback, owes_a_little_less, Int8()), kit.check_feedback, "is owed, and the residual is"),
        (wrong(TwoBit, encode=never_forgets), kit.check_not_finite, "nan stays in the residual"),
        (spoilt(Int8, shares_scratch), kit.check_threads, "threads at the same time gave other bytes"),
        (wrong(Int8, check=lambda *_: None), kit.check_damaged, "no error|not MpikvError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_found(codec: Any, check: Any, text: str) -> None:
    with pytest.raises((AssertionError, TypeError), match=text):
        check(codec)


# --- through servers and back, by every path

REVERSED = codecs_of_tests.Reversed.name  # has to be decoded before it is added


def small_numbers(n: int, worker: int, round_: int = 0) -> np.ndarray:
    return ((np.arange(n) * 5 + worker + 3 * round_) % 7 - 3).astype(np.float32)


PART_BYTES = 32
SIZES = (1, 5, 8, 9, 40, 67)  # float32: 8 make a partition
MODES = every_way(Mode("dist_sync", 1, 1), Mode("dist_sync", 3, 2), Mode("dist_async", 2, 0), Mode("dist_async", 3, 2))
MODES += (HYBRID[0], HYBRID[2])


def run(mode: Mode, body: Any, codec: str, part_bytes: int = PART_BYTES) -> list[Any]:
    """Codecs are used although all ranks are on one host, and the keys are longer than elsewhere in these modes."""
    compression = make({"type": codec, "force": True, **({"error_feedback": False} if codec == "fp16" else {})})
    config, servers = mode.config(partition_bytes=part_bytes), mode.servers
    with long_messages() if mode.memory == "long" else contextlib.nullcontext():
        return spawn_stores(mode.name, mode.workers, body, num_servers=servers, config=config, compression=compression)


@pytest.mark.parametrize("codec", ["none", "fp16", REVERSED])
@pytest.mark.parametrize("inline", [False, True], ids=["fetched", "inline"])
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_through_servers_and_back(mode: Mode, inline: bool, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and cut over the servers, in partitions and behind their headers, alone and as lists, blocking or not."""
    monkeypatch.setattr("mpikv.strategies.client_key.INLINE_BYTES", INLINE_BYTES if inline else 0)
    W, keys = mode.workers, [str(n) for n in SIZES]

    def body(store: Any) -> Any:
        store.set_optimizer(optimizers.create("test"))
        store.init(keys, [np.zeros(n, np.float32) for n in SIZES])
        mine = [[small_numbers(n, store.rank, round_) for n in SIZES] for round_ in range(3)]
        store.push(keys, mine[0])
        for key, value in zip(keys, mine[1], strict=True):
            store.pushpull(key, value)
        store.pushpull(keys, mine[2], [np.empty(n, np.float64) for n in SIZES])
        store.barrier()
        return [value.tolist() for value in store.pull(keys)]

    expected = [sum(small_numbers(n, w, r) for w in range(W) for r in range(3)).tolist() for n in SIZES]
    assert run(mode, body, codec, 4096 if inline else PART_BYTES) == [expected] * W


@pytest.mark.parametrize("codec", ["fp16", REVERSED])
def test_an_optimizer_that_needs_the_whole_value(codec: str) -> None:
    """The server decodes partitions into one array, and the key moves to one server when the optimizer is set."""

    def body(store: Any) -> Any:
        found = []
        store.init("w", np.linspace(-1, 1, 67).astype(np.float32))
        store.pushpull("w", small_numbers(67, store.rank))
        store.set_optimizer(optimizers.create("lamb", learning_rate=0.1))
        for round_ in range(3):
            value = small_numbers(67, store.rank, round_)
            store.pushpull("w", value)
            found.append(value.tobytes())
        return found

    mode = Mode("dist_sync", 2, 2)
    assert run(mode, body, codec) == run(mode, body, "none")
