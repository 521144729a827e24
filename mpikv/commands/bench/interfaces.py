"""How many bytes crossed this host's network interfaces, by the kernel's own counters in /proc/net/dev.

The counters include headers. On one host only the loopback interface carries anything between ranks; what does not use
TCP, as MPI within a host, is not counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

COUNTERS = Path("/proc/net/dev")
LOOPBACK = "lo"


class Traffic(NamedTuple):
    """Bytes since the host started."""

    received: int
    sent: int

    def since(self, before: Traffic) -> Traffic:
        """Return what was added since an earlier time."""
        return Traffic(self.received - before.received, self.sent - before.sent)


def parse(text: str, *, loopback: bool) -> Traffic:
    """Return the sum over the interfaces, the loopback alone or all but it. Raises ValueError for another format."""
    received = sent = 0
    for line in text.splitlines()[2:]:  # two lines of titles
        name, separator, rest = line.partition(":")
        numbers = rest.split()
        if not separator or len(numbers) < 16:
            raise ValueError(f"{COUNTERS}: {line!r} is no line of an interface's counters")
        if (name.strip() == LOOPBACK) == loopback:
            received, sent = received + int(numbers[0]), sent + int(numbers[8])
    return Traffic(received, sent)


def now(*, loopback: bool) -> Traffic:
    """Read this host's counters. Raises OSError where there is no /proc/net/dev."""
    return parse(COUNTERS.read_text(), loopback=loopback)
