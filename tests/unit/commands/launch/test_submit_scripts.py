"""What the batch scripts do once they run, with programs in place of a scheduler's and an MPI's.

The stand-in for `mpirun` writes down its words and becomes the program that it is given, so that what the script
sends it arrives there.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mpikv.commands.launch import batch

SCRIPTS = batch.repository_scripts()
SLURM, SRUN, ARRAY, SGE = "slurm/train.sbatch", "slurm/train-srun.sbatch", "slurm/array.sbatch", "sge/train.sh"
HANGS_S = 200  # no job takes so long, on a busy machine either
# Jobs run in several threads. A process that is forked while a program is written has its file open until it becomes
# another one, and nobody can start the program until then (ETXTBSY): so a program is written, or a process started.
STARTING = threading.Lock()
VERSIONS = {
    "openmpi5": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/",
    "openmpi4": "mpirun.real (OpenRTE) 4.1.4",
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20250101",
}
MPIRUN = """#!{python} -IS
import contextlib, os, signal, subprocess, sys
words = sys.argv[1:]
version = open(os.environ["FAKE"] + "/version").read()
if words == ["--version"]:
    print(version)
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
# Rank 0 is run, below the shell that belongs to each rank; the others begin, and end with status 0, but for the lost.
at = words.index("RUN")
mark = os.path.join(os.path.dirname(words[at - 2]), words[at - 1])
ranks, came = [], []
def hand_on(number, _):
    came.append(number)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(rank.pid, number)
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, hand_on)
others = range(1, int(os.environ.get("SLURM_NTASKS") or os.environ["NSLOTS"]))
for other in others:
    open(f"{{mark}}-begun-{{other}}", "w")
number_is = "OMPI_COMM_WORLD_RANK" if "Open" in version else "PMI_RANK"
if sys.argv[0].endswith("srun"):
    number_is = "SLURM_PROCID"
program = [*words[at - 3:at], sys.executable, "-ISc", *words[at + 1:]]
ranks.append(subprocess.Popen(program, env={{**os.environ, number_is: "0"}}, start_new_session=True))
for number in came[:1]:  # it came before rank 0 was known here
    hand_on(number, None)
status = ranks[0].wait()
for other in others[int(os.environ.get("LOST", "0")):]:
    open(f"{{mark}}-ended-{{other}}", "w")
open(os.environ["FAKE"] + "/over", "w")
sys.stdout.flush()
os._exit(status & 0xFF)  # with its handlers: the end of an interpreter takes them away, and a late signal would kill it
"""
SPEAK = """#!/bin/sh
echo "{name} $*" >>"$FAKE/called"
{does}
"""
# As a program with a store: it waits for the signal, says so, and saves. The signal may come again meanwhile.
UNTIL_STOPPED = """
import os, signal, time
came = []
def stop(number, frame):
    first = not came  # asked before the next line: the signal may come again, and this be called, between any two
    came.append(number)
    if not first:
        return
    os.write(1, f"asked by {{signal.Signals(number).name}}\\n".encode())  # print may be in the middle of its work
    if {saves}:
        open(os.environ["MPIKV_STOP_FILE"], "w").write("weights")
    os._exit({status})
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, stop)
if os.path.exists(os.environ["MPIKV_STOP_ASKED"]):
    stop(signal.SIGUSR1, None)
print("ready", flush=True)
for _ in range(600):  # a signal that comes just before a sleep is handled when that has ended
    time.sleep(0.1)
