"""Puts the clocks of several machines together.

A question at `asked`, answered at `answered`, both by the clock of machine m, with a time T of another one in the
answer: T was read in between. So the difference of the clocks lies in [asked - T, answered - T], whose middle is off by
half of that at most (RFC 5905, section 10). All such intervals of two machines hold at once, hence their intersection
does. A clock that runs faster than another is corrected first, by the quickest answers at the begin and at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from mpikv.commands.trace.files import Rank

DRIFT_NS = 5_000_000_000  # over a shorter time clocks run equally fast, as far as quick answers can tell
NEAR_END = 0.25  # of the time, in which the quickest answers of its begin and its end are looked for


class Probe(NamedTuple):
    """A reading of another clock. at_ns: when; least_ns, most_ns: how far that clock is behind this one."""

    at_ns: float
    least_ns: float
    most_ns: float

    @property
    def width_ns(self) -> float:
        return self.most_ns - self.least_ns

    @property
    def middle_ns(self) -> float:
        return (self.least_ns + self.most_ns) / 2


@dataclass(frozen=True)
class ClockOffset:
    """What is added to a machine's time to get that of the first one. error_ns: how far that may be off; None: nobody
    has compared them.
    """

    offset_ns: float = 0.0
    drift: float = 0.0
    about_ns: float = 0.0
    error_ns: float | None = None

    def common(self, time_ns: float) -> float:
        return time_ns + self.offset_ns + self.drift * (time_ns - self.about_ns)


def clocks_of(ranks: Sequence[Rank]) -> dict[str, ClockOffset]:
    """Return, by machine, how to get the time of the first rank's machine."""
    first = ranks[0].header["machine"]
    machine_of = {(rank.header["store"], *rank.role): rank.header["machine"] for rank in ranks}
    probes: dict[str, list[Probe]] = {}
    for rank in ranks:
        mine = rank.header["machine"]
        for event in (event for event in rank.events if event.kind == "clock"):
            role, number, time_ns = event.what
            other = machine_of.get((rank.header["store"], role, number), mine)
            begun_ns, ended_ns = event.begun_ns - time_ns, event.ended_ns - time_ns
            if mine == first != other:
                probes.setdefault(other, []).append(Probe(time_ns, begun_ns, ended_ns))
            elif other == first != mine:
                middle = (event.begun_ns + event.ended_ns) / 2
                probes.setdefault(mine, []).append(Probe(middle, -ended_ns, -begun_ns))
    found = {rank.header["machine"]: ClockOffset() for rank in ranks}
    return {**found, **{machine: compared(some) for machine, some in probes.items()}, first: ClockOffset(error_ns=0.0)}


def compared(probes: Sequence[Probe]) -> ClockOffset:
    """Return what all readings of one clock say together."""
    begin, end = min(probe.at_ns for probe in probes), max(probe.at_ns for probe in probes)
    drift = uncertain_ns = 0.0
    if end - begin >= DRIFT_NS:
        near, width = NEAR_END * (end - begin), attrgetter("width_ns")
        early = min((probe for probe in probes if probe.at_ns <= begin + near), key=width)
        late = min((probe for probe in probes if probe.at_ns >= end - near), key=width)
        drift = (late.middle_ns - early.middle_ns) / (late.at_ns - early.at_ns)
        uncertain_ns = (early.width_ns + late.width_ns) / 2
    least = max(probe.least_ns - drift * (probe.at_ns - begin) for probe in probes)
    most = min(probe.most_ns - drift * (probe.at_ns - begin) for probe in probes)
    # Where they contradict each other, the clock has changed its rate: the error is then what they disagree by.
    return ClockOffset((least + most) / 2, drift, begin, abs(most - least) / 2 + uncertain_ns)
