"""Keys in a second space beside those in host memory: the calls of a store of one process; what workers agree on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from boxed_space import Box, BoxedSpace
from foreign_arrays import ForeignDevice
from store_modes import DTYPES, Mode

from mpikv import KVStore, Parameter, ShapeMismatch, Trainer, UnsupportedError, optimizers, spec
from mpikv.assembly import local_store
from mpikv.keys import KeyInfo
from mpikv.session.agreement import Agreement
from mpikv.session.rules import RULES
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import DEVICE, HOST, Spaces
from mpikv.strategies.base import Entry, Sink
from mpikv.testing.fake_gpu import FakeGpu
from mpikv.testing.stores import spawn_stores

N = 24
FLOAT32 = np.dtype(np.float32)
NAMES = pytest.mark.parametrize("name", ["local", "device"])


def made(name: str = "local") -> tuple[KVStore, BoxedSpace]:
    space = BoxedSpace()
    return local_store(name, spec.parse(name), spaces=Spaces(device=space)), space


def numbers(dtype: Any = np.float32, shape: Any = (2, 3)) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)) % 5 + 1).astype(dtype).reshape(shape)


def space_of(store: KVStore, key: str) -> str:
    return store.session.infos[key].space


# --- where a key is


def test_a_key_is_where_its_first_value_is() -> None:
    store, space = made()
    store.init(["h", "d"], [numbers(), space.array(numbers())])
    assert [space_of(store, key) for key in "hd"] == [HOST, DEVICE]
    assert space.crossings() == (0, 0)


def test_all_keys_of_a_device_store_are_on_the_device() -> None:
    store, space = made("device")
    store.init(["h", "d"], [numbers(), space.array(numbers())])
    assert [space_of(store, key) for key in "hd"] == [DEVICE, DEVICE]
    assert space.crossings() == (0, 1)


@NAMES
def test_without_a_device_all_keys_are_in_host_memory(name: str) -> None:
    store = local_store(name, spec.parse(name))
    store.init(["h", "d"], [numbers(), ForeignDevice().asarray(numbers())])
    assert [space_of(store, key) for key in "hd"] == [HOST, HOST]


def test_the_key_of_a_space_that_a_worker_does_not_have() -> None:
    with pytest.raises(UnsupportedError, match="key 'w' is in device memory, and this worker uses no device"):
        Spaces().of(KeyInfo("w", 0, (1,), FLOAT32, space=DEVICE))


# --- calls


@pytest.mark.grid
@NAMES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_every_call_of_one_array(name: str, dtype: Any, shape: Any) -> None:
    """What is on the device stays there: nothing crosses where all arrays of a call are there."""
    store, space = made(name)
    first = numbers(dtype, shape)
    store.broadcast("w", space.array(first), out := space.array(np.zeros(shape, dtype)))
    assert np.array_equal(out.memory, first)
    pushed = space.array(first)
    store.push("w", pushed)
    pushed.memory[...] = 0  # the push has taken its values
    store.pull("w", out)
    assert np.array_equal(out.memory, first)
    store.push("w", [space.array(first), space.array(first), space.array(first)])
    wide = space.array(np.zeros(shape, np.float64))
    store.pull("w", [out, wide])
    assert np.array_equal(out.memory, 3 * first)
    assert np.array_equal(wide.memory, 3 * first)
    both = space.array(first), space.array(first)
    store.pushpull("w", both)
    assert all(np.array_equal(one.memory, 2 * first) for one in both)
    store.pushpull("w", both, op="max")
    assert np.array_equal(both[0].memory, 2 * first)
    store.pushpull_async("w", space.array(first), out=out).wait()
    assert np.array_equal(out.memory, first)
    store.wait_all()
    assert space.crossings() == (0, 0)
    assert space.fake.gets == space.fake.sets == 0
    assert np.array_equal(store.pull("w"), first)
    assert space.crossings() == (1, 0)


@NAMES
def test_lists_of_keys_of_both_spaces(name: str) -> None:
    store, space = made(name)
    keys, there = ["a", "b", "c"], space.array(numbers())
    store.init(keys, [numbers(), there, numbers()])
    values = [[numbers(), space.array(numbers())], there, space.array(numbers())]
    outs = [np.zeros((2, 3), np.float32), [np.zeros((2, 3)), space.array(np.zeros((2, 3)))], there]
    store.push(keys, values)
    store.pull(keys, outs)
    assert np.array_equal(outs[0], 2 * numbers())
    assert np.array_equal(outs[1][0], numbers())
    assert np.array_equal(outs[1][1].memory, numbers())
    assert np.array_equal(there.memory, numbers())
    store.pushpull([*keys, "a"], [*values, numbers()], out=[*outs, outs[0]])
    assert np.array_equal(outs[0], 3 * numbers())
    assert space.fake.gets == space.fake.sets == 0


def test_arrays_cross_where_a_call_brings_others_than_the_key_is() -> None:
    """Each array that crosses is counted; those of one worker are added where they are before they cross."""
    store, space = made()
    store.init(["h", "d"], [numbers(), space.array(numbers())])
    there = [space.array(numbers()) for _ in range(3)]
    space.crossings()
    store.push("h", there)
    assert space.crossings() == (1, 0)
    store.push("h", [*there, numbers()])
    assert space.crossings() == (3, 0)
    store.pull("h", there[0])
    assert space.crossings() == (0, 1)
    assert np.array_equal(there[0].memory, 4 * numbers())
    store.push("d", [numbers(), there[1]])
    assert space.crossings() == (0, 1)
    store.pull("d", [there[0], np.empty((2, 3))])
    assert space.crossings() == (1, 0)
    assert np.array_equal(there[0].memory, 2 * numbers())


def test_arrays_of_the_space_itself_are_arrays_of_the_callers() -> None:
    """In calls of a store with the space, and, by way of the host, of one without."""
    store, space = made()
    mine = space.from_host(numbers().reshape(-1)).reshape((2, 3))
    store.init("w", mine)
    assert space_of(store, "w") == DEVICE
    space.crossings()
    store.pushpull("w", mine)
    store.pull("w", mine)
    found = store.pull("w", like=mine)
    assert (type(found), found.shape, found.dtype) == (Box, (2, 3), FLOAT32)
    assert space.crossings() == (0, 0)
    assert np.array_equal(space.to_host(found.reshape(-1)), numbers().reshape(-1))
    other = local_store("local", spec.parse("local"))
    other.init("w", mine)
    other.pushpull("w", [mine, mine])
    assert np.array_equal(other.pull("w"), 2 * numbers())
    assert np.array_equal(space.to_host(mine.reshape(-1)), 2 * numbers().reshape(-1))


class Shown:
    """An array of a library that says where it is on a GPU and nothing else, as Numba's do."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self.array = array

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.array.__cuda_array_interface__


