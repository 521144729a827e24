"""Pieces that a server asks for: none leaves too early, but the first ones, and all leave in order."""

from __future__ import annotations

import numpy as np

from mpikv.strategies.offered_pieces import AHEAD, OfferedPieces

FIRST, SECOND = 7, 8


class Sent:
    """A request that is done when `done` is set."""

    def __init__(self) -> None:
        self.done = False

    def test(self) -> bool:
        return self.done


def offered(n_pieces):
    """Pieces offered under two tags; what has been sent of them."""
    sent = []

    def start(data, tag):
        sent.append((tag, int(data[0]), request := Sent()))
        return request

    pieces = OfferedPieces(start)
    requests = {tag: [pieces.add(np.array([i]), tag) for i in range(n_pieces)] for tag in (FIRST, SECOND)}
    return pieces, requests, sent


def left(sent):
    return [(tag, piece) for tag, piece, _ in sent]


def test_the_first_pieces_of_the_first_push_leave_unasked_and_no_others():
    _, _, sent = offered(AHEAD + 3)
    assert left(sent) == [(FIRST, i) for i in range(AHEAD)]


def test_each_piece_leaves_once_in_the_order_of_its_tag():
    pieces, _, sent = offered(AHEAD + 2)
    pieces.send(SECOND, 1)
    pieces.send(FIRST, AHEAD + 1)
    pieces.send(SECOND, AHEAD + 1)
    pieces.send(FIRST, 1)
    ahead = [(FIRST, i) for i in range(AHEAD)]
    asked = [(SECOND, 0), (FIRST, AHEAD), *[(SECOND, i) for i in range(1, AHEAD + 2)], (FIRST, AHEAD + 1)]
    assert left(sent) == ahead + asked


def test_a_piece_is_done_when_it_has_been_sent():
    pieces, requests, sent = offered(AHEAD + 1)
    last = requests[FIRST][AHEAD]
    assert not last.test()
    pieces.send(FIRST, AHEAD + 1)
    assert not last.test()
    sent[-1][2].done = True
    assert last.test()


def test_the_next_push_has_pieces_ahead_once_all_before_were_asked_for():
    pieces, _, sent = offered(1)
    assert left(sent) == [(FIRST, 0)]
    pieces.send(FIRST, 1)
    pieces.add(np.array([5]), FIRST)
    assert left(sent) == [(FIRST, 0)]  # SECOND has not been asked for
    pieces.send(SECOND, 1)
    pieces.send(FIRST, 1)
    pieces.add(np.array([6]), FIRST)
    assert left(sent) == [(FIRST, 0), (SECOND, 0), (FIRST, 5), (FIRST, 6)]
