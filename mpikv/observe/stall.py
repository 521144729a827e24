"""What a wait is for, and the texts of one that takes too long: who waits, who does not come, where they are."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpikv.common.checks import shown
from mpikv.placement.keys import Key

INIT = "init"  # the topic of what workers may come to in any order, each name once
SHOWN = 8  # ranks of a line that are named


class Need(NamedTuple):
    """What every worker must come to before a wait can end: `n` of `item`, as the third round of a key.

    item: a key by its number, or a call that all agree in, as `["barrier", 3]` or `["init", "w"]`, of which there is
    one.
    """

    item: Any
    n: int


class Waiting(NamedTuple):
    """A call that blocks. It has `key`, `key_id` and `round` only where it is about one key.

    owners: the ranks that must answer, where these are not the workers. Without a round, only they are waited for.
    agreed: the topic and the name of an agreement that needs every worker.
    """

    call: str
    key: Key | None = None
    key_id: int | None = None
    round: int | None = None
    owners: tuple[str, ...] = ()
    agreed: tuple[str, Any] | None = None

    @property
    def need(self) -> Need | None:
        """What every worker must come to; None where it waits for no other worker, or for an unknown one."""
        if self.agreed is not None:
            return Need(list(self.agreed), 1)
        return None if self.round is None or self.key_id is None else Need(self.key_id, self.round)

    def __str__(self) -> str:
        text = self.call
        if self.key is not None:
            text += f" of key {shown(self.key)}"
        if self.round is not None:
            text += f", round {self.round}"
        return text


def stall_text(
    waiting: Waiting,
    me: str,
    timeout_s: float,
    *,
    arrived: Mapping[str, str],
    missing: Mapping[str, str],
    silent: list[str],
    why: str = "",
) -> str:
    """Make the text, one paragraph.

    arrived, missing: what each of these ranks is doing, by its label; silent: those that did not answer at all,
    with what is known of them. why: there is no hope for this wait, whatever the limit.
    """
    lines = [f"{me} waited {timeout_s:g} s in {waiting}."]
    if waiting.owners and not missing:
        lines.append("No answer from " + ", ".join(waiting.owners) + ", which own it: stopped, or in a long update?")
    if missing:
        lines.append("Not arrived: " + "; ".join(f"{label} ({doing})" for label, doing in missing.items()) + ".")
    if silent:
        lines.append("Out of reach: " + ", ".join(silent) + ".")
    if arrived:
        lines.append("Arrived: " + ", ".join(arrived) + ".")
    if missing:
        lines.append("Every worker must make this call.")
    lines.append(why or "MPIKV_TIMEOUT_S sets the limit, if the others are only slow.")
    return " ".join(lines)


class Row(NamedTuple):
    """What the table says of one worker. doing: with seconds, which differ between workers that do the same."""

    worker: int
    pid: int
    doing: str


def table(title: str, rows: Sequence[Row], hosts: Sequence[str], more: Sequence[str] = (), what: str = "worker") -> str:
    """The table of a wait that lasts: a line of each worker, or of several that do the same. hosts: of the workers.
    more: further lines. what: what they are called.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(without_seconds(row.doing), []).append(row)
    lines = [f"mpikv: stalled for {title}"]
    for some in groups.values():
        pids = ", ".join(str(row.pid) for row in some[:SHOWN]) + (", ..." if len(some) > SHOWN else "")
        lines.append(f"  {several([row.worker for row in some], hosts, what)} (pid {pids}): {some[0].doing}")
    return "\n".join([*lines, *(f"  {line}" for line in more)])


def several(workers: Sequence[int], hosts: Sequence[str], what: str = "worker") -> str:
    """Workers by their numbers and hosts; of many, the first ones and how many there are."""
    shown_ones = sorted(workers)[:SHOWN]
    by_host = {hosts[worker]: None for worker in shown_ones}
    texts = [", ".join(str(one) for one in shown_ones if hosts[one] == host) + f" on {host}" for host in by_host]
    more = f" and {len(workers) - SHOWN} more" if len(workers) > SHOWN else ""
    return f"{what} {', '.join(texts)}{more}"


def without_seconds(text: str) -> str:
    """The text by which two moments of the same wait are one."""
    return re.sub(r"\b\d+\.\d s\b", "", text)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
