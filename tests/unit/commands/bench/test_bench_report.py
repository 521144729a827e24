"""What the benchmark prints and writes, and how it reads its options."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from mpikv.__main__ import _parser, main
from mpikv.commands.bench import interfaces, output, pairs, plot
from mpikv.commands.bench.command import _check_job, ledger, ledger_lines
from mpikv.commands.bench.counts import Counts, counts_of
from mpikv.commands.bench.job import Job
from mpikv.commands.bench.limits import Limit, Rates
from mpikv.commands.bench.measure import Result
from mpikv.commands.bench.options import ALGORITHMS, PS_VARIANTS
from mpikv.commands.bench.progress import Recorded, follow
from mpikv.commands.bench.raw import RAW
from mpikv.commands.bench.report import TABLE, Row, rows_of, table_row
from mpikv.commands.bench.start import check_ranks, environment_rank
from mpikv.commands.bench.statistics import Summary
from mpikv.config import Config
from mpikv.errors import ConfigError

RATES = Rates(1e-6, 1e10, 2e10, 2e10)
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


def rows() -> list[Row]:
    results = [
        Result("ordinary", Summary(7, 2e-3, 3e-3, 1e-3, 4e-3), 0),
        Result(RAW, Summary(7, 4e-3, 5e-3, 3e-3, 6e-3), 2),
    ]
    counts = {"ordinary": Counts(2, 1 << 20, 0, 3 << 20, 800, 0)}
    return rows_of(
        results,
        n_bytes=1 << 20,
        arrays=1,
        ranks=4,
        counts=counts,
        rates=RATES,
        limits={RAW: Limit(2e-3, "link")},
        limit=Limit(1e-3, "add"),
    )


def test_rows() -> None:
    ours, raw = rows()
    assert ours.ratio_to_raw == 0.5
    assert raw.ratio_to_raw == 1.0
    assert ours.algbw == (1 << 20) / 2e-3 / 1e9
    assert ours.busbw == ours.algbw * 1.5
    assert (ours.limit_by, ours.limit_percent) == ("add", 50)
    assert (raw.limit_by, raw.limit_percent) == ("link", 50)
    assert (ours.messages, ours.bytes_sent, ours.control_messages, ours.bytes_copied) == (2, 1 << 20, 0, 3 << 20)
    assert raw.messages is None
    assert (ours.wrong, raw.wrong) == (0, 2)


def test_no_raw_no_ratio() -> None:
    result = Result("ordinary", Summary(1, 1.0, 1.0, 1.0, 1.0), 0)
    limit = Limit(0.0, "latency")
    (row,) = rows_of(
        [result], n_bytes=4, arrays=1, ranks=1, counts={}, rates=Rates(0, *[float("inf")] * 3), limits={}, limit=limit
    )
    assert row.ratio_to_raw is None
    assert row.add_bytes_per_s is None  # JSON knows no infinity
    assert table_row(row).split()[6] == "-"


def test_table() -> None:
    ours, raw = (table_row(row) for row in rows())
    wanted = "1M ordinary 2000.0 3000.0 0.524 0.786 0.50 2 0 1M 3M add 50"
    assert ours.split() == wanted.split()
    assert raw.split()[-4:] == ["WRONG", "in", "2", "results"]
    # Columns stand under their titles.
    header = TABLE.head()
    assert len(header) == len(ours)
    titles = [column.title for column in TABLE.columns]
    assert [header.index(title) for title in titles] == sorted(header.index(title) for title in titles)
    assert ours.index("ordinary") == header.index("what")
    assert ours[: header.index(" vs raw") + 7].endswith("0.50")


def test_json(tmp_path) -> None:
    path = tmp_path / "run.json"
    output.write_json(str(path), output.document("mpikv bench", {"machine": {"cores": 2}}, rows(), ["a note"], tcp=[]))
    found = json.loads(path.read_text())
    assert (found["format"], found["command"], found["notes"], found["tcp"]) == (1, "mpikv bench", ["a note"], [])
    assert found["machine"] == {"cores": 2}
    assert [row["what"] for row in found["rows"]] == ["ordinary", RAW]
    assert Row(**found["rows"][0]) == rows()[0]


def test_files_are_checked_before_the_run(tmp_path) -> None:
    output.check_writable("--json", str(tmp_path / "new.json"))
    with pytest.raises(ConfigError, match=r"--json .*no folder"):
        output.check_writable("--json", str(tmp_path / "none" / "new.json"))
    with pytest.raises(ConfigError, match="is a folder"):
        output.check_writable("--plot", str(tmp_path))


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="--plot needs matplotlib: pip install matplotlib"):
        plot.check_matplotlib()


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("--plot", "mpikv-bench-allreduce.png"),
        ("--plot --json x", "mpikv-bench-allreduce.png"),
        ("--plot x.svg", "x.svg"),
    ],
)
def test_where_a_plot_is_written(words: str, file: str) -> None:
    line = f"mpikv bench allreduce -n 2 --vs gloo {words}"
    assert _parser().parse_args(shlex.split(line)[1:]).plot == file


def test_ticks_of_a_plot() -> None:
    assert [plot.size_label(n) for n in (4, 512, 1024, 3 << 19, 1 << 30)] == [
        "4 B", "512 B", "1 KiB", "1.5 MiB", "1 GiB",
    ]  # fmt: skip
    assert [plot.rate_label(rate) for rate in (20, 1, 0.05, 2e-6, 5e-8)] == [
        "20 GB/s", "1 GB/s", "50 MB/s", "2 kB/s", "50 B/s",
    ]  # fmt: skip
    assert plot.size_ticks(1024, 1024) == [1024]
    assert plot.size_ticks(1000, 5000) == [512, 1024, 2048, 4096, 8192]
    for largest in (1 << 20, 256 << 20, 1 << 40):
        ticks = plot.size_ticks(4, largest)
        assert ticks[0] == 4
        assert ticks[-1] >= largest
        assert len(ticks) <= plot.TICKS + 1


def test_plot(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    path = tmp_path / "run.png"
    large = [dataclasses.replace(row, n_bytes=row.n_bytes << 8) for row in rows()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", lambda _figure: None)  # to look at it
        plot.bandwidths(str(path), "a title", rows() + large)
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = pyplot.gcf().axes
    across, up = ([tick.get_text() for tick in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    pyplot.close()
    assert labels[-1] == "limit, estimated (caches may beat it)"
    assert across[0] == "1 MiB"
    assert "256 MiB" in across
    assert any(label.endswith("GB/s") for label in up)


def test_ledger() -> None:
    ours, raw = rows()
    found = ledger([ours, raw])
    assert found == [{"what": "ordinary", "n_bytes": 1 << 20, "held_bytes": 800}]
    assert ledger_lines(found)[1:] == ["#   ordinary: 800 bytes, at 1M"]
    assert len(ledger_lines([])) == 1


def test_counts_from_stats() -> None:
    before = {"messages_sent": 5, "bytes_sent": 50, "control_messages_sent": 2, "bytes_copied": 1, "held_bytes": 3}
    after = {"messages_sent": 7, "bytes_sent": 90, "control_messages_sent": 3, "bytes_copied": 9, "held_bytes": 4}
    assert counts_of(before, after) == Counts(2, 40, 1, 8, 4, None)
    assert counts_of(before, after, hidden=True) == Counts(None, None, 1, 8, 4, None)
    assert counts_of({"messages_sent": 1}, {"messages_sent": 1}) == Counts(0, None, None, None, None, None)


NET_DEV = """Inter-|   Receive                         |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:    1000      10    0    0    0     0          0         0     2000      10    0    0    0     0       0       0
  eth0:30 1 0 0 0 0 0 0 40 1 0 0 0 0 0 0
  eth1:   5       1    0    0    0     0          0         0        6       1    0    0    0     0       0          0
