"""What the batch scripts do once they run, with programs in place of a scheduler's and an MPI's.

The stand-in for `mpirun` writes down its words and becomes the program that it is given, so that what the script
sends it arrives there.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mpikv.launch import batch

SCRIPTS = batch.repository_scripts()
VERSIONS = {
    "openmpi5": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/",
    "openmpi4": "mpirun.real (OpenRTE) 4.1.4",
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20250101",
}
MPIRUN = """#!{python} -IS
import os, signal, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]:
    print(open(os.environ["FAKE"] + "/version").read())
    sys.exit(0)
if "--mpi=list" in words:
    print(os.environ["PLUGINS"], file=sys.stderr)
    sys.exit(0)
print(os.path.basename(sys.argv[0]), *[f"<{{word}}>" for word in words], flush=True)
if "python" in words:
    sys.exit(int(os.environ.get("INFO_STATUS", "0")))
for word in words:
    if word.endswith("/hosts"):
        print("hosts:", *open(word).read().split("\\n"), sep="|", flush=True)
program = [sys.executable, "-ISc", *words[words.index("RUN") + 1:]]
if words[words.index("RUN") - 2] != "sh":
    os.execv(sys.executable, program)
# Open MPI: rank 0 is run, below the shell that belongs to each rank; the others end with status 0, but for the lost.
shell = words[words.index("RUN") - 1]
env = {{**os.environ, "OMPI_COMM_WORLD_RANK": "0"}}
rank = subprocess.Popen(["sh", shell, *program], env=env, start_new_session=True)
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.killpg(rank.pid, number))
status = rank.wait()
for other in range(1, int(words[words.index("-n") + 1]) - int(os.environ.get("LOST", "0"))):
    open(os.path.join(os.path.dirname(shell), str(other)), "w")
sys.exit(status)
"""
# `python -m mpikv batch`, without the package's own __init__, which imports NumPy and takes longer than all else here.
BATCH = """import argparse, sys, types
package = types.ModuleType("mpikv")
package.__path__ = ["{package}"]
sys.modules["mpikv"] = package
from mpikv.launch.run_batch import add_parser
parser = argparse.ArgumentParser()
add_parser(parser.add_subparsers())
assert sys.argv[1:3] == ["-m", "mpikv"]
options = parser.parse_args(sys.argv[3:])
sys.exit(options.run(options))
"""
SPEAK = """#!/bin/sh
echo "{name} $*" >>"$FAKE/called"
{does}
"""
UNTIL_STOPPED = """
import os, signal, time
def stop(number, frame):
    os.write(1, f"asked by {{signal.Signals(number).name}}\\n".encode())  # print may be in the middle of its work
    os._exit({status})
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, stop)
open(os.environ["FAKE"] + "/ready", "w").close()
print("ready", flush=True)
for _ in range(600):  # a signal that comes just before a sleep is handled when that has ended
    time.sleep(0.1)
