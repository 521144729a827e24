"""DataLoader: its batches, its end, taking it up again in the middle of an epoch, and its thread. Splitting of data."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpikv.arrays import devices
from mpikv.arrays.devices import gpu_number
from mpikv.data import DataLoader, ImageRecords, RecordFile, SplitSampler, split_and_load, split_data
from mpikv.errors import UnsupportedError

RECORDS = Path(__file__).parents[2] / "fixtures" / "records"


def batches(loader: DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mpikv-prefetch")]


# ---- batches


def new_loader(last: Any) -> DataLoader:
    return DataLoader(np.arange(23), 4, shuffle=True, seed=1, last=last)


def test_the_order_is_the_samplers() -> None:
    assert batches(DataLoader(np.arange(50), 50, shuffle=True, seed=9)) == [list(SplitSampler(50, seed=9))]
    assert batches(DataLoader(np.arange(9), 2, sampler=[8, 1, 1])) == [[8, 1], [1]]


def test_a_sampler_can_be_pickled() -> None:
    """As a program that copies its loaders or sends them to another process does."""
    sampler = SplitSampler(10, 3, 1, seed=7)
    sampler.set_epoch(2, 1)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


def test_rows_of_arrays(tmp_path: Path) -> None:
    x, y = np.arange(10).reshape(5, 2), np.arange(5)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert [batch.tolist() for batch in DataLoader(mapped, 3)] == [x[:3].tolist(), x[3:].tolist()]
    for pixels, labels in DataLoader((mapped, y), 5):
        assert (type(pixels), pixels.tolist(), labels.tolist()) == (np.ndarray, x.tolist(), y.tolist())
        pixels[...] = 0  # not the file's
    assert DataLoader((x, y), 2, batchify_fn=len)._load(y[:2]) == 2
    with pytest.raises(ValueError, match="the arrays of a data set are equally long, not 5, 4"):
        DataLoader((x, y[1:]), 2)


def test_items_are_stacked() -> None:
    records = RecordFile(RECORDS / "images.rec")
    images = ImageRecords(records, lambda image: image[:8, :8])
    ((pixels, labels),) = DataLoader(images, 4)
    assert (pixels.shape, pixels.dtype, labels.tolist()) == ((4, 8, 8, 3), np.uint8, [0, 0, 1, 1])
    assert next(iter(DataLoader(records, 3))) == [records[0], records[1], records[2]]
    assert next(iter(DataLoader(records, 3, batchify_fn=len))) == 3
    with pytest.raises(ValueError, match=r"arrays of shapes \(8, 8, 3\) and \(8, 9, 3\).*transform of ImageRecords"):
        list(DataLoader(ImageRecords(records), 4))
    (pairs,) = DataLoader([(1, 2.5, "a"), (3, 4.5, "b")], 2)
    assert [pairs[0].tolist(), pairs[1].tolist(), pairs[2]] == [[1, 3], [2.5, 4.5], ["a", "b"]]
    with pytest.raises(ValueError, match="items of different lengths"):
        list(DataLoader([(1, 2), (1,)], 2))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"last": "drop"}, ValueError, "last must be one of 'keep', 'discard', 'rollover'"),
        ({"prefetch": -1}, ValueError, "prefetch must be at least 0"),
        ({"sampler": [1], "shuffle": True}, ValueError, "shuffle=True is for a loader without a sampler"),
        ({"sampler": iter([1])}, TypeError, "sampler is something to iterate over that has a length"),
        ({"dataset": iter([1])}, TypeError, "dataset is a data set"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DataLoader(**{"dataset": np.arange(5), "batch_size": 2, **options})
    with pytest.raises(ValueError, match="start=2 needs a sampler with set_epoch"):
        DataLoader(np.arange(5), 2, sampler=[1]).set_epoch(0, 2)


# ---- taking it up again


def test_an_epoch_that_began_later_goes_on_with_the_loops_own_set_epoch() -> None:
    loader = DataLoader(np.arange(23), 4, shuffle=True)
    loader.set_epoch(1, 7)
    running = iter(loader)
    next(running)
    again, third = (DataLoader(np.arange(23), 4, shuffle=True) for _ in range(2))
    for other, start in ((again, 0), (third, 7)):
        other.load_state(loader.state())
        other.set_epoch(1, start)
    expected = [batch.tolist() for batch in running]
    assert batches(again) == batches(third) == expected
    again.set_epoch(1)  # not after `load_state`: the whole epoch
    whole = DataLoader(np.arange(23), 4, shuffle=True)
    whole.set_epoch(1)
    assert batches(again) == batches(whole)
    again.load_state({**loader.state(), "batches": 1})
    again.set_epoch(1, 2)  # another start begins there
    whole.set_epoch(1, 2)
    assert batches(again) == batches(whole)


def test_resuming_loads_nothing_that_was_done() -> None:
    loaded = []

    class Noting(list[int]):
        def take(self, indices: Any) -> Any:
            loaded.append(list(indices))
            return np.array(self)[indices]

    loader = DataLoader(Noting(range(10)), 2)
    loader.load_state({**loader.state(), "batches": 3})
    assert batches(loader) == [[6, 7], [8, 9]]
    assert loaded == [[6, 7], [8, 9]]
    assert len(batches(loader)) == 5  # the next one is a whole epoch again


def test_an_iteration_that_is_no_longer_the_last_changes_nothing() -> None:
    loader = new_loader("rollover")
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    list(first)
    assert loader.state()["batches"] == 1
    assert len(list(second)) == 4


OTHER = DataLoader(np.arange(23), 8, sampler=SplitSampler(23, 2, 1, seed=1, last="uneven"))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"batches": -1}, ValueError, r"state\['batches'\] must be at least 0"),
        ({"epoch": "1"}, TypeError, r"state\['epoch'\] is a whole number"),
        ({"before": 3}, TypeError, r"state\['before'\] is a list, not int"),
        ({"more": 1}, ValueError, "state is none that a DataLoader gave"),
        ({"before": [23]}, ValueError, r"state\['before'\] has example 23, this data set has 23"),
        ({"of": {}}, ValueError, "of other batches than this loader makes: batch_size None .here 4."),
        ({"of": OTHER.state()["of"]}, ValueError, r"batch_size 8 \(here 4\), num_parts 2 \(here 1\)$"),
    ],
)
def test_states_that_do_not_fit(change: dict[str, Any], error: type[Exception], words: str) -> None:
    loader = new_loader("keep")
    before = loader.state()
    with pytest.raises(error, match=words):
        loader.load_state({**before, **change})
    assert loader.state() == before
    with pytest.raises(TypeError, match="state is a dict"):
        loader.load_state([1])  # type: ignore[arg-type]
    loader.load_state({**before, "batches": 99})
    with pytest.raises(ValueError, match="99 batches of this epoch are done, but it has 6"):
        iter(loader)


# ---- the thread


class Counted:
    """Counts what was loaded; the thread's progress can be waited for."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.loaded = 0
        self.changed = threading.Condition()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        with self.changed:
            self.loaded += 1
            self.changed.notify_all()
        return i


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_slow_caller_bounds_what_is_loaded(prefetch: int) -> None:
    data = Counted(50)
    running = iter(DataLoader(data, 1, prefetch=prefetch))
    for taken in range(1, 51):
        next(running)
        with data.changed:
            # It comes to the bound, and the property of the bound is that it never goes past it.
            bound = min(50, taken + prefetch)
            assert data.changed.wait_for(lambda bound=bound: data.loaded >= bound, 60)  # type: ignore[misc]
            assert data.loaded == bound
    assert list(running) == []
    assert threads() == []