"""


def test_interface_counters() -> None:
    assert interfaces.parse(NET_DEV, loopback=False) == (35, 46)
    assert interfaces.parse(NET_DEV, loopback=True) == (1000, 2000)
    assert interfaces.Traffic(35, 46).since(interfaces.Traffic(30, 40)) == (5, 6)
    with pytest.raises(ValueError, match="no line of an interface's counters"):
        interfaces.parse("a\nb\nlo: 1 2\n", loopback=True)
    assert min(interfaces.now(loopback=True)) >= 0


def test_pairs() -> None:
    assert pairs.classes(("a", "a", "b")) == {"same host": (0, 1), "other host": (0, 2)}
    assert pairs.classes(("a", "b", "b")) == {"same host": (1, 2), "other host": (0, 1)}
    assert pairs.classes(("a", "b")) == {"other host": (0, 1)}
    assert pairs.classes(("a",)) == {}


# --- options


def parsed(*words: str) -> argparse.Namespace:
    return _parser().parse_args(["bench", *words])


def test_defaults() -> None:
    found = parsed("allreduce")
    assert (found.min_bytes, found.max_bytes, found.factor) == (4, 256 << 20, 4)
    assert (found.iterations, found.check, found.n, found.algorithms, found.vs) == (None, True, None, (), ())


def test_lists() -> None:
    assert parsed("allreduce", "--algorithms", "all").algorithms == ALGORITHMS
    assert parsed("allreduce", "--algorithms", "ring,naive,ring").algorithms == ("ring", "naive")
    assert parsed("allreduce", "--vs", "gloo").vs == ("gloo",)
    assert parsed("ps").variants == PS_VARIANTS


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
    ],
)
def test_wrong_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(*words)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["allreduce", "-b", "1M", "-e", "4"], "the smallest size, 1M, is larger than the largest, 4"),
        (["pushpull", "--dtype", "int32"], "--dtype int32: an optimizer needs one of float32"),
        (["allreduce", "--json", "/no/such/folder/run.json"], "--json /no/such/folder/run.json: there is no folder"),
    ],
)
def test_options_that_do_not_fit(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before MPI is initialised or started."""
    assert main(["bench", *words]) == 2
    assert text in capsys.readouterr().err


