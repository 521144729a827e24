"""`set_gradient_compression`: what it takes, which keys it is for, and what comes back from servers by a codec."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from store_modes import Mode, every_way, long_messages, mode_id

from mpikv import ConfigError, MpikvError, Parameter, ShapeMismatch, Trainer, kv, optimizers
from mpikv.codecs import compression, registry
from mpikv.codecs.base import Codec, State
from mpikv.codecs.compression import NONE, KeyCompression, make
from mpikv.strategies.client_key import INLINE_BYTES
from mpikv.testing.stores import spawn_stores
from mpikv.transports import wire

PART_BYTES = 32
SIZES = (1, 5, 9, 40, 67)


@registry.register
@dataclass(frozen=True)
class Rest(Codec):
    """Whole numbers as int8, and what is left of them with the next push: for sums, and not for weights."""

    name = "rest of tests"
    has_residual = True
    step: float = 1.0

    def wire_bytes(self, n_elems: int, dtype: np.dtype[Any]) -> int:
        return n_elems

    def init(self, n_elems: int) -> State:
        return {"residual": np.zeros(n_elems, np.float32)}

    def encode(self, values: np.ndarray, state: State) -> np.ndarray:
        owed = state["residual"] + values
        data = np.floor(owed / self.step).astype(np.int8)
        state["residual"][...] = owed - data.astype(np.float32) * np.float32(self.step)
        return data.view(np.uint8)

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        out[...] = data.view(np.int8) * np.float32(self.step)


# --- what it takes


def test_a_compression_has_one_text() -> None:
    for params in (
        "fp16",
        {"type": "fp16"},
        {"type": "rest of tests", "step": 0.5, "pull": {"type": "bf16"}, "force": True},
        {"type": "none", "pull": "fp16"},
        None,
        "none",
        {"type": "none", "force": True},
    ):
        found = make(params)
        assert compression.of_text(found.text) == found
    assert make("fp16").text == "fp16"
    assert make("none") == make(None) == make({"type": "none", "force": True}) == NONE
    assert make({"pull": "fp16", "type": "none"}).text == make({"type": "none", "pull": {"type": "fp16"}}).text
    step = make({"type": "rest of tests", "step": 0.5})
    assert eval(repr(step.push), {"Rest": Rest}) == step.push


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"type": "zip"}, ValueError, "unknown compression type 'zip'; known: .*bf16, .*fp16, .*none"),
        ({"type": "fb16"}, ValueError, "Did you mean 'fp16'"),
        ({"threshold": 0.5}, TypeError, "a dict with 'type'"),
        ({"type": 2}, TypeError, "a dict with 'type'"),
        ({"type": "fp16", "threshold": 0.5}, TypeError, "'fp16' takes error_feedback, not 'threshold'"),
        ({"type": "rest of tests", "size": 1}, TypeError, "takes step, not 'size'"),
        ({"type": "fp16", "force": 1}, TypeError, "'force' is True or False, not 1"),
        ({"type": "fp16", "pull": "zip"}, ValueError, "unknown compression type 'zip'"),
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
    store.set_gradient_compression({"type": "rest of tests", "force": True})
    store.init("w", np.zeros(2, np.float32))
    store.push("w", np.full(2, 0.7, np.float32))
    assert store.pull("w").tolist() == np.full(2, 0.7, np.float32).tolist()
    with pytest.raises(MpikvError, match="after init of key 'w'"):
        store.set_gradient_compression({"type": "fp16"})
    store.set_gradient_compression({"type": "fp16"}, keys="v")
    with pytest.raises(TypeError, match="a store does not mix"):
        store.set_gradient_compression({"type": "fp16"}, keys=["u", 5])


def codecs_of(store: Any, *keys: str) -> list[str]:
    return [store.session.infos[key].codec for key in keys]


HOSTS = ["one", "one", "other"]


@pytest.mark.parametrize("hosts", [None, HOSTS], ids=["one host", "two hosts"])
def test_which_keys_are_compressed(hosts: list[str] | None) -> None:
    """Those named, or all new ones; never integers; and on one host only where it is forced."""

    def body(store: Any) -> Any:
        store.set_gradient_compression({"type": "fp16", "pull": "bf16"})
        store.set_gradient_compression({"type": "rest of tests", "force": True}, keys=["b", "i"])
        store.set_gradient_compression(None, keys="c")
        store.init(["a", "b", "c"], [np.zeros(5, np.float32)] * 3)
        store.init("i", np.zeros(5, np.int32))
        store.set_gradient_compression({"type": "fp16"}, keys="d")
        store.init("d", np.zeros(5, np.float64))
        return codecs_of(store, "a", "b", "c", "i", "d")

    both = '{"pull": {"type": "bf16"}, "type": "fp16"}' if hosts else "none"
    forced = '{"force": true, "step": 1.0, "type": "rest of tests"}'
    expected = [both, forced, "none", "none", "fp16" if hosts else "none"]
    assert spawn_stores("dist_sync", 2, body, num_servers=1, hosts=hosts) == [expected] * 2


def test_workers_that_differ_are_told_what_each_brought() -> None:
    def body(store: Any) -> Any:
        store.set_gradient_compression({"type": "fp16" if store.rank else "bf16"})
        with pytest.raises(ShapeMismatch, match=r"worker 0 .* as bf16; worker 1 .* as fp16"):
            store.init("w", np.zeros(5, np.float32))

    spawn_stores("dist_sync", 2, body, num_servers=1, hosts=HOSTS)


# --- what comes back

MODES = every_way(Mode("dist_sync", 1, 1), Mode("dist_sync", 3, 2), Mode("dist_async", 3, 2), Mode("dist_async", 2, 0))
PULL16 = make({"type": "none", "pull": "fp16", "force": True})


def run(mode: Mode, body: Any, found: KeyCompression, **changes: Any) -> list[Any]:
    with long_messages() if mode.memory == "long" else contextlib.nullcontext():
        return spawn_stores(
            mode.name,
            mode.workers,
            body,
            num_servers=mode.servers,
            config=mode.config(**changes),
            compression=found,
        )


@pytest.mark.grid
@pytest.mark.parametrize("inline", [False, True], ids=["fetched", "inline"])
@pytest.mark.parametrize("mode", MODES, ids=mode_id)
def test_values_come_back_rounded_and_stay_whole_at_their_owner(
    mode: Mode, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, as lists, blocking and not. What no worker has pushed yet comes as `init` brought it."""
    monkeypatch.setattr("mpikv.strategies.client_key.INLINE_BYTES", INLINE_BYTES if inline else 0)
    keys, first = [str(n) for n in SIZES], 1 + 2.0**-20

    def body(store: Any) -> Any:
        store.set_optimizer(optimizers.create("test"))
        store.init(keys, [np.full(n, first, np.float32) for n in SIZES])
        before = [np.unique(value).tolist() for value in store.pull(keys)]
        store.barrier()
        found = []
        for _ in range(3):
            for key, n in zip(keys, SIZES, strict=True):
                store.pushpull(key, np.full(n, 2.0**-12, np.float32))
            store.push(keys, [np.full(n, 2.0**-12, np.float32) for n in SIZES])
            store.wait_all()
            store.barrier()
            found += [np.unique(value).tolist() for value in store.pull(keys)]
            wide = [np.empty(n, np.float64) for n in SIZES]
            store.pull_async(keys, wide).wait()
            assert [np.unique(value).tolist() for value in wide] == found[-len(SIZES) :]
            store.barrier()
        return before, found

    expected = []
    for round_ in range(1, 4):
        whole = np.float32(first) + np.float32(2.0**-12 * 2 * round_ * mode.workers)
        expected += [[float(np.float16(whole))]] * len(SIZES)
    partition_bytes = 4096 if inline else PART_BYTES
    assert run(mode, body, PULL16, partition_bytes=partition_bytes) == [([[first]] * 5, expected)] * mode.workers


