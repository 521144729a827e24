"""The tags of the messages of process groups: each group has its own, and so has each call of a group."""

from __future__ import annotations

from typing import NamedTuple

from mpikv.errors import UnsupportedError

WINDOW_BITS = 5  # calls under way by messages at the same time: 32
LEAST_BITS = 21  # UCX's tags, the shortest among the usual ones, have 23


class GroupTags(NamedTuple):
    """The layout of a tag: one bit for point-to-point, half of the others for the group, `low_bits` for the rest.

    base: the bits of the group's number. user: the bit for point-to-point.
    """

    low_bits: int
    base: int
    user: int

    @classmethod
    def of(cls, max_tag: int, number: int) -> GroupTags:
        """Return the tags of group `number`, from 1 on."""
        bits = (max_tag + 1).bit_length() - 1
        if bits < LEAST_BITS:
            raise UnsupportedError(f"this MPI has tags up to {max_tag} only; process groups need {2**LEAST_BITS - 1}")
        low_bits = (bits - 1) // 2
        most = (1 << (bits - 1 - low_bits)) - 1
        if number > most:
            raise UnsupportedError(f"more than {most} process groups in one job: this MPI has tags up to {max_tag}")
        return cls(low_bits, number << low_bits, 1 << (bits - 1))

    def of_call(self, number: int, digest_: int) -> int:
        """Return the tag for the messages of call `number`: its number and some bits of its digest.

        Calls under way have different numbers. Different calls that ranks make under one number have, most probably,
        different digests, so their messages are not mixed up.
        """
        bits = self.low_bits - WINDOW_BITS
        return self.base | (number % (1 << WINDOW_BITS)) << bits | digest_ % (1 << bits)

    def of_user(self, tag: int) -> int:
        """Return the tag of messages between two ranks that the user gives `tag`."""
        limit = (1 << self.low_bits) - 1
        if not 0 <= tag <= limit:
            raise ValueError(f"tag {tag} of a message: tags are 0 to {limit}")
        return self.user | self.base | tag
