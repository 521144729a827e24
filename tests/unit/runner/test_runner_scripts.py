"""The scripts: what they count, and that a stage without tests, a crash and a hang are failures."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import frameworks
import jobs
import pytest
from jobs import ROOT, Job, Mpi, find_mpi

sys.path.insert(0, str(ROOT / "scripts"))
import _oldest
import _stages

BASH = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}


def judged(
    lines: list[tuple[str, str]],
    status: int,
    tmp_path: Path,
    *,
    selected: bool = False,
    may_skip: bool = False,
    **job: object,
):
    """What a stage counts whose tests wrote these lines and that ended with this status."""
    report = tmp_path / "report"
    report.write_text(
        "".join(json.dumps({"test": t, "outcome": o, "reason": "why", "seconds": 0.5}) + "\n" for t, o in lines)
    )
    counted = _stages.count(report)
    stage = _stages.Stage("unit", "title", None, [], 60, may_skip=may_skip)
    ended = Job(status, "", "", 1.0, **{"timed_out": False, **job})
    _stages.judge(stage, ended, counted, selected=selected)
    return counted


def test_outcomes(tmp_path: Path) -> None:
    lines = [("a", "started"), ("a", "passed"), ("b", "started"), ("b", "skipped"), ("c", "started"), ("c", "failed")]
    counted = judged(lines, 1, tmp_path)
    assert (counted.passed, counted.failed, counted.reasons) == (["a"], ["c"], {"b": "why"})


def test_a_test_that_never_ended_has_failed(tmp_path: Path) -> None:
    counted = judged([("a", "started"), ("a", "passed"), ("b", "started")], 86, tmp_path)
    assert (counted.passed, counted.failed) == (["a"], ["b"])


@pytest.mark.parametrize("status", [0, 5])
def test_a_stage_without_an_executed_test_has_failed(status: int, tmp_path: Path) -> None:
    assert len(judged([("a", "skipped")], status, tmp_path).failed) == 1
    assert len(judged([], status, tmp_path).failed) == 1
    assert judged([], status, tmp_path, selected=True).failed == []  # -k selected others


def test_a_stage_that_may_skip_says_why(tmp_path: Path) -> None:
    assert judged([("a", "skipped")], 0, tmp_path, may_skip=True).failed == []
    assert judged([("a", "skipped")], 0, tmp_path, may_skip=True).reasons == {"a": "why"}
    assert len(judged([], 5, tmp_path, may_skip=True).failed) == 1  # nothing was even collected
    assert len(judged([("a", "skipped"), ("b", "failed")], 1, tmp_path, may_skip=True).failed) == 1


def test_a_status_that_no_test_explains_is_a_failure(tmp_path: Path) -> None:
    for selected in (False, True):
        assert len(judged([("a", "passed")], 3, tmp_path, selected=selected).failed) == 1
    assert judged([("a", "passed")], 0, tmp_path).failed == []


def test_a_hang_and_a_leftover_process_are_failures(tmp_path: Path) -> None:
    assert len(judged([("a", "passed")], -15, tmp_path, timed_out=True).failed) == 1
    assert len(judged([("a", "passed")], 0, tmp_path, ranks_left=[1234]).failed) == 1


CONFTEST = """
import report

def pytest_configure(config):
    config.addinivalue_line("markers", report.WHOLE_JOB)
    config.pluginmanager.register(report.Report())
"""
UNSTEADY = """
from pathlib import Path
import pytest

def before(name):
    return Path(__file__).with_name(name).exists() or Path(__file__).with_name(name).touch()

@pytest.mark.whole_job
def test_second():
    print("said", "by a job")
    assert before("second"), "not the first time"

@pytest.mark.whole_job
def test_never():
    assert False, f"never {bool(before('never'))}"

def test_of_a_unit():
    assert before("unit"), "nobody tries again"

def test_good():
    pass
