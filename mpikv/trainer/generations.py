"""Snapshots of a training: what it goes on from where a rank or a host dies, and the job is started again.

Every worker writes its share of a snapshot into a folder of its host's own disk, and hands it to a worker of the next
host, which writes it, too: so the loss of a host loses none, and no disk is shared; one may be. A share is an archive
(optimizers/archive.py). It is copied between two steps, and written by a thread while the training goes on, whole or
not at all; the names of the files (common/snapshot_names.py) tell whether all shares of a snapshot are there.

The last whole snapshot stays until the next one is whole, which is known when the one after that begins: a folder has
two generations, and a third one while that is written. In an asynchronous store, whose workers share no steps, worker 0
alone takes snapshots, of everything.

Cost: on the way of the training a copy of the share and its checksum, three small agreements, and between hosts one
message of the share's size; memory for the share, and for that of the host before.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpikv.common.checks import plain, shown
from mpikv.common.files import open_regular, replacing
from mpikv.common.snapshot_names import ShareName, in_folder, parse, whole
from mpikv.errors import ConfigError, StatesFileError, UnsupportedError
from mpikv.observe.program import this_process
from mpikv.observe.stall import say
from mpikv.optimizers import archive
from mpikv.runtime import abort
from mpikv.session.base import Session
from mpikv.strategies.states import archived, opened
from mpikv.trainer.cadence import Cadence

KIND_OF_FILES = "mpikv files of snapshots"
CALL = "snapshot"


class Generations:
    """One worker's end of the snapshots of a training.

    share: makes this worker's share, a content of an archive; collective, but in an asynchronous store. Raises
    ConfigError where the folder cannot be used. Local.
    """

    def __init__(self, session: Session, share: Callable[[], Mapping[str, Any]], every_s: float, folder: str) -> None:
        self._session, self._share, self._folder = session, share, folder
        self._alone = not session.synchronous
        self._cadence = Cadence(every_s, time.monotonic())
        self._last = self._whole = ""  # ids of the snapshot that was begun last, and of the last one that is whole
        self._error = ""  # of writing the last one
        self._generation = session.generation  # of the workers that have written it
        self._begun = self._warned = False
        self._writing: threading.Thread | None = None
        _make(folder)
        session.after_close.append(self._wait)
        self._steps = steps = [0]
        if (guard := abort.guard()) is not None:
            guard.step = lambda: steps[0]  # which keeps nothing else of this training

    # --- taking them

    def step(self, steps: int) -> None:
        """Take a snapshot if it is time. steps: how many were made. Collective, but in an asynchronous store."""
        if not self._begun and not self._last and self._session.rank == 0 and (old := whole(in_folder(self._folder))):
            say(f"mpikv: warning: a snapshot of step {old[0].step} is in {self._folder}, and this program begins anew: "
                "call resume() before the first step")  # fmt: skip
        self._begun = True
        self._steps[0] = steps
        if (self._alone and self._session.rank) or not self._cadence.ask():
            return

        def decide() -> list[int]:
            due, ask_in = self._cadence.decide(time.monotonic())
            return [due, ask_in]

        due, ask_in = decide() if self._alone else self._session.decide(CALL, decide)
        if due:
            self.take(steps)
        self._cadence.decided(bool(due), ask_in, time.monotonic())

    @property
    def ids(self) -> list[str]:
        """What a new worker needs, for `join`."""
        return [self._last, self._whole]

    def join(self, ids: Sequence[str] = ()) -> None:
        """Ask in the next step, as all others do, since a new worker is there. ids: at that one, another's. Local."""
        self._cadence.ask_next()
        if ids:
            self._last, self._whole = ids

    def take(self, steps: int) -> None:
        """Take a snapshot now. Collective, but in an asynchronous store; blocks until the shares are copied.

        steps: how many were made. Raises UnsupportedError on all workers where one of them cannot give its share.
        """
        take = partial(self._take, steps)
        take() if self._alone else self._session.whole(CALL, take)

    def _take(self, steps: int) -> None:
        data, error = archived(self._share)
        self._wait()
        workers = 1 if self._alone else self._session.num_workers
        self._last, self._whole = self._agree([error, self._error])
        name = ShareName(steps, self._last, self._session.rank, workers)
        files = {str(name): data}
        if workers > 1 and len({*self._session.hosts}) > 1:
            for worker, other in self._session.swap(CALL, data, _next_hosts(self._session)).items():
                files[str(name._replace(worker=worker))] = other
        self._error = ""
        writes = [files, self._last, self._whole]
        self._writing = threading.Thread(target=self._write, args=writes, name="mpikv-snapshot")
        self._writing.start()

    def _wait(self) -> None:
        """Wait until this worker has written its files."""
        if self._writing is not None:
            self._writing.join()

    def finish(self) -> None:
        """Wait until all workers have written the last snapshot. Collective. Raises OSError where one could not."""
        self._wait()

        def check(gathered: Sequence[bytes]) -> None:
            for worker, text in enumerate(gathered):
                if text:
                    raise OSError(f"worker {worker} could not write its share of a snapshot: {text.decode()}")

        self._session.at_first(CALL, self._error.encode, check)

    def _agree(self, errors: list[str]) -> tuple[str, str]:
        """The ids of the snapshot that begins, and of the last one that all workers have written. Collective."""
        session = self._session
        mine = json.dumps(errors).encode()
        gathered = [mine] if self._alone else session.gather(CALL, mine)

        def begin() -> list[str]:
            listed = [json.loads(one) for one in gathered]
            for worker, (of_share, of_file) in enumerate(listed):
                if of_share:
                    raise UnsupportedError(f"snapshot: worker {worker}: {of_share}")
                if of_file and not self._warned:
                    self._warned = True
                    say(f"mpikv: warning: worker {worker} could not write its share of a snapshot: {of_file}")
            # The share of a worker that has died since then may be missing.
            failed = any(of_file for _, of_file in listed) or session.generation != self._generation
            return [
                f"{int(self._last[:8] or '0', 16) + 1:08x}{secrets.token_hex(4)}",
                self._whole if failed else self._last,
            ]

        last, before = begin() if self._alone else session.decide(CALL, begin)
        self._generation = session.generation
        return last, before

    def _write(self, files: Mapping[str, bytes], last: str, before: str) -> None:
        """Write files, after those that nobody needs any more have made room. In a thread."""
        try:
            for name in in_folder(self._folder):
                if name.snapshot not in (last, before):
                    self._remove(str(name))
            for one, data in files.items():
                with replacing(os.path.join(self._folder, one)) as file:
                    file.write(data)
        except OSError as error:
            self._error = plain(f"{error} at {this_process().host}")

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another worker of this host has removed it
            os.remove(os.path.join(self._folder, name))

    # --- going on from one

    def read(self) -> list[dict[str, Any]] | None:
        """The shares of the newest whole snapshot, at worker 0, [] elsewhere; None where there is none.

        One that is damaged is passed over, with a line that says so. Collective, blocks.
        """
        return self._session.whole(CALL, self._read)

    def _read(self) -> list[dict[str, Any]] | None:
        session, wrong = self._session, set[tuple[int, str]]()
        for name in os.listdir(self._folder):
            if name.startswith(".mpikv-") and name.endswith(".tmp"):  # of a writer that was killed
                self._remove(name)
        while True:
            listed = session.gather(CALL, json.dumps([str(name) for name in in_folder(self._folder)]).encode())
            readers = session.decide(CALL, partial(_readers, listed, wrong))
            if readers is None:
                return None
            gathered = session.gather(CALL, self._bring([name for worker, name in readers if worker == session.rank]))
            shares: list[dict[str, Any]] = []
            if session.decide(CALL, partial(_open, readers, gathered, wrong, shares)):
                first = parse(readers[0][1])
                assert first is not None
                self._last = self._whole = first.snapshot
                self._steps[0] = first.step
                return shares

    def _bring(self, names: Sequence[str]) -> bytes:
        """Files of this host, as bytes that can be sent."""
        data, error = {}, ""
        try:
            for name in names:
                with open_regular(os.path.join(self._folder, name)) as file:
                    data[name] = np.frombuffer(file.read(), np.uint8)
        except OSError as raised:
            error = str(raised)
        return archive.to_bytes(KIND_OF_FILES, {"files": data, "error": error})


