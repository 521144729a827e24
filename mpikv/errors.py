"""The error tree.

One base class, so that `except MpikvError` catches everything the library itself raises, and a few leaves that are also
the built-in exception a reader would expect (`KeyError`, `ValueError`, `TimeoutError`). Plain mistakes in an argument
(an unknown name, a negative count) are plain `ValueError`, `TypeError` or `KeyError`.
"""

from __future__ import annotations


class MpikvError(Exception):
    """Base of all errors of this library; raised itself for a call on a closed store."""


class ConfigError(MpikvError, ValueError):
    """A variable, an option or the ranks' agreement on them is wrong; nothing was started."""


class KeyNotInitialized(MpikvError, KeyError):  # noqa: N818 - the name is part of the public contract
    """A key was pushed or pulled before `init`."""

    # KeyError prints repr(message), which turns a sentence into a quoted string with escapes.
    __str__ = Exception.__str__


class KeyExists(MpikvError, KeyError):  # noqa: N818 - reads like its sibling
    """`init` of a key that the store already holds; nothing was changed."""

    __str__ = Exception.__str__


class ShapeMismatch(MpikvError, ValueError):  # noqa: N818 - the name is part of the public contract
    """An array's shape or dtype is not the one agreed at `init`; nothing was sent."""


class UnsupportedError(MpikvError):
    """The call exists, but not in this mode or with this kind of array."""


class StatesFileError(MpikvError, ValueError):
    """A file of optimizer states is damaged, truncated or foreign; nothing was changed."""


class StallError(MpikvError, TimeoutError):
    """A wait outlasted its limit; the text names who waited, for what, and who did not come."""

    behind: tuple[str, int] | None = None
    """A worker that did not come to a round, and how many rounds it lacks to the one that was waited for."""


class PeerError(MpikvError):
    """Another rank failed or left, so that what this rank waits for cannot come any more."""

    behind: tuple[str, int] | None = None
    """A worker that has left before a round, and how many rounds it lacks to the one that was waited for."""