print("never asked", flush=True)
"""


class Site:
    """A folder with stand-ins, and how a script is run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = self.make_environment("env")
        self.mpi("openmpi5")
        self.command("scontrol")
        self.command("qresub", 'echo "Your job 43 (\\"train\\") has been submitted"')
        self.command("qrls")
        self.command("qrsh")
        (folder / "hosts").write_text("h1 2 all.q@h1 UNDEFINED\nh2 1 all.q@h2 UNDEFINED\nh1 1 long.q@h1 UNDEFINED\n")
        self.environ = {
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "FAKE": str(folder),
            "TMPDIR": str(folder),
            "VIRTUAL_ENV": str(self.env),
            "PLUGINS": "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\n\tpmix_v4",
        }
        self.slurm = {
            "SLURM_JOB_ID": "17",
            "SLURM_NTASKS": "4",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_TASKS_PER_NODE": "2(x2)",
        }
        self.sge = {"JOB_ID": "17", "NSLOTS": "4", "PE": "mpi", "PE_HOSTFILE": str(folder / "hosts")}

    def make_environment(self, name: str) -> Path:
        python = self.folder / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        does = 'case $1 in --version) echo "Python 3" ;; -c) exit "${IMPORT_STATUS:-0}" ;; -m) %s ;; esac'
        (self.folder / "mpikv").write_text(BATCH.format(package=Path(batch.__file__).parents[1]))
        self._write(python, does % f'exec {sys.executable} -IS "{self.folder}/mpikv" "$@"')
        return self.folder / name

    def _write(self, file: Path, does: str) -> None:
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{does}\n")
        file.chmod(0o755)

    def command(self, name: str, does: str = "") -> None:
        self._write(self.folder / "bin" / name, SPEAK.format(name=name, does=does).partition("\n")[2])

    def mpi(self, version: str) -> None:
        (self.folder / "version").write_text(VERSIONS[version])
        for file in (self.env / "bin" / "mpirun", self.folder / "bin" / "srun"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(MPIRUN.format(python=sys.executable))
            file.chmod(0o755)

    def called(self) -> list[str]:
        file = self.folder / "called"
        return file.read_text().splitlines() if file.exists() else []

    def start(
        self, path: str, *words: str, lines: dict[str, str] | None = None, **environ: str
    ) -> subprocess.Popen[str]:
        """Run a script. lines: settings at its top to change; words: the program; environ: "" removes a variable."""
        text = SCRIPTS[path]
        for name, value in (lines or {}).items():
            before = next(line for line in text.splitlines() if line.startswith(f"{name}="))
            text = text.replace(f"\n{before}\n", f"\n{name}={value}\n")
        file = self.folder / "script"
        file.write_text(text)
        job = self.slurm if path.startswith("slurm") else self.sge
        merged = {**self.environ, **job, **environ}
        return subprocess.Popen(
            ["bash", str(file), *words], cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={name: value for name, value in merged.items() if value},
        )  # fmt: skip

    def run(self, path: str, *words: str, lines: dict[str, str] | None = None, **environ: str) -> tuple[int, str]:
        process = self.start(path, *words, lines=lines, **environ)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def stop(self, path: str, number: int, *, status: int = 0, **options: Any) -> tuple[int, str]:
        """Run a script, send it a signal when its program is ready, and wait for its end."""
        process = self.start(path, "RUN", UNTIL_STOPPED.format(status=status), **options)
        assert process.stdout is not None
        seen = ""
        while "ready\n" not in seen:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        process.send_signal(number)
        output, _ = process.communicate(timeout=50)
        return process.returncode, seen + output


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def launched(output: str) -> str:
    """The words of the launcher that started the program, without the folders that change.

    With Open MPI's mpirun a shell belongs to every rank, and to no other launcher's.
    """
    words = next(line for line in output.splitlines() if "<RUN>" in line).partition(" <RUN>")[0]
    words, shell, _ = words.partition(" <sh> <")
    assert bool(shell) == ("Open MPI," in output and not words.startswith("srun"))
    return words


ONE = ("RUN", "print('trained')")
BASH = [path for path in SCRIPTS if path != "slurm/array.sbatch"]


@pytest.mark.parametrize("path", BASH)
@pytest.mark.parametrize("status", [0, 7])
def test_the_status_is_the_programs(site: Site, path: str, status: int) -> None:
    got, output = site.run(path, "RUN", f"import sys; print('trained'); sys.exit({status})")
    assert got == status, output
    assert "\ntrained\n" in output
    assert output.endswith(f"mpikv: job 17 ends with status {status}\n")


@pytest.mark.parametrize(
    ("mpi", "distribution", "words"),
    [
        ("openmpi5", "block", "mpirun <--bind-to> <none> <-n> <4>"),
        ("openmpi4", "cyclic", "mpirun <--bind-to> <none> <-n> <4> <--map-by> <node>"),
        ("mpich", "block", "mpirun <-n> <4>"),
        ("intel", "cyclic", "mpirun <-n> <4> <-ppn> <1>"),
    ],
)
def test_mpirun_in_slurm(site: Site, mpi: str, distribution: str, words: str) -> None:
    site.mpi(mpi)
    _, output = site.run(
        "slurm/train.sbatch", *ONE, lines={"DISTRIBUTION": distribution, "LAUNCH_OPTIONS": "(-x 'a b')"}
    )
    assert launched(output) == f"{words} <-x> <a b>"


def test_srun_starts_open_mpi_through_pmix(site: Site) -> None:
    _, output = site.run("slurm/train-srun.sbatch", *ONE, lines={"DISTRIBUTION": "cyclic"}, SLURM_CPUS_PER_TASK="3")
    assert launched(output) == (
        "srun <--mpi=pmix> <--ntasks=4> <--cpus-per-task=3> <--distribution=cyclic> <--kill-on-bad-exit=1>"
    )


@pytest.mark.parametrize(("mpi", "name"), [("mpich", "MPICH"), ("intel", "Intel MPI")])
def test_srun_starts_no_other_mpi(site: Site, mpi: str, name: str) -> None:
    """Slurm's pmi2 fails now and then: its own mpirun inside the allocation is the way."""
    site.mpi(mpi)
    status, output = site.run("slurm/train-srun.sbatch", *ONE)
    assert status == 2
    assert f"mpikv: error: srun starts Open MPI alone, not {name}: " in output
    assert f"use train.sbatch, which starts the ranks with {name}'s own mpirun" in output
    assert "trained" not in output
    assert launched(site.run("slurm/train.sbatch", *ONE)[1]) == "mpirun <-n> <4>"


def test_srun_without_pmix(site: Site) -> None:
    status, output = site.run("slurm/train-srun.sbatch", *ONE, PLUGINS="MPI plugin types are...\n\tnone\n\tpmi2")
    assert status == 2
    assert "this Slurm offers only" in output
    assert "use train.sbatch" in output
    assert "trained" not in output


def test_variables_of_a_file(site: Site) -> None:
    (site.folder / "job.env").write_text("export COLOUR='a b'\n")
    show = ("RUN", "import os; print('colour', os.environ['COLOUR'], 'RANKS' in os.environ)")
    status, output = site.run("slurm/train.sbatch", *show, lines={"ENV_FILE": "job.env"})
    assert (status, "\ncolour a b False\n" in output) == (0, True)
    status, output = site.run("slurm/train.sbatch", *ONE, lines={"ENV_FILE": "gone.env"})
    assert status == 2
    assert "ENV_FILE=./gone.env, with the variables for the ranks, cannot be read" in output


@pytest.mark.parametrize(
    ("mpi", "words", "hosts"),
    [
        ("openmpi5", "<--prtemca> <plm_ssh_agent> <S/agent> <--prtemca> <prte_tmpdir_base> </tmp> <--hostfile> "
            "<S/hosts> <--bind-to> <none> <-n> <4>", "hosts:|h1 slots=3|h2 slots=1|"),
        ("openmpi4", "<--mca> <plm_rsh_agent> <S/agent> <--mca> <orte_tmpdir_base> </tmp> <--hostfile> <S/hosts> "
            "<--bind-to> <none> <-n> <4>", "hosts:|h1 slots=3|h2 slots=1|"),
        ("mpich", "<-launcher> <ssh> <-launcher-exec> <S/agent> <-f> <S/hosts> <-n> <4>", "hosts:|h1:3|h2:1|"),
    ],
)  # fmt: skip
def test_mpirun_in_grid_engine(site: Site, mpi: str, words: str, hosts: str) -> None:
    """A host that gave slots of two queues comes once; the temporary folder is gone in the end.

    Open MPI's ranks on other hosts get variables by its -x, MPICH's get them all.
    """
    site.mpi(mpi)
    _, output = site.run("sge/train.sh", *ONE, COLOUR="blue", lines={"LAUNCH_OPTIONS": "(last)"})
    line, passed, _ = launched(output).partition(" <last>")[0].partition(" <-x>")
    names = set(re.findall(r"<-x> <(\w+)>", launched(output)))
    assert names >= {"COLOUR", "PATH", "MPIKV_NUM_SERVERS", "OMP_NUM_THREADS"} if passed else mpi == "mpich"
    assert not names & {"JOB_ID", "NSLOTS", "PE_HOSTFILE", "TMPDIR", "PWD", "_", "SERVERS"}
    folder = Path(line.partition("_agent> <" if mpi != "mpich" else "-exec> <")[2].partition("/agent>")[0])
    assert line.replace(str(folder), "S") == f"mpirun {words}"
    assert hosts in output.splitlines()
    assert folder.name.startswith("mpikv.")
    assert not folder.exists()


def test_agent_of_grid_engine(site: Site) -> None:
    """What Open MPI and MPICH give to it, with and without options of ssh, reaches qrsh."""
    part = Path(batch.__file__).with_name("templates") / "parts" / "sge-mpirun.sh"
    agent = part.read_text().partition("<<'END'\n")[2].partition("END\n")[0]
    for words in (["h2", 'A=1;export A;prted --x "y z"'], ["-x", "-q", "h2", "A=1;export A;prted", "--x", '"y z"']):
        subprocess.run(["sh", "-s", "--", *words], input=agent, text=True, env=site.environ, check=True)
    call = "qrsh -inherit -nostdin -v PATH,LD_LIBRARY_PATH h2 trap '' USR1 USR2; A=1;export A;prted --x \"y z\""
    assert site.called() == [call, call]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ({"RANKS": "5"}, "5 ranks do not fit into the 4 slots of this job; ask for more slots"),
        ({"RANKS": "0"}, "RANKS=0 is not"),
        ({"RANKS": "many"}, "RANKS=many is not"),
        ({"SERVERS": "4"}, "4 servers among 4 ranks leave no worker"),
        ({"SERVERS": "2", "RANKS": "2"}, "2 servers among 2 ranks leave no worker"),
        ({"SERVERS": "-1"}, "SERVERS=-1 is not"),
        ({"DISTRIBUTION": "diagonal"}, "DISTRIBUTION=diagonal"),
        ({"PYTHON_ENV": "/nowhere"}, "PYTHON_ENV=/nowhere has no bin/python"),
    ],
)
@pytest.mark.parametrize("path", BASH)
def test_refused(site: Site, path: str, lines: dict[str, str], says: str) -> None:
    status, output = site.run(path, *ONE, lines=lines)
    assert status == 2
    assert f"mpikv: error: {says}" in output
    assert output.endswith("mpikv: job 17 ends with status 2\n")
    assert "trained" not in output


