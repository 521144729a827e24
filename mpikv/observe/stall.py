"""The text of a wait that took too long: who waited for what, who did not come, where these are, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mpikv.common.checks import shown
from mpikv.placement.keys import Key


class Waiting(NamedTuple):
    """A call that blocks. It has `key`, `key_id` and `round` only where it is about one key.

    owners: the ranks that must answer, where these are not the workers. Without a round, only they are waited for.
    """

    call: str
    key: Key | None = None
    key_id: int | None = None
    round: int | None = None
    owners: tuple[str, ...] = ()

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
) -> str:
    """Make the text, one paragraph.

    arrived, missing: what each of these ranks is doing, by its label; silent: the ranks that did not answer at all.
    """
    lines = [f"{me} waited {timeout_s:g} s in {waiting}."]
    if waiting.owners and not missing:
        lines.append("No answer from " + ", ".join(waiting.owners) + ", which own it: stopped, or in a long update?")
    if missing:
        lines.append("Not arrived: " + "; ".join(f"{label} ({doing})" for label, doing in missing.items()) + ".")
    if silent:
        lines.append("Out of reach: " + ", ".join(silent) + " (stopped, swapped out, or in a long call into C).")
    if arrived:
        lines.append("Arrived: " + ", ".join(arrived) + ".")
    if missing:
        lines.append("Every worker must make this call.")
    lines.append("MPIKV_TIMEOUT_S sets the limit, if the others are only slow.")
    return " ".join(lines)
