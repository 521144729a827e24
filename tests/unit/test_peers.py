"""Device memory that thread ranks open of each other: once, never their own, closed before it is freed; the trial."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

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
    space_of(peers).copy(array, number)
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
    space_of(first).copy(array[40:60], 2)
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
    (chunk,) = space_of(first).pool.chunks
    with pytest.raises(AccessError, match="not seen to be done"):
        gpu_of(first).free(chunk.address)
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


# --- the trial


def outcomes(gpus: Sequence[FakeGpu | None]) -> list[str]:
    """What each rank says, with these GPUs."""
    told: list[bytes] = [b""] * len(gpus)
    written, read = threading.Barrier(len(gpus), timeout=20), threading.Barrier(len(gpus), timeout=20)

    def gather_of(rank: int) -> Callable[[bytes], list[bytes]]:
        def gather(data: bytes) -> list[bytes]:
            told[rank] = data
            written.wait()
            found = [*told]
            read.wait()
            return found

        return gather

    return spawn(len(gpus), lambda one: why_not_shared(gpus[one.rank], one.rank, gather_of(one.rank)))


def check_nothing_left(gpus: Sequence[FakeGpu]) -> None:
    assert all(gpu.counts["allocations"] == gpu.counts["frees"] for gpu in gpus)
    assert gpus[0].left_bytes == gpus[0].device.memory_bytes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_one_gpu_can_share(size: int) -> None:
    gpu = FakeGpu()
    gpus = [gpu.view() for _ in range(size)]
    assert outcomes(gpus) == [""] * size
    assert [gpu.counts["opens"] for gpu in gpus] == [size - 1] * size
    check_nothing_left(gpus)


def test_ranks_of_two_gpus_can_share() -> None:
    machine = FakeGpus(2)
    assert outcomes([machine.view()[0], machine.view()[1]]) == ["", ""]


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("allocate", "rank 1 of the host cannot export memory of GPU 0 (fake GPU, GPU-fake-0): "),
        ("export", "rank 1 of the host cannot export memory of GPU 0 (fake GPU, GPU-fake-0): "),
        ("open", "rank 1 of the host, on GPU 0 (fake GPU, GPU-fake-0), cannot open the memory of rank 0: "),
    ],
)
def test_why_not(method: str, text: str) -> None:
    gpu = FakeGpu()
    gpus = [gpu.view() for _ in range(3)]
    gpus[1].fail(method)
    found = outcomes(gpus)
    assert found == [found[0]] * 3
    assert text in found[0]
    if method != "allocate":
        check_nothing_left(gpus)


def test_a_rank_without_a_gpu() -> None:
    gpu = FakeGpu()
    assert outcomes([gpu.view(), None, gpu.view()]) == ["rank 1 of the host uses no GPU"] * 3
