"""One page of a headless Chromium, driven through a pipe by the DevTools protocol, with nothing but Python's library.

The browser has a home of its own, which is removed together with it, finds no host but 127.0.0.1, and asks no one for
updates. What fails raises SystemExit with a sentence for the user: no browser, a script that throws, the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-breakpad", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
)
ON_3_AND_4 = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null'  # the descriptors on which it listens and answers


@contextlib.contextmanager
def page(url: str, limit_s: float) -> Iterator[Page]:
    """A page that shows `url`; all that is done with it may take `limit_s` together."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise SystemExit("no Chromium is installed: apt-get install chromium")
    flags = [*FLAGS, "--no-sandbox"] if os.geteuid() == 0 else FLAGS  # root can have no sandbox
    # In /tmp, since it puts a socket there, whose path has 107 characters at most.
    folder = tempfile.TemporaryDirectory(dir="/tmp", prefix=f"chromium-{os.getpid()}-")
    with folder as home, Path(home, "stderr").open("w+") as errors:
        process = subprocess.Popen(
            ["sh", "-c", ON_3_AND_4, "sh", program, *flags, f"--user-data-dir={home}", "about:blank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env={**os.environ, "HOME": home, "TMPDIR": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home},
            start_new_session=True,  # so that its children are ended with it
        )
        try:
            yield Page(process, errors, time.monotonic() + limit_s, url)
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill it with its children, and wait until all are gone: they would write into its home while that is removed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        for _ in range(250):
            os.killpg(process.pid, 0)
            time.sleep(0.02)


class Page:
    """What is shown, and what runs there."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[str], deadline_s: float, url: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to, self._answers, self._errors, self._deadline_s = process.stdin, process.stdout, errors, deadline_s
        self._calls, self._received = 0, b""
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params: Any) -> Any:
        """What the browser answers."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params, **self._session}
        with contextlib.suppress(BrokenPipeError):  # that it has ended is said below
            self._to.write(json.dumps(message).encode() + b"\0")
        while (answer := json.loads(self._next(method))).get("id") != self._calls:
            pass  # an event
        if "error" in answer:
            raise SystemExit(f"the browser refused {method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self, waiting_for: str) -> bytes:
        """One message."""
        while b"\0" not in self._received:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise SystemExit(f"the time was up before the browser had answered {waiting_for}")
            if not (some := os.read(self._answers.fileno(), 1 << 20)):
                self._errors.seek(0)
                raise SystemExit(f"the browser has ended: {self._errors.read().strip()[-500:]}")
            self._received += some
        message, _, self._received = self._received.partition(b"\0")
        return message

    def run(self, script: str) -> Any:
        """The value of JavaScript, awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise SystemExit(f"the page failed: {done['exceptionDetails'].get('exception', {}).get('description')}")
        return done["result"].get("value")
