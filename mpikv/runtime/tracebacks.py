"""What is shown of an exception that nobody has caught.

A mistake in a call of this library, such as a misspelt option or a file that is not there, is one line: what is wrong,
and the line of the user's program that made the call. For other exceptions the traceback stays, and frames of this
library that say nothing about the cause become one line. `MPIKV_TRACEBACK=full` shows all of both.

A TypeError, ValueError, KeyError or IndexError is a mistake where a `raise` statement of this library raised it; one
that came out of NumPy, say, in the middle of a computation is not. Pure: what is shown depends on the exception alone.
"""

from __future__ import annotations

import builtins
import dis
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from mpikv.common.checks import meant
from mpikv.errors import (
    ConfigError,
    KeyExists,
    KeyNotInitialized,
    MpikvError,
    ShapeMismatch,
    StatesFileError,
    UnsupportedError,
)

MISTAKES = (ConfigError, UnsupportedError, KeyNotInitialized, KeyExists, ShapeMismatch, StatesFileError)
CHECKED = (TypeError, ValueError, LookupError)  # by argument checks, and raised by much else
OF_PATHS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
# A function that only calls another one with the user's arguments: a TypeError raised in it says that they do not fit.
CALLS_ON = "call_and_tell"
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # of the package
STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
INSTALLED = ("site-packages", "dist-packages")  # folders in that of the standard library


class Mistake(NamedTuple):
    """A user's mistake. text: kind and message in one line. place: `train.py:12`, "" where it is not known."""

    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


def is_ours(filename: str) -> bool:
    return filename.startswith(HERE)


def _is_pythons(filename: str) -> bool:
    """Return whether a file of code is Python's own or PyTorch's, which calls this library for the program."""
    real = os.path.realpath(filename)
    installed = [f"{os.sep}{folder}{os.sep}" for folder in INSTALLED]
    if filename.startswith("<frozen ") or any(f"{folder}torch{os.sep}" in real for folder in installed):
        return True
    return real.startswith(STDLIB) and not any(folder in real for folder in installed)


def mistake(error: BaseException) -> Mistake | None:
    """Return the mistake that `error` reports, None where it is something else."""
    if not isinstance(error, (*MISTAKES, *CHECKED, *OF_PATHS)) and type(error) is not MpikvError:
        return None
    steps = list(_steps(error.__traceback__))
    while steps and _is_pythons(_file(steps[-1])) and isinstance(error, OF_PATHS):
        steps.pop()  # pathlib, say
    if not steps or not any(is_ours(_file(step)) for step in steps):
        return None
    last = steps[-1]
    misfit = isinstance(error, TypeError) and last.tb_frame.f_code.co_name == CALLS_ON
    if isinstance(error, MISTAKES):
        found = True
    elif isinstance(error, OF_PATHS):
        found = is_ours(_file(last)) and (error.filename is not None or _is_raise(last))
    else:  # an error of the base class that has a cause reports what the user's own code did
        of_cause = isinstance(error, MpikvError) and error.__cause__ is not None
        found = is_ours(_file(last)) and not of_cause and (misfit or _is_raise(last))
    if not found:
        return None
    callers = [step for step in steps if not is_ours(_file(step)) and not _is_pythons(_file(step))]
    place = f"{_shown(_file(callers[-1]))}:{callers[-1].tb_lineno}" if callers else ""
    return Mistake(f"{type(error).__name__}: {' '.join(str(error).split())}", place)


def full(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip() + _suggestion(error)


def folded(error: BaseException) -> str:
    """Return the traceback as Python prints it, with frames of this library as one line where the cause is elsewhere.

    All frames stay where an error is neither the user's nor one that this library foresees: it is then this library's
    own fault, and they are what a report of it needs.
    """
    shown = traceback.TracebackException(type(error), error, error.__traceback__)
    steps = list(_steps(error.__traceback__))
    if isinstance(error, MpikvError) or (steps and not is_ours(_file(steps[-1]))):
        for one in _chain(shown):
            one.stack = _Folded(one.stack)
    return "".join(shown.format()).rstrip() + _suggestion(error)


def _suggestion(error: BaseException) -> str:
    """What Python adds to an unknown name when it prints a traceback itself; `traceback` does so from 3.12 on."""
    if sys.version_info >= (3, 12) or not isinstance(error, (AttributeError, NameError)):
        return ""
    if isinstance(error, AttributeError):
        known = {*dir(error.obj)}
    else:
        frame = [step.tb_frame for step in _steps(error.__traceback__)][-1]
        known = {*frame.f_locals, *frame.f_globals, *dir(builtins)}
    near = meant(error.name, known)
    return f".{near}" if near else ""


def caller() -> FrameType | None:
    """Return the frame of the user's program that has called into this library; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_ours(frame.f_code.co_filename) or _is_pythons(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame


class _Folded(traceback.StackSummary):
    def format(self, **options: Any) -> list[str]:
        lines: list[str] = []
        hidden = 0
        for frame in [*self, None]:
            if frame is not None and is_ours(frame.filename):
                hidden += 1
                continue
            if hidden:
                frames = "1 frame" if hidden == 1 else f"{hidden} frames"
                lines.append(f"  ... {frames} of mpikv (MPIKV_TRACEBACK=full shows them)\n")
                hidden = 0
            if frame is not None:
                lines += traceback.StackSummary.from_list([frame]).format(**options)
        return lines


def _chain(shown: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    todo: list[traceback.TracebackException | None] = [shown]
    while todo:
        one = todo.pop()
        if one is not None:
            yield one
            todo += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _file(step: TracebackType) -> str:
    name = step.tb_frame.f_code.co_filename
    # Python makes a dataclass's own methods of a string; they belong to the file of the class.
    return step.tb_frame.f_globals.get("__file__", name) if name == "<string>" else name


def _is_raise(step: TracebackType) -> bool:
    return dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]] == "RAISE_VARARGS"


def _shown(path: str) -> str:
    """Return the path as short as the user would write it."""
    try:
        here = os.path.relpath(path)
    except (OSError, ValueError):  # the current folder is gone
        return path
    return path if here.startswith("..") else here
