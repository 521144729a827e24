"""The fake GPU catches each kind of mistake in the order of work, and lets correct programs pass, whatever is drawn."""

from __future__ import annotations

import ctypes
import gc
import inspect
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpikv.errors import MpikvError
from mpikv.spaces.driver import Driver, OutOfDeviceMemory
from mpikv.spaces.program import CAST, Argument, Operation, Program
from mpikv.testing import dlpack, gpu_work
from mpikv.testing.fake_array import FakeArray
from mpikv.testing.fake_gpu import AccessError, FakeGpu, FakeGpus, RaceError
from mpikv.testing.gpu_memory import Span
from mpikv.testing.gpu_work import elements
from mpikv.testing.ranks import spawn

REAL = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FILL = Program((Argument(REAL, None, 0),), (REAL,), ())
ADD = Program(
    (Argument(REAL, 0, None), Argument(REAL, 1, None), Argument(REAL, None, 2)), (), (Operation("add", REAL, (0, 1)),)
)
TO_BFLOAT16 = Program((Argument(REAL, 0, None), Argument(BFLOAT16, None, 1)), (), (Operation(CAST, BFLOAT16, (0,)),))
SEEDS = range(20)
N = 16  # elements of arrays here, 64 bytes


def wait_for(gpu: FakeGpu, event: Any) -> None:
    while not gpu.done(event):
        pass


def address_of(host: np.ndarray[Any, Any]) -> int:
    return host.__array_interface__["data"][0]


class Scene:
    """A GPU with two streams, device memory a and b, and page-locked h of 64 bytes each."""

    def __init__(self, gpu: FakeGpu | None = None) -> None:
        self.gpu = FakeGpu() if gpu is None else gpu
        self.one, self.two = self.gpu.stream(), self.gpu.stream()
        self.a, self.b = self.gpu.allocate(64), self.gpu.allocate(64)
        self.host = self.gpu.pinned(64)
        self.h = address_of(self.host)


@pytest.fixture
def scene() -> Scene:
    return Scene()


# --- it is a driver


def test_its_methods_are_those_of_the_protocol() -> None:
    for name, wanted in vars(Driver).items():
        if callable(wanted) and not name.startswith("_"):
            asked, offered = (inspect.signature(one).parameters for one in (wanted, getattr(FakeGpu, name)))
            assert list(asked) == list(offered), name
    driver: Driver = FakeGpu(3)
    assert (driver.number, driver.uuid) == (3, FakeGpu(3).uuid)
    assert FakeGpu(2).uuid != driver.uuid
    assert driver.name


# --- memory


def test_new_memory_is_full_of_nan(scene: Scene) -> None:
    for dtype in (np.float16, np.float32, np.float64, BFLOAT16):
        assert np.isnan(scene.host.view(dtype)).all()
    scene.gpu.copy(scene.h, scene.a, 64, scene.one)
    scene.host[:] = 0
    wait_for(scene.gpu, scene.gpu.record(scene.one))
    assert np.isnan(scene.host.view(REAL)).all()


def test_an_address_is_one_that_the_host_can_see(scene: Scene) -> None:
    scene.host[:] = np.arange(64)
    scene.gpu.copy(scene.a, scene.h, 64, scene.one)
    scene.gpu.synchronize()
    assert ctypes.string_at(scene.a, 64) == bytes(range(64))


def test_the_limit_of_memory() -> None:
    gpu = FakeGpu(memory_bytes=100)
    first = gpu.allocate(60)
    with pytest.raises(OutOfDeviceMemory, match=r"no room for 41 bytes: 40 of its 100 are left"):
        gpu.allocate(41)
    with pytest.raises(OutOfDeviceMemory):
        gpu.view().allocate(41)  # all views use the same memory
    with pytest.raises(OutOfDeviceMemory):
        gpu.array(np.zeros(41, np.uint8))
    gpu.free(first)
    assert gpu.left_bytes == 100
    gpu.allocate(100)
    with pytest.raises(ValueError, match="n_bytes"):
        gpu.allocate(0)


def test_freed_memory_is_not_used(scene: Scene) -> None:
    gpu, a = scene.gpu, scene.a
    gpu.free(a)
    for use in (
        lambda: gpu.copy(scene.b, a, 8, scene.one),
        lambda: gpu.copy(a, scene.b, 8, scene.one),
        lambda: gpu.launch(FILL, 2, [a], [1], scene.one),
        lambda: gpu.host_reads(a + 8, 1),
        lambda: gpu.free(a),
        lambda: gpu.export(a),
    ):
        with pytest.raises(AccessError, match="was freed"):
            use()


