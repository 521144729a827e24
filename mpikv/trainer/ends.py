"""The error of a Trainer whose step waits in vain for another worker: it counts in steps, as the program's loop does.

The store's own error counts the rounds of a key, which mean nothing to a user whose workers have different numbers of
batches.
"""

from __future__ import annotations

from mpikv.errors import PeerError, StallError


def in_steps(error: PeerError | StallError, step: int) -> PeerError | StallError:
    """Return the error of a wait in step `step` with a text that begins with the steps of both workers, if known."""
    if error.behind is None:
        return error
    who, rounds = error.behind
    ended = "has left" if isinstance(error, PeerError) else "has not come to the next one"
    translated = type(error)(
        f"this worker is in step {step} of its Trainer, and {who} {ended} after step {max(0, step - rounds)}: did "
        "their epochs have different numbers of batches? SplitSampler gives all workers equally many examples where it "
        f"shuffles, or with last='drop'; in `with trainer.join():` some may have more. In detail: {error}"
    )
    translated.behind = error.behind
    if isinstance(error, StallError) and isinstance(translated, StallError):
        translated.deadlock = error.deadlock
    return translated
