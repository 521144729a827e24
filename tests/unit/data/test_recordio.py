"""RecordIO: files that MXNet wrote, its parts, files that we write, and every kind of damage with its offset."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpikv.data import RecordFile, RecordWriter
from mpikv.data.recordio import MAGIC, DamagedRecord, FileBytes, encoded, next_head

FILES = Path(__file__).parents[2] / "fixtures" / "records"
EXPECTED = json.loads((FILES / "expected.json").read_text())
PLAIN = [bytes.fromhex(text) for text in EXPECTED["plain"]]


def word(number: int) -> bytes:
    return struct.pack("<I", number)


def head(flag: int, length: int) -> bytes:
    return MAGIC + struct.pack("<I", flag << 29 | length)


def write_records(path: Any, records: list[bytes], **options: Any) -> None:
    with RecordWriter(path, **options) as writer:
        for record in records:
            writer.write(record)


# ---- MXNet's files


@pytest.mark.parametrize("ahead", [1, 9, 100, 1 << 20])
@pytest.mark.parametrize(("name", "index"), [("plain.rec", None), ("magic.rec", None), ("magic.rec", True)])
def test_records_of_mxnet(name: str, index: Any, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of bytes read ahead, in blocks of any size."""
    monkeypatch.setattr("mpikv.data.record_file.AHEAD_BYTES", ahead)
    monkeypatch.setattr("mpikv.data.recordio._FIRST_BLOCK", 4 * ahead)
    with RecordFile(FILES / name, index=index) as records:
        assert list(records) == PLAIN
        assert len(records) == len(PLAIN)
        assert [records[i] for i in range(len(records))] == PLAIN
        assert records[-1] == PLAIN[-1]
        if index:
            assert records.keys().tolist() == [10 * i for i in range(len(PLAIN))]


def test_we_write_what_mxnet_writes(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "magic.rec") as writer:
        for i, record in enumerate(PLAIN):
            writer.write(record, key=10 * i)
    for name in ("magic.rec", "magic.idx"):
        assert (tmp_path / name).read_bytes() == (FILES / name).read_bytes()


@pytest.mark.parametrize("num_parts", [int(n) for n in EXPECTED["parts"]["bytes"]])
def test_parts_are_those_of_image_record_iter(num_parts: int) -> None:
    """By bytes. The records of this file are numbered in their labels."""
    found = []
    for part in range(num_parts):
        with RecordFile(FILES / "parts.rec", num_parts=num_parts, part_index=part) as records:
            found.append([int(struct.unpack_from("<f", record, 4)[0]) for record in records])
            assert len(records) == len(found[-1])
    assert found == EXPECTED["parts"]["bytes"][str(num_parts)]


@pytest.mark.parametrize("num_parts", [int(n) for n in EXPECTED["parts"]["index"]])
def test_parts_by_index(num_parts: int) -> None:
    """MXNet gives ceil(n / P) to each part as long as there are any; ours differ by one at most."""
    found = []
    for part in range(num_parts):
        with RecordFile(FILES / "parts.rec", index=True, num_parts=num_parts, part_index=part) as records:
            found.append(records.keys().tolist())
    assert found == [part.tolist() for part in np.array_split(np.arange(30), num_parts)]
    theirs = EXPECTED["parts"]["index"][str(num_parts)]
    assert [i for part in found for i in part] == [i for part in theirs for i in part]
    if 30 % num_parts == 0:
        assert found == theirs


# ---- reading and writing


def test_index_of_any_order_is_sorted_by_offset(tmp_path: Path) -> None:
    write_records(tmp_path / "a.rec", [b"a", b"b", b"c"])
    (tmp_path / "other").write_text("7\t24\n9\t0\n\n8\t12\n")
    records = RecordFile(tmp_path / "a.rec", index=tmp_path / "other")
    assert list(records) == [b"a", b"b", b"c"]
    assert records.keys().tolist() == [9, 8, 7]
    assert [records.offset(i) for i in range(3)] == [0, 12, 24]