print("never asked", flush=True)
"""


class Site:
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
        finds = f'echo "{batch.TEMPLATES}"; exit "${{IMPORT_STATUS:-0}}"'
        self.write_shell(python, f'case $1 in --version) echo "Python 3" ;; -c) {finds} ;; esac')
        return self.folder / name

    def write_shell(self, file: Path, does: str) -> None:
        self.write_program(file, f"#!/bin/sh\n{does}\n")

    def write_program(self, file: Path, text: str) -> None:
        file.parent.mkdir(exist_ok=True)
        with STARTING:
            file.write_text(text)
            file.chmod(0o755)

    def command(self, name: str, does: str = "") -> None:
        self.write_program(self.folder / "bin" / name, SPEAK.format(name=name, does=does))

    def mpi(self, version: str) -> None:
        (self.folder / "version").write_text(VERSIONS[version])
        for file in (self.env / "bin" / "mpirun", self.folder / "bin" / "srun"):
            self.write_program(file, MPIRUN.format(python=sys.executable))

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
        with STARTING:  # it returns when the child has become bash
            return subprocess.Popen(
                ["bash", str(file), *words], cwd=self.folder, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={name: value for name, value in merged.items() if value},
            )  # fmt: skip

    def run(self, path: str, *words: str, lines: dict[str, str] | None = None, **environ: str) -> tuple[int, str]:
        process = self.start(path, *words, lines=lines, **environ)
        output, _ = process.communicate(timeout=HANGS_S)
        return process.returncode, output

    def stop(
        self, path: str, number: int, program: str = "", *, status: int = 0, saves: bool = True, **options: Any
    ) -> tuple[int, str]:
        """Run a script, send it a signal when its program is ready, and wait for its end."""
        process = self.start(path, "RUN", program or UNTIL_STOPPED.format(status=status, saves=saves), **options)
        assert process.stdout is not None
        seen = ""
        while "ready\n" not in seen:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        process.send_signal(number)
        output, _ = process.communicate(timeout=HANGS_S)
        return process.returncode, seen + output


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def launched(output: str) -> str:
    """The words of the launcher that started the program, before those of the shell that belongs to every rank."""
    return next(line for line in output.splitlines() if "<RUN>" in line).partition(" <sh> <")[0]


ONE = ("RUN", "print('trained')")


@pytest.mark.parametrize(("path", "status"), [(path, 7 * (path != SLURM)) for path in SCRIPTS if path != ARRAY])
def test_the_status_is_the_programs(site: Site, path: str, status: int) -> None:
    got, output = site.run(path, "RUN", f"import sys; print('trained'); sys.exit({status})")
    assert got == status, output
    assert "\ntrained\n" in output
    assert output.endswith(f"mpikv: job 17 ends with status {status}\n")


@pytest.mark.parametrize(
    ("script", "mpi", "distribution", "words"),
    [
        ("train", "openmpi5", "block", "mpirun <--bind-to> <none> <-n> <4>"),
        ("train", "openmpi4", "cyclic", "mpirun <--bind-to> <none> <-n> <4> <--map-by> <node>"),
        ("train", "mpich", "block", "mpirun <-n> <4>"),
        ("train", "intel", "cyclic", "mpirun <-n> <4> <-ppn> <1>"),
        ("train-srun", "openmpi5", "cyclic", "srun <--mpi=pmix> <--ntasks=4> <--cpus-per-task=3> "
            "<--distribution=cyclic> <--kill-on-bad-exit=1>"),
    ],
)  # fmt: skip
def test_starts_in_slurm(site: Site, script: str, mpi: str, distribution: str, words: str) -> None:
    site.mpi(mpi)
    lines = {"DISTRIBUTION": distribution, "LAUNCH_OPTIONS": "(-x 'a b')"}
    _, output = site.run(f"slurm/{script}.sbatch", *ONE, lines=lines, SLURM_CPUS_PER_TASK="3")
    assert launched(output) == f"{words} <-x> <a b>"


SHOW = """import os
names = "COLOUR RANKS MPIKV_NUM_SERVERS MPIKV_SERVER_PLACEMENT MPIKV_STOP_SIGNALS MPIKV_STOP_FILE".split()
names += ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
print("seen", os.getcwd(), *(os.environ.get(name) for name in names), sep="|")
"""


@pytest.mark.parametrize(
    ("path", "lines", "environ", "seen"),
    [
        (SLURM, {"ENV_FILE": "job.env"}, {"SLURM_CPUS_PER_TASK": "6", "SLURM_SUBMIT_DIR": "{folder}/elsewhere"},
         "{folder}/elsewhere|a b|None|0|spread|TERM,USR1,USR2|train-17.state|6|6"),
        ("sge/train-servers.sh", {"PLACEMENT": "hosts"}, {"OMP_NUM_THREADS": "2"},
         "{folder}|None|None|2|hosts|TERM,USR1,USR2|train-17.state|2|1"),
    ],
)  # fmt: skip
def test_what_a_program_sees(site: Site, path: str, lines: dict[str, str], environ: dict[str, str], seen: str) -> None:
    """Its folder, the variables of a file, what the signals mean, and how many threads NumPy may have."""
    folder = os.path.realpath(site.folder)
    (site.folder / "elsewhere").mkdir()
    (site.folder / "elsewhere" / "job.env").write_text("export COLOUR='a b'\n")
    given = {name: text.format(folder=folder) for name, text in environ.items()}
    status, output = site.run(path, "RUN", SHOW, lines=lines, **given)
    assert (status, f"\nseen|{seen.format(folder=folder)}\n" in output) == (0, True), output
    assert ("mpikv: 4 ranks, 2 workers and 2 servers, of 4 slots\n" in output) == ("servers" in path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of another user")
def test_another_users_file_of_variables(site: Site) -> None:
    """Is not run: in a shared folder somebody may have put it in the place of one's own."""
    file = site.folder / "job.env"
    file.write_text("echo was run\n")
    os.chown(file, 1, 1)
    status, output = site.run(SLURM, "RUN", "", lines={"ENV_FILE": "job.env"})
    assert (status != 0, "was run" in output) == (True, False)
    assert "ENV_FILE=./job.env, whose lines this job would run, is another user's file" in output


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
    _, output = site.run(SGE, *ONE, COLOUR="blue", lines={"LAUNCH_OPTIONS": "(last)"})
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
    part = batch.TEMPLATES / "parts" / "sge-mpirun.sh"
    agent = part.read_text().partition("<<'END'\n")[2].partition("END\n")[0]
    for words in (["h2", 'A=1;export A;prted --x "y z"'], ["-x", "-q", "h2", "A=1;export A;prted", "--x", '"y z"']):
        subprocess.run(["sh", "-s", "--", *words], input=agent, text=True, env=site.environ, check=True)
    call = "qrsh -inherit -nostdin -v PATH,LD_LIBRARY_PATH h2 trap '' USR1 USR2; A=1;export A;prted --x \"y z\""
    assert site.called() == [call, call]


