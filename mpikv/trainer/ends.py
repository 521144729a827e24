"""What a Trainer says of a worker that does not come to a step: it counts in steps, as the program's loop does.

The store counts the rounds of a key, of which somebody who has trained for an epoch with different numbers of batches
on the workers has never heard.
"""

from __future__ import annotations

from mpikv.errors import PeerError, StallError


def in_steps(error: PeerError | StallError, step: int) -> PeerError | StallError:
    """Return the error of a wait in step `step`, beginning with what it means for the program, where known."""
    if error.behind is None:
        return error
    who, rounds = error.behind
    ended = "has left" if isinstance(error, PeerError) else "has not come to the next one"
    told = type(error)(
        f"this worker is in step {step} of its Trainer, and {who} {ended} after step {max(0, step - rounds)}: did "
        "their epochs have different numbers of batches? SplitSampler gives all workers equally many examples where it "
        f"shuffles, or with last='drop'; in `with trainer.join():` some may have more. In detail: {error}"
    )
    told.behind = error.behind
    if isinstance(error, StallError) and isinstance(told, StallError):
        told.deadlock = error.deadlock
    return told
