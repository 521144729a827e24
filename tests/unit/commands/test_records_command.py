"""`mpikv records`: what it writes, what it prints, and its status."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mpikv.__main__ import main
from mpikv.common import progress
from mpikv.data import ImageRecords, RecordFile, unpack, write_records

FILES = Path(__file__).parents[2] / "fixtures" / "records"
PICTURES = FILES / "pictures"


def records(*words: object) -> int:
    return main(["records", *map(str, words)])


# ---- pack


@pytest.mark.parametrize("source", ["folder", "list"])
def test_pack_writes_what_im2rec_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str) -> None:
    out = tmp_path / "images.rec"
    if source == "folder":
        assert records("pack", PICTURES, out) == 0
    else:
        assert records("pack", FILES / "images.lst", out, "--root", PICTURES) == 0
    for name in ("images.rec", "images.idx"):
        assert (tmp_path / name).read_bytes() == (FILES / name).read_bytes()
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[-1] == f"{out}: 4 images, 1796 bytes, index {tmp_path}/images.idx"
    assert lines[:-1] == (["label 0: cat", "label 1: dog"] if source == "folder" else [])
    assert printed.err == ""


def test_pack_changes_images(tmp_path: Path) -> None:
    out = tmp_path / "a.rec"
    assert records("pack", PICTURES, out, "--resize", 4, "--quality", 50, "--no-index") == 0
    assert not (tmp_path / "a.idx").exists()
    packed = RecordFile(out)
    assert all(unpack(record)[1].startswith(b"\xff\xd8") for record in packed)
    assert [image.shape for image, _ in map(ImageRecords(packed).__getitem__, range(4))] == [
        (4, 4, 3), (4, 5, 3), (4, 4, 3), (4, 5, 3)
    ]  # fmt: skip
    assert records("pack", PICTURES, out, "--center-crop", "--grey", "--encoding", "png") == 0
    (first, _), (wide, _) = (ImageRecords(RecordFile(out))[i] for i in (0, 2))
    with Image.open(PICTURES / "cat" / "0.png") as image:
        assert np.array_equal(first[:, :, 0], np.array(image.convert("L")))
    with Image.open(PICTURES / "dog" / "1.png") as image:
        assert np.array_equal(wide[:, :, 0], np.array(image.convert("L"))[:, :8])


def test_pack_with_labels_from_a_file(tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    labels.write_text("dog/1.png\t1.5\t2\ncat/0.png\t7\n./cat/2.jpg\t8\n\ndog/3.jpg\t9\n")
    assert records("pack", PICTURES, tmp_path / "a.rec", "--label-file", labels) == 0
    images = ImageRecords(RecordFile(tmp_path / "a.rec"))
    assert [np.atleast_1d(images.header(i).label).tolist() for i in range(4)] == [[7], [8], [1.5, 2], [9]]


def test_pack_shuffles_the_same_way_every_time(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert records("pack", PICTURES, tmp_path / f"{name}.rec", "--shuffle", "--seed", seed) == 0
    texts = [(tmp_path / f"{name}.rec").read_bytes() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]
    with RecordFile(tmp_path / "a.rec", index=True) as packed:
        assert packed.keys().tolist() == [unpack(record)[0].id for record in packed]
        assert sorted(packed.keys().tolist()) == [0, 1, 2, 3]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A copy with a file among the images that is none."""
    folder = tmp_path / "pictures"
    shutil.copytree(PICTURES, folder)
    (folder / "cat" / "1.jpg").write_bytes(b"\xff\xd8 and no more")
    return folder