def test_arrays_that_only_show_where_they_are() -> None:
    gpu = FakeGpu()
    store = local_store("local", spec.parse("local"), spaces=Spaces(device=DeviceSpace(gpu)))
    shown = Shown(gpu.array(numbers()))
    store.init(["h", "d"], [numbers(), shown])
    assert [space_of(store, key) for key in "hd"] == [HOST, DEVICE]
    store.pushpull(["h", "d"], [[shown, shown], shown], out=[np.empty((2, 3)), shown])
    assert np.array_equal(store.pull("h"), 2 * numbers())
    assert np.array_equal(shown.array.get(), numbers())
    other = local_store("local", spec.parse("local"))
    other.init("w", numbers())
    for call in (other.push, other.pull, other.pushpull):
        with pytest.raises(UnsupportedError, match="Shown is in device memory, and only a store that uses this GPU"):
            call("w", shown)


def test_what_does_not_fit_is_refused_without_looking_at_values() -> None:
    store, space = made()
    store.init("w", space.array(numbers()))
    with pytest.raises(ShapeMismatch, match=r"key 'w' is float32 \(2, 3\), this array is float32 \(6,\)"):
        store.push("w", space.from_host(numbers().reshape(-1)))
    with pytest.raises(ShapeMismatch, match="this array is float64"):
        store.push("w", space.array(numbers(np.float64)))
    space.crossings()
    read_only = space.array(numbers())
    box = Box(space, read_only.memory)
    read_only.memory.flags.writeable = False
    with pytest.raises(UnsupportedError, match="out of key 'w' is read-only"):
        store.pull("w", out=box)
    assert space.crossings() == (0, 0)
    assert space.fake.gets == 0


