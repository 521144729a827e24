"""What the benchmark prints and writes, and how it reads its options. Real jobs: tests/mpirun."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from mpikv.__main__ import _parser, main
from mpikv.commands.bench import plot
from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.link import pairs
from mpikv.commands.bench.measure import MAX_ITERATIONS, MIN_ITERATIONS, Measured, iterations_for, summary
from mpikv.commands.bench.options import ALGORITHMS, GONE_OPTIONS, KINDS, OPTIONS
from mpikv.commands.bench.report import RAW, SUMS, sums
from mpikv.commands.bench.start import check_ranks, environment_rank
from mpikv.config import Config
from mpikv.errors import ConfigError

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
COUNTS = {"messages": 2, "bytes_sent": 1 << 20, "control_messages": 0, "bytes_copied": 3 << 20, "held_bytes": 800}
RESULTS = [Measured("ordinary", 7, 2e-3, 3e-3, 1e-3, 4e-3, 0), Measured(RAW, 7, 4e-3, 5e-3, 3e-3, 6e-3, 2)]


def rows(n_bytes: int = 1 << 20, results: list[Measured] = RESULTS) -> list[dict[str, object]]:
    return sums(results, {"ordinary": COUNTS}, n_bytes=n_bytes, arrays=1, ranks=4)


def test_summary() -> None:
    found = summary([5.0, 1.0, 2.0, 4.0, 3.0])
    p95_s = pytest.approx(4.8)  # four fifths of the way from the fourth to the fifth
    assert found == {"iterations": 5, "median_s": 3.0, "p95_s": p95_s, "min_s": 1.0, "max_s": 5.0}
    assert [iterations_for(0.5, one) for one in (0.01, 10.0, 0.0)] == [50, MIN_ITERATIONS, MAX_ITERATIONS]


def test_rows_and_their_table() -> None:
    ours, raw = rows()
    algbw = (1 << 20) / 2e-3 / 1e9
    expected = {"ratio_to_raw": 0.5, "algbw": algbw, "busbw": algbw * 1.5, "wrong": 0, "shared_bytes": None, **COUNTS}
    assert {name: ours[name] for name in expected} == expected
    assert (raw["ratio_to_raw"], raw["messages"], raw["wrong"]) == (1.0, None, 2)
    line, header = SUMS.of(ours), SUMS.head()
    assert line.split() == ["1M", "ordinary", "2000.0", "3000.0", "0.524", "0.786", "0.50", "2", "0", "1M", "3M", "800"]
    # Columns stand under their titles.
    assert len(header) == len(line)
    assert line.index("ordinary") == header.index("what")
    assert line[: header.index(" vs raw") + 7].endswith("0.50")
    (alone,) = rows(4, RESULTS[:1])
    assert alone["ratio_to_raw"] is None
    assert SUMS.of(alone).split()[6] == "-"


@pytest.mark.thorough
def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    figure = plot.bandwidths(str(path), "a title", rows() + rows(256 << 20))
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    across, up = ([tick.get_text() for tick in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ordinary", RAW]
    assert {"1M", "256M"} <= set(across)
    assert "1 GB/s" in {text.replace("$\\mathdefault{", "").replace("}$", "") for text in up}


# --- options


def parsed(*words: str) -> argparse.Namespace:
    return _parser().parse_args(["bench", *words])


def test_what_is_parsed() -> None:
    found = parsed("allreduce")
    assert (found.min_bytes, found.max_bytes, found.seconds) == (4, 256 << 20, 0.5)
    assert (found.iterations, found.n, found.algorithms, found.vs, found.plot) == (None, None, (), (), None)
    assert (parsed("train").seconds, parsed("ps").max_bytes, parsed("link").dtype) == (60, 64 << 20, "float32")
    assert parsed("ps", "--plot", "x.svg").plot == "x.svg"
    assert parsed("allreduce", "--algorithms", "all").algorithms == ALGORITHMS
    assert parsed("allreduce", "--algorithms", "ring,owners,ring").algorithms == ("ring", "owners")
    assert parsed("train", "--batch", "4,32").batch == (4, 32)
    assert [parsed("pushpull", "--keys", one).keys for one in ("5", "7x4K")] == [(5, 1024), (7, 4096)]
    assert {flags for kind in KINDS.values() for flags in kind.options} | {"-n", "--json"} == set(OPTIONS)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["allreduce", "-b", "x"], "'x' is no size in bytes"),
        (["allreduce", "-n", "none"], "'none' is not a whole number"),
        (["allreduce", "--iterations", "0"], "0 is less than 1"),
        (["allreduce", "--seconds", "-1"], "'-1' is not a number of seconds"),
        (["allreduce", "--algorithms", "fast"], "'fast' is none of ring, owners"),
        (["allreduce", "--algorithms", ","], "nothing is none of"),
        (["allreduce", "--dtype", "complex64"], "invalid choice"),
        (["pushpull", "--keys", "0x4K"], "0 is less than 1"),
        (["model", "--model", "alexnet"], "invalid choice"),
        (["ps", "--servers", "0"], "0 is less than 1"),
        (["everything"], "invalid choice"),
        ([], "required"),
        (["allreduce", "-b", "1M", "-e", "4"], "the smallest size, 1M, is larger than the largest, 4"),
        (["allreduce", "--json", "/no/such/folder/run.json"], "/no/such/folder/run.json: No such file or"),
        (["allreduce", "--plot", "/"], "--plot /: is a folder"),
        (["pushpull", "--dtype", "int32"], "--dtype int32: an optimizer needs one of float32"),
        (["pushpull", "--keys", "5", "--plot", "x.png"], "--plot draws bandwidth over size"),
        (["codec", "--codecs", "2bit"], "'codec' is gone: docs/compression.md has the sizes"),
        (["wire"], "'wire' is gone: use link or allreduce"),
        *((["allreduce", one], f"{one} is gone: {instead}") for one, instead in GONE_OPTIONS.items()),
        (["train", "--device=1"], "--device is gone: where every worker has a GPU"),
        (["train", "--model", "lenet", "--image-size", "32"], "lenet takes images of 28 x 28"),
    ],
)
def test_bad_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before MPI is initialised or started."""
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(["bench", *words]))
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("package", ["torch", "matplotlib"])
def test_packages_that_are_missing(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    words = {"torch": ["--vs", "gloo"], "matplotlib": ["--plot", str(tmp_path / "x.png")]}[package]
    assert main(["bench", "allreduce", *words]) == 2
    assert f"pip install {package}" in capsys.readouterr().err


# --- ranks


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", []),
        ("aa", [(0, 1)]),
        ("ab", [(0, 1), (1, 0)]),
        ("aab", [(0, 1), (0, 2), (2, 0)]),
        ("abb", [(1, 2), (0, 1), (1, 0)]),
        ("abc", [(0, 1), (1, 2), (2, 0)]),
    ],
)
def test_which_ranks_are_measured(hosts: str, expected: list[tuple[int, int]]) -> None:
    job = BenchJob(None, 0, len(hosts), tuple(hosts), Config())  # type: ignore[arg-type] # no communicator is needed
    assert pairs(job) == expected


def test_ranks() -> None:
    assert not check_ranks(None, {})
    assert check_ranks(3, {})
    assert not check_ranks(None, OPEN_MPI)
    assert not check_ranks(2, OPEN_MPI)
    with pytest.raises(ConfigError, match="-n 3, but 2 ranks were started"):
        check_ranks(3, OPEN_MPI)
    assert environment_rank(OPEN_MPI) == 1
    assert environment_rank({"SLURM_PROCID": "3"}) == 0  # no launcher
