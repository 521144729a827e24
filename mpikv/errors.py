"""The errors that mpikv raises.

One base class, so that `except MpikvError` catches everything the library itself raises. It is a RuntimeError, which
PyTorch and Horovod raise in the same places, and a few leaves are also the built-in exception a reader would expect
(`KeyError`, `ValueError`, `TimeoutError`). Plain mistakes in an argument
(an unknown name, a negative count) are plain `ValueError`, `TypeError` or `KeyError`.
"""

from __future__ import annotations


class MpikvError(RuntimeError):
    """Base of all errors of this library; raised itself for a call on a closed store.

    >>> store = kv.create('local')
    >>> store.close()
    >>> store.pull('w')
    Traceback (most recent call last):
    mpikv.errors.MpikvError: ...
    """


class ConfigError(MpikvError, ValueError):
    """A setting is wrong: a variable, an option, or something that the ranks should have alike. Nothing was started.

    >>> mpikv.Config(num_servers=-1)
    Traceback (most recent call last):
    mpikv.errors.ConfigError: Config(num_servers=-1): -1 must be at least 0
    """


class KeyNotInitialized(MpikvError, KeyError):  # noqa: N818 - the name is part of the public contract
    """A key was pushed or pulled before `init`.

    >>> kv.create('local').pull('w')
    Traceback (most recent call last):
    mpikv.errors.KeyNotInitialized: pull: key 'w' ...
    """

    # KeyError prints repr(message), which turns a sentence into a quoted string with escapes.
    __str__ = Exception.__str__


class KeyExists(MpikvError, KeyError):  # noqa: N818 - reads like its sibling
    """`init` was called for a key that the store already holds; nothing was changed.

    >>> store = kv.create('local')
    >>> store.init('w', np.zeros(2))
    >>> store.init('w', np.ones(2))
    Traceback (most recent call last):
    mpikv.errors.KeyExists: init: key 'w' is there already ...
    """

    __str__ = Exception.__str__


class ShapeMismatch(MpikvError, ValueError):  # noqa: N818 - the name is part of the public contract
    """An array's shape or dtype is not the one that was agreed at `init`; nothing was sent.

    >>> store = kv.create('local')
    >>> store.init('w', np.zeros(2))
    >>> store.push('w', np.zeros(3))
    Traceback (most recent call last):
    mpikv.errors.ShapeMismatch: push: ...
    """


class UnsupportedError(MpikvError):
    """The call exists, but not in this mode or not for this kind of array.

    >>> kv.create('local').zeros(3, 'complex64')
    Traceback (most recent call last):
    mpikv.errors.UnsupportedError: dtype 'complex64'...
    """


class StatesFileError(MpikvError, ValueError):
    """A file of optimizer states is damaged, truncated or no such file at all; nothing was changed.

    >>> store = kv.create('local')
    >>> store.init('w', np.zeros(2))
    >>> store.set_optimizer('sgd')
    >>> n_bytes = open('states', 'wb').write(b'something else')
    >>> store.load_optimizer_states('states')
    Traceback (most recent call last):
    mpikv.errors.StatesFileError: ...
    """


class StallError(MpikvError, TimeoutError):
    """A wait took longer than its limit. The text names who waited, for what, and who did not come.

    >>> from mpikv.testing.ranks import run_collective
    >>> def wait_for_the_other(group):
    ...     if group.rank == 0:
    ...         yield group.irecv(np.empty(2), 1, tag=7)  # which rank 1 never sends
    >>> run_collective(2, wait_for_the_other, timeout_s=0.05)
    Traceback (most recent call last):
    mpikv.testing.ranks.RankError: rank 0: StallError: ...
    """

    behind: tuple[str, int] | None = None
    """A worker that did not come to a round, and how many rounds it lacks to the one that was waited for."""

    deadlock: bool = False
    """Whether ranks wait for each other, so that no limit would have been long enough."""


class PeerError(MpikvError):
    """Another rank failed or left, so that what this rank waits for can never come.

    >>> from mpikv.testing.stores import spawn_stores
    >>> def body(store):
    ...     store.init('w', np.zeros(2))
    ...     if store.rank == 0:
    ...         store.push('w', np.ones(2))  # the other worker closes the store without a push
    >>> spawn_stores('dist_sync', 2, body)
    Traceback (most recent call last):
    mpikv.testing.ranks.RankError: rank 0: PeerError: ...
    """

    behind: tuple[str, int] | None = None
    """A worker that has left before a round, and how many rounds it lacks to the one that was waited for."""