def test_the_thread_ends_when_the_loop_is_left() -> None:
    loader = DataLoader(Counted(1000), 2, prefetch=3)
    for _ in loader:
        assert len(threads()) == 1
        break
    assert threads() == []

    running = iter(loader)
    next(running)
    running.close()
    assert (threads(), list(running)) == ([], [])
    running = iter(loader)
    next(running)
    cycle: list[Any] = [running]
    cycle.append(cycle)
    del running, cycle
    gc.collect()
    assert threads() == []


def test_an_error_in_the_thread_comes_in_its_place_with_its_traceback() -> None:
    class Failing(Counted):
        def __getitem__(self, i: int) -> int:
            if i == 5:
                raise OSError("the disk is gone")
            return i

    running = iter(DataLoader(Failing(10), 2, prefetch=4))
    assert [next(running).tolist(), next(running).tolist()] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(running)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "__getitem__"
    assert "_load" in names
    assert threads() == []
    assert list(running) == []


def test_a_forked_process_is_told() -> None:
    running = iter(DataLoader(Counted(9), 1))
    next(running)
    pid = os.fork()
    if pid == 0:
        try:
            next(running)
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(running)) == 8


# ---- splitting data over workers and devices


def test_order_is_fixed_for_good() -> None:
    """Another machine, another NumPy or another part must find the same; a running epoch keeps its order."""
    sampler = SplitSampler(10, seed=7)
    sampler.set_epoch(2)
    running = iter(sampler)
    first = next(running)
    sampler.set_epoch(5)
    assert [first, *running] == [8, 6, 4, 0, 5, 7, 1, 3, 9, 2]