def test_pack_and_an_image_that_is_damaged(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = pictures.parent / "out.rec"
    assert records("pack", pictures, out) == 1
    assert not out.exists()
    assert sorted(file.name for file in pictures.parent.iterdir()) == ["pictures"]
    error = capsys.readouterr().err
    assert error.startswith(f"mpikv records: {pictures}/cat/1.jpg: no image that Pillow can decode")
    assert error.endswith("; nothing was written (--skip-damaged leaves such images out)\n")
    assert records("pack", pictures, out, "--skip-damaged") == 1
    assert len(RecordFile(out)) == 4
    printed = capsys.readouterr()
    assert f"left out: {pictures}/cat/1.jpg: no image" in printed.err
    assert printed.out.endswith("1 damaged images were left out\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0\t1\n", "line 1: .*expected a number, labels and a path, with tabs between them"),
        ("0\t1\tcat/0.png\nx\t1\tcat/0.png\n", "line 2"),
        ("0\tdog\tcat/0.png\n", "line 1"),
        ("0\t1\tcat/0.png\n0\t1\tcat/2.jpg\n", "line 2: number 0 stands in line 1, too"),
        ("0\t1\tcat/nothing.png\n", "No such file.*cat/nothing.png"),
        ("\n", "a list of no images"),
    ],
)
def test_lists_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    (tmp_path / "a.lst").write_text(text)
    assert records("pack", tmp_path / "a.lst", tmp_path / "a.rec", "--root", PICTURES) == 2
    error = capsys.readouterr().err
    assert error.startswith("mpikv records: ")
    assert error.count("\n") == 1
    assert re.search(words, error), error
    assert [file.name for file in tmp_path.iterdir()] == ["a.lst"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cat/0.png\n", "line 1: 'cat/0.png\\n'; expected a path, a tab and labels"),
        ("cat/0.png\t1\ncat/0.png\t2\n", "line 2: 'cat/0.png' has labels already"),
        ("cat/0.png\t1\n", "no labels for 'cat/2.jpg'"),
        ("cat/0.png\t1\ncat/2.jpg\t1\ndog/1.png\t1\ndog/3.jpg\t1\nx.jpg\t1\n", "labels for 'x.jpg', which is not in"),
    ],
)
def test_label_files_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    (tmp_path / "labels").write_text(text)
    assert records("pack", PICTURES, tmp_path / "a.rec", "--label-file", tmp_path / "labels") == 2
    error = capsys.readouterr().err
    assert words.replace("\n", "\\n") in error
    assert str(tmp_path / "labels") in error


def test_pack_of_a_folder_that_links_to_itself_ends(tmp_path: Path) -> None:
    """Links to a folder on the way are not followed, also where two of them would double the way at each turn."""
    folder = tmp_path / "images"
    (folder / "a").mkdir(parents=True)
    Image.new("RGB", (2, 2)).save(folder / "a" / "x.png")
    for name, target in (("b", "."), ("c", ".."), ("d", ".")):
        (folder / "a" / name).symlink_to(target)
    assert main(["records", "pack", str(folder), str(tmp_path / "x.rec")]) == 0
    assert len(RecordFile(tmp_path / "x.rec")) == 1


def test_pack_options_that_contradict_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.rec"
    for words, said in (
        ((PICTURES, out, "--root", tmp_path), "--root is for a list"),
        ((FILES / "images.lst", out, "--label-file", "x"), "--label-file is for a folder"),
        ((PICTURES, out, "--quality", 9, "--encoding", "png"), "--quality is of JPEG"),
        ((tmp_path, out), "no images in it, nor below it; looked for .jpeg, .jpg, .png"),
        ((tmp_path / "nothing", out), "No such file"),
        ((PICTURES, tmp_path / "nowhere" / "a.rec"), "No such file"),
        ((PICTURES, tmp_path), "is a folder"),
    ):
        assert records("pack", *words) == 2
        assert said in capsys.readouterr().err
    for words in (
        (PICTURES, out, "--quality", 101),
        (PICTURES, out, "--resize", 0),
        (PICTURES, out, "--extensions", ""),
    ):
        with pytest.raises(SystemExit) as caught:
            records("pack", *words)
        assert caught.value.code == 2
    assert list(tmp_path.iterdir()) == []


