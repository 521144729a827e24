"""Values of a fake GPU by messages: the bits of host memory, no race, no copy to the host, and what is sent."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_rounds import FIRST, Case, Side, run_rounds

from mpikv.collectives import notes, ring
from mpikv.collectives.device_group import DeviceGroup
from mpikv.collectives.labelled import NOTE_BYTES, Said
from mpikv.collectives.select import ALGORITHMS
from mpikv.engine.request import Predicate
from mpikv.engine.running import run
from mpikv.errors import MpikvError
from mpikv.placement import Path
from mpikv.spaces.device import DeviceSpace
from mpikv.testing.device_transport import DeviceFabric
from mpikv.testing.fake_gpu import FakeGpu, RaceError
from mpikv.testing.ranks import RankError, run_collective, spawn
from mpikv.transports.base import Group
from mpikv.transports.faulty import Death, Faults, FaultyFabric
from mpikv.transports.threads import Fabric

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)
OPS = (np.add, np.minimum, np.maximum, np.multiply)
LAYOUTS = {1: "a", 2: "ab", 3: "aab", 4: "aabb", 5: "aabbb"}  # several hosts, for the hierarchical algorithm
LONG = 200_003  # elements: several segments, of a ring as well as of a host's


def on_host(hosts: str, cases: list[Case]) -> list:
    return spawn(len(hosts), lambda t: run_rounds("messages", t, Side(), cases), hosts=hosts)


def on_gpus(
    hosts: str, cases: list[Case], seed: int = 0, *, one_gpu: bool = False, fabric: Fabric | None = None
) -> list:
    """Also that nothing has crossed between host and device."""
    p = len(hosts)
    first = FakeGpu(seed=seed, eager=0.3)
    gpus = [first.view() for _ in range(p)] if one_gpu else [FakeGpu(seed=seed * 10 + r) for r in range(p)]

    def body(transport):
        side = Side(gpus[transport.rank])
        found = run_rounds("mpi", transport, side, cases)
        assert side.crossings == {"host_to_device": 0, "device_to_host": 0}
        return found

    return spawn(p, body, fabric=DeviceFabric(Fabric(p, hosts) if fabric is None else fabric, gpus), timeout_s=120)


@pytest.mark.grid(1)
@pytest.mark.parametrize("p", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_bits_of_host_memory(algorithm: str, p: int) -> None:
    """All dtypes and lengths, all keys at once."""
    hosts = LAYOUTS[p] if algorithm == "hierarchical" else "a" * p
    cases = [Case(algorithm, n) for n in (0, 1, 2, 5, 64, 1001)]
    cases += [Case(algorithm, 37, dtype) for dtype in DTYPES]
    cases += [Case(algorithm, 37, dtype, op) for dtype, op in itertools.product((np.float16, np.int32), OPS)]
    assert on_gpus(hosts, cases) == on_host(hosts, cases)


@pytest.mark.grid(1)
@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_long_values(algorithm: str, p: int) -> None:
    """Windows of scratch memory are used again and again, also between hosts."""
    cases = [Case(algorithm, LONG, rounds=1), Case(algorithm, LONG // 3, np.float64)]
    for hosts in {"a" * p, LAYOUTS[p], "abcde"[:p]}:
        assert on_gpus(hosts, cases) == on_host(hosts, cases)


@pytest.mark.grid(1)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("one_gpu", [False, True], ids=["each its own", "one for all"])
def test_any_order_of_work_and_messages(seed: int, one_gpu: bool) -> None:
    hosts = ("aa", "aab", "aabb", "abc")[seed % 4]
    cases = [Case(algorithm, n, rounds=3) for algorithm in ALGORITHMS for n in (3, 40_001)]
    fabric = FaultyFabric(len(hosts), lambda rank: Faults(seed=seed), hosts)
    assert on_gpus(hosts, cases, seed, one_gpu=one_gpu, fabric=fabric) == on_host(hosts, cases)


def label_rounds(p: int) -> list:
    """All alike; one worker with another factor, all different, another text, another way of adding; all alike."""
    odd = [tuple(other if rank == p - 1 else FIRST for rank in range(p)) for other in (
        FIRST._replace(factor=3.0), FIRST._replace(text='{"lr": 3}'), FIRST._replace(op="max"),
        FIRST._replace(factor=0.0), FIRST._replace(text='{"lr": 3}', factor=3.0),
    )]  # fmt: skip
    different = tuple(FIRST._replace(factor=1 / (rank + 3)) for rank in range(p))
    return [(FIRST,) * p, *odd, different, different, (FIRST._replace(factor=0.3),) * p]


@pytest.mark.grid(1)
@pytest.mark.parametrize("p", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_labels_and_factors(algorithm: str, p: int) -> None:
    """What owners know before they update, and in which units their sums are: the same bits."""
    hosts = LAYOUTS[p] if algorithm == "hierarchical" else "a" * p
    cases = [Case(algorithm, n, dtype, labels=label_rounds(p)) for n in (0, 1, 41) for dtype in (np.float32, np.int32)]
    cases.append(Case(algorithm, 70_001, ml_dtypes.bfloat16, labels=label_rounds(p)))
    results = on_gpus(hosts, cases)
    assert results == on_host(hosts, cases)
    if p > 1:
        wrong = [known for _, known, _ in results[0][2][1:]]
        assert wrong == [False, False, True, True, True, True, False, False, False]


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_what_is_sent(p: int) -> None:
    """As from host memory; where labels are compared, one note to each, in ceil(log2(p)) messages, in each round."""
    steps = (p - 1).bit_length()
    for algorithm in ALGORITHMS:
        plain, labelled = Case(algorithm, 1001), Case(algorithm, 1001, labels=[(FIRST,) * p] * 2)
        expected = sent("messages", p, plain)
        assert sent("mpi", p, plain) == expected
        assert sent("mpi", p, labelled) == [
            (messages + 2 * steps, n_bytes + 2 * (p - 1) * NOTE_BYTES) for messages, n_bytes in expected
        ]


def sent(path: Path, p: int, case: Case) -> list[tuple[int, int]]:
    """Messages and bytes of each rank."""
    gpus = [FakeGpu() for _ in range(p)]

    def body(transport):
        run_rounds(path, transport, Side(gpus[transport.rank] if path == "mpi" else None), [case])
        return transport.sent_messages, transport.sent_bytes

    return spawn(p, body, fabric=DeviceFabric(Fabric(p), gpus))


@pytest.mark.parametrize("p", range(1, 10))
def test_notes_come_to_all(p: int) -> None:
    said = [Said(2**63 + rank, rank / 3, rank % 4) for rank in range(p)]
    assert run_collective(p, lambda group: notes.exchange(group, said[group.rank], 5)) == [said] * p


class Stream:
    """In place of a space: how far its stream has come, the test says."""

    def __init__(self) -> None:
        self.put = self.ran = 0
        self.driver = self

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begun(self) -> Predicate:
        self.put += 1
        number = self.put
        return Predicate(lambda: self.ran >= number)


class Waiter:
    def wake(self) -> None:
        """Nothing: what counts is whether it was promised."""


def test_messages_wait_for_the_stream_in_their_order() -> None:
    """Nobody else would notice that one is due, so while any waits whoever tests one is not told to sleep."""
    transport, stream, waiter = Fabric(1).rank(0), Stream(), Waiter()
    group = DeviceGroup(transport, [0], stream)
    part = group.part([0])
    received, sent = np.zeros(2), np.ones(2)
    receive, send, late = group.irecv(received, 0, 1), part.isend(sent, 0, 1), group.isend(sent, 0, 2)
    assert transport.sent_messages == 0
    assert not receive.wakes(waiter)
    stream.ran = 1
    assert not receive.test()
    assert not receive.wakes(waiter)
    stream.ran = 2
    assert not late.test()  # which starts the message before it
    assert transport.sent_messages == 1
    assert receive.test()
    assert send.test()
    assert received.tolist() == [1, 1]
    assert not late.wakes(waiter)
    missing = group.irecv(received, 0, 3)
    stream.ran = 4
    assert late.test()
    assert late.test()
    assert not missing.test()
    assert missing.wakes(waiter)


# --- what goes wrong


class OnlyOnItsGpu:
    """A transport that takes device memory only where its GPU is the calling thread's current one."""

    def __init__(self, inner: Any, gpu: FakeGpu) -> None:
        self._inner, self._gpu, self.n_messages = inner, gpu, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def isend(self, *args: Any) -> Any:
        return self._checked(self._inner.isend, args)

    def irecv(self, *args: Any) -> Any:
        return self._checked(self._inner.irecv, args)

    def _checked(self, call: Any, args: Any) -> Any:
        assert self._gpu.is_current
        self.n_messages += 1
        return call(*args)


