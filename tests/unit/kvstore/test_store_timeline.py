"""Timelines of a store: what is recorded in each mode, that values stay the same, and that nothing is done without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import codecs_of_tests
import numpy as np
import pytest
from on_workers import full, on
from store_modes import ONE_HOST, SERVED, TWO_HOSTS, Mode, modes

from mpikv import kv
from mpikv.commands.trace.files import read_run
from mpikv.errors import MpikvError
from mpikv.observe import recorder as recording
from mpikv.observe import timeline
from mpikv.server import timeline as at_server

OWN = (recording.__file__, timeline.__file__)
SUMMED = {"push", "reduce-scatter", "update", "allgather", "copy"}
KINDS = {  # of the workers, and of servers that are ranks of their own
    "direct": (ONE_HOST, {"meet", "add", *SUMMED}, set()),
    "messages": (Mode("dist_sync", 3, 0, "ring", "off", hosts="abc"), SUMMED | {"clock"}, set()),
    "hosts": (TWO_HOSTS, SUMMED | {"clock"}, set()),
    "servers": (SERVED, {"exchange", "pull", "clock"}, {"serve", "arrived", "update"}),
    "asynchronous": (Mode("dist_async", 2), {"exchange", "pull", "serve", "arrived", "update"}, set()),
    "codec": (
        Mode("dist_sync", 2, codec=codecs_of_tests.Reversed.name, memory="off", hosts="ab"),
        {"encode", "exchange", "pull", "serve", "arrived", "update", "clock"},
        set(),
    ),
}


def train(store: Any) -> list[Any]:
    store.init("w", full(0, 12))
    if "async" in store.type:
        store.set_optimizer("sgd")
    with store.span("forward"):
        pass
    store.pushpull("w", values := full(store.rank + 1, 12))
    store.push("w", full(store.rank, 12))
    pulled = store.pull("w")
    store.barrier()
    return [] if "async" in store.type else [values.tolist(), pulled.tolist()]


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.usefixtures("patient")
def test_each_mode_records_what_it_does(case, tmp_path):
    mode, at_workers, at_servers = KINDS[case]

    def body(store: Any) -> list[Any]:
        with store.timeline(tmp_path):
            return train(store)

    assert mode.run(body) == mode.run(train)
    ranks = read_run(tmp_path)
    workers = [rank for rank in ranks if rank.role[0] == "worker"]
    assert [rank.role for rank in ranks] == [
        *(("worker", i) for i in range(mode.workers)),
        *(("server", i) for i in range(mode.servers)),
    ]
    always = {"call", "span", "agree", "wait"} - ({"wait"} if case == "asynchronous" else set())
    assert {event.kind for rank in workers for event in rank.events} - {"wait"} == at_workers | always - {"wait"}
    assert {event.kind for rank in ranks if rank not in workers for event in rank.events} == at_servers
    for rank in workers:
        calls = [event.what for event in rank.events if event.kind == "call"]
        optimizer = ["set_optimizer"] if case == "asynchronous" else []
        assert calls == ["init", *optimizer, "pushpull", "push", "pull", "barrier"]
        rounds = {event.round for event in rank.events if event.kind in ("push", "meet", "exchange")}
        assert rounds == ({1} if case == "direct" else {1, 2})


@modes(ONE_HOST, TWO_HOSTS, SERVED, Mode("dist_async", 2), Mode("local", 1))
def test_without_a_timeline_nothing_of_it_is_called(mode):
    """Not one call of a function of the recorder or of the timeline, in any thread."""

    def body(store: Any) -> list[str]:
        called: list[str] = []

        def note(frame: FrameType, event: str, _argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename in OWN:
                called.append(frame.f_code.co_name)

        store.barrier()
        sys.setprofile(note)
        try:
            train(store)
            with store.span("backward"):
                store.pushpull("w", full(1, 12))
        finally:
            sys.setprofile(None)
        return called

    assert mode.run(body) == [[]] * mode.workers


def test_a_timeline_ends_with_its_store_and_may_be_followed_by_another(tmp_path):
    with kv.create("local") as store:
        match = "another timeline of this store is being written"
        with store.timeline(tmp_path) as first, pytest.raises(MpikvError, match=match):
            store.timeline(tmp_path)
        second = store.timeline(str(tmp_path))
        assert first.path == second.path
        store.barrier()
    entries = [*map(json.loads, Path(second.path).read_text().splitlines())]
    assert [("format" in entry) for entry in entries] == [True, True, False]
    assert [record[3] for record in entries[2]["records"]] == ["barrier"]


def test_what_is_no_folder_is_refused_and_nothing_is_recorded(tmp_path):
    (tmp_path / "file").touch()
    with kv.create("local") as store:
        for directory, error in ((3, TypeError), ("", ValueError), (tmp_path / "file" / "x", OSError)):
            with pytest.raises(error, match=r"directory|file"):
                store.timeline(directory)
        with pytest.raises(TypeError, match="span: name"):
            store.span(3)
        store.init("w", np.zeros(2))
        assert not store.session.recorder.rings()


@on(SERVED)
def test_a_server_that_cannot_write_is_named(store, tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(at_server, "TimelineFile", fail)
    if store.rank == 0:
        with pytest.raises(MpikvError, match=r"server 0: .*No space left"):
            store.timeline(tmp_path)
        assert not store.session.recorder.on
    store.barrier()
