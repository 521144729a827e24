"""Run a program whose Trainer, where it begins anew, waits after its tenth step until the batch job is asked to stop,
and then goes on slowly, so that it has not ended when the ranks hear of it.

until_asked.py PROGRAM [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import mpikv

WAITS_AFTER, PAUSE_S = 10, 0.5
step = mpikv.Trainer.step
made = 0  # by this process


def waiting_step(trainer: mpikv.Trainer, *arguments: Any, **named: Any) -> None:
    global made  # noqa: PLW0603
    step(trainer, *arguments, **named)
    made += 1
    if trainer.steps == made >= WAITS_AFTER:
        while not os.path.exists(os.environ["MPIKV_STOP_ASKED"]):
            time.sleep(0.05)
        time.sleep(PAUSE_S)


mpikv.Trainer.step = waiting_step  # type: ignore[method-assign]
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
