"""Readings of another clock, put together: against clocks whose difference and rate are known."""

from __future__ import annotations

import random

import pytest

from mpikv.commands.trace.clocks import Probe, clocks_of, compared
from mpikv.commands.trace.files import Event, Rank

S = 1e9


def readings(offset_ns: float, drift: float, times_s: list[float], rng: random.Random) -> list[Probe]:
    """Of a clock that is `offset` behind at time 0 and falls back by `drift`: each takes 20 us to 2 ms."""
    found = []
    for at_s in times_s:
        there, back = rng.uniform(1e4, 1e6), rng.uniform(1e4, 1e6)
        behind = offset_ns + drift * at_s * S
        found.append(Probe(at_s * S, behind - there, behind + back))
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("drift", [0.0, 2e-5, -4e-5])
def test_the_error_that_is_claimed_holds_at_every_time(seed, drift):
    rng = random.Random(seed)
    offset_ns = rng.uniform(-1e12, 1e12)
    times = sorted(rng.uniform(0, 4 if not drift else 600) for _ in range(200))
    probes = readings(offset_ns, drift, times, rng)
    found = compared(probes)
    assert found.error_ns is not None
    for at_s in (times[0], times[99], times[-1]):
        assert abs(found.common(at_s * S) - at_s * S - offset_ns - drift * at_s * S) <= found.error_ns + 1.0
    assert found.drift == pytest.approx(drift, abs=2e-6)
    assert found.error_ns <= 1e6
    if not drift:
        assert found.drift == 0.0
        assert abs(found.offset_ns - offset_ns) <= found.error_ns <= min((p.most_ns - p.least_ns) / 2 for p in probes)


def test_readings_that_contradict_each_other_have_an_error_as_large_as_that():
    assert compared([Probe(0, 0, 10), Probe(1, 100, 110)]).error_ns == 45.0


def rank(role: str, number: int, machine: str, *clocks: tuple[int, int, tuple[str, int, int]]) -> Rank:
    header = {"role": role, "number": number, "host": machine, "pid": number, "machine": machine, "store": "s"}
    return Rank(header, [Event("clock", begun, ended, list(what), 0, 0, "t") for begun, ended, what in clocks])


def test_workers_ask_worker_0_and_worker_0_asks_servers():
    ranks = [
        rank("worker", 0, "a", (1000, 1040, ("server", 0, 520))),
        rank("worker", 1, "b", (100, 120, ("worker", 0, 1110))),
        rank("worker", 2, "a"),
        rank("worker", 3, "d"),
        rank("server", 0, "c"),
    ]
    found = clocks_of(ranks)
    assert found["a"].common(7) == 7
    assert (found["b"].common(110), found["b"].error_ns) == (1110, 10)
    assert (found["c"].common(520), found["c"].error_ns) == (1020, 20)
    assert found["d"].error_ns is None
