"""Of the tests of `Choice`: when it decides, and what workers push in its rounds."""

from __future__ import annotations

import numpy as np

from mpikv.codecs.choice import CHECK_ROUNDS, TRIAL_ROUNDS

EACH = TRIAL_ROUNDS
FIRST = 2 * EACH  # rounds before the first decision
SECOND = FIRST + CHECK_ROUNDS + EACH  # rounds before the second one
TWO_BITS = {"type": "2bit", "threshold": 1.0}


def pushed(worker: int, round_: int) -> np.ndarray:
    return np.random.default_rng([worker, round_]).integers(-3, 4, 67).astype(np.float32)
