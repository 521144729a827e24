"""One sentence that says what to do: of all that time is lost by, what costs most and can be helped. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from mpikv.commands.trace.analysis import Analysis
from mpikv.commands.trace.files import Rank

WORTH = 0.05  # of the time: less is not worth a change
SMALL_BYTES, MANY_KEYS = 4096, 50
LARGE_BYTES = 1 << 16  # of a key whose bytes cost more than its messages
CUT_BYTES = 4_000_000  # of a float32 key that MPIKV_BIGARRAY_BOUND lets several servers share
BUSY = 0.7  # of a server's time: requests wait for each other from there on
HIDDEN = 0.5  # of what is sent: less is little

Finding = tuple[float, str]  # the share of the workers' time that it costs, and what to say of it
NOTHING: Finding = 0.0, ""


def advice(ranks: Sequence[Rank], analysis: Analysis) -> str:
    if not any(worker.whole for worker in analysis.workers.values()):
        return "nothing was pushed while these timelines were written"
    coding = _share(analysis, "coding")
    text = f"encoding and decoding take {coding:.0%} of the time: a cheaper codec, such as fp16, or none"
    found = (_late(ranks, analysis), _small(analysis), (coding, text), _servers(analysis), _sent(ranks, analysis))
    share, text = max(found, key=lambda one: one[0])
    if share >= WORTH:
        return text
    return f"computing takes {_share(analysis, 'computing'):.0%} of the time: nothing in the store is worth a change"


def slowest_of(analysis: Analysis) -> tuple[int, float] | None:
    """The worker for which the others wait longest, and how many microseconds each of them does in a round."""
    waits = sum((Counter(worker.waiting) for worker in analysis.workers.values()), Counter[int]())
    if not waits:
        return None
    ((rank, waited_us),) = waits.most_common(1)
    return rank, waited_us / max(1, len(analysis.workers) - 1) / max(1, analysis.steps)


def _share(analysis: Analysis, part: str) -> float:
    workers = analysis.workers.values()
    return float(sum(getattr(worker, part) for worker in workers) / sum(worker.whole for worker in workers))


def _late(ranks: Sequence[Rank], analysis: Analysis) -> Finding:
    slowest = slowest_of(analysis)
    others = [worker for rank, worker in analysis.workers.items() if slowest is not None and rank != slowest[0]]
    if slowest is None or not sum(worker.whole for worker in others):
        return NOTHING
    rank = slowest[0]
    share = sum(worker.waiting.get(rank, 0.0) for worker in others) / sum(worker.whole for worker in others)
    usual = statistics.median(worker.computing for worker in others)
    longer = analysis.workers[rank].computing / usual - 1 if usual else 0.0
    why = "comes later than the others"
    if longer > WORTH:
        how_long = f"{1 + longer:.1f} times as long as" if longer > 1 else f"{longer:.0%} longer than"
        why = f"computes {how_long} the others"
    text = f"{ranks[rank].name} {why}, which wait {share:.0%} of their time for it: give it less work"
    return share, f"{text}, or look what else its host does"


def _small(analysis: Analysis) -> Finding:
    sizes = [cost.n_bytes for cost in analysis.keys.values()]
    if len(sizes) < MANY_KEYS or statistics.median(sizes) > SMALL_BYTES:
        return NOTHING
    share = _share(analysis, "sending") + _share(analysis, "other")
    text = f"{len(sizes):,} keys of about {round(statistics.median(sizes))} bytes cost {share:.0%} of the time"
    return share, f"{text}: push them as one list, as a Trainer does"


def _servers(analysis: Analysis) -> Finding:
    busy = max(analysis.servers.values(), default=0.0)
    if busy <= BUSY:
        return NOTHING
    share, keys = _share(analysis, "sending"), analysis.keys.values()
    todo = "more servers (MPIKV_NUM_SERVERS)"
    if len(keys) <= len(analysis.servers) and all(cost.n_bytes < CUT_BYTES for cost in keys):
        # Another server would have nothing to do.
        todo = "the keys are too few and too short for more servers; let the workers add them up (no servers)"
    text = f"servers are busy for {busy:.0%} of their time, and workers wait {share:.0%} of theirs for answers"
    return share + 1e-9, f"{text}: {todo}"  # rather than `_sent`, which finds the same time


def _sent(ranks: Sequence[Rank], analysis: Analysis) -> Finding:
    share, moving = _share(analysis, "sending"), _share(analysis, "moving")
    hidden = _share(analysis, "hidden") / moving if moving else 0.0
    lost = f"workers wait {share:.0%} of the time for what is sent"
    large = [key for key, cost in analysis.keys.items() if cost.n_bytes >= LARGE_BYTES and not cost.coded]
    if len({rank.header["host"] for rank in ranks}) > 1 and large:
        names = ", ".join(large[:3]) + (", ..." if len(large) > 3 else "")
        return share, f"{lost}: {names} go uncompressed over a link that is full (set_gradient_compression)"
    meanwhile = f"{hidden:.0%} of that goes on while they compute"
    if hidden < HIDDEN:
        todo = "push each gradient as soon as it is there (pushpull_async, DistributedModel)"
        return share, f"{lost}, and {meanwhile}: {todo}"
    return share, f"{lost}, though {meanwhile}: larger batches"
