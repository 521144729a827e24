"""Code in a process of its own, as `python -c CODE WORDS`, in a tenth of the time: forked from one that has imported.

    done = fresh.python("from mpikv import kv; kv.create('dist_sync')", MPIKV_TIMEOUT_S="ten")
    assert (done.returncode, done.stdout) == (2, "")

The process that forks has NumPy and the commands of mpikv imported, no MPI, and no thread but its own. It lives as long
as the process of the tests. A test of what an import does starts an interpreter.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120.0
LONGEST_BYTES = 1 << 18
# What a launcher, a scheduler or a developer has set, which a process that is started alone does not see.
FOREIGN = ("OMPI_", "PMI", "SLURM_", "MPIKV_", "MPI4PY_", "UCX_", "FI_")
_forking: list[tuple[subprocess.Popen[bytes], socket.socket]] = []  # one, from the first call on


def python(
    code: str, *words: str, cwd: Path | str = ROOT, before: dict[str, str] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `code` with `words` as its arguments. before: the environment that `env` changes, default this one's own."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    asked = {"code": code, "words": words, "cwd": str(cwd), "env": {**(before or clean), **env}}
    if not _forking:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line = [sys.executable, __file__, str(its.fileno())]
        process = subprocess.Popen(line, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
        its.close()
        ours.settimeout(LIMIT_S)
        _forking.append((process, ours))
    process, connection = _forking[0]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            socket.send_fds(connection, [json.dumps(asked).encode()], [out.fileno(), err.fileno()])
            status = int(connection.recv(LONGEST_BYTES))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            _forking.clear()
            raise
        texts = [os.pread(one.fileno(), LONGEST_BYTES, 0).decode(errors="replace") for one in (out, err)]
    return subprocess.CompletedProcess([code, *words], status, *texts)


def wait_for_code(connection: socket.socket) -> str:
    """Fork for each request. Returns in the child, the code that it is to run; in the parent never."""
    while True:
        data, files, *_ = socket.recv_fds(connection, LONGEST_BYTES, 2)
        if not data:
            sys.exit()
        asked = json.loads(data)
        if (pid := os.fork()) == 0:
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
                os.close(file)
            connection.close()
            os.environ.clear()
            os.environ.update(asked["env"])
            os.chdir(asked["cwd"])
            sys.argv[:] = ["-c", *asked["words"]]
            return str(asked["code"])
        for file in files:
            os.close(file)
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    import mpikv.__main__
    import mpikv.commands.info
    import mpikv.commands.launch.submit
    import mpikv.kv  # noqa: F401

    gc.freeze()  # a child's end looks through its own objects alone
    exec(compile(wait_for_code(socket.socket(fileno=int(sys.argv[1]))), "<string>", "exec"), {"__name__": "__main__"})
