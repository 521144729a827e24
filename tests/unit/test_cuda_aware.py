"""Whether MPI takes device memory: the questions in their order, and the file that keeps a verdict.

The trial itself is made by real children in tests/mpirun/test_cuda_trial.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpikv.runtime import cuda_aware, cuda_driver, cuda_trial, library
from mpikv.runtime.cuda_aware import Answer, child_environment, find_out
from mpikv.runtime.cuda_driver import Devices

GPUS = Devices(("A2", "H100"), "CUDA 12.4, 570.86")
YES = (Answer(True, "tried with 8 MiB"), True)


@dataclasses.dataclass
class World:
    """What the questions are asked of. trials: how often a child was started, with which GPU and source."""

    path: Path
    devices: Devices = GPUS
    cuda: bool | None = True
    version: str = "Open MPI v5.0.7"
    outcome: tuple[Answer, bool] = YES
    trials: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def describe(self) -> library.Library:
        return library.Library("Open MPI", "5.0.7", "3.1", str(self.path), "system", "MULTIPLE", "no", self.cuda)

    def trial(self, path: str, device: int, *, source: str, limit_s: float) -> tuple[Answer, bool]:
        assert path == str(self.path)
        self.trials.append((device, source))
        return self.outcome


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A library that says yes, two GPUs and CuPy; and no cache yet."""
    path = tmp_path / "libmpi.so.40"
    path.write_bytes(b"a library")
    made = World(path)
    mpi = types.SimpleNamespace(Get_library_version=lambda: f"{made.version}\0")
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(library, "describe", made.describe)
    monkeypatch.setattr(cuda_driver, "ask", lambda: made.devices)
    monkeypatch.setattr(cuda_driver, "has_cupy", lambda: True)
    monkeypatch.setattr(cuda_aware, "trial", made.trial)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def kept(world: World) -> list[Path]:
    return sorted((world.path.parent / "cache" / "mpikv").glob("*"))


# The questions


def test_all_say_yes(world: World) -> None:
    assert find_out("auto", 1) == (True, "tried with 8 MiB on H100")
    assert str(find_out("auto", 1)) == "yes: tried with 8 MiB on H100 (cached)"
    assert world.trials == [(1, "mpikv.runtime.cuda_trial:CupyMemory")]
    assert find_out("auto", 1).aware


def forbid(*_: Any, **__: Any) -> None:
    raise AssertionError("asked although the answer stands already")


@pytest.mark.parametrize(
    ("setting", "answer"), [("0", (False, "MPIKV_CUDA_AWARE=0")), ("1", (True, "MPIKV_CUDA_AWARE=1, without a trial"))]
)
def test_settings(setting: str, answer: tuple[bool, str], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "ask", forbid)
    monkeypatch.setattr(library, "describe", forbid)
    assert find_out(setting) == answer


def test_no_driver(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.devices = Devices(problem="no driver (libcuda.so.1 cannot be loaded)")
    monkeypatch.setattr(library, "describe", forbid)
    assert str(find_out()) == "no: no driver (libcuda.so.1 cannot be loaded)"


def test_no_such_gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "describe", forbid)
    assert find_out("auto", 2) == (False, "there is no gpu:2, this process sees 2, from 0")


@pytest.mark.parametrize(("cuda", "why"), [(False, "the library says no"), (None, "the library has no way to say so")])
def test_the_library_says_no(cuda: bool | None, why: str, world: World) -> None:
    world.cuda = cuda
    assert find_out() == (False, why)
    assert (world.trials, kept(world)) == ([], [])


def test_no_cupy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "has_cupy", lambda: False)
    assert str(find_out()).startswith("no: CuPy is not installed: pip install cupy-cuda12x (or cupy-cuda13x ")
    assert (world.trials, kept(world)) == ([], [])
    assert find_out(source="another:Source").aware  # of which a trial does not take its memory


def test_whether_there_is_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as tests forbid a module
    assert not cuda_driver.has_cupy()
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    assert cuda_driver.has_cupy()


# The file


def test_a_no_is_kept_too(world: World) -> None:
    world.outcome = (Answer(False, "the trial was ended by SIGSEGV"), True)
    assert [find_out().why, find_out().why] == [
        "the trial was ended by SIGSEGV on A2",
        "the trial was ended by SIGSEGV on A2 (cached)",
    ]
    assert len(world.trials) == 1


def test_what_is_no_verdict_is_not_kept(world: World) -> None:
    world.outcome = (Answer(False, "the trial did not end within 60 s"), False)
    assert find_out() == find_out() == (False, "the trial did not end within 60 s on A2")
    assert (len(world.trials), kept(world)) == (2, [])


def another_file(world: World) -> None:
    world.path.write_bytes(b"a library, rebuilt")


def another_time(world: World) -> None:
    os.utime(world.path, ns=(1, 1))


def another_version(world: World) -> None:
    world.version = "Open MPI v5.0.8"


def another_driver(world: World) -> None:
    world.devices = GPUS._replace(version="CUDA 13.0, 580.1")


def another_gpu(world: World) -> None:
    world.devices = GPUS._replace(names=("H200", "H100"))


def another_transport(world: World) -> None:
    os.environ.update(OMPI_MCA_pml="ucx")


