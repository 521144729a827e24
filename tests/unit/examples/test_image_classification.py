"""examples/image_classification.py on thread ranks: stopped and resumed, with several workers, devices and modes."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cifar_files
import frameworks
import numpy as np
import pytest
from jobs import ROOT

from mpikv.testing.stores import spawn_stores

sys.path.insert(0, str(ROOT / "examples"))
torch = frameworks.need("torch")
import image_classification  # noqa: E402
import torch_networks  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cifar_files.write(tmp_path_factory.mktemp("cifar"))


def small() -> Any:
    """A network with a batch normalisation that is soon computed."""
    first = [torch.nn.AvgPool2d(4), torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
    return torch.nn.Sequential(*first, torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10))


@pytest.fixture(autouse=True)
def networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same first weights in every run: PyTorch's generator is one for all thread ranks, so they are made before."""
    torch.manual_seed(3)
    for name, net in (("small", small()), ("lenet", torch_networks.lenet(3, 10))):
        monkeypatch.setitem(image_classification.NETWORKS, name, lambda *_, net=net: copy.deepcopy(net))


def train(
    data: Path, workers: int, *line: object, kind: str = "dist_sync", num_servers: int = 0
) -> list[tuple[float | None, int, float, dict[str, bytes]]]:
    """Of each worker: its result, the steps, the examples, and the state of the model."""
    words = ["--data-dir", str(data), "--kv-store", kind, *map(str, line)]
    options = image_classification.arguments(words)

    def body(store: Any) -> Any:
        run = image_classification.prepare(options, store)
        result = run.train()
        state = {name: value.detach().numpy().copy() for name, value in run.nets[0].state_dict().items()}
        for net in run.nets[1:]:
            for one, other in zip(run.nets[0].parameters(), net.parameters(), strict=True):
                assert torch.equal(one, other)
        return result, run.trainer.steps, run.trainer.examples, state

    return spawn_stores(kind, workers, body, num_servers=num_servers)


