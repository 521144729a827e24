"""Run a program with a pause after every step of a Trainer, so that something can happen to it meanwhile.

slowly.py PAUSE_S PROGRAM [ARGUMENTS]
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import mpikv

pause_s, program = float(sys.argv[1]), sys.argv[2]
step = mpikv.Trainer.step


def slow_step(*arguments: Any, **named: Any) -> Any:
    result = step(*arguments, **named)
    time.sleep(pause_s)
    return result


mpikv.Trainer.step = slow_step  # type: ignore[method-assign]
sys.argv[:] = sys.argv[2:]
sys.path[0] = str(Path(program).parent)
runpy.run_path(program, run_name="__main__")