"""


def test_a_job_that_failed_is_run_once_more_and_nothing_else_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stages, "PROGRESS_S", 0.0)
    mpi = find_mpi()
    if mpi is None:
        pytest.skip("no mpirun in this environment")
    (tmp_path / "test_it.py").write_text(UNSTEADY)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\n")
    monkeypatch.setattr(jobs, "ROOT", tmp_path)  # where tests are run
    stage = _stages.Stage("jobs", "title", mpi, ["test_it.py"], 120)
    assert _stages.run([stage], argparse.Namespace(k=None, v=False, slowest=0, bare=_stages.Bare()), [mpi]) == 1
    said = capsys.readouterr().out
    place = "title: test_it.py::"
    first, once_more = said.split(": 1 passed, 3 failed, 0 skipped in ")
    assert "0 failed: title " in first  # progress
    assert [line for line in first.splitlines() if line.startswith("failed: ")] == [
        f"failed: {place}test_{name}" for name in ("second", "never", "of_a_unit")
    ]
    assert once_more.count("--- title: ") == 2
    assert f"--- {place}test_second: passed when it was run once more, alone" in once_more
    assert f"--- {place}test_never: failed when it was run once more, alone" in once_more
    assert once_more.count("not the first time") >= 1
    assert once_more.count("said by a job") == 2  # both outputs
    assert "never False" in once_more
    assert "never True" in once_more
    assert once_more.splitlines()[-6:-3] == [
        f"failed: {place}test_never",
        f"failed: {place}test_of_a_unit",
        f"unsteady: {place}test_second",
    ]
    assert once_more.splitlines()[-1] == "2 passed, 2 failed"


def test_a_stage_that_died_is_not_mended_by_a_job_that_passes(tmp_path: Path) -> None:
    """Its other tests have not run: that the last one was a job, and may pass, tells nothing of them."""
    assert judged([("a", "passed"), ("b", "started")], 1, tmp_path).whole_jobs == {}


def test_no_report_at_all(tmp_path: Path) -> None:
    counted = _stages.count(tmp_path / "absent")
    assert (counted.passed, counted.failed, counted.reasons) == ([], [], {})


def own_stages(stages: list[_stages.Stage], path: Path) -> list[_stages.Stage]:
    """Those without mpirun that run this file of tests."""
    name = str(path.relative_to(ROOT))
    ignored = ("--ignore=", "--ignore-glob=")
    return [
        stage
        for stage in stages
        if not stage.ranks
        and any(name.startswith(one) for one in stage.paths)
        and not any(one.startswith(ignored) and fnmatch.fnmatch(name, one.partition("=")[2]) for one in stage.options)
    ]


def test_stages() -> None:
    mpi = find_mpi()
    found = _stages.stages(mpi, mpi, quick=False)
    assert {"unit", "mpi", "mpich", "runner", "jobs", "cluster", "examples"} == {stage.group for stage in found}
    quick = _stages.stages(mpi, mpi, quick=True)
    assert {stage.group for stage in quick} == {"unit", "mpi"}
    # What takes minutes, and the rest of the grids, is left to other stages.
    assert all("not full" in stage.options[1] for stage in (*found, *quick))
    every = _stages.stages(mpi, mpi, quick=False, full=True)
    # All of them are made by --full, once: in the stages of every run, and with more numbers of ranks.
    assert {stage.title for stage in found} < {stage.title for stage in every}
    assert {stage.group for stage in every if stage not in found} == {"full", *_stages.FULL_GROUPS}
    assert all(stage.full and "-m" not in stage.options for stage in every if stage not in found)
    assert not any(stage.full for stage in (*found, *quick))
    assert sorted(stage.ranks for stage in every if stage.ranks) == [1, 2, 3, 3, 4, 4, 5]
    # Every file of tests belongs to exactly one stage, but those under mpirun to several.
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path.is_relative_to(ROOT / "tests/contract"):
            assert own_stages(found, path) == own_stages(every, path) == [], path  # in environments of its own
            continue
        once = not path.is_relative_to(ROOT / "tests/mpi")
        assert len(own_stages(found, path)) == len(own_stages(every, path)) == once, path


def test_no_two_stages_with_ranks_run_beside_each_other() -> None:
    mpi = Mpi("openmpi", Path())
    alone, ranks = _stages.Stage("unit", "", mpi, [], 1), _stages.Stage("mpi", "", mpi, [], 1, ranks=2)
    beside = [types.SimpleNamespace(stage=one) for one in (alone, ranks)]
    assert _stages.may_start(alone, beside)
    assert _stages.may_start(ranks, beside[:1])
    assert not _stages.may_start(ranks, beside)


def test_what_needs_a_gpu() -> None:
    """Nothing else, in the environment that is given; every file of it."""
    gpu = Mpi("openmpi", Path("gpu"))
    found = _stages.gpu_stages(gpu)
    assert all(stage.mpi is gpu and stage.options == ["-m", "gpu"] and not stage.may_skip for stage in found)
    assert {stage.frameworks for stage in found} == {("torch", "jax")}
    for path in (ROOT / "tests/gpu").glob("test_*.py"):
        assert len(own_stages(found, path)) == 1, path


GPU_TESTS = """
import pytest

