"""What is shown of an exception that nobody has caught: one line for a mistake, folded frames for the rest."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import fresh
import numpy as np
import pytest

import mpikv
from mpikv import Parameter, SplitSampler, Trainer, UnsupportedError, data, kv, optimizers
from mpikv.config import wants_full_tracebacks
from mpikv.create import notices
from mpikv.runtime import launcher, tracebacks
from mpikv.runtime.abort import Guard

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


def of(call) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - which one is what the tests look at
        call()
    return caught.value


def store_with_key(*, closed: bool = False) -> kv.KVStore:
    store = kv.create("local")
    store.init("w", np.zeros(3))
    if closed:
        store.close()
    return store


MISTAKES = {
    "unknown parameter": (lambda: optimizers.create("sgd", lr=0.1), "TypeError: sgd has no parameter lr"),
    "unknown argument": (lambda: Trainer([Parameter(np.zeros(2))], "sgd", lr=0.1), "unexpected keyword argument 'lr'"),
    "unknown store": (lambda: kv.create("dist_asink"), "ValueError: unknown type of store 'dist_asink'"),
    "wrong kind": (lambda: SplitSampler("ten"), "TypeError: length is a whole number, not str"),
    "wrong ratio": (  # found in a method that Python has made of a string
        lambda: kv.create("local").set_gradient_compression({"type": "topk", "ratio": 2}),
        "ValueError: topk: ratio must be",
    ),
    "wrong shape": (lambda: store_with_key().push("w", np.zeros(4)), "ShapeMismatch: push: key 'w' is"),
    "unknown key": (lambda: store_with_key().pull("v"), "KeyNotInitialized: "),
    "no file": (lambda: Trainer([Parameter(np.zeros(2))], "sgd").load_states("/no/such"), "FileNotFoundError: "),
    "no records": (lambda: data.RecordFile("/no/such"), "FileNotFoundError: "),
    "closed": (lambda: store_with_key(closed=True).push("w", np.zeros(3)), "MpikvError: push on a closed store"),
}


def raising(error: BaseException) -> None:
    raise error


def in_an_updater(error: BaseException) -> None:
    store = store_with_key()
    store.set_updater(lambda *_: raising(error))
    store.push("w", np.zeros(3))


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line_with_the_users_place(case: str) -> None:
    call, says = MISTAKES[case]
    found = tracebacks.mistake(of(call))
    assert found is not None
    assert says in found.text
    assert "\n" not in str(found)
    name, _, line = found.place.rpartition(":")
    assert name.endswith("test_tracebacks.py")
    text = Path(__file__).read_text().splitlines()[int(line) - 1]
    assert any(word in text for word in ("create(", "Trainer(", "SplitSampler(", "push(", "pull(", "data."))


def test_the_programs_own_errors_and_those_of_numpy_inside_are_no_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latter are faults of ours, and all frames are shown."""
    monkeypatch.setattr(mpikv.data.split.SplitSampler, "_order", lambda self: np.zeros(1) + np.zeros(2))
    for error in (ValueError("own"), KeyError("own"), FileNotFoundError(2, "own", "file")):
        for call in (lambda: raising(error), lambda: in_an_updater(error)):  # noqa: B023 - at once
            assert tracebacks.mistake(of(call)) is None
    assert tracebacks.mistake(of(lambda: raising(UnsupportedError("own")))) is None
    assert tracebacks.mistake(of(SplitSampler(4).indices)) is None


def with_a_cause() -> None:
    try:
        store_with_key().pull("v")
    except KeyError as error:
        raise RuntimeError("so") from error


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: in_an_updater(ValueError("own")), ("ValueError: own", "in raising", "frames of mpikv (MPIKV_TRACE")),
        (with_a_cause, ("KeyNotInitialized", "RuntimeError: so")),
    ],
)
def test_frames_of_ours_are_folded(call: Callable[[], None], parts: tuple[str, ...]) -> None:
    error = of(call)
    text = tracebacks.folded(error)
    assert [part for part in parts if part not in text] == []
    assert "/mpikv/kvstore.py" not in text
    assert "/mpikv/kvstore.py" in tracebacks.full(error)