def test_where_a_result_goes_is_seen_in_the_callers_thread() -> None:
    """However late, and by whatever thread, it is written."""
    store, space = made()
    store.init("w", space.array(numbers()))
    info, out = store.session.infos["w"], space.array(np.zeros((2, 3)))
    seen = space.seen
    sink = Sink(info, [out], store.session.spaces)
    assert space.seen == seen + 1
    other = threading.Thread(target=store.strategy.exchange, args=([Entry(info, None, sink)], 0))
    other.start()
    other.join(60)
    assert np.array_equal(out.memory, numbers())
    assert space.seen == seen + 1


# --- arrays of the store's


@pytest.mark.parametrize("device", ["gpu", "cuda", "gpu:3", 3, np.int64(3)])
def test_arrays_on_the_device(device: Any) -> None:
    space = BoxedSpace(device=3)
    store = local_store("local", spec.parse("local"), spaces=Spaces(device=space))
    assert store.device == 3
    one = store.zeros((2, 3), "float16", device=device)
    assert (type(one), one.shape, one.dtype) == (Box, (2, 3), np.float16)
    assert not one._memory.any()
    several = store.empty([(2,), (0,), ()], device=device)
    assert [array.shape for array in several] == [(2,), (0,), ()]
    assert np.may_share_memory(several[0]._memory.base, several[2]._memory.base)
    assert space.crossings() == (0, 0)
    store.init("w", several[0])
    assert space_of(store, "w") == DEVICE
    assert type(store.zeros(3, device="cpu")) is np.ndarray


def test_arrays_on_a_device_that_the_store_does_not_use() -> None:
    none = local_store("local", spec.parse("local"), spaces=Spaces(missing="CuPy is not installed"))
    assert none.device is None
    with pytest.raises(UnsupportedError, match=r"device='gpu': worker 0 of 1 uses no GPU: CuPy is not installed"):
        none.zeros(2, device="gpu")
    store, _ = made()
    with pytest.raises(UnsupportedError, match=r"device=1: worker 0 of 1 uses GPU 0"):
        store.empty(2, device=1)
    for wrong in ("tpu", -1, 1.5, True):
        with pytest.raises(ValueError, match="is no device"):
            store.empty(2, device=wrong)


@pytest.mark.parametrize("servers", [0, 1])
def test_workers_of_which_one_has_no_device(servers: int) -> None:
    """All get an error, and none waits for the others."""
    mode = Mode("dist_sync", 2, servers)
    spaces = [Spaces(device=BoxedSpace(7)), Spaces(missing="it has none"), Spaces()][: 2 + servers]

    def body(store: Any) -> Any:
        with pytest.raises(ShapeMismatch, match=r"on a GPU; .* but worker 1 of 2 uses no GPU: it has none"):
            store.zeros(2, device="gpu")
        return store.device

    found = spawn_stores("dist_sync", 2, body, config=mode.config(), num_servers=servers, spaces=spaces)
    assert found == [7, None]


# --- on a GPU that finds mistakes in the order of work


def changed(arrays: list[Any], by: int) -> None:
    """Put work on them into the current stream."""
    for i in range(len(arrays)):
        arrays[i] += by