def test_memory_that_is_used_is_not_freed(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.copy(scene.a, scene.b, 64, scene.one)
    gpu.run_all()  # which the host does not know
    for address in (scene.a, scene.b):
        with pytest.raises(AccessError, match=r"free: copy .* is not seen to be done"):
            gpu.free(address)
    wait_for(gpu, gpu.record(scene.one))
    gpu.free(scene.a)
    gpu.free(scene.b)


def test_only_whole_allocations_are_freed(scene: Scene) -> None:
    for address in (scene.a + 8, scene.h, 12345):
        with pytest.raises(AccessError, match="no allocation begins"):
            scene.gpu.free(address)


def test_memory_ends_where_it_ends(scene: Scene) -> None:
    with pytest.raises(AccessError, match="beyond the end"):
        scene.gpu.copy(scene.a, scene.h + 32, 33, scene.one)
    with pytest.raises(AccessError, match="beyond the end"):
        scene.gpu.launch(FILL, 17, [scene.a], [1], scene.one)
    scene.gpu.copy(scene.a, scene.h + 32, 32, scene.one)


def test_host_memory_is_page_locked_for_copies(scene: Scene) -> None:
    host = np.zeros(64, np.uint8)
    gpu, h = scene.gpu, address_of(host)
    with pytest.raises(AccessError, match="page-locked"):
        gpu.copy(scene.a, h, 64, scene.one)
    gpu.register(host)
    with pytest.raises(AccessError, match="already"):
        gpu.register(host[8:16])
    gpu.copy(scene.a, h, 64, scene.one)
    with pytest.raises(AccessError, match=r"unregister: copy .* is not seen"):
        gpu.unregister(host)
    wait_for(gpu, gpu.record(scene.one))
    gpu.unregister(host)
    with pytest.raises(AccessError, match="unregistered"):
        gpu.copy(scene.a, h, 64, scene.one)
    with pytest.raises(AccessError, match="contiguous"):
        gpu.register(host[::2])


def test_page_locked_memory_lives_while_work_uses_it(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.copy(scene.a, scene.h, 64, scene.one)
    part = scene.host[:8]
    del scene.host
    gpu.record(scene.one)  # the part keeps it
    del part
    gc.collect()
    with pytest.raises(AccessError, match="let go too early"):
        gpu.record(scene.one)


def files_of_gpus() -> set[int]:
    """The inodes of allocations that this process has open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {link.stat().st_ino for link in links if "fake-gpu" in str(link.readlink())}


def test_a_gpu_that_is_let_go_leaves_no_file_open() -> None:
    before = files_of_gpus()
    gpu = FakeGpu()
    gpu.allocate(64)
    assert len(files_of_gpus() - before) == 1
    gpu.free(gpu.allocate(64))
    assert len(files_of_gpus() - before) == 1
    del gpu
    gc.collect()
    assert not files_of_gpus() - before


def test_new_memory_where_old_was_is_not_the_old() -> None:
    gpu = FakeGpu()
    stream = gpu.stream()
    for _ in range(20):
        memory, host = gpu.allocate(4096), gpu.pinned(64)
        gpu.copy(memory, address_of(host), 64, stream)
        wait_for(gpu, gpu.record(stream))
        gpu.free(memory)
        del host


# --- order


def test_work_is_done_in_the_order_of_its_stream_and_its_waits() -> None:
    orders = set()
    for seed in SEEDS:
        scene = Scene(FakeGpu(seed=seed))
        gpu = scene.gpu
        order: list[str] = []
        put = scene.gpu.process.work.put
        for name, stream in (("1a", scene.one), ("1b", scene.one), ("2a", scene.two), ("2b", scene.two)):
            if name == "2b":
                gpu.wait(stream, gpu.record(scene.one))
            put(gpu.process.stream(stream, 0), name, [], partial(order.append, name))
        wait_for(gpu, gpu.record(scene.two))
        assert order.index("1a") < order.index("1b") < order.index("2b") > order.index("2a")
        orders.add(tuple(order))
    assert len(orders) == 3  # all that are allowed


def test_work_is_not_done_before_somebody_asks(scene: Scene) -> None:
    scene.host[:] = 1
    scene.gpu.copy(scene.a, scene.h, 64, scene.one)
    event = scene.gpu.record(scene.one)
    assert ctypes.string_at(scene.a, 1) == b"\xff"
    wait_for(scene.gpu, event)
    assert ctypes.string_at(scene.a, 1) == b"\x01"


def test_eager_work_is_done_at_once() -> None:
    done = Counter()
    for seed in SEEDS:
        for eager in (0.0, 0.5, 1.0):
            scene = Scene(FakeGpu(seed=seed, eager=eager))
            scene.host[:] = 1
            scene.gpu.copy(scene.a, scene.h, 64, scene.one)
            done[eager] += ctypes.string_at(scene.a, 1) == b"\x01"
    assert done[0.0] == 0 < done[0.5] < done[1.0] == len(SEEDS)


def test_the_same_seed_draws_the_same_order() -> None:
    def answers(seed: int) -> list[bool]:
        scene = Scene(FakeGpu(seed=seed))
        for _ in range(20):
            scene.gpu.copy(scene.a, scene.b, 64, scene.one)
        events = [scene.gpu.record(scene.one)]
        found = []
        while not found or not found[-1]:
            found.append(scene.gpu.done(events[0]))
        return found

    assert [answers(seed) for seed in SEEDS] == [answers(seed) for seed in SEEDS]
    assert len({len(answers(seed)) for seed in SEEDS}) > 1


# --- races


def test_reading_before_the_write_has_come_so_far(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.copy(scene.a, scene.h, 64, scene.one)
    with pytest.raises(RaceError, match=r"reads bytes 0 to 64 of allocation .* which copy .* host to device .* writes"):
        gpu.copy(scene.b, scene.a, 64, scene.two)
    gpu.wait(scene.two, gpu.record(scene.one))
    gpu.copy(scene.b, scene.a, 64, scene.two)


def test_writing_while_another_stream_reads(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.copy(scene.h, scene.a, 64, scene.one)
    with pytest.raises(RaceError, match=r"writes bytes 0 to 64 .* reads"):
        gpu.launch(FILL, N, [scene.a], [1], scene.two)
    gpu.copy(scene.b, scene.a, 64, scene.two)  # both read


def test_writing_what_another_stream_writes(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.launch(FILL, N, [scene.a], [1], scene.one)
    with pytest.raises(RaceError, match=r"writes .* writes"):
        gpu.launch(FILL, 1, [scene.a + 60], [1], scene.two)


def test_a_race_is_found_although_the_work_is_done(scene: Scene) -> None:
    scene.gpu.copy(scene.a, scene.h, 64, scene.one)
    scene.gpu.run_all()
    with pytest.raises(RaceError):
        scene.gpu.copy(scene.b, scene.a, 64, scene.two)


def test_an_event_is_behind_what_was_there_when_it_was_recorded(scene: Scene) -> None:
    gpu = scene.gpu
    early = gpu.record(scene.one)
    gpu.copy(scene.a, scene.h, 64, scene.one)
    gpu.wait(scene.two, early)
    with pytest.raises(RaceError):
        gpu.copy(scene.b, scene.a, 64, scene.two)


def test_order_goes_on_from_stream_to_stream(scene: Scene) -> None:
    gpu, three = scene.gpu, scene.gpu.stream()
    gpu.copy(scene.a, scene.h, 64, scene.one)
    gpu.wait(scene.two, gpu.record(scene.one))
    gpu.wait(three, gpu.record(scene.two))
    gpu.copy(scene.b, scene.a, 64, three)


def test_what_the_host_has_seen_done_comes_before_what_it_puts_in_then(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.copy(scene.a, scene.h, 64, scene.one)
    event = gpu.record(scene.one)
    gpu.copy(scene.a, scene.h, 32, scene.one)
    wait_for(gpu, event)
    gpu.copy(scene.b + 32, scene.a + 32, 32, scene.two)
    with pytest.raises(RaceError, match="bytes 0 to 32"):
        gpu.copy(scene.b, scene.a, 64, scene.two)


def test_other_bytes_do_not_race(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.copy(scene.a, scene.h, 32, scene.one)
    gpu.copy(scene.a + 32, scene.b, 32, scene.two)
    gpu.copy(scene.b + 32, scene.h, 32, scene.one)


def test_strided_arrays_race_by_their_elements_alone() -> None:
    gpu = FakeGpu()
    one, two, grid, host = gpu.stream(), gpu.stream(), gpu.allocate(64), gpu.pinned(64)
    h = address_of(host)
    gpu.copy_strided((grid, [16]), (h, [16]), [4], 4, one)  # column 0 of four
    gpu.copy_strided((grid + 4, [16]), (h, [16]), [4], 4, two)
    gpu.copy_strided((grid + 12, [-4, 16]), (h, [4, 16]), [2, 4], 4, two)  # columns 3 and 2
    with pytest.raises(RaceError, match="bytes 16 to 20"):
        gpu.copy_strided((grid + 16, [4]), (h, [4]), [4], 4, two)


def test_a_failed_call_puts_nothing_in(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.copy(scene.a, scene.h, 64, scene.one)
    with pytest.raises(RaceError):
        gpu.copy(scene.b, scene.a, 64, scene.two)
    gpu.copy(scene.b, scene.h, 64, scene.one)  # nobody else has written to b
    assert gpu.counts["device_to_device"] == 0


def test_the_host_reads_and_writes_what_is_seen_to_be_done(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.copy(scene.h, scene.a, 32, scene.one)
    gpu.copy(scene.b, scene.h + 32, 32, scene.one)
    gpu.run_all()
    with pytest.raises(RaceError, match=r"the host .* reads bytes 0 to 8"):
        gpu.host_reads(scene.h, 8)
    gpu.host_reads(scene.h + 32, 32)
    with pytest.raises(RaceError, match=r"the host .* writes bytes 32 to 64"):
        gpu.host_writes(scene.h + 32, 32)
    with pytest.raises(RaceError):  # as an MPI that is CUDA-aware does
        gpu.host_reads(scene.b, 1)
    wait_for(gpu, gpu.record(scene.one))
    gpu.host_reads(scene.h, 64)
    gpu.host_writes(scene.h, 64)
    gpu.host_writes(address_of(np.zeros(1)), 8)  # no GPU's


def test_a_message_under_way_is_an_access_of_the_host(scene: Scene) -> None:
    gpu = scene.gpu
    sent = gpu.host_begins(scene.a, 32, writes=False)
    also = gpu.host_begins(scene.a, 32, writes=False)
    received = gpu.host_begins(scene.a + 32, 32, writes=True)
    assert gpu.host_begins(address_of(np.zeros(1)), 8, writes=True) is None
    gpu.host_ends(None)
    gpu.copy(scene.b, scene.a, 32, scene.one)
    with pytest.raises(RaceError, match=r"which the host .* writes"):
        gpu.copy(scene.b, scene.a, 33, scene.one)
    with pytest.raises(RaceError, match=r"which the host .* reads"):
        gpu.host_writes(scene.a, 1)
    gpu.host_ends(sent)
    wait_for(gpu, gpu.record(scene.one))
    with pytest.raises(RaceError, match=r"which the host .* reads"):
        gpu.copy(scene.a, scene.h, 1, scene.one)
    with pytest.raises(AccessError, match="the host"):
        gpu.free(scene.a)
    gpu.host_ends(received)
    gpu.host_ends(also)
    gpu.free(scene.a)


class Model:
    """What is ordered, from the whole history: each item of a stream and all that comes before it."""

    def __init__(self, streams: list[int]) -> None:
        self.before: dict[int, set[int]] = {stream: set() for stream in streams}  # the next item of a stream
        self.seen: set[int] = set()
        self.accesses: list[tuple[int, set[int], set[int]]] = []  # item, bytes read, bytes written

    def races(self, stream: int, reads: set[int], writes: set[int]) -> bool:
        return any(
            item not in self.before[stream] | self.seen and (writes & (read | written) or reads & written)
            for item, read, written in self.accesses
        )

    def put(self, stream: int, reads: set[int], writes: set[int]) -> None:
        item = len(self.accesses)
        self.accesses.append((item, reads, writes))
        self.before[stream] = {*self.before[stream], item}


@pytest.mark.parametrize("seed", range(100))
def test_races_are_found_exactly(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random work is refused if and only if the whole history has it race; what is accepted ends as if done at once."""
    monkeypatch.setattr(gpu_work, "_FEW", seed % 4)  # accesses that are kept as they are
    random = np.random.default_rng(seed)
    gpu = FakeGpu(seed=seed, eager=seed % 2 * 0.2)
    streams = [gpu.stream() for _ in range(3)]
    base, host = gpu.allocate(64), gpu.pinned(64)
    host[:] = np.arange(64)
    gpu.copy(base, address_of(host), 64, streams[0])
    gpu.synchronize()
    model, values, events, refused = Model(streams), np.arange(64, dtype=np.uint8), [], 0
    for _ in range(150):
        stream = streams[random.integers(3)]
        what = random.integers(10)
        if what < 6:
            n, stride = int(random.integers(1, 9)), int(random.integers(1, 4))
            source, to = (int(begin) for begin in random.integers(0, 64 - 8 * 3, 2))
            read, written = {source + i * stride for i in range(n)}, {to + i for i in range(n)}
            if read & written:
                continue
            arguments = (base + to, [1]), (base + source, [stride]), [n], 1, stream
            if model.races(stream, read, written):
                refused += 1
                with pytest.raises(RaceError):
                    gpu.copy_strided(*arguments)
            else:
                gpu.copy_strided(*arguments)
                model.put(stream, read, written)
                values[to : to + n] = values[source : source + n * stride : stride].copy()
        elif what < 7:
            events.append((gpu.record(stream), set(model.before[stream])))
        elif events and what < 9:
            event, before = events[random.integers(len(events))]
            gpu.wait(stream, event)
            model.before[stream] |= before
        elif events:
            event, before = events[random.integers(len(events))]
            if gpu.done(event):
                model.seen |= before
    assert 0 < refused < len(model.accesses) * 10
    gpu.synchronize()
    assert ctypes.string_at(base, 64) == values.tobytes()


def test_what_is_remembered_is_bounded(scene: Scene) -> None:
    gpu = scene.gpu
    for _ in range(1000):
        gpu.copy(scene.a, scene.h, 64, scene.one)
        gpu.copy(scene.b, scene.a, 64, scene.one)
        gpu.wait(scene.two, gpu.record(scene.one))
        gpu.copy(scene.h, scene.b, 64, scene.two)
        gpu.wait(scene.one, gpu.record(scene.two))
    for address in (scene.a, scene.b, scene.h):
        memory = gpu.process.space.find(Span(address, address + 1))
        assert memory is not None
        assert sum(map(len, memory.bytes.accesses.values())) <= 2 * 64
    with pytest.raises(RaceError, match="bytes 60 to 64"):  # and yet it is all there
        gpu.copy(scene.b + 60, gpu.allocate(4), 4, gpu.stream())
    wait_for(gpu, gpu.record(scene.two))
    wait_for(gpu, gpu.record(scene.one))
    gpu.copy(scene.b, scene.a, 64, gpu.stream())


# --- work


def test_programs_run_on_elements() -> None:
    gpu = FakeGpu()
    x, y = gpu.array(np.arange(8, dtype=REAL)), gpu.array(np.full(8, 10, REAL))
    stream = gpu.current_stream
    gpu.launch(ADD, 4, [x.address + 16, y.address, y.address], [], stream)  # in place
    gpu.launch(TO_BFLOAT16, 8, [y.address, x.address], [], stream)
    assert y.get().tolist() == [14, 15, 16, 17, 10, 10, 10, 10]
    assert x.get().view(BFLOAT16)[:8].tolist() == y.get().tolist()


def test_arguments_of_a_program_do_not_overlap_by_parts(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.launch(ADD, 4, [scene.a, scene.a, scene.a], [], scene.one)
    gpu.launch(ADD, 4, [scene.a, scene.a + 4, scene.b], [], scene.one)  # both only read
    with pytest.raises(AccessError, match="overlap"):
        gpu.launch(ADD, 4, [scene.a, scene.b, scene.a + 4], [], scene.one)
    both = Program((Argument(REAL, None, 0), Argument(REAL, None, 0)), (REAL,), ())
    with pytest.raises(AccessError, match="overlap"):
        gpu.launch(both, 4, [scene.a, scene.a], [1], scene.one)
    with pytest.raises(AccessError, match="overlap"):
        gpu.copy(scene.a, scene.a + 8, 16, scene.one)
    with pytest.raises(AccessError, match="aligned"):
        gpu.launch(FILL, 1, [scene.a + 2], [1], scene.one)
    with pytest.raises(AccessError, match="2 arrays"):
        gpu.launch(TO_BFLOAT16, 1, [scene.a], [], scene.one)


@pytest.mark.parametrize("eager", [0.0, 1.0])
def test_work_that_fails_is_told_by_the_next_question(eager: float) -> None:
    scene = Scene(FakeGpu(eager=eager))
    broken = Program((Argument(REAL, 0, 1),), (), (Operation("no such thing", REAL, (0,)),))
    scene.gpu.launch(broken, 1, [scene.a], [], scene.one)
    scene.gpu.launch(FILL, 1, [scene.a], [1], scene.one)
    with pytest.raises(MpikvError, match="GPU 0 has failed"):
        wait_for(scene.gpu, scene.gpu.record(scene.one))
    with pytest.raises(MpikvError, match="GPU 0 has failed"):
        scene.gpu.synchronize()


def test_strangers_are_refused(scene: Scene) -> None:
    gpu, other = scene.gpu, FakeGpu()
    with pytest.raises(AccessError, match="no stream"):
        gpu.record(12345)
    with pytest.raises(AccessError, match="no event"):
        gpu.done(other.record(1))
    with pytest.raises(AccessError, match="no event"):
        gpu.wait(scene.one, gpu.view().record(1))
    with pytest.raises(AccessError, match="no stream"):
        gpu.view().copy(scene.a, scene.b, 8, scene.one)
    with pytest.raises(AccessError, match="neither device memory"):
        gpu.view().copy(scene.a, scene.b, 8, 1)
    with pytest.raises(AccessError):
        gpu.record(0)


def test_counts_are_exact() -> None:
    first, second = FakeGpus(2)
    scene = Scene(first)
    before = first.counts.copy()
    assert before == {"allocations": 2, "pinned": 1}
    theirs = second.allocate(64)
    first.copy(scene.a, scene.h, 64, scene.one)
    first.copy(scene.h, scene.a, 32, scene.one)
    first.copy(scene.h + 32, scene.h, 32, scene.one)
    first.copy(scene.b, scene.a, 16, scene.one)
    first.copy(theirs, scene.a, 8, scene.one)
    first.copy(scene.a, theirs, 0, scene.one)  # nothing
    first.copy_strided((scene.a, [8]), (scene.b, [4]), [4], 4, scene.one)
    first.launch(FILL, 4, [scene.a], [0], scene.one)
    first.wait(scene.two, first.record(scene.one))
    first.wait(scene.one, first.record(scene.two))
    first.synchronize()
    first.free(scene.a)
    assert first.counts - before == {
        "host_to_device": 1,
        "host_to_device_bytes": 64,
        "device_to_host": 1,
        "device_to_host_bytes": 32,
        "host_to_host": 1,
        "host_to_host_bytes": 32,
        "device_to_device": 2,
        "device_to_device_bytes": 32,
        "strided": 1,
        "peer": 1,
        "peer_bytes": 8,
        "launches": 1,
        "records": 2,
        "waits": 2,
        "frees": 1,
    }
    assert second.counts == {"allocations": 1}


def test_calls_fail_on_demand(scene: Scene) -> None:
    gpu = scene.gpu
    gpu.fail("done", 2)
    event = gpu.record(scene.one)
    assert gpu.done(event)
    with pytest.raises(MpikvError, match="`done` fails"):
        gpu.done(event)
    assert gpu.done(event)
    gpu.fail("allocate", error=MpikvError("taken"), always=True)
    for _ in range(3):
        with pytest.raises(MpikvError, match="taken"):
            gpu.allocate(1)
    gpu.fail("pinned")
    with pytest.raises(OutOfDeviceMemory):
        gpu.pinned(1)
    gpu.pinned(1)
    with pytest.raises(ValueError, match="no method 'alocate'"):
        gpu.fail("alocate")


# --- several GPUs, several processes


def test_peers_are_in_one_order() -> None:
    for seed in SEEDS:
        first, second = FakeGpus(2, seed=seed)
        one, two = first.stream(), second.stream()
        a, b, host = first.allocate(64), second.allocate(64), second.pinned(64)
        first.launch(FILL, N, [a], [3], one)
        with pytest.raises(RaceError):
            second.copy(b, a, 64, two)
        second.wait(two, first.record(one))
        second.copy(b, a, 64, two)
        second.copy(address_of(host), b, 64, two)
        wait_for(second, second.record(two))
        assert host.view(REAL).tolist() == [3] * N
        with pytest.raises(AccessError, match="no stream of GPU 0"):
            first.launch(FILL, N, [a], [3], two)
        with pytest.raises(AccessError, match="no stream of GPU 0"):
            first.record(two)
        with pytest.raises(AccessError, match="no stream of GPU 1"):
            second.wait(one, second.record(two))
        second.wait(one, second.record(two), 0)
        assert second.done(first.record(1, 1))  # the other's default stream
        assert first.record(1, 1).stream is second.record(1).stream is not first.record(1).stream


def test_each_gpu_has_its_own_limit() -> None:
    first, second = FakeGpus(2, memory_bytes=64)
    first.allocate(64)
    second.allocate(64)
    seen = FakeGpus(2).view([1])
    assert (len(seen), seen[0].number, seen[0].uuid) == (1, 0, second.uuid)


def test_another_view_opens_an_allocation_once(scene: Scene) -> None:
    gpu, other = scene.gpu, scene.gpu.view()
    exported = gpu.export(scene.a)
    with pytest.raises(AccessError, match="own"):
        gpu.open(exported)
    opened = other.open(exported)
    assert opened != scene.a
    with pytest.raises(AccessError, match="already"):
        other.open(exported)
    with pytest.raises(AccessError, match="open in 1 other"):
        gpu.free(scene.a)
    with pytest.raises(AccessError, match="no allocation"):
        other.free(opened)
    with pytest.raises(AccessError, match="no allocation"):
        other.export(opened)
    target = other.allocate(8)
    other.close(opened)
    with pytest.raises(AccessError, match="closed"):
        other.copy(target, opened, 8, other.stream())
    with pytest.raises(AccessError, match="no allocation"):
        gpu.export(scene.a + 8)
    other.close(other.open(exported))
    gpu.free(scene.a)
    with pytest.raises(AccessError, match="freed"):
        other.open(exported)
    with pytest.raises(AccessError, match="not what"):
        other.open(b"nonsense")
    assert other.counts["opens"] == 2


def test_work_of_two_views_races_unless_the_host_has_seen_it(scene: Scene) -> None:
    gpu, other = scene.gpu, scene.gpu.view()
    opened, theirs = other.open(gpu.export(scene.a)), other.stream()
    gpu.launch(FILL, N, [scene.a], [1], scene.one)
    with pytest.raises(RaceError, match="opened allocation"):
        other.copy(other.allocate(64), opened, 64, theirs)
    wait_for(gpu, gpu.record(scene.one))
    other.copy(other.allocate(64), opened, 64, theirs)
    with pytest.raises(AccessError, match="close: copy"):
        other.close(opened)
    with pytest.raises(RaceError):
        gpu.launch(FILL, N, [scene.a], [2], scene.one)
    assert other.counts["device_to_device"] == 1


def test_views_register_the_same_memory() -> None:
    gpu = FakeGpu()
    other, host = gpu.view(), np.zeros(8, np.uint8)
    gpu.register(host)
    other.register(host[:4])
    gpu.copy(address_of(host), gpu.allocate(8), 8, gpu.stream())
    with pytest.raises(RaceError):
        other.copy(other.allocate(4), address_of(host), 4, other.stream())
    other.unregister(host[:4])  # its own work alone counts


def add_of_all(gpu: FakeGpu, transport: Any, exported: list[bytes], barrier: threading.Barrier) -> float:
    """Each rank opens the others' memory and adds its own part of all, straight from there."""
    rank, n = transport.rank, len(exported)
    stream, result = gpu.stream(), gpu.allocate(N * 4)
    mine = gpu.allocate(N * 4)
    gpu.launch(FILL, N, [mine], [rank + 1], stream)
    exported[rank] = gpu.export(mine)
    wait_for(gpu, gpu.record(stream))
    barrier.wait()
    others = {peer: gpu.open(exported[peer]) for peer in range(n) if peer != rank}
    gpu.copy(result, mine, N * 4, stream)
    for peer in sorted(others):
        gpu.launch(ADD, N, [result, others[peer], result], [], stream)
    host = gpu.pinned(N * 4)
    gpu.copy(address_of(host), result, N * 4, stream)
    wait_for(gpu, gpu.record(stream))
    gpu.host_reads(address_of(host), N * 4)
    for opened in others.values():
        gpu.close(opened)
    barrier.wait()
    gpu.free(mine)
    gpu.free(result)
    return float(host.view(REAL).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_as_threads_share_a_gpu(seed: int) -> None:
    gpu = FakeGpu(seed=seed, eager=seed % 2 * 0.3)
    views, exported, barrier = [gpu.view() for _ in range(3)], [b""] * 3, threading.Barrier(3)
    sums = spawn(3, lambda transport: add_of_all(views[transport.rank], transport, exported, barrier))
    assert sums == [N * 6.0] * 3
    assert gpu.left_bytes == 1 << 30


CHILD = """
import sys, ctypes
import numpy as np
from mpikv.errors import MpikvError
from mpikv.spaces.program import Argument, Operation, Program
from mpikv.testing.fake_gpu import AccessError, FakeGpu
gpu, exported = FakeGpu(int(sys.argv[1])), bytes.fromhex(sys.stdin.readline())
opened, stream = gpu.open(exported), gpu.stream()
try:
    gpu.open(exported)
except AccessError as error:
    print(error)
real = np.dtype('f4')
double = Program((Argument(real, 0, 2),), (real,), (Operation('multiply', real, (0, 1)),))
gpu.launch(double, 16, [opened], [2.0], stream)
gpu.copy(gpu.allocate(64), opened, 64, stream)
while not gpu.done(gpu.record(stream)):
    pass
gpu.close(opened)
print('copies', gpu.counts['device_to_device'], gpu.counts['peer'], flush=True)
sys.stdin.readline()  # its owner has freed it now
try:
    gpu.open(exported)
except MpikvError as error:
    print('gone:', error)
"""


@pytest.mark.parametrize(("number", "copies"), [(0, "copies 1 0"), (1, "copies 0 1")])
def test_another_process_opens_memory(number: int, copies: str) -> None:
    gpu = FakeGpu()
    x = gpu.allocate(64)
    gpu.launch(FILL, N, [x], [21], gpu.stream())
    gpu.synchronize()
    command = [sys.executable, "-c", CHILD, str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(gpu.export(x).hex() + "\n")
        child.stdin.flush()
        assert "open already" in child.stdout.readline()
        assert child.stdout.readline().strip() == copies
        assert np.frombuffer(ctypes.string_at(x, 64), REAL).tolist() == [42] * N
        gpu.free(x)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline().startswith("gone: cannot open the memory of process")
    assert child.returncode == 0


# --- a user's arrays


def test_arrays_show_what_cupys_do() -> None:
    gpu = FakeGpu(1)
    array = gpu.array(np.arange(6, dtype=np.int32).reshape(2, 3))
    told = array.__cuda_array_interface__
    assert told["shape"] == (2, 3)
    assert (told["typestr"], told["strides"], told["version"], told["stream"]) == ("<i4", None, 3, 1)
    assert told["data"] == (array.address, False)
    assert array[:, 1].__cuda_array_interface__["strides"] == (12,)
    assert array[:, 1].__cuda_array_interface__["data"][0] == array.address + 4
    assert gpu.array(np.zeros(0)).__cuda_array_interface__["data"][0] == 0
    assert gpu.array(np.zeros(2, BFLOAT16)).__cuda_array_interface__["typestr"] == "<V2"
    assert (int(array.device), array.device.id, len(array)) == (1, 1, 2)
    assert array.__dlpack_device__() == (2, 1)
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(array)
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.add(array, array)


def test_arrays_are_worked_on() -> None:
    gpu = FakeGpu()
    array = gpu.array(np.arange(6.0).reshape(2, 3))
    array += gpu.array(np.ones(3))
    array[:, 0] = -1
    array[0, 1:] = gpu.array([8.0, 9.0])
    assert array.get().tolist() == [[-1, 8, 9], [-1, 5, 6]]
    assert (array + array.T.reshape(2, 3)).get().tolist() == (array.get() + array.get().T.reshape(2, 3)).tolist()
    assert array.astype(BFLOAT16).get().dtype == BFLOAT16
    assert array.__array_namespace__().asarray(np.ones(2), device=gpu).get().tolist() == [1, 1]
    out = np.zeros((2, 3))
    assert array.get(out=out) is out
    assert out[0, 1] == 8
    array.set(out * 2)
    assert array.get()[0, 1] == 16
    assert gpu.counts == {"gets": 8, "gets_bytes": 6 * 48 + 12 + 16, "sets": 1, "sets_bytes": 48}
    for wrong, error in ((out[0], ValueError), (out.astype(REAL), TypeError), ([1], TypeError)):
        with pytest.raises(error):
            array.set(wrong)
    with pytest.raises(RuntimeError, match="non-contiguous"):
        array[:, 1].set(np.zeros(2))
    with pytest.raises(TypeError, match="slices"):
        array[[0, 1]]
    with pytest.raises(TypeError, match="Unsupported"):
        array += out
    with pytest.raises(ValueError, match="two GPUs"):
        array += FakeGpu().array(out)


def test_a_library_that_reads_before_the_users_stream_has_come_so_far() -> None:
    gpu = FakeGpu()
    ours, copied = gpu.stream(), gpu.allocate(64)
    with gpu.user_stream() as stream:
        array = gpu.array(np.ones(N, REAL))
        array += 1
        told = array.__cuda_array_interface__
        assert told["stream"] == stream == gpu.current_stream
    assert array.__cuda_array_interface__["stream"] == gpu.current_stream == 1
    with pytest.raises(RaceError, match=r"which array \+= .* writes"):
        gpu.copy(copied, array.address, 64, ours)
    gpu.wait(ours, gpu.record(told["stream"]))
    gpu.copy(copied, array.address, 64, ours)
    with gpu.user_stream(stream), pytest.raises(RaceError, match=r"array \+= .* writes"):
        array += 1  # the library still reads
    gpu.wait(stream, gpu.record(ours))
    with gpu.user_stream(stream):
        array += 1


def test_get_waits_for_its_stream_alone() -> None:
    gpu = FakeGpu()
    ours = gpu.stream()
    array = gpu.array(np.ones(N, REAL))
    gpu.wait(ours, gpu.record(1))
    gpu.launch(FILL, N, [array.address], [5], ours)
    with pytest.raises(RaceError, match=r"get .* reads"):
        array.get()
    gpu.wait(1, gpu.record(ours))
    assert array.get().tolist() == [5] * N
    gpu.copy(gpu.allocate(64), array.address, 64, ours)  # `get` has seen all of that


def test_the_current_stream_is_each_threads_own() -> None:
    gpu = FakeGpu()
    found = []
    with gpu.user_stream():
        thread = threading.Thread(target=lambda: found.append((gpu.current_stream, gpu.record(2).stream)))
        thread.start()
        thread.join()
    assert found == [(1, found[0][1])]
    assert gpu.record(2).stream is not found[0][1]


def test_an_array_that_is_let_go_while_the_library_reads() -> None:
    gpu = FakeGpu(memory_bytes=1024)
    ours, copied = gpu.stream(), gpu.allocate(64)
    for waits in (True, False):
        array = gpu.array(np.ones(N, REAL))
        part = array[4:]
        gpu.wait(ours, gpu.record(1))
        gpu.copy(copied, array.address, 64, ours)
        if waits:
            gpu.wait(1, gpu.record(ours))
        del array
        assert gpu.left_bytes == 1024 - 128  # the part keeps it
        del part
        if waits:
            assert gpu.left_bytes == 1024 - 64
        else:
            with pytest.raises(RaceError, match=r"reuse of memory of an array .*, let go"):
                gpu.record(ours)


def consume(capsule: Any, form: Any) -> tuple[int, list[int], tuple[int, int, int]]:
    """Take a capsule as a library does, and give it back."""
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
    pointer = pointer_of(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, form.name)
    managed = form.from_address(pointer)
    tensor = managed.tensor
    numbers = [*tensor.shape[: tensor.ndim], *tensor.strides[: tensor.ndim]]
    found = tensor.data, numbers, (tensor.code, tensor.bits, tensor.device_id)
    used = b"used_dltensor"
    rename(("PyCapsule_SetName", ctypes.pythonapi))(capsule, used)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(pointer)
    del capsule  # while its new name is there
    return found


@pytest.mark.parametrize(("version", "form"), [(None, dlpack._Managed), ((1, 1), dlpack._Versioned)])
def test_dlpack_capsules_keep_the_array(version: tuple[int, int] | None, form: Any) -> None:
    gpu = FakeGpu(1, memory_bytes=1024)
    array = gpu.array(np.zeros((2, 3), BFLOAT16))[:, ::2]
    address = array.address
    capsules = [array.__dlpack__(max_version=version)]
    del array
    assert gpu.left_bytes == 1024 - 12
    assert consume(capsules.pop(), form) == (address, [2, 2, 3, 2], (4, 16, 1))
    assert gpu.left_bytes == 1024
    capsules = [gpu.array(np.zeros(3)).__dlpack__(max_version=version)]  # which nobody takes
    assert gpu.left_bytes == 1000
    capsules.clear()
    assert gpu.left_bytes == 1024


def test_dlpack_orders_the_consumers_stream() -> None:
    gpu = FakeGpu()
    ours, unordered, copied = gpu.stream(), gpu.stream(), gpu.allocate(64)
    with gpu.user_stream():
        array = gpu.array(np.ones(N, REAL))
        array.__dlpack__(stream=-1)
        with pytest.raises(RaceError):
            gpu.copy(copied, array.address, 64, unordered)
        array.__dlpack__(stream=ours)
        gpu.copy(copied, array.address, 64, ours)
        with pytest.raises(RaceError):
            gpu.copy(copied, array.address, 64, 1)
        array.__dlpack__()
        with pytest.raises(RaceError, match=r"device to device .* writes"):
            gpu.copy(copied, array.address, 64, 1)  # the array is there, but `ours` writes to `copied`
        with pytest.raises(ValueError, match="stream 0"):
            array.__dlpack__(stream=0)
        with pytest.raises(BufferError, match="copy"):
            array.__dlpack__(dl_device=(1, 0))


def test_memory_of_the_driver_as_an_array(scene: Scene) -> None:
    class Owner:
        pass

    owner = Owner()
    array = scene.gpu.as_caller(scene.a, (2, 4), REAL, owner)
    assert isinstance(array, FakeArray)
    assert (array.address, array.shape, array.flags.c_contiguous) == (scene.a, (2, 4), True)
    assert sys.getrefcount(owner) == 3
    array += 1
    with pytest.raises(RaceError):
        scene.gpu.copy(scene.b, scene.a, 8, scene.one)
    assert scene.gpu.as_caller(scene.a, (0,), REAL, owner).get().size == 0


# --- bytes


def test_spans() -> None:
    columns = elements(100, (3, 2), (10, 2), 2)
    assert columns.runs is not None
    assert columns.runs.tolist() == [[100, 104], [110, 114], [120, 124]]
    assert elements(100, (3, 2), (4, 2), 2) == Span(100, 112)
    assert elements(110, (3,), (-5,), 5) == Span(100, 115)
    assert elements(100, (3,), (0,), 4) == Span(100, 104)
    assert elements(100, (), (), 4) == Span(100, 104)
    assert elements(100, (0, 5), (4, 4), 4) == Span(100, 100)
    assert columns.overlap(Span(104, 110)) is None
    assert columns.overlap(Span(104, 111)) == (110, 111)
    assert Span(104, 121).overlap(columns) == (110, 114)
    assert columns.overlap(columns.moved(4)) is None
    assert columns.overlap(columns.moved(9)) == (110, 113)
