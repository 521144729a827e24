"""`mpikv bench wire`: its rows, which results must be exact, and bad options. Real jobs: tests/mpirun."""

from __future__ import annotations

import pytest

from mpikv.__main__ import main
from mpikv.codecs import registry
from mpikv.commands.bench.counts import Counts
from mpikv.commands.bench.measure import Result
from mpikv.commands.bench.statistics import summarise
from mpikv.commands.bench.wire import TABLE, codecs_of, line, rows_of, unchecked


def result(what: str, time_s: float, wrong: int = 0) -> Result:
    return Result(what, summarise([time_s] * 5), wrong)


def test_rows_are_relative_to_the_uncompressed_store() -> None:
    results = [result("uncompressed", 0.2), result("codec 2bit", 0.05, wrong=2), result("Gloo", 0.3)]
    counts = [Counts(30, 46_758_048), Counts(4, 2_922_378), Counts()]
    plain, compressed, gloo = rows_of(results, counts, 46_758_048, frozenset({"codec 2bit"}))
    assert (plain.of_plain, plain.ratio, plain.checked) == (1.0, 1.0, True)
    assert (compressed.of_plain, compressed.ratio, compressed.checked) == (2_922_378 / 46_758_048, 0.25, False)
    assert (gloo.bytes_sent, gloo.of_plain, gloo.messages) == (None, None, None)
    assert line(plain).split() == ["uncompressed", "46758048", "100.0", "30", "200.00", "200.00", "1.00"]
    assert line(gloo).split() == ["Gloo", "-", "-", "-", "300.00", "300.00", "1.50"]
    assert line(compressed).endswith("0.25  WRONG 2x")
    assert max(map(len, (TABLE.head(), line(plain), line(compressed)))) <= 100


def test_nothing_sent_is_no_share() -> None:
    """Ranks of one host."""
    (row,) = rows_of([result("uncompressed", 0.1)], [Counts(0, 0)], 4, frozenset())
    assert (row.bytes_sent, row.of_plain) == (0, None)


def test_what_is_measured_and_what_must_be_exact() -> None:
    assert codecs_of(("topk", "none")) == ("topk", "none")
    assert set(codecs_of(())) == set(registry.names()) - {"none"}
    lossy = {"codec 1bit", "codec 2bit", "codec int8", "codec powersgd", "codec randomk", "codec topk"}
    assert lossy <= unchecked(2)
    assert not {"codec fp16", "codec bf16", "codec none"} & unchecked(2)
    assert "codec bf16" in unchecked(64)  # 64 ranks' values add up to more than bfloat16 counts exactly
    assert "codec fp16" not in unchecked(64)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--codecs", "2bit,3bit"], "--codecs 3bit: there are 1bit, 2bit"),
        (["--dtype", "float16"], "--dtype float16: wire compares float32 with what takes less"),
        (["--plot", "x.png"], "--plot draws bandwidths over sizes"),
    ],
)
def test_bad_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "wire", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "1.5", "nan", "few"])
def test_a_share_is_above_0_and_at_most_1(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "wire", "--density", text])
    assert "--density" in capsys.readouterr().err