@pytest.mark.parametrize(("path", "reach"), [(SLURM, ""), (SGE, r"--ssh \S+/agent( --env \w+)* --env COLOUR .*")])
def test_what_starts_ranks_again(site: Site, path: str, reach: str) -> None:
    """The ranks have the same variables as without, and qrsh, which ends with signals of the job, is kept from them."""
    lines = {"RESTARTS": "2", "SERVERS": "1", "LAUNCH_OPTIONS": "(-x COLOUR)"}
    status, output = site.run(path, *ONE, COLOUR="blue", lines=lines)
    assert status == 0
    said = rf"^mpikv: python -m mpikv launch --restarts 2 -n 3 -s 1 {reach}--mpirun-options -x\\ COLOUR RUN print"
    assert re.search(said, output, re.M), output


OLD_SLURM = "MPI plugin types are...\n\tnone\n\tpmi2"


@pytest.mark.parametrize(
    ("paths", "lines", "environ", "says"),
    [
        ((SLURM, SGE), {"RANKS": "5"}, {}, "5 ranks do not fit into the 4 slots of this job; ask for more slots"),
        ((SLURM, SGE), {"RANKS": "0"}, {}, "RANKS=0 is not"),
        ((SLURM,), {"RANKS": "many"}, {}, "RANKS=many is not"),
        ((SLURM, SGE), {"SERVERS": "4"}, {}, "4 servers among 4 ranks leave no worker"),
        ((SLURM,), {"SERVERS": "2", "RANKS": "2"}, {}, "2 servers among 2 ranks leave no worker"),
        ((SLURM,), {"SERVERS": "-1"}, {}, "SERVERS=-1 is not"),
        ((SLURM,), {"DISTRIBUTION": "diagonal"}, {}, "DISTRIBUTION=diagonal"),
        ((SLURM, SGE), {"RESTARTS": "often"}, {}, "RESTARTS=often is not"),
        ((SLURM, SGE), {"RESTARTS": "1", "DISTRIBUTION": "cyclic"}, {}, "RESTARTS=1 goes with DISTRIBUTION=block and"),
        ((SLURM, SGE), {"RESTARTS": "1", "PLACEMENT": "last"}, {}, "RESTARTS=1 goes with DISTRIBUTION=block and"),
        ((SRUN,), {}, {"RESTARTS": "1"}, "ranks that srun has started are not started again (RESTARTS=1); use train.s"),
        ((SGE,), {"STOP_AFTER": "soon"}, {}, "STOP_AFTER=soon is not"),
        ((SLURM, SGE), {"PYTHON_ENV": "/nowhere"}, {}, "PYTHON_ENV=/nowhere has no bin/python"),
        ((SLURM,), {}, {"VIRTUAL_ENV": ""}, "no Python environment was found: set PYTHON_ENV"),
        ((SLURM,), {}, {"IMPORT_STATUS": "1"}, "{env}/bin/python cannot import mpikv and mpi4py"),
        ((SLURM,), {"ENV_FILE": "gone.env"}, {}, "ENV_FILE=./gone.env, with the variables for the ranks, cannot"),
        ((SGE,), {}, {"PE_HOSTFILE": ""}, "the job has no parallel environment; submit the script with qsub -pe NAME"),
        ((SRUN,), {}, {"PLUGINS": OLD_SLURM}, "Open MPI needs srun --mpi=pmix, and this Slurm offers only"),
        ((ARRAY,), {}, {"SLURM_ARRAY_TASK_ID": "4"}, "task 4 of the array has no value: VALUES has 4, for tasks"),
        ((ARRAY,), {}, {}, "this is no job array; submit the script with sbatch --array=0-3"),
        ((SRUN,), {}, {"MPI": "mpich"}, "srun starts Open MPI alone, not MPICH: Slurm's pmi2 fails now and then; "
            "use train.sbatch, which starts the ranks with MPICH's own mpirun"),
        ((SRUN, SGE), {}, {"INFO_STATUS": "9"}, "the ranks could not be started"),
    ],
)  # fmt: skip
def test_refused(site: Site, paths: tuple[str, ...], lines: dict[str, str], environ: dict[str, str], says: str) -> None:
    site.mpi(environ.get("MPI", "openmpi5"))
    for path in paths:
        status, output = site.run(path, *ONE, lines=lines, **environ)
        assert status == 2
        assert f"mpikv: error: {says.format(env=site.env)}" in output
        assert output.endswith("mpikv: job 17 ends with status 2\n")
        assert "trained" not in output
        assert ("use train.sbatch" in output) == (path == SRUN)