def test_messages_are_begun_with_their_gpu_as_the_current_one() -> None:
    gpus = [FakeGpu(), FakeGpu()]

    def body(transport: Any) -> int:
        gpu = gpus[transport.rank]
        space, seen = DeviceSpace(gpu), OnlyOnItsGpu(transport, gpu)
        buf = space.from_host(np.ones(40, np.float32))
        group = DeviceGroup(seen, [0, 1], space)
        run(ring.reduce_scatter(group, buf, (0, 20, 40), 1), 20.0, lambda: AssertionError("it has not ended"))
        assert not gpu.is_current
        return seen.n_messages

    assert spawn(2, body, fabric=DeviceFabric(Fabric(2), gpus)) == [2, 2]


def test_a_message_that_does_not_wait_for_the_stream_is_found() -> None:
    """The tests above can fail: a group of plain messages does."""

    def body(transport):
        space, group = DeviceSpace(gpus[transport.rank]), Group(transport, range(2))
        group.isend(space.zeros(5, np.dtype(np.float32)), 1 - group.rank, 1)

    gpus = [FakeGpu(), FakeGpu()]
    with pytest.raises(RankError) as found:
        spawn(2, body, fabric=DeviceFabric(Fabric(2), gpus))
    assert all(isinstance(error, RaceError) for error in found.value.errors.values())