def test_that_runs():
    pass

@pytest.mark.gpu
@pytest.mark.skip(reason="no driver")
def test_of_a_gpu():
    pass

@pytest.mark.skip(reason="no time")
def test_of_another_kind():
    pass
"""


def test_what_needs_a_gpu_is_counted_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi = find_mpi()
    if mpi is None:
        pytest.skip("no mpirun in this environment")
    (tmp_path / "test_it.py").write_text(GPU_TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\nmarkers = gpu\n")
    monkeypatch.setattr(jobs, "ROOT", tmp_path)
    stage = _stages.Stage("jobs", "title", mpi, ["test_it.py"], 120)
    assert _stages.run([stage], argparse.Namespace(k=None, v=False, slowest=0, bare=_stages.Bare()), [mpi]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("skipped: ")] == ["skipped: 1 x no time"]
    assert lines[-4] == "1 GPU tests skipped: no driver"
    assert lines[-1] == "1 passed, 0 failed, 2 skipped"


def test_without_a_gpu_its_tests_say_why() -> None:
    """The script that chooses what is installed; it needs no package."""
    done = subprocess.run(
        [sys.executable, "-I", ROOT / "scripts/_gpu.py"], capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode == 0:
        assert done.stdout.strip() in ("12", "13")
    else:
        assert done.stderr.startswith("scripts/test --gpu needs ")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "known", "ranks"),
    [("oldest", ("torch",), [0, 3]), ("newest", ("torch", "jax", "optax", "expecttest"), [0, 3, 0])],
)
def test_other_versions(name: str, known: tuple[str, ...], ranks: list[int]) -> None:
    """A selection beside the other tests where there is an environment for it, or more of them and no others."""
    mpi, other = Mpi("openmpi", Path("new")), Mpi("openmpi", Path("other"))
    assert all(stage.group != name for stage in _stages.stages(mpi, mpi, quick=False))
    (selected,) = [s for s in _stages.stages(mpi, mpi, quick=False, versions={name: other}) if s.mpi is other]
    assert selected.group == name
    assert "tests/unit/arrays/test_tensors.py" in selected.paths
    assert ("tests/mpirun/test_torch_ddp.py" in selected.paths) == (name == "newest")
    every = _stages.versions_stages(name, other)
    assert [stage.ranks for stage in every] == ranks
    assert [stage.paths for stage in every[:2]] == [["tests/unit", "tests/property"], ["tests/mpi"]]
    assert {stage.frameworks for stage in (selected, *every)} == {known}
    for group in _stages.VERSIONS[name].units, _stages.VERSIONS[name].jobs:
        assert all(any(fnmatch.fnmatch(path, f"*/test_{one}.py") for path in selected.paths) for one in group)


def test_the_contract_with_cupy() -> None:
    """By itself, or beside the other tests, in those environments that there are."""
    mpi, other = Mpi("openmpi", Path("new")), Mpi("openmpi", Path("other"))
    for given, needs in {"contract12": ("cupy",), "contract13": ("cupy", "nvidia")}.items():
        (alone,) = _stages.contract_stages({given: other})
        assert (alone.group, alone.mpi, alone.frameworks, alone.may_skip) == ("contract", other, needs, False)
        assert given[-2:] in alone.title
        (beside,) = [one for one in _stages.stages(mpi, mpi, quick=False, versions={given: other}) if one.mpi is other]
        assert beside == _stages.without_full(alone)
        for path in (ROOT / "tests/contract").glob("test_*.py"):
            assert own_stages([beside], path) == [beside], path


def test_the_last_lines_tell_the_versions() -> None:
    mpi = find_mpi()
    if mpi is None:
        pytest.skip("no mpirun in this environment")
    said = _stages.installed(mpi)
    assert re.fullmatch(r"Python 3[\d.]+(, [a-z0-9-]+ [\w.+]+)+", said)
    assert f", numpy {importlib.metadata.version('numpy')}," in said


def test_programs_are_taken_away_from_one_command_alone(tmp_path: Path) -> None:
    if not _stages.bare().command:
        pytest.skip("no namespaces can be made here")
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("rsync", "own-gcc-12", "kept"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    env = {**BASH, "PATH": f"{folder}:{BASH['PATH']}", "TMPDIR": str(tmp_path)}
    code = "import shutil; print([shutil.which(name) for name in ('rsync', 'own-gcc-12', 'kept')])"
    ask = f'for name in rsync own-gcc-12 kept; do command -v $name; done; {sys.executable} -c "{code}"'
    for shell in ("sh", "bash"):
        command = [*_stages.BARE, shell, "-c", ask]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines() == [str(folder / "kept"), f"[None, None, '{folder / 'kept'}']"], done.stderr
    assert len(list(folder.iterdir())) == 3
    assert not any(str(tmp_path) in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


def test_where_no_program_can_be_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for command, why in (["sh", "-c", "echo no root >&2; exit 1"], "no root"), (["/nowhere"], "No such file"):
        monkeypatch.setattr(_stages, "BARE", command)
        found = _stages.bare()
        assert not found.command
        assert why in found.said


def test_the_oldest_versions_are_those_of_the_project() -> None:
    project = {
        "dependencies": ["one>=1.2", "two>=3"],
        "optional-dependencies": {
            "torch": ["torch>=2.2"],
            "jax": ["jax>=0.4"],
            "openmpi": ["mpi>=5"],
            "test": ["t>=9"],
        },
    }
    assert _oldest.constraints(project) == ["one==1.2", "two==3", "mpi==5", "torch==2.2"]


def test_pytorch_and_jax_are_not_skipped_where_they_are_installed() -> None:
    mpis = Mpi("openmpi", Path()), Mpi("mpich", Path())
    for stage in _stages.stages(*mpis, quick=False):
        assert stage.frameworks == (("torch", "jax", "optax", "expecttest") if stage.mpi.kind == "openmpi" else ()), (
            stage.title
        )


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(frameworks.VARIABLE, "one,another")
    with pytest.raises(ModuleNotFoundError):
        frameworks.need("one")
    with pytest.raises(ModuleNotFoundError):
        frameworks.need("one.part")
    with pytest.raises(pytest.skip.Exception, match="third is not installed"):
        frameworks.need("third")
    monkeypatch.delenv(frameworks.VARIABLE)
    with pytest.raises(pytest.skip.Exception):
        frameworks.need("one")


def test_the_tests_on_clusters_are_all_or_a_selection() -> None:
    mpi = find_mpi()
    (every,) = _stages.stages(mpi, mpi, quick=False, cluster=True)
    (selected,) = (stage for stage in _stages.stages(mpi, mpi, quick=False) if stage.group == "cluster")
    assert (every.group, every.paths, every.options) == ("cluster", selected.paths, [])
    assert selected.options == ["-m", "not full and not cluster_full"]
    assert every.may_skip
    assert selected.may_skip


@pytest.mark.parametrize("script", ["demo", "test", "lint", "docs", "build_ompi_cuda"])
def test_help(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    done = subprocess.run([path, "--help"], env=BASH, cwd="/", capture_output=True, text=True, timeout=20, check=True)
    assert f"scripts/{script}" in done.stdout
    assert "set -euo" not in done.stdout  # the comment at the top, and no more


@pytest.mark.parametrize(
    "path",
    [f"scripts/{name}" for name in ("demo", "test", "lint", "docs", "build_ompi_cuda", "_venv.sh", "_bare")]
    + [".ci/run"],
)
def test_shell_syntax(path: str) -> None:
    subprocess.run(["bash", "-n", ROOT / path], check=True, timeout=20)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("scripts/lint --nonsense", "unknown option --nonsense"),
        ("scripts/docs --nonsense", "unknown option --nonsense"),
        ("scripts/build_ompi_cuda", "say where to install it: scripts/build_ompi_cuda PREFIX"),
        ("scripts/build_ompi_cuda --nonsense", "say where to install it"),
        ("scripts/build_ompi_cuda /a /b /c", "PREFIX and WORKDIR, and no more"),
        ("env CUDA_HOME=/nowhere scripts/build_ompi_cuda /nowhere", "There is no /nowhere/include/cuda.h"),
        ("scripts/test --mpich /nowhere", "--mpich needs the directory of a virtual environment"),
        (f"{sys.executable} scripts/_stages.py --openmpi / --mpich / --quick --cluster", "give one of them"),
        (f"{sys.executable} scripts/_stages.py --openmpi / --mpich / --oldest --quick", "give one of them"),
        (f"{sys.executable} scripts/_stages.py --openmpi / --mpich / --oldest --newest", "give one of them"),
        (f"{sys.executable} scripts/_stages.py --openmpi / --mpich / --newest", "needs an environment"),
        (f"{sys.executable} scripts/_stages.py --gpu / --quick", "give one of them"),
        (f"{sys.executable} scripts/_stages.py --contract --quick", "give one of them"),
        (f"{sys.executable} scripts/_stages.py --contract", "--contract needs an environment"),
        (f"{sys.executable} scripts/_stages.py --openmpi /", "--openmpi and --mpich name environments"),
    ],
)
def test_wrong_options(line: str, said: str) -> None:
    done = subprocess.run(line.split(), env=BASH, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode != 0
    assert said in done.stderr


def test_an_old_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "sed", "cat", "cksum", "id"):
        for folder in ("/usr/bin", "/bin"):
            if Path(folder, tool).exists() and not (tmp_path / "bin" / tool).exists():
                (tmp_path / "bin" / tool).symlink_to(Path(folder, tool))
    code = f". {ROOT}/scripts/_venv.sh; find_python"
    done = subprocess.run(
        ["bash", "-c", code],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert "No Python 3.10 or newer was found" in done.stderr
    python = tmp_path / "bin" / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")  # what an old one answers
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", code],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1


def test_what_cannot_be_installed_is_named() -> None:
    """And is no failure: the tests that need it say so themselves."""
    code = f". {ROOT}/scripts/_venv.sh; command() {{ return 1; }}; provide_clusters; echo went on"
    done = subprocess.run(["bash", "-ec", code], env=BASH, capture_output=True, text=True, timeout=20, check=True)
    said, after = done.stdout.splitlines()
    assert "slurmctld slurmd slurm-client munge gridengine-master gridengine-exec gridengine-client" in said
    assert said.endswith("are skipped.")
    assert after == "went on"


@pytest.mark.parametrize("who", ["script", "all", "nobody"])
@pytest.mark.parametrize("there", [False, True])
def test_daemons_may_start_again_once_packages_are_installed(tmp_path: Path, who: str, there: bool) -> None:
    """Also where the script is killed meanwhile, alone or with all that it has started: what forbids it is removed.

    One's own file stays.
    """
    policy, reached, go = tmp_path / "policy", tmp_path / "reached", tmp_path / "go"
    os.mkfifo(reached)
    os.mkfifo(go)
    if there:
        policy.write_text("mine")
    code = f"""