@NAMES
@pytest.mark.parametrize("seed", range(4))
def test_calls_with_streams_of_the_callers(name: str, seed: int) -> None:
    """Arrays that are still being written to when they are pushed, and changed when the call has returned.

    Each call is made in another stream, and what it has read and written is used there at once.
    """
    gpu = FakeGpu(seed=seed)
    store = local_store(name, spec.parse(name), spaces=Spaces(device=DeviceSpace(gpu)))
    store.init(["h", "d"], [numbers(), gpu.array(numbers())])
    outs = [gpu.array(np.zeros((2, 3), np.float32)) for _ in "hd"]
    for i in range(1, 5):
        gpu.synchronize()
        with gpu.user_stream():
            values = [gpu.array(numbers()) for _ in "hd"]
            changed(values, i)
            store.push(["h", "d"], values)
            changed(values, 100)
            store.pull(["h", "d"], outs)
            changed(outs, 1)
            assert all(np.array_equal(out.get(), numbers() + i + 1) for out in outs)
            store.pushpull(["h", "d"], outs)
            changed(outs, 1)
            assert all(np.array_equal(out.get(), numbers() + i + 2) for out in outs)
    assert np.array_equal(store.pull("d"), store.pull("h"))


def test_arrays_of_the_stores_on_a_gpu() -> None:
    gpu = FakeGpu(2)
    store = local_store("local", spec.parse("local"), spaces=Spaces(device=DeviceSpace(gpu)))
    assert store.device == 2
    one, other = store.zeros([(2, 3), (2,)], "float64", device="gpu:2")
    assert (one.shape, other.shape, one.dtype) == ((2, 3), (2,), np.float64)
    assert other.get().tolist() == [0, 0]
    one += 1
    store.init("w", one)
    assert space_of(store, "w") == DEVICE
    store.pushpull("w", [one, one])
    assert np.array_equal(one.get(), np.full((2, 3), 2.0))


# --- updates

OPTIMIZERS = (
    "sgd",
    "nag",
    "signum",
    "adam",
    "adamw",
    "adagrad",
    "rmsprop",
    "adadelta",
    "ftrl",
    "dcasgd",
    "lamb",
    "lars",
)