@pytest.mark.parametrize("path", SCRIPTS)
def test_outside_of_a_job(site: Site, path: str) -> None:
    status, output = site.run(path, *ONE, SLURM_JOB_ID="", JOB_ID="")
    assert (status, output.count("\n")) == (2, 1)
    assert "submit the script with" in output


def test_grid_engine_job_without_parallel_environment(site: Site) -> None:
    status, output = site.run("sge/train.sh", *ONE, PE_HOSTFILE="")
    assert status == 2
    assert "qsub -pe NAME SLOTS" in output


def test_environments_in_their_order(site: Site) -> None:
    """The line at the top, an active virtual environment, conda's, .venv; each with its mpirun first on PATH."""
    names = {name: site.make_environment(name) for name in ("top", "conda", ".venv")}
    for folder in names.values():
        (folder / "bin" / "mpirun").symlink_to(site.env / "bin" / "mpirun")
    given: list[tuple[Path, dict[str, str], dict[str, str]]] = [
        (names["top"], {"PYTHON_ENV": str(names["top"])}, {}),
        (site.env, {}, {"CONDA_PREFIX": str(names["conda"])}),
        (names["conda"], {}, {"CONDA_PREFIX": str(names["conda"]), "VIRTUAL_ENV": ""}),
        (names[".venv"], {}, {"VIRTUAL_ENV": "/gone"}),
    ]
    for folder, lines, environ in given:
        status, output = site.run("slurm/train.sbatch", *ONE, lines=lines, **environ)
        assert status == 0
        assert f"mpikv: Python 3 in {folder}; Open MPI, {folder}/bin/mpirun\n" in output


