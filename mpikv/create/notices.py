"""Things that may surprise a user, each shown once, by one rank, as a Python warning at the line of the program that is
meant.

One is a variable that looks like a setting of this library and is none. The other is a program that was
started as several ranks, or by `multiprocessing`, whose stores do not reach each other, so that each of them trains a
model of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Mapping, Sequence

from mpikv.config import unknown_variables
from mpikv.runtime import abort, launcher, tracebacks

DMLC = "DMLC_"
# What MXNet's users find here instead. docs/mxnet.md has the whole table.
COUNTERPARTS: Mapping[str, str] = {
    "DMLC_ROLE": "roles follow from MPIKV_NUM_SERVERS",
    "DMLC_NUM_WORKER": "mpirun -n, less the servers",
    "DMLC_NUM_SERVER": "MPIKV_NUM_SERVERS",
    "DMLC_PS_ROOT_URI": "MPI introduces the ranks",
    "DMLC_PS_ROOT_PORT": "MPI introduces the ranks",
    "DMLC_TRACKER_URI": "MPI introduces the ranks",
    "DMLC_TRACKER_PORT": "MPI introduces the ranks",
    "DMLC_RANK": "store.rank",
    "DMLC_WORKER_ID": "store.rank",
    "DMLC_INTERFACE": "MPIKV_INTERFACE",
    "DMLC_NODE_HOST": "MPI chooses; MPIKV_INTERFACE",
}

SPOIL_ADAM = ("1bit", "2bit", "topk")


def unread(environ: Mapping[str, str]) -> str:
    """Say something about variables that nothing reads; "" where there are none."""
    found = [
        f"{name} (did you mean {nearest}?)" if nearest else f"{name} (there is no such setting)"
        for name, nearest in unknown_variables(environ).items()
    ]
    others = sorted(name for name in environ if name.startswith(DMLC))
    found += [f"{name} (here: {COUNTERPARTS.get(name, 'see docs/mxnet.md')})" for name in others]
    if not found:
        return ""
    what = "this variable is" if len(found) == 1 else "these variables are"
    return f"mpikv: {what} set, and mpikv does not read {'it' if len(found) == 1 else 'them'}: {'; '.join(found)}"


def warn_of_unread(environ: Mapping[str, str] = os.environ) -> None:
    """Warn of such variables. Local."""
    text = unread(environ)
    if text:
        warn("variables", text, environ)


def warn_of_separate_ranks(what: str, environ: Mapping[str, str] = os.environ) -> None:
    """Warn where several ranks were started, and `what` exchanges nothing between them. Local.

    There is no warning where the process has a store that does exchange something: then it is meant so.
    """
    size = max(launcher.size(environ), launcher.torch_size(environ))
    if size > 1 and abort.guard() is None:
        text = f"mpikv: {what}, and {size} ranks were started: each trains a model of its own, and nothing is exchanged"
        warn("separate ranks", f"{text}; for one model take 'dist_sync'", environ)


def warn_of_one_worker(what: str) -> None:
    """Warn where `what` has one worker, in a process that `multiprocessing` has started. Local.

    It is no error: who tries several settings beside each other means it so.
    """
    if multiprocessing.parent_process() is not None:
        text = f"mpikv: {what} has one worker, in a process that multiprocessing started, which MPI does not know: "
        text += "for one model of several such processes, start the program with `mpirun -n 4 python train.py` instead"
        warn("one worker", text, os.environ)


def warn_of_codec(codec: str) -> None:
    """Warn where an optimizer like Adam gets gradients of a codec that spoils them for it. Local."""
    if codec in SPOIL_ADAM:
        text = f"mpikv: Adam divides by the root of the squares that arrive, and so by the noise of {codec!r}: "
        warn("codec", f"{text}the model learns less; take 'int8' or 'powersgd' (docs/compression.md)", os.environ)


def warn_of_lost_weights(names: Sequence[str]) -> None:
    """Warn where weights of these parameters were changed, and the store is about to write its own over them. Local."""
    text = (
        f"mpikv: {', '.join(names[:4])}{', ...' * (len(names) > 4)} changed outside of the Trainer since its last step"
    )
    text += ": the store has its own weights, and brings them back; load weights before making the Trainer"
    warn("lost weights", text, os.environ)


def warn_of_sums(n: float) -> None:
    """Warn where gradients of PyTorch, whose losses are means by default, are divided as sums are. Local."""
    text = f"mpikv: Trainer.step({n:g}) divides the gradients by {n:g}, which is right for a loss that is a sum over "
    text += "examples (reduction='sum'), as gluon's are. PyTorch's losses are means: for them call step(); for a sum "
    warn("sums", text + f"step(batch_size={n:g}), without this warning", os.environ)


def warn(what: str, text: str, environ: Mapping[str, str]) -> None:
    """Warn once of each kind of thing, on the rank that the launcher calls 0."""
    seen = globals().setdefault("__warningregistry__", {})  # where Python itself keeps what it has warned of
    if what in seen or (launcher.size(environ) > 1 and launcher.said_rank(environ) != 0):
        return
    seen[what] = True
    frame = tracebacks.caller()
    if frame is None:
        warnings.warn(text, UserWarning, stacklevel=2)
    else:
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)
