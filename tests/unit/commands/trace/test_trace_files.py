"""`mpikv trace`: which files it reads, what it writes, and what it says of folders that are wrong."""

from __future__ import annotations

import gzip
import json

import pytest
from traced import header, records, write

from mpikv.__main__ import main
from mpikv.commands.trace.files import UnreadableError, read_run

PUSH = ("push", 0, 1, "w", 1, 8)


def test_of_several_runs_the_newest_is_read_with_all_stores_of_its_processes(tmp_path):
    write(tmp_path, "a.jsonl", header("worker", 0, 2, store="old", pid=1), records(PUSH))
    write(tmp_path, "b.jsonl", header("worker", 1, 2, store="new", pid=3, date_s=9.0), records(PUSH))
    write(tmp_path, "c.jsonl", header("worker", 0, 2, store="new", pid=2, date_s=8.0), records(PUSH, PUSH))
    write(tmp_path, "d.jsonl", header("server", 0, 2, store="new", pid=4, date_s=8.0), records(PUSH))
    write(tmp_path, "e.jsonl", header("worker", 0, 1, store="first", pid=2, date_s=2.0), records(PUSH))
    found = read_run(tmp_path)
    assert [(*rank.role, rank.header["store"], len(rank.events)) for rank in found] == [
        ("worker", 0, "first", 1),
        ("worker", 0, "new", 2),
        ("worker", 1, "new", 1),
        ("server", 0, "new", 1),
    ]


def test_lines_that_are_damaged_are_left_out_and_counted(tmp_path, capsys):
    cut = json.dumps(records(PUSH))[:-9]
    wrong = [records(one) for one in (("push", 0, 1, ["w"]), ("push", 0, 1, "w", "x"), ("clock", 0, 1, "w"))]
    write(tmp_path, "a.jsonl", header("worker", 0, 1), records(PUSH, lost=3), '{"thread": 1}', "[]", *wrong, cut)
    (rank,) = read_run(tmp_path)
    assert (len(rank.events), rank.lost, rank.damaged) == (1, 3, 6)
    assert main(["trace", "report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "6 lines could not be read" in out
    assert "clocks: " not in out  # of one host


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (None, "no such folder"),
        ([], r"no timeline \(\*.jsonl\); MPIKV_TIMELINE="),
        ([["x"]], "none of 1 files is a timeline of format 1"),
        ([[header("worker", 0, 1, format=2)]], "none of 1 files is a timeline of format 1"),
        ([[{"format": 1}]], "none of 1 files is a timeline of format 1"),
        ([[header("worker", 0, 1, date_s="now")]], "none of 1 files is a timeline of format 1"),
        ([[json.dumps(records(PUSH))]], "none of 1 files is a timeline of format 1"),
    ],
)
def test_a_folder_without_timelines_is_told(lines, text, tmp_path, capsys):
    directory = tmp_path / "traces"
    if lines is not None:
        directory.mkdir()
        for i, some in enumerate(lines):
            write(directory, f"{i}.jsonl", *some)
    with pytest.raises(UnreadableError, match=text):
        read_run(directory)
    assert main(["trace", str(directory)]) == 2
    assert "mpikv trace: " in capsys.readouterr().err


def test_a_file_is_written_plain_or_compressed_by_its_name(tmp_path, capsys):
    write(tmp_path / "t", "a.jsonl", header("worker", 0, 1), records(PUSH, ("call", 0, 2, "push")))
    plain, packed = tmp_path / "x.json", tmp_path / "x.json.gz"
    for path in (plain, packed):
        assert main(["trace", str(tmp_path / "t"), "-o", str(path)]) == 0
        assert f"{path}: 5 events" in capsys.readouterr().out
    assert json.loads(plain.read_text()) == json.loads(gzip.decompress(packed.read_bytes()))
    assert main(["trace", str(tmp_path / "t"), "-o", str(tmp_path / "no" / "x.json")]) == 2
    assert "no/x.json: No such file" in capsys.readouterr().err


def test_any_name_is_one_word_of_a_line(tmp_path, capsys):
    """Of a key or a span: also one that no terminal can show, or that would begin a line of its own."""
    names = "a\ud800b", "two\nlines", "\x1b[2J"
    some = [one for name in names for one in (("push", 0, 1, name, 1, 8), ("span", 0, 2, name))]
    write(tmp_path, "a.jsonl", header("worker", 0, 1), records(*some))
    assert main(["trace", "report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in names:
        assert any(line.startswith(f"{repr(name)[1:-1]} ") for line in lines), lines
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "x.json")]) == 0
    json.loads((tmp_path / "x.json").read_text())


def test_other_words_are_refused(tmp_path):
    for words in (["draw", "x"], ["report", "x", "y"]):
        with pytest.raises(SystemExit):
            main(["trace", *words])


def test_clocks_that_nobody_compared_and_results_that_come_too_early_are_told(tmp_path, capsys):
    early = [("push", 0, 1, "w", 1, 8), ("allgather", 1, 2, "w", 1, 8)]
    late = [("push", 5, 6, "w", 1, 8), ("allgather", 6, 7, "w", 1, 8)]
    write(tmp_path, "a.jsonl", header("worker", 0, 2), records(*early))
    write(tmp_path, "b.jsonl", header("worker", 1, 2, machine="b"), records(*late))
    assert main(["trace", "report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "clocks: 1 hosts have not been compared with the first" in out
    assert "clocks: 1 of 2 results seem to come before what they were made of, by up to 3000 us" in out
