"""Whether MPI takes device memory: the questions in their order, and what the end of a child means.

The trial itself is made by real children in tests/mpirun/test_cuda_trial.py.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from typing import Any

import numpy as np
import pytest

from mpikv.runtime import cuda_aware, cuda_driver, cuda_trial, library
from mpikv.runtime.cuda_aware import CudaSupport, child_environment, find_out
from mpikv.runtime.cuda_driver import Devices


class World:
    """What the questions are asked of: a library that says yes, two GPUs and CuPy; and the trials that it has made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.devices = Devices(("A2", "H100"), "CUDA 12.4, 570.86")
        self.cuda: bool | None = True
        self.cupy, self.path = True, "/opt/libmpi.so.40"
        self.outcome = CudaSupport(True, "tried with 8 MiB")
        self.trials: list[tuple[str, int, str]] = []
        patch.setattr(library, "describe", self.describe)
        patch.setattr(cuda_driver, "ask", lambda: self.devices)
        patch.setattr(cuda_driver, "has_cupy", lambda: self.cupy)
        patch.setattr(cuda_aware, "trial", self.trial)

    def describe(self) -> library.Library:
        return library.Library("Open MPI", "5.0.7", "3.1", self.path, "system", "MULTIPLE", "no", self.cuda)

    def trial(self, path: str, device: int, *, source: str, limit_s: float) -> CudaSupport:
        assert limit_s == 60
        self.trials.append((path, device, source))
        return self.outcome


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_all_say_yes_and_the_trial_answers(world: World) -> None:
    assert find_out(1) == (True, "tried with 8 MiB on H100")
    assert world.trials == [(world.path, 1, "mpikv.runtime.cuda_trial:CupyMemory")]
    world.outcome = CudaSupport(False, "the trial was ended by SIGSEGV")
    assert str(find_out()) == "no: the trial was ended by SIGSEGV on A2"
    world.outcome, world.cupy = CudaSupport(True, "tried"), False
    assert str(find_out(source="another:Source")) == "yes: tried on A2"  # needs no CuPy


@pytest.mark.parametrize(
    ("device", "change", "why"),
    [
        (0, {"devices": Devices(problem="no driver (none)")}, "no driver (none)"),
        (2, {}, "there is no gpu:2, this process sees 2, from 0"),
        (0, {"cuda": False}, "the library says no"),
        (0, {"cuda": None}, "the library has no way to say so"),
        (0, {"cupy": False}, cuda_driver.NO_CUPY),
        (0, {"path": ""}, "it cannot be told which file the library was loaded from, so a child cannot load it"),
    ],
)
def test_no_trial_is_made_after_the_answer(world: World, device: int, change: dict[str, Any], why: str) -> None:
    vars(world).update(change)
    assert find_out(device) == (False, why)
    assert world.trials == []


def test_the_childs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = ("OMPI_COMM_WORLD_SIZE", "OMPI_MCA_num_procs", "OMPI_UNIVERSE_SIZE", "PMIX_RANK", "PMIX_SERVER_URI4")
    launchers += ("PMI_RANK", "PMI_FD", "HYDI_CONTROL_FD", "MPI_LOCALRANKID", "SLURM_PROCID", "PRTE_LAUNCHED")
    users = ("OMPI_MCA_pml", "OMPI_MCA_btl_smcuda_use_cuda_ipc", "OMPI_ALLOW_RUN_AS_ROOT", "OPAL_PREFIX", "PMIX_PREFIX")
    users += ("UCX_TLS", "FI_PROVIDER", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "MPICH_GPU_SUPPORT_ENABLED")
    for name in (*launchers, *users):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])
    found = child_environment("/opt/libmpi.so", "/tmp/x")
    assert [name for name in launchers if name in found] == []
    assert [name for name in users if found.get(name) != "1"] == []
    assert (found["MPI4PY_LIBMPI"], found["TMPDIR"]) == ("/opt/libmpi.so", "/tmp/x")
    assert found["PYTHONPATH"] == f"{os.getcwd()}:/somewhere"


def test_a_child_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert str(cuda_aware.trial("/opt/libmpi.so")).startswith("no: a trial could not be started: ")


SAID_YES = '{"aware": true, "why": "tried"}\n'
NOTHING = False, "the trial ended with status 0: it said nothing"


@pytest.mark.parametrize(
    ("status", "out", "err", "answer"),
    [
        (0, f"a library's own line\n{SAID_YES}", "a warning", (True, "tried")),
        (0, SAID_YES.replace("true", "false"), "", (False, "tried")),
        *((0, out, "", NOTHING) for out in ("", SAID_YES.rstrip(), "[]\n", "{}\n")),  # the second one is cut off
        # What ends MPI is tried, too.
        (1, SAID_YES, "first\nlast line\n\n", (False, "the trial ended with status 1: last line")),
        (-signal.SIGSEGV, SAID_YES, "", (False, "the trial was ended by SIGSEGV")),
        (-40, "", "", (False, "the trial was ended by signal 40")),
        (None, SAID_YES, "", (False, "the trial did not end within 7 s")),
    ],
)
def test_what_the_end_of_a_child_means(status: int | None, out: str, err: str, answer: tuple[bool, str]) -> None:
    assert cuda_aware._judge(status, out, err, 7.0) == answer


def test_memory_by_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way to the GPU has arrived before MPI gets it, and what MPI has begun before it is looked at."""
    log: list[str] = []
    cupy: Any = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        Device=lambda number: types.SimpleNamespace(use=lambda: log.append(f"use {number}")),
        runtime=types.SimpleNamespace(deviceSynchronize=lambda: log.append("synchronize")),
    )
    cupy.asarray = lambda data: log.append("asarray") or data.copy()
    cupy.asnumpy = lambda data: log.append("asnumpy") or data
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    memory = cuda_trial.CupyMemory(2)
    assert memory.get(memory.put(np.arange(3, dtype=np.uint8))).tolist() == [0, 1, 2]
    assert log == ["use 2", "asarray", "synchronize", "synchronize", "asnumpy"]


def test_no_byte_that_is_sent_is_at_its_place_in_a_message_of_another_size() -> None:
    patterns = [cuda_trial.pattern(n_bytes) for n_bytes in cuda_trial.SIZES_BYTES]
    for i, shorter in enumerate(patterns):
        assert cuda_trial.UNSENT not in shorter
        assert not any((longer[: shorter.size] == shorter).any() for longer in patterns[i + 1 :])