def test_an_index_that_points_into_a_record_is_skipped_there(tmp_path: Path) -> None:
    write_records(tmp_path / "a.rec", [b"abcdefgh", b"b"])
    (tmp_path / "a.idx").write_text("0\t0\n1\t8\n")
    with pytest.raises(DamagedRecord, match=r"at offset 8: no RecordIO head.*index is of another file"):
        list(RecordFile(tmp_path / "a.rec", index=True))
    skipping = RecordFile(tmp_path / "a.rec", index=True, damaged="skip")
    assert list(skipping) == [b"abcdefgh"]
    assert len(skipping) == 1
    assert skipping.keys().tolist() == [0]
    assert skipping.skipped == 1


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("a.rec", {"num_parts": 2, "part_index": 2}, ValueError, r"part_index must be in 0\.\.1, as .* is 2; got 2"),
        ("a.rec", {"num_parts": 0}, ValueError, "num_parts must be at least 1"),
        ("a.rec", {"damaged": "ignore"}, ValueError, "damaged must be one of 'error', 'skip'"),
        ("a.rec", {"index": "a.none"}, FileNotFoundError, r"a\.none"),
        ("b.rec", {}, FileNotFoundError, r"b\.rec"),
        (".", {}, IsADirectoryError, "a folder"),
    ],
)
def test_bad_arguments(tmp_path: Path, name: str, options: Any, error: type[Exception], words: str) -> None:
    write_records(tmp_path / "a.rec", [b"a"])
    with pytest.raises(error, match=words):
        RecordFile(tmp_path / name, **options)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a\t0", r"line 2: .*expected a key and an offset, two whole numbers"),
        ("5", "expected a key and an offset"),
        ("5\t99999999999999999999999", "two whole numbers"),
        ("5\t6", "key 5 has offset 6; expected a multiple of 4"),
        ("5\t-4", "key 5 has offset -4"),
        ("5\t20", "key 5 has offset 20; .* in a file of 24 bytes"),
        ("0\t12", "key 0 comes twice"),
        ("5\t0", "offset 0 comes twice"),
        (None, "an empty index, of a file of 24 bytes"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, line: str | None, words: str) -> None:
    write_records(tmp_path / "a.rec", [b"a", b"bb"])
    (tmp_path / "a.idx").write_text("" if line is None else f"0\t0\n{line}\n")
    with pytest.raises(ValueError, match=rf"/a\.idx.*{words}"):
        RecordFile(tmp_path / "a.rec", index=True)


def test_bad_calls(tmp_path: Path) -> None:
    write_records(tmp_path / "a.rec", [b"a"])
    records = RecordFile(tmp_path / "a.rec")
    with pytest.raises(ValueError, match="without an index file"):
        records.keys()
    with pytest.raises(TypeError, match="the number of a record is a whole number"):
        records["0"]  # type: ignore[index]
    with pytest.raises(IndexError, match="record 1 of 1 in part 0 of 1"):
        records[1]
    records.close()
    for read in (lambda: list(records), lambda: records[0]):
        with pytest.raises(ValueError, match=r"a\.rec was closed"):
            read()


def test_writer_leaves_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    write_records(path, [b"old"])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"a.rec", "a.idx"}

    def fail() -> None:
        with RecordWriter(path) as writer:
            writer.write(b"new")
            open(tmp_path / "nowhere")  # noqa: SIM115

    with pytest.raises(FileNotFoundError, match="nowhere"):
        fail()
    forgotten = RecordWriter(path)
    forgotten.write(b"new")
    del forgotten
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    write_records(path, [b"new"], index=False)
    assert list(RecordFile(path)) == [b"new"]


def test_writer_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RecordWriter(tmp_path / "a.rec")
    assert [writer.write(memoryview(b"a"), key=5), writer.write(b"b", key=3), len(writer)] == [0, 12, 2]
    for key in (5, 3):
        with pytest.raises(ValueError, match=f"key {key} was given to another record"):
            writer.write(b"", key=key)
    with pytest.raises(TypeError, match="record is bytes, not str"):
        writer.write("text")
    with pytest.raises(TypeError, match="record is bytes, not int"):
        writer.write(3)
    monkeypatch.setattr("mpikv.data.recordio.LONGEST", 7)
    with pytest.raises(ValueError, match="a record of 8 bytes; RecordIO takes up to 7"):
        writer.write(bytes(8))
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="was closed"):
        writer.write(b"")
    assert (tmp_path / "a.idx").read_text() == "5\t0\n3\t12\n"
    with pytest.raises(ValueError, match="the index file would be"):
        RecordWriter(tmp_path / "a.idx")


# ---- damage

GOOD = [b"first", b"second" * 3, b"third..." + MAGIC + b"four" + MAGIC + b"end", b"last"]
TEXT = b"".join(map(encoded, GOOD))
OFFSETS = [0, 16, 44, 84]
ENDS = [16, 44, 84, 96]


@pytest.mark.parametrize(
    ("change", "offset", "words", "left"),
    [
        ({0: b"PNG!"}, 0, "no RecordIO head: 50 4e 47 21 instead of 0a 23 d7 ce", [1, 2, 3]),
        ({4: word(1000)}, 0, "truncated: its 1000 bytes would end at 1008, the file ends at 96", [1, 2, 3]),
        ({4: word(1)}, 0, "no record follows it at 12", [1, 2, 3]),
        ({4: word(36)}, 0, "another record's head lies in it, at 16: its length 36 is wrong", [1, 2, 3]),
        ({16: bytes(4)}, 0, "no record follows it at 16", [2, 3]),
        ({4: word(3 << 29 | 5)}, 0, "flag 3 .a last piece. where a whole record or a first piece", [1, 2, 3]),
        ({4: word(7 << 29 | 5)}, 0, "flag 7 .unknown.", [1, 2, 3]),
        ({4: word(1 << 29 | 5)}, 0, "flag 0 .a whole record. where a middle .* the piece at 16", [1, 2, 3]),
        ({88: word(5)}, 84, "truncated: its 5 bytes would end at 100", [0, 1, 2]),
    ],
)
def test_damage(tmp_path: Path, change: dict[int, bytes], offset: int, words: str, left: list[int]) -> None:
    text = bytearray(TEXT)
    for at, new in change.items():
        text[at : at + len(new)] = new
    path = tmp_path / "a.rec"
    path.write_bytes(text)
    with pytest.raises(DamagedRecord, match=rf"a\.rec: damaged record at offset {offset}: {words}") as caught:
        list(RecordFile(path))
    assert (caught.value.path, caught.value.offset) == (str(path), offset)
    if "another record's head" not in words:  # of which only those who read the bytes know
        with pytest.raises(DamagedRecord, match=words):
            len(RecordFile(path))
    skipping = RecordFile(path, damaged="skip")
    found = list(skipping)
    assert skipping.skipped == len(skipping.damages) == 1
    assert skipping.damages[0].offset == offset
    assert found == [GOOD[i] for i in left]
    assert len(skipping) == len(found)
    assert [skipping[i] for i in range(len(found))] == found