@pytest.mark.parametrize("path", SCRIPTS)
def test_outside_of_a_job(site: Site, path: str) -> None:
    status, output = site.run(path, *ONE, SLURM_JOB_ID="", JOB_ID="")
    assert (status, output.count("\n")) == (2, 1)
    assert "submit the script with" in output


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
        status, output = site.run(SLURM, *ONE, lines=lines, **environ)
        assert status == 0
        assert f"mpikv: Python 3 in {folder}; Open MPI, {folder}/bin/mpirun\n" in output


def test_no_mpirun(site: Site) -> None:
    (site.env / "bin" / "mpirun").unlink()
    for name in ("bash", "sh", "cat", "rm", "hostname", "mktemp"):
        (site.folder / "bin" / name).symlink_to(f"/bin/{name}")
    status, output = site.run(SLURM, *ONE, PATH=str(site.folder / "bin"))
    assert status == 2
    assert "no mpirun on PATH" in output


@pytest.mark.parametrize("path", [SLURM, SGE])
def test_lost_ranks(site: Site, path: str) -> None:
    """Open MPI's mpirun ends with status 0 all the same."""
    site.command("sleep")  # the script looks for files of a slow file system for a while
    status, output = site.run(path, *ONE, LOST="2")
    assert status == 1, output
    assert "mpikv: error: 2 of 4 ranks never ended, though the launcher says status 0: a host was lost\n" in output
    assert not list(site.folder.glob(".mpikv-job*"))


