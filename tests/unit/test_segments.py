"""Long keys in device memory over the ways of the host: what is under way at the same time, values, counts, the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from short_segments import HOST_BYTES, LINK_BYTES, Watch, short_segments
from store_modes import DTYPES, TEST_TIMEOUT_S
from test_staged import placement_of, values_of

from mpikv import optimizers
from mpikv.arrays import sum_dtype
from mpikv.config import Config
from mpikv.engine.running import Running
from mpikv.errors import ConfigError, MpikvError
from mpikv.keys import KeyInfo
from mpikv.placement import Placement, bounds_of
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import Spaces
from mpikv.strategies.host_keys import HostKeys
from mpikv.strategies.segments import AHEAD, SEGMENT_BYTES, gathered
from mpikv.strategies.staged import Staged
from mpikv.strategies.ways import Means
from mpikv.testing.fake_gpu import FakeGpu
from mpikv.testing.ranks import memories_of
from mpikv.testing.stores import spawn_stores
from mpikv.transports.base import Group
from mpikv.transports.threads import Fabric

F32 = np.dtype(np.float32)
ALGORITHMS = ("ring", "naive", "halving_doubling")
MESSAGES: list[tuple[str, dict[str, Any]]] = [
    *(("a" * p, {"algorithm": algorithm}) for p in (1, 2, 3, 4, 5) for algorithm in ALGORITHMS),
    ("ab", {}),
    ("abcde", {}),
    ("aab", {"shared_memory": "off"}),
]
MEMORY: list[tuple[str, dict[str, Any]]] = [
    *((hosts, {}) for hosts in ("aa", "aaa", "aaaaa")),
    *((hosts, {}) for hosts in ("aab", "aabb", "aabbb", "aaabb")),
]


# --- what is under way at the same time


class Worker:
    """One rank of a key, moved on by hand: its copies, and what it does when it looks."""

    def __init__(self, rank: int, hosts: str, path: Any, n: int, common: Any) -> None:
        fabric, memories, gpus = common
        self.gpu, self.rank, self.n = gpus[rank], rank, n
        self.space = DeviceSpace(self.gpu)
        on_hosts = None if path == "messages" else HostKeys(memories[rank], hosts)
        means = Means(Group(fabric.rank(rank), range(len(hosts))), Spaces(device=self.space), on_hosts)
        algorithm = "hierarchical" if path == "hosted" else "ring"
        bounds = bounds_of(algorithm, n, hosts)
        info = KeyInfo("w", 0, (n,), F32, space="device")
        place = None if on_hosts is None else on_hosts.reserve_key(info.n_bytes, pages=True)
        placement = Placement("staged", algorithm, tuple(range(len(hosts))), bounds, host=path)
        self.way = Staged(means, info, placement, place)
        self.own = slice(*bounds[rank : rank + 2])
        self.values = self.space.from_host(values_of(rank, 0, n, F32))
        self.space.copy(self.way.value, -1)
        self.space.settle()
        self.running: Running[None]
        self.up = self.counted("host_to_device")

    def counted(self, what: str) -> int:
        return int(self.gpu.counts[what])

    def begin(self, half: str) -> None:
        self.up = self.counted("host_to_device")
        steps = self.way.allgather((), None)
        if half == "reduce_scatter":
            steps = self.way.reduce_scatter(self.values, np.add, None, changeable=True)
        self.running = Running(steps, half)

    def look(self) -> None:
        self.running.advance()
        if self.running.error is not None:
            raise self.running.error

    def copied_down(self) -> bool:
        return self.gpu.advance(self.space.stream)

    def copied_up(self) -> bool:
        return self.gpu.advance(self.space.beside)

    def end(self) -> None:
        while not self.running.done:
            self.copied_down()
            self.copied_up()
            self.look()


def workers(hosts: str, path: str, n: int) -> tuple[list[Worker], Fabric]:
    gpu = FakeGpu()
    gpus = [gpu, *(gpu.view() for _ in hosts[1:])]
    fabric = Fabric(len(hosts), hosts)
    common = fabric, memories_of(hosts), gpus
    found = [Worker(rank, hosts, path, n, common) for rank in range(len(hosts))]
    gpu.hold()
    return found, fabric


@pytest.mark.parametrize("half", ["reduce_scatter", "allgather"])
@pytest.mark.parametrize(
    ("hosts", "path"), [("ab", "messages"), ("aa", "direct"), ("aaa", "direct"), ("aabb", "hosted")]
)
def test_down_exchange_and_up_at_the_same_time(hosts: str, path: str, half: str) -> None:
    """Copies down are done one by one at all ranks. The exchange follows at once, and so do copies up."""
    n = 192
    with short_segments(64, 64, 64):
        all_, fabric = workers(hosts, path, n)
        for worker in all_:
            worker.begin(half)
            worker.look()
        assert fabric.sent_bytes == 0
        assert all(worker.counted("host_to_device") == worker.up for worker in all_)
        # After each copy down: how many messages are sent, how many copies up are begun, how many of them are done.
        seen: list[tuple[int, int, int]] = []
        ups_done = 0
        while sum(worker.copied_down() for worker in all_):
            for _ in range(3):  # what one rank counts another sees
                for worker in all_:
                    worker.look()
            ups_done += sum(worker.copied_up() for worker in all_)
            ups = sum(worker.counted("host_to_device") - worker.up for worker in all_)
            seen.append((fabric.sent_messages, ups, ups_done))
        for worker in all_:
            worker.end()
        sent, ups = fabric.sent_messages, sum(worker.counted("host_to_device") - worker.up for worker in all_)
    steps = len(seen)
    assert steps == max(worker.own.stop - worker.own.start if half == "allgather" else n for worker in all_) // 16
    first_up = next(i for i, one in enumerate(seen) if one[1])
    first_done = next(i for i, one in enumerate(seen) if one[2])
    # Up, and done, while a quarter of it still has to go down: not in the stream of those copies.
    assert first_up <= first_done < 3 * steps / 4
    if path != "direct":
        first_sent = next(i for i, one in enumerate(seen) if one[0])
        assert first_sent <= first_up
    if path != "direct" and half == "allgather":
        assert seen[first_up][0] < sent / 2 + 1  # the first part comes up before the other half has been sent
    if half == "reduce_scatter":
        assert ups == sum(-(-(worker.own.stop - worker.own.start) // 16) for worker in all_)


def test_the_first_segment_is_sent_when_it_is_down() -> None:
    """And no sooner: two ranks, by messages, chunks of eight segments."""
    with short_segments(64, 64, 64):
        (first, second), fabric = workers("ab", "messages", 2 * 8 * 16)
        for worker in (first, second):
            worker.begin("reduce_scatter")
            worker.look()
        for done in range(1, 4):
            assert first.copied_down()
            first.look()
            assert fabric.bytes_between == {(0, 1): 64 * done}
            second.look()
            assert second.counted("host_to_device") == second.up  # it has nothing of its own yet
        for _ in range(8):
            assert second.copied_down()  # what the first one owns
        assert second.copied_down()
        second.look()
        # Of 8 messages 3 have come. One sum is complete, and is on its way up beside what goes down.
        assert second.counted("host_to_device") == second.up + 1
        assert second.copied_up()
        assert not second.copied_up()
        assert second.copied_down()
        for worker in (first, second, first):
            worker.end()
        total = values_of(0, 0, second.n, F32) + values_of(1, 0, second.n, F32)
        for worker in (first, second):
            worker.gpu.hold(False)
            assert np.array_equal(worker.space.to_host(worker.values)[worker.own], total[worker.own])


def test_some_segments_are_begun_ahead() -> None:
    with short_segments(64, 64, 64):
        (worker,), _ = workers("a", "messages", 16 * 3 * AHEAD)
        worker.begin("reduce_scatter")
        worker.look()
        for done in range(3):
            assert worker.counted("device_to_host") == AHEAD + done
            worker.copied_down()
            worker.look()
        worker.end()


@pytest.mark.parametrize(("hosts", "path"), [("ab", "messages"), ("aa", "direct"), ("aab", "hosted")])
@pytest.mark.parametrize("half", ["reduce_scatter", "allgather"])
def test_given_up_half_way(hosts: str, path: str, half: str) -> None:
    """Whatever is under way then: the arrays' memory may be used again, and all can be given back."""
    with short_segments(64, 64, 64):
        for looks in range(0, 10, 2):
            all_, _ = workers(hosts, path, 300)
            for worker in all_:
                worker.begin(half)
            for _ in range(looks):
                for worker in all_:
                    worker.look()
                    worker.copied_down()
            for worker in all_:
                worker.running.cancel()
                memory = worker.values.memory
                del worker.values
                again = worker.space.zeros(300, F32)
                assert again.memory is not memory
                worker.space.copy(worker.way.value, again)
            for worker in all_:
                worker.gpu.hold(False)
                worker.space.close()
                assert worker.counted("frees") == worker.counted("allocations")


