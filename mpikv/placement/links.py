"""How much the link of each host carries, and how late a message is there: the one place of these numbers.

They are measured while a store on several hosts is made (create/link_trial.py), or given by MPIKV_LINK.

A measured rate differs a little from one time to the next, and where a key is cut depends on the rates. So what was
measured is one host's rate, that in the middle, and for every other host that rate times a power of `STEP`: hosts whose
links are within 18 % of it count as equal, and equal links give the same cut whatever their rate.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpikv.common import units
from mpikv.common.checks import plain, shown
from mpikv.common.files import read_text
from mpikv.errors import ConfigError

# Across a link a segment must be a short message for MPI (Open MPI's TCP: up to 64 KiB with its header). A longer one
# is announced first and sent when the receiver has agreed, and the agreement waits in the socket behind everything that
# the receiver is sending itself: with 2 segments of 256 KiB under way in both directions half of the link stayed idle.
LINK_SEGMENT_BYTES = 60 << 10
STEP = 1.4
DEFAULT_LATENCY = "50us"


@dataclass(frozen=True)
class LinkRates:
    """The link of each host: so many bytes per second out, and at the same time as many in.

    bytes_per_s: of hosts that are not in by_host. source: where this is from.
    """

    bytes_per_s: float
    latency_s: float
    by_host: tuple[tuple[str, float], ...] = ()
    source: str = "assumed"

    def of(self, host: str) -> float:
        return self._rates.get(host, self.bytes_per_s)

    @cached_property
    def _rates(self) -> dict[str, float]:
        return dict(self.by_host)

    def __str__(self) -> str:
        others = "".join(f", {host} {_mbit(rate)}" for host, rate in self.by_host if rate != self.bytes_per_s)
        return f"{self.source}: {_mbit(self.bytes_per_s)}, {self.latency_s * 1e6:.3g} us{others}"


ASSUMED = LinkRates(units.rate("10gbit"), units.duration(DEFAULT_LATENCY))


def _mbit(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.3g} Mbit/s"


def in_ring(hosts: Sequence[str], bytes_per_s: Sequence[float], latencies_s: Sequence[float]) -> LinkRates:
    """What follows from a stream of each host to the next one, and of the last one to the first.

    A stream is as fast as the slower of its two links, so a link carries what the faster of its two streams does.
    """
    rates = [max(rate, bytes_per_s[i - 1]) for i, rate in enumerate(bytes_per_s)]
    middle = float(f"{statistics.median_high(rates):.3g}")
    steps = [round(math.log(rate / middle, STEP)) for rate in rates]
    by_host = tuple((host, middle * STEP**step) for host, step in zip(hosts, steps, strict=True))
    return LinkRates(middle, float(f"{statistics.median(latencies_s):.2g}"), by_host, "measured")


def given(text: str) -> LinkRates | None:
    """What MPIKV_LINK gives; None: nothing. Raises ConfigError that names the file and what is wrong with it."""
    if text == "auto":
        return None
    rate, _, latency = text.partition(",")
    try:
        return LinkRates(units.rate(rate), units.duration(latency or DEFAULT_LATENCY), source=f"MPIKV_LINK={text}")
    except ValueError:
        return _read(text)


def expected(text: str) -> LinkRates:
    """What MPIKV_LINK gives, or what is assumed where nothing has been measured."""
    return given(text) or ASSUMED


def announced(text: str) -> str:
    """What must be the same on all ranks: the text, or of a file, which each host may have, what it says."""
    found = given(text)
    return json.dumps(to_json(found), sort_keys=True) if found is not None and found.by_host else text


def _read(name: str) -> LinkRates:
    try:
        return from_json(json.loads(read_text(name)), f"MPIKV_LINK={name}")
    except OSError as error:
        raise ConfigError(f"MPIKV_LINK={shown(name)}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise ConfigError(
            f"MPIKV_LINK={shown(name)}: no file that `mpikv bench link --save` has written; make it again"
        ) from None


def from_json(content: Mapping[str, Any], source: str) -> LinkRates:
    """What `to_json` has returned. Raises one of the errors that `_read` names."""
    rate, latency_s = float(content["bytes_per_s"]), float(content["latency_s"])
    by_host = tuple((plain(host), float(value)) for host, value in content["hosts"].items())
    numbers = [rate, *(value for _, value in by_host)]
    if not (all(0 < number < math.inf for number in numbers) and 0 <= latency_s < math.inf):
        raise ValueError("a rate or a latency is none")
    return LinkRates(rate, latency_s, by_host, source)


def to_json(rates: LinkRates) -> dict[str, Any]:
    return {"bytes_per_s": rates.bytes_per_s, "latency_s": rates.latency_s, "hosts": dict(rates.by_host)}