def test_a_gpu_that_fails_ends_the_round() -> None:
    gpus = [FakeGpu(), FakeGpu()]

    def body(transport):
        gpu = gpus[transport.rank]
        gpu.fail("done", 5 + transport.rank, MpikvError("GPU 0 has failed"), always=True)
        run_rounds("mpi", transport, Side(gpu), [Case("ring", 1000)])

    with pytest.raises(RankError) as found:
        spawn(2, body, fabric=DeviceFabric(Fabric(2), gpus))
    assert all("GPU 0 has failed" in str(found.value.errors[rank]) for rank in range(2))


def test_a_rank_that_dies_ends_its_round() -> None:
    gpus = [FakeGpu(), FakeGpu()]
    fabric = FaultyFabric(2, lambda rank: Faults(death=Death(sends=1)))
    with pytest.raises(RankError) as found:
        spawn(
            2,
            lambda t: run_rounds("mpi", t, Side(gpus[t.rank]), [Case("ring", 1000)]),
            fabric=DeviceFabric(fabric, gpus),
        )
    assert all("was killed after 1 messages" in str(found.value.errors[rank]) for rank in range(2))


def test_memory_is_used_again() -> None:
    """After many rounds a store holds no more than after a few."""
    gpus = [FakeGpu(), FakeGpu()]

    def body(transport):
        side = Side(gpus[transport.rank])
        run_rounds("mpi", transport, side, [Case("ring", 1000, rounds=3)])
        held = side.space.pool.held_bytes
        run_rounds("mpi", transport, side, [Case("ring", 1000, rounds=30)])
        return side.space.pool.held_bytes - held

    assert spawn(2, body, fabric=DeviceFabric(Fabric(2), gpus)) == [0, 0]