def names_nothing() -> None:
    counter = 1  # noqa: F841 - meant
    conter  # noqa: B018, F821


@pytest.mark.parametrize(
    ("call", "near"),
    [(lambda: kv.create("local").pul("w"), "pull"), (names_nothing, "counter")],
)
def test_unknown_names_are_answered_with_the_nearest(call: Callable[[], object], near: str) -> None:
    error = of(call)
    for text in (tracebacks.folded(error), tracebacks.full(error)):
        (last,) = re.findall("^(?:Name|Attribute)Error: .*", text, re.MULTILINE)
        assert re.search(rf"\. Did you mean:? '{near}'\?$", last), last
    assert tracebacks.folded(of(lambda: kv.create("local").zzzzzz)).endswith("'zzzzzz'")


@pytest.mark.parametrize("package", [pytest.param("torch", marks=pytest.mark.thorough), "jax"])
def test_a_missing_package_is_named_with_what_installs_it(package: str) -> None:
    done = fresh.python(f"import sys; sys.modules[{package!r}] = None; import mpikv.{package}")
    said = rf"\nModuleNotFoundError: .*; mpikv.{package} needs \w+: pip install {package}\n$"
    assert re.search(said, done.stderr), done.stderr


def test_full() -> None:
    assert wants_full_tracebacks({"MPIKV_TRACEBACK": " Full "})
    assert not wants_full_tracebacks({"MPIKV_TRACEBACK": "short"})
    assert not wants_full_tracebacks({})


