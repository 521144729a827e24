"""What the benchmark prints and writes, and how it reads its options. Real jobs: tests/mpirun."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from mpikv.__main__ import _parser, main
from mpikv.commands.bench import plot
from mpikv.commands.bench.job import BenchJob
from mpikv.commands.bench.limits import Limit, Rates
from mpikv.commands.bench.link import pairs
from mpikv.commands.bench.measure import Measured
from mpikv.commands.bench.options import ALGORITHMS, KINDS
from mpikv.commands.bench.report import RAW, SUMS, ledger, ledger_lines, sums
from mpikv.commands.bench.start import check_ranks, environment_rank
from mpikv.config import Config
from mpikv.errors import ConfigError

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
COUNTS = {"messages": 2, "bytes_sent": 1 << 20, "control_messages": 0, "bytes_copied": 3 << 20, "held_bytes": 800}


def rows(n_bytes: int = 1 << 20, *whats: str) -> list[dict[str, object]]:
    results = [Measured("ordinary", 7, 2e-3, 3e-3, 1e-3, 4e-3, 0), Measured(RAW, 7, 4e-3, 5e-3, 3e-3, 6e-3, 2)]
    limits = {"ordinary": Limit(1e-3, "add"), RAW: Limit(2e-3, "link")}
    return sums(
        [result for result in results if result.what in (whats or limits)],
        {"ordinary": COUNTS},
        Rates(1e-6, 1e10, 2e10, 2e10),
        limits.__getitem__,
        n_bytes=n_bytes,
        arrays=1,
        ranks=4,
    )


def test_rows() -> None:
    ours, raw = rows()
    algbw = (1 << 20) / 2e-3 / 1e9
    expected = {
        "ratio_to_raw": 0.5,
        "algbw": algbw,
        "busbw": algbw * 1.5,
        "limit_by": "add",
        "limit_percent": 50,
        "wrong": 0,
        "shared_bytes": None,
        **COUNTS,
    }
    assert {name: ours[name] for name in expected} == expected
    assert (raw["ratio_to_raw"], raw["limit_by"], raw["messages"], raw["wrong"]) == (1.0, "link", None, 2)


def test_table() -> None:
    ours, raw = map(SUMS.line, rows())
    wanted = "1M ordinary 2000.0 3000.0 0.524 0.786 0.50 2 0 1M 3M add 50"
    assert ours.split() == wanted.split()
    assert raw.split()[-4:] == ["WRONG", "in", "2", "results"]
    # Columns stand under their titles.
    header = SUMS.head()
    assert len(header) == len(ours)
    assert ours.index("ordinary") == header.index("what")
    assert ours[: header.index(" vs raw") + 7].endswith("0.50")
    (alone,) = rows(4, "ordinary")
    assert alone["ratio_to_raw"] is None
    assert SUMS.line(alone).split()[6] == "-"


def test_ledger() -> None:
    found = ledger([*rows(), *rows(4)])
    assert found == [{"what": "ordinary", "n_bytes": 1 << 20, "held_bytes": 800}]
    assert ledger_lines(found)[1:] == ["#   ordinary: 800 bytes, at 1M"]
    assert ledger_lines([]) == []


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    figure = plot.bandwidths(str(path), "a title", rows() + rows(256 << 20))
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    across, up = ([tick.get_text() for tick in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis))
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["ordinary", RAW, "limit, estimated (caches may beat it)"]
    assert {"1 MiB", "256 MiB"} <= set(across)
    assert {"1 GB/s", "500 MB/s"} <= set(up)


@pytest.mark.parametrize(("smallest", "largest"), [(1024, 1024), (1000, 5000), (4, 1 << 20), (4, 1 << 40)])
def test_ticks_of_a_plot_span_the_sizes(smallest: int, largest: int) -> None:
    ticks = plot.size_ticks(smallest, largest)
    assert ticks[0] <= smallest
    assert ticks[-1] >= largest
    assert len(ticks) <= plot.TICKS + 1


# --- options


def parsed(*words: str) -> argparse.Namespace:
    return _parser().parse_args(["bench", *words])


def test_defaults() -> None:
    found = parsed("allreduce")
    assert (found.min_bytes, found.max_bytes, found.factor, found.seconds) == (4, 256 << 20, 4, 0.5)
    assert (found.iterations, found.n, found.algorithms, found.vs, found.plot) == (None, None, (), (), None)
    assert (parsed("train").seconds, parsed("train").bucket_bytes) == (60, None)
    assert parsed("link").dtype == "float32"
    assert parsed("ps", "--plot", "--json", "x").plot == "mpikv-bench-ps.png"
    assert parsed("ps", "--plot", "x.svg").plot == "x.svg"


def test_lists() -> None:
    assert parsed("allreduce", "--algorithms", "all").algorithms == ALGORITHMS
    assert parsed("allreduce", "--algorithms", "ring,naive,ring").algorithms == ("ring", "naive")
    assert parsed("train", "--batch", "4,32").batch == (4, 32)
    assert parsed("model", "--device-paths", "staged,host").device_paths == ("staged", "host")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["allreduce", "-b", "x"], "'x' is no size in bytes"),
        (["allreduce", "-f", "1"], "1 is less than 2"),
        (["allreduce", "-n", "none"], "'none' is not a whole number"),
        (["allreduce", "--iterations", "0"], "0 is less than 1"),
        (["allreduce", "--seconds", "-1"], "'-1' is not a number of seconds"),
        (["allreduce", "--algorithms", "fast"], "'fast' is none of naive, "),
        (["allreduce", "--algorithms", ","], "nothing is none of"),
        (["allreduce", "--dtype", "complex64"], "invalid choice"),
        (["model", "--model", "alexnet"], "invalid choice"),
        (["ps", "--servers", "0"], "0 is less than 1"),
        (["everything"], "invalid choice"),
        ([], "required"),
        (["allreduce", "-b", "1M", "-e", "4"], "the smallest size, 1M, is larger than the largest, 4"),
        (
            ["allreduce", "--json", "/no/such/folder/run.json"],
            "/no/such/folder/run.json: No such file or",
        ),
        (["allreduce", "--plot", "/"], "--plot /: is a folder"),
        (["pushpull", "--dtype", "int32"], "--dtype int32: an optimizer needs one of float32"),
        (["pushpull", "--keys", "5", "--plot", "x.png"], "--plot draws bandwidth over size"),
        (["codec", "--codecs", "2bit"], "'codec' is gone: docs/compression.md has the sizes"),
        (["wire"], "'wire' is gone: use link or allreduce"),
        (["train", "--model", "lenet", "--image-size", "32"], "lenet takes images of 28 x 28"),
        (
            ["allreduce", "--device-paths", "ipc"],
            "--device-paths compares paths of arrays on a GPU: give --device, too",
        ),
        (["allreduce", "--device", "--algorithms", "ring"], "--algorithms is of arrays in host memory"),
        (["model", "--device", "--vs", "gloo"], "--vs is of arrays in host memory"),
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


@pytest.mark.parametrize("kind", KINDS)
def test_help_has_examples(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(kind, "--help")
    assert caught.value.code == 0
    assert "mpirun -n 4 mpikv bench allreduce" in capsys.readouterr().out


# --- links


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


# --- starting


def test_ranks() -> None:
    assert not check_ranks(None, {})
    assert check_ranks(3, {})
    assert not check_ranks(None, OPEN_MPI)
    assert not check_ranks(2, OPEN_MPI)
    with pytest.raises(ConfigError, match="-n 3, but 2 ranks were started"):
        check_ranks(3, OPEN_MPI)
    assert environment_rank(OPEN_MPI) == 1
    assert environment_rank({"SLURM_PROCID": "3"}) == 0  # no launcher