def test_no_environment(site: Site) -> None:
    status, output = site.run("slurm/train.sbatch", *ONE, VIRTUAL_ENV="")
    assert status == 2
    assert "no Python environment was found: set PYTHON_ENV" in output


def test_environment_without_mpikv(site: Site) -> None:
    status, output = site.run("slurm/train.sbatch", *ONE, IMPORT_STATUS="1")
    assert status == 2
    assert "cannot import mpikv and mpi4py" in output


def test_no_mpirun(site: Site) -> None:
    (site.env / "bin" / "mpirun").unlink()
    for name in ("bash", "sh", "cat", "rm", "hostname"):
        (site.folder / "bin" / name).symlink_to(f"/bin/{name}")
    status, output = site.run("slurm/train.sbatch", *ONE, PATH=str(site.folder / "bin"))
    assert status == 2
    assert "no mpirun on PATH" in output


@pytest.mark.parametrize("path", BASH)
def test_ranks_that_do_not_start(site: Site, path: str) -> None:
    status, output = site.run(path, *ONE, INFO_STATUS="9")
    assert status == 2
    assert "the ranks could not be started" in output
    assert ("use train.sbatch" in output) == ("srun" in path)
    assert "trained" not in output


@pytest.mark.parametrize("path", ["slurm/train.sbatch", "sge/train.sh"])
def test_lost_ranks(site: Site, path: str) -> None:
    """Open MPI's mpirun ends with status 0 all the same."""
    # The script looks for files of a slow file system for a while; Grid Engine's has a clock, too.
    site.command("sleep", '[ "$1" = 1 ] || exec /bin/sleep "$1"')
    status, output = site.run(path, *ONE, LOST="2")
    assert status == 1, output
    assert "mpikv: error: 2 of 4 ranks never ended, though mpirun says status 0: a host was lost\n" in output
    assert not list(site.folder.glob(".mpikv-ranks*"))