# --- who tells


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Let a rank of three tell an error: how long it waited for its turn, what it printed, how it ended the job."""
    from mpikv.runtime import abort

    def tell(rank: int, call) -> tuple[float, str, tuple[int, bool]]:
        waited, ended = [0.0], []
        monkeypatch.setattr(abort.time, "sleep", waited.append)
        monkeypatch.setattr(abort, "is_running", lambda: True)
        monkeypatch.setattr(abort, "abort", lambda status, quietly=False: ended.append((status, quietly)))
        error = of(call)
        Guard(rank, 3).excepthook(type(error), error, error.__traceback__)
        return sum(waited), capsys.readouterr().err, ended[0]

    return tell


def test_rank_0_tells_at_once_and_the_others_in_turn(told) -> None:
    waited_s, text, ended = told(0, MISTAKES["unknown parameter"][0])
    assert (waited_s, ended) == (0.0, (2, True))
    assert text.startswith("mpikv: error: [rank 0 of 3 on ")
    assert text.count("\n") == 1
    first_s, second_s = (told(rank, MISTAKES["unknown parameter"][0])[0] for rank in (1, 2))
    assert 2.0 <= first_s < second_s < 5.0


def test_other_errors_keep_their_traceback(told) -> None:
    _, text, ended = told(0, lambda: in_an_updater(ValueError("own")))
    assert ended == (1, False)
    lines = text.splitlines()
    assert all(line.startswith("[rank 0 of 3 on ") for line in lines)
    assert lines[-1].endswith("ends the job with status 1")
    assert any(line.endswith("ValueError: own") for line in lines)


def test_every_rank_tells_all_where_it_is_asked_for(told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIKV_TRACEBACK", "full")
    waited_s, text, ended = told(2, MISTAKES["unknown parameter"][0])
    assert (waited_s, ended) == (0.0, (1, False))
    assert "/mpikv/optimizers/" in text


@pytest.mark.parametrize(("call", "status", "begins"), [("pull('v')", 2, "mpikv: error: "), ("nosuch", 1, "Traceback")])
def test_alone(call: str, status: int, begins: str) -> None:
    done = fresh.python(f"from mpikv import kv; kv.create('local').{call}")
    assert done.returncode == status
    assert done.stderr.startswith(begins)
    assert begins == "Traceback" or done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("environ", "program", "ends"),
    [
        (OPEN_MPI, "/v/bin/prterun", True),
        (OPEN_MPI, "/usr/bin/orted", True),
        ({**OPEN_MPI, "OMPI_MCA_mpi_ft_enable": "1"}, "/v/bin/prterun", False),
        (OPEN_MPI, "/usr/sbin/slurmstepd", False),
        ({"PMI_SIZE": "2", "HYDI_CONTROL_FD": "5"}, "/v/bin/mpiexec.hydra", False),
        ({}, "", False),
    ],
)
def test_whose_exit_ends_the_job(environ, program: str, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "program", lambda: program)
    assert launcher.ends_jobs(environ) is ends


# --- notices


def test_variables_that_nothing_reads() -> None:
    known = {"MPIKV_TIMEOUT_S": "3", "MPIKV_TRACEBACK": "full", "MPIKV_TEST_X": "1", "_MPIKV_LAUNCH": "{}"}
    assert notices.unread(known) == ""
    text = notices.unread({**known, "MPIKV_TIMEOUT": "3", "DMLC_NUM_WORKER": "2", "DMLC_K8S": "1", "MPIKV_QQQQQQ": ""})
    assert text == (
        "mpikv: these variables are set, and mpikv does not read them: MPIKV_QQQQQQ (there is no such setting); "
        "MPIKV_TIMEOUT (did you mean MPIKV_TIMEOUT_S?); DMLC_K8S (here: see docs/mxnet.md); "
        "DMLC_NUM_WORKER (here: mpirun -n, less the servers)"
    )


def test_every_dmlc_variable_with_a_counterpart_stands_in_the_table() -> None:
    text = (Path(__file__).parents[3] / "docs/mxnet.md").read_text()
    assert [name for name in notices.COUNTERPARTS if f"`{name}`" not in text] == []


def trainer(**more: object) -> None:
    Trainer([Parameter(np.zeros(2))], "sgd", **more)


@pytest.mark.parametrize(
    ("environ", "call", "words"),
    [
        (
            *(OPEN_MPI, lambda: kv.create("local")),
            "mpikv: kv.create('local') is of one process, and 2 ranks were started: each trains a model of its own, "
            "and nothing is exchanged; for one model take 'dist_sync'",
        ),
        (OPEN_MPI, trainer, "Trainer(kvstore='device') has no store, and 2 ranks were"),
        (OPEN_MPI, lambda: trainer(kvstore=None), "Trainer(kvstore=None) has no store, and 2 ranks were started"),
        (
            *({"DMLC_ROLE": "worker", "MPIKV_NUM_SERVER": "1"}, lambda: (kv.create("local"), trainer())),
            "MPIKV_NUM_SERVER (did you mean MPIKV_NUM_SERVERS?)",
        ),
        ({}, lambda: kv.create("local"), None),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1"}, lambda: kv.create("local"), None),  # rank 0 says it
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, lambda: kv.create("local"), None),
    ],
)
def test_a_warning_comes_once_with_the_users_place(
    environ: dict[str, str], call: Callable[[], object], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(notices, "__warningregistry__", {}, raising=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            call()
    assert [warning.filename for warning in found] == [__file__] * (words is not None)
    assert words is None or words in str(found[0].message)


def test_pytorch_is_not_the_program() -> None:
    """It calls hooks and backends, whose place in the program is where that called PyTorch."""
    names = {"kv": kv}
    exec(compile("def call():\n    kv.create('dist_asink')", "/v/site-packages/torch/x.py", "exec"), names)
    found = tracebacks.mistake(of(names["call"]))
    assert found is not None
    assert found.place.startswith("tests/unit/runtime/test_tracebacks.py:")
