"""The examples do what they say, alone and under mpirun, on 1500 small real images."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import digits as written_digits
import frameworks
import jobs
import numpy as np
import pytest

from mpikv import MpikvError
from mpikv.runtime import launcher

pytestmark = pytest.mark.timeout(1200)  # of several runs
EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 300  # of a run, on a busy machine
LAST_LINE = r"accuracy (0\.\d{4}|1\.0000) after (\d+ (?:epoch|step)s?) in \d+\.\d s"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits as IDX files: the same images wherever the tests run."""
    return written_digits.write(tmp_path_factory.mktemp("digits"))


def run(example: str, *arguments: object, n: int | None = None, timeout_s: float = LIMIT_S) -> str:
    """Run an example, alone or with n ranks; its standard output."""
    line = ["python", str(EXAMPLES / example), *map(str, arguments)]
    if n is not None:
        job = jobs.mpirun(n, line, timeout_s=timeout_s)
        job.check()
        return job.stdout
    mpi = jobs.find_mpi()
    assert mpi is not None
    env = jobs.environment(mpi, {}, Path(tempfile.gettempdir()))
    done = subprocess.run(
        [sys.executable, *line[1:]], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr  # no progress bar where nobody looks
    return done.stdout


def result(output: str, after: str) -> float:
    """The accuracy in the last line."""
    found = re.fullmatch(LAST_LINE, output.splitlines()[-1])
    assert found, output
    assert found[2] == after
    return float(found[1])


def weights(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as archive:
        return {name: archive[name] for name in archive.files}


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest relative difference of a weight's norm."""
    assert set(a) == set(b)
    return max(float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in b)


def here(monkeypatch: pytest.MonkeyPatch, program: str, *arguments: object) -> SystemExit:
    """How a program ends, run in this process, that its arguments end."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / program), *map(str, arguments)])
    with pytest.raises((SystemExit, OSError, ValueError)) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return ended.value


# ---- the short ones


@pytest.mark.whole_job
def test_tour() -> None:
    output, workers = run("tour.py", n=2), 2
    assert f"dist_sync, {workers} worker" in output
    shown = dict(
        re.findall(r"^(after [^:]+|the sum[^:]+|a weight[^:]+|three keys[^:]+):\n((?:[ \[].*\n)+)", output, re.M)
    )
    numbers = {what: [float(x) for x in re.findall(r"[\d.]+", value)] for what, value in shown.items()}
    assert numbers["after init with 2"] == [2] * 6
    assert numbers["after a push of 1 from each of three devices"] == [3 * workers] * 6
    assert numbers["three keys after a push of 1, 2 and 3"] == [workers, 2 * workers, 3 * workers]
    assert numbers["the sum of the ranks, from 1 on"] == [sum(range(1, workers + 1))]
    assert numbers["the sum of their squares"] == [sum(rank * rank for rank in range(1, workers + 1))]
    assert numbers["a weight of 10 after a gradient of 1 from every worker and a rate of 0.1"] == pytest.approx(
        [10 - 0.1 * workers] * 6
    )
    for rank in range(workers):
        assert f"worker {rank} of {workers} is done" in output


@pytest.mark.whole_job
def test_linear_regression() -> None:
    output = run("linear_regression.py", n=3).splitlines()
    assert output[-2:] == ["learned y = 2.000 a -3.400 b +4.200", "true    y = 2.000 a -3.400 b +4.200"]
    assert len((EXAMPLES / "linear_regression.py").read_text().splitlines()) < 60


@pytest.mark.thorough
@pytest.mark.whole_job
@pytest.mark.parametrize(("program", "more"), [("torch_mnist", []), ("local_training", ["--every", 4])])
def test_torch(program: str, more: list[Any], digits: Path) -> None:
    frameworks.need("torch")
    output = run(f"{program}.py", "--data-dir", digits, "--epochs", 3, *more, n=2).splitlines()
    assert [line.split(":")[0] for line in output] == [f"epoch {epoch}" for epoch in (1, 2, 3)]
    assert float(output[-1].split()[3].rstrip(",")) > 0.7  # 0.835 where it was written
    assert len((EXAMPLES / "torch_mnist.py").read_text().splitlines()) < 60


@pytest.mark.thorough
@pytest.mark.whole_job
def test_a_whole_training_goes_on_where_it_was_stopped(digits: Path, tmp_path: Path) -> None:
    """Two loading processes for each worker; the lines after the stop are those of a training that was not stopped."""
    frameworks.need("torch")

    def train(file: str, *arguments: object) -> list[str]:
        line = ["python", str(EXAMPLES / "torch_whole.py"), "--data-dir", str(digits), "--epochs", "2"]
        env = {"MPIKV_STOP_FILE": str(tmp_path / file)}
        job = jobs.mpirun(2, [*line, *map(str, arguments)], env=env, timeout_s=LIMIT_S)
        assert (job.status, job.timed_out, job.ranks_left) == (0, False, []), job.output
        return job.stdout.splitlines()

    whole = train("none")
    assert [line.split(":")[0] for line in whole] == ["epoch 1", "epoch 2"]
    assert float(whole[-1].rpartition(" ")[2]) > 0.5  # 0.695 where it was written
    file = tmp_path / "state"
    # Of 11 steps in each epoch; that one, or the next that all can reach.
    first, stopped = train("state", "--stop-at", 14)
    found = re.fullmatch(rf"stopped after (\d+) examples of epoch 2: all is in {re.escape(str(file))}", stopped)
    assert found, stopped
    assert first == whole[0]
    assert train("state") == [f"goes on in epoch 2 after {found[1]} examples", whole[1]]
    assert not (tmp_path / "none").exists()


@pytest.mark.thorough
@pytest.mark.whole_job
def test_jax(digits: Path) -> None:
    frameworks.need("jax")
    frameworks.need("optax")
    output = run("jax_mnist.py", "--data-dir", digits, "--batch-size", 16, "--epochs", 2, n=2).splitlines()
    found = [re.fullmatch(r"epoch (\d): accuracy (0\.\d{4}), \d+\.\d s", line) for line in output]
    assert [one[1] for one in found if one] == ["1", "2"]
    assert found[-1]
    assert float(found[-1][2]) > 0.7  # guessing gives 0.1
    assert len((EXAMPLES / "jax_mnist.py").read_text().splitlines()) < 60


WORDS = ["word_vectors.py", "--num-epochs", 2, "--min-count", 1, "--piece", 16, "--window", 2, "--negatives", 8]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 7,000 words in a file."""
    file = tmp_path_factory.mktemp("text") / "text"
    file.write_text("".join((EXAMPLES.parent / f"docs/{name}.md").read_text() for name in ("semantics", "pytorch")))
    return file


@pytest.mark.whole_job
@pytest.mark.parametrize(
    ("n", "servers"), [(3, 1), *(pytest.param(n, 0, marks=pytest.mark.thorough) for n in (None, 3))]
)
def test_word_vectors_by_rows_are_those_of_dense_keys(n: int | None, servers: int, text: Path) -> None:
    """The same losses, and at most a tenth of the bytes that the whole tables have, pushed and pulled, in each step."""
    found = {}
    for way in ((), ("--dense",)):
        output = run(*WORDS, "--text", text, "--num-servers", servers, *way, n=n)
        found[way] = [float(loss) for loss in re.findall(r"^epoch \d/2: loss (\d+\.\d{4})$", output, re.MULTILINE)]
        if not way:
            sent = re.search(r"^worker 0 has sent (\S+) MB; the whole tables in each step are (\S+) MB$", output, re.M)
            assert sent, output
            assert float(sent[1]) < 0.1 * float(sent[2])
    rows, dense = found.values()
    assert rows == pytest.approx(dense, rel=1e-3)
    assert rows[1] < rows[0] * 0.95


@pytest.mark.whole_job
def test_word_vectors_of_workers_that_train_by_themselves(text: Path) -> None:
    output = run(*WORDS, "--text", text, "--local", 16, n=2)
    first, second = (float(loss) for loss in re.findall(r"^epoch \d/2: loss (\d+\.\d{4})$", output, re.MULTILINE))
    assert second < first * 0.99
    last = rf"loss {second:.4f} after \d+ steps in \d+\.\d s, worker 0 has sent \d+\.\d\d MB"
    assert re.fullmatch(last, output.splitlines()[-1]), output


def test_word_vectors_say_how_to_get_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(MpikvError, match=r"none: no text. Give one by --text FILE(.|\n)*apt-get install bible-kjv"):
        importlib.import_module("word_vectors").read(tmp_path / "none", 1)


PROGRAMS = ["tour", "linear_regression", "torch_mnist", "torch_whole", "local_training", "jax_mnist", "train_mnist"]
PROGRAMS += ["image_classification", "word_vectors"]


def test_every_program_is_known() -> None:
    parts = {"compressed", "image_files", "image_sets", "networks", "torch_networks", "usage"}
    quoted = {"first", "forgets", "jax_linear", "shared", "torch_linear", "tutorial"}  # run where documents show them
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*PROGRAMS, *parts, *quoted}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_printed_by_the_first_rank_and_nothing_else_is_done(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_torch = ("torch_mnist", "torch_whole", "local_training", "image_classification")
    for library in ["torch"] if program in of_torch else ["jax", "optax"] if program == "jax_mnist" else []:
        frameworks.need(library)
    for name in [name for name in os.environ if name.startswith(jobs.FOREIGN)]:
        monkeypatch.delenv(name)
    assert here(monkeypatch, f"{program}.py", "--help").code == 0
    output = capsys.readouterr().out
    assert output.startswith(f"usage: {program}.py [-h]")
    assert output.count("usage:") == output.count("--help") == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert here(monkeypatch, f"{program}.py", "--help").code == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("rank", "said"), [("0", "tour.py: error: unrecognized arguments: --fast\n"), ("1", "")])
def test_a_wrong_option_is_said_by_the_first_rank(
    rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", rank)
    monkeypatch.setenv(launcher.HYDRA, "1")  # where no rank waits for mpirun to end it
    assert here(monkeypatch, "tour.py", "--fast").code == 2
    assert (capsys.readouterr().err.rpartition("]\n")[2]) == said


# ---- training


def test_training_alone(digits: Path) -> None:
    output = run("train_mnist.py", "--data-dir", digits, "--kv-store", "local", "--num-devices", 2).splitlines()
    assert output[0] == f"data: 1500 training and 297 test images from {digits}"
    for epoch, line in enumerate(output[1:-1]):
        assert re.fullmatch(rf"epoch {epoch + 1}/3: loss \d\.\d{{4}}, test accuracy 0\.\d{{4}}, \d+ images/s", line)
    # 0.91 where it was written; one seed, but rounding may differ with the BLAS.
    assert result("\n".join(output), "3 epochs") > 0.8


@pytest.mark.whole_job
def test_twenty_steps_are_the_same_in_every_mode(digits: Path, tmp_path: Path) -> None:
    """Three workers, three with a server, one process with the same global batches; every epoch ends in a step of 6."""
    common = ["--data-dir", digits, "--network", "mlp", "--num-examples", 150, "--max-steps", 20]
    common += ["--num-epochs", 9, "--lr-step-epochs", 3]
    found = {}
    for name, n, more in (
        ("alone", None, ["--batch-size", 48]),
        ("devices", None, ["--batch-size", 48, "--num-devices", 4, "--kv-store", "device"]),
        ("allreduce", 3, ["--batch-size", 16]),
        ("server", 4, ["--batch-size", 16, "--num-servers", 1]),
    ):
        result(run("train_mnist.py", *common, *more, "--dump-weights", tmp_path / name, n=n), "20 steps")
        found[name] = weights(tmp_path / name)
    for name in found["alone"]:
        assert np.array_equal(found["allreduce"][name], found["server"][name])
    assert distance(found["allreduce"], found["alone"]) < 1e-5
    assert distance(found["devices"], found["alone"]) < 1e-5


@pytest.mark.whole_job
def test_resumed_run_is_the_same_run(digits: Path, tmp_path: Path) -> None:
    """Bit for bit, and with a server, too, as long as the number of workers is the same."""
    common = ["--data-dir", digits, "--network", "mlp", "--num-examples", 500]
    saved = tmp_path / "run"
    through = run("train_mnist.py", *common, "--dump-weights", tmp_path / "through", n=2)
    run("train_mnist.py", *common, "--num-epochs", 2, "--save", saved, n=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run", "through"]
    rest = ["--resume", saved, "--save", saved, "--dump-weights", tmp_path / "again"]
    again = run("train_mnist.py", *common, "--num-servers", 1, *rest, n=3)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again", "run", "through"]
    assert result(again, "3 epochs") == result(through, "3 epochs")
    assert "epoch 3/3" in again
    assert "epoch 2/3" not in again
    first, second = weights(tmp_path / "through"), weights(tmp_path / "again")
    for name in first:
        assert np.array_equal(first[name], second[name])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--lr-step-epochs", "2,x"], "numbers with commas between them"),
        (["--data-dir", "/nowhere"], "/nowhere: there is no such directory"),
        (["--kv-store", "dist_snyc"], "dist_snyc"),
        (["--optimizer", "gradient"], "invalid choice: 'gradient'"),
        (["--resume", "/nowhere/run"], "train_mnist.py: --resume /nowhere/run: there is no such file"),
        (["--resume", __file__], f"train_mnist.py: --resume {__file__}: not a file of states"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], words: str, digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = here(monkeypatch, "train_mnist.py", "--kv-store", "local", "--data-dir", digits, *arguments)
    assert words in f"{capsys.readouterr().err}{ended}"