@pytest.mark.parametrize(
    "change", [another_file, another_time, another_version, another_driver, another_gpu, another_transport]
)
def test_what_a_verdict_depends_on(
    change: Callable[[World], None], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_MCA_pml", "ob1")
    find_out()
    find_out()
    assert len(world.trials) == 1
    change(world)
    assert not find_out().why.endswith("(cached)")
    assert (len(world.trials), len(kept(world))) == (2, 2)


def test_the_launcher_makes_no_difference(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    find_out()
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_MCA_num_procs", "PMI_RANK", "SLURM_PROCID", "HYDI_CONTROL_FD"):
        monkeypatch.setenv(name, "3")
    assert find_out().why.endswith("(cached)")


def test_a_link_to_the_library_is_the_library(world: World) -> None:
    find_out()
    real, world.path = world.path, world.path.with_name("libmpi.so")
    world.path.symlink_to(real)
    assert find_out().why.endswith("(cached)")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\xff\xfe",
        "[" * 5000,
        '{"question": {}, "aware": true, "why": "a foreign one"}',
        '{"aware": true}',
        "AWARE",
        "WHY",
    ],
)
def test_damaged_files_are_written_anew(text: str, world: World) -> None:
    find_out()
    (file,) = kept(world)
    whole = json.loads(file.read_text())
    text = {"AWARE": json.dumps({**whole, "aware": 1}), "WHY": json.dumps({**whole, "why": None})}.get(text, text)
    file.write_text(text, encoding="latin-1")
    assert not find_out().why.endswith("(cached)")
    assert json.loads(file.read_text()) == whole
    assert find_out().why.endswith("(cached)")
    assert kept(world) == [file]  # nothing beside it


@pytest.mark.parametrize("place", ["", "relative", "~"])
def test_the_default_folder(place: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    find_out()
    assert len(list((tmp_path / "home" / ".cache" / "mpikv").iterdir())) == 1
    assert not (tmp_path / "relative").exists()


def a_file(folder: Path) -> None:
    folder.write_text("no folder")


def a_pipe_in_its_place(folder: Path) -> None:
    find_out()
    (file,) = (folder / "mpikv").iterdir()
    file.unlink()
    os.mkfifo(file)  # opening it would wait for somebody who writes


def a_link_to_nowhere(folder: Path) -> None:
    folder.symlink_to("/proc/none/none")


@pytest.mark.parametrize("make", [a_file, a_pipe_in_its_place, a_link_to_nowhere])
def test_a_folder_that_cannot_be_used_is_no_error(make: Callable[[Path], None], world: World) -> None:
    make(world.path.parent / "cache")
    world.trials.clear()
    assert find_out() == find_out() == (True, "tried with 8 MiB on A2")
    assert len(world.trials) == 2


def test_no_home(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert find_out().aware
    assert [path.name for path in tmp_path.iterdir()] == ["libmpi.so.40"]


# The child


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
    answer, final = cuda_aware.trial("/opt/libmpi.so")
    assert answer.why.startswith("a trial could not be started: ")
    assert (answer.aware, final) == (False, False)


def test_a_library_that_cannot_be_loaded() -> None:
    answer, final = cuda_aware.trial("/nowhere/libmpi.so")
    assert answer.why.startswith("the trial failed: NoLibraryError: no MPI library was found")
    assert (answer.aware, final) == (False, False)


SAID_YES = '{"verdict": "yes", "why": "tried"}\n'


@pytest.mark.parametrize(
    ("status", "out", "err", "answer", "final"),
    [
        (0, f"a library's own line\n{SAID_YES}", "a warning", (True, "tried"), True),
        (0, "", "", (False, "the trial ended with status 0: it said nothing"), False),
        (0, SAID_YES.rstrip(), "", (False, "the trial ended with status 0: it said nothing"), False),  # cut off
        (0, "[]\n", "", (False, "the trial ended with status 0: it said nothing"), False),
        # What ends MPI is tried, too.
        (1, SAID_YES, "first\nlast line\n\n", (False, "the trial ended with status 1: last line"), False),
        (-signal.SIGSEGV, SAID_YES, "", (False, "the trial was ended by SIGSEGV"), True),
        (-signal.SIGABRT, "", "", (False, "the trial was ended by SIGABRT"), True),
        (-signal.SIGTERM, "", "", (False, "the trial was ended by SIGTERM"), False),
        (-40, "", "", (False, "the trial was ended by signal 40"), False),
        (None, SAID_YES, "", (False, "the trial did not end within 7 s"), False),
    ],
)
def test_what_the_end_of_a_child_means(
    status: int | None, out: str, err: str, answer: tuple[bool, str], final: bool
) -> None:
    assert cuda_aware._judge(status, out, err, 7.0) == (answer, final)


class FakeCupy(types.ModuleType):
    """What the trial needs of CuPy, with NumPy's arrays. log: what was called."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.log: list[str] = []
        runtime = types.SimpleNamespace(deviceSynchronize=lambda: self.log.append("synchronize"))
        self.cuda = types.SimpleNamespace(Device=self.device, runtime=runtime)

    def device(self, number: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(use=lambda: self.log.append(f"use {number}"))

    def asarray(self, data: np.ndarray) -> np.ndarray:
        self.log.append("asarray")
        return data.copy()

    def asnumpy(self, data: np.ndarray) -> np.ndarray:
        self.log.append("asnumpy")
        return data


def test_memory_by_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way to the GPU has arrived before MPI gets it, and what MPI has begun before it is looked at."""
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    memory = cuda_trial.CupyMemory(2)
    assert memory.get(memory.put(np.arange(3, dtype=np.uint8))).tolist() == [0, 1, 2]
    assert cupy.log == ["use 2", "asarray", "synchronize", "synchronize", "asnumpy"]
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ModuleNotFoundError, match="CuPy is not installed: pip install cupy-cuda12x"):
        cuda_trial.CupyMemory(0)
