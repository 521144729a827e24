"""What a message, a byte, an addition and a copy cost on this machine: its `Costs`.

A message's path through Python and MPI is measured with the real stages of a collective, whose one rank sends to
itself; its path through the kernel with a TCP connection over the loopback, in processor time. Each for two lengths,
which gives the cost of a message and that of a byte. One message is sent and received, so that each side is half of it.
All is done segment by segment over arrays that no cache holds, as gradients are.

Cost: about two seconds. Needs MPI. Restrictions: a network card's interrupts are not in it, and the loopback copies in
the sender's time what a card would fetch by itself.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np

from mpikv.codecs import speed
from mpikv.codecs.base import Codec
from mpikv.codecs.speed import Speed
from mpikv.collectives.stages import LINK_WINDOW, Receiver, Sender, drive
from mpikv.engine.running import run
from mpikv.errors import ConfigError, StallError
from mpikv.placement.costs import Costs
from mpikv.placement.links import LINK_SEGMENT_BYTES
from mpikv.runtime import library
from mpikv.transports.base import Group, Transport

SHORT_BYTES = 1 << 10
MESSAGES = 1000
MEMORY_BYTES = MESSAGES * LINK_SEGMENT_BYTES  # 60 MB
TURNS = 7
CODED_ELEMS, PIECE_ELEMS = 1 << 21, 1 << 18  # 8 MiB of values, of which a message has 1 MiB
TIMEOUT_S = 60.0
TAG = 9


def measured() -> Costs:
    """Measure the costs of this machine's cores. Raises ConfigError where there is no MPI."""
    library.prepare()
    try:
        from mpi4py import MPI  # noqa: PLC0415 - it initialises MPI

        from mpikv.transports.mpi import open_transport  # noqa: PLC0415
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"--calibrate needs MPI: {error}") from None
    transport = open_transport(MPI.COMM_SELF, TIMEOUT_S, lambda: StallError("MPI does not start"))
    mpi_message_s, mpi_byte_s = _line(lambda n_bytes: _through_mpi(transport, n_bytes))
    tcp_message_s, tcp_byte_s = _line(_through_kernel)
    transport.close()
    one, other = np.ones(MEMORY_BYTES // 4, np.float32), np.ones(MEMORY_BYTES // 4, np.float32)
    pieces = [slice(at, at + LINK_SEGMENT_BYTES // 4) for at in range(0, one.size, LINK_SEGMENT_BYTES // 4)]

    def add() -> None:
        for piece in pieces:
            np.add(one[piece], other[piece], out=one[piece])

    def copy() -> None:
        for piece in pieces:
            one[piece] = other[piece]

    return Costs(
        message_s=(mpi_message_s + tcp_message_s) / 2,
        byte_s=(mpi_byte_s + tcp_byte_s) / 2,
        add_byte_s=_each(add) / MEMORY_BYTES,
        copy_byte_s=_each(copy) / MEMORY_BYTES,
    )


def speed_of(codec: Codec) -> Speed:
    """Measure what a codec costs this machine's cores, piece by piece, with what it remembers. Needs no MPI."""
    row = codec.row_elems
    n_elems = row * max(row, PIECE_ELEMS // row)
    return speed.speed_of(codec, n_elems, max(1, -(-CODED_ELEMS // n_elems)), TURNS)


def _line(seconds: Callable[[int], float]) -> tuple[float, float]:
    """Return the time of an empty message, and that of a byte, from the times of a short and of a long message."""
    short_s, long_s = seconds(SHORT_BYTES), seconds(LINK_SEGMENT_BYTES)
    byte_s = max(0.0, (long_s - short_s) / (LINK_SEGMENT_BYTES - SHORT_BYTES))
    return max(0.0, short_s - byte_s * SHORT_BYTES), byte_s


def _each(what: Callable[[], object]) -> float:
    return speed.processor_s(what, TURNS)


def _through_mpi(transport: Transport, n_bytes: int) -> float:
    """Return the seconds of one message from this rank to itself."""
    group = Group(transport, [0])
    outgoing, incoming = np.ones(MEMORY_BYTES, np.uint8), np.ones(MEMORY_BYTES, np.uint8)
    pieces = [slice(i * n_bytes, (i + 1) * n_bytes) for i in range(MESSAGES)]

    def exchange() -> None:
        receiver = Receiver(group, [(0, incoming[piece]) for piece in pieces], TAG, LINK_WINDOW)
        sender = Sender(group, [(0, outgoing[piece]) for piece in pieces], TAG, LINK_WINDOW, lambda: MESSAGES)
        run(drive(receiver, sender), TIMEOUT_S, lambda: StallError("a message to this rank itself does not come"))

    exchange()
    return _each(exchange) / MESSAGES


def _through_kernel(n_bytes: int) -> float:
    """Return the processor seconds of one message through TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        into, _ = server.accept()
    data, buffer = memoryview(bytearray(MEMORY_BYTES)), memoryview(bytearray(MEMORY_BYTES))

    def send_all() -> None:
        for at in range(0, MESSAGES * n_bytes, n_bytes):
            out.sendall(data[at : at + n_bytes])
            into.recv_into(buffer[at : at + n_bytes], n_bytes, socket.MSG_WAITALL)

    with out, into:
        return _each(send_all) / MESSAGES