def _open(
    readers: Sequence[tuple[int, str]],
    gathered: Sequence[bytes],
    wrong: set[tuple[int, str]],
    shares: list[dict[str, Any]],
) -> bool:
    """Add the content of each share to `shares`. False where one is damaged, which is added to `wrong`."""
    brought = [archive.from_bytes(one, KIND_OF_FILES, "files of a snapshot") for one in gathered]
    for worker, name in readers:
        try:
            content = brought[worker]["files"].get(name)
            if content is None:
                raise OSError(brought[worker]["error"])
            shares.append(opened(worker, content.tobytes(), name))
        except (OSError, StatesFileError) as error:
            wrong.add((worker, name))
            say(f"mpikv: warning: a share of a snapshot cannot be used, at worker {worker}: {error}")
            return False
    return True


def _readers(listed: Sequence[bytes], wrong: set[tuple[int, str]]) -> list[tuple[int, str]] | None:
    """Who reads which file: for each share of the newest whole snapshot a worker with it on its disk.

    listed: the files of each worker's folder, in JSON. wrong: workers and files that are of no use.
    """
    holders: dict[ShareName, int] = {}
    for worker, names in enumerate(listed):
        for name in json.loads(names):
            if (found := parse(name)) is not None and (worker, name) not in wrong:
                holders.setdefault(found, worker)
    newest = whole(holders)
    if not newest:
        return None
    shares = [newest[0]._replace(worker=worker) for worker in range(newest[0].workers)]
    return [(holders[share], str(share)) for share in shares]


def _next_hosts(session: Session) -> list[int]:
    """For each worker one of the next host, in the order of hosts; the workers of one host choose different ones."""
    by_host: dict[str, list[int]] = {}
    for worker, host in enumerate(session.hosts):
        by_host.setdefault(host, []).append(worker)
    hosts, counts, found = [*by_host], Counter[str](), []
    for host in session.hosts:
        there = by_host[hosts[(hosts.index(host) + 1) % len(hosts)]]
        found.append(there[counts[host] % len(there)])
        counts[host] += 1
    return found


def _make(folder: str) -> None:
    """Make the folder, for this user alone. Raises ConfigError where that is not possible."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        owner = os.stat(folder).st_uid
    except OSError as error:
        raise ConfigError(f"MPIKV_SNAPSHOT_DIR={shown(folder)}: {error.strerror}") from None
    if owner not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise ConfigError(f"MPIKV_SNAPSHOT_DIR={shown(folder)} is of another user")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"MPIKV_SNAPSHOT_DIR={shown(folder)}: cannot be written at {this_process().host}")
