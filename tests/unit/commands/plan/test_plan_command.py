"""`mpikv plan`: what it reads, what it prints, and that its counts are those of real stores."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import fresh
import numpy as np
import pytest

import mpikv
from mpikv.__main__ import main
from mpikv.codecs import compression
from mpikv.commands.plan import calibrate, options, servers
from mpikv.commands.plan.step import Speed, StepSettings, Workload, of_bytes, of_model
from mpikv.common import units
from mpikv.config import Config
from mpikv.kvstore import KVStore
from mpikv.placement.costs import Costs, Link
from mpikv.testing.stores import spawn_stores

LINK, FAST_LINK = Link(1.25e9, 20e-6), Link(1.5e9, 20e-6)
SHAPES = ((300,), (20_000,), (1_200_000,), (7,), (600_000,), (90_000,), (0,), (40_000,))


ONE = ("--workers", "2", "--servers", "0", "--modes", "sync")


def plan(*words: str) -> int:
    return main(["plan", *words])


# --- units


@pytest.mark.parametrize(
    ("read", "text", "found"),
    [
        (units.rate, "10gbit", 1.25e9),
        (units.rate, "1.5Gbit/s", 187.5e6),
        (units.rate, "200mbit", 25e6),
        (units.rate, "64kbit", 8e3),
        (units.duration, "20us", 20e-6),
        (units.duration, "1.5ms", 1.5e-3),
        (units.duration, "2s", 2),
        (units.duration, "0us", 0),
        (units.duration, "5ns", 5e-9),
        (options.counts, "8..1024", [8, 16, 32, 64, 128, 256, 512, 1024]),
        (options.counts, "3..20,5, 6", [3, 6, 12, 5]),
        (lambda text: [count(12) for count in options.server_counts(text)], "0,W/2,W,2W,4,w/5,3W/4,W/16",
         [0, 6, 12, 24, 4, 2, 9, 1]),
    ],
)  # fmt: skip
def test_what_is_read(read: Callable[[str], object], text: str, found: object) -> None:
    assert read(text) == pytest.approx(found)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (units.rate, "10"),
        (units.rate, "0gbit"),
        (units.rate, "fast"),
        (units.duration, "20"),
        (units.duration, "-1us"),
        (options.counts, "8.."),
        (options.counts, "0"),
        (options.counts, "16..8"),
        (options.counts, ""),
        (options.server_counts, "W/0"),
        (options.server_counts, "many"),
        (options.server_counts, ""),
        (options.server_counts, "-1"),
    ],
)
def test_what_cannot_be_read(read: object, text: str) -> None:
    with pytest.raises(
        (argparse.ArgumentTypeError, ValueError), match=r"none of the form|carries|whole number|downwards|no number"
    ):
        read(text)  # type: ignore[operator]


# --- the command


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "lenet", "--workers", "2,4", "--servers", "0,W/2", "--link", "200mbit") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert lines[0].split() == ["workers", "servers", "mode", "messages", "MB", "exchange", "ms", "binds"]
    assert [line.split()[:2] for line in lines[1:]] == [
        [w, s] for w in "24" for s in ("0", str(int(w) // 2)) for _ in "sa"
    ]
    assert sum("*" in line for line in lines) == 2
    assert "allreduce ring" in lines[1]
    assert "in workers, async" in lines[2]
    assert "servers and allreduce" in lines[3]


def test_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--bytes", "1M", *ONE, "--compute-ms", "50")
    assert plan(*words, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    assert row["step_s"] == pytest.approx(0.05 + row["exchange_s"])
    assert 0.05 <= row["overlapped_step_s"] <= row["step_s"]
    assert found["settings"]["workload"] == f"{1 << 20} bytes"
    assert plan(*words) == 0
    assert "overlapped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "8..4"], "downwards"),
        (["--workers", "99999999999"], "the most that can be predicted"),
        (["--link", "10"], "10gbit"),
        (["--latency", "soon"], "20us"),
        (["--servers", "W/x"], "W/2"),
        (["--modes", "sync,lazy"], "lazy"),
        (["--mtu", "10"], "100"),
        (["--compute-ms", "-1"], "milliseconds"),
        (["--bytes", "1T"], "256M"),
        (["--model", "alexnet"], "resnet50"),
        (["--model", "lenet", "--bytes", "1M"], "not allowed with"),
        (["--per-host", "0"], "0 is less than 1"),
        (["--no-buckets"], "--no-buckets is gone: the plan is of a Trainer's step"),
        (["--server-hosts", "own"], "--server-hosts is gone: the plan's servers are on hosts of their own"),
        (["--workers", "4", "--per-host", "4", "--servers", "0"], "one host"),
        (["--bytes", "64M", "--servers", "4200", "--modes", "async"], "more than 4096 messages at a time"),
        (["--workers", "8", "--servers-take", "half"], "neither auto nor all"),
        (["--workers", "8", "--json", "/nowhere/plan.json"], "No such file or directory"),
        ([*ONE, "--compression", "nix"], "unknown compression type 'nix'; known: 1bit"),
        ([*ONE, "--compression", "{nix"], "--compression {nix: Expecting property name"),
        ([*ONE, "--pull", '{"type": "topk", "share": 1}'], "compression type 'topk' takes ratio"),
    ],
)
def test_what_cannot_be_planned(words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        sys.exit(plan(*words))
    assert error.value.code == 2
    assert said in capsys.readouterr().err


# --- the same counts as real stores


def least_of_three(store: KVStore, step: Callable[[], object]) -> tuple[int, int]:
    """Messages and bytes of a step: an answer of worker 0 to somebody who came late may fall into one of them."""
    seen = []
    for _ in range(4):
        stats = store.stats()
        seen.append((stats["messages_sent"], stats["bytes_sent"]))
        step()
    return min((after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(seen))


def check_counts(
    name: str, workers: int, n_servers: int, shapes: Sequence[tuple[int, ...]], settings: StepSettings
) -> None:
    """Messages and bytes of the worker that sends most, in one step of a Trainer on thread ranks, are those planned."""
    # Over slower links owners ask for pieces, in as many messages as time lets.
    link = LINK if n_servers else FAST_LINK

    def body(store: KVStore) -> tuple[int, int]:
        params = {f"{i:03}": mpikv.Parameter(np.zeros(shape, np.float32)) for i, shape in enumerate(shapes)}
        travels = None if settings.compression.uncompressed else json.loads(settings.compression.text)
        trainer = mpikv.Trainer(params, "sgd", {"learning_rate": 0.5}, kvstore=store, compression_params=travels)
        for parameter in params.values():
            parameter.grad[...] = 1
        trainer.step(1)
        return least_of_three(store, lambda: trainer.step(1))

    hosts = [f"h{i}" for i in range(workers + n_servers)]
    config = Config(
        timeout_s=60,
        server_placement="last",
        progress="calls",
        link=f"{8 * link.bytes_per_s / 1e9:g}gbit,20us",
    )
    found = servers.predict(Workload("some", tuple(shapes)), workers, link, Costs(), settings)
    of_workers = spawn_stores(name, workers, body, num_servers=n_servers, config=config, hosts=hosts)
    assert max(of_workers) == (found.messages, found.sent_bytes)


@pytest.mark.parametrize(
    ("name", "workers", "n_servers"),
    [
        ("dist_sync", 3, 0),
        ("dist_sync", 3, 1),
        ("dist_async", 3, 3),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in (("dist_sync", 2, 0), ("dist_sync", 5, 0), ("dist_sync", 3, 3), ("dist_async", 3, 1))
        ),
    ],
)
def test_counts_are_those_of_a_store(name: str, workers: int, n_servers: int) -> None:
    settings = StepSettings(servers=n_servers, synchronous=name == "dist_sync")
    check_counts(name, workers, n_servers, SHAPES, settings)


KINDS: list[dict[str, object]] = [
    {"type": "fp16"},
    {"type": "none", "pull": "bf16"},
    {"type": "2bit", "pull": "fp16"},
    {"type": "int8", "block": 64, "force": True},
    {"type": "topk", "ratio": 0.02},
    {"type": "powersgd", "rank": 2},
]
FEW = ((300,), (270_001,), (7,), (0,), (400, 10, 10), (30, 40))  # several pieces, short ones, nothing
FAST = Speed(1e-9, 2e-9, 3e-9)


@pytest.mark.parametrize(
    ("name", "workers", "n_servers", "kind"),
    [
        *(("dist_sync", 3, 0, kind) for kind in KINDS),
        *((name, 2, 2, kind) for name in ("dist_sync", "dist_async") for kind in (*KINDS[1:3], KINDS[-1])),
    ],
    ids=str,
)
def test_counts_of_compressed_keys_are_those_of_a_store(
    name: str, workers: int, n_servers: int, kind: dict[str, object]
) -> None:
    travels = compression.make({**kind, "force": True})
    settings = StepSettings(
        travels, dict.fromkeys((travels.push, travels.pull), FAST), servers=n_servers, synchronous=name == "dist_sync"
    )
    check_counts(name, workers, n_servers, FEW, settings)


def test_a_codec_that_takes_longer_than_the_link_binds() -> None:
    travels = compression.make({"type": "2bit", "pull": "fp16"})
    speeds = {travels.push: Speed(1e-6, 0.0, 0.0), travels.pull: Speed(0.0, 0.0, 0.0)}
    step = StepSettings(travels, speeds=speeds)
    found = servers.predict(of_bytes(1 << 22), 2, LINK, Costs(0, 0, 0, 0), step)
    assert found.binds[0] == "worker core"
    assert found.busy_s["worker core"] == pytest.approx((1 << 20) * 1e-6)  # each element once


def test_what_a_codec_costs_is_measured() -> None:
    assert all(0 < one < 1e-6 for one in calibrate.speed_of(compression.make("fp16").push))


def test_a_compressed_plan_says_what_was_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "speed_of", lambda codec: FAST)
    words = ["--bytes", "4M", *ONE, "--compression", "2bit"]
    assert plan(*words, "--pull", "fp16") == 0
    out = capsys.readouterr().out
    assert "ns for an element by TwoBit(threshold=0.5): encode 1, decode 2, add 3" in out
    assert plan(*words, "--json", str(tmp_path / "plan.json")) == 0
    settings = json.loads((tmp_path / "plan.json").read_text())["settings"]
    assert settings["compression"] == compression.make("2bit").text
    assert settings["codec_costs"]["TwoBit(threshold=0.5)"] == FAST._asdict()


def test_workloads() -> None:
    assert of_bytes(10).n_bytes == 12
    workload = of_model("lenet")
    assert workload.n_bytes == 4 * 431_080
    ready = workload.ready_s(0.3)
    assert ready[0] == pytest.approx(0.3)  # the first layer's gradient comes last
    assert ready == sorted(ready, reverse=True)
    assert ready[-1] > 0.1


def test_costs_are_measured_on_request() -> None:
    pytest.importorskip("mpi4py")
    words = ["plan", "--bytes", "64K", "--workers", "2", "--servers", "0", "--calibrate", "--json", "-"]
    code = "import sys; from mpikv.__main__ import main; sys.exit(main())"
    done = fresh.python(code, *words, OMPI_MCA_btl="^sm")  # which would leave a file of 16 MiB in /dev/shm
    assert done.returncode == 0, done.stderr
    costs = json.loads(done.stdout)["settings"]["costs"]
    assert costs != dataclasses.asdict(Costs())
    assert all(0 <= seconds < 1e-3 for seconds in costs.values())
