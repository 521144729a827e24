"""Files of metrics: what stands in them, when they are written, and what becomes of them where that fails."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from on_workers import full, until
from store_modes import Mode

from mpikv import Config, ConfigError, kv
from mpikv.common import files
from mpikv.observe import metrics
from mpikv.observe.metrics import Metric, MetricsFile

text_string_to_metric_families = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Values:
    families = [*text_string_to_metric_families(text)]
    assert {family.type for family in families} <= {"counter", "gauge"}
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def of(values: Values, name: str, **labels: str) -> float:
    return values[f"mpikv_{name}", frozenset(labels.items())]


def threads() -> int:
    return sum(thread.name == "mpikv-metrics" for thread in threading.enumerate())


def test_labels_and_help_of_any_text() -> None:
    odd = 'a "b"\\n\n}, ä'
    values = parsed(metrics.text([Metric("x_bytes", "one\n\\ two", [({"key": odd}, 2.5)])], {"worker": odd}))
    assert of(values, "x_bytes", key=odd, worker=odd) == 2.5


@pytest.mark.parametrize(
    "mode", [Mode("dist_sync", 2, hosts="ab"), Mode("dist_sync", 2, 1), Mode("dist_async", 2, 2, memory="off")], ids=str
)
def test_the_files_of_all_ranks_after_close(mode: Mode, tmp_path: Path) -> None:
    """Each number of `store.stats()` is there, what calls have waited, and what servers have done."""

    def body(store: Any) -> tuple[dict[str, Any], int]:
        store.set_gradient_compression({"type": "2bit"}, keys="c")
        store.init(["w", "c"], [full(0, 1 << 10)] * 2)
        if not mode.synchronous:
            store.set_optimizer("sgd")
        for _ in range(3):
            store.pushpull(["w", "c"], [full(1, 1 << 10)] * 2)
        return store.stats(), threads()

    told = mode.run(body, metrics=str(tmp_path), link="10mbit")
    assert threads() == 0
    assert all(n > 0 for _, n in told)
    assert sum(stats["waits"] for stats, _ in told) > 0
    names = [f"mpikv-worker-{i}" for i in range(mode.workers)] + [f"mpikv-server-{i}" for i in range(mode.servers)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.prom" for name in names)
    for rank, (stats, _) in enumerate(told):
        values = parsed((tmp_path / f"mpikv-worker-{rank}.prom").read_text())
        labels = {"worker": str(rank), "store": "0"}
        assert of(values, "up", **labels) == 0
        assert (of(values, "keys", **labels), of(values, "rounds_total", **labels)) == (2, 3)
        for name, entry in (("waits_total", "waits"), ("wait_seconds_total", "waited_s")):
            assert sum(value for (one, _), value in values.items() if one == f"mpikv_{name}") >= stats[entry]
        for name, value in stats.items():
            if isinstance(value, int) and name != "waits":
                gauge = name in ("held_bytes", "shared_bytes")
                assert gauge or of(values, f"{name}_total", **labels) >= value
                assert not gauge or of(values, name, **labels) >= 0
        if "compressed_keys" in stats:
            assert of(values, "codec_encoded", key="c", codec='{"threshold": 0.5, "type": "2bit"}', **labels) == 1
    for server in range(mode.servers):
        values = parsed((tmp_path / f"mpikv-server-{server}.prom").read_text())
        labels = {"server": str(server), "store": "0"}
        assert (of(values, "up", **labels), of(values, "shards", **labels)) == (0, 2)
        assert of(values, "requests_total", **labels) >= 2 * 3 * mode.workers


def test_a_file_is_written_while_the_program_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no thread moves transfers on."""
    monkeypatch.setattr(metrics, "INTERVAL_S", 0.02)

    def body(store: Any) -> None:
        store.init("w", full(0))
        file = tmp_path / f"mpikv-worker-{store.rank}.prom"
        for n in (1, 2):
            store.pushpull("w", full(1))
            line = f'mpikv_rounds_total{{worker="{store.rank}",store="0"}} {n}\n'
            until(lambda line=line: line in file.read_text())  # type: ignore[misc]
        assert f'mpikv_up{{worker="{store.rank}",store="0"}} 1\n' in file.read_text()

    Mode("dist_sync", 2).run(body, metrics=str(tmp_path), progress="calls")


def test_stores_of_a_process(tmp_path: Path) -> None:
    """Those that are open at the same time have files and labels of their own; a later one takes the place of one."""
    config = Config(metrics=tmp_path / "new")
    names = ["mpikv-worker-0-1.prom", "mpikv-worker-0.prom"]
    with kv.create("local", config=config) as first:
        for _ in range(2):
            with kv.create("local", config=config) as second:
                second.init("w", full(0))
                assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
        first.init(["a", "b"], [full(0)] * 2)
    values = parsed("".join((tmp_path / "new" / name).read_text() for name in names))
    assert (of(values, "keys", worker="0", store="0"), of(values, "keys", worker="0", store="1")) == (2, 1)
    assert threads() == 0


def test_a_store_that_is_given_up_leaves_no_thread(tmp_path: Path) -> None:
    def body(store: Any) -> None:
        raise ValueError("an error of the program")

    with pytest.raises(Exception, match="an error of the program"):
        Mode("dist_sync", 2).run(body, metrics=str(tmp_path))
    assert threads() == 0


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MPIKV_METRICS", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=r"MPIKV_METRICS='.*below': no file can be written there \(Not a directory\)"):
        kv.create("local")
    with pytest.raises(ConfigError, match="metrics"):
        Config(metrics=3)
    assert threads() == 0


def test_a_full_disk_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = []
    monkeypatch.setattr(metrics, "INTERVAL_S", 0.01)

    def full_disk(*_: Any, **__: Any) -> Any:
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "replacing", full_disk)
        file = MetricsFile(str(tmp_path), "mpikv-worker-0", {}, list)
        until(lambda: len(tries) > 3)
    until(lambda: Path(file.path).exists())
    file.close()
    assert of(parsed(Path(file.path).read_text()), "up", store="0") == 0
    text = capsys.readouterr().err
    assert text.count("No space left on device (told once, tried again every 0.01 s)") == text.count("\n") == 1