@pytest.mark.parametrize("name", ["USR1", "USR2", "TERM"])
@pytest.mark.parametrize("path", BASH)
def test_signals_reach_the_program_as_usr1(site: Site, path: str, name: str) -> None:
    status, output = site.stop(path, signal.Signals[f"SIG{name}"])
    assert status == 0
    assert f"mpikv: signal {name}: the ranks are asked to stop" in output
    assert "\nasked by SIGUSR1\n" in output
    assert output.endswith("mpikv: job 17 ends with status 0\n")
    assert site.called() == []


def test_ranks_are_told_what_the_signals_mean(site: Site) -> None:
    names = [f"MPIKV_{name}" for name in ("NUM_SERVERS", "SERVER_PLACEMENT", "STOP_SIGNALS", "STOP_FILE")]
    show = f"import os; print([os.environ[name] for name in {names}])"
    _, output = site.run("sge/train-servers.sh", "RUN", show, lines={"PLACEMENT": "hosts"})
    assert "\n['2', 'hosts', 'TERM,USR1,USR2', 'train-17.state']\n" in output
    assert "mpikv: 4 ranks, 2 workers and 2 servers, of 4 slots\n" in output


def test_slurm_requeues(site: Site) -> None:
    status, output = site.stop("slurm/train.sbatch", signal.SIGUSR1, lines={"REQUEUE": "yes"})
    assert status == 0
    assert site.called() == ["scontrol requeue 17"]
    assert output.endswith("mpikv: job 17 ends with status 0 and goes back into the queue\n")