def test_a_failing_gpu_is_an_error_of_the_round() -> None:
    with short_segments(64, 64, 64):
        all_, _ = workers("aa", "direct", 300)
        for worker in all_:
            worker.begin("reduce_scatter")
        all_[0].gpu.fail("copy", 5)
        with pytest.raises(MpikvError, match="`copy` fails"):
            all_[0].look()
        all_[1].look()
        all_[1].running.cancel()
        for worker in all_:
            worker.gpu.hold(False)
            worker.space.close()


# --- which copies


@pytest.mark.parametrize("seed", range(20))
def test_which_copies_bring_what_is_needed(seed: int) -> None:
    random = np.random.default_rng(seed)
    cuts = np.unique(random.integers(0, 200, 20))
    spans = [(int(a), int(b)) for a, b in itertools.pairwise(cuts)]
    spans = [spans[i] for i in random.permutation(len(spans))[: len(spans) - seed % 3]]
    most = int(random.integers(1, 80))
    copies, copy_of = gathered(spans, most)
    brought = sorted(x for begin, end in copies for x in range(begin, end))
    assert brought == sorted(x for begin, end in spans for x in range(begin, end))
    for (begin, end), copy in zip(spans, copy_of, strict=True):
        assert copies[copy][0] <= begin < end <= copies[copy][1]
    assert all(end - begin <= most or (begin, end) in spans for begin, end in copies)
    firsts = [copy_of.index(copy) for copy in range(len(copies))]
    assert firsts == sorted(firsts)


