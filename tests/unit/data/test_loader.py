"""DataLoader: its batches, its end, taking it up again in the middle of an epoch, and its thread."""

from __future__ import annotations

import gc
import os
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpikv.data import DataLoader, ImageRecords, RecordFile, SplitSampler

RECORDS = Path(__file__).parents[2] / "fixtures" / "records"


def batches(loader: DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mpikv-prefetch")]


# ---- batches


def new_loader(last: Any) -> DataLoader:
    return DataLoader(np.arange(23), 4, shuffle=True, seed=1, last=last)


def test_the_order_is_the_samplers() -> None:
    shuffled = DataLoader(np.arange(50), 50, shuffle=True, seed=9)
    assert batches(shuffled) == batches(shuffled) == [list(SplitSampler(50, seed=9))]
    assert batches(DataLoader(np.arange(9), 2, sampler=[8, 1, 1])) == [[8, 1], [1]]


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
    assert next(iter(DataLoader(records, 3, batchify_fn=lambda items: sum(map(len, items))))) == sum(
        len(records[i]) for i in range(3)
    )
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

    def fail() -> None:
        for _ in loader:
            raise RuntimeError("in the loop")

    with pytest.raises(RuntimeError, match="in the loop"):
        fail()
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
