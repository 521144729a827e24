"""Placements in words: reasons that no store of the tests of the log has (tests/unit/observe/test_log.py)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from mpikv import Config
from mpikv.codecs.compression import wire_of
from mpikv.placement import described
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.owners import place_at_owners
from mpikv.placement.place import place

KEY = KeyInfo("w", 0, (1000,), np.dtype(np.float32))
LARGE = KEY._replace(shape=(2_000_000,))
HALF = LARGE._replace(dtype=np.dtype(np.float16))
FORCED = KEY._replace(codec='{"force": true, "type": "fp16"}')
MEMBERS = {
    "alone": Members(("a",), (0,)),
    "here": Members(("a", "a"), (0, 1)),
    "no memory": Members(("a", "a"), (0, 1), memory=False),
    "off": Members(("a", "a"), (0, 1), config=Config(shared_memory="off")),
    "apart": Members(("a", "b"), (0, 1)),
    "native": Members(("a", "b"), (0, 1), config=Config(algorithm="native")),
    "owners": Members(("a", "b"), (0, 1), config=Config(algorithm="owners")),
    "servers": Members(("a", "a", "b", "b"), (0, 2), (1, 3)),
    "going on": Members(("a", "a", "b", "b"), (0, 2), (1, 3), synchronous=False, config=Config(on_failure="continue")),
}


@pytest.mark.parametrize(
    ("members", "info", "options", "says"),
    [
        ("here", KEY, {"fits": False}, "path ring over 2 workers on 1 host, since the shared memory of a host is full"),
        ("no memory", KEY, {}, "path ring over .*, since the ranks of a host cannot share any"),
        ("alone", KEY, {}, "path ring over 1 worker on 1 host, since there is one worker"),
        ("native", KEY, {}, "path native over 2 workers on 2 hosts, since MPIKV_ALGORITHM=native"),
        ("off", LARGE, {}, "path ring over 2 workers on 1 host, since MPIKV_SHARED_MEMORY=off"),
        ("apart", HALF, {"load_bytes": [0, 0]}, "path owners over .*, since half precision travels in two bytes"),
        ("here", FORCED, {"load_bytes": [0, 0]}, "path owners over 2 workers on 1 host, since 'force' asks for it"),
        ("owners", LARGE, {"load_bytes": [0, 0]}, "path owners over 2 workers .*, since MPIKV_ALGORITHM=owners"),
        (
            *("servers", KEY, {"load_bytes": [1, 0]}),
            r"all of it on server 1 \(rank 3 on b\), since it held the fewest bytes",
        ),
        (
            *("servers", LARGE, {"load_bytes": [0, 0], "whole": True}),
            "all of it .* its optimizer needs all of it at one place",
        ),
        ("servers", LARGE, {"load_bytes": [0, 0]}, "cut evenly over 2 servers, since it has 1000000 elements or more"),
        (
            *("going on", LARGE, {"load_bytes": [1, 0]}),
            r"all of it on server 1 \(rank 3 on b\), and for its death on server 0 \(rank 1 on a\)",
        ),
    ],
)
def test_a_path_and_why(members: str, info: KeyInfo, options: dict[str, Any], says: str) -> None:
    store, wire = MEMBERS[members], wire_of(info)
    found = place_at_owners(store, info, wire, **options) if "load_bytes" in options else place(store, info, **options)
    text = described.line(store, info, found, wire)
    head = f"key 'w' ({described.size(info.n_bytes)} {info.dtype}): "
    codec = "no codec" if info.codec == "none" else f"codec {info.codec} travels encoded"
    assert re.fullmatch(f"{re.escape(head)}{says}; {re.escape(codec)}", text), text
