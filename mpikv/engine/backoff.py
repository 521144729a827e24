"""How every wait of the library passes its time: poll a little, then yield the processor, then sleep in growing steps.

There are often more ranks than cores, so nobody spins; and a wait that ends soon is noticed soon.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from mpikv.common.clock import MACHINE_CLOCK, Clock

POLLS = 20  # an 8-byte message between two idle ranks is there within about ten polls
YIELDS = 40  # with more ranks than cores the peer needs our core: hand it over before sleeping
FIRST_NAP_S = 20e-6
NAP_GROWTH = 1.3  # a nap is then about a quarter of the time waited so far: what comes meanwhile is seen so much later
SHORT_NAPS = 2  # after more of them, 200 us, a message was not about to come: it has crossed a link, or a rank is late
LAST_NAP_S = 500e-6  # the price of a long wait is at most this much more
LONG_WAIT = 400  # naps, a fifth of a second, after which they are four times as long: 4 % of a core for a waiting rank
LONGEST_TURN = 0.05


class Backoff:
    """Poll, then yield, then sleep in steps that grow up to `last_nap_s`.

    sleep: sleeps for so many seconds, or less if something comes meanwhile; None: the clock's, which never ends sooner.
    """

    def __init__(
        self,
        last_nap_s: float = LAST_NAP_S,
        sleep: Callable[[float], None] | None = None,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        self._last_nap_s, self._sleep, self._clock, self._turn = last_nap_s, sleep, clock, 0

    def reset(self) -> None:
        """Begin anew, since something has moved.

        Polling comes first again, unless it took several naps until something moved: the next thing will take as long.
        With a `sleep` that ends sooner it always comes first: messages through memory come one close behind the other.
        """
        short = self._turn <= POLLS + YIELDS + SHORT_NAPS or self._sleep is not None
        self._turn = 0 if short else POLLS + YIELDS

    def pause(self) -> None:
        self._turn += 1
        if self._turn <= POLLS:
            return
        if self._turn <= POLLS + YIELDS:
            os.sched_yield()
            return
        longest_s = self._last_nap_s if self._turn < LONG_WAIT else 4 * self._last_nap_s
        if self._sleep is not None:
            longest_s *= 2  # only what rings no waker comes so late
        (self._sleep or self._clock.sleep)(
            min(FIRST_NAP_S * NAP_GROWTH ** min(self._turn - POLLS - YIELDS, 60), longest_s)
        )


def wait_until(
    test: Callable[[], bool],
    step: Callable[[], bool],
    timeout_s: float,
    on_timeout: Callable[[], BaseException],
    *,
    sleep: Callable[[float], None] | None = None,
    clock: Clock = MACHINE_CLOCK,
) -> None:
    """Call `step` until `test` says True; after `timeout_s` seconds raise what `on_timeout` returns. Blocks.

    step: moves things on; says whether anything moved. Each turn counts as at most LONGEST_TURN of the limit: if the
    process, or the whole machine, was stopped for a while, that time was not spent waiting.
    """
    backoff = Backoff(sleep=sleep, clock=clock)
    waited_s, before_s = 0.0, clock.now_s()
    while not test():
        moved = step()
        now_s = clock.now_s()
        waited_s += min(now_s - before_s, LONGEST_TURN * timeout_s)
        before_s = now_s
        if waited_s >= timeout_s and not test():
            raise on_timeout()
        if moved:
            backoff.reset()
        else:
            backoff.pause()