# ---- list, check


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert records("list", FILES / "images.rec") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["record", "offset", "bytes", "key", "content"]
    assert lines[2].split(maxsplit=4) == ["1", "180", "702", "1", "image 10 x 8, label 0, id 1"]
    assert len(lines) == 5
    assert records("list", FILES / "labels.rec", "-n", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split(maxsplit=4)[3:] == ["-", "image 5 x 3, label 1, 2.5, -4, id 1099511627776"]
    assert len(lines) == 3
    assert records("list", FILES / "magic.rec", "--no-index") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["0", "0", "0", "-", "nothing"]
    assert lines[3].split() == ["2", "20", "4", "-", "66", "6f", "75", "72"]


@pytest.mark.parametrize("name", ["images.rec", "labels.rec", "magic.rec", "parts.rec", "plain.rec"])
def test_good_files_pass_the_check(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert records("check", FILES / name) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("nothing is damaged\n")
    assert printed.err == ""


def test_check_tells_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.rec"
    for name in ("rec", "idx"):
        shutil.copy(FILES / f"images.{name}", tmp_path / f"a.{name}")
    content = bytearray(path.read_bytes())
    content[892:896] = b"oops"
    path.write_bytes(content)
    assert records("check", path) == 1
    problem = "no record follows it at 892, so its length or the head there is damaged"
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: damaged record at offset 180: {problem}",
        f"{tmp_path}/a.idx: key 1 has offset 180, where no good record begins",
        f"{tmp_path}/a.idx: key 2 has offset 892, where no good record begins",
        f"{path}: 2 good records in 1796 bytes, 4 in its index; 3 problems",
    ]
    assert records("check", path, "--no-index") == 1
    assert capsys.readouterr().out.endswith("2 good records in 1796 bytes; 1 problem\n")
    assert records("list", path) == 1
    assert "damaged record at offset 180" in capsys.readouterr().err


def test_images_of_more_than_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As they are they can be stored, and the check says that they cannot be read as images; changed they are cut."""
    (tmp_path / "depth").mkdir()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "depth" / "0.png")
    assert records("pack", tmp_path, tmp_path / "a.rec") == 0
    assert records("check", tmp_path / "a.rec", "--images") == 1
    assert "record at offset 0: an image of more than 8 bits" in capsys.readouterr().out
    assert records("pack", tmp_path, tmp_path / "b.rec", "--grey") == 1
    assert "0.png: an image of more than 8 bits" in capsys.readouterr().err


def test_check_of_an_index_and_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.rec"
    write_records(path, [b"a", b"b"])
    (tmp_path / "other").write_text("0\t0\n")
    assert records("check", path, "--index", tmp_path / "other") == 1
    assert capsys.readouterr().out.splitlines()[0] == f"{tmp_path}/other: the record at offset 12 is not in it"
    assert records("check", path) == 0
    assert records("check", path, "--images") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:-1] == [
        f"{path}: record at offset {offset}: no image record: 1 bytes, the header alone has 24" for offset in (0, 12)
    ]
    assert lines[-1].endswith("2 problems")
    (tmp_path / "a.idx").write_text("0 zero\n")
    assert records("check", path) == 2
    assert "a.idx, line 1" in capsys.readouterr().err
    assert records("check", path, "--index", "x", "--no-index") == 2
    assert records("check", tmp_path / "nothing.rec") == 2


def test_lines_now_and_then_where_nobody_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LEAST_S", 0.0)
    monkeypatch.setattr(progress, "SHARE", 0.0)
    assert records("pack", PICTURES, tmp_path / "a.rec") == 0
    lines = [line.partition(", ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [f"pack {tmp_path}/a.rec: {i} of 4 images" for i in (1, 2, 3, 4)]
    assert records("check", tmp_path / "a.rec") == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"check {tmp_path}/a.rec: 1796 of 1796 bytes, ")


def test_a_reader_that_has_seen_enough() -> None:
    """As of `mpikv records list FILE | head`: no complaint, and the status of a program that SIGPIPE ends."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-m", "mpikv", "records", "list", str(FILES / "magic.rec")]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, env=env, timeout=100, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_sigterm_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent while the first image is read; by then the file beside the place is there."""
    out, seen = tmp_path / "a.rec", []

    def ended(content: bytes) -> None:
        seen.extend(file.suffix for file in tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("mpikv.commands.records_command.turned", ended)
    with pytest.raises(SystemExit) as caught:
        records("pack", PICTURES, out)
    assert (caught.value.code, seen, list(tmp_path.iterdir())) == (143, [".tmp"], [])
    assert signal.getsignal(signal.SIGTERM) == before