def trained(store: KVStore, space: BoxedSpace, where: str, dtype: Any, steps: int = 3) -> None:
    def put(values: np.ndarray) -> Any:
        return space.array(values) if where == DEVICE else values

    if "w" not in store:
        store.init("w", put(numbers(dtype)))
    for i in range(steps):
        store.push("w", put(numbers(dtype) * np.array(i, dtype)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_and_their_states(kind: str, dtype: str, tmp_path: Any) -> None:
    """The same bits as in host memory, also in the file; what is loaded goes on in the space, with the same bits."""
    values, files = [], []
    for where in (HOST, DEVICE):
        store, space = made()
        store.set_optimizer(optimizers.create(kind, learning_rate=0.125, multi_precision=True))
        trained(store, space, where, dtype)
        assert space.crossings() == (0, 0)
        store.save_optimizer_states(path := str(tmp_path / where), dump_optimizer=True)
        saved = space.crossings()
        trained(store, space, where, dtype)
        values.append(store.pull("w"))
        files.append((tmp_path / where).read_bytes())
        again, space = made()
        again.set_optimizer(optimizers.create(kind, learning_rate=0.125, multi_precision=True))
        trained(again, space, where, dtype, steps=0)
        again.load_optimizer_states(path)
        state = again.strategy._owner.states[0]
        arrays = [array for array in state.values() if hasattr(array, "dtype")]
        assert {type(array) for array in arrays} <= {np.ndarray if where == HOST else Box}
        assert (len(arrays), space.crossings()[1]) == ((saved[0],) * 2 if where == DEVICE else (len(arrays), 0))
        trained(again, space, where, dtype)
        again.save_optimizer_states(str(tmp_path / "again"))
    assert values[0].tobytes() == values[1].tobytes()
    assert files[0] == files[1]


def test_a_file_of_one_space_is_read_in_the_other(tmp_path: Any) -> None:
    results = []
    for first, then in ((HOST, DEVICE), (DEVICE, HOST), (HOST, HOST)):
        store, space = made()
        store.set_optimizer(optimizers.create("adam"))
        trained(store, space, first, np.float32)
        store.save_optimizer_states(str(tmp_path / "states"))
        other, space = made()
        other.set_optimizer(optimizers.create("adam"))
        trained(other, space, then, np.float32, steps=0)
        other.load_optimizer_states(str(tmp_path / "states"))
        trained(other, space, then, np.float32)
        results.append(other.pull("w").tobytes())
    assert results[0] == results[1] == results[2]


def test_an_updater_gets_arrays_of_the_space() -> None:
    store, space = made()
    seen = []

    def updater(key: str, total: Any, stored: Any) -> None:
        seen.append((key, type(total), type(stored), total.shape))
        np.add(stored, total, out=stored)

    store.set_updater(updater)
    store.init(["h", "d"], [numbers(), space.array(numbers())])
    store.push(["h", "d"], [numbers(), space.array(numbers())])
    assert seen == [("h", np.ndarray, np.ndarray, (2, 3)), ("d", Box, Box, (2, 3))]
    assert np.array_equal(store.pull("d"), 2 * numbers())


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
def test_a_function_as_the_optimizer(dtype: str, tmp_path: Any) -> None:
    """It gets arrays of the space, may keep some as its state, and their file is that of host memory."""
    kinds = set()

    def function(weight: Any, grad: Any, state: Any) -> Any:
        kinds.add((type(weight), type(grad)))
        if state is None:
            made = getattr(weight, "space", None)
            state = np.zeros_like(weight) if made is None else made.zeros(weight.size, weight.dtype).reshape((2, 3))
        np.subtract(weight, grad, out=weight, casting="unsafe")
        np.add(state, weight, out=state)
        return {"sum": state, "count": 1}

    def kept(weight: Any, grad: Any, state: Any) -> Any:
        return function(weight, grad, None if state is None else state["sum"])

    values, files = [], []
    for where in (HOST, DEVICE):
        store, space = made()
        store.set_optimizer(optimizers.create(kept, rescale_grad=0.5))
        trained(store, space, where, dtype)
        store.save_optimizer_states(path := str(tmp_path / where))
        files.append((tmp_path / where).read_bytes())
        store.load_optimizer_states(path)
        trained(store, space, where, dtype)
        values.append(store.pull("w"))
    assert kinds == {(np.ndarray, np.ndarray), (Box, Box)}
    assert values[0].tobytes() == values[1].tobytes()
    assert files[0] == files[1]


def test_an_optimizer_takes_no_arrays_of_other_libraries() -> None:
    optimizer = optimizers.create("sgd")
    for wrong in ([1.0], ForeignDevice().asarray([1.0]), object()):
        with pytest.raises(TypeError, match="sgd: weight is a NumPy array, not"):
            optimizer.init(wrong)
        with pytest.raises(TypeError, match="sgd: grad is a NumPy array, not"):
            optimizer.check_update("w", np.ones(1), wrong)


def test_one_optimizer_serves_stores_with_different_devices() -> None:
    """The user's own object, in turn in each of them."""
    optimizer, stores = optimizers.create("adam"), [made(), made()]
    for store, space in stores:
        store.set_optimizer(optimizer)
        store.init("w", space.array(numbers()))
    for _ in range(2):
        for store, space in stores:
            store.push("w", space.array(numbers()))
    (one, _), (other, _) = stores
    assert one.pull("w").tobytes() == other.pull("w").tobytes()


# --- several workers


def verdicts(payloads: list[Any]) -> list[Any]:
    labels = [f"worker {i} on h" for i in range(len(payloads))]
    agreement = Agreement(labels, RULES, lambda name, payload: [0, *payload, None])
    return [v for i, payload in enumerate(payloads) for v in agreement.propose(i, [("init", "w", payload)])]


def test_workers_that_bring_arrays_of_different_memory() -> None:
    brought = [[[2], "float32", "none", space, False] for space in (HOST, DEVICE, HOST)]
    found = verdicts(brought)
    assert len(found) == 3
    for verdict in found:
        assert verdict.error == (
            "ShapeMismatch",
            "init of key 'w' in different kinds of memory on different workers: worker 0 on h, worker 2 on h: host "
            "memory; worker 1 on h: device memory. Let all of them bring arrays of one kind; in a store of a device "
            "type each worker needs a GPU, or none has one",
        )
    for verdict in verdicts([[[2], "float32", "none", HOST, False], [[3], "float32", "none", DEVICE, False]]):
        kind, text = verdict.error
        assert kind == "ShapeMismatch"
        assert "worker 0 on h: float32 (2,); worker 1 on h: float32 (3,) in device memory" in text
    assert all(verdict.error is None for verdict in verdicts([[[2], "float32", "none", DEVICE, False]] * 2))


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_a_key_of_the_host_takes_and_gives_arrays_of_a_device(memory: str) -> None:
    mode = Mode("dist_sync", 2, memory=memory)
    spaces = [Spaces(device=BoxedSpace()) for _ in range(2)]

    def body(store: Any) -> Any:
        space = store.session.spaces.device
        store.init("h", numbers())
        there = space.array(numbers())
        store.push("h", there)
        store.pull("h", out := space.array(np.zeros((2, 3))))
        store.pushpull("h", there)
        return np.array_equal(out.memory, 2 * numbers()) and np.array_equal(there.memory, 2 * numbers())

    assert spawn_stores("dist_sync", 2, body, config=mode.config(), spaces=spaces) == [True, True]
    assert all(space.device.crossings() == (2, 2) for space in spaces)


@pytest.mark.parametrize("name", ["dist_sync", "dist_async", "dist_sync_device"])
@pytest.mark.parametrize("memory", ["auto", "off"])
def test_keys_on_servers_are_in_host_memory(name: str, memory: str) -> None:
    mode = Mode(name, 2, 1, memory=memory)
    spaces = [Spaces(device=BoxedSpace()) for _ in range(3)]

    def body(store: Any) -> Any:
        space = store.session.spaces.device
        store.init("w", space.array(numbers()))
        store.set_optimizer(optimizers.create("test"))
        store.push("w", space.array(numbers()))
        store.barrier()
        store.pull("w", out := space.array(np.zeros((2, 3))))
        store.barrier()
        return space_of(store, "w"), np.array_equal(out.memory, 3 * numbers())

    assert spawn_stores(name, 2, body, num_servers=1, config=mode.config(), spaces=spaces) == [(HOST, True)] * 2


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_a_worker_that_brings_another_kind_than_the_others(memory: str) -> None:
    """All of them learn of it, and can go on with other keys."""
    mode, gpu = Mode("dist_sync", 2, memory=memory, device="staged"), FakeGpu()
    gpus = [gpu, gpu.view()]

    def body(store: Any) -> Any:
        there = gpus[store.rank].array(numbers())
        with pytest.raises(ShapeMismatch, match=r"init of key 'w' in different kinds of memory .*worker 0 .*: device"):
            store.init("w", numbers() if store.rank else there)
        store.init(["h", "d"], [numbers(), there])
        store.pushpull(["h", "d"], [there, there], out=[a := np.empty((2, 3)), b := np.empty((2, 3))])
        return [space_of(store, key) for key in "hd"], np.array_equal(a, b)

    found = spawn_stores("dist_sync", 2, body, config=mode.config(), drivers=gpus)
    assert found == [([HOST, DEVICE], True)] * 2


# --- a trainer


@pytest.mark.parametrize("on_store", [True, False])
@NAMES
def test_a_trainer_over_such_a_store(name: str, on_store: bool, tmp_path: Any) -> None:
    """The same weights, and the same file of states, as over a store without a device."""
    results = []
    for spaces in (None, Spaces(device=BoxedSpace())):
        store = local_store(name, spec.parse(name), spaces=spaces)
        params = {key: Parameter(numbers()) for key in "vw"}
        trainer = Trainer(params, "adam", kvstore=store, update_on_kvstore=on_store)
        for _ in range(3):
            for parameter in params.values():
                parameter.grad[...] = numbers()
            trainer.step(2)
        trainer.save_states(path := str(tmp_path / "states"))
        trainer.load_states(path)
        trainer.step(2)
        results.append([parameter.data.tobytes() for parameter in params.values()])
        results[-1].append((tmp_path / "states").read_bytes())
    assert results[0] == results[1]
