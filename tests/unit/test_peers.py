"""Device memory that thread ranks open of each other: once, never their own, closed before it is freed; the trial."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv.errors import MpikvError
from mpikv.hostmemory.segment import private_memory
from mpikv.spaces import peers as module
from mpikv.spaces import pool
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.peers import Peers, why_not_shared
from mpikv.testing.fake_gpu import AccessError, FakeGpu, FakeGpus
from mpikv.testing.ranks import spawn
from mpikv.testing.threads_gather import gather_of

F32 = np.dtype(np.float32)
BEGIN = 128


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CHUNK_BYTES", 1 << 14)


def ranks(size: int) -> list[Peers]:
    gpu = FakeGpu()
    return [Peers(DeviceSpace(gpu.view()), memory, BEGIN) for memory in private_memory(size)]


def space_of(peers: Peers) -> DeviceSpace:
    return peers._space


def gpu_of(peers: Peers) -> FakeGpu:
    driver = space_of(peers).driver
    assert isinstance(driver, FakeGpu)
    return driver


def filled(peers: Peers, n: int, number: float):
    array = space_of(peers).empty(n, F32)
    array[...] = number
    space_of(peers).settle()
    return array


def test_each_chunk_is_exported_and_opened_once() -> None:
    first, second = ranks(2)
    arrays = [filled(first, 100, i) for i in range(3)] + [filled(first, 5000, i) for i in range(3, 5)]
    words = [first.word_of(array) for array in arrays]
    assert len({array.memory.chunk.number for array in arrays}) == gpu_of(first).counts["exports"] == 3
    assert [first.word_of(array) for array in arrays] == words
    for _ in range(2):
        for i, (array, word) in enumerate(zip(arrays, words, strict=True)):
            theirs = second.array_of(0, word, array.size, F32)
            assert theirs.address != array.address
            assert space_of(second).to_host(theirs).tolist() == [i] * array.size
    assert (gpu_of(first).counts["exports"], gpu_of(second).counts["opens"]) == (3, 3)
    assert gpu_of(first).counts["opens"] == gpu_of(second).counts["exports"] == 0


def test_parts_of_an_array_have_names() -> None:
    first, second = ranks(2)
    array = filled(first, 100, 1)
    array[40:60] = 2
    space_of(first).settle()
    theirs = second.array_of(0, first.word_of(array[40:60]), 20, F32)
    assert space_of(second).to_host(theirs).tolist() == [2] * 20


def test_nobody_frees_what_others_have_open() -> None:
    first, second, third = ranks(3)
    word = first.word_of(filled(first, 100, 7))
    theirs = second.array_of(0, word, 100, F32)
    copied = space_of(second).empty(100, F32)
    space_of(second).copy(copied, theirs)  # under way when it closes
    closed = first.close()
    assert not closed.test()
    with pytest.raises(AccessError, match="open in 1 other"):
        space_of(first).pool.close()
    assert not third.close().test()
    second.close()
    assert closed.test()
    space_of(first).pool.close()
    assert gpu_of(first).counts["frees"] == 1
    assert space_of(second).to_host(copied).tolist() == [7] * 100


def test_one_rank_alone_closes_at_once() -> None:
    (alone,) = ranks(1)
    assert alone.close().test()


def test_the_table_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHUNKS", 2)
    (first,) = ranks(1)
    arrays = [filled(first, 5000, i) for i in range(3)]
    for array in arrays[:2]:
        first.word_of(array)
    with pytest.raises(MpikvError, match=r"3 pieces of device memory.*can open 2 .*MPIKV_DEVICE_PATH=staged"):
        first.word_of(arrays[2])


def test_too_long_for_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRY_BYTES", 16)
    (first,) = ranks(1)
    with pytest.raises(MpikvError, match="too many for the table"):
        first.word_of(filled(first, 1, 0))
