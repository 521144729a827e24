"""Splitting data over workers and devices: exact values, and the words of each error."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import frameworks
import numpy as np
import pytest

from mpikv.arrays import devices
from mpikv.arrays.devices import gpu_number
from mpikv.data import SplitSampler, split_and_load, split_data
from mpikv.errors import UnsupportedError

# ---- SplitSampler


def test_order_is_fixed_for_good() -> None:
    """Worked out once from PCG64's raw stream; another machine, another NumPy or another part must find the same."""
    sampler = SplitSampler(10, seed=7)
    sampler.set_epoch(2)
    raw = np.random.PCG64(np.random.SeedSequence((7, 2))).random_raw(10)
    assert list(sampler) == sorted(range(10), key=lambda i: raw[i])
    assert list(sampler) == [8, 6, 4, 0, 5, 7, 1, 3, 9, 2]


def test_a_running_epoch_is_not_changed_by_set_epoch() -> None:
    sampler = SplitSampler(50)
    expected = list(sampler)
    running = iter(sampler)
    head = [next(running) for _ in range(10)]
    sampler.set_epoch(5)
    assert head + list(running) == expected


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
def test_bad_arguments(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_equal_steps_where_it_shuffles_and_everything_where_it_does_not() -> None:
    training, left = [SplitSampler(8, 3, part, seed=1) for part in range(3)], set()
    for epoch in range(4):
        for part in training:
            part.set_epoch(epoch)
        assert [len(part) for part in training] == [2, 2, 2]
        left.add(frozenset(training[0].left.tolist()))
    assert len(left) > 1  # not always the same
    evaluation = [SplitSampler(8, 3, part, shuffle=False) for part in range(3)]
    assert [list(part) for part in evaluation] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert evaluation[0].left.size == 0


def test_torch_data_loader() -> None:
    torch_data = frameworks.need("torch.utils.data")
    sampler = SplitSampler(10, 2, 1, seed=3)
    loader = torch_data.DataLoader(list(range(100, 110)), batch_size=2, sampler=sampler)
    assert [i for batch in loader for i in batch.tolist()] == [100 + i for i in sampler]


# ---- split_data, split_and_load


def test_split_data_makes_views() -> None:
    data = np.zeros((6, 2))
    for i, piece in enumerate(split_data(data, 3)):
        piece[:] = i
    assert data[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_split_and_load_on_the_cpu() -> None:
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