def test_grid_engine_requeues(site: Site) -> None:
    """As a copy of the job, which finds the file under its own number before it may start."""
    (site.folder / "train-17.state").write_text("weights")
    site.command("qrls", 'ls "$FAKE" | grep state >>"$FAKE/called"')
    status, output = site.stop("sge/train.sh", signal.SIGUSR1, lines={"REQUEUE": "yes"})
    assert status == 0
    assert site.called() == ["qresub -h u 17", "qrls 43", "train-43.state"]
    (site.folder / "of-17").mkdir()
    kept = site.folder / "of-17" / "states"  # a name of the user's, which the copy of the job has as well
    kept.write_text("weights")
    _, output = site.stop("sge/train.sh", signal.SIGUSR1, lines={"REQUEUE": "yes", "STOP_FILE": str(kept)})
    assert kept.exists()
    assert "mv:" not in output
    assert output.endswith("mpikv: job 17 ends with status 0 and goes on as job 43\n")


def test_grid_engine_does_not_copy_jobs_here(site: Site) -> None:
    site.command("qresub", "echo 'denied: host is no submit host'; exit 1")
    status, output = site.stop("sge/train.sh", signal.SIGUSR1, lines={"REQUEUE": "yes"})
    assert status == 99
    assert "mpikv: qresub: denied: host is no submit host\n" in output
    assert output.endswith("mpikv: job 17 ends with status 0 and goes back into the queue\n")


@pytest.mark.parametrize("path", ["slurm/train.sbatch", "sge/train.sh"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGUSR2, 0), (signal.SIGUSR1, 3)])
def test_not_requeued(site: Site, path: str, number: int, status: int) -> None:
    """Cancelled jobs, and programs that failed while they stopped."""
    got, output = site.stop(path, number, status=status, lines={"REQUEUE": "yes"})
    assert got == status
    assert output.endswith(f"mpikv: job 17 ends with status {status}\n")
    assert site.called() == []


def test_clock_of_grid_engine(site: Site) -> None:
    site.command(
        "sleep",
        'if [ "$1" = 1740 ]; then until [ -e "$FAKE/ready" ]; do /bin/sleep 0.1; done; else /bin/sleep "$1"; fi',
    )
    status, output = site.run("sge/train.sh", "RUN", UNTIL_STOPPED.format(status=0))
    assert status == 0
    assert "mpikv: signal USR1: " in output
    assert "asked by SIGUSR1" in output


def test_clock_ends_with_the_job(site: Site) -> None:
    status, output = site.run("sge/train.sh", *ONE, lines={"STOP_AFTER": "987654"})
    assert status == 0, output
    until_s = time.monotonic() + 10
    while (found := sleeping("987654")) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not found


def sleeping(word: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", word.encode()]:
            found.append(folder.name)
    return found


@pytest.mark.parametrize(("task", "value"), [(0, "0.01"), (3, "0.1")])
def test_array_task(site: Site, task: int, value: str) -> None:
    program = ("RUN", "import sys; print('options', sys.argv[1:])")
    environ = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": "16"}
    status, output = site.run("slurm/array.sbatch", *program, **environ)
    assert status == 0
    assert f"mpikv: task {task} of array 16\n" in output
    assert f"options ['--lr', '{value}']\n" in output


@pytest.mark.parametrize(("task", "says"), [("4", "VALUES has 4, for tasks 0 to 3"), ("", "sbatch --array=0-3")])
def test_array_without_a_value(site: Site, task: str, says: str) -> None:
    status, output = site.run("slurm/array.sbatch", *ONE, SLURM_ARRAY_TASK_ID=task, SLURM_ARRAY_JOB_ID="16")
    assert status == 2
    assert says in output


def test_threads_of_numpy(site: Site) -> None:
    show = ("RUN", "import os; print([os.environ[f'{x}_NUM_THREADS'] for x in ('OMP', 'OPENBLAS')])")
    assert "['6', '6']" in site.run("slurm/train.sbatch", *show, SLURM_CPUS_PER_TASK="6")[1]
    assert "['2', '1']" in site.run("sge/train.sh", *show, OMP_NUM_THREADS="2")[1]


def test_the_folder_is_that_of_sbatch(site: Site, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    _, output = site.run("slurm/train.sbatch", "RUN", "import os; print(os.getcwd())", SLURM_SUBMIT_DIR=str(elsewhere))
    assert f"\n{os.path.realpath(elsewhere)}\n" in output
