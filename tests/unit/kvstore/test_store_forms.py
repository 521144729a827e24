"""Every form of argument that a call takes, and what it says of every other one."""

from __future__ import annotations

import numpy as np
import pytest
from foreign_arrays import ForeignArray, ForeignDevice
from on_workers import on, uniform
from store_modes import FEW, FEW_DIST_SYNC, Mode

from mpikv import KVStore, UnsupportedError, kv, optimizers

EVERY_KIND = on(*FEW)
SYNC_KINDS = on(Mode("local", 1), *FEW_DIST_SYNC)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


class Tensor:
    """An array that has DLPack and nothing else."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack__(self, **kwargs):
        return self.memory.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


@SYNC_KINDS
def test_forms_of_push_and_pull(store, W):
    store.init("a", np.zeros((2, 3), np.float32))
    store.init(["b", "c"], [ones(4), ones(2)])
    store.init(("d",), (ones(1),))

    def first(*keys):
        return [store.pull(key).flat[0] / W for key in keys]

    store.push("a", ones(2, 3))
    assert first("a") == [1]
    store.push("a", [ones(2, 3), 2 * ones(2, 3)])  # of devices
    assert first("a") == [3]
    store.push(["a", "b"], [ones(2, 3), [ones(4), ones(4)]])
    assert first("a", "b") == [1, 2]
    store.push(["b", "a", "b", "b"], [ones(4), ones(2, 3), [ones(4), 5 * ones(4)], ones(4)])  # one key again and again
    assert first("b", "a") == [8, 1]
    for call in (store.push, store.pull, store.pushpull, store.init):
        call([], [])
    assert store.pull([]) == []
    out = [np.zeros(4), np.zeros(4, np.float16)]
    store.pull("b", out)
    store.pull(["b", "b"], repeated := [np.zeros(4), [np.zeros(4), np.zeros(4, np.int32)]])
    assert [array[3] / W for array in (*out, *repeated[1])] == [8] * 4
    assert [array.shape for array in store.pull(["a", "c", "a"])] == [(2, 3), (2,), (2, 3)]


@EVERY_KIND
def test_broadcast(store):
    out, second = np.zeros(3, np.float32), np.zeros(3, np.float16)
    store.broadcast("a", np.full(3, store.rank + 5, np.float32), [out, second])
    store.broadcast(["b", "c"], [ones(1) * store.rank, ones(2)], [out[:1], second[1:]])
    assert (out.tolist(), second.tolist()) == ([0, 5, 5], [5, 1, 1])


@SYNC_KINDS
@pytest.mark.parametrize("keys", [(0, -1), (2**63 - 1, -(2**63)), (np.int64(3), np.uint8(4)), ("", "ü\0\ud7ff" * 50)])
def test_kinds_of_keys(store, W, keys):
    store.init(list(keys), [ones(2), ones(3)])
    store.push(list(keys), [ones(2), ones(3)])
    assert [array.tolist() for array in store.pull(list(keys))] == [[W] * 2, [W] * 3]


def test_numpy_ints_are_the_ints_they_equal():
    store = kv.create("local")
    store.init(np.int32(7), ones(1))
    store.push(7, 3 * ones(1))
    assert store.pull(np.int64(7)).tolist() == [3]


@pytest.mark.parametrize(("first", "second"), [("a", 1), (1, "a")])
def test_a_store_does_not_mix_kinds_of_keys(first, second):
    store = kv.create("local")
    with pytest.raises(TypeError, match="does not mix"):
        store.init([first, second], [ones(1), ones(1)])
    with pytest.raises(KeyError):
        store.pull(second)
    with pytest.raises(TypeError):
        store.init(second, 1.0)
    store.init(first, ones(1))  # a failed call decides nothing
    for call in (store.init, store.push, store.pull):
        with pytest.raises(TypeError, match="does not mix"):
            call(second, ones(1))


OTHER_KEYS = [(key, TypeError, "key") for key in (1.0, None, b"a", True, np.bool_(True), object(), {"a"})]


@pytest.mark.parametrize(("key", "error", "text"), [*OTHER_KEYS, (2**63, ValueError, "64 bits")])
def test_other_keys_are_errors(key, error, text):
    with pytest.raises(error, match=text):
        kv.create("local").init(key, ones(1))


@EVERY_KIND
def test_lengths_and_kinds_of_values(store):
    store.set_optimizer(optimizers.create("test"))
    store.init(["a", "b"], [ones(2), ones(2)])
    for call in (store.init, store.push, store.pull, store.pushpull):
        with pytest.raises(ValueError, match="2 keys but 1 values"):
            call(["a", "b"], [ones(2)])
        with pytest.raises(TypeError, match="needs a list of values"):
            call(["a", "b"], ones(2, 2))
        for wrong in (1.0, "text", {"x": 1}, [1.0, 2.0], [ones(2), None]):
            with pytest.raises(TypeError, match=r"not an array|array to write"):
                call("a", wrong)
    for key in ("c", ["c", "c"]):
        with pytest.raises(ValueError, match="initialised with one"):
            store.init(key, [ones(2), ones(2)])
    for dtype in (bool, complex, np.int16, object, ">f4", "S3", "M8[s]"):
        with pytest.raises(UnsupportedError, match="dtype"):
            store.init("c", np.zeros(2, dtype))
    read_only = ones(2)
    read_only.flags.writeable = False
    for call in (store.pull, lambda key, out: store.pushpull(key, ones(2), out)):
        with pytest.raises(UnsupportedError, match="read-only"):
            call("a", read_only)
    store.barrier()
    assert store.pull("a").tolist() == [1.0, 1.0]


@SYNC_KINDS
@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="an older NumPy takes DLPack for read-only")
def test_arrays_of_other_libraries(store, W):
    device = ForeignDevice()
    store.init("a", device.asarray(ones(2, 3)))
    store.init("s", Tensor(ones()))
    target = device.asarray(np.zeros((2, 3), np.float64))
    store.push("a", [device.asarray(ones(2, 3)), Tensor(2 * ones(2, 3)), ones(2, 3)])
    store.pull("a", [target, tensor := Tensor(np.zeros((2, 3), np.float32))])
    scalar = device.asarray(np.float32(0))
    store.push("s", np.float32(4))
    store.pull("s", scalar)
    assert (target.memory[1, 2], tensor.memory[1, 2], scalar.memory[()]) == (4 * W, 4 * W, 4 * W)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@on(Mode("local", 1), Mode("dist_sync", 3), *FEW_DIST_SYNC)
def test_subclasses_of_ndarray(store, W):
    store.init("a", np.zeros((3, 4), np.float32))
    matrix, masked = np.matrix(np.zeros((3, 4), np.float32)), np.ma.masked_array(np.zeros((3, 4), np.float32))
    store.push("a", np.matrix(np.ones((3, 4), np.float32)))
    store.pull("a", matrix)
    store.pull("a", [masked, matrix])
    for value in (matrix, masked):
        value[...] = 1
        store.pushpull("a", value)
    assert uniform(np.asarray(matrix)) == uniform(masked.data) == W
    assert type(store.pull("a")) is np.ndarray


@EVERY_KIND
def test_an_array_that_cannot_be_written_harms_only_its_pull(store, mode, W):
    class Broken(ForeignArray):
        def fails(self, *arguments):
            raise RuntimeError("no memory left")

        set = fails
        if mode.device:  # whose arrays are written where they say that they are
            __cuda_array_interface__ = property(fails)

    store.set_optimizer(optimizers.create("test"))
    store.init("a", full := np.zeros(20, np.float32))
    out = Broken(ForeignDevice(), np.zeros(20, np.float32))
    store.push("a", full + 1)
    if store.rank == 0:
        for call in (lambda: store.pull("a", out), lambda: store.pull_async("a", out).wait()):
            with pytest.raises(RuntimeError, match="no memory left"):
                call()
    store.push("a", full + 1)
    store.barrier()
    assert uniform(store.pull("a")) == 2 * W


@pytest.mark.parametrize(("name", "gets"), [("device", 1), ("local", 3)])
def test_sum_on_the_device_crosses_once(name, gets):
    device, store = ForeignDevice(), kv.create(name)
    store.init("a", np.zeros(4, np.float16))
    values = [device.asarray(np.full(4, v, np.float16)) for v in (2048, 1, 1)]
    store.push("a", values)
    assert store.pull("a").tolist() == [2050] * 4
    assert device.gets == gets
    assert [v.memory[0] for v in values] == [2048, 1, 1]


def test_what_a_store_says_of_itself():
    store = kv.create("Local_Update_CPU")
    assert isinstance(store, KVStore)
    assert (store.type, store.rank, store.num_workers) == ("local_update_cpu", 0, 1)
    assert store.is_capable("optimizer") is True
    assert store.is_capable("OPTIMIZER") is True
    with pytest.raises(ValueError, match="optimizer"):
        store.is_capable("speed")
    assert "worker 0 of 1" in repr(store)
    with store as same:
        assert same is store
    assert "closed" in repr(store)


# --- arrays of one call that overlap: the result is that of the arrays as they were when the call began


SIZES = (10, 5000, 100_000)  # alone in a cache line, some partitions, several chunks
SHIFT = 7


@on(
    *(Mode("dist_sync", 2, part_bytes=4096), Mode("dist_sync", 2, memory="off", part_bytes=4096)),
    *(Mode("dist_sync", 2, 1, part_bytes=4096), Mode("dist_sync", 2, 2, part_bytes=4096)),
)
@pytest.mark.parametrize("own", [True, False], ids=["own arrays", "arrays of the store"])
@pytest.mark.parametrize("form", ["one array for two keys", "swapped", "shifted", "moved up", "moved down"])
def test_overlapping_arrays(store: KVStore, form: str, own: bool) -> None:
    for n in SIZES:
        keys = [f"a{n}", f"b{n}"]
        store.init(keys, [np.zeros(n, np.int64)] * 2)
        whole = np.zeros(2 * n, np.int64) if own else store.zeros(2 * n, "int64")
        x, y = whole[:n], whole[n:] if form in {"swapped", "one array for two keys"} else whole[SHIFT : SHIFT + n]
        if form == "moved down":
            x, y = y, x
        for _ in range(3):  # the third time the call is known
            whole[:] = np.arange(2 * n)
            sums = [x * 3, y * 3]
            whole *= store.rank + 1
            if form == "swapped":
                store.pushpull(keys, [x, y], out=[y, x])
                results = [y, x]
            elif form == "shifted":
                store.pushpull(keys, [x, y])
                results = []  # each has elements of the other
            elif form == "one array for two keys":
                store.pushpull(keys, [x, x])
                sums = sums[:1] * 2
                results = [x]
            else:
                store.pushpull(keys[0], x, out=y)
                sums[1] = np.zeros(n)
                results = [y]
            for found, expected in [*zip(results, sums, strict=False), *zip(store.pull(keys), sums, strict=True)]:
                np.testing.assert_array_equal(found, expected)
            store.barrier()
