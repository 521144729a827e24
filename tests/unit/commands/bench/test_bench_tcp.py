"""The sockets of `mpikv bench`: who is let in, and for how long somebody is waited for."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from mpikv.commands.bench.tcp import TOKEN_BYTES, accept, connect
from mpikv.errors import MpikvError

TOKEN = os.urandom(TOKEN_BYTES)


def test_only_who_knows_the_token_is_let_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        address = listener.getsockname()
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        strangers[0].close()
        strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        strangers[2].sendall(TOKEN[:-1] + bytes([TOKEN[-1] ^ 1]))
        ours = stack.enter_context(connect(address, TOKEN))
        accepted = stack.enter_context(accept(listener, TOKEN))
        ours.sendall(b"x")
        assert accepted.recv(10) == b"x"
        strangers[2].settimeout(30)
        assert strangers[2].recv(1) == b""


def test_who_says_nothing_keeps_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        address = listener.getsockname()
        stack.enter_context(socket.create_connection(address))
        made: list[socket.socket] = []
        sender = threading.Thread(target=lambda: made.append(connect(address, TOKEN)))
        sender.start()
        stack.enter_context(accept(listener, TOKEN)).close()
        sender.join()
        made[0].close()


def test_nobody_comes() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(MpikvError, match=r"within 0\.1 s"),
    ):
        accept(listener, TOKEN, 0.1)