BACK, ENDS = "mpikv: job 17 ends with status 0 and goes back into the queue\n", "mpikv: job 17 ends with status {}\n"
NOT_SAVED = f"mpikv: not put into the queue again: this run has not written train-17.state\n{ENDS.format(0)}"


@pytest.mark.parametrize(
    ("path", "name", "program", "last"),
    [
        (SLURM, "USR1", {}, BACK),
        (SRUN, "TERM", {}, ENDS.format(0)),
        *((path, name, {}, ENDS.format(0)) for path in (SLURM, SGE) for name in ("USR2", "TERM")),
        *((path, "USR1", {"status": 3}, ENDS.format(3)) for path in (SLURM, SGE)),
        *((path, "USR1", {"saves": False}, NOT_SAVED) for path in (SLURM, SGE)),
    ],
)
def test_signals_reach_the_program_as_usr1(
    site: Site, path: str, name: str, program: dict[str, Any], last: str
) -> None:
    """The time limit's signal puts a job into the queue again, if it ends well and this run has saved: not a training
    that has ended, whose evaluation the signal met. An older stop file is of an earlier run.
    """
    if path == SGE:
        (site.folder / "train-17.state").write_text("weights")
    status, output = site.stop(path, signal.Signals[f"SIG{name}"], lines={"REQUEUE": "yes"}, **program)
    assert status == program.get("status", 0)
    assert f"mpikv: signal {name}: the ranks are asked to stop" in output
    assert "\nasked by SIGUSR1\n" in output
    assert output.endswith(last)
    assert site.called() == (["scontrol requeue 17"] if last == BACK else [])


OWN_HANDLER = """
import os, signal, time
came = []
signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
print("ready", flush=True)
while not came:
    time.sleep(0.05)
time.sleep(1.5)
print("came", len(came), flush=True)
"""


def test_a_handler_of_a_program_without_a_store_is_called_once(site: Site) -> None:
    """It may take long, and nothing says when it has been called."""
    status, output = site.stop(SLURM, signal.SIGUSR1, program=OWN_HANDLER)
    assert status == 0
    assert "\ncame 1\n" in output


# What the script's shells do before each command: without SIGNAL_AT they write down where they are; at that line they
# signal the script's shell, or, as Grid Engine does, all processes of the job that are there. The shell that becomes
# the launcher goes on when the script's shell has noticed.
HOOK = r"""
at() {
    [ -z "$PID" ] || [ -n "$STATUS" ] || [ -z "$ASKED" ] || [ "$BASHPID" != $$ ] || : >"$FAKE/noticed"
    case " $SIGNAL_AT " in
    "  ")
        local when=before
        [ ! -e "$FAKE/over" ] || when=after
        printf '%s\n' "$when $1" >>"$FAKE/lines"
        ;;
    *" $1 "*)
        [ ! -e "$FAKE/sent $1" ] || return
        : >"$FAKE/sent $1"
        local whom=$$
        [ -z "$ALL" ] || { [ "$BASHPID" = $$ ] && [ -n "$PID" ]; } || whom=-$$
        kill -USR1 -- "$whom"
        [ "$BASHPID" = $$ ] || [ -z "$WORK" ] || [ -n "$STATUS" ] || for _ in {1..1000}; do
            [ ! -e "$FAKE/noticed" ] || break
            sleep 0.02
        done
        ;;
    esac
}
set -T
trap 'at "${BASH_SOURCE##*/}:$LINENO"' DEBUG
"""


