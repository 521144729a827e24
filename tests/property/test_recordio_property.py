"""RecordIO: what is written is read, whatever the bytes; parts are disjoint, cover all, and keep the order."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv.data import RecordFile, RecordWriter
from mpikv.data.recordio import MAGIC, encoded

# Pieces of the magic word, and bytes that bring them to any place.
chunks = st.sampled_from([MAGIC, MAGIC[:2], MAGIC[2:], MAGIC * 2, b"", b"x", b"four"])
records = st.lists(st.one_of(st.lists(chunks, max_size=6).map(b"".join), st.binary(max_size=40)), max_size=12)


@settings(max_examples=examples(40))  # each is a file that is written to the disk
@given(records)
def test_what_is_written_is_read(written: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.rec"
        with RecordWriter(path) as writer:
            for i, record in enumerate(written):
                writer.write(record, key=-3 * i)
        assert path.read_bytes() == b"".join(map(encoded, written))
        for index in (None, True):
            with RecordFile(path, index=index) as read:
                assert list(read) == written
                assert [read[i] for i in range(len(read))] == written
        with RecordFile(path, index=True) as read:
            assert read.keys().tolist() == [-3 * i for i in range(len(written))]


@settings(max_examples=examples(50))
@given(records, st.integers(1, 20), st.sampled_from(["error", "skip"]))
def test_parts_are_disjoint_and_cover_all(written: list[bytes], num_parts: int, damaged: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.rec"
        ends = list(itertools.accumulate(len(encoded(record)) for record in written))
        places = [0, *ends][: len(written)]
        path.write_bytes(b"".join(map(encoded, written)))
        (path.with_suffix(".idx")).write_text("".join(f"{i}\t{place}\n" for i, place in enumerate(places)))
        for index in (None, True):
            offsets, found, lengths = [], [], []
            for part in range(num_parts):
                with RecordFile(path, index=index, num_parts=num_parts, part_index=part, damaged=damaged) as read:  # type: ignore[arg-type]
                    offsets += read._all_offsets().tolist()
                    found += list(read)
                    lengths.append(len(read))
            assert offsets == places
            assert found == written
            if index:
                assert max(lengths) - min(lengths) <= 1


@given(records, st.integers(1, 9), st.data())
def test_parts_of_a_damaged_file_find_what_one_finds(written: list[bytes], num_parts: int, data: st.DataObject) -> None:
    """None twice. They may find more: a part begins anew behind a cut, where one that reads on is still wrong."""
    text = bytearray(b"".join(map(encoded, written)))
    for _ in range(data.draw(st.integers(0, 3))):
        if text:
            text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.rec"
        path.write_bytes(text)
        with RecordFile(path, damaged="skip") as alone:
            expected = list(zip(alone._all_offsets().tolist(), alone, strict=True))
        found = []
        for part in range(num_parts):
            with RecordFile(path, num_parts=num_parts, part_index=part, damaged="skip") as read:
                found += zip(read._all_offsets().tolist(), read, strict=True)
        assert [offset for offset, _ in found] == sorted({offset for offset, _ in found})
        assert set(expected) <= set(found)
