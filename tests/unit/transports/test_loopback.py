"""What a worker hands over to the server in its process: messages of one tag meet in their order."""

from __future__ import annotations

import numpy as np
from fake_gpus import one_gpu

from mpikv.spaces.device import DeviceSpace
from mpikv.transports.loopback import Loopback

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)


def test_messages_meet_in_their_order() -> None:
    """Whoever comes first, by tags; in the dtype of who receives; nothing is left behind."""
    space, handed = DeviceSpace(one_gpu()[1]), Loopback()
    arrays = [space.from_host(np.full(3, i, F16)) for i in range(4)]
    targets = [space.zeros(3, F32) for _ in range(4)]
    with space.in_stream():  # as whoever holds the engine's lock is
        first, second = handed.send(arrays[0], 7), handed.send(arrays[1], 7)
        other = handed.receive(targets[3], 8)
        assert not any(one.test() for one in (first, second, other))
        came = handed.receive(targets[0], 7)
        assert came.test()
        assert first.test()
        assert not second.test()
        assert handed.receive(targets[1], 7).test()
        assert second.test()
        assert handed.send(arrays[3], 8).test()
        assert other.test()
    assert [space.to_host(one).tolist() for one in targets] == [[0] * 3, [1] * 3, [0] * 3, [3] * 3]
    assert not handed._sent
    assert not handed._asked

    dropped, sent = handed.receive(None, 1), handed.send(arrays[0], 1)  # what nobody wants is thrown away
    assert dropped.test()
    assert sent.test()