def widened(folder: Path, path: str, program: str, signal_at: str = "") -> tuple[list[str], int, str, Site]:
    """A job whose shells do what HOOK says. Returns the lines where they were, its status and output, and its site."""
    folder.mkdir()
    site = Site(folder)
    (folder / "hook").write_text(HOOK)
    environ = {"SIGNAL_AT": signal_at, "BASH_ENV": str(folder / "hook"), "ALL": "yes" if "sge" in path else ""}
    environ |= {"SLURM_ARRAY_TASK_ID": "0"} if "array" in path else {}
    status, output = site.run(path, "RUN", program, lines={"REQUEUE": "yes"}, **environ)
    lines = (folder / "lines").read_text().splitlines() if not signal_at else []
    return lines, status, output, site


# The other lines are those of train.sbatch and train.sh, in the same files.
OWN_LINES = {SRUN: ("script", "slurm-srun.sh", "launch.sh"), ARRAY: "array.sh", "sge/train-servers.sh": "job.sh"}


@pytest.mark.thorough
@pytest.mark.timeout(1200)  # a job for each line
@pytest.mark.parametrize("path", SCRIPTS)
def test_no_signal_is_lost_at_any_line(tmp_path: Path, path: str) -> None:
    """From the script's second line to its end. A program that runs then, or later, is asked once; if it had ended, the
    job ends as it would have.
    """
    ends, until_stopped = "pass", UNTIL_STOPPED.format(status=0, saves=True)
    seen, status, output, _ = widened(tmp_path / "seen", path, ends)
    assert status == 0, output
    first = SCRIPTS[path].splitlines().index((batch.TEMPLATES / "traps.sh").read_text().strip()) + 1
    lines: dict[str, bool] = {}
    for when, line in (entry.split() for entry in seen):
        if line.partition(":")[0] != "script" or int(line.partition(":")[2]) > first:
            lines.setdefault(line, when == "before")
    assert {line.partition(":")[0] for line in lines} >= {"script", "job.sh", "environment.sh", "watch.sh", "launch.sh"}
    assert len(lines) > 60
    lines = {line: before for line, before in lines.items() if line.startswith(OWN_LINES.get(path, ""))}

    def check(line: str) -> str:
        folder = tmp_path / line.replace(":", "-")
        _, status, output, site = widened(folder, path, until_stopped if lines[line] else ends, line)
        asked = [line for line in output.splitlines() if line.startswith("asked by ")]
        if not (folder / f"sent {line}").exists() or status != 0:
            return f"{line}: status {status}: {output}"
        if lines[line]:
            right = asked == ["asked by SIGUSR1"] and " and goes " in output and site.called()
        else:
            right = not asked and output.endswith("mpikv: job 17 ends with status 0\n") and not site.called()
        return "" if right else f"{line}: {output}"

    with ThreadPoolExecutor(4) as pool:
        wrong = [text for text in pool.map(check, lines) if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["slurm-srun", "slurm-mpirun"])
def test_the_shell_of_a_rank_passes_on_what_slurm_sends_to_it_alone(tmp_path: Path, kind: str) -> None:
    """As Slurm does where it tracks processes by cgroups. `mpirun` signals the group: twice would be once too often."""
    lines = (batch.TEMPLATES / "parts" / "launch.sh").read_text()
    made = lines[lines.index('[ "$KIND" = ') : lines.index("\nquoted()")]
    subprocess.run(["bash", "-c", made], env={**os.environ, "KIND": kind, "WORK": str(tmp_path)}, check=True)
    program = """if True:
        import os, signal, sys
        heard = []
        signal.signal(signal.SIGUSR1, lambda number, frame: (heard.append(1), os.write(1, b"heard\\n")))
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7 + len(heard)))
        os.write(1, b"begun\\n")
        while True:
            signal.pause()
    """
    words = ["sh", str(tmp_path / "rank"), "train", sys.executable, "-c", program]
    rank = subprocess.Popen(words, stdout=-1, env={**os.environ, "SLURM_PROCID": "1"}, start_new_session=True)
    assert rank.stdout is not None
    try:
        assert rank.stdout.readline() == b"begun\n"
        assert (tmp_path / "train-begun-1").exists()
        if kind == "slurm-mpirun":
            os.killpg(rank.pid, signal.SIGTERM)
            assert rank.wait(HANGS_S) == 7
            return
        caught = 0
        while not caught >> (signal.SIGTERM - 1) & caught >> (signal.SIGUSR1 - 1) & 1:  # it has started the program
            caught = int(re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{rank.pid}/status").read_text())[0], 16)
        rank.send_signal(signal.SIGUSR1)
        assert rank.stdout.readline() == b"heard\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(HANGS_S) == 8
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)


