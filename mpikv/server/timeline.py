"""The timeline of a server that is a rank of its own: worker 0 asks it to begin and to end, and what time it is."""

from __future__ import annotations

import json

from mpikv.arrays.as_numpy import HostArray
from mpikv.observe.recorder import Recorder
from mpikv.observe.timeline import TimelineFile, path_of


class ServerTimeline:
    """Of one server. number: which of the servers it is. num_workers: how many it serves."""

    def __init__(self, recorder: Recorder, number: int, num_workers: int) -> None:
        self._recorder, self._about = recorder, {"role": "server", "number": number, "workers": num_workers}
        self._file: TimelineFile | None = None

    def answer(self, payload: HostArray) -> bytes:
        """Do what a request says. payload: JSON; `directory`, where to write, "" to end; none: only say the time."""
        time_ns = round(self._recorder.now_s() * 1e9)
        request, error = json.loads(payload.tobytes()), ""
        if (directory := request.get("directory")) is not None:
            self.end()
            about = {**self._about, **request["about"]}
            try:
                self._file = TimelineFile(path_of(directory, about), self._recorder, about) if directory else None
            except OSError as failed:
                error = str(failed)
        return json.dumps({"time_ns": time_ns, "error": error}).encode()

    def end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.end()
