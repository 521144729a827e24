"""The agreement of the workers, message by message; tests/property/test_agreement_property.py shuffles them."""

from __future__ import annotations

import itertools

from mpikv.errors import MpikvError, ShapeMismatch
from mpikv.session.agreement import Agreement, Disagreement, grouped


def equal(name, payloads, labels):
    if len(set(map(str, payloads))) > 1:
        raise Disagreement(ShapeMismatch, f"{name}: {grouped(payloads, labels)}")
    return payloads[0]


def make(workers=2, reserve=None):
    labels = [f"worker {i} on h{i}" for i in range(workers)]
    numbers = itertools.count()
    rules = {"init": equal, "set_optimizer": equal}
    return Agreement(labels, rules, reserve or (lambda name, payload: [next(numbers), payload]))


def finals(verdicts):
    return {(v.worker, v.topic, v.name): v.error or v.result for v in verdicts if v.final}


def test_a_verdict_for_all_when_the_last_one_comes():
    agreement = make(3)
    assert agreement.propose(0, [("init", "w", "x")]) == []
    assert agreement.propose(2, [("init", "w", "x")]) == []
    verdicts = agreement.propose(1, [("init", "w", "x")])
    assert finals(verdicts) == {(worker, "init", "w"): [0, "x"] for worker in range(3)}
    assert len(verdicts) == 3
    agreement.propose(1, [("outcome", 1, "of 1")])  # without a rule the payload of worker 0 counts
    agreement.propose(2, [("outcome", 1, "of 2")])
    assert set(finals(agreement.propose(0, [("outcome", 1, "of 0")])).values()) == {"of 0"}


def test_a_disagreement_goes_to_all_with_who_brought_what():
    agreement = make(3)
    for worker, payload in ((1, "y"), (0, "x")):
        agreement.propose(worker, [("init", "w", payload)])
    found = finals(agreement.propose(2, [("init", "w", "x")]))
    text = "w: worker 0 on h0, worker 2 on h2: x; worker 1 on h1: y"
    assert found == {(worker, "init", "w"): ("ShapeMismatch", text) for worker in range(3)}
    for worker in range(2):  # and the name is free again
        assert agreement.propose(worker, [("init", "w", "z")]) == []
    assert len(finals(agreement.propose(2, [("init", "w", "z")]))) == 3


def test_the_same_thing_twice():
    agreement = make(2)
    agreement.propose(0, [("init", "w", "x")])
    found = finals(agreement.propose(0, [("init", "w", "x")]))
    assert found[0, "init", "w"][0] == "MpikvError"
    assert "twice" in found[0, "init", "w"][1]


def test_no_room_for_a_key():
    """The refusal of `reserve` reaches every worker, whenever it comes."""

    def reserve(name, payload):
        raise Disagreement(MpikvError, "no tags left")

    agreement = make(2, reserve)
    for worker in (0, 1):
        found = finals(agreement.propose(worker, [("init", "w", "x")]))
        assert found[worker, "init", "w"] == ("MpikvError", "no tags left")
    assert len(finals(agreement.propose(0, [("barrier", 1, None)]))) == 0
    assert len(finals(agreement.propose(1, [("barrier", 1, None)]))) == 2