@pytest.mark.parametrize("tool", ["python", "awk", "mktemp", "qresub"])
def test_signals_of_grid_engine_spare_what_the_script_calls(site: Site, tool: str) -> None:
    """They go to all processes of the job: here while the script waits for `tool`, the first time that it does."""
    file = site.env / "bin" / "python" if tool == "python" else site.folder / "bin" / tool
    real = file.with_name("real")
    if not file.exists():
        real.symlink_to(f"/usr/bin/{tool}")
    else:
        file.rename(real)
    site.write_shell(file, f'[ -e "$FAKE/sent" ] || {{ : >"$FAKE/sent"; kill -USR1 0; }}\nexec {real} "$@"')
    lines = {"REQUEUE": "yes", "STOP_AFTER": "0" if tool == "qresub" else ""}
    status, output = site.run(SGE, "RUN", UNTIL_STOPPED.format(status=0, saves=True), lines=lines)
    assert status == 0
    assert (site.folder / "sent").exists()
    assert "mpikv: job 17 on h1:3,h2:1\n" in output
    assert output.endswith("mpikv: job 17 ends with status 0 and goes on as job 43\n")


def test_cancelled_after_the_time_limits_signal(site: Site) -> None:
    process = site.start(SLURM, "RUN", UNTIL_STOPPED.format(status=0, saves=True), lines={"REQUEUE": "yes"})
    assert process.stdout is not None
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    os.kill(process.pid, signal.SIGSTOP)  # else it might hear one alone
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT):
        os.kill(process.pid, number)
    output, _ = process.communicate(timeout=HANGS_S)
    assert output.count("asked by SIGUSR1") == 1
    assert output.endswith("mpikv: job 17 ends with status 0\n")
    assert site.called() == []


def test_grid_engine_requeues(site: Site) -> None:
    """As a copy of the job, which finds the file under its own number before it may start."""
    (site.folder / "train-17.state").write_text("weights")
    site.command("qrls", 'ls "$FAKE" | grep state >>"$FAKE/called"')
    status, output = site.stop(SGE, signal.SIGUSR1, lines={"REQUEUE": "yes"})
    assert status == 0
    assert site.called() == ["qresub -h u 17", "qrls 43", "train-43.state"]
    (site.folder / "of-17").mkdir()
    kept = site.folder / "of-17" / "states"  # a name of the user's, which the copy of the job has as well
    kept.write_text("weights")
    _, output = site.stop(SGE, signal.SIGUSR1, lines={"REQUEUE": "yes", "STOP_FILE": str(kept)})
    assert kept.exists()
    assert "mv:" not in output
    assert output.endswith("mpikv: job 17 ends with status 0 and goes on as job 43\n")


def test_grid_engine_does_not_copy_jobs_here(site: Site) -> None:
    site.command("qresub", "echo 'denied: host is no submit host'; exit 1")
    status, output = site.stop(SGE, signal.SIGUSR1, lines={"REQUEUE": "yes"})
    assert status == 99
    assert "mpikv: qresub: denied: host is no submit host\n" in output
    assert output.endswith("mpikv: job 17 ends with status 0 and goes back into the queue\n")


def test_array_task(site: Site) -> None:
    program = ("RUN", "import sys; print('options', sys.argv[1:])")
    status, output = site.run(ARRAY, *program, SLURM_ARRAY_TASK_ID="3", SLURM_ARRAY_JOB_ID="16")
    assert status == 0
    assert "mpikv: task 3 of array 16\n" in output
    assert "options ['--lr', '0.1']\n" in output
