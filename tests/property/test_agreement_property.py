"""The agreement under every interleaving: no deadlock, one final verdict per proposal, the same for all."""

from __future__ import annotations

from collections import defaultdict

from grids import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv.errors import ShapeMismatch
from mpikv.session.agreement import Agreement, Disagreement

KEYS = ["a", "b", "c", "d"]
BARRIER, CLOSE = [("barrier", 1, None)], [("close", 1, None)]
ROUND = [("round", 1, None)]


def equal(name, payloads, labels):
    if len(set(payloads)) > 1:
        raise Disagreement(ShapeMismatch, f"{name} differs")
    return payloads[0]


class Job:
    """Workers that make their calls one after another; a call is a list of proposals and waits for all of them.

    The call ROUND stands for a blocking pushpull: it ends when all workers are in it, and the agreement knows
    nothing of it.
    """

    def __init__(self, calls):
        self.agreement = Agreement(
            [f"worker {i}" for i in range(len(calls))],
            {"init": equal},
            lambda name, payload: ["reserved", name, payload],
        )
        self.calls = [list(reversed(one)) for one in calls]
        self.waiting = [set() for _ in calls]
        self.replies = [defaultdict(list) for _ in calls]  # item -> verdicts
        self.proposed = [[] for _ in calls]

    def ready(self):
        return [worker for worker, calls in enumerate(self.calls) if calls and not self.waiting[worker]]

    def step(self, worker):
        items = self.calls[worker].pop()
        if items == ROUND:
            self.waiting[worker].add("round")
            if all("round" in waiting for waiting in self.waiting):
                self.waiting = [set() for _ in self.waiting]
            return
        self.proposed[worker] += [(topic, name) for topic, name, _ in items]
        self.waiting[worker] |= {(topic, name) for topic, name, _ in items}
        for verdict in self.agreement.propose(worker, items):
            item = (verdict.topic, verdict.name)
            self.replies[verdict.worker][item].append(verdict)
            self.waiting[verdict.worker].discard(item)

    def run(self, data):
        while ready := self.ready():
            self.step(data.draw(st.sampled_from(ready)) if len(ready) > 1 else ready[0])


def orders(workers, extra=()):
    """Each worker initialises the keys in an order of its own, some of them in lists."""

    @st.composite
    def build(draw):
        calls = []
        for _ in range(workers):
            order = draw(st.permutations(KEYS))
            cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1))))
            pieces = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
            calls.append([[("init", key, "same") for key in piece] for piece in pieces] + [list(one) for one in extra])
        return calls

    return build()


@settings(max_examples=examples(200))
@given(st.integers(1, 4), st.sampled_from([[BARRIER, CLOSE], [ROUND, CLOSE], [CLOSE], []]), st.data())
def test_inits_in_any_order_never_hang(workers, extra, data):
    job = Job(data.draw(orders(workers, extra)))
    job.run(data)
    for worker in range(workers):
        assert not job.waiting[worker], f"worker {worker} waits for ever for {job.waiting[worker]}"
        assert not job.calls[worker]
        for item in job.proposed[worker]:
            replies = job.replies[worker][item]
            finals = [verdict for verdict in replies if verdict.final]
            assert len(finals) == 1
            assert replies[-1] is finals[0]
            assert len(replies) <= 2
            assert all(verdict.error is None for verdict in replies)
            assert len({str(verdict.result) for verdict in replies}) == 1  # the provisional one promised the same
    for key in KEYS:
        results = {str(job.replies[worker]["init", key][-1].result) for worker in range(workers)}
        assert results == {str(["reserved", key, "same"])}


@settings(max_examples=examples(100))
@given(st.integers(2, 4).flatmap(lambda w: orders(w, [BARRIER])), st.data())
def test_a_key_that_differs_is_an_error_for_all_and_stops_nothing(calls, data):
    odd = data.draw(st.integers(0, len(calls) - 1))
    bad = data.draw(st.sampled_from(KEYS))
    calls[odd] = [[(t, name, "odd" if name == bad else payload) for t, name, payload in call] for call in calls[odd]]
    job = Job(calls)
    job.run(data)
    for worker in range(len(calls)):
        assert not job.waiting[worker]
        for key in KEYS:
            last = job.replies[worker]["init", key][-1]
            assert last.final
            assert (last.error is not None) == (key == bad)
        assert job.replies[worker]["barrier", 1][-1].error is None


@settings(max_examples=examples(100))
@given(st.integers(2, 4).flatmap(lambda w: orders(w, [CLOSE])), st.data())
def test_a_worker_that_closes_early_hangs_nobody(calls, data):
    early = data.draw(st.integers(0, len(calls) - 1))
    keep = data.draw(st.integers(0, len(calls[early]) - 1))
    calls[early] = [*calls[early][:keep], calls[early][-1]]
    job = Job(calls)
    job.run(data)
    for worker in range(len(calls)):
        assert not job.waiting[worker]
        for item in job.proposed[worker]:
            finals = [verdict for verdict in job.replies[worker][item] if verdict.final]
            assert len(finals) == 1, item
        assert job.replies[worker]["close", 1][-1].error is None


@settings(max_examples=examples(100))
@given(
    st.lists(st.lists(st.sampled_from(["init a", "init b", "barrier"]), max_size=4), min_size=2, max_size=3), st.data()
)
def test_programs_that_do_not_fit_never_hang(programs, data):
    """Whatever mixture of calls: all workers come to their close, with errors or without."""
    calls = []
    for program in programs:
        barriers = 0
        seen = set()
        mine = []
        for call in program:
            if call == "barrier":
                barriers += 1
                mine.append([("barrier", barriers, None)])
            elif call not in seen:
                seen.add(call)
                mine.append([("init", call[-1], "same")])
        calls.append([*mine, [("close", 1, None)]])
    job = Job(calls)
    job.run(data)
    for worker in range(len(calls)):
        assert not job.waiting[worker], f"worker {worker} waits for ever for {job.waiting[worker]}"
        assert job.replies[worker]["close", 1][-1].error is None
