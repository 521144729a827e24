"""Which errors callers have been given: `close` raises none of these again, and one that nobody has been given.

An error that lasts, as that of a refused round, is known by its object, which is raised to whoever asks. Of one that is
made anew for each wait, as of a worker that is gone, the key is known: who was given the error of one key of a call has
been given it for all keys of that call.

Cost: nothing but where an error is raised.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpikv.errors import ConfigError, PeerError

_MARK = "given_to_a_caller"  # an attribute: an exception cannot be kept without all that its traceback refers to


class GivenErrors:
    """Those of one store. closing: `close` has begun, which has no other caller to give an error to."""

    def __init__(self) -> None:
        self.closing = False
        self._key_ids: set[int | None] = set()

    def note(self, error: BaseException, key_ids: Iterable[int | None] = ()) -> None:
        """A caller is given this error now. key_ids: of the keys of its call."""
        if self.closing:
            return
        self.mark(error)
        if isinstance(error, (ConfigError, PeerError)):
            self._key_ids.update(key_ids)

    @staticmethod
    def mark(error: BaseException) -> None:
        """A caller has been given it, or the same in another object."""
        setattr(error, _MARK, True)

    def has(self, error: BaseException, key_ids: Iterable[int | None] = ()) -> bool:
        """Whether a caller has been given this error, or one like it of one of these keys."""
        of_key = isinstance(error, (ConfigError, PeerError)) and not self._key_ids.isdisjoint(key_ids)
        return of_key or getattr(error, _MARK, False)
