"""A few steps, with servers or without, in the middle of which a rank is killed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import time

import numpy as np

from mpikv import kv
from mpikv.__main__ import main


def written() -> bool:
    """Whether the files have the first three steps."""
    with contextlib.redirect_stdout(io.StringIO()) as report:
        main(["trace", "report", os.environ["MPIKV_TIMELINE"]])
    return re.search(r"; [34] rounds", report.getvalue()) is not None


with kv.create("dist_sync") as store:
    store.init(["w", "v"], [np.zeros(300_000, "float32"), np.zeros(7, "float32")])
    values = [np.ones(300_000, "float32"), np.ones(7, "float32")]
    for step in range(5):
        store.pushpull(["w", "v"], values)
        if step == 2 and store.rank == 1:
            while not written():  # the test ends the job where that never comes
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