. {ROOT}/scripts/_venv.sh
eval "$(declare -f provide_clusters | sed 's#/usr/sbin/policy-rc.d#{policy}#')"
command() {{ [ "$2" = apt-get ]; }}
id() {{ echo 0; }}
apt-get() {{ [ "$1" = update ] || {{ cat {policy} >{reached}; read -r _ <{go}; }}; }}
provide_clusters
"""
    going = os.open(go, os.O_RDWR)  # writing waits for no reader
    alive, held = os.pipe()  # held open by the script and all that it has started
    with subprocess.Popen(
        ["bash", "-ec", code], env=BASH, stdout=subprocess.DEVNULL, pass_fds=[held], start_new_session=True
    ) as script:
        os.close(held)
        assert reached.read_text() == ("mine" if there else "#!/bin/sh\nexit 101\n")
        if who == "all":
            os.killpg(script.pid, signal.SIGTERM)
        else:
            if who == "script":
                script.kill()
            os.write(going, b"\n")
    assert os.read(alive, 1) == b""
    os.close(alive)
    os.close(going)
    assert (policy.read_text() if policy.exists() else None) == ("mine" if there else None)


def test_a_users_own_environment_is_kept(tmp_path: Path) -> None:
    """Nothing that these scripts did not make is removed."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mine").touch()
    code = f". {ROOT}/scripts/_venv.sh; provide {tmp_path}/venv test"
    done = subprocess.run(["bash", "-c", code], env=BASH, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "is no virtual environment" in done.stderr
    assert (tmp_path / "venv" / "mine").exists()
