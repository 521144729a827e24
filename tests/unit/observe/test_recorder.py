"""Records of threads, and the file that they are written to."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from virtual_clock import VirtualClock

from mpikv.observe import recorder as recording
from mpikv.observe import timeline
from mpikv.observe.recorder import Recorder
from mpikv.observe.timeline import TimelineFile

ABOUT = {"store": "s", "type": "dist_sync", "role": "worker", "number": 0, "workers": 1}


def lines(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in open(path)]


def test_parts_follow_each_other_by_the_recorders_clock():
    clock = VirtualClock()
    recorder = Recorder(clock)
    part = recorder.begin("w", 3, 8)
    clock.advance(1.0, lookers=0)
    part.done("reduce-scatter")
    clock.advance(0.5, lookers=0)
    part.done("update")
    (ring,) = recorder.rings()
    assert ring.take() == [("reduce-scatter", 0.0, 1.0, "w", 3, 8), ("update", 1.0, 1.5, "w", 3, 8)]
    assert ring.take() == []


def test_each_thread_has_a_ring_with_its_name():
    recorder = Recorder()
    recorder.begin("here").done("call")
    thread = threading.Thread(target=lambda: recorder.begin("there").done("call"), name="another")
    thread.start()
    thread.join()
    assert {ring.thread: ring.take()[0][3] for ring in recorder.rings()} == {
        threading.current_thread().name: "here",
        "another": "there",
    }


def test_a_file_has_what_was_recorded_while_it_was_open_and_says_whose_it_is(tmp_path):
    recorder, path = Recorder(), tmp_path / "new" / "t.jsonl"
    recorder.begin("before").done("call")
    file = TimelineFile(str(path), recorder, ABOUT)
    assert recorder.on
    recorder.begin(("a", "text", 1), 2, 8).done("call")
    file.end()
    file.end()
    assert not recorder.on
    again = TimelineFile(str(path), recorder, ABOUT)
    recorder.begin(["w", 1]).done("update")
    again.end()
    first, some, second, others = lines(path)
    assert first["format"] == second["format"] == timeline.FORMAT
    assert ABOUT.items() <= first.items()
    ((kind, begun_ns, ended_ns, *about),) = some["records"]
    assert (kind, about, some["lost"]) == ("call", ["('a', 'text', 1)", 2, 8], 0)
    assert first["begun_ns"] <= begun_ns <= ended_ns
    assert [record[3] for record in others["records"]] == [["w", 1]]


def test_records_that_nobody_took_in_time_are_counted_as_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "KEPT", 10)
    monkeypatch.setattr(timeline, "EVERY_S", 1e6)
    recorder, path = Recorder(), tmp_path / "t.jsonl"
    recorder.begin("before").done("call")
    file = TimelineFile(str(path), recorder, ABOUT)
    for i in range(25):
        recorder.begin(i).done("call")
    file.end()
    (some,) = lines(path)[1:]
    assert [record[3] for record in some["records"]] == [*range(15, 25)]
    assert some["lost"] == 15


def test_a_disk_that_is_full_ends_the_timeline_and_nothing_else(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(timeline, "EVERY_S", 1e-3)
    recorder = Recorder()
    file = TimelineFile(str(tmp_path / "t.jsonl"), recorder, ABOUT)
    file._file.close()
    file._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - closed by the garbage collector
    recorder.begin("w").done("call")
    file._writing.join(30)
    assert not recorder.on
    recorder.begin("w").done("call")
    file.end()
    assert capfd.readouterr().err.count("No space left on device: the timeline ends here") == 1


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").touch()
    recorder = Recorder()
    with pytest.raises(OSError, match="file"):
        TimelineFile(str(tmp_path / "file" / "t.jsonl"), recorder, ABOUT)
    assert not recorder.on


def test_a_file_does_not_grow_for_ever(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(timeline, "MOST_BYTES", 400)
    monkeypatch.setattr(timeline, "EVERY_S", 1e-3)
    recorder, path = Recorder(), tmp_path / "t.jsonl"
    file = TimelineFile(str(path), recorder, ABOUT)
    while recorder.on:
        recorder.begin("w").done("call")
    file._writing.join(30)
    file.end()
    assert path.stat().st_size <= 400
    assert lines(path)[0]["format"] == timeline.FORMAT  # and no line is cut
    assert capfd.readouterr().err.count("bytes, and may have 400: the timeline ends here") == 1