def test_numbers_for_tensorboard(
    data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After each epoch, by worker 0; a stand-in for its writer, which needs a package that is often not there."""
    written: list[tuple[str, int]] = []

    class Writer(SimpleNamespace):
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def flush(self) -> None:
            written.append(("", 0))

    monkeypatch.setattr(image_classification, "summary_writer", lambda _folder: Writer())
    monkeypatch.setattr(image_classification.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit):
        image_classification.arguments(["--tensorboard", str(tmp_path)])
    assert "pip install tensorboard" in capsys.readouterr().err
    monkeypatch.setattr(image_classification.importlib.util, "find_spec", lambda _name: True)
    train(data, 2, "--model", "small", "--batch-size", 8, "--epochs", 2, "--tensorboard", tmp_path)
    for name in ("loss", "accuracy", "bytes_sent", "waited_s"):
        assert written.count((name, 5)) == written.count((name, 10)) == 1
    assert written.count(("", 0)) == 2


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest relative difference of a weight's norm."""
    assert a.keys() == b.keys()
    return max(float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in b)


@pytest.mark.parametrize(
    ("kind", "workers", "servers", "rate"), [("dist_sync", 3, 0, 0.01), ("dist_async", 2, 1, 0.005)]
)
def test_it_learns_and_workers_that_wait_for_each_other_have_the_same_model(
    kind: str, workers: int, servers: int, rate: float, data: Path
) -> None:
    line = ["--model", "small", "--batch-size", 8, "--epochs", 8, "--no-augment", "--lr", rate]
    found = train(data, workers, *line, kind=kind, num_servers=servers)
    assert found[0][0] is not None
    assert found[0][0] > 0.4  # guessing gives 0.1
    for _, steps, examples, state in found:
        assert (steps, examples) == (8 * (80 // (8 * workers)), 8 * 80)
        assert kind == "dist_async" or same(state, found[0][3])  # the running means of a batch normalisation, too


@pytest.mark.parametrize("model", torch_networks.NETWORKS)
def test_networks_take_color_and_grey(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for channels in (1, 3):
        net = torch_networks.NETWORKS[model](channels, 10)
        net(torch.zeros(1, channels, 32, 32)).sum().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
    weights = sum(parameter.numel() for parameter in net.parameters())
    # Counted by hand from the layers' shapes; ResNet-18's are those of the usual one for CIFAR-10.
    assert weights == {"resnet18": 11173962, "resnet18-large": 11173962, "vgg11": 9228362, "lenet": 657080}[model]


TWO_EPOCHS = ["--model", "small", "--batch-size", 8, "--epochs", 2]
KEEPS = [*TWO_EPOCHS, "--gc-force", "--gc-type"]
LOCAL = ["--model", "small", "--batch-size", 8, "--no-augment", "--lr", 0.01, "--local", 2, "--num-devices", 2]


@pytest.mark.parametrize(
    ("workers", "servers", "stop", "line"),
    [
        # within an epoch or at its end, with augmentation, batch normalisation and a schedule
        (2, 0, 3, [*TWO_EPOCHS, "--lr-steps", 0.7]),
        (1, 0, 5, [*TWO_EPOCHS, "--lr-steps", 0.7, "--batch-size", 16, "--num-devices", 2]),
        (2, 0, None, TWO_EPOCHS),
        # what workers keep: velocities, and Adam's means
        (2, 0, 3, [*KEEPS, "topk", "--optimizer", "sgd"]),
        (2, 0, 3, [*KEEPS, "1bit", "--num-devices", 2]),
        # workers that train by themselves
        (2, 1, 5, [*LOCAL, "--epochs", 2]),
        (2, 1, 5, [*LOCAL, "--epochs", 2, "--gc-type", "fp16", "--gc-force", "--outer", "nesterov"]),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_run(
    workers: int, servers: int, stop: int | None, line: list[object], *, data: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Bit for bit. Without a number of steps one worker is told to stop in the middle of an epoch."""
    through = train(data, workers, *line, num_servers=servers)
    gradients = image_classification.Run.gradients

    def stopping(run: Any, x: Any, y: Any) -> float:
        if run.trainer.steps == 2 and run.store.rank == 1:
            run.store.request_stop()
        return gradients(run, x, y)

    with monkeypatch.context() as patched:
        if stop is None:
            patched.setattr(image_classification.Run, "gradients", stopping)
        begun = train(data, workers, *line, "--max-steps", stop or 99, "--save", tmp_path / "run", num_servers=servers)
    assert 0 < begun[0][1] < 10 if stop is None else begun[0][1] == stop
    again = train(data, workers, *line, "--resume", tmp_path / "run", num_servers=servers)
    assert [found[:3] for found in again] == [found[:3] for found in through]
    assert again[0][1:3] == (10, 160)
    assert "begin with none" not in capfd.readouterr().err
    for (*_, state), (*_, wanted) in zip(again, through, strict=True):
        assert same(state, wanted)


def test_another_number_of_workers_begins_without_what_they_kept(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = [*KEEPS, "topk", "--optimizer", "sgd"]
    train(data, 2, *line, "--max-steps", 3, "--save", tmp_path / "run")
    assert train(data, 1, *line, "--resume", tmp_path / "run")[0][1:3] == (2 * 10 - 3, 160)
    told = "what each of 2 workers kept (worker_state), and 1 go on: they begin with none of it"
    assert capfd.readouterr().err.count(told) == 1


@pytest.mark.parametrize(("kind", "num_servers"), [("dist_sync", 2), ("local", 0)])
def test_devices_servers_and_workers_do_not_change_what_is_learned(kind: str, num_servers: int, data: Path) -> None:
    line = ["--model", "lenet", "--epochs", 1, "--optimizer", "sgd", "--lr", 0.01]
    alone = train(data, 1, *line, "--batch-size", 24, kind="local")
    workers = 1 if kind == "local" else 2
    # Five devices take uneven parts of 12 or 24 images.
    found = train(
        data, workers, *line, "--batch-size", 24 // workers, "--num-devices", 5, kind=kind, num_servers=num_servers
    )
    assert found[0][1] == alone[0][1] == 3
    assert distance(found[0][3], alone[0][3]) < 1e-4


@pytest.mark.parametrize(("kind", "num_servers"), [("dist_sync", 1), ("dist_async", 0)])
def test_workers_that_train_by_themselves(kind: str, num_servers: int, data: Path) -> None:
    """They learn, and end with the same weights."""
    found = train(data, 2, *LOCAL, "--epochs", 8, kind=kind, num_servers=num_servers)
    assert found[0][0] is not None
    assert found[0][0] > 0.4  # guessing gives 0.1
    for _, steps, examples, _ in found:
        assert (steps, examples) == (8 * 5, 8 * 80)
    assert kind == "dist_async" or same(found[0][3], found[1][3])


def test_what_is_wrong_is_said_in_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On worker 0; the others end without a word."""

    def ends(*line: object) -> str:
        options = image_classification.arguments(["--model", "small", *map(str, line)])

        def body(store: Any) -> str:
            with pytest.raises(SystemExit) as ended:
                image_classification.prepare(options, store)
            return str(ended.value)

        assert spawn_stores("dist_sync", 2, body) == ["1", "1"]
        (text,) = capsys.readouterr().err.splitlines()
        return text

    nowhere = tmp_path / "nowhere"
    assert ends("--data-dir", nowhere).endswith(f"run: scripts/get_cifar10 {nowhere}")
    assert "a step takes 256 images, and there are 80: lower --batch-size" in ends(
        "--data-dir", data, "--batch-size", 128
    )
    assert "there is no such file" in ends("--data-dir", data, "--batch-size", 8, "--resume", nowhere)
    (tmp_path / "damaged").write_bytes(b"what is this")
    assert str(tmp_path / "damaged") in ends("--data-dir", data, "--batch-size", 8, "--resume", tmp_path / "damaged")
    for line, words in (
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--batch-size", "2", "--num-devices", "3"], "less than the number of devices, 3"),
        (["--local", "0"], "--local must be at least 1"),
        (["--local", "2", "--gc-type", "2bit"], "--gc-threshold must say how far"),
        (["--local", "2", "--gc-momentum", "worker"], "with --local each worker has an optimizer of its own"),
        (["--lr-steps", "1,x"], "numbers with commas between them"),
        (["--gpus", "99"], "PyTorch sees"),
        (["--gpus", "1,a"], "numbers with commas between them"),
        (["--model", "alexnet"], "invalid choice: 'alexnet'"),
        (["--optimizer", "gradient"], "invalid choice: 'gradient'"),
    ):
        with pytest.raises(SystemExit):
            image_classification.arguments(line)
        assert words in capsys.readouterr().err.splitlines()[-1]
