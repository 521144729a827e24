"""The rules of the agreement of all workers: what worker 0 makes of what each of them has brought under a topic.

Pure functions. A rule gets what all workers brought, in their order. It returns the result, as JSON, or raises a
Disagreement, which becomes the same error on every worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpikv.codecs.identity import IDENTITY
from mpikv.common.checks import shown
from mpikv.errors import ConfigError, MpikvError, ShapeMismatch
from mpikv.placement.keys import Key
from mpikv.placement.labels import FACTOR, Label
from mpikv.session.agreement import ROUND, STOP, Disagreement, Name, Rule, grouped
from mpikv.spaces.named import HOST

MOVE = "move keys"  # the topic under which keys get other owners


def _describe_init(payload: Sequence[Any]) -> str:
    shape, dtype, codec, space, sparse = payload
    form = f"{dtype} {tuple(shape)}" + (f" as {codec}" if codec != IDENTITY.name else "")
    return form + (f" in {space} memory" if space != HOST else "") + (", row-sparse" if sparse else "")


def _alike(
    kind: type[MpikvError],
    what: str,
    values: Sequence[Any],
    labels: Sequence[str],
    shown_as: Callable[[Any], Any] = str,
) -> None:
    """Raise a Disagreement that says who brought what, unless all have brought the same."""
    if any(value != values[0] for value in values):
        raise Disagreement(kind, f"{what} on different workers: {grouped([*map(shown_as, values)], labels)}")


def _init_rule(name: Name, payloads: Sequence[Any], labels: Sequence[str]) -> Any:
    what = f"init of key {shown(name)}"
    spaces = [f"{space} memory" for *_, space, _ in payloads]
    if len(set(spaces)) > 1 and all([*one[:3], one[4]] == [*payloads[0][:3], payloads[0][4]] for one in payloads):
        raise Disagreement(
            ShapeMismatch,
            f"{what} in different kinds of memory on different workers: {grouped(spaces, labels)}. Let all of them "
            "bring arrays of one kind; in a store of a device type each worker needs a GPU, or none has one",
        )
    _alike(ShapeMismatch, f"{what} with different values", payloads, labels, _describe_init)
    return payloads[0]


def _optimizer_rule(_name: Name, payloads: Sequence[Any], labels: Sequence[str]) -> None:
    """Equal optimizers for the same keys; the error names only what differs."""
    what, configs = "set_optimizer with different optimizers", [json.loads(config) for config, _ in payloads]
    facts: list[dict[str, Any]] = [
        {"optimizer": config.get("name"), "keys": keys, **config.get("attributes", {})}
        for config, (_, keys) in zip(configs, payloads, strict=True)
    ]
    kinds = [{"optimizer": fact["optimizer"], "keys": fact["keys"]} for fact in facts]
    compared = facts if all(kind == kinds[0] for kind in kinds) else kinds
    for name in compared[0]:
        _alike(ConfigError, what, [fact.get(name) for fact in compared], labels, f"{name}={{!r}}".format)
    _alike(ConfigError, what, payloads, labels, lambda payload: payload[0])


def _empty_rule(_name: Name, payloads: Sequence[Any], labels: Sequence[str]) -> Any:
    """All allocate the same, where worker 0 says."""
    _alike(ShapeMismatch, "empty or zeros with different arguments", [text for text, _ in payloads], labels)
    return payloads[0][1]


def _skip_rule(_name: Name, payloads: Sequence[Any], labels: Sequence[str]) -> None:
    what = "a step with different parameters frozen"
    _alike(ConfigError, what, payloads, labels, lambda own: ", ".join(map(str, own)) or "none")


def _move_rule(_name: Name, payloads: Sequence[Any], _labels: Sequence[str]) -> None:
    """All have pushed the keys that other owners get, or that are cut anew, equally often."""
    for own in zip(*payloads, strict=True):
        key, pushes = own[0][0], [n for _, n in own]
        if len(set(pushes)) > 1:
            raise Disagreement(
                ConfigError,
                f"set_optimizer: key {shown(key)} was pushed {', '.join(map(str, pushes))} times by workers 0, 1, ...; "
                "all have to push a round before an optimizer of another kind takes the key",
            )


def refusal(key: Key, round_: int, labels: Sequence[Label], names: Sequence[str]) -> str:
    """The text of the error for a round of a key that workers have pushed under different labels (labels.py)."""
    facts: list[dict[str, Any]] = [{"op": label.op, **json.loads(label.text)} for label in labels]
    name = _first_difference(facts)
    kind = "another op of pushpull" if name == "op" else "different attributes of the optimizer"
    why = ", which integers cannot be scaled by" if name == FACTOR else ""
    brought = grouped([f"{name}={fact.get(name)!r}" for fact in facts], names)
    return f"key {key!r}, round {round_}: {kind} on different workers{why}: {brought}; nothing was updated"


def _first_difference(facts: Sequence[Mapping[str, Any]]) -> str:
    for name in {name: None for fact in facts for name in fact}:
        if any(fact.get(name) != facts[0].get(name) for fact in facts):
            return name
    return "attributes"  # one is there on some workers alone


def _round_rule(_name: Name, payloads: Sequence[Any], names: Sequence[str]) -> Any:
    """A round of a key whose labels are known to differ: what differs."""
    key, round_, _ = payloads[0]
    raise Disagreement(ConfigError, refusal(key, round_, [Label(*label) for *_, label in payloads], names))


def _close_rule(_name: Name, payloads: Sequence[Any], labels: Sequence[str]) -> Any:
    """Every worker has pushed every key equally often, where rounds need all of them; and what differs in the last
    updates that workers made by themselves.
    """
    counts = [dict(pushes) for pushes, _ in payloads]
    unmatched = []
    for key_id in sorted({key_id for count in counts for key_id in count}):
        pushes = [count.get(key_id, 0) for count in counts]
        if min(pushes) != max(pushes):
            short = [label for label, n in zip(labels, pushes, strict=True) if n == min(pushes)]
            unmatched.append((key_id, max(pushes), min(pushes), ", ".join(short)))
    updates = [{name: value for _, update in own for name, value in update.items()} for _, own in payloads]
    text = ""
    if any(own != updates[0] for own in updates):
        name = _first_difference(updates)
        brought = grouped([f"{name}={own.get(name)!r}" for own in updates], labels)
        text = f"close: different attributes of the optimizer on different workers: {brought}"
    return unmatched, text


RULES: Mapping[str, Rule] = {
    "init": _init_rule,
    "set_optimizer": _optimizer_rule,
    "empty": _empty_rule,
    "skip": _skip_rule,
    MOVE: _move_rule,
    ROUND: _round_rule,
    STOP[0]: lambda _name, reads, _labels: 1 + max(reads),
    "close": _close_rule,
}
