"""Batch scripts: what is rendered, what is refused, and what the schedulers' answers are read as."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest
from jobs import ROOT

from mpikv.commands.launch import batch, sge, slurm
from mpikv.commands.launch.scheduler import BatchJob, BatchState, SchedulerError, parse_time, time_text
from mpikv.errors import ConfigError

SCRIPTS = batch.repository_scripts()
JOBS = {"slurm": BatchJob("slurm", command=("true",)), "sge": BatchJob("sge", command=("true",))}
TEMPLATES = ROOT / "mpikv" / "commands" / "launch" / "templates"


def test_scripts_of_the_repository_are_the_templates() -> None:
    files = [file for name in JOBS for file in (ROOT / "scripts" / name).iterdir()]
    found = {str(file.relative_to(ROOT / "scripts")): file.read_text() for file in files}
    assert found == SCRIPTS, "run: python -m mpikv.commands.launch.batch"
    assert all(file.stat().st_mode & 0o111 for file in files)


def test_every_file_that_they_call_is_used() -> None:
    parts = {file.name: file for file in (TEMPLATES / "parts").iterdir()}
    text = "".join(file.read_text() for file in (TEMPLATES / "job.sh", *parts.values()))
    kinds = set(re.findall(r'"\$TEMPLATES/job.sh" (\S+)', "".join(SCRIPTS.values())))
    named = set(re.findall(r'\. "\$PARTS/(\S*)"', text)) - {"$KIND.sh", "${KIND%-*}.sh"}
    assert named | {f"{word}.sh" for kind in kinds for word in (kind, kind.split("-")[0])} == set(parts)


def settings(script: str) -> list[str]:
    return [line.split("  # ")[0] for line in script.split("# ---- The rest", maxsplit=1)[0].splitlines()]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-12", 216000), ("1-1:30", 91800), ("1-1:30:15", 91815),
     (" 0:00:01 ", 1)],
)  # fmt: skip
def test_time_as_slurm_reads_it(text: str, seconds: int) -> None:
    assert parse_time(text) == parse_time(time_text(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1h", "-5", "1:2:3:4", "0:00", "1-", "1.5", "0-0"])
def test_no_time(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_time(text)


def directives(script: str, mark: str) -> list[str]:
    return [line.removeprefix(mark).strip() for line in script.splitlines() if line.startswith(mark)]


def test_slurm_options() -> None:
    job = BatchJob("slurm", workers=4, servers=2, command=("x",), name="fit", time_s=7200,
        cpus_per_task=4, queue="gpu", output_dir="logs", requeue=True, restarts=2,
        options=("--account=x", "--mail-user=a b"))  # fmt: skip
    assert directives(batch.script(job), "#SBATCH") == [
        "--job-name=fit",
        "--ntasks=6",
        "--cpus-per-task=4",
        "--time=2:00:00",
        "--signal=B:USR1@60",
        "--partition=gpu",
        "--output=logs/fit-%j.out",
        "--open-mode=append",
        "--requeue",
        "--no-kill",
        "--account=x",
        "'--mail-user=a b'",
    ]


def test_sge_options() -> None:
    job = BatchJob("sge", workers=4, servers=2, command=("x",), name="fit", time_s=7200, queue="all.q",
        parallel_environment="orte", output_dir="logs", options=("-P x",))  # fmt: skip
    script = batch.script(job)
    assert directives(script, "#$") == [
        "-N fit",
        "-pe orte 6",
        "-l h_rt=2:00:00",
        "-notify",
        "-q all.q",
        "-o logs/fit-$JOB_ID.out",
        "-S /bin/bash -cwd -j y",
        "-v PATH,LD_LIBRARY_PATH,PYTHONPATH,VIRTUAL_ENV,CONDA_PREFIX",
        "-P x",
    ]
    assert "-v PATH,OMP_NUM_THREADS" in directives(batch.script(replace(job, passed=("PATH", "OMP_NUM_THREADS"))), "#$")
    assert "STOP_AFTER=7140" in settings(script)
    for other in JOBS.values():
        assert not re.search("--time|h_rt=", batch.script(replace(other, time_s=None)))  # the queue's


WORDS = ("a b", "it's", '"', "$HOME `id` \\", "new\nline", "'\\n'\n#$ -N x\n#SBATCH --hold", "*", "-c", "", "ü")


@pytest.mark.parametrize("scheduler", JOBS)
def test_every_word_arrives(scheduler: str) -> None:
    """In the array PROGRAM and in the environment, whatever the words hold."""
    job = replace(JOBS[scheduler], command=WORDS, environ=("A",), environment="/a 'b", python_env="/a b/env")
    top = batch.script(job).split("# ---- The rest")[0] + batch.environment_file({"A": "x'y\n$z"})
    show = 'printf "%s\\0" "${PROGRAM[@]}" "$A" "$PYTHON_ENV" "$ENV_FILE"'
    text = f"{top}\n{show}\n"
    done = subprocess.run(["bash"], input=text, capture_output=True, encoding="utf-8", check=True)
    assert not [line for line in top.splitlines() if line.startswith(("#$ -N x", "#SBATCH --hold"))]
    assert done.stdout.split("\0") == [*WORDS, "x'y\n$z", "/a b/env", "/a 'b", ""]


BOTH, SLURM, SGE = ("slurm", "sge"), ("slurm",), ("sge",)


@pytest.mark.parametrize(
    ("schedulers", "changes", "says"),
    [
        (BOTH, {"workers": 0}, "0 workers"),
        (BOTH, {"servers": -1}, "-1 servers"),
        (BOTH, {"restarts": -1}, "-1 restarts"),
        (SLURM, {"restarts": 1, "with_srun": True}, "--restarts goes without --srun"),
        (BOTH, {"name": "a b"}, "'a b' is no job name"),
        (BOTH, {"name": "1st"}, "no job name"),
        (BOTH, {"environ": ("A-B",)}, "'A-B' is no name"),
        (BOTH, {"time_s": 60}, "0:01:00 is too short"),
        (BOTH, {"command": ()}, "no command"),
        (BOTH, {"options": ("--a\n#SBATCH --b",)}, "one line"),
        (BOTH, {"queue": "a\n#SBATCH --b"}, "one line"),
        (BOTH, {"output_dir": "logs/%j"}, "logs/%j"),
        (BOTH, {"output_dir": "$HOME"}, "a meaning there"),
        (SLURM, {"parallel_environment": "mpi"}, "--pe is Grid Engine's"),
        (SGE, {"cpus_per_task": 2}, "--cpus-per-task is Slurm's: .* allocation rule"),
        (SGE, {"with_srun": True}, "--srun is"),
    ],
)
def test_refused(schedulers: tuple[str, ...], changes: dict[str, object], says: str) -> None:
    for scheduler in schedulers:
        with pytest.raises(ConfigError, match=says):
            replace(JOBS[scheduler], **changes).check()


LINE = (
    "JobId=17 JobName=train UserId=u(1) Requeue=1 Restarts=0 BatchFlag=1 JobState={} Reason={} Dependency=(null) "
    "ExitCode={} RunTime=00:00:01 ReqNodeList=(null) ExcNodeList=(null) NodeList={} Comment=JobState=FAILED\n"
)


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        (("PENDING", "Resources", "0:0", ""), BatchState("pending (Resources)")),
        (("PENDING", "None", "0:0", "(null)"), BatchState("pending")),
        (("CONFIGURING", "None", "0:0", "n1"), BatchState("configuring")),
        (("RUNNING", "None", "0:0", "n[1-2]"), BatchState("running on n[1-2]")),
        (("COMPLETING", "None", "0:0", "n1"), BatchState("completing on n1")),
        (("REQUEUED", "None", "0:0", ""), BatchState("requeued")),
        (("COMPLETED", "None", "0:0", "n1"), BatchState("completed", 0)),
        (("FAILED", "NonZeroExitCode", "7:0", "n1"), BatchState("failed", 7)),
        (("FAILED", "RaisedSignal:9", "0:9", "n1"), BatchState("failed", 137)),
        (("CANCELLED", "None", "0:15", "n1"), BatchState("cancelled", 143)),
        (("CANCELLED", "None", "0:0", "n1"), BatchState("cancelled", 1)),
        (("TIMEOUT", "TimeLimit", "0:0", "n1"), BatchState("timeout", 1)),
        (("OUT_OF_MEMORY", "None", "0:125", "n1"), BatchState("out of memory", 253)),
        (("NODE_FAIL", "None", "0:0", "n1"), BatchState("node fail", 1)),
    ],
)
def test_slurm_states(fields: tuple[str, ...], state: BatchState) -> None:
    assert slurm.read_state(LINE.format(*fields)) == state


def qstat(*rows: tuple[int, str, str]) -> str:
    items = "".join(
        f"<job_list><JB_job_number>{number}</JB_job_number><state>{letters}</state><queue_name>{queue}</queue_name>"
        "</job_list>"
        for number, letters, queue in rows
    )
    return f"<?xml version='1.0'?><job_info><queue_info>{items}</queue_info><job_info></job_info></job_info>"


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        ([], None),
        ([(170, "r", "all.q@h1")], None),
        ([(17, "qw", "")], BatchState("pending")),
        ([(17, "hqw", "")], BatchState("held")),
        ([(17, "r", "all.q@h2"), (17, "r", "all.q@h1"), (17, "r", "all.q@h1")], BatchState("running on h1, h2")),
        ([(17, "t", "all.q@h1")], BatchState("running on h1")),
        ([(17, "s", "all.q@h1")], BatchState("suspended on h1")),
        ([(17, "dr", "all.q@h1")], BatchState("being deleted")),
        ([(17, "Rq", "")], BatchState("pending")),
        ([(17, "Eqw", "")], BatchState("in error state Eqw, `qstat -j 17` says why")),
    ],
)
def test_grid_engine_states(rows: list[tuple[int, str, str]], state: BatchState | None) -> None:
    assert sge.read_state(qstat(*rows), "17") == state
    with pytest.raises(SchedulerError):
        sge.read_state("<job_info>", "17")


def test_grid_engine_says_why_a_job_waits() -> None:
    text = (
        "parallel environment: mpi\nscheduling info:            queue a is full\n                            no slots\n"
    )
    assert sge.pending_reason(text) == "no slots"
    assert sge.pending_reason("scheduling info:   (Collecting of scheduler job information is turned off)\nx: 1") == (
        "(Collecting of scheduler job information is turned off)"
    )
    assert sge.pending_reason("") == ""


@pytest.mark.parametrize("scheduler", JOBS)
def test_roles_are_in_the_script(scheduler: str) -> None:
    job = replace(JOBS[scheduler], servers=3, requeue=True, restarts=2)
    assert {"SERVERS=3", "REQUEUE=yes", "RESTARTS=2", "PLACEMENT=spread", "DISTRIBUTION=block"} <= set(
        settings(batch.script(job))
    )
    assert {"SERVERS=0", "REQUEUE=no", "RESTARTS=0"} <= set(settings(batch.script(JOBS[scheduler])))