def test_what_fits_goes_in_one_copy() -> None:
    assert gathered([(5, 9), (0, 2), (2, 5)], 9) == ([(0, 9)], [0, 0, 0])
    assert gathered([(5, 9), (0, 2), (2, 5)], 7) == ([(2, 9), (0, 2)], [0, 1, 0])
    assert gathered([], 7) == ([], [])
    assert SEGMENT_BYTES % 8 == 0


# --- stores


def run(
    hosts: str, body: Callable[[Any, FakeGpu], Any], *, seed: int = 0, watched: bool = True, **settings: Any
) -> list[Any]:
    """`body(store, gpu)` on workers that share a GPU; looks at all that the host does with memory of collectives."""
    gpu = FakeGpu(seed=seed)
    gpus = [gpu, *(gpu.view() for _ in hosts[1:])]
    config = Config(timeout_s=TEST_TIMEOUT_S, device_path="staged", **settings)
    watch = Watch(gpus)
    with watch.sums():
        found = spawn_stores(
            "dist_sync",
            len(hosts),
            lambda store: body(store, gpus[store.rank]),
            hosts=hosts,
            drivers=gpus,
            config=config,
            fabric=watch.fabric(hosts),
        )
    assert watch.looks or len(hosts) == 1 or not watched
    for one in gpus:
        assert one.counts["frees"] == one.counts["allocations"]
    return found