def test_options_that_do_not_fit_the_ranks() -> None:
    one = Job(None, 0, 1, ("a",), Config())  # type: ignore[arg-type] # no communicator is needed
    with pytest.raises(ConfigError, match="link needs at least 2 ranks"):
        _check_job(parsed("link"), one)
    with pytest.raises(ConfigError, match="--servers 1 of 1 ranks leave no worker; start 2 or more"):
        _check_job(parsed("ps"), one)


@pytest.mark.parametrize("package", ["torch", "matplotlib"])
def test_packages_that_are_missing(
    package: str, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    words = {"torch": ["--vs", "gloo"], "matplotlib": ["--plot", str(tmp_path / "x.png")]}[package]
    assert main(["bench", "allreduce", *words]) == 2
    assert f"pip install {package}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["allreduce", "pushpull", "model", "ps", "link"])
def test_help_has_examples(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(kind, "--help")
    assert caught.value.code == 0
    assert "mpirun -n 4 mpikv bench allreduce" in capsys.readouterr().out


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


# --- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rank_0_records_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record"
    record.touch()
    with Recorded(str(record), 2) as progress:
        progress.update(what="256M")
        assert json.loads(record.read_text()) == [0, 2, "256M"]
        progress.update(1)
        progress.update(what="4")
        progress.say("a row")
    assert json.loads(record.read_text()) == [1, 2, "4"]
    assert tuple(capsys.readouterr()) == ("a row\n", "")
    with Recorded(str(tmp_path / "elsewhere"), 2) as progress:  # rank 0 is on another host
        progress.update(1)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 15)", 143)])
def test_the_process_that_started_mpirun_draws_the_bar(
    end: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its ranks print is handed on as it is, whatever it looks like."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    script = (
        "import os, sys\n"
        "from mpikv.commands.bench.progress import FILE_OPTION, Recorded\n"
        "assert sys.argv[-2] == FILE_OPTION\n"
        "progress = Recorded(sys.argv[-1], 4)\n"
        "progress.update(1, '16K')\n"
        "progress.say('# size 2 of 4: 16K', 'row')\n"
        f"{end}"
    )
    assert follow([sys.executable, "-c", script], os.environ) == status
    assert capsys.readouterr().out == "# size 2 of 4: 16K\nrow\n"
    assert "1/4" in terminal.getvalue()
    assert "16K" in terminal.getvalue()