def test_the_bytes_of_what_comes_back() -> None:
    """The answer to a whole key and to one in partitions, by messages; a server sends half of what it holds."""
    n, large = 1000, INLINE_BYTES // 4 * 3

    def body(store: Any, item_bytes: int = 2) -> Any:
        client = store.strategy._client.transport
        received: list[int] = []
        irecv = client.irecv

        def counted(data: np.ndarray, source: int, tag: int) -> Any:
            if tag >= wire.TAG_REPLY:
                received.append(data.nbytes)
            return irecv(data, source, tag)

        client.irecv = counted
        store.init(["small", "large"], [np.zeros(n, np.float32), np.zeros(large, np.float32)])
        for key, size in (("small", n), ("large", large)):
            store.pull(key)
            store.pushpull(key, np.ones(size, np.float32))
            store.pushpull([key], [np.ones(size, np.float32)])
        return received

    (found,) = run(Mode("dist_sync", 1, 1, memory="off"), body, PULL16, partition_bytes=INLINE_BYTES)
    partitions = [INLINE_BYTES // 2] * 3
    assert found == [n * 4, n * 2, n * 2, *[INLINE_BYTES] * 3, *partitions, *partitions]


def test_a_key_that_moves_to_one_server_takes_its_full_precision_along() -> None:
    value = np.float32(1 + 2.0**-20)

    def body(store: Any) -> Any:
        store.init("w", np.full(67, value))
        store.pushpull("w", np.full(67, value))
        store.set_optimizer(optimizers.create("lamb", learning_rate=0.0))
        store.push("w", np.ones(67, np.float32))
        store.barrier()
        return store.strategy._keys[0].compression.pull.name

    with pytest.MonkeyPatch.context() as patch:
        seen: list[float] = []
        cut = "mpikv.strategies.client_key.ClientKey.first_values"
        from mpikv.strategies.client_key import ClientKey

        whole = ClientKey.first_values
        patch.setattr(cut, lambda self, value: seen.extend(np.unique(value).tolist()) or whole(self, value))
        assert run(Mode("dist_sync", 1, 2), body, PULL16, partition_bytes=PART_BYTES, bigarray_bound_elems=8)
    assert seen == [float(value)] * 2


@pytest.mark.parametrize("mode", [Mode("dist_sync", 3, 2), Mode("dist_sync", 2, 1, memory="off")], ids=mode_id)
def test_what_a_sum_still_owes_comes_with_the_next_one(mode: Mode) -> None:
    """By a codec with a state, where nothing updates the key: encoded once for all workers, who get the same bytes."""
    rest = make({"type": "none", "pull": {"type": "rest of tests", "step": 1.0}, "force": True})

    def body(store: Any) -> Any:
        store.init("w", np.zeros(67, np.float32))
        found = []
        for _ in range(4):
            out = np.empty(67, np.float32)
            store.pushpull("w", np.full(67, np.float32(0.75 / mode.workers)), out)
            found += np.unique(out).tolist()
        return found

    found = run(mode, body, rest, partition_bytes=PART_BYTES)
    assert found == [[0.0, 1.0, 1.0, 1.0]] * mode.workers


def test_weights_come_back_by_codecs_that_round_alone() -> None:
    rest = make({"type": "none", "pull": "rest of tests", "force": True})

    def body(store: Any) -> Any:
        store.init("w", np.zeros(5, np.float32))
        with pytest.raises(ConfigError, match=r"set_optimizer: .* key 'w' .* 'pull': 'rest of tests'"):
            store.set_optimizer("sgd")
        store.pushpull("w", value := np.ones(5, np.float32))
        return value.tolist()

    assert run(Mode("dist_sync", 2, 1), body, rest) == [[2.0] * 5] * 2

    feedback = make({"type": "none", "pull": {"type": "bf16", "error_feedback": True}, "force": True})

    def owing(store: Any) -> None:
        store.init("w", np.zeros(5, np.float32))
        with pytest.raises(ConfigError, match=r"'pull': 'bf16' with 'error_feedback' .*: leave 'error_feedback' away"):
            store.set_optimizer("sgd")

    run(Mode("dist_sync", 2, 1), owing, feedback)

    def late(store: Any) -> None:
        store.set_optimizer("sgd")
        with pytest.raises(ConfigError, match=r"init: .* key 'w'"):
            store.init("w", np.zeros(5, np.float32))

    run(Mode("dist_sync", 2, 1), late, rest)


# --- what is not compressed

COARSE = make({"type": "rest of tests", "step": 16.0, "pull": "fp16", "force": True})


@pytest.mark.parametrize("inline", [False, True], ids=["fetched", "inline"])
def test_sums_alone_are_compressed(inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean is a sum; a maximum, and what is pushed while compression is suspended, travel as they are."""
    monkeypatch.setattr("mpikv.strategies.client_key.INLINE_BYTES", INLINE_BYTES if inline else 0)
    exact = 1 + 2.0**-20

    def body(store: Any) -> Any:
        found = []
        store.init("w", np.zeros(67, np.float32))
        for op, value in (("sum", 17), ("max", exact + store.rank), ("mean", 15 + 32)):
            store.pushpull("w", array := np.full(67, value, np.float32), op=op)
            found += np.unique(array).tolist()
        with store.session.compressions.suspend():
            store.pushpull("w", array := np.full(67, exact, np.float32))
            found += np.unique(array).tolist()
        return found

    expected = [32.0, exact + 1, 48.0, 2 * exact]  # of 17 one is owed, so that 48 are pushed with 47
    for mode in (Mode("dist_sync", 2, 1), Mode("dist_sync", 2, 2, memory="off")):
        assert run(mode, body, COARSE, partition_bytes=4096 if inline else PART_BYTES) == [expected] * 2


def test_a_trainer_resumes_the_very_weights(tmp_path: Any) -> None:
    """They are brought to the servers as they are, though gradients are not."""

    def body(store: Any) -> Any:
        weight = Parameter(np.full(67, 1 + 2.0**-20, np.float32))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, store, {"type": "rest of tests", "force": True})
        weight.grad[...] = 0.75
        trainer.step(2)
        trainer.save(tmp_path / "checkpoint")
        return weight.data.tobytes()

    def second(store: Any) -> bool:
        weight = Parameter(np.zeros(67, np.float32))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, store, {"type": "rest of tests", "force": True})
        assert trainer.resume(tmp_path / "checkpoint") == 1
        return weight.data.tobytes() == saved[0]

    saved = run(Mode("dist_sync", 2, 2), body, NONE)
    assert saved[0] == saved[1]
    assert run(Mode("dist_sync", 2, 2), second, NONE) == [True] * 2