def test_for_store() -> None:
    store = SimpleNamespace(rank=2, num_workers=3)
    assert list(SplitSampler.for_store(8, store, shuffle=False, last="drop")) == [2, 5]
    assert list(SplitSampler.for_store(8, store, seed=4)) == list(SplitSampler(8, 3, 2, seed=4))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: SplitSampler(-1), ValueError, "length must be at least 0"),
        (lambda: SplitSampler(5, 0), ValueError, "num_parts must be at least 1"),
        (lambda: SplitSampler(5, 2, 2), ValueError, r"part_index must be in 0..1.* got 2"),
        (lambda: SplitSampler(5, 2, -1), ValueError, "part_index must be at least 0"),
        (lambda: SplitSampler(5.0), TypeError, "length is a whole number, not float"),
        (lambda: SplitSampler(5, "2"), TypeError, "num_parts is a whole number, not str"),
        (lambda: SplitSampler(5, last="keep"), ValueError, "last must be one of 'uneven', 'drop', 'wrap'; got 'keep'"),
        (lambda: SplitSampler(3, 4), ValueError, "3 examples for 4 parts: .* last='drop', .* last='wrap' repeats some"),
        (lambda: SplitSampler(5, seed=-1), ValueError, "seed must be at least 0"),
        (lambda: SplitSampler(5).set_epoch(-1), ValueError, "epoch must be at least 0"),
        (lambda: split_data(np.zeros((7, 2)), 2), ValueError, r"7 examples along axis 0 .* do not divide into 2"),
        (lambda: split_data(np.zeros((7, 2)), 0), ValueError, "num_slice must be at least 1"),
        (lambda: split_data(np.zeros((7, 2)), 1, 2), ValueError, r"batch_axis 2 is out of range for .*shape \(7, 2\)"),
        (lambda: split_data(np.float32(1), 1), ValueError, "batch_axis 0 is out of range"),
        (lambda: split_and_load(np.zeros(2), []), ValueError, "devices is empty"),
    ],
)
def test_bad_arguments_of_splitting(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_equal_steps_where_it_shuffles_and_everything_where_it_does_not() -> None:
    """Which it leaves out are not always the same."""
    training, left = SplitSampler(8, 3, seed=1), set()
    for epoch in range(4):
        training.set_epoch(epoch)
        assert len(training) == 2
        left.add(frozenset(training.left.tolist()))
    assert len(left) > 1
    evaluation = [SplitSampler(8, 3, part, shuffle=False) for part in range(3)]
    assert [list(part) for part in evaluation] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert evaluation[0].left.size == 0


def test_split_and_load_on_the_cpu_makes_views() -> None:
    data = np.arange(12).reshape(2, 6)
    pieces = split_and_load(data, ["cpu:0", "CPU", "cpu(2)"], batch_axis=1)
    assert [piece.tolist() for piece in pieces] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert all(np.shares_memory(piece, data) for piece in pieces)
    assert [piece.tolist() for piece in split_data([1, 2, 3], 2, even_split=False)] == [[1, 2], [3]]


class FakeDevice:
    def __int__(self) -> int:
        return 3


def test_device_names() -> None:
    names = ["cpu", "cpu:1", "gpu", "gpu:2", "cuda:1", "GPU(4)", 0, np.int64(5), FakeDevice()]
    assert [gpu_number(name) for name in names] == [None, None, 0, 2, 1, 4, 0, 5, 3]
    for bad in ("tpu", "cpu:x", "", "cpu:0 gpu", -1, None, 1.5, "gpu:-1"):
        with pytest.raises(ValueError, match="is no device; write 'cpu'"):
            gpu_number(bad)  # type: ignore[arg-type]


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    for module, words in (
        (None, r"'gpu:2' needs CuPy.*pip install cupy-cuda12x"),
        (cupy, "'gpu:2' does not exist: this process sees 2 GPUs"),
    ):
        monkeypatch.setitem(sys.modules, "cupy", module)
        with pytest.raises(UnsupportedError, match=words):
            split_and_load(np.zeros(2), ["gpu:2"])


def test_no_context_is_made_on_a_gpu_that_nobody_uses() -> None:
    contexts, device = set[int](), [0]

    def set_device(number: int) -> None:
        device[0] = number
        contexts.add(number)

    runtime = SimpleNamespace(getDevice=lambda: device[0], setDevice=set_device)
    for number, made in ((1, {1}), (1, {1}), (2, {1, 2})):
        with devices.current(number, runtime, contexts.__contains__):
            assert device[0] == number
        assert (contexts, device[0]) == (made, 1)


@pytest.mark.parametrize(("number", "active"), [(0, True), (1, False), (2, False)])
def test_contexts(number: int, active: bool) -> None:
    """Of a process that sees two GPUs and uses the first."""

    class Driver:
        def cuDeviceGet(self, device: Any, n: int) -> int:  # noqa: N802 - CUDA's names
            device._obj.value = 70 + n
            return 0 if n < 2 else 101

        def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:  # noqa: N802
            active._obj.value = device.value == 70
            return 0

    assert devices.has_context(number, lambda _: Driver()) == active
    assert not devices.has_context(number, lambda _: object())