def test_a_file_cut_anywhere(tmp_path: Path) -> None:
    """All records before the cut are found, but for one that is followed by something else than a head's first word."""
    path = tmp_path / "a.rec"
    for size in range(1, len(TEXT)):
        path.write_bytes(TEXT[:size])
        whole = sum(end <= size for end in ENDS)
        skipping = RecordFile(path, damaged="skip")
        found = list(skipping)
        if size in ENDS:
            assert list(RecordFile(path)) == found == GOOD[:whole]
            assert skipping.skipped == 0
            continue
        with pytest.raises(DamagedRecord, match=r"truncated|no record follows it"):
            list(RecordFile(path))
        assert skipping.skipped >= 1
        assert found == GOOD[: whole if whole == 0 or size - ENDS[whole - 1] >= 4 else whole - 1]


def test_a_head_is_found_over_the_edge_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only its first word lies in the block that is searched."""
    monkeypatch.setattr("mpikv.data.recordio._FIRST_BLOCK", 8)
    monkeypatch.setattr("mpikv.data.recordio._LARGEST_BLOCK", 8)
    path = tmp_path / "a.rec"
    path.write_bytes(bytes(20) + MAGIC[:2] + bytes(2) + head(2, 0) + head(0, 0))
    file = FileBytes(str(path))
    assert [next_head(file, at) for at in (0, 1, 32, 33, 36, 100)] == [32, 32, 32, 40, 40, 40]
    file.close()


@pytest.mark.parametrize("flag", [0, 1])
def test_going_on_behind_damage_reads_as_much_as_the_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int
) -> None:
    """Not its square, where every few bytes look like the head of a record that has all the rest."""
    counts: list[int] = []
    read = FileBytes.read

    def counted(file: FileBytes, offset: int, count: int) -> bytes:
        found = read(file, offset, count)
        counts.append(len(found))
        return found

    def work(n_heads: int) -> int:
        size = 8 * n_heads
        (tmp_path / "a.rec").write_bytes(b"".join(head(flag, size - 8 * i - 8) for i in range(n_heads)))
        counts.clear()
        skipping = RecordFile(tmp_path / "a.rec", damaged="skip")
        assert list(skipping) == ([] if flag else [b""])
        assert skipping.skipped == n_heads - 1 + flag
        return sum(counts)

    monkeypatch.setattr(FileBytes, "read", counted)
    assert work(2048) < 2.2 * work(1024)


def test_iterators_read_the_file_that_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another one that has its name by now; several go on side by side, and none after `close`."""
    monkeypatch.chdir(tmp_path)
    write_records("a.rec", [b"old", b"older"])
    records = RecordFile("a.rec")
    first = iter(records)
    assert next(first) == b"old"
    write_records("a.rec", [b"new"])
    monkeypatch.chdir("/")
    assert list(records) == [b"old", b"older"]
    assert next(first) == b"older"
    second = iter(records)
    assert next(second) == b"old"
    records.close()
    with pytest.raises(ValueError, match=r"a\.rec was closed"):
        next(second)


def test_there_is_never_an_index_of_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer comes to its end between the two files."""

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    write_records(tmp_path / "a.rec", [b"old"])
    monkeypatch.setattr("mpikv.data.recordio.write_index", fail)
    with pytest.raises(OSError, match="no space left"):
        write_records(tmp_path / "a.rec", [b"new"])
    assert [file.name for file in tmp_path.iterdir()] == ["a.rec"]
    assert list(RecordFile(tmp_path / "a.rec")) == [b"new"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Also where the caller goes on and closes the writer."""
    writer = RecordWriter(tmp_path / "a.rec")
    writer.write(b"one")
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the writer closes what it had
    own, writer._file = writer._file, full
    with pytest.raises(OSError, match=r"No space left on device: .*a\.rec"):
        writer.write(b"two")
    writer._file = own
    writer.close()
    full.close()
    assert list(tmp_path.iterdir()) == []
