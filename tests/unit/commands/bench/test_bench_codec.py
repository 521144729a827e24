"""`mpikv bench codec`: its rows, its check, and bad options."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mpikv.__main__ import main
from mpikv.codecs import Codec, ErrorFeedback, Int8, TwoBit, names, registry
from mpikv.commands.bench.codec import CodecRow, is_right, line, variants


class AddsTwice(Int8):
    def add(self, data: np.ndarray, out: np.ndarray) -> None:
        super().add(data, out)
        super().add(data, out)


def test_rows() -> None:
    row = CodecRow("2bit", "TwoBit()", 1 << 18, 1 << 20, 1 << 16, 5, 1e-3, 0.5e-3, 0.25e-3, 0.1e-3, 0.2e-3, 0)
    assert line(row).split() == ["1M", "2bit", "0.250", "16.0", "1.05", "2.10", "4.19", "10.49", "5.24"]
    assert line(dataclasses.replace(row, wrong=1)).endswith("WRONG: a length, or the bits of a sum")


def test_what_is_measured() -> None:
    assert list(variants("2bit")) == [("2bit", TwoBit())]
    assert list(variants("int8")) == [("int8", ErrorFeedback(Int8())), ("int8 alone", Int8())]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["none", "fp16", "bf16", "2bit", "1bit", "int8", "topk", "randomk", "powersgd"])
def test_ours_are_right(name: str, dtype: str) -> None:
    assert name in names()
    assert is_right(registry.create(name), np.dtype(dtype))


def test_a_wrong_one_is_found() -> None:
    wrong: Codec = AddsTwice()
    assert not is_right(wrong, np.dtype(np.float32))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--codecs", "2bit,3bit"], "--codecs 3bit: there are 1bit, 2bit"),
        (["--dtype", "int32"], "--dtype int32: a codec encodes one of float32"),
        (["--plot", str(Path("x.png"))], "--plot draws bandwidths over sizes"),
    ],
)
def test_bad_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", *words]) == 2
    assert text in capsys.readouterr().err