def check_values(hosts: str, settings: dict[str, Any], n: int, dtype: Any, seed: int) -> None:
    """The bits of keys in host memory on the same workers, and exactly as many bytes as a copy of everything takes."""
    dtype = np.dtype(dtype)
    wide = sum_dtype(dtype).itemsize

    def calls(store: Any, put: Any, get: Any) -> list[bytes]:
        store.init("w", put(np.arange(n).astype(dtype)))
        if dtype.kind not in "iu":
            store.set_optimizer(optimizers.create("sgd", learning_rate=0.5, momentum=0.5))
        out, found = put(np.empty(n, dtype)), []
        for step in range(2):
            for i in range(2):
                store.push("w", put(values_of(store.rank, 2 * step + i, n, dtype)))
            store.pull("w", out)
            found.append(get(out).tobytes())
        return found

    def on_device(store: Any, gpu: FakeGpu) -> list[bytes]:
        found = calls(store, gpu.array, lambda array: array.get())
        bounds, stats = placement_of(store, "w").bounds, store.stats()
        own, first = bounds[store.rank + 1] - bounds[store.rank], store.rank == 0
        first_bytes = n * dtype.itemsize
        assert stats["copies_down_bytes"] == 4 * (n * wide + own * dtype.itemsize) + first * first_bytes
        assert stats["copies_up_bytes"] == 4 * (own * wide + (n - own) * dtype.itemsize) + (not first) * first_bytes
        return found

    with short_segments():
        config = Config(timeout_s=TEST_TIMEOUT_S, **settings)
        expected = spawn_stores(
            "dist_sync", len(hosts), lambda store: calls(store, np.array, np.array), hosts=hosts, config=config
        )
        watched = settings.get("algorithm") != "halving_doubling" and n > 0
        assert run(hosts, on_device, seed=seed, watched=watched, **settings) == expected


@pytest.mark.parametrize(("hosts", "settings"), MESSAGES)
@pytest.mark.parametrize("n", [0, 1, 3, 1001])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.grid(1)
def test_values_by_messages(hosts: str, settings: dict[str, Any], n: int, seed: int) -> None:
    check_values(hosts, settings, n, F32, seed)


@pytest.mark.parametrize(("hosts", "settings"), MEMORY)
@pytest.mark.parametrize("n", [0, 1, 3, 1001])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.grid(1)
def test_values_through_memory(hosts: str, settings: dict[str, Any], n: int, seed: int) -> None:
    check_values(hosts, settings, n, F32, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hosts", "settings"), [("aa", {}), ("aab", {}), ("ab", {})])
@pytest.mark.grid(1)
def test_values_of_all_dtypes(hosts: str, settings: dict[str, Any], dtype: Any) -> None:
    check_values(hosts, settings, 501, dtype, 0)


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_a_refused_round_of_a_long_key(hosts: str) -> None:
    """Nobody updates anything, and the old value comes up again."""
    n = 500

    def body(store: Any, gpu: FakeGpu) -> Any:
        sgd = optimizers.create("sgd", learning_rate=1.0)
        store.init("w", gpu.array(np.ones(n, F32)))
        store.set_optimizer(sgd)
        sgd.learning_rate = 1.0 + store.rank
        store.push("w", gpu.array(np.ones(n, F32)))
        out = gpu.array(np.zeros(n, F32))
        with pytest.raises(ConfigError, match="learning_rate"):
            store.pull("w", out)
        store.close()
        return out.get().tolist()

    with short_segments():
        assert run(hosts, body) == [[1.0] * n] * len(hosts)


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_close_with_rounds_of_long_keys_under_way(hosts: str) -> None:
    def body(store: Any, gpu: FakeGpu) -> None:
        keys = ["a", "b", "c"]
        store.init(keys, [gpu.array(np.ones(n, F32)) for n in (700, 3, 900)])
        for _ in range(3):
            store.push(keys, [gpu.array(np.ones(n, F32)) for n in (700, 3, 900)])
        store.close()
        assert store.session.closed

    with short_segments():
        run(hosts, body)


def test_lengths_of_segments_in_these_tests() -> None:
    """A value of 1001 elements has several copies of several segments, also of one of five ranks' parts."""
    assert 1001 * 4 // 5 > 2 * 256 > 2 * 2 * LINK_BYTES
    assert HOST_BYTES > LINK_BYTES
